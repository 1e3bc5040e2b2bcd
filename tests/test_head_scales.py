"""`scale` with one number for each head, as in Swin Transformer V2."""

from __future__ import annotations

from typing import Any

import httpx
import numpy as np
import pytest

from attention_service import attend
from tests.helpers import messages, oip
from tests.helpers.backends import BACKENDS, compute_as_if_large
from tests.helpers.rpc import remote
from tests.helpers.wire import MEDIA_TYPES, read, write

# One query and two keys, whose scores are 2 and 0 in both heads.
SMALL: dict[str, Any] = {
    "query": [[[1.0, 1.0]], [[2.0, 0.0]]],
    "key": [[[1.0, 1.0], [1.0, -1.0]], [[1.0, 5.0], [0.0, 3.0]]],
    "value": [[[1.0], [0.0]], [[1.0], [0.0]]],
    "layout": "hld",
}
# exp(2 · 0.5) / (exp(2 · 0.5) + 1), and the same for -1.
WEIGHTS = [np.e / (np.e + 1), np.exp(-2) / (np.exp(-2) + 1)]


@pytest.mark.parametrize("media_type", MEDIA_TYPES)
def test_two_heads_by_hand(client: httpx.Client, media_type: str) -> None:
    fields = SMALL | {"scale": [0.5, -1.0]}
    response = client.post("/attention", content=write(fields, media_type), headers={"Content-Type": media_type})
    answer = read(response.content, media_type)
    np.testing.assert_allclose(np.ravel(answer["output"]), WEIGHTS, rtol=1e-14)
    assert answer["metadata"]["scale"] == [0.5, -1.0]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("tile", [None, 1, 5, 2**20])
def test_a_scale_for_each_head_is_that_of_the_head_by_itself(
    backend: str, tile: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if tile is not None:
        compute_as_if_large(monkeypatch, tile)
    random = np.random.default_rng(1)
    query, key, value = (random.normal(size=(2, heads, length, 4)) for heads, length in ((4, 3), (2, 6), (2, 6)))
    scales = [0.3, 0.0, -2.0, 1e-9]
    stages = ["scores", "scaled_scores", "capped_scores", "masked_scores", "attention_weights", "logsumexp"]
    options: dict[str, Any] = {"is_causal": True, "query_offset": 1, "softcap": 2.0, "backend": backend}
    for include in (stages, stages[1:], ["attention_weights"], []):
        found = attend(query, key, value, scale=scales, include=include, **options)
        assert found.metadata.scale == scales
        for head, scale in enumerate(scales):
            one = slice(head, head + 1), slice(head // 2, head // 2 + 1)
            alone = attend(query[:, one[0]], key[:, one[1]], value[:, one[1]], scale=scale, include=include, **options)
            for name in alone:
                np.testing.assert_allclose(found[name][:, one[0]], alone[name], rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize(
    ("scale", "code", "expected", "got"),
    [
        ([1.0] * 3, "shape_mismatch", "(2,), one number a head", "(3,)"),
        ([[1.0, 2.0]], "shape_mismatch", "(2,), one number a head", "(1, 2)"),
        ([True, False], "invalid_array", "numbers", "booleans"),
        ([1.0, "x"], "invalid_array", "a number", "string"),
        ("x", "invalid_value", "a number, or an array of numbers", "string"),
        (True, "invalid_value", "a number, or an array of numbers", "true"),
        ({"dtype": "float32", "shape": [2], "data": "AACAfwAAgD8="}, "invalid_array", "a finite number", "inf"),
    ],
)
def test_wrong_scales_are_refused(client: httpx.Client, scale: Any, code: str, expected: str, got: str) -> None:
    response = client.post("/attention", json=SMALL | {"scale": scale})
    assert response.status_code == 422
    [error] = response.json()["errors"]
    assert error["pointer"].startswith("/scale")
    assert expected in error["expected"]
    assert got in error["got"]
    assert response.json()["code"] == code


def test_a_scale_that_the_type_cannot_hold_is_an_overflow(client: httpx.Client) -> None:
    response = client.post("/attention", json=SMALL | {"scale": [1.0, 1e300], "dtype": "float32"})
    assert (response.json()["code"], response.json()["errors"][0]["pointer"]) == ("overflow", "/scale/1")


def test_metadata_of_the_inference_protocol_have_commas(client: httpx.Client) -> None:
    arrays = {name: np.array(value) for name, value in SMALL.items() if name != "layout"} | {"scale": np.ones(2)}
    body, headers = oip.request_of(arrays | {"layout": "hld"}, False)
    answer = oip.read(client.post(oip.INFER, content=body, headers=headers))
    assert answer["rest"]["parameters"]["scale"] == "1.0,1.0"
    with remote() as server:
        found = server.infer(messages.request(arrays, {"layout": "hld"}))
    np.testing.assert_array_equal(found["output"], answer["output"])


def test_an_array_without_axes_is_one_number(client: httpx.Client) -> None:
    one: dict[str, Any] = {name: np.array(value) if name != "layout" else value for name, value in SMALL.items()}
    media_type = "application/x-npz"
    body = write(one | {"scale": np.array(0.5)}, media_type)
    answer = client.post("/attention", content=body, headers={"Content-Type": media_type, "Accept": "application/json"})
    assert answer.json()["metadata"]["scale"] == 0.5
    assert attend(**one, scale=np.float32(0.5)).metadata.scale == 0.5
