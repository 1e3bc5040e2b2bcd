"""Calls of other engines give what their definitions say: random calls of every function against loops over tokens.

`python -m tests.deep_engines` draws thousands. tests/helpers/engine_draws.py has the calls.
"""

from __future__ import annotations

import numpy as np
import pytest

from attention_service import call
from attention_service.engines.table import FUNCTIONS
from tests.helpers.engine_calls import Array, Draw, Drawn
from tests.helpers.engine_draws import DRAWS

EXAMPLES = 30


def rows(drawn: Drawn, output: Array, sums: Array) -> list[tuple[Array, Array]]:
    """The rows of an answer that each sequence has: output (q, h, e) and logsumexp (q, h). All others are NaN."""
    lengths = [len(one.query) for one in drawn.sequences]
    if drawn.form == "one":
        return [(output[None], sums[None])]
    if drawn.form == "heads":  # (b, h, q, e) and (b, h, q)
        return list(zip(output.swapaxes(1, 2), sums.swapaxes(1, 2), strict=True))
    if drawn.form == "dense":  # (b, q, h, e) and (b, h, q)
        found = [(output[n, :q], sums[n, :, :q].T) for n, q in enumerate(lengths)]
        assert all(np.isnan(output[n, q:]).all() and np.isnan(sums[n, :, q:]).all() for n, q in enumerate(lengths))
        return found
    sums = sums.T if drawn.form == "ragged" else sums  # (h, total) of FlashAttention and torch, else (total, h)
    starts, is_free = drawn.about["starts"], np.full(len(output), True)
    for start, q in zip(starts, lengths, strict=True):
        is_free[start : start + q] = False
    assert np.isnan(output[is_free]).all()
    assert np.isnan(sums[is_free]).all()
    return [(output[start : start + q], sums[start : start + q]) for start, q in zip(starts, lengths, strict=True)]


def check(name: str, seed: int) -> float:
    """The largest error of a random call; asserts that it is rounding."""
    drawn = DRAWS[name](Draw(seed))
    result = call(drawn.function, version=drawn.version, include=["attention_weights"], **drawn.arguments)
    assert result.attention_weights is not None
    errors = [0.0]
    found = rows(drawn, result.output, result.logsumexp)
    for n, (expected, (output, sums)) in enumerate(zip(drawn.expected(), found, strict=True)):
        for wanted, got in zip(expected, (output, sums, result.attention_weights[n]), strict=True):
            assert got.shape == wanted.shape, (name, seed, n)
            assert np.array_equal(np.isinf(got), np.isinf(wanted)), (name, seed, n)
            finite = np.isfinite(wanted)
            np.testing.assert_allclose(got[finite], wanted[finite], rtol=1e-9, atol=1e-9, err_msg=f"{name} {seed} {n}")
            if finite.any():
                errors.append(float(np.abs(got[finite] - wanted[finite]).max()))
    return max(errors)


def test_every_function_is_drawn() -> None:
    """But for those that merge, which test_engines_call.py has."""
    drawn = {DRAWS[name](Draw(seed)).function for name in DRAWS for seed in range(20)}
    assert drawn == FUNCTIONS.keys() - {"flashinfer.merge_state", "flashinfer.merge_states"}


@pytest.mark.parametrize("name", DRAWS)
def test_random_calls_give_what_loops_over_tokens_give(name: str) -> None:
    for seed in range(EXAMPLES):
        check(name, seed)
