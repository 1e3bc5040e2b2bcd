"""Rounding that is too coarse, and mistakes in a part of the rows, where no single error is large.

Right and wrong kernels are tests/helpers/coarse_kernels.py and right_kernels.py, which share no line with the product.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from attention_service import compare, compare_call
from attention_service.attention.arrays import BFLOAT16
from tests.helpers.coarse_kernels import COARSE, Formula, exact, right, wrong
from tests.helpers.right_kernels import Kernel

pytestmark = pytest.mark.usefixtures("without_suggestions")
FLOAT16 = np.dtype(np.float16)
LIBERAL = Kernel(folds="scale and log2(e)", rounds_weights=True, rounds_sum=True, cubic=True, fast_tanh=True)
# The message of a verdict, and nothing that takes long.
BRIEF: dict[str, Any] = {"time_limit": 1e-3}


def drawn(seed: int, dtype: np.dtype, scale: float = 2.0, queries: int = 96, keys: int = 160) -> dict[str, Any]:
    random = np.random.default_rng(seed)
    query = random.normal(size=(1, 2, queries, 32)) * scale
    key, value = random.normal(size=(2, 1, 1, keys, 32))
    fields = {"query": query, "key": key, "value": value}
    return {name: array.astype(dtype) for name, array in fields.items()} | {"layout": "bhld"}


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("dtype", [BFLOAT16, FLOAT16], ids=str)
@pytest.mark.parametrize("how", COARSE[:4])
def test_rounded_scores_are_imprecise_in_every_draw(how: str, dtype: np.dtype, seed: int) -> None:
    request = drawn(seed, dtype)
    for rounds_weights in (False, True):
        verdict = compare(wrong(request, coarse=how, weights=rounds_weights), **request, **BRIEF).verdict
        assert verdict.status == "imprecise"
    assert compare(right(request, LIBERAL), **request, **BRIEF).verdict.status == "inconclusive"


def test_sums_in_a_half_type_are_imprecise_where_no_error_is_large() -> None:
    request = drawn(0, BFLOAT16, scale=1.0, queries=256, keys=256) | {"is_causal": True, "query_offset": 0}
    report = compare(wrong(request, coarse="sums", tile=16), **request, **BRIEF)
    assert (report.errors["output"].max_abs or 0) < 2 * report.baseline["output"].limit
    assert report.verdict.status == "imprecise"
    assert "times in the mean" in report.verdict.message


@pytest.mark.parametrize("scale", [0.02, 1.0])
@pytest.mark.parametrize("how", ["products", "sums"])
def test_what_is_not_seen_survives(how: str, scale: float) -> None:
    request = drawn(1, BFLOAT16, scale, queries=24, keys=40)
    report = compare(wrong(request, coarse=how, tile=32), **request)
    name = "precision.accumulate" if how == "sums" else "precision.scores"
    assert report.verdict.status == "imprecise" or name in report.power.survivors


# Rows of a place, and formulas that make little of the largest error.
PLACES: dict[str, Any] = {
    "a tile": np.s_[:, :, 32:64],
    "the tail": np.s_[:, :, 64:],
    "a head": np.s_[:, 1],
    "a tile of a head": np.s_[:, 1, 16:32],
    "every other tile": np.arange(96) // 16 % 2 == 1,
}
FORMULAS = {"scale": Formula(scale=0.9), "factor": Formula(factor=0.97), "dropped": Formula(dropped=(40, 56))}


def in_place(where: str, formula: Formula, request: dict[str, Any]) -> np.ndarray:
    found = np.zeros(request["query"].shape[:3], bool)
    place = PLACES[where]
    found[(slice(None), slice(None), place) if isinstance(place, np.ndarray) else place] = True
    return np.where(found[..., None], wrong(request, formula=formula), right(request, LIBERAL))


@pytest.mark.parametrize("where", PLACES)
@pytest.mark.parametrize("formula", FORMULAS)
def test_a_wrong_formula_in_a_part_of_the_rows_is_wrong(formula: str, where: str) -> None:
    request = drawn(2, BFLOAT16)
    report = compare(in_place(where, FORMULAS[formula], request), **request, **BRIEF)
    assert report.verdict.status == "wrong"
    assert report.where[0].what == "elements"
    if where == "a head":
        assert [place.message for place in report.where[1:] if place.what == "heads"] == ["head 1 only"]


def test_a_wrong_tile_of_long_rows_is_wrong_beside_larger_errors_of_short_rows() -> None:
    request = drawn(3, BFLOAT16, scale=0.5, queries=512, keys=512) | {"is_causal": True, "query_offset": 0}
    sent = right(request, LIBERAL)
    sent[:, :, 448:480] = wrong(request, formula=Formula(factor=0.97))[:, :, 448:480]
    report = compare(sent, **request, **BRIEF)
    assert (report.errors["output"].max_abs or 0) < 2 * report.baseline["output"].limit
    assert report.verdict.status == "wrong"
    assert "rows 448 to 479 only" in [place.message for place in report.where]


@pytest.mark.parametrize("how", ["products", "sums"])
@pytest.mark.parametrize("dtype", [BFLOAT16, FLOAT16], ids=str)
def test_worse_rounding_of_long_rows_and_large_scores_has_no_place(dtype: np.dtype, how: str) -> None:
    request = drawn(4, dtype, queries=128, keys=128) | {"is_causal": True, "query_offset": 0}
    request["query"][:, 1] *= 2  # larger scores of one head, and of the last tile
    request["query"][:, :, 96:] *= 2
    report = compare(wrong(request, coarse=how, tile=16), **request, **BRIEF)
    largest = (report.errors["output"].max_abs or 0) / report.baseline["output"].limit
    assert report.verdict.status == ("imprecise" if largest <= 10 else "wrong")


def test_rounded_scores_of_a_call_are_not_right() -> None:
    request = drawn(5, BFLOAT16)
    del request["layout"]
    key, value = (np.repeat(request[name], 2, axis=1) for name in ("key", "value"))
    arguments: dict[str, Any] = {"query": request["query"], "key": key, "value": value}
    name = "torch.scaled_dot_product_attention"
    bad = compare_call(name, actual=wrong(request, coarse="products"), **arguments)
    good = compare_call(name, actual=right(request, LIBERAL), **arguments)
    assert (bad.verdict.status, good.verdict.status in ("correct", "inconclusive")) == ("imprecise", True)


def test_the_right_kernel_of_these_tests_is_right() -> None:
    request = drawn(6, FLOAT16) | {"is_causal": True, "query_offset": 64, "softcap": 5.0}
    np.testing.assert_allclose(right(request, Kernel()).astype(np.float64), exact(request), atol=2e-3)
    np.testing.assert_allclose(wrong(request).astype(np.float64), exact(request), atol=2e-3)
