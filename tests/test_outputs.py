"""Every output of `include`, on every path, in every wire format, also with fully masked rows.

Expected numbers are the definition, written in NumPy.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest

from attention_service import attend
from attention_service.attention.outputs import FORWARD, OUTPUTS
from attention_service.attention.spec import Output
from attention_service.cli import main
from tests.helpers import messages, oip, wire
from tests.helpers.backends import BACKENDS, compute_as_if_large
from tests.helpers.rpc import Remote, remote
from tests.test_encoding import untyped

# How a transport sends the fields of a request, and returns the results.
Send = Callable[[Remote, dict[str, Any]], dict[str, Any]]
B, H, Q, K, D = 2, 2, 3, 5, 4
NAMES: tuple[str, ...] = FORWARD

# The bits of hidden_by (docs/attention.md).
BITS = {"is_causal": 128, "mask": 1}
VARIANTS: dict[str, tuple[dict[str, Any], np.ndarray]] = {
    "all visible": ({}, np.ones((Q, K), bool)),
    "causal, the first row masked": (
        {"is_causal": True, "query_offset": -1},
        np.arange(K) <= np.arange(Q)[:, None] - 1,
    ),
    "a masked row in the middle": ({"mask": [[True] * K, [False] * K, [True, False] * 2 + [True]]}, np.array(
        [[True] * K, [False] * K, [True, False] * 2 + [True]])),
}  # fmt: skip


def request() -> dict[str, Any]:
    random = np.random.default_rng(3)
    return {name: random.normal(size=(B, length, H * D)) for name, length in (("query", Q), ("key", K), ("value", K))}


def expected(visible: np.ndarray, bit: int) -> dict[str, np.ndarray]:
    """Every output by its definition. bit: of the field that hides keys"""
    query, key, value = (x.reshape(B, -1, H, D).transpose(0, 2, 1, 3) for x in request().values())
    scores = query @ key.swapaxes(-1, -2)
    scaled = scores / np.sqrt(D)
    masked = np.where(visible, scaled, -np.inf)
    exponentials = np.exp(masked)
    sums = exponentials.sum(axis=-1, keepdims=True)
    weights = np.divide(exponentials, sums, out=np.zeros_like(exponentials), where=sums > 0)
    with np.errstate(divide="ignore"):
        logsumexp = np.log(sums[..., 0])
    logs = np.log(weights, out=np.zeros_like(weights), where=weights > 0)
    outputs = weights @ value
    return {
        "output": outputs.transpose(0, 2, 1, 3).reshape(B, Q, H * D),
        "attention_weights": weights,
        "weights_without_sinks": weights,
        "scores": scores,
        "scaled_scores": scaled,
        "capped_scores": scaled,
        "masked_scores": masked,
        "hidden_by": np.broadcast_to(np.where(visible, 0, bit), masked.shape),
        "logsumexp": logsumexp,
        "entropy": -(weights * logs).sum(axis=-1),
        "received": weights.sum(axis=-2),
        "query": query,
        "key": key,
        "value": value,
        "head_outputs": outputs,
        "present_key": key,
        "present_value": value,
    }


def check(found: dict[str, Any], include: list[str], variant: str, *, is_json: bool = False) -> None:
    options, visible = VARIANTS[variant]
    right = expected(visible, sum(bit for name, bit in BITS.items() if name in options))
    for name in ("output", *include):
        array = np.array(found[name], dtype=np.float64)
        if is_json and name in ("masked_scores", "logsumexp"):  # JSON has null for minus infinity
            array = np.where(np.isnan(array), -np.inf, array)
        np.testing.assert_allclose(array, right[name], rtol=1e-12, atol=1e-13, err_msg=name)


def test_the_table_has_a_row_for_every_name() -> None:
    assert tuple(OUTPUTS) == get_args(Output)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("tile", [None, 1, 7, 2**20], ids=["default", "tiles of 1", "tiles of 7", "one tile"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_outputs_are_right_on_every_path(
    variant: str, tile: int | None, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    options, visible = VARIANTS[variant]
    if tile is not None:
        compute_as_if_large(monkeypatch, tile)
    for include in ([], *([name] for name in NAMES), list(NAMES)):
        result = attend(**request(), num_heads=H, include=include, backend=backend, **options)
        check(result.arrays, include, variant)
        assert result.metadata.fully_masked_rows == B * H * int((~visible.any(axis=-1)).sum())


def by_json(server: Remote, fields: dict[str, Any]) -> dict[str, Any]:
    return dict(server.http.post("/attention", json=json.loads(wire.write(fields, wire.JSON))).json())


def by_base64(server: Remote, fields: dict[str, Any]) -> dict[str, Any]:
    answer = by_json(server, fields | {"encoding": "base64"})
    return {name: untyped(value) for name, value in answer.items() if name != "metadata"}


def binary(media_type: str) -> Send:
    def send(server: Remote, fields: dict[str, Any]) -> dict[str, Any]:
        body, head = wire.write(fields, media_type), {"Content-Type": media_type}
        return wire.read(server.http.post("/attention", content=body, headers=head).content, media_type)

    return send


def inference(is_binary: bool) -> Send:
    def send(server: Remote, fields: dict[str, Any]) -> dict[str, Any]:
        body, headers = oip.request_of(fields, is_binary)
        return oip.read(server.http.post(oip.INFER, content=body, headers=headers))

    return send


def by_grpc(server: Remote, fields: dict[str, Any]) -> dict[str, Any]:
    return server.infer(messages.request(*oip.arrays_of(fields)))


def by_grpc_with_outputs(server: Remote, fields: dict[str, Any]) -> dict[str, Any]:
    """As the protocol itself asks for outputs, in place of the parameter `include`."""
    arrays, parameters = oip.arrays_of({name: field for name, field in fields.items() if name != "include"})
    return server.infer(messages.request(arrays, parameters, outputs=("output", *fields["include"])))


TRANSPORTS: dict[str, Send] = {
    "JSON": by_json,
    "base64": by_base64,
    "npz": binary(wire.NPZ),
    "safetensors": binary(wire.SAFETENSORS),
    "inference in JSON": inference(False),
    "inference in binary": inference(True),
    "gRPC": by_grpc,
}


@pytest.fixture(scope="module")
def server() -> Iterator[Remote]:
    with remote() as found:
        yield found


# `outputs` names all that is returned: `tests/test_transports.py` leaves that to `top_k` and `gradients`.
WAYS = TRANSPORTS | {"gRPC with outputs": by_grpc_with_outputs}


@pytest.mark.parametrize("transport", WAYS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_outputs_are_right_in_every_transport(variant: str, transport: str, server: Remote) -> None:
    options, _ = VARIANTS[variant]
    for include in (*([name] for name in NAMES), list(NAMES)):
        fields = request() | options | {"num_heads": H, "include": include}
        found = WAYS[transport](server, fields)
        check(found, include, variant, is_json=transport == "JSON")
        if "hidden_by" in include and transport != "JSON":
            assert found["hidden_by"].dtype == np.int32


def test_outputs_are_right_on_the_command_line(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "request.json"
    variant = "a masked row in the middle"
    options, _ = VARIANTS[variant]
    file.write_bytes(wire.write(request() | options | {"num_heads": H, "include": list(NAMES)}, wire.JSON))
    assert main(["compute", str(file)]) == 0
    check(json.loads(capfd.readouterr().out), list(NAMES), variant, is_json=True)
