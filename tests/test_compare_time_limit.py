"""`time_limit`: the verdict first, then names and power as far as time allows."""

from __future__ import annotations

import itertools
import time
from typing import Any

import httpx
import numpy as np
import pytest

from attention_service import attend, compare
from attention_service.comparison import time_limit


def request() -> dict[str, Any]:
    random = np.random.default_rng(0)
    query, key, value = random.standard_normal((3, 4, 67, 16), np.float32)
    return {"query": query, "key": key, "value": value, "layout": "hld", "is_causal": True, "softcap": 3.0}


def test_without_time_there_is_the_verdict_alone() -> None:
    fields = request()
    wrong = attend(**fields | {"is_causal": False}, include=[]).output
    report = compare(wrong, **fields, time_limit=0)
    assert report.verdict.status == "wrong"
    assert report.verdict.message.endswith(" The search for mistakes ended after 0 s, the time_limit.")
    assert report.ended_early
    assert report.errors["output"].max_abs == compare(wrong, **fields).errors["output"].max_abs
    assert (report.hypotheses, report.facts, report.power.mutants, report.next_input) == ([], [], 0, None)
    assert report.where
    assert [test.passes for test in report.tests] == [False, False, False]


def test_with_time_enough_nothing_is_left_out() -> None:
    fields = request()
    wrong = attend(**fields | {"is_causal": False}, include=[]).output
    report = compare(wrong, **fields, time_limit=600)
    assert not report.ended_early
    assert report.model_dump() == compare(wrong, **fields).model_dump()


def test_what_was_found_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock jumps when it was read so many times: names are found before power."""
    fields = request()
    wrong = attend(**fields | {"is_causal": False}, include=[]).output
    seen: set[tuple[bool, bool]] = set()
    for reads in (1, 100, 200, 400, 800, 1600, 3200):
        jumps = itertools.chain(itertools.repeat(0.0, reads), itertools.repeat(1000.0))
        with monkeypatch.context() as patch:
            patch.setattr(time_limit, "monotonic", lambda jumps=jumps: time.monotonic() + next(jumps))
            report = compare(wrong, **fields, time_limit=60)
        seen.add((bool(report.hypotheses), report.power.mutants > 0))
        if report.hypotheses:
            assert report.hypotheses[0].name == "causal.absent"
        assert report.ended_early == (report.power.mutants == 0)
    assert (False, True) not in seen
    assert {(False, False), (True, True)} <= seen


def test_both_answers_get_their_verdict() -> None:
    fields = request()
    right, wrong = (attend(**fields | {"is_causal": causal}, include=[]).output for causal in (True, False))
    report = compare(right, **fields, against=wrong, time_limit=0)
    assert report.verdict.status == "inconclusive"
    assert report.against is not None
    assert report.against.verdict.status == "wrong"
    assert report.ended_early


def test_over_http(client: httpx.Client) -> None:
    fields = {name: value.tolist() if isinstance(value, np.ndarray) else value for name, value in request().items()}
    body = fields | {"actual": {"output": fields["value"]}, "dtype": "float32"}
    answer = client.post("/attention/compare", json=body | {"time_limit": 0})
    assert answer.status_code == 200
    assert answer.json()["ended_early"] is True
    assert answer.json()["verdict"]["status"] == "wrong"
    refused = client.post("/attention/compare", json=body | {"time_limit": -1})
    assert refused.status_code == 422
    assert refused.json()["errors"][0]["pointer"] == "/time_limit"
