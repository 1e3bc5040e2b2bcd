"""The least baselines of a comparison, by hand: errors of sums in steps of a quarter of ε, see `floors.py`."""

from __future__ import annotations

from math import exp, hypot, log, sqrt
from typing import Any

import numpy as np
import pytest

from attention_service import compare
from attention_service.attention.spec import AttentionSpec, LinearMap, Projection
from attention_service.comparison.case import make_case
from attention_service.comparison.floors import floors, floors_of_others
from attention_service.comparison.sample import everything

STEP = 2.0**-52 / 4
# One query (3, 4) of length 5, two keys of length 1: scores 3 and 4, the largest value 7.
PLAIN: dict[str, Any] = {
    "query": np.array([[3.0, 4]]),
    "key": np.array([[1.0, 0], [0, 1]]),
    "value": np.array([[2.0, 0], [0, -7]]),
    "scale": 1.0,
    "query_offset": np.array(0),
    "layout": "ld",
}
LOGSUMEXP = 4 + log(1 + exp(-1))
RIGHT = {"output": np.zeros((1, 1, 1, 2)), "attention_weights": np.zeros(1), "logsumexp": np.array([LOGSUMEXP])}
ROOT = sqrt(2)  # of the features, and of the keys


def found(**fields: Any) -> dict[str, float]:
    case = make_case(AttentionSpec(**PLAIN | fields), np.dtype(np.float64))
    return {name: floor / STEP for name, floor in floors(case, case, everything(case), RIGHT).items()}


def test_a_plain_request() -> None:
    weights = ROOT + 4  # more than 5 = |q| · |k|
    scores = (ROOT + 2) * 5 + 2 * 4
    expected = {"output": weights * 7, "attention_weights": weights, "logsumexp": scores + ROOT + LOGSUMEXP}
    assert found() == pytest.approx(expected, rel=1e-14)


def test_the_scale_counts() -> None:
    assert found(scale=-0.5)["attention_weights"] == pytest.approx(ROOT + 2, rel=1e-14)
    assert found(scale=3.0)["attention_weights"] == pytest.approx(3 * 5, rel=1e-14)  # |q| · |k|, more than √2 + 12


def test_gates_and_output_maps_multiply_the_error_of_the_output() -> None:
    weights = ROOT + 4
    assert found(gate=np.array([[[0.5, -3]]]))["output"] == pytest.approx(3 * weights * 7, rel=1e-14)
    longer = Projection(output=LinearMap(weight=np.array([[3.0, 4], [1, 0]])))
    assert found(projection=longer)["output"] == pytest.approx(5 * weights * 7, rel=1e-14)
    shorter = Projection(output=LinearMap(weight=np.array([[0.3, 0.4]])))
    assert found(projection=shorter)["output"] == pytest.approx(weights * 7, rel=1e-14)


def test_errors_of_maps_are_inherited() -> None:
    """Of most numbers three times |x| · |w| + |bias|; here x = (3, 4) and the longest w has length 2."""
    linear = LinearMap(weight=np.array([[0.0, 2], [1, 0]]), bias=np.array([0.0, -1]))
    errors = 3 * (5 * 2 + 1)  # of the query (8, 2)
    weights = hypot(max(ROOT + 8, sqrt(68)), errors * 1)
    expected = found(projection=Projection(query=linear))
    assert expected["attention_weights"] == pytest.approx(weights, rel=1e-14)
    assert expected["logsumexp"] == pytest.approx((ROOT + 2) * sqrt(68) + errors + 2 * 8 + ROOT + LOGSUMEXP, rel=1e-14)
    # The longest value is (0, -7): the values are (0, 1) and (-14, -1).
    of_values = found(projection=Projection(value=linear))
    assert of_values["output"] == pytest.approx((ROOT + 4) * 14 + 3 * (7 * 2 + 1), rel=1e-14)


def test_other_arrays() -> None:
    """The worst of n products has an error of √n + 2."""
    linear = LinearMap(weight=np.array([[0.0, 2], [1, 0]]), bias=np.array([0.0, -1]))
    case = make_case(AttentionSpec(**PLAIN, projection=Projection(value=linear)), np.dtype(np.float64))
    stages = ("scores", "scaled_scores", "capped_scores", "masked_scores", "query")
    others = {"value": 14.0, "entropy": 0.5, "received": 1.0, "logsumexp": LOGSUMEXP, "head_outputs": 1.0}
    reference = dict.fromkeys(stages, 4.0) | others
    arrays = {name: np.array([number]) for name, number in reference.items()}
    products, weights = (ROOT + 2) * 5, ROOT + 4
    scores = products + 2 * 4
    sums = scores + ROOT
    expected = {
        "scores": products,
        "scaled_scores": products + 2 * 4,
        "capped_scores": products + 4 * 4,
        "masked_scores": scores + 4 * 4,
        "value": (ROOT + 2) * (7 * 2 + 1),
        "entropy": 1 + sums + 2 * (1 + sums) * 0.5,
        "received": weights + (weights + 1) * 1,
        "logsumexp": sums + LOGSUMEXP,
        "query": 0,
        "head_outputs": weights * 14 + 3 * (7 * 2 + 1),
    }
    floors_found = floors_of_others(case, arrays, list(arrays))
    assert {name: floor / STEP for name, floor in floors_found.items()} == pytest.approx(expected, rel=1e-13)


@pytest.mark.parametrize("keys", [300, 4096])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_sums_of_equal_tokens_may_drift(keys: int, dtype: Any) -> None:
    """One after the other, as torch's SDPA of one query adds them: 0.1 is rounded in one direction again and again."""
    token = np.full((keys, 4), 0.1, dtype)
    sent = np.add.accumulate(token, axis=0)[-1:] / dtype(keys)
    ratio = compare(sent, token[:1], token, token, query_offset=0).verdict.ratio
    assert ratio is not None
    assert ratio < 2
    report = compare(sent * dtype(1 + 4 * keys * np.finfo(dtype).eps), token[:1], token, token, query_offset=0)
    assert report.verdict.status in ("wrong", "imprecise")
