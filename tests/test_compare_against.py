"""Two answers to one request: each is judged, and their difference. Expected numbers are from hand calculation."""

from __future__ import annotations

from typing import Any, Final

import httpx
import numpy as np
import pytest

from attention_service.errors import InvalidRequest
from attention_service.library import attend, compare

pytestmark = pytest.mark.usefixtures("without_suggestions")
RANDOM: Final = np.random.default_rng(5)
QUERY, KEY, VALUE = RANDOM.normal(size=(3, 2, 67, 16)).astype(np.float32)
REQUEST: Final[dict[str, Any]] = {"query": QUERY, "key": KEY, "value": VALUE, "layout": "hld", "is_causal": True}


def test_two_right_answers_differ_by_rounding() -> None:
    """One number of the second is a unit in the last place larger."""
    right = attend(**REQUEST).output
    other = right.copy()
    other[1, 3, 2] = np.nextafter(right[1, 3, 2], np.float32(np.inf))
    report = compare(right, **REQUEST, against=other)
    assert report.against is not None
    assert (report.verdict.status, report.against.verdict.status) == ("correct", "correct")
    apart = float(other[1, 3, 2]) - float(right[1, 3, 2])
    assert report.against.differences == {"output": pytest.approx(apart / report.baseline["output"].limit)}
    assert report.against.message.startswith("Neither is wrong. They differ by 0.")
    assert "against:" in str(report)


def test_the_answer_with_another_mask_is_named() -> None:
    right = attend(**REQUEST, include=["logsumexp"])
    wrong = attend(**{**REQUEST, "is_causal": False}, include=["logsumexp"])
    report = compare(right, **REQUEST, against=wrong)
    assert report.against is not None
    assert (report.verdict.status, report.against.verdict.status) == ("correct", "wrong")
    assert [one.name for one in report.against.hypotheses] == ["causal.absent"]
    assert report.against.differences.keys() == {"output", "logsumexp"}
    assert report.against.message.endswith("The answer in against: Wrong: the causal mask is not applied.")
    turned = compare(wrong, **REQUEST, against=right)
    assert turned.against is not None
    assert (turned.verdict.status, turned.against.verdict.status) == ("wrong", "correct")


def test_against_names_its_faults(client: httpx.Client) -> None:
    small = {"query": [[1.0, 0.0]], "key": [[1.0, 0.0]], "value": [[1.0]], "actual": {"output": [[1.0]]}}
    answer = client.post("/attention/compare", json={**small, "against": {"output": [[1.0, 2.0]]}}).json()
    assert answer["errors"][0]["pointer"] == "/against/output"
    answer = client.post("/attention/compare", json={**small, "against": {}}).json()
    assert answer["errors"][0]["pointer"] == "/against"
    del small["actual"]
    answer = client.post("/attention/compare", json={**small, "against": {"output": [[1.0]]}}).json()
    assert (answer["code"], answer["errors"][0]["pointer"]) == ("missing_field", "/actual")
    with pytest.raises(InvalidRequest, match="/against/output"):
        compare(np.ones((2, 67, 16)), **REQUEST, against=np.ones(3))
    null = {**small, "actual": {"output": [[1.0]]}, "against": {"output": [[1.0]], "logsumexp": [None]}}
    report = client.post("/attention/compare", json=null).json()
    assert report["against"]["errors"]["logsumexp"]["non_finite"] == 1
    assert report["against"]["differences"] == {"output": 0.0}


def test_logsumexps_of_base_2_differ_in_the_unit_of_their_baseline() -> None:
    right = attend(**REQUEST, include=["logsumexp"])
    one, other = ({"logsumexp": right["logsumexp"] / np.log(2) + by} for by in (0, 1.0))
    report = compare({**one, "output": right.output}, **REQUEST, against=other, logsumexp_base="2")
    assert report.against is not None
    limit = report.baseline["logsumexp"].limit
    assert report.against.differences["logsumexp"] == pytest.approx(np.log(2) / limit, rel=1e-5)
