"""What is said of another D, of splits of sequences, of numbers that are small, and what comes next."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from attention_service.attention.arrays import BFLOAT16
from attention_service.comparison.truth import reference_and_baseline
from attention_service.conformance.judge import diagnose
from attention_service.conformance.suite import SuiteCase
from attention_service.library import compare, compare_call

HEADS, ROWS, DIM = 2, 32, 16


def drawn(dtype: Any = np.float32) -> dict[str, Any]:
    """A causal request with a cotangent and two query heads of each key/value head."""
    random = np.random.default_rng(9)
    heads = {"query": HEADS, "key": HEADS // 2, "value": HEADS // 2, "grad_output": HEADS}
    arrays = {name: random.normal(size=(h, ROWS, DIM)).astype(dtype) for name, h in heads.items()}
    return {**arrays, "layout": "hld", "is_causal": True}


def passed(fields: dict[str, Any], wrong: str = "") -> dict[str, np.ndarray]:
    """What a backward pass of loops over heads returns. wrong: what its D is, or another mistake"""
    dtype = fields["query"].dtype
    query, key, value, cotangent = (fields[n].astype(np.float64) for n in ("query", "key", "value", "grad_output"))
    output = np.zeros((HEADS, ROWS, DIM))
    found = {"grad_query": np.zeros_like(query), "grad_key": np.zeros_like(key), "grad_value": np.zeros_like(value)}
    scores = query @ np.repeat(key, 2, axis=0).swapaxes(1, 2) * DIM**-0.5
    scores = np.where(np.tril(np.ones((ROWS, ROWS), bool)), scores, -np.inf)
    sums = np.log(np.exp(scores).sum(axis=-1))
    for head in range(HEADS):
        weights = np.exp(scores[head] - sums[head][:, None])
        output[head] = weights @ value[head // 2]
    rounded = output.astype(dtype).astype(np.float64)
    delta = (rounded * cotangent).sum(axis=-1)
    others = {
        "of another row": delta[:, np.arange(ROWS) ^ 8],
        "of another head": delta[::-1],
        "of half of the features": (rounded * cotangent)[..., : DIM // 2].sum(axis=-1),
        "of the cotangent alone": np.square(cotangent).sum(axis=-1),
        "of the values of the row": (np.repeat(value, 2, axis=0) * cotangent).sum(axis=-1),
        "of weights without the first key": delta - np.exp(scores[:, :, 0] - sums) * cotangent.sum(axis=-1),
    }
    delta = others.get(wrong, delta)
    for head in range(HEADS):
        shown = sums[head][np.arange(ROWS) ^ 8] if wrong == "sums of another row" else sums[head]
        weights, group = np.exp(scores[head] - shown[:, None]), head // 2
        of_scores = weights * (cotangent[head] @ value[group].T - delta[head][:, None]) * DIM**-0.5
        found["grad_query"][head] = of_scores @ key[group]
        found["grad_key"][group] += of_scores.T @ (output if wrong == "keys by outputs" else query)[head]
        found["grad_value"][group] += weights.T @ cotangent[head]
    return {name: array.astype(dtype) for name, array in ({"output": output} | found).items()}


DELTAS = [
    ("of another row", "float32"),
    ("of another head", "bfloat16"),
    ("of half of the features", "bfloat16"),
    ("of the cotangent alone", "float32"),
    ("of the values of the row", "float32"),
    ("of weights without the first key", "bfloat16"),
]


@pytest.mark.parametrize(
    ("wrong", "dtype"), [pytest.param(*one, marks=[pytest.mark.slow] * (n > 2)) for n, one in enumerate(DELTAS)]
)
def test_another_d_is_told_whatever_it_is(wrong: str, dtype: str) -> None:
    fields = drawn(dtype if dtype == "float32" else BFLOAT16)
    report = compare(passed(fields, wrong), **fields)
    told = {fact.array: fact.name for fact in report.facts}
    assert told["grad_query"] == "row_sums"
    assert dtype != "float32" or told["grad_key"] == "row_sums"  # small ones of many rows could be chance in halves
    assert "another D, the sum of output times its gradient in each row, which is off by" in report.verdict.message


def test_another_d_is_off_by_what_was_added() -> None:
    """D and 2 + the number of the row over 100: for the kernel of key and value alone."""
    fields = drawn()
    right, numbers = passed(fields), 2 + np.arange(ROWS) / 100
    key, cotangent = fields["query"].astype(np.float64), right["grad_key"].astype(np.float64)
    scores = key @ np.repeat(fields["key"], 2, axis=0).swapaxes(1, 2) * DIM**-0.5
    scores = np.where(np.tril(np.ones((ROWS, ROWS), bool)), scores, -np.inf)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    each = (weights * numbers[:, None] * DIM**-0.5).swapaxes(1, 2) @ key
    report = compare({**right, "grad_key": (cotangent - each[0::2] - each[1::2]).astype(np.float32)}, **fields)
    [fact] = report.facts
    assert (fact.array, fact.name) == ("grad_key", "row_sums")
    assert fact.numbers["off_by"] == pytest.approx([2, 2.31], abs=0.02)


def test_what_makes_numbers_small_does_not_explain_small_ones() -> None:
    """A gradient of key by the outputs, which are smaller than queries: it is not 0, and not divided by a number."""
    fields = drawn()
    report = compare(passed(fields, "keys by outputs"), **fields)
    assert report.verdict.status == "wrong"
    assert not {"grad.zero", "grad.mean_loss", "scale.twice"} & {one.name for one in report.hypotheses}


def test_factors_that_are_as_uncertain_as_they_are_large_are_not_told() -> None:
    fields = drawn(BFLOAT16)
    report = compare(passed(fields, "sums of another row"), **fields)
    for fact in (one for one in report.facts if one.name == "row_factor"):
        least, most = fact.numbers["least"][0], fact.numbers["most"][0]
        assert 0.1 < least < 1 < most


def split(fields: dict[str, Any], wrong: str) -> np.ndarray:
    """Attention of one query whose keys are split into four equal parts of each sequence."""
    outputs = []
    for entry, length in enumerate(fields["key_lengths"]):
        scores = fields["query"][entry] @ fields["key"][entry, :, :length].swapaxes(1, 2) * 32**-0.5
        size = -(-length // 4)
        parts, sums = [], []
        for start in range(0, length, size):
            own = np.exp(scores[..., start : start + size])
            total = own.sum(axis=-1, keepdims=True)
            parts.append(own @ fields["value"][entry, :, start : min(start + size, length)] / total)
            sums.append(np.log(total))
        powers = {"left out": np.exp(sums), "base 2": np.exp2(sums)}[wrong]
        powers[1] *= wrong != "left out"
        outputs.append((powers * parts).sum(axis=0) / powers.sum(axis=0))
    return np.array(outputs, np.float32)


@pytest.mark.parametrize("wrong", ["left out", "base 2"])
def test_a_split_of_each_sequence_is_told(wrong: str) -> None:
    random = np.random.default_rng(3)
    shapes = {"query": (3, 2, 1, 32), "key": (3, 2, 90, 32), "value": (3, 2, 90, 32)}
    fields: dict[str, Any] = {name: random.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    fields |= {"key_lengths": [90, 41, 66], "query_offset": 0}
    report = compare(split(fields, wrong), **fields)
    assert "for each of 4 equal parts of the keys of its batch entry" in report.verdict.message
    assert ("of parts from 0 on, 1 add nothing" in report.verdict.message) == (wrong == "left out")
    assert not any(one.certainty == "proof" for one in report.hypotheses)


def test_a_failing_case_of_a_suite_says_its_first_fact() -> None:
    fields = {name: array for name, array in drawn().items() if name != "grad_output"}
    output = passed(drawn())["output"]

    def kernel(**_: Any) -> np.ndarray:
        return output * np.linspace(0.5, 2, ROWS, dtype=np.float32)[:, None]

    case = SuiteCase("0000", "plain", fields, {"output": output}, {"output": 1e-6})
    found = diagnose(case, kernel)
    assert found is not None
    assert found.sentence.startswith("fact: In every wrong row the output is right up to a factor of the row")


def test_the_worst_part_of_a_call_is_judged_once(monkeypatch: pytest.MonkeyPatch) -> None:
    random = np.random.default_rng(0)
    arrays: dict[str, Any] = {name: random.normal(size=(64, 2, 8)).astype(np.float32) for name in "qkv"}
    lengths = np.arange(0, 65, 8, dtype=np.int32)
    call = arrays | {"cu_seqlens_q": lengths, "cu_seqlens_k": lengths, "max_seqlen_q": 8, "max_seqlen_k": 8}
    judged: list[Any] = []

    def counted(*arguments: Any) -> Any:
        judged.append(arguments)
        return reference_and_baseline(*arguments)

    for module in ("calls.judge", "calls.compare", "compare"):
        monkeypatch.setattr(f"attention_service.comparison.{module}.reference_and_baseline", counted)
    report = compare_call(
        "flash_attn.flash_attn_varlen_func", actual=random.normal(size=(64, 2, 8)).astype("f4"), **call
    )
    assert report.verdict.status == "wrong"
    assert len(judged) == 1
