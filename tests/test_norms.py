"""`query_norm`, `key_norm` and `value_norm`: kinds, what they are over, and where they stand."""

from __future__ import annotations

from math import inf, sqrt
from typing import Any

import httpx
import numpy as np
import pytest

from attention_service import attend
from attention_service.attention.steps.norm import NormStep
from tests.helpers.backends import BACKENDS

B, H, G, D, E, LENGTH, PAST = 2, 4, 2, 6, 4, 5, 3
WIDTHS = {"query": H * D, "key": G * D, "value": G * E}
HEADS = {"query": H, "key": G, "value": G}


def request() -> dict[str, Any]:
    random = np.random.default_rng(7)
    tokens = {name: random.normal(size=(B, LENGTH, width)) * 3 + 1 for name, width in WIDTHS.items()}
    past = {"past_key": random.normal(size=(B, G, PAST, D)), "past_value": random.normal(size=(B, G, PAST, E))}
    return {**tokens, **past, "num_heads": H, "num_kv_heads": G, "include": ["query", "key", "value", "present_value"]}


def by_hand(x: np.ndarray, norm: dict[str, Any]) -> np.ndarray:
    """Tokens (b, l, heads, d) normalised, by the formula in docs/attention.md."""
    axes = (2, 3) if norm.get("over") == "all" else (3,)
    if norm.get("kind") == "layer":
        x = x - x.mean(axes, keepdims=True)
    x = x / np.sqrt(np.square(x).mean(axes, keepdims=True) + norm.get("eps", 1e-6))
    shape = x.shape[2:] if norm.get("over") == "all" else x.shape[3:]
    found: np.ndarray = x * norm["weight"].reshape(shape) + norm["bias"].reshape(shape)
    return found


def turned(x: np.ndarray, base: float) -> np.ndarray:
    """Tokens (b, l, heads, d) rotated by their positions after the past, pair by pair."""
    found = x.copy()
    for place in range(x.shape[1]):
        for pair in range(D // 2):
            angle = (PAST + place) * base ** (-2 * pair / D)
            first, second = x[:, place, :, pair], x[:, place, :, pair + D // 2]
            found[:, place, :, pair] = first * np.cos(angle) - second * np.sin(angle)
            found[:, place, :, pair + D // 2] = first * np.sin(angle) + second * np.cos(angle)
    return found


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("position", ["before", "after"])
@pytest.mark.parametrize("over", ["head", "all"])
@pytest.mark.parametrize("kind", ["rms", "layer"])
def test_the_formula(kind: str, over: str, position: str, backend: str) -> None:
    random = np.random.default_rng(8)
    fields = request()
    expected: dict[str, np.ndarray] = {}
    for role, width in WIDTHS.items():
        size = width if over == "all" else width // HEADS[role]
        norm: dict[str, Any] = {
            "kind": kind,
            "over": over,
            "weight": random.normal(size=size),
            "bias": random.normal(size=size),
        }
        norm |= {"eps": 0.25} if role == "key" else {}
        tokens = fields[role].reshape(B, LENGTH, HEADS[role], -1)
        if role == "value":
            expected[role] = by_hand(tokens, norm)
        elif position == "before":
            expected[role] = turned(by_hand(tokens, norm), 50.0)
        else:
            expected[role] = by_hand(turned(tokens, 50.0), norm)
            norm["position"] = "after"
        fields[f"{role}_norm"] = norm
    found = attend(**fields, rotary={"base": 50.0}, backend=backend)
    for role, array in expected.items():
        np.testing.assert_allclose(found[role], array.transpose(0, 2, 1, 3), rtol=1e-12, atol=1e-13)
    np.testing.assert_array_equal(found["present_value"][:, :, :PAST], fields["past_value"])
    plain = {name: value for name, value in fields.items() if "norm" not in name and name not in WIDTHS}
    same: dict[str, Any] = {role: array.transpose(0, 2, 1, 3) for role, array in expected.items()}
    del plain["num_heads"], plain["num_kv_heads"]
    output = attend(**same, **plain, layout="bhld", backend=backend).output
    np.testing.assert_allclose(found.output, output.transpose(0, 2, 1, 3).reshape(B, LENGTH, -1), rtol=1e-12)


@pytest.mark.parametrize("layout", ["bhld", "blhd", "hld", "bld", "lbd", "bdl", "ld", "dl"])
def test_a_norm_over_all_heads_is_the_same_in_every_layout(layout: str, client: httpx.Client) -> None:
    """By hand: (3, 4, 0, 0) over its root mean square 5/2, with the first head weighted by 5, the second by 1."""
    heads = {"query": [[3.0, 4.0], [0.0, 0.0]], "key": [[1.0, 1.0], [1.0, 1.0]], "value": [[1.0, 0.0], [0.0, 1.0]]}
    arrays = {name: np.array(rows)[None, :, None] for name, rows in heads.items()}  # b h l d
    if "h" not in layout:
        arrays = {name: array.transpose(0, 2, 1, 3).reshape(1, 1, 4) for name, array in arrays.items()}
    axes = "bhld" if "h" in layout else "bld"
    if "b" not in layout:
        arrays, axes = {name: array[0] for name, array in arrays.items()}, axes[1:]
    fields: dict[str, Any] = {
        name: array.transpose([axes.index(letter) for letter in layout]).tolist() for name, array in arrays.items()
    }
    norm = {"over": "all", "weight": [5, 5, 1, 1], "eps": 0}
    fields |= {"layout": layout, "query_norm": norm, "include": ["query"]}
    answer = client.post("/attention", json=fields | ({} if "h" in layout else {"num_heads": 2})).json()
    np.testing.assert_allclose(np.ravel(answer["query"]), [6, 8, 0, 0], rtol=1e-15)


@pytest.mark.parametrize("backend", BACKENDS)
def test_each_head_may_have_a_weight_of_its_own(backend: str) -> None:
    """By hand: the root mean square of (3, 4) and (6, 8) is √12.5 and √50."""
    norm = {"weight": [[1, 1], [2, 3]], "bias": [[0, 0], [0, 7]], "eps": 0}
    found = attend(input=[[3.0, 4, 6, 8]], num_heads=2, value_norm=norm, include=["value"], backend=backend)
    expected = [3 / sqrt(12.5), 4 / sqrt(12.5), 2 * 6 / sqrt(50), 3 * 8 / sqrt(50) + 7]
    np.testing.assert_allclose(np.ravel(found["value"]), expected, rtol=1e-15)


def test_a_layer_norm_by_hand() -> None:
    """(1, 3) less its mean is (-1, 1), whose root mean square is 1."""
    found = attend(
        input=[[1.0, 3.0]],
        value_norm={"kind": "layer", "weight": [2, 3], "bias": [10, 20], "eps": 3},
        include=["value"],
    )
    np.testing.assert_allclose(found["value"], [[10 - 2 / sqrt(4), 20 + 3 / sqrt(4)]], rtol=1e-15)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", ["rms", "layer"])
@pytest.mark.parametrize("over", ["head", "all"])
@pytest.mark.parametrize(("dtype", "size"), [("float32", 1e30), ("float64", 1e300), ("bfloat16", 1e30)])
def test_squares_do_not_overflow(dtype: str, size: float, over: str, kind: str, backend: str) -> None:
    """What is normalised has no size."""
    random = np.random.default_rng(3)
    tokens = random.normal(size=(1, 3, 8))
    norm = {"kind": kind, "over": over}
    norms: dict[str, Any] = {"query_norm": norm, "key_norm": norm, "value_norm": norm}
    options: dict[str, Any] = {"num_heads": 2, "dtype": dtype, "backend": backend}
    small, large = (attend(input=tokens * factor, **norms, **options).output for factor in (1e5, size))
    tolerance = {"float64": 1e-10, "float32": 1e-4, "bfloat16": 0.05}[dtype]
    np.testing.assert_allclose(large.astype(float), small.astype(float), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("over", ["head", "all"])
@pytest.mark.parametrize(("dtype", "number"), [("float64", 0.1), ("float64", 9.02e15), ("float32", 9.499035e7)])
def test_a_layer_norm_of_equal_features_is_0(dtype: str, number: float, over: str, backend: str) -> None:
    """However their mean is rounded, and with or without an eps."""
    for eps in (0.0, 1e-6):
        norm = {"kind": "layer", "over": over, "eps": eps}
        options: dict[str, Any] = {"dtype": dtype, "num_heads": 2, "include": ["value"], "backend": backend}
        found = attend(input=np.full((2, 14), number), value_norm=norm, **options)
        assert not found["value"].any()


@pytest.mark.parametrize("backend", BACKENDS)
def test_tiny_numbers_are_normalised(backend: str) -> None:
    """By hand: (3, -3) · 1e-200 over its root mean square; zeros stay 0."""
    options: dict[str, Any] = {"value_norm": {"eps": 0}, "include": ["value"], "backend": backend}
    found = attend(input=[[3e-200, -3e-200], [0.0, 0.0]], **options)
    np.testing.assert_allclose(found["value"], [[1, -1], [0, 0]], rtol=1e-15)


@pytest.mark.parametrize("backend", BACKENDS)
def test_hidden_values_cannot_poison_through_their_norm(backend: str) -> None:
    value = np.array([[np.nan, 1.0], [0.0, 0.0], [3.0, -3.0]])
    options: dict[str, Any] = {"key_mask": [False, False, True], "value_norm": {"eps": 0.0}, "backend": backend}
    found = attend(np.ones((2, 1)), np.ones((3, 1)), value, **options)
    assert found.output.tolist() == [[1, -1], [1, -1]]


@pytest.mark.parametrize(
    ("change", "pointer", "expected"),
    [
        ({"value_norm": {"position": "after"}}, "/value_norm/position", "before, as values are not rotated"),
        ({"query_norm": {"kind": "batch"}}, "/query_norm/kind", "one of 'rms' or 'layer'"),
        ({"query_norm": {"over": "all", "weight": [1, 2]}}, "/query_norm/weight", "(4,), as over is all"),
        ({"key_norm": {"weight": [1, 2, 3, 4]}}, "/key_norm/weight", "(2,) or (2, 2), as over is head"),
        ({"value_norm": {"bias": [1]}}, "/value_norm/bias", "(2,) or (2, 2), as over is head"),
        ({"query_norm": {"over": "all", "weight": [[1, 2], [3, 4]]}}, "/query_norm/weight", "(4,), as over is all"),
        ({"value_norm": {"eps": -1}}, "/value_norm/eps", "a finite number of at least 0"),
    ],
)
def test_wrong_norms_are_refused(change: dict[str, Any], pointer: str, expected: str, client: httpx.Client) -> None:
    response = client.post("/attention", json={"input": [[1, 2, 3, 4]], "num_heads": 2} | change)
    assert response.status_code == 422
    [error] = response.json()["errors"]
    assert (error["pointer"], error["expected"]) == (pointer, expected)


def test_the_error_of_a_norm_by_hand() -> None:
    """(3, 4, 0, 0) has the root mean square 5/2, its largest number becomes 8/5; a sum of 4 has errors of √4."""
    array, errors = np.array([[[[3.0, 4, 0, 0]]]]), np.ones((1, 1, 1))
    plain = 1 / 2.5 * (1 + 1.6) + (2 / 4 + 2) * 1.6
    found = NormStep(eps=0).error(array, errors, 2**-52)
    np.testing.assert_allclose(found, [[[plain]]], rtol=1e-15)
    weight, bias = np.array([1.0, -2, 1, 1]), np.array([0.0, -3, 1, 2])
    found = NormStep(eps=0, weight=weight, bias=bias).error(array, errors, 2**-52)
    np.testing.assert_allclose(found, [[[2 * plain + 3]]], rtol=1e-15)
    found = NormStep(over="all", eps=0).error(array.reshape(1, 2, 1, 2), np.ones((1, 2, 1)), 2**-52)
    np.testing.assert_allclose(found, [[[plain], [1 / 2.5]]], rtol=1e-15)
    # Less the mean of 4, whose sum has an error of √4 + 1 times the largest number, it is (3, -3, 0, 0).
    found = NormStep(kind="layer", eps=0).error(np.array([[[[7.0, 1, 4, 4]]]]), errors, 2**-52)
    expected = (1 + 3 * 7) / sqrt(4.5) * (1 + sqrt(2)) + 2.5 * sqrt(2)
    np.testing.assert_allclose(found, [[[expected]]], rtol=1e-15)


def test_the_bound_of_a_norm_by_hand() -> None:
    """Of 2 · 3 · 5 vectors of 4 numbers whose root mean square is 1, times 2, plus 30 times the bias (3, 4, 0, 0)."""
    step = NormStep(weight=np.array([1.0, -2, 1, 1]), bias=np.array([3.0, 4, 0, 0]))
    bound = step.bound(1.0, (2, 3, 5, 4), np.dtype(np.float64))
    assert bound == pytest.approx(2 * sqrt(60) + 5 * sqrt(15), rel=1e-12)
    assert NormStep(eps=0).bound(1.0, (2, 3, 5, 4), np.dtype(np.float64)) == inf
