"""What a comparison computes with: sums and roundings of kernels that are less precise, and positions, by hand."""

from __future__ import annotations

from typing import Any

import numpy as np

from attention_service.attention.operands import as_cast
from attention_service.attention.spec import AttentionSpec, Norm
from attention_service.comparison.case import make_case
from attention_service.comparison.mutants.precision import tf32
from attention_service.comparison.problem import Problem, Rounding, row_sum, weighted

HALF = Rounding(computes=np.dtype(np.float32), sums=np.dtype(np.float16))


def spread(*numbers: float) -> np.ndarray:
    """Each number at the start of a block of 16, as many as are summed up before their sum is rounded; one row."""
    found = np.zeros((1, 1, 1, 16 * len(numbers)), np.float32)
    found[..., ::16] = numbers
    return found


def problem(value: np.ndarray, rounding: Rounding) -> Problem:
    scores = np.zeros((1, 1, 1, value.shape[2]), np.float32)
    return Problem(scores=scores, visible=None, added=None, value=value, bad_values=None, scale=1.0, softcap=None,
                   softcap_at="scaled", scaled_bias=False, hidden_score=-np.inf, sinks=None, normalization="softmax",
                   rounding=rounding)  # fmt: skip


def test_sums_in_float16_lose_what_is_less_than_half_a_step() -> None:
    """From 2048 on float16 has even numbers only, from 4096 on multiples of 4; ties go to the even multiple."""
    weights = spread(2048, 1, 1)
    value = np.broadcast_to(np.array([1, 2], np.float32), (1, 1, 48, 2))
    assert row_sum(weights, HALF).item() == 2048
    assert weighted(problem(value, HALF), weights).ravel().tolist() == [2048, 4096]
    exact = Rounding(computes=np.dtype(np.float32))
    assert row_sum(weights, exact).item() == 2050
    assert weighted(problem(value, exact), weights).ravel().tolist() == [2050, 4100]
    block = np.array([[[[2048, *[0] * 13, 1, 1]]]], np.float32)
    assert row_sum(block, HALF).item() == 2050, "a block is summed up before it is rounded"
    assert weighted(problem(value[:, :, :16], HALF), block).ravel().tolist() == [2050, 4100]


def test_tf32_has_ten_bits_after_the_point() -> None:
    step = 2.0**-10
    numbers = np.array([1 + step, 1 + step / 2, 1 + step * 1.5, 1 + step * 0.51, -1 - step * 0.49], np.float32)
    assert tf32(numbers).tolist() == [1 + step, 1, 1 + 2 * step, 1 + step, -1]


def test_where_the_first_query_stands() -> None:
    """As given; after the past; at the first key if there are as many; else nowhere."""
    tokens = {name: np.ones((1, 5, 2)) for name in ("query", "key", "value")}
    past = {name: np.ones((1, 1, 3, 2)) for name in ("past_key", "past_value")}
    more: list[tuple[dict[str, Any], list[int] | None]] = [
        ({"query_offset": np.array(-2)}, [-2]), (past, [3]), ({}, [0]), ({"query": np.ones((1, 4, 2))}, None),
    ]  # fmt: skip
    for fields, expected in more:
        offset = make_case(AttentionSpec(**tokens | fields, num_heads=1), np.dtype(np.float64)).offset
        assert (None if offset is None else offset.tolist()) == expected


def test_numbers_are_taken_in_the_types_that_are_computed_from() -> None:
    """Operands in the type of the request, parameters in that of the computation; masks and integers as they are."""
    arrays: dict[str, Any] = {name: np.full((4, 2), 0.1) for name in ("query", "key", "value")}
    norm = Norm(weight=np.full(2, 0.1))
    mask, lengths = np.ones((4, 4), dtype=bool), np.array(3)
    spec = AttentionSpec(**arrays, query_norm=norm, bias=np.full((4, 4), 0.1), mask=mask, key_lengths=lengths)
    cast = as_cast(spec, np.dtype(np.float16))
    assert cast.query is not None
    assert cast.bias is not None
    assert cast.query_norm is not None
    assert cast.query.dtype == np.float16
    assert cast.bias.dtype == np.float32
    assert cast.query_norm.weight is not None
    assert cast.query_norm.weight.dtype == np.float32
    assert cast.mask is mask
    assert cast.key_lengths is lengths
