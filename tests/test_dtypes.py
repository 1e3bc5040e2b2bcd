"""Dtypes: their choice, the dtype of computation, the dtype of results; and typed arrays in JSON."""

from __future__ import annotations

import base64
import json
from typing import Any

import httpx
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis.extra import numpy as hnp

from attention_service.codecs.element_types import JSON_TYPES
from attention_service.codecs.json.reader import decode as decode_json
from attention_service.codecs.typed_arrays import chunks, decode
from tests.test_layouts import post

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
EYE = np.eye(2)


def encode(array: np.ndarray) -> dict[str, Any]:
    """A typed array as the service writes it."""
    return dict(json.loads(b"".join(chunks(array))))


def typed(array: Any, dtype: Any) -> dict[str, Any]:
    return encode(np.asarray(array).astype(dtype))


def test_a_typed_array_has_the_bytes_of_the_format() -> None:
    """1.0 and -2.0 in float32 are 0000803f and 000000c0, little-endian."""
    data = base64.b64encode(bytes.fromhex("0000803f000000c0")).decode()
    array = decode({"dtype": "float32", "shape": [1, 2], "data": data}, "")
    assert (array.dtype, array.tolist()) == (np.dtype(np.float32), [[1.0, -2.0]])
    assert encode(array) == {"dtype": "float32", "shape": [1, 2], "data": data}


@pytest.mark.parametrize("name", JSON_TYPES)
def test_every_dtype_is_encoded_and_decoded_bit_for_bit(name: str) -> None:
    random = np.random.default_rng(7)
    content = random.integers(0, 2 if name == "bool" else 256, 240, dtype=np.uint8).tobytes()
    array = np.frombuffer(content, JSON_TYPES[name]).reshape(-1, 5, 3)
    for view in (array, array.T, array[::2]):
        body = json.dumps({"a": encode(view)}).encode()
        back: np.ndarray = decode_json(body).fields["a"]
        assert (back.dtype, back.shape) == (view.dtype, view.shape)
        assert back.tobytes() == view.tobytes()


@given(hnp.arrays(np.float64, hnp.array_shapes(min_dims=0, max_dims=4, min_side=0)))
def test_any_shape_is_encoded_and_decoded(array: np.ndarray) -> None:
    back = decode(encode(array), "")
    assert back.shape == array.shape
    assert back.tobytes() == array.tobytes()


@pytest.mark.parametrize(
    ("types", "expected"),
    [
        ({"query": "list", "key": "list", "value": "list"}, "float64"),
        ({"query": np.float32, "key": "list", "value": "list"}, "float32"),
        ({"query": np.float16, "key": np.float32, "value": "list"}, "float32"),
        ({"query": np.float32, "key": np.float64, "value": np.float16}, "float64"),
        ({"query": np.float16, "key": np.float16, "value": "list"}, "float16"),
        ({"query": BFLOAT16, "key": "list", "value": "list"}, "bfloat16"),
        ({"query": np.float16, "key": BFLOAT16, "value": "list"}, "float32"),
        ({"query": np.int64, "key": np.int32, "value": "list"}, "float64"),
        ({"query": np.int64, "key": np.float32, "value": np.int32}, "float32"),
    ],
)
def test_the_widest_typed_array_sets_the_dtype(client: httpx.Client, types: dict[str, Any], expected: str) -> None:
    request = {name: EYE.tolist() if kind == "list" else typed(EYE, kind) for name, kind in types.items()}
    assert post(client, **request)["metadata"]["dtype"] == expected
    assert post(client, **request, dtype="float32")["metadata"]["dtype"] == "float32"


def test_the_kv_cache_affects_the_dtype_and_other_fields_do_not(client: httpx.Client) -> None:
    past = {"past_key": typed(np.ones((1, 1, 2)), np.float16), "past_value": [[[1, 2]]]}
    other = {"scale": 1, "bias": typed(np.zeros(3), np.float64)}
    assert post(client, input=EYE.tolist(), **past, **other)["metadata"]["dtype"] == "float16"


def arrays(answer: dict[str, Any]) -> dict[str, np.ndarray]:
    return {name: decode(value, "") for name, value in answer.items() if name != "metadata"}


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bfloat16"])
def test_every_output_has_its_documented_dtype(client: httpx.Client, dtype: str) -> None:
    computed = "float64" if dtype == "float64" else "float32"
    include = ["attention_weights", "scores", "scaled_scores", "capped_scores", "masked_scores", "logsumexp", "entropy",
               "received", "query", "key", "value", "head_outputs", "present_key", "present_value",
               "hidden_by"]  # fmt: skip
    answer = arrays(post(client, input=EYE.tolist(), dtype=dtype, include=include, encoding="base64"))
    own = {"output", "attention_weights", "query", "key", "value", "head_outputs", "present_key", "present_value"}
    for name, array in answer.items():
        kind = "int32" if name == "hidden_by" else dtype if name in own else computed
        assert array.dtype.name == kind, name


def test_float16_is_computed_in_float32(client: httpx.Client) -> None:
    """0.1 in float16 is 0.0999755859375; its square needs more bits than float16 has."""
    answer = post(client, input=[[0.1]], dtype="float16", include=["scores", "query"])
    assert np.float32(answer["scores"][0][0]) == np.float32(0.0999755859375**2)
    assert answer["query"] == [[0.099975586]]  # the shortest text of this float32


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_16_bit_output_is_the_rounded_float32_output(client: httpx.Client, dtype: str) -> None:
    random = np.random.default_rng(3)
    kind = JSON_TYPES[dtype]
    halves = {name: random.normal(size=(5, 4)).astype(kind) for name in ("query", "key", "value")}
    half = arrays(post(client, **{name: encode(x) for name, x in halves.items()}, encoding="base64"))
    single = arrays(
        post(client, **{name: encode(x.astype(np.float32)) for name, x in halves.items()}, encoding="base64")
    )
    for name in ("output", "attention_weights"):
        np.testing.assert_array_equal(half[name], single[name].astype(kind))


def test_bfloat16_is_returned_as_lists(client: httpx.Client) -> None:
    answer = post(client, input=[[1.0, 0.1]], dtype="bfloat16")
    assert answer["output"] == [[1.0, 0.100097656]]  # 0.1 in bfloat16, the shortest text for the float32


def test_minus_infinity_is_null_in_lists_and_kept_in_base64(client: httpx.Client) -> None:
    request = {"input": EYE.tolist(), "mask": [True, False], "include": ["masked_scores"], "scale": 1}
    assert post(client, **request)["masked_scores"] == [[1, None], [0, None]]
    answer = arrays(post(client, **request, encoding="base64"))
    np.testing.assert_array_equal(answer["masked_scores"], [[1, -np.inf], [0, -np.inf]])


def test_top_weights_are_returned_in_base64(client: httpx.Client) -> None:
    answer = post(client, input=EYE.tolist(), top_k=1, encoding="base64")
    indices = decode(answer["top_weights"]["indices"], "")
    assert (indices.dtype, indices.tolist()) == (np.dtype(np.int64), [[0], [1]])


def test_masks_biases_and_integers_may_be_typed_arrays(client: httpx.Client) -> None:
    answer = post(
        client,
        input=EYE.tolist(),
        mask=typed([[True, False], [True, True]], np.bool_),
        bias=typed([0, -np.inf], np.float32),
        query_offset=typed(0, np.int32),
        is_causal=True,
        select_queries=typed([1], np.int64),
    )
    assert answer["attention_weights"] == [[1, 0]]


def test_an_empty_kv_cache_may_be_a_list_or_a_typed_array(client: httpx.Client) -> None:
    plain = post(client, input=EYE.tolist(), include=["present_key"])
    empties: list[Any] = [[[]], encode(np.zeros((1, 0, 2)))]
    for empty in empties:
        answer = post(client, input=EYE.tolist(), past_key=empty, past_value=empty, include=["present_key"])
        assert (answer["output"], answer["present_key"]) == (plain["output"], plain["present_key"])
