"""Kernels with one mistake each, written out in NumPy: a comparison names the mistake and proves it."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Final

import numpy as np
import pytest

from attention_service.codecs.decoded import Decoded
from attention_service.comparison.case import make_case
from attention_service.comparison.inputs import COTANGENTS, make_input
from attention_service.comparison.mutants import MUTANTS
from attention_service.comparison.recipes import MADE, Recipe
from attention_service.comparison.sample import Sample
from attention_service.comparison.solve import solve
from attention_service.library import attend, compare
from attention_service.pipeline.prepare import make_spec_and_plan
from attention_service.schemas.compare import ReportedHypothesis

LOG2E: Final = math.log2(math.e)
HEADS, QUERIES, KEYS, DIM = 4, 19, 37, 8
Arrays = tuple[np.ndarray, np.ndarray, np.ndarray]


def operands(queries: int = QUERIES, keys: int = KEYS, kv_heads: int = HEADS, seed: int = 0) -> Arrays:
    """Query, key and value, layout hld, with scores of several units."""
    draw = np.random.default_rng(seed).standard_normal
    return 2 * draw((HEADS, queries, DIM)), draw((kv_heads, keys, DIM)), draw((kv_heads, keys, DIM)) + 1


def softmax(
    scores: np.ndarray, value: np.ndarray, visible: Any = True, *, sink: np.ndarray | float = 0.0
) -> np.ndarray:
    """Softmax of scores (h, q, k) times values; rows that see nothing are 0. sink: exp of it, (h, 1, 1)"""
    weights = np.where(visible, np.exp(scores), 0)
    total = weights.sum(axis=-1, keepdims=True) + sink
    output: np.ndarray = np.divide(weights, total, out=np.zeros_like(weights), where=total > 0) @ value
    return output


def scores_of(query: np.ndarray, key: np.ndarray) -> np.ndarray:
    group = len(query) // len(key)
    found: np.ndarray = query @ np.repeat(key, group, axis=0).swapaxes(1, 2) / math.sqrt(DIM)
    return found


def parts_of(scores: np.ndarray, value: np.ndarray, size: int, visible: Any = True) -> tuple[np.ndarray, np.ndarray]:
    """The outputs (p, h, q, e) and logsumexps (p, h, q) of attention over parts of so many keys."""
    seen = np.broadcast_to(visible, scores.shape)
    cuts = [slice(start, start + size) for start in range(0, scores.shape[-1], size)]
    outputs = np.stack([softmax(scores[..., cut], value[:, cut], seen[..., cut]) for cut in cuts])
    with np.errstate(divide="ignore"):
        sums = [np.log(np.where(seen[..., cut], np.exp(scores[..., cut]), 0).sum(axis=-1)) for cut in cuts]
    return outputs, np.stack(sums)


def merged(outputs: np.ndarray, shares: np.ndarray) -> np.ndarray:
    """The outputs of parts by their shares (p, h, q)."""
    found: np.ndarray = (outputs * (shares / shares.sum(axis=0))[..., None]).sum(axis=0)
    return found


def check(output: np.ndarray, name: str, query: np.ndarray, key: np.ndarray, value: np.ndarray, **options: Any) -> Any:
    """Hold a kernel's output against a request: the mistake is proved, or has the same output as the proved one."""
    report = compare(output, query=query, key=key, value=value, layout="hld", **options)
    best = report.hypotheses[0]
    assert best.certainty == "proof", report.hypotheses
    assert name in (best.name, *best.also), report.hypotheses
    return best


def changed_service(best: ReportedHypothesis, **request: Any) -> np.ndarray:
    """What the service answers to the request with the change of a hypothesis."""
    assert best.change is not None
    return attend(**{**request, **best.change}, include=[]).output


@pytest.mark.parametrize(("tile", "lanes"), [(16, 11), (32, 27)])
def test_padded_lanes_count_in_the_sum(tile: int, lanes: int) -> None:
    query, key, value = operands()
    scores = scores_of(query, key)
    best = check(softmax(scores, value, sink=lanes), "softmax.padded_lanes", query, key, value)
    assert f"{lanes} in a tile of {tile} keys" in best.message


@pytest.mark.parametrize("read", [slice(QUERIES), slice(KEYS - QUERIES, None)])
def test_as_many_keys_as_queries(read: slice) -> None:
    query, key, value = operands()
    output = softmax(scores_of(query, key[:, read]), value[:, read])
    best = check(output, "keys.as_queries", query, key, value)
    if read.start is None:
        assert best.change == {"key_lengths": QUERIES}
        np.testing.assert_allclose(changed_service(best, query=query, key=key, value=value, layout="hld"), output)


@pytest.mark.parametrize(("splits", "size"), [(4, 10), (8, 5)])
def test_the_last_split_is_left_out(splits: int, size: int) -> None:
    query, key, value = operands()
    read = size * (splits - 1)
    output = softmax(scores_of(query, key[:, :read]), value[:, :read])
    check(output, "keys.last_split", query, key, value)


@pytest.mark.parametrize("splits", [2, 4])
def test_splits_read_the_keys_of_the_first(splits: int) -> None:
    query, key, value = operands()
    read = np.arange(KEYS) % -(-KEYS // splits)
    output = softmax(scores_of(query, key[:, read]), value[:, read])
    check(output, "keys.share_read", query, key, value)


@pytest.mark.parametrize(
    ("name", "formula"),
    [
        ("softcap.not_divided", lambda scores: 3 * np.tanh(scores)),
        ("softcap.times_score", lambda scores: scores * np.tanh(scores / 3)),
        ("softcap.times_score", lambda scores: scores / 3 * np.tanh(scores / 3)),
    ],
)
def test_formulas_of_the_softcap(name: str, formula: Callable[[np.ndarray], np.ndarray]) -> None:
    query, key, value = operands()
    check(softmax(formula(scores_of(query, key)), value), name, query, key, value, softcap=3.0)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("hides", [False, True])
def test_heads_attend_to_each_other(is_causal: bool, hides: bool) -> None:
    query, key, value = (array.swapaxes(0, 1) for array in operands(KEYS))
    visible = np.tri(HEADS, dtype=bool) if is_causal and hides else True
    output = softmax(scores_of(query, key), value, visible).swapaxes(0, 1)
    check(output, "heads.as_tokens", *operands(KEYS), is_causal=is_causal)


def test_scores_of_a_part_of_the_features() -> None:
    query, key, value = operands(kv_heads=2)
    values = np.repeat(value, 2, axis=0)
    half = DIM // 2
    check(softmax(scores_of(query[..., :half], key[..., :half]), values), "features.first_part", query, key, value)
    again = scores_of(query[..., :half] + query[..., half:], key[..., :half])
    check(softmax(again, values), "features.read_again", query, key, value)


@pytest.mark.parametrize("size", [19, 10, 16])
@pytest.mark.parametrize("base", [2.0, math.exp(LOG2E)])
def test_parts_are_merged_in_another_base(size: int, base: float) -> None:
    query, key, value = operands()
    outputs, sums = parts_of(scores_of(query, key), value, size)
    best = check(merged(outputs, base**sums), "merge.base2", query, key, value)
    assert f"of {size} keys" in best.message


def test_the_logsumexp_of_parts_that_are_merged_in_another_base() -> None:
    """That which the kernel merges: log2 of the sum of 2 to the natural logsumexps, as a natural number."""
    query, key, value = operands()
    outputs, sums = parts_of(scores_of(query, key), value, 19)
    arrays = {"output": merged(outputs, 2**sums), "logsumexp": np.log2((2**sums).sum(axis=0))}
    report = compare(arrays, query=query, key=key, value=value, layout="hld")
    assert (report.hypotheses[0].name, report.hypotheses[0].certainty) == ("merge.base2", "proof")


def test_parts_with_a_sink_in_the_first_are_merged_in_another_base() -> None:
    query, key, value = operands()
    sinks = np.linspace(-1, 4, len(query))
    outputs, sums = parts_of(scores_of(query, key), value, 19)
    with_sink = np.logaddexp(sums[0], sinks[:, None])
    outputs[0] *= np.exp(sums[0] - with_sink)[..., None]
    sums[0] = with_sink
    check(merged(outputs, 2**sums), "merge.base2", query, key, value, sinks=sinks)


@pytest.mark.parametrize("name", ["merge.unweighted", "merge.empty_part"])
def test_parts_are_merged_without_their_logsumexps(name: str) -> None:
    query, key, value = operands()
    visible = np.arange(KEYS) <= np.arange(QUERIES)[:, None] + 4
    outputs, sums = parts_of(scores_of(query, key), value, 10, visible)
    shares = np.ones_like(sums) if name == "merge.unweighted" else np.exp(np.where(np.isneginf(sums), 0, sums))
    check(merged(outputs, shares), name, query, key, value, is_causal=True, query_offset=4)


def test_a_sink_is_counted_in_each_of_four_splits() -> None:
    query, key, value = operands()
    sinks = np.array([0.5, 1.0, -0.5, 2.0])
    output = softmax(scores_of(query, key), value, sink=4 * np.exp(sinks)[:, None, None])
    best = check(output, "sinks.repeated_per_tile", query, key, value, sinks=sinks)
    assert "4 times" in best.message


def test_sinks_of_other_heads_are_told_as_the_request_would_say_them() -> None:
    query, key, value = operands()
    for sinks in (np.array([0.5, 1.0, -0.5, 2.0]), np.random.default_rng(1).normal(size=(HEADS, QUERIES))):
        used = np.roll(sinks, -1, axis=0)
        output = softmax(scores_of(query, key), value, sink=np.exp(used).reshape(HEADS, -1, 1))
        best = check(output, "sinks.shifted", query, key, value, sinks=sinks)
        np.testing.assert_array_equal(best.change["sinks"], used)


def test_float32_is_not_rounded_to_itself() -> None:
    query, key, value = (array.astype(np.float32) for array in operands())
    found = compare(query=query, key=key, value=value, layout="hld").power
    assert {"precision.scores", "precision.accumulate"}.isdisjoint(found.survivors)


def test_without_a_cache_no_token_can_be_rotated_as_if_it_were_the_first() -> None:
    query, key, value = operands(KEYS)
    found = compare(query=query, key=key, value=value, layout="hld", rotary={}).power
    assert "rotary.no_offset" not in found.survivors


@pytest.mark.parametrize("factor", [LOG2E, 1 / LOG2E])
def test_what_is_added_in_another_base(factor: float) -> None:
    query, key, value = operands()
    scores, random = scores_of(query, key), np.random.default_rng(1)
    bias, sinks, slopes = random.normal(size=(HEADS, QUERIES, KEYS)), random.normal(size=HEADS), 2.0 ** -np.arange(1, 5)
    check(softmax(scores + bias * factor, value), "bias.log2e", query, key, value, bias=bias)
    output = softmax(scores, value, sink=np.exp(sinks * factor)[:, None, None])
    check(output, "sinks.base2", query, key, value, sinks=sinks)
    distances = np.abs(np.arange(QUERIES)[:, None] + 6 - np.arange(KEYS))
    output = softmax(scores - slopes[:, None, None] * factor * distances, value)
    best = check(output, "alibi.log2e", query, key, value, alibi_slopes=slopes, query_offset=6)
    assert best.change["alibi_slopes"] == pytest.approx((slopes * factor).tolist())


@pytest.mark.parametrize("factor", [DIM**-0.5, DIM**0.5, 4.0, 0.25, 2.0])
def test_slopes_times_a_factor(factor: float) -> None:
    """The scale, its inverse, the step from a head's slope to that of its neighbour, 2^(8/4), and 2."""
    query, key, value = operands()
    slopes = 2.0 ** -np.arange(1, 5)
    distances = np.abs(np.arange(QUERIES)[:, None] + 6 - np.arange(KEYS))
    output = softmax(scores_of(query, key) - factor * slopes[:, None, None] * distances, value)
    check(output, "alibi.factor", query, key, value, alibi_slopes=slopes, query_offset=6)


@pytest.mark.parametrize("tile", [16, 32])
@pytest.mark.parametrize("sees", [True, False])
def test_the_diagonal_tile_is_treated_as_a_whole(tile: int, sees: bool) -> None:
    query, key, value = operands(KEYS)
    rows, keys = np.arange(KEYS)[:, None] // tile, np.arange(KEYS) // tile
    output = softmax(scores_of(query, key), value, keys <= rows if sees else keys < rows)
    check(output, "causal.by_tile", query, key, value, is_causal=True)


@pytest.mark.parametrize(
    "row",
    [
        lambda head, query: query * 2 + head % 2,
        lambda head, query: head % 2 * QUERIES + query,
        lambda head, query: query // 2,
    ],
)
def test_rows_of_a_group_are_taken_for_queries(row: Callable[[np.ndarray, np.ndarray], np.ndarray]) -> None:
    query, key, value = operands(kv_heads=2)
    last = row(np.arange(HEADS)[:, None], np.arange(QUERIES)) + 3
    output = softmax(scores_of(query, key), np.repeat(value, 2, axis=0), np.arange(KEYS) <= last[..., None])
    check(output, "causal.packed_group", query, key, value, is_causal=True, query_offset=3)


@pytest.mark.parametrize(("start", "stop"), [(32, 37), (16, 37), (0, 16)])
def test_some_rows_miss_the_window(start: int, stop: int) -> None:
    query, key, value = operands(KEYS)
    rows, keys = np.arange(KEYS)[:, None], np.arange(KEYS)
    visible = (keys >= rows - 5) | ((start <= rows) & (rows < stop))
    output = softmax(scores_of(query, key), value, visible & (keys <= rows))
    check(output, "window.missing_rows", query, key, value, window={"left": 5}, is_causal=True)


@pytest.mark.parametrize(
    ("name", "misread"),
    [("query.layout", "q"), ("keys.layout", "k"), ("values.layout", "v"), ("kv.layout", "kv")],
)
def test_memory_is_read_in_another_layout(name: str, misread: str) -> None:
    arrays = dict(zip("qkv", operands(KEYS), strict=True))
    wrong = arrays | {role: arrays[role].swapaxes(0, 1).reshape(arrays[role].shape) for role in misread}
    check(softmax(scores_of(wrong["q"], wrong["k"]), wrong["v"]), name, *arrays.values())


def test_key_value_heads_in_reverse_order() -> None:
    query, key, value = operands(kv_heads=2)
    output = softmax(scores_of(query, key[::-1]), np.repeat(value[::-1], 2, axis=0))
    check(output, "heads.kv_reversed", query, key, value)


def rotated(array: np.ndarray, positions: np.ndarray, frequencies: np.ndarray) -> np.ndarray:
    """The first features of (h, l, d) rotated in halves."""
    half = len(frequencies)
    cos, sin = np.cos(positions[:, None] * frequencies), np.sin(positions[:, None] * frequencies)
    x, y, rest = array[..., :half], array[..., half : 2 * half], array[..., 2 * half :]
    return np.concatenate([x * cos - y * sin, x * sin + y * cos, rest], axis=-1)


@pytest.mark.parametrize("turns", [4, 8])
def test_frequencies_of_another_number_of_features(turns: int) -> None:
    """4 of 8 features turn; the kernel has the first frequencies of 8, and turns 4 or all."""
    query, key, value = operands(KEYS)
    places, frequencies = np.arange(KEYS), 500.0 ** (-2 * np.arange(turns // 2) / DIM)
    turned = [rotated(array, places, frequencies) for array in (query, key)]
    rotary = {"base": 500.0, "dim": 4}
    best = check(softmax(scores_of(*turned), value), "rotary.other_dim", query, key, value, rotary=rotary)
    change = {"base": math.sqrt(500)} if turns == 4 else {"dim": 8}
    assert best.change["rotary"] == pytest.approx(change)


@pytest.mark.parametrize("by", [1, -1])
def test_positions_of_the_rotation_are_off_by_one(by: int) -> None:
    query, key, value = operands(KEYS)
    places, frequencies = np.arange(KEYS), 10000.0 ** (-2 * np.arange(4) / DIM)
    scores = scores_of(rotated(query, places + by, frequencies), rotated(key, places, frequencies))
    check(softmax(scores, value), "rotary.positions_shifted", query, key, value, rotary={})


def test_the_scale_grows_by_tile() -> None:
    query, key, value = operands(keys=300)
    scores = query @ key.swapaxes(1, 2) * 0.7 ** (np.arange(300) // 64 + 1)
    best = check(softmax(scores, value), "scale.by_tile", query, key, value, scale=0.7)
    assert "of 64 keys" in best.message


def test_products_beyond_float16_become_infinite() -> None:
    query, key, value = (array.astype(np.float16) for array in operands())
    query[0, 2], key[0, 5] = 200, 200  # 8 · 200 · 200 = 320,000
    scores = scores_of(query.astype(np.float64), key.astype(np.float64)) * 5e-4
    output = softmax(scores, value.astype(np.float64))
    output[0, 2] = np.nan
    report = compare(output.astype(np.float16), query=query, key=key, value=value, layout="hld", scale=5e-4 / DIM**0.5)
    assert report.hypotheses[0].name == "precision.overflow16"


@pytest.mark.parametrize("factor", [0.9, 127.5, -1.0])
@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.float16])
def test_an_output_times_a_factor(factor: float, dtype: type) -> None:
    given: list[np.ndarray] = [array.astype(dtype) for array in operands()]
    query, key, value = (array.astype(np.float64) for array in given)
    output = softmax(scores_of(query, key), value) * factor
    best = check(output.astype(dtype), "output.scaled", *given)
    assert float(best.message.partition("(by ")[2].rstrip(")")) == pytest.approx(factor, rel=2e-3)


def test_one_row_times_a_factor_proves_nothing() -> None:
    """Its weights may have another sum, as with a sink of another size."""
    query, key, value = operands(queries=1)
    output = softmax(scores_of(query, key), value)[:1] * 0.9
    report = compare(output, query=query[:1], key=key[:1], value=value[:1], layout="hld")
    assert all(one.certainty == "resembles" for one in report.hypotheses)


def test_rows_times_different_factors_are_no_factor_of_the_output() -> None:
    query, key, value = operands()
    factors = np.linspace(0.9, 0.91, QUERIES)[:, None]
    report = compare(softmax(scores_of(query, key), value) * factors, query=query, key=key, value=value, layout="hld")
    assert all(one.certainty == "resembles" for one in report.hypotheses)


@pytest.mark.parametrize(("given", "wrong"), [(4, 9), (0, -3), ([4, 11], [7, 2]), ([4, 11], [6, 13])])
def test_a_causal_mask_with_another_offset(given: Any, wrong: Any) -> None:
    draw = np.random.default_rng(3).standard_normal
    query, key, value = draw((2, HEADS, QUERIES, DIM)), draw((2, HEADS, KEYS, DIM)), draw((2, HEADS, KEYS, DIM))
    last = np.arange(QUERIES)[:, None] + np.reshape(wrong, (-1, 1, 1, 1))
    scores = query @ key.swapaxes(2, 3) / math.sqrt(DIM)
    output = softmax(scores, value, np.arange(KEYS) <= last)
    report = compare(output, query=query, key=key, value=value, layout="bhld", is_causal=True, query_offset=given)
    best = report.hypotheses[0]
    assert (best.name, best.certainty, best.change) == ("causal.other_offset", "proof", {"query_offset": wrong})


@pytest.mark.slow
@pytest.mark.parametrize("normalization", ["softmax", "sigmoid"])
def test_any_two_mistakes_can_be_made_together(normalization: str) -> None:
    """The search tries pairs, and may not fail whatever a kernel returned: twelve of each mistake are tried here."""
    options = MADE - {*COTANGENTS} - ({"sinks"} if normalization == "sigmoid" else set())
    recipe = Recipe(options | {"past"}, queries=5, keys=19, normalization=normalization, has_row_sinks=True)
    spec, plan = make_spec_and_plan(Decoded(make_input(recipe, 0), frozenset()))
    case = make_case(spec, plan.dtype)
    sample = Sample(np.arange(1), np.arange(2), np.arange(2))
    once = {name: list(row.edit(case)) for name, row in MUTANTS.items()}
    applied = {name for name, cases in once.items() if cases}
    assert len(applied) > 90
    random = np.random.default_rng(0)
    for first in sorted(applied):
        for wrong in once[first][:1]:
            for second in random.choice(list(MUTANTS), 12, replace=False):
                for both in list(MUTANTS[second].edit(wrong))[:1]:
                    assert solve(both, sample).output.shape == (1, 2, 2, 5)


def test_a_formula_of_the_softcap_beside_a_missing_one() -> None:
    """Both are tried together: neither needs what the other takes away."""
    query, key, value = operands()
    visible = np.arange(KEYS) <= np.arange(QUERIES)[:, None] + 4
    output = softmax(scores_of(query, key), value, visible)
    options = {"mask": visible & (np.arange(KEYS) != 2), "softcap": 3.0}
    report = compare(output, query=query, key=key, value=value, layout="hld", is_causal=True, query_offset=4, **options)
    best = report.hypotheses[0]
    assert ({*best.name.split(" and ")}, best.certainty) == ({"mask.absent", "softcap.absent"}, "proof")


# What a kernel does to the output, and to the logsumexp in base e of what it computes.
WITH_LOGSUMEXPS: Final[dict[str, tuple[Callable[[np.ndarray, np.ndarray], np.ndarray], int, float]]] = {
    "window.left_plus_one": (lambda weights, value: weights @ value, 6, np.log(2)),
    "value.is_key": (lambda weights, value: weights @ np.random.default_rng(4).standard_normal((40, 8)), 5, np.log(2)),
    "output.zeros": (lambda weights, value: 0 * weights @ value, 5, 1 / np.log(2)),
}


@pytest.mark.parametrize("name", WITH_LOGSUMEXPS)
def test_a_mistake_of_the_logsumexp_is_named_beside_one_of_the_output(name: str) -> None:
    """The window should reach 5 keys back; the logsumexp is that of the kernel's own keys, in another base."""
    make, left, base = WITH_LOGSUMEXPS[name]
    query, value = np.random.default_rng(3).standard_normal((2, 40, 8))
    key = np.random.default_rng(4).standard_normal((40, 8))
    back = np.arange(40)[:, None] - np.arange(40)
    powers = np.exp(query @ key.T / np.sqrt(8)) * ((back >= 0) & (back <= left))
    total = powers.sum(axis=1)
    arrays = {"output": make(powers / total[:, None], value), "logsumexp": np.log(total) / base}
    fields: dict[str, Any] = {"query": query, "key": key, "value": value, "is_causal": True, "window": {"left": 5}}
    best = compare(arrays, **fields).hypotheses[0]
    assert (best.name, best.certainty) == (f"{name} and logsumexp.base2", "proof")
    # A logsumexp that no mistake explains proves nothing of the output, either.
    arrays["logsumexp"] = arrays["logsumexp"] + np.sin(np.arange(40))
    assert all(one.certainty != "proof" for one in compare(arrays, **fields).hypotheses)
