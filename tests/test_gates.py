"""`gate` and `projection.gate`: head outputs times gates."""

from __future__ import annotations

from math import log
from typing import Any

import httpx
import numpy as np
import pytest

from attention_service import attend
from tests.helpers.backends import BACKENDS, compute_as_if_large

B, H, G, Q, K, D, E = 2, 4, 2, 3, 5, 6, 3


def request(**more: Any) -> dict[str, Any]:
    random = np.random.default_rng(5)
    shapes = {"query": (B, Q, H * D), "key": (B, K, G * D), "value": (B, K, G * E)}
    arrays = {name: random.normal(size=shape) for name, shape in shapes.items()}
    return {**arrays, "num_heads": H, "num_kv_heads": G, **more}


def test_by_hand(client: httpx.Client) -> None:
    """Two heads of one query and one key, whose outputs are the values (8, 4) and (2, 6); then their sum."""
    fields: dict[str, Any] = {
        "query": [[0, 0]],
        "key": [[0, 0]],
        "value": [[8, 4, 2, 6]],
        "num_heads": 2,
        "include": ["head_outputs"],
    }
    answer = client.post("/attention", json=fields | {"gate": [[[0.5, 0.25]], [[2, 0]]]}).json()
    assert answer["output"] == [[4, 1, 4, 0]]
    assert answer["head_outputs"] == [[[8, 4]], [[2, 6]]]
    answer = client.post("/attention", json=fields | {"gate": [[[0.5]], [[-1]]]}).json()
    assert answer["output"] == [[4, 2, -2, -6]]
    # The source of the query is (1, ln 3): the first gate is 1/(1 + 1/3), the second 1/2.
    mapped = fields | {"query": [[1, log(3)]], "projection": {"gate": {"weight": [[0, 1], [0, 0]]}}}
    answer = client.post("/attention", json=mapped).json()
    np.testing.assert_allclose(answer["output"], [[6, 3, 1, 3]], rtol=1e-15)
    mapped["projection"]["output"] = {"weight": [[1, 1, 1, 1]]}
    answer = client.post("/attention", json=mapped | {"layout": "ld"}).json()
    np.testing.assert_allclose(answer["output"], [[13]], rtol=1e-15)


FUNCTIONS = {
    "sigmoid": lambda x: 1 / (1 + np.exp(-x)),
    "softplus": lambda x: np.log(1 + np.exp(x)),
    "silu": lambda x: x / (1 + np.exp(-x)),
    "none": lambda x: x,
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("tile", [None, 1, 2**20])
@pytest.mark.parametrize("features", [H, H * E])
@pytest.mark.parametrize("activation", FUNCTIONS)
def test_maps_are_arrays_that_are_activated(
    activation: str, features: int, tile: int | None, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if tile is not None:
        compute_as_if_large(monkeypatch, tile)
    random = np.random.default_rng(features)
    weight, bias, out = (random.normal(size=shape) for shape in ((features, H * D), features, (7, H * E)))
    fields = request(mask=random.random((Q, K)) < 0.5, query_lengths=[Q, 1], backend=backend)
    numbers = FUNCTIONS[activation](fields["query"] @ weight.T + bias)
    gate = numbers.reshape(B, Q, H, -1).transpose(0, 2, 1, 3)
    plain = attend(**fields, include=["head_outputs"])
    heads = plain["head_outputs"] * gate
    expected = heads.transpose(0, 2, 1, 3).reshape(B, Q, -1)
    forms = [{"weight": weight, "bias": bias}, {"kernel": weight.T, "bias": bias.reshape(H, -1)}]
    forms += [{"weight": weight.reshape(H, -1, H * D), "bias": bias[:, None]}]
    for form in forms:
        for include in (["head_outputs"], []):
            maps = {"gate": form | {"activation": activation}}
            found = attend(**fields, projection=maps, include=include)
            np.testing.assert_allclose(found.output, expected, rtol=1e-12, atol=1e-13)
            if include:
                np.testing.assert_array_equal(found["head_outputs"], plain["head_outputs"])
            after = attend(**fields, projection=maps | {"output": {"weight": out}}, include=include)
            np.testing.assert_allclose(after.output, expected @ out.T, rtol=1e-11, atol=1e-12)
            given = attend(**fields, gate=gate, include=include)
            np.testing.assert_allclose(given.output, expected, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("layout", ["bhld", "blhd", "hld", "bld", "lbd", "bdl", "ld", "dl"])
def test_gates_have_the_same_axes_in_every_layout(layout: str, backend: str) -> None:
    random = np.random.default_rng(6)
    heads = {name: random.normal(size=(2, 3, n, 4)) for name, n in (("query", 4), ("key", 5), ("value", 5))}
    gate = random.normal(size=(2, 3, 4, 4))
    expected = attend(**heads, layout="bhld", include=["head_outputs"])["head_outputs"] * gate  # type: ignore[arg-type]  # arrays only
    axes = "bhld"
    arrays = {name: array if "b" in layout else array[0] for name, array in (heads | {"output": expected}).items()}
    if "h" not in layout:
        arrays = {name: np.concatenate(np.moveaxis(array, -3, 0), axis=-1) for name, array in arrays.items()}
    axes = "".join(letter for letter in axes if letter in layout)
    moved: dict[str, Any] = {
        name: array.transpose([axes.index(letter) for letter in layout]) for name, array in arrays.items()
    }
    output = moved.pop("output")
    options: dict[str, Any] = {} if "h" in layout else {"num_heads": 3}
    found = attend(**moved, **options, layout=layout, gate=gate if "b" in layout else gate[0], backend=backend)
    np.testing.assert_allclose(found.output, output, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("backend", BACKENDS)
def test_rows_that_see_no_key_stay_zero(backend: str) -> None:
    """Whatever their gates are, also where the source of a padded query is not finite."""
    query = np.array([[1.0, 2.0], [np.nan, 1.0], [np.inf, np.nan]])
    options: dict[str, Any] = {"query_lengths": 1, "projection": {"gate": {"weight": [[1.0, 1.0]]}}}
    found = attend(query, np.ones((2, 2)), np.ones((2, 1)), **options, backend=backend)
    np.testing.assert_allclose(found.output, [[1 / (1 + np.exp(-3))], [0], [0]], rtol=1e-15)
    masked = attend(input=np.ones((2, 1)), key_mask=[False, False], gate=[[[5.0], [7.0]]], backend=backend)
    assert masked.output.tolist() == [[0], [0]]
    assert masked.metadata.fully_masked_rows == 2


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_gates_are_of_the_type_that_is_computed_in(backend: str, dtype: str) -> None:
    """1 + 2^-12 is no half: only the product is rounded."""
    gate = [[[1 + 2.0**-12]]]
    found = attend([[1.0]], [[1.0]], [[4096.0]], gate=gate, dtype=dtype, backend=backend)
    assert found.output.dtype == np.asarray(attend(input=[[1.0]], dtype=dtype).output).dtype
    assert found.output.astype(float).tolist() == [[4097.0 if dtype == "float32" else 4096.0]]


def test_a_vector_has_one_gate_a_head() -> None:
    found = attend([1.0, 2.0], [[0.0, 0.0]], [[3.0, 4.0]], num_heads=2, gate=[[[2.0]], [[10.0]]])
    assert found.output.tolist() == [6, 40]


@pytest.mark.parametrize(
    ("change", "code", "pointer", "expected"),
    [
        ({"gate": [[[1, 2, 3]], [[1, 2, 3]]]}, "shape_mismatch", "/gate", "(2, 1, 2) or (2, 1, 1)"),
        ({"gate": [[[1]]]}, "shape_mismatch", "/gate", "(2, 1, 2) or (2, 1, 1)"),
        ({"gate": [[[True]], [[False]]]}, "invalid_array", "/gate", "numbers"),
        ({"gate": [[[1]], [[1e39]]], "dtype": "float32"}, "overflow", "/gate/1/0/0", "a number that float32 can hold"),
        (
            {"gate": [[[1]], [[1]]], "projection": {"gate": {"weight": [[1, 1, 1, 1]] * 2}}},
            "field_conflict",
            "/gate",
            "gate or projection.gate",
        ),
        (
            {"projection": {"gate": {"weight": [[1, 1, 1, 1]]}}},
            "shape_mismatch",
            "/projection/gate/weight",
            "4 features out, or 2, one a head",
        ),
        (
            {"projection": {"gate": {"weight": [[1, 1]] * 2}}},
            "shape_mismatch",
            "/projection/gate/weight",
            "(·, 4)",
        ),
        (
            {"projection": {"gate": {"weight": [[[1, 1, 1, 1]]] * 4}}},
            "shape_mismatch",
            "/projection/gate/weight",
            "2 heads, as the query has",
        ),
        (
            {"projection": {"gate": {"weight": [[1, 1, 1, 1]] * 2, "activation": "relu"}}},
            "invalid_value",
            "/projection/gate/activation",
            "one of 'sigmoid', 'softplus', 'silu' or 'none'",
        ),
        ({"projection": {"gate": {}}}, "missing_field", "/projection/gate", "weight (out, in) or kernel (in, out)"),
    ],
)
def test_wrong_gates_are_refused(
    change: dict[str, Any], code: str, pointer: str, expected: str, client: httpx.Client
) -> None:
    response = client.post("/attention", json={"input": [[1, 2, 3, 4]], "num_heads": 2} | change)
    assert (response.status_code, response.json()["code"]) == (422, code)
    [error] = response.json()["errors"]
    assert (error["pointer"], error["expected"]) == (pointer, expected)
