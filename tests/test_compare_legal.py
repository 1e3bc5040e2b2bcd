"""Right kernels of production are right, whatever liberties they take; a request may say which are legal."""

from __future__ import annotations

from typing import Any, Final

import httpx
import ml_dtypes
import numpy as np
import pytest

from attention_service.comparison.legal import CUBIC, EXP2_ERROR, TANH_ERROR, cubic_exp, uneven_tanh
from attention_service.library import attend, compare
from tests.helpers.right_kernels import Kernel, flash

BFLOAT16: Final = np.dtype(ml_dtypes.bfloat16)
FLOAT16: Final = np.dtype(np.float16)
FLOAT32: Final = np.dtype(np.float32)
# Each liberty by itself, and all of them.
TAKEN: Final = {
    "none": Kernel(),
    "folded_scale": Kernel(folds="scale"),
    "folded_scale with log2(e)": Kernel(folds="scale and log2(e)"),
    "rounded_weights": Kernel(rounds_weights=True),
    "rounded_sum": Kernel(rounds_weights=True, rounds_sum=True),
    "approximate_exp2": Kernel(cubic=True),
    "approximate_tanh": Kernel(fast_tanh=True),
    "all": Kernel(32, "scale and log2(e)", rounds_weights=True, rounds_sum=True, cubic=True, fast_tanh=True),
}


def request_of(dtype: np.dtype, d: int, spread: float, **options: Any) -> dict[str, Any]:
    random = np.random.default_rng(d)
    query = (random.normal(size=(1, 2, 40, d)) * spread).astype(dtype)
    key, value = random.normal(size=(2, 1, 1, 70, d)).astype(dtype)
    return {"query": query, "key": key, "value": value, "layout": "bhld", **options}


def judged(request: dict[str, Any], kernel: Kernel, **more: Any) -> dict[str, float]:
    """The ratio of each array."""
    options = {name: request[name] for name in ("softcap", "scale") if name in request}
    answer = flash(request["query"], request["key"], request["value"], kernel, **options)
    report = compare(answer, **request, **more, time_limit=0)  # names of mistakes and what inputs show are not read
    assert report.verdict.status in ("correct", "inconclusive") or (report.verdict.ratio or 0) > 2
    return {name: (errors.max_abs or 0) / report.baseline[name].limit for name, errors in report.errors.items()}


@pytest.mark.slow
@pytest.mark.parametrize("spread", [0.01, 1.0, 4.0])
@pytest.mark.parametrize("d", [64, 128])
@pytest.mark.parametrize("dtype", [BFLOAT16, FLOAT16])
def test_production_kernels_of_half_types_are_right(dtype: np.dtype, d: int, spread: float) -> None:
    """At 64 features the scale is a power of two, which rounds nothing; at 128 it is none."""
    request = request_of(dtype, d, spread, softcap=20.0)
    ratios = {name: max(judged(request, kernel).values()) for name, kernel in TAKEN.items()}
    assert {name: ratio for name, ratio in ratios.items() if ratio > 2} == {}


@pytest.mark.parametrize("folds", ["nothing", "scale", "scale and log2(e)"])
def test_tiles_and_powers_of_two_are_right_in_float32(folds: str) -> None:
    for tile in (16, 64, 128):
        assert max(judged(request_of(FLOAT32, 128, 2.0, scale=0.3), Kernel(tile, folds)).values()) <= 2


def test_a_request_says_which_liberties_are_legal() -> None:
    """The logsumexp of small scores is known to a few units of float32, unless weights are rounded before their sum."""
    request = request_of(BFLOAT16, 64, 0.01)
    kernel = Kernel(rounds_weights=True, rounds_sum=True)
    assert judged(request, kernel)["logsumexp"] <= 2
    assert judged(request, kernel, legal=["rounded_weights", "rounded_sum"])["logsumexp"] <= 2
    assert judged(request, kernel, legal=[])["logsumexp"] <= 2
    assert judged(request, kernel, legal=["exact"])["logsumexp"] > 100
    assert judged(request, kernel, legal=["rounded_weights"])["logsumexp"] > 100
    assert max(judged(request, Kernel(), legal=["exact"]).values()) <= 2
    # Where the sum makes the largest error, the limit is that error.
    assert judged(request_of(BFLOAT16, 128, 0.3), kernel, legal=["rounded_weights", "rounded_sum"])["logsumexp"] <= 1.2


def test_rotated_operands_may_be_rounded() -> None:
    request = request_of(BFLOAT16, 64, 1.0, rotary={}, query_offset=30)
    rotated = attend(**request, dtype="float64", include=["query", "key"])
    stored = {name: rotated[name].astype(BFLOAT16).astype(np.float64) for name in ("query", "key")}
    found = attend(**stored, value=request["value"].astype(np.float64), layout="bhld", include=["logsumexp"])
    answer = {"output": found.output.astype(BFLOAT16), "logsumexp": found["logsumexp"].astype(np.float32)}
    for legal, is_right in ((None, True), (["rounded_operands"], True), (["exact"], False)):
        report = compare(answer, **request, legal=legal, time_limit=0)
        error, limit = report.errors["logsumexp"].max_abs, report.baseline["logsumexp"].limit
        assert error is not None
        assert (error <= 2 * limit) == is_right, legal


def test_a_cap_of_the_hardware_is_legal_if_the_request_says_so() -> None:
    request = request_of(FLOAT16, 64, 4.0, softcap=20.0)
    assert judged(request, Kernel(fast_tanh=True), legal=["exact"])["logsumexp"] > 10
    assert max(judged(request, Kernel(fast_tanh=True), legal=["approximate_tanh"]).values()) <= 2


def test_other_names_are_refused(client: httpx.Client) -> None:
    request = {"query": [[1.0]], "key": [[1.0]], "value": [[1.0]], "legal": ["sloppy"]}
    problem = client.post("/attention/compare", json=request).json()
    assert (problem["code"], problem["errors"][0]["pointer"]) == ("invalid_value", "/legal/0")


def test_the_approximations_have_the_errors_that_are_said() -> None:
    x = np.linspace(-20, 0, 100_001)
    apart = np.abs(cubic_exp(x) / np.exp(x) - 1)
    assert 0.9 * EXP2_ERROR < apart.max() <= 1.01 * EXP2_ERROR
    assert sum(CUBIC) == pytest.approx(2, abs=2e-4)  # where the next power of 2 begins
    apart = np.abs(uneven_tanh(x[:-1]) / np.tanh(x[:-1]) - 1)
    assert 0.9 * TANH_ERROR < apart.max() <= TANH_ERROR
    np.testing.assert_array_equal(cubic_exp(np.array([-np.inf, 0.0])), [0, 1])
