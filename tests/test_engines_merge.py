"""merge() and POST /attention/merge: results of parts of the keys give the result of all, with empty parts and sinks.

What is right is a softmax over all keys, written here, or by hand.
"""

from __future__ import annotations

import inspect
import json
import math
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import httpx
import ml_dtypes
import numpy as np
import pytest

from attention_service import attend, call, merge
from attention_service.errors import InvalidRequest
from attention_service.schemas.merge import MAX_PARTS, MergeRequest
from tests.conftest import app, serving, serving_freed
from tests.helpers.wire import JSON, MEDIA_TYPES, SAFETENSORS, read, write
from tests.test_operations import SVG, problem
from tests.test_requests_freed import assert_freed

Array = np.ndarray


def part(scores: Array, values: Array) -> tuple[Array, Array]:
    """Attention over some keys: scores (b, h, q, k), values (b, h, k, e). Without keys, output NaN and -inf."""
    if not scores.shape[-1]:
        return np.full((*scores.shape[:-1], values.shape[-1]), np.nan), np.full(scores.shape[:-1], -np.inf)
    weights = np.exp(scores)
    return weights @ values / weights.sum(-1, keepdims=True), np.log(weights.sum(-1))


@pytest.mark.parametrize("base", ["e", "2"])
@pytest.mark.parametrize("has_sinks", [True, False])
@pytest.mark.parametrize("layout", ["bhld", "blhd", "hld", "bld", "lbd", "ld", "dl", "bdl"])
def test_parts_give_the_softmax_over_all_keys(base: str, has_sinks: bool, layout: str) -> None:
    random = np.random.default_rng(0)
    for seed in range(10):
        h = int(random.integers(1, 4)) if "h" in layout else 1
        b = int(random.integers(1, 4)) if "b" in layout else 1
        scores, values = random.normal(size=(b, h, 5, 9)) * 4, random.normal(size=(b, h, 9, 3))
        sinks = random.normal(size=h) if has_sinks else None
        cuts = [0, *sorted(random.integers(0, 10, size=seed % 4)), 9]
        parts = [part(scores[..., i:j], values[..., i:j, :]) for i, j in pairwise(cuts)]
        total = np.exp(scores).sum(-1) + (0 if sinks is None else np.exp(sinks)[:, None])
        expected = np.exp(scores) @ values / total[..., None], np.log(total) / math.log(2 if base == "2" else math.e)
        dropped = tuple(axis for axis, letter in enumerate("bh") if letter not in layout)
        left = [letter for letter in "bhld" if letter in layout]

        def placed(output: Array, sums: Array, dropped: Any = dropped, left: Any = left) -> tuple[Array, Array]:
            return output.squeeze(dropped).transpose([left.index(x) for x in layout]), sums.squeeze(dropped)

        given = [placed(output, sums / math.log(2) if base == "2" else sums) for output, sums in parts]
        found = merge(given, logsumexp_base=base, sinks=sinks, layout=layout)
        for got, want in zip(found, placed(*expected), strict=True):
            np.testing.assert_allclose(got, want, rtol=1e-12)


def test_two_parts_by_hand() -> None:
    """Sums 1 and 3, and a sink of 4."""
    parts = [([[4.0, 0.0]], [0.0]), {"output": [[0.0, 8.0]], "logsumexp": [math.log(3)]}]
    assert merge(parts).output.tolist() == [pytest.approx([1, 6])]
    assert merge(parts).logsumexp.tolist() == pytest.approx([math.log(4)])
    found = merge(parts, sinks=[math.log(4)])
    assert found.output.tolist() == [pytest.approx([0.5, 3])]
    assert found.logsumexp.tolist() == pytest.approx([math.log(8)])


@pytest.mark.parametrize("empty", [-np.inf, np.inf])
@pytest.mark.parametrize("garbage", [np.nan, np.inf, 7.0])
def test_empty_parts_weigh_nothing_whatever_their_output(empty: float, garbage: float) -> None:
    """Minus infinity of most kernels, plus infinity of FlashAttention."""
    one, other = np.array([[2.0], [garbage]]), np.array([[garbage], [garbage]])
    found = merge([(one, np.array([5.0, empty])), (other, np.array([empty, empty]))])
    assert found.output.tolist() == [[2.0], [0.0]]
    assert found.logsumexp.tolist() == [5.0, -np.inf]
    found = merge([(one, np.array([5.0, empty])), (other, np.array([empty, empty]))], sinks=[1.0])
    assert found.logsumexp[1] == 1.0
    assert found.output[1] == 0


def test_large_numbers_do_not_overflow() -> None:
    huge = np.finfo(np.float64).max
    found = merge([([[huge]], [1e4]), ([[huge]], [1e4]), ([[-huge]], [-1e4])])
    assert found.output.tolist() == [[pytest.approx(huge)]]
    assert found.logsumexp.tolist() == [1e4 + math.log(2)]


def test_results_of_attend_are_parts() -> None:
    random = np.random.default_rng(1)
    query, key, value = (random.normal(size=(2, 3, 8, 4)).astype(np.float32) for _ in range(3))
    halves = [attend(query, key[:, :, n], value[:, :, n], include=["logsumexp"]) for n in (slice(0, 3), slice(3, 8))]
    found, whole = merge(halves), attend(query, key, value, include=["logsumexp"])
    assert found.output.dtype == found.logsumexp.dtype == np.float32
    np.testing.assert_allclose(found.output, whole.output, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(found.logsumexp, whole.logsumexp, rtol=1e-5)


@pytest.mark.parametrize("layout", [None, "lbd", "blhd"])
def test_results_of_calls_are_parts_whatever_their_axes(layout: Any) -> None:
    """As many queries as heads, so that no shape tells the axes of logsumexp, (h, q) of these functions."""
    random = np.random.default_rng(1)
    query, key, value = (random.normal(size=(n, 3, 4)) for n in (3, 8, 8))
    scores = np.einsum("qhd,khd->hqk", query, key) / 2
    output, sums = (x[0] for x in part(scores[None], value.swapaxes(0, 1)[None]))
    parts = []
    for n in (slice(0, 3), slice(3, 8)):
        arrays: dict[str, Any] = {"q": query, "k": key[n], "v": value[n]}
        if layout == "blhd":
            arrays = {name: array[None] for name, array in arrays.items()}
            parts.append(call("flash_attn.flash_attn_func", **arrays))
        else:
            bounds: dict[str, Any] = {"cu_seqlens_q": [0, 3], "cu_seqlens_k": [0, len(key[n])]}
            parts.append(call("flash_attn.flash_attn_varlen_func", **arrays, **bounds))
    found = merge(parts, layout=layout)
    np.testing.assert_allclose(found.output.reshape(3, 3, 4), output.swapaxes(0, 1), rtol=1e-12)
    wanted = sums.T if layout is None else sums
    np.testing.assert_allclose(found.logsumexp.reshape(3, 3), wanted, rtol=1e-12)


def test_types_are_those_of_the_outputs_or_asked_for() -> None:
    half = (np.ones((2, 3), ml_dtypes.bfloat16), np.ones(2, np.float32))
    assert [x.dtype.name for x in merge([half, half])] == ["bfloat16", "float32"]
    assert [x.dtype.name for x in merge([half, half], dtype="float16")] == ["float16", "float32"]
    assert [x.dtype.name for x in merge([([[1.0]], [1.0])])] == ["float64", "float64"]


ONE: dict[str, Any] = {"output": np.ones((2, 3)), "logsumexp": np.zeros(2)}


@pytest.mark.parametrize(
    ("fields", "pointer", "text"),
    [
        ({"parts": []}, "/parts", "at least 1"),
        ({"parts": [ONE] * (MAX_PARTS + 1)}, "/parts", "at most 1024"),
        ({"parts": [{"output": np.ones((2, 3))}]}, "/parts/0/logsumexp", "none"),
        ({"parts": [ONE | {"output": np.ones((2, 2))}, ONE]}, "/parts/1/output", "(2, 2), as of the first"),
        ({"parts": [ONE, ONE | {"logsumexp": np.ones(3)}]}, "/parts/1/logsumexp", "(2,)"),
        ({"parts": [ONE, ONE | {"logsumexp": np.array([1, np.nan])}]}, "/parts/1/logsumexp", "NaN"),
        ({"parts": [ONE | {"output": np.full((2, 3), np.nan)}]}, "/parts/0/output", "finite"),
        ({"parts": [ONE | {"output": np.ones((2, 3), bool)}]}, "/parts/0/output", "booleans"),
        ({"parts": [ONE | {"weights": np.ones(3)}]}, "/parts/0/weights", "known field"),
        ({"parts": [ONE], "layout": "bhld"}, "/parts/0/output", "b, h, l, d"),
        ({"parts": [ONE], "sinks": np.ones(2)}, "/sinks", "(1,)"),
        ({"parts": [ONE], "sinks": np.array([np.inf])}, "/sinks/0", "finite"),
        ({"parts": [ONE], "logsumexp_base": "10"}, "/logsumexp_base", "'e' or '2'"),
        ({"parts": [ONE | {"output": np.full((2, 3), 1e6)}], "dtype": "float16"}, "/dtype", "float16"),
        ({"parts": [ONE | {"logsumexp": np.full(2, 1e60)}], "dtype": "float16"}, "/dtype", "hold the logsumexp"),
    ],
)
def test_faults_are_named(fields: dict[str, Any], pointer: str, text: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        merge(**fields)
    assert caught.value.faults[0].pointer == pointer
    assert text in caught.value.faults[0].sentence()


def test_the_function_has_the_fields_of_the_request() -> None:
    """All but encoding, which means nothing without JSON."""
    assert inspect.signature(merge).parameters.keys() | {"encoding"} == MergeRequest.model_fields.keys()


@pytest.fixture(scope="module")
def client() -> Iterator[httpx.Client]:
    with serving_freed() as client:
        yield client


def request(count: int = 3) -> dict[str, Any]:
    random = np.random.default_rng(2)
    return {
        f"{n}": {"output": random.normal(size=(2, 5, 3, 4)), "logsumexp": random.normal(size=(2, 3, 5))}
        for n in range(count)
    }


@pytest.mark.parametrize("media_type", MEDIA_TYPES)
@pytest.mark.parametrize("accept", MEDIA_TYPES)
def test_every_wire_format_has_parts(client: httpx.Client, media_type: str, accept: str) -> None:
    """Twelve parts, of whose names the last are not in the order of the alphabet."""
    parts = request(12)
    fields: dict[str, Any] = {"parts": list(parts.values()) if media_type == JSON else parts, "layout": "blhd"}
    headers = {"content-type": media_type, "accept": accept}
    answer = client.post("/attention/merge", content=write(fields, media_type), headers=headers)
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"] == accept
    found = read(answer.content, accept)
    for name, expected in merge(list(parts.values()), layout="blhd")._asdict().items():
        np.testing.assert_allclose(np.array(found[name]), expected, rtol=1e-12)
    assert answer.headers["server-timing"].startswith("decode;")


def test_null_is_no_key(client: httpx.Client) -> None:
    parts = [
        {"output": [[1.0], [None]], "logsumexp": [2.0, None]},
        {"output": [[None], [0]], "logsumexp": [None, None]},
    ]
    assert client.post("/attention/merge", json={"parts": parts}).json() == {
        "output": [[1.0], [0.0]],
        "logsumexp": [2.0, None],
    }


def test_bad_bodies_are_refused(client: httpx.Client) -> None:
    for bad in (
        {},
        {"parts": 1},
        {"parts": [1]},
        {"parts": {"1": ONE}},
        {"parts": [ONE], "layer": "x"},
        {"query": [[1]]},
    ):
        content = json.dumps(bad, default=lambda array: array.tolist())
        answer = client.post("/attention/merge", content=content, headers={"content-type": JSON})
        assert answer.status_code == 422, (bad, answer.text)
    bad_names = write({"parts": {"0": ONE, "2": ONE}}, SAFETENSORS)
    answer = client.post("/attention/merge", content=bad_names, headers={"content-type": SAFETENSORS})
    assert problem(answer) == (422, "invalid_value")
    answer = client.post("/attention/merge", json={"parts": [1]}, headers={"accept": SVG})
    assert problem(answer) == (406, "not_acceptable")


def test_a_request_is_freed(client: httpx.Client) -> None:
    content = write({"parts": list(request().values()), "layout": "blhd"}, JSON)
    for _ in range(2):  # the first fills caches
        with assert_freed():
            assert client.post("/attention/merge", content=content, headers={"content-type": JSON}).status_code == 200


def test_memory_is_granted_before_it_is_taken() -> None:
    made = app(memory_limit=2**24)
    part = {"output": np.zeros((300_000, 1)), "logsumexp": np.zeros(300_000)}
    with serving(made) as client:
        content = write({"parts": {"0": part, "1": part}}, SAFETENSORS)
        answer = client.post("/attention/merge", content=content, headers={"content-type": SAFETENSORS})
        assert problem(answer) == (413, "memory_limit")
        assert made.state.engine.admission.free == made.state.engine.admission.memory
