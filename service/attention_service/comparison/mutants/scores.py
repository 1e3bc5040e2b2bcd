"""Mistakes of scale, softcap, sinks, biases and logsumexp."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final

import numpy as np

from attention_service.attention.array_functions import Array
from attention_service.attention.arrays import compute_dtype
from attention_service.attention.score_term import Load
from attention_service.attention.terms.additions import Alibi, Bias
from attention_service.attention.terms.relative import RelativeKeys
from attention_service.attention.tile import Tile, part_of
from attention_service.comparison.case import INEXPRESSIBLE, Case
from attention_service.comparison.errors import largest_number
from attention_service.comparison.mutants.table import SPLITS, absent, mutant, tiles
from attention_service.comparison.problem import Answer, Problem, attention

# What a number is multiplied by that is added to scores of the other base, and how it is told.
BASES: Final = {math.log2(math.e): "times log2(e)", math.log(2): "divided by log2(e)"}


def _scale(case: Case, scale: float | np.ndarray) -> Iterator[Case]:
    if not np.allclose(scale, case.scale, rtol=1e-9, atol=0) and np.isfinite(scale).all():
        yield scaled(case, scale)


def scaled(case: Case, scale: float | np.ndarray) -> Case:
    """The case with another scale: one number, or (h,)."""
    return case.changed({"scale": scale.tolist() if isinstance(scale, np.ndarray) else scale}, scale=scale)


def _is_scaled(case: Case) -> bool:
    return bool(np.any(case.scale != 1))


@mutant("scale.absent", "The scores are not scaled.")
def scale_absent(case: Case) -> Iterator[Case]:
    return _scale(case, 1.0)


@mutant("scale.twice", "The scale is applied twice.")
def scale_twice(case: Case) -> Iterator[Case]:
    return _scale(case, case.scale * case.scale)  # ** raises OverflowError for floats


@mutant("scale.inverse_dim", "The scale is 1/d, not 1/√d.")
def scale_inverse_dim(case: Case) -> Iterator[Case]:
    return _scale(case, 1 / case.plan.sizes.head_dim)


@mutant("scale.zero_is_default", "A scale of 0 is taken for none: the scale is the default, 1/√d.")
def scale_zero_is_default(case: Case) -> Iterator[Case]:
    default = 1 / math.sqrt(case.plan.sizes.head_dim)
    if np.any(case.scale == 0):
        is_array = isinstance(case.scale, np.ndarray)
        yield from _scale(case, np.where(case.scale == 0, default, case.scale) if is_array else default)


@mutant("scale.value_dim", "The scale is taken from the width of the values.")
def scale_value_dim(case: Case) -> Iterator[Case]:
    if case.plan.sizes.value_dim != case.plan.sizes.head_dim:
        yield from _scale(case, 1 / math.sqrt(case.plan.sizes.value_dim))


@mutant("scale.log2e", "The scale holds log2(e), as for exp2, but the exponential is exp.")
def scale_log2e(case: Case) -> Iterator[Case]:
    return _scale(case, case.scale * math.log2(math.e))


@mutant("scale.first_head", "All heads have the scale of the first head.")
def scale_first_head(case: Case) -> Iterator[Case]:
    if isinstance(case.scale, np.ndarray):
        yield from _scale(case, float(case.scale[0]))


@mutant("scale.shifted", "Each head has the scale of the next head.")
def scale_shifted(case: Case) -> Iterator[Case]:
    if isinstance(case.scale, np.ndarray):
        yield from _scale(case, np.roll(case.scale, -1))


@mutant("scale.by_tile", "The query is multiplied by the scale again for each tile of keys.", by_tile=True)
def scale_by_tile(case: Case) -> Iterator[Case]:
    if np.any(np.abs(case.scale) != 1) and np.any(case.scale):
        for tile in (tile for tile in tiles(case) if tile < case.plan.sizes.key_length):
            yield case.changed(softmax=partial(_rescaled, tile=tile), tile=tile, detail=f"of {tile} keys")


def _rescaled(problem: Problem, tile: int) -> Answer:
    return attention(problem.changed(scale=problem.scale ** (np.arange(problem.scores.shape[-1]) // tile + 1)))


@mutant("softcap.absent", "The scores are not capped.")
def softcap_absent(case: Case) -> Iterator[Case]:
    if case.softcap is not None:
        yield case.changed({"softcap": None}, softcap=None)


@mutant("softcap.after_bias", "The scores are capped after bias and mask, not before.")
def softcap_after_bias(case: Case) -> Iterator[Case]:
    if case.softcap is not None and case.terms:
        yield case.changed(softcap_at="masked", detail="after bias and mask")
        if case.term(Bias) or case.term(Alibi):
            yield case.changed(softcap_at="added", detail="after the bias, before the mask")


@mutant("softcap.before_scale", "The scores are capped before they are scaled.")
def softcap_before_scale(case: Case) -> Iterator[Case]:
    if case.softcap is not None and _is_scaled(case):
        yield case.changed(softcap_at="unscaled")


@mutant("softcap.not_divided", "The scores are not divided by the softcap before the hyperbolic tangent.")
def softcap_not_divided(case: Case) -> Iterator[Case]:
    if case.softcap is not None:
        yield from _scale(case, case.scale * case.softcap)


@mutant("softcap.times_score", "The hyperbolic tangent is multiplied by the score, not by the softcap.")
def softcap_times_score(case: Case) -> Iterator[Case]:
    if case.softcap is not None:
        for by, detail in {1.0: "", case.softcap: "divided by the softcap"}.items():
            yield case.changed(softmax=partial(_times_score, cap=case.softcap, by=by), detail=detail)


def _times_score(problem: Problem, cap: float, by: float) -> Answer:
    scores = problem.scores * np.asarray(problem.scale, problem.scores.dtype)
    capped = scores / by * np.tanh(scores / cap)
    return attention(problem.changed(scores=capped, scale=1.0, softcap=None))


@mutant("sinks.absent", "The sinks take no weight.")
def sinks_absent(case: Case) -> Iterator[Case]:
    if case.sinks is not None:
        yield case.changed({"sinks": None}, sinks=None)


def _sinks(case: Case, sinks: np.ndarray, detail: str = "") -> Iterator[Case]:
    if case.sinks is not None and not np.array_equal(sinks, case.sinks):
        told = sinks if sinks.ndim == 1 or "b" in case.plan.layout else sinks[0]
        yield case.changed({"sinks": told.tolist()}, sinks=sinks, detail=detail)


@mutant("sinks.shifted", "Each head has the sink of the next head.")
def sinks_shifted(case: Case) -> Iterator[Case]:
    if case.sinks is not None:
        yield from _sinks(case, np.roll(case.sinks, -1, axis=0 if case.sinks.ndim == 1 else 1))


@mutant("sinks.first_query", "Each query has the sink of the first query.")
def sinks_first_query(case: Case) -> Iterator[Case]:
    if case.sinks is not None and case.sinks.ndim > 1:
        yield from _sinks(case, np.broadcast_to(case.sinks[..., :1], case.sinks.shape))


@mutant("sinks.repeated_per_tile", "The sink is counted once for each tile of keys.", by_tile=True)
def sinks_repeated_per_tile(case: Case) -> Iterator[Case]:
    if case.sinks is not None:
        for count in SPLITS:
            yield from _sinks(case, case.sinks + math.log(count), f"{count} times")
        for tile in tiles(case):
            count = -(-case.plan.sizes.key_length // tile)
            yield from _sinks(case.changed({}, tile=tile), case.sinks + math.log(count), f"of {tile} keys")


@mutant("sinks.scaled", "The sinks are scaled as the scores are.")
def sinks_scaled(case: Case) -> Iterator[Case]:
    if case.sinks is not None:
        per_row = isinstance(case.scale, np.ndarray) and case.sinks.ndim > 1
        yield from _sinks(case, case.sinks * (np.expand_dims(case.scale, -1) if per_row else case.scale))


@mutant("sinks.base2", "The sinks are in another base than the scores: with log2(e), or without it.")
def sinks_base2(case: Case) -> Iterator[Case]:
    if case.sinks is not None:
        for factor, detail in BASES.items():
            yield from _sinks(case, case.sinks * factor, detail)


@dataclass(frozen=True, slots=True)
class _Multiplied(Bias):
    """A bias times factors (1, h or 1, 1, 1), without a copy of its numbers: a search keeps many of them."""

    factors: np.ndarray

    def added(self, tile: Tile, load: Load) -> Array | None:
        return load(part_of(self.numbers, tile) * part_of(self.factors, tile))


def _bias_of(case: Case) -> Bias | None:
    return case.term(Bias) or case.term(_Multiplied)


def _times(case: Case, factor: float | np.ndarray, change: Mapping[str, Any] | None, detail: str = "") -> Case:
    """The case with its bias times a factor."""
    bias, factors = _bias_of(case), np.reshape(factor, (1, -1, 1, 1))
    assert bias is not None
    made = _Multiplied(bias.numbers, factors * bias.factors if isinstance(bias, _Multiplied) else factors)
    terms = tuple(term for term in case.terms if term is not bias)
    return case.changed(change, detail=detail, terms=(*terms, made))


absent("bias.absent", "The bias is not added.", Bias, {"bias": None})


@mutant("bias.before_scale", "The bias is added before the scale, which then scales it, too.")
def bias_before_scale(case: Case) -> Iterator[Case]:
    if _bias_of(case) and _is_scaled(case):
        yield _times(case, case.scale, INEXPRESSIBLE)


@mutant("bias.log2e", "The bias is in another base than the scores: with log2(e), or without it.")
def bias_log2e(case: Case) -> Iterator[Case]:
    bias = _bias_of(case)
    if bias and (np.isfinite(bias.numbers) & (bias.numbers != 0)).any():
        for factor, detail in BASES.items():
            yield _times(case, factor, {"bias": detail}, detail)


absent(
    "relative.absent",
    "The products of queries with the keys for distances (relative positions) are not added.",
    RelativeKeys,
    {"relative_keys": None},
)


@mutant("relative.no_bias", "The bias is not added to the queries that are multiplied by the keys for distances.")
def relative_no_bias(case: Case) -> Iterator[Case]:
    term = case.term(RelativeKeys)
    if term and term.bias is not None:
        yield case.with_term(replace(term, bias=None), {"relative_keys": {"query_bias": None}})


@mutant("relative.reversed", "The distances count from the key to the query: i - j has the key for j - i.")
def relative_reversed(case: Case) -> Iterator[Case]:
    term = case.term(RelativeKeys)
    if term and term.keys.shape[1] > 1:
        last = term.first + term.keys.shape[1] - 1
        yield case.with_term(replace(term, keys=term.keys[:, ::-1], first=-last))


@mutant("relative.shifted", "The keys for distances are off by one: each distance has the key of its neighbour.")
def relative_shifted(case: Case) -> Iterator[Case]:
    term = case.term(RelativeKeys)
    if term and term.keys.shape[1] > 1:
        # Padding and reshaping gives a distance without a key the padding: a key of zeros.
        zeros = np.zeros_like(term.keys[:, :1])
        before, behind = np.concatenate([zeros, term.keys], axis=1), np.concatenate([term.keys, zeros], axis=1)
        for first, keys in ((term.first - 1, behind), (term.first, before)):
            yield case.with_term(replace(term, keys=keys, first=first))
        for first in (term.first - 1, term.first + 1):
            yield case.with_term(replace(term, first=first), {"relative_keys": {"first": first}})


@dataclass(frozen=True, slots=True)
class _Unshifted(RelativeKeys):
    """Each key j has key j of those for distances, whichever the query."""

    def distances(self, tile: Tile) -> np.ndarray:
        found: np.ndarray = np.zeros_like(RelativeKeys.distances(self, tile)) + tile.keys + self.first
        return found


@mutant(
    "relative.unshifted", "The products with the keys for distances are not shifted: all queries have the same keys."
)
def relative_unshifted(case: Case) -> Iterator[Case]:
    term, queries = case.term(RelativeKeys), case.plan.sizes.query_length
    if term and term.keys.shape[1] > 1 and (queries > 1 or np.any(term.offset != -term.first)):
        wrong = _Unshifted(term.keys, term.first, term.offset, term.bias)
        yield case.without(RelativeKeys).with_term(wrong)


absent("alibi.absent", "The linear biases (ALiBi) are not added.", Alibi, {"alibi_slopes": None})


def _alibi(case: Case, change: Callable[[np.ndarray], np.ndarray], detail: str = "") -> Iterator[Case]:
    """The case with other slopes."""
    alibi = case.term(Alibi)
    if alibi:
        slopes = change(alibi.slopes)
        if not np.array_equal(slopes, alibi.slopes):
            yield case.with_term(replace(alibi, slopes=slopes), {"alibi_slopes": slopes.tolist()}, detail=detail)


@mutant("alibi.sign", "The linear biases (ALiBi) are added with the wrong sign.")
def alibi_sign(case: Case) -> Iterator[Case]:
    return _alibi(case, np.negative)


@mutant("alibi.first_head", "Each head has the slope of the first head.")
def alibi_first_head(case: Case) -> Iterator[Case]:
    return _alibi(case, lambda slopes: np.full_like(slopes, slopes[0]))


@mutant("alibi.factor", "The slopes of the linear biases (ALiBi) are multiplied by a number, as the scale.")
def alibi_factor(case: Case) -> Iterator[Case]:
    step, root = 2 ** (8 / case.plan.sizes.num_heads), math.sqrt(case.plan.sizes.head_dim)
    factors = {"the scale": case.scale} | {f"{one:.5g}": one for one in (root, step, 1 / step, 2.0, 0.5)}
    for detail, factor in factors.items():
        yield from _alibi(case, partial(np.multiply, factor), detail)


@mutant("alibi.log2e", "The linear biases (ALiBi) are in another base than the scores: with log2(e), or without it.")
def alibi_log2e(case: Case) -> Iterator[Case]:
    for factor, detail in BASES.items():
        yield from _alibi(case, partial(np.multiply, factor), detail)


@mutant("alibi.offset_ignored", "The distances of the linear biases (ALiBi) leave out the offset of the queries.")
def alibi_offset_ignored(case: Case) -> Iterator[Case]:
    alibi = case.term(Alibi)
    if alibi and alibi.offset.any():
        yield case.with_term(replace(alibi, offset=np.zeros_like(alibi.offset)))


def _logsumexp(edit: Callable[[Problem, np.ndarray], np.ndarray]) -> Callable[[Problem, Answer], Answer]:
    def edited(problem: Problem, answer: Answer) -> Answer:
        return answer if answer.logsumexp is None else replace(answer, logsumexp=edit(problem, answer.logsumexp))

    return edited


@mutant("logsumexp.base2", "The logsumexp has another base.", needs="logsumexp")
def logsumexp_base2(case: Case) -> Iterator[Case]:
    yield case.edited(_logsumexp(lambda _, found: found / math.log(2))).changed(detail="base 2 in the place of e")
    yield case.edited(_logsumexp(lambda _, found: found * math.log(2))).changed(detail="base e in the place of 2")


@mutant("logsumexp.unscaled", "The logsumexp is that of unscaled scores.", needs="logsumexp")
def logsumexp_unscaled(case: Case) -> Iterator[Case]:
    def unscaled(problem: Problem, answer: Answer) -> Answer:
        return replace(answer, logsumexp=case.softmax(problem.changed(scale=1.0)).logsumexp)

    if _is_scaled(case):
        yield case.edited(unscaled)


@mutant("logsumexp.no_sink", "The logsumexp leaves out the sink.", needs="logsumexp")
def logsumexp_no_sink(case: Case) -> Iterator[Case]:
    def without_sinks(problem: Problem, answer: Answer) -> Answer:
        return replace(answer, logsumexp=case.softmax(problem.changed(sinks=None)).logsumexp)

    if case.sinks is not None:
        yield case.edited(without_sinks)


def _where_empty(number: float, problem: Problem, found: np.ndarray) -> np.ndarray:
    return np.where(problem.empty, number, found)


@mutant("logsumexp.empty_finite", "The logsumexp of a query that sees no key is a finite number.", needs="logsumexp")
def logsumexp_empty_finite(case: Case) -> Iterator[Case]:
    computes = compute_dtype(case.dtype)
    most = largest_number(computes)
    if case.terms and case.sinks is None:
        for number in (-most, -0.7 * most, -1e30, -1e10, -1e9, -1e4, 0.0):
            stored = float(computes.type(number))
            yield case.edited(_logsumexp(partial(_where_empty, stored))).changed(detail=f"{number:.4g}")


@mutant("logsumexp.empty_positive", "The logsumexp of a query that sees no key is +∞, not -∞.", needs="logsumexp")
def logsumexp_empty_positive(case: Case) -> Iterator[Case]:
    if case.terms and case.sinks is None:
        yield case.edited(_logsumexp(partial(_where_empty, np.inf)))
