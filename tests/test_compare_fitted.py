"""Numbers that facts print are planted ones, up to their error; `tests.deep_compare fitted` draws more."""

from __future__ import annotations

import re
from typing import Any, Final

import numpy as np
import pytest

from attention_service.attention.arrays import BFLOAT16
from attention_service.library import compare_call
from tests.helpers.planted_numbers import KINDS, NUMBER, covers, facts_about, facts_of_outputs, misses

# Draws of each kind, of which the first ones were told falsely: a factor that was off by more than its error, an exact
# 0 or 1 for what rounding hides, the least of those that are known for the least of all.
DRAWS: Final = {
    "factor": (3, 8),
    "head_factor": (7, 16, 29),
    "row_factor": (3, 7),
    "extra_sum": (13, 19),
    "parts": (6, 15, 16, 22, 31),
    "scales": (3,),
    "caps": (5, 13),
    "offset": (3, 15),
    "row_sums": (0, 26, 31),
    "terms": (0, 3),
}


@pytest.mark.parametrize(("kind", "seed"), [(kind, seed) for kind, seeds in DRAWS.items() for seed in seeds])
def test_a_planted_number_is_told_as_it_is(kind: str, seed: int) -> None:
    planted = KINDS[kind](np.random.default_rng(seed))
    facts, limit = facts_about(planted)
    wrong = {fact.message: misses(planted, fact.name, fact.message, limit) for fact in facts}
    assert set(map(str, wrong.values())) == {"[]"}, wrong


def with_sinks(query: np.ndarray, key: np.ndarray, value: np.ndarray, sinks: np.ndarray) -> np.ndarray:
    """The output (4, 40, 32) where row i sees keys i + 13 to i + 30."""
    scores = query.astype(np.float64) @ key.astype(np.float64).swapaxes(-1, -2) / np.sqrt(32)
    apart = np.arange(70) - np.arange(40)[:, None]
    powers = np.where((apart <= 30) & (apart >= 13), np.exp(scores), 0)
    total = powers.sum(axis=-1, keepdims=True) + np.exp(sinks)[:, None, None]
    return np.asarray(powers @ value.astype(np.float64) / total)


@pytest.mark.parametrize("seed", [0, 2, 4])
def test_a_factor_of_each_row_is_simpler_than_one_of_each_part(seed: int) -> None:
    """Sinks that are too large, so that each row is divided by another sum, whichever keys it sees."""
    random = np.random.default_rng(seed)
    query, key, value = (random.normal(size=(4, length, 32)).astype(BFLOAT16) for length in (40, 70, 70))
    sinks = (random.normal(size=4) + seed % 3 - 0.5).astype(np.float32)
    fields: dict[str, Any] = {"query": query, "key": key, "value": value, "layout": "hld", "sinks": sinks}
    fields |= {"is_causal": True, "query_offset": 30, "window": {"left": 17}}
    sent = with_sinks(query, key, value, sinks + 0.3).astype(BFLOAT16)
    told = [fact.name for fact in facts_of_outputs(fields, {"output": sent})[0]]
    assert told[0] in ("extra_sum", "row_factor", "head_factor", "factor")


def test_a_number_that_rounding_hides_has_its_error() -> None:
    """Sums of heads that are too small by 0, 0.3, 9 and 4 keys of score 0; the second is within rounding."""
    random = np.random.default_rng(0)
    query, key, value = (random.normal(size=(4, 60, 32)).astype(BFLOAT16) for _ in range(3))
    powers = np.exp(query.astype(np.float64) @ key.astype(np.float64).swapaxes(-1, -2) / np.sqrt(32))
    total, missing = powers.sum(axis=-1, keepdims=True), np.array([0, 0.3, 9, 4])
    sent = powers @ value.astype(np.float64) / (total - missing[:, None, None])
    fields = {"query": query, "key": key, "value": value, "layout": "hld"}
    [fact] = facts_of_outputs(fields, {"output": sent.astype(BFLOAT16)})[0]
    found = re.search("too small by (.*), where a key of score 0 adds 1", fact.message)
    assert found is not None, fact.message
    told = NUMBER.findall(found[1])
    assert all(error for _, error in told)
    assert all(covers(number, error, one) for (number, error), one in zip(told, missing, strict=True))


def test_the_weights_of_parts_have_their_errors() -> None:
    """Partial outputs in bfloat16, merged by random weights of each row."""
    random = np.random.default_rng(0)
    value = random.normal(size=(20, 3, 2, 16)).astype(BFLOAT16)
    sums = random.normal(size=(20, 3, 2)).astype(np.float32)
    shares = random.dirichlet(np.ones(3), size=(20, 2)).transpose(0, 2, 1)
    sent = (shares[..., None] * value.astype(np.float64)).sum(axis=1).astype(BFLOAT16)
    [fact] = compare_call("flashinfer.merge_states", actual={"output": sent}, v=value, s=sums).facts
    assert fact.name == "part_weights"
    row, head = (int(fact.numbers[name][0]) for name in ("row", "head"))
    told = NUMBER.findall(fact.message.partition("are ")[2].removesuffix("."))
    assert len(told) == 3
    assert all(covers(number, error, one) for (number, error), one in zip(told, shares[row, :, head], strict=True))
