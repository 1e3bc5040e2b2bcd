"""A field that stands where no field is read is refused with the place where it belongs: none is dropped silently."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import grpc
import httpx
import numpy as np
import pytest
import safetensors.numpy

from attention_service.cli import main
from attention_service.errors import LayerUnavailable
from attention_service.layers.store import LayerStore
from attention_service.schemas.call import CallRequest
from attention_service.schemas.compare import CompareCallRequest, CompareRequest
from attention_service.schemas.heatmap import HeatmapOptions, HeatmapRequest
from attention_service.schemas.merge import MergeRequest
from attention_service.schemas.request import AttentionRequest
from tests.conftest import app, serving
from tests.helpers.layers import hashed
from tests.helpers.messages import request
from tests.helpers.oip import HEADER, INFER, tensor
from tests.helpers.rpc import remote
from tests.helpers.wire import SAFETENSORS

EYE: Final = np.eye(2)
ARRAYS: Final = {"query": EYE, "key": EYE, "value": EYE}
PARTS: Final = {"parts.0.output": EYE, "parts.0.logsumexp": np.zeros(2)}
CALL: Final = {f"arguments.{name}": np.ones((1, 2, 1, 4)) for name in "qkv"}
NAMED: Final = {"call": "flash_attn.flash_attn_func"}
# Each operation: its path, its fields, its arrays, and what is no array.
OPERATIONS: Final[dict[str, tuple[str, Any, dict[str, np.ndarray], dict[str, Any]]]] = {
    "attention": ("/attention", AttentionRequest, ARRAYS, {}),
    "call": ("/attention/call", CallRequest, CALL, NAMED),
    "compare": ("/attention/compare", CompareRequest, ARRAYS | {"actual.output": EYE}, {}),
    "compare a call": (
        "/attention/call/compare",
        CompareCallRequest,
        CALL | {"actual.output": np.ones((1, 2, 1, 4))},
        NAMED,
    ),
    "heatmap": ("/attention/heatmap", HeatmapRequest, ARRAYS, {}),
    "merge": ("/attention/merge", MergeRequest, PARTS, {}),
}


# Options of an object that look like parameters of the address.
DRAWN: Final = {"/attention/heatmap": tuple(HeatmapOptions.model_fields)}


@pytest.fixture(scope="module")
def client() -> Iterator[httpx.Client]:
    with serving(app()) as found:
        yield found


@pytest.mark.parametrize("operation", OPERATIONS)
def test_each_field_in_the_metadata_of_safetensors_is_refused(client: httpx.Client, operation: str) -> None:
    path, schema, arrays, fields = OPERATIONS[operation]

    def send(**metadata: str) -> httpx.Response:
        body = bytes(safetensors.numpy.save(arrays, metadata | ({"request": json.dumps(fields)} if fields else {})))
        return client.post(path, content=body, headers={"content-type": SAFETENSORS})

    # Twice, as the plan of a request is kept.
    for _ in range(2):
        assert send(format="pt", epoch="3").status_code == 200
        for name in (*schema.model_fields, "window.left", "projection.query.weight"):
            if name.partition(".")[0] not in schema.model_fields:
                continue
            found = send(format="pt", **{name: "true"})
            (fault,) = found.json()["errors"]
            assert (found.status_code, fault["code"]) == (422, "unknown_field")
            assert fault["pointer"] == "/__metadata__"
            assert fault["expected"] == f"'{name}' in the JSON text request of __metadata__"


def test_all_fields_at_fault_are_named(client: httpx.Client) -> None:
    body = bytes(safetensors.numpy.save(ARRAYS, {"is_causal": "true", "softcap": "0.1"}))
    found = client.post("/attention", content=body, headers={"content-type": SAFETENSORS}).json()
    named = {fault["expected"].partition(" in ")[0] for fault in found["errors"]}
    assert named == {"'is_causal'", "'softcap'"}


def test_metadata_of_many_keys_are_refused(client: httpx.Client) -> None:
    body = bytes(safetensors.numpy.save(ARRAYS, {str(n): "" for n in range(300)}))
    assert client.post("/attention", content=body, headers={"content-type": SAFETENSORS}).status_code == 422


@pytest.mark.parametrize("operation", OPERATIONS)
def test_fields_in_the_query_of_the_address_are_refused(client: httpx.Client, operation: str) -> None:
    path, schema, arrays, fields = OPERATIONS[operation]
    body = bytes(safetensors.numpy.save(arrays, {"request": json.dumps(fields)}))
    refused = {f"?{name}=1": 422 for name in (*schema.model_fields, *DRAWN.get(path, ()))}
    for query, status in {"": 200, "?api-version=1": 200, "?a=1&dtype=float32": 422, **refused}.items():
        found = client.post(path + query, content=body, headers={"content-type": SAFETENSORS})
        assert found.status_code == status, query
    assert "in the body, got it in the address" in found.json()["detail"]


@pytest.mark.parametrize("is_binary", [False, True])
def test_fields_beside_the_parameters_of_the_protocol_are_refused(client: httpx.Client, is_binary: bool) -> None:
    inputs = [tensor(name, array, is_binary) for name, array in ARRAYS.items()]
    tail = b"".join(data for _, data in inputs)

    def send(message: dict[str, Any]) -> tuple[int, str]:
        text = json.dumps(message).encode()
        found = client.post(INFER, content=text + tail, headers={HEADER: str(len(text))} if is_binary else {})
        return found.status_code, found.text

    right: dict[str, Any] = {"inputs": [entry for entry, _ in inputs], "outputs": [{"name": "output"}]}
    assert send(right | {"own": 1})[0] == 200
    entry, *others = right["inputs"]
    own = entry.get("parameters", {})
    for name in AttentionRequest.model_fields:
        wrong: list[dict[str, Any]] = [
            {name: 1},
            {"inputs": [entry | {name: 1}, *others]},
            {"inputs": [entry | {"parameters": own | {name: 1}}, *others]},
            {"outputs": [{"name": "output", name: 1}]},
            {"outputs": [{"name": "output", "parameters": {name: 1}}]},
        ]
        for changes in wrong:
            status, text = send(right | changes)
            assert (status, f"'{name}' in the parameters of the request" in text) == (422, True), changes


@pytest.mark.parametrize("raw", [False, True])
def test_fields_beside_the_parameters_of_a_message_are_refused(raw: bool) -> None:
    with remote() as server:
        message = request(ARRAYS, raw=raw)
        message.inputs[1].parameters["own"].bool_param = True
        server.infer(message)
        message.inputs[1].parameters["is_causal"].bool_param = True
        with pytest.raises(grpc.RpcError) as error:
            server.infer(message)
        assert "'is_causal' in the parameters of the request" in str(error.value.details())
        message = request(ARRAYS, outputs=("output",), raw=raw)
        message.outputs[0].parameters["top_k"].int64_param = 1
        with pytest.raises(grpc.RpcError) as error:
            server.infer(message)
        assert "/outputs/0: expected 'top_k'" in str(error.value.details())


@pytest.mark.parametrize("command", [["compare"], ["heatmap", "-o", "-"]])
def test_files_of_the_command_line_are_read_alike(
    command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "request.safetensors"
    safetensors.numpy.save_file(ARRAYS, path, {"is_causal": "true"})
    try:
        status = main([command[0], str(path), *command[1:]])
    except SystemExit as error:
        status = int(error.code or 0)
    assert status
    assert "'is_causal' in the JSON text request of __metadata__" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["is_causal", "window.left"])
def test_metadata_of_a_stored_layer_have_no_fields(tmp_path: Path, name: str) -> None:
    weight = {"projection.query.weight": np.eye(4)}
    for metadata, error in (({"format": "pt"}, ""), ({"format": "pt", name: "true"}, f"has '{name}' in __metadata__")):
        hashed(tmp_path, bytes(safetensors.numpy.save(weight, metadata)))
        (described,) = LayerStore(tmp_path, 2**30).describe_all()
        assert error in (described.error or "")
        assert bool(error) == bool(described.error)
        if error:
            with pytest.raises(LayerUnavailable, match=error):
                LayerStore(tmp_path, 2**30).get("bad")
        else:
            LayerStore(tmp_path, 2**30).get("bad")


@pytest.mark.torch
def test_fields_beside_the_request_in_a_file_of_torch_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    torch = pytest.importorskip("torch")
    asked = {name: torch.eye(2) for name in ARRAYS}
    for beside, text in (
        ({"output": torch.eye(2), "epoch": 3}, ""),
        ({"is_causal": True}, "'is_causal' in the dict request"),
    ):
        torch.save({"request": asked} | beside, tmp_path / "request.pt")
        main(["compare", str(tmp_path / "request.pt")])
        error = capsys.readouterr().err
        assert text in error
        assert bool(text) == bool(error)
