"""The answer of a case for a sample of its rows."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any, Final

import numpy as np

from attention_service.attention.arrays import is_float, norm
from attention_service.attention.score_term import ScoreTerm
from attention_service.attention.steps.step import OperandStep
from attention_service.attention.tile import Tile
from attention_service.attention.visibility import additions, visible
from attention_service.comparison.case import EXACT, Case
from attention_service.comparison.errors import largest, largest_number
from attention_service.comparison.problem import Answer, Problem, attention, masked_scores, rounded, weighted
from attention_service.comparison.sample import BLOCK, Sample, blocks, everything

# Scores between two rows that are computed, too, as this is faster than to begin anew.
SKIPPED: Final = 2**16


def solve(case: Case, sample: Sample) -> Answer:
    """The answer of a case for a sample. With an output map its output is (b, 1, r, out), of all heads."""
    case.check()
    with np.errstate(all="ignore"):
        if case.of_whole is not None:
            found, moved = Answer(sample.of(case.once("of whole", lambda: _whole(case)))), sample
        else:
            heads = case.head_order[sample.heads]
            moved = sample if np.array_equal(heads, sample.heads) else replace(sample, heads=heads)
            problem = make_problem(case, moved)
            found = _over_queries(case, moved, problem) if case.over_queries else _answer(case, moved, problem)
            for edit in case.edits:
                found = edit(problem, found)
        output = _stepped_outputs(case, found.output, sample)
        output = output if case.gate is None else _gated(case, output, case.gate[moved.index])
        output = _joined(case, output) if case.joins_heads else output
        if case.rounding.output is not None:
            output = rounded(output, case.rounding.output)
        elif largest(output) > (most := largest_number(case.dtype)):  # what the kernel's type cannot hold
            output = np.where(np.abs(output) > most, np.copysign(np.inf, output), output)
        return found if output is found.output else replace(found, output=output)


def _answer(case: Case, sample: Sample, problem: Problem) -> Answer:
    """The answer before its edits, which cases that differ in nothing else have in common."""
    if not case.edits or case.rounding != EXACT or sample.columns is not None:
        return case.softmax(problem)
    flags = (case.softcap, case.softcap_at, case.scaled_bias, case.hidden_score, _key_of(case.scale))
    given = (problem.scores, problem.value, case.terms, case.bad_values, case.sinks, case.softmax)
    name = f"answer {sample.heads.tobytes()!r} {flags}"
    return sample.once(case.room, name, lambda: case.softmax(problem), *given)


def make_problem(case: Case, sample: Sample) -> Problem:
    """The scores and values of a sample."""
    rounding, heads = case.rounding, sample.heads
    key_heads, value_heads = case.key_of_head[heads], case.value_of_head[heads]
    operands = (case.query, case.key, case.past_key, case.steps["query"], case.steps["key"], case.past_steps)
    rest = (rounding.computes, rounding.inputs, rounding.operands)
    flags = (_key_of(case.scale) if rounding.scaled_query else None, rounding.scaled_query, rounding.folded)
    name = f"scores {heads.tobytes()!r} {key_heads.tobytes()!r} {flags}"
    reading = [term for term in case.terms if term.reads_query]
    scores = sample.once(case.room, name, lambda: _scores(case, sample, key_heads), *operands, *rest, *reading)
    value = sample.once(
        case.room,
        f"value {value_heads.tobytes()!r}",
        lambda: _with_past(case, "value", sample.batches, value_heads),
        case.value,
        case.past_value,
        case.steps["value"],
        rounding.computes,
        rounding.inputs,
        rounding.operands,
    )
    seen, added = sample.once(case.room, f"terms {heads.tobytes()!r}", lambda: _terms(case, sample), case.terms)
    bad = None if case.bad_values is None else case.bad_values[np.ix_(sample.batches, value_heads)]
    if sample.columns is not None:
        value, bad = value[:, :, sample.columns], None if bad is None else bad[:, :, sample.columns]
    return Problem(
        scores=scores,
        visible=seen,
        added=None if added is None else added.astype(rounding.computes, copy=False),
        value=value,
        bad_values=bad,
        scale=_scale(case, heads),
        softcap=case.softcap,
        softcap_at=case.softcap_at,
        scaled_bias=case.scaled_bias,
        hidden_score=case.hidden_score,
        sinks=None if case.sinks is None else _sinks(case.sinks, sample).astype(rounding.computes),
        normalization=case.plan.normalization,
        rounding=rounding,
    )


def _scores(case: Case, sample: Sample, key_heads: np.ndarray) -> np.ndarray:
    """The unscaled scores (b, h, r, k)."""
    rounding = case.rounding
    query = _prepared(case, "query", sample.batches, sample.heads, sample.rows)
    key = _with_past(case, "key", sample.batches, key_heads)
    if sample.columns is not None:
        key = key[:, :, sample.columns]
    if rounding.scaled_query is not None:
        # Divided again, so that all that follows finds unscaled scores.
        scale = np.asarray(_scale(case, sample.heads) * rounding.folded, query.dtype)
        query = rounded(query * scale, rounding.scaled_query) / np.where(scale == 0, 1, scale)  # which is 0 then
    scores: np.ndarray = query @ key.swapaxes(-1, -2)
    for term in case.terms:
        if term.reads_query:
            _add_products(term, query, sample, scores)
    return scores


def _add_products(term: ScoreTerm, query: np.ndarray, sample: Sample, scores: np.ndarray) -> None:
    """Add the products of a term to scores (b, h, r, k), in place. query: (b, h, r, d), of the sample"""
    functions, last = NumpyFunctions(query.dtype), 0 if sample.columns is None else sample.columns.start
    columns = slice(last, last + scores.shape[-1])
    start = 0
    for rows in _runs(sample.rows):
        part = slice(start, start + rows.stop - rows.start)
        start = part.stop
        for i, batch in enumerate(sample.batches):
            for j, head in enumerate(sample.heads):
                tile = Tile(_only(batch), slice(0, 0), _only(head), rows, columns)
                scores[_only(i), _only(j), part] += term.products(query[_only(i), _only(j), part], tile, functions)


def _only(index: int) -> slice:
    """The slice of one index."""
    return slice(int(index), int(index) + 1)


def values_of(case: Case, batches: np.ndarray, heads: np.ndarray) -> np.ndarray:
    """The values (b, g, k, e) of some batch entries and key/value heads, those of the past first."""
    return _with_past(case, "value", batches, heads)


def spread_of_scores(case: Case, sample: Sample) -> np.ndarray:
    """√Σ(q·k)² of the products that each unscaled score (b, h, r, k) is the sum of."""
    query = _prepared(case, "query", sample.batches, sample.heads, sample.rows)
    key = _with_past(case, "key", sample.batches, case.key_of_head[sample.heads])
    if sample.columns is not None:
        key = key[:, :, sample.columns]
    spread: np.ndarray = np.sqrt(np.square(query) @ np.square(key).swapaxes(-1, -2))
    return spread


def _sinks(sinks: np.ndarray, sample: Sample) -> np.ndarray:
    """The sinks of the rows of a sample, (h, 1) or (b, h, r)."""
    found: np.ndarray = sinks[sample.heads][:, None] if sinks.ndim == 1 else sinks[sample.index]
    return found


def _scale(case: Case, heads: np.ndarray) -> float | np.ndarray:
    """The scale of the scores of these heads: one number, or (h, 1, 1)."""
    return case.scale[heads][:, None, None] if isinstance(case.scale, np.ndarray) else case.scale


def _key_of(scale: float | np.ndarray) -> float | bytes:
    return scale.tobytes() if isinstance(scale, np.ndarray) else scale


def _prepared(
    case: Case, role: str, batches: np.ndarray, heads: np.ndarray, rows: np.ndarray | None = None
) -> np.ndarray:
    """Query, new key or new value (b, h, l, d) of some batch entries, heads and tokens after their steps."""
    given: np.ndarray = getattr(case, role)
    steps = case.steps[role]
    needs_all = any(step.needs_all_heads for step in steps)
    chosen = np.arange(given.shape[1]) if needs_all else heads
    tokens = np.arange(given.shape[2]) if rows is None else rows
    parts = [step.part(batches, chosen, tokens) for step in steps]
    array = stepped(parts, _cast(case, _taken(given, batches, chosen, tokens)))
    if needs_all:
        array = array[:, heads]
    is_changed = role != "value" or bool(steps)
    return array if case.rounding.operands is None or not is_changed else rounded(array, case.rounding.operands)


def _taken(array: np.ndarray, *indices: np.ndarray) -> np.ndarray:
    """The elements at these indices of the first axes; a view that cannot be written to if they are consecutive."""
    if not all(np.array_equal(one, np.arange(one[0], one[0] + len(one))) for one in indices if len(one)):
        found: np.ndarray = array[np.ix_(*indices)]
        return found
    view = array[tuple(slice(int(one[0]), int(one[0]) + len(one)) if len(one) else slice(0) for one in indices)]
    view.flags.writeable = False
    return view


class NumpyFunctions:
    """NumPy for steps, in the type of the arrays."""

    def __init__(self, compute_dtype: np.dtype) -> None:
        self.xp = np
        self.compute_dtype = compute_dtype

    def load(self, array: np.ndarray) -> np.ndarray:
        """The array, floats in the type of the others."""
        return array.astype(self.compute_dtype, copy=False) if is_float(array.dtype) else array


def stepped(steps: Iterable[OperandStep], array: np.ndarray) -> np.ndarray:
    """An operand (b, h, l, d) after these steps."""
    functions = NumpyFunctions(array.dtype)
    for step in steps:
        array = step.apply(array, functions, norm(array))
    return array


def _cast(case: Case, array: np.ndarray) -> np.ndarray:
    """An operand in the type that is computed in."""
    if case.rounding.inputs is not None:
        array = case.rounding.inputs(array)
    return array.astype(case.rounding.computes, copy=False)


def _with_past(case: Case, role: str, batches: np.ndarray, heads: np.ndarray) -> np.ndarray:
    """Keys or values (b, h, k, d): those of the past, which no step changes, and the new ones."""
    new = _prepared(case, role, batches, heads)
    if not case.past_length:
        return new
    past = _cast(case, _taken(getattr(case, f"past_{role}"), batches, heads))
    if role == "key":
        past = stepped([step.part(batches, heads, np.arange(case.past_length)) for step in case.past_steps], past)
    return np.concatenate([past, new], axis=2)


def _terms(case: Case, sample: Sample) -> tuple[np.ndarray | None, np.ndarray | None]:
    """What is visible to the rows of a sample, and what is added to their scores; each broadcasts to (b, h, r, k)."""
    if not case.terms:
        return None, None
    sizes = case.plan.sizes
    full = tuple(slice(int(chosen.min()), int(chosen.max()) + 1) for chosen in (sample.batches, sample.heads))
    columns = slice(0, sizes.key_length) if sample.columns is None else sample.columns
    seen_parts, added_parts = [], []
    width = columns.stop - columns.start
    for rows in _runs(sample.rows, SKIPPED // (width * (full[1].stop - full[1].start))):
        tile = Tile(full[0], slice(0, sizes.num_kv_heads), full[1], rows, columns)
        chosen = sample.rows[(sample.rows >= rows.start) & (sample.rows < rows.stop)] - rows.start
        seen = visible(case.terms, tile, _as_it_is)
        seen_parts.append(_chosen(True if seen is None else seen, sample, full, chosen, width))
        added = [_chosen(part, sample, full, chosen, width) for part in additions(case.terms, tile, _as_it_is)]
        added_parts.append(sum(added[1:], start=added[0]) if added else None)
    kept = [part for part in added_parts if part is not None]
    return _stacked(seen_parts), _stacked(kept) if len(kept) == len(added_parts) else None


def _stacked(parts: list[np.ndarray]) -> np.ndarray:
    """Arrays (b or 1, h or 1, rows, k) one below the other."""
    leading = np.broadcast_shapes(*(part.shape[:2] for part in parts))
    return np.concatenate([np.broadcast_to(part, leading + part.shape[2:]) for part in parts], axis=2)


def _as_it_is(array: np.ndarray) -> np.ndarray:
    return array


def _chosen(array: Any, sample: Sample, full: tuple[slice, ...], rows: np.ndarray, keys: int) -> np.ndarray:
    """The batch entries and heads of a sample, and these rows, of an array that broadcasts to the tile around it."""
    array = np.asarray(array)
    array = array.reshape((1,) * (4 - array.ndim) + array.shape)
    for axis, (chosen, around) in enumerate(zip((sample.batches, sample.heads), full, strict=True)):
        if array.shape[axis] > 1:
            array = array.take(chosen - around.start, axis=axis)
    if array.shape[2] > len(rows):
        array = array.take(rows, axis=2)
    return np.broadcast_to(array, (*array.shape[:2], len(rows), keys))


def _runs(rows: np.ndarray, skipped: int = 0) -> Iterator[slice]:
    """Ascending rows as slices of consecutive ones, or of those with at most so many rows between them."""
    breaks = np.flatnonzero(np.diff(rows) > 1 + skipped) + 1
    for run in np.split(rows, breaks):
        yield slice(int(run[0]), int(run[-1]) + 1)


def _stepped_outputs(case: Case, heads: np.ndarray, sample: Sample) -> np.ndarray:
    """Head outputs (b, h, r, e) of a sample, as a kernel returns them, after their steps."""
    steps = case.steps["output"]
    if steps and case.rounding.output is not None:
        heads = rounded(heads, case.rounding.output)
    return stepped((step.part(sample.batches, sample.heads, sample.rows) for step in steps), heads)


def _gated(case: Case, heads: np.ndarray, gate: np.ndarray) -> np.ndarray:
    """Head outputs (b, h, r, e), as a kernel returns them, times the gates (b, h, r, e or 1) of a sample."""
    if case.rounding.output is not None:
        heads, gate = rounded(heads, case.rounding.output), rounded(gate, case.rounding.output)
    found: np.ndarray = np.where(heads == 0, 0, heads * gate.astype(heads.dtype))
    return found


def _joined(case: Case, heads: np.ndarray) -> np.ndarray:
    """The output map applied to the outputs of all heads (b, h, r, e): (b, 1, r, out)."""
    linear = case.plan.roles.output_map
    assert linear is not None
    b, h, r, e = heads.shape
    joined = heads.transpose(0, 2, 1, 3).reshape(b, r, h * e) @ linear.weight.T.astype(heads.dtype)
    if linear.bias is not None:
        joined = joined + linear.bias.astype(heads.dtype)
    found: np.ndarray = joined[:, None]
    return found


def _whole(case: Case) -> np.ndarray:
    """All head outputs (b, h, q, e), as `of_whole` returns them."""
    assert case.of_whole is not None
    if case.head_outputs is not None:
        return case.of_whole(case.head_outputs)
    before, sizes = replace(case, of_whole=None), case.plan.sizes
    found = np.empty((sizes.batch_size, sizes.num_heads, sizes.query_length, sizes.value_dim))
    for block in blocks(before, everything(before)):
        case.check()
        found[block.index] = before.softmax(make_problem(before, block)).output
    return case.of_whole(found)


def can_solve_all_queries(case: Case) -> bool:
    """True if the scores of all queries of a head fit into a block."""
    return case.plan.sizes.query_length > 1 and case.plan.sizes.query_length * case.plan.sizes.key_length <= 32 * BLOCK


def _over_queries(case: Case, sample: Sample, problem: Problem) -> Answer:
    """The answer with the softmax over the queries."""
    scores = masked_scores(problem)
    sums = [
        [case.once(f"columns {b} {h}", partial(_column_sums, case, b, h)) for h in sample.heads] for b in sample.batches
    ]
    weights = np.exp(scores - np.array(sums)[:, :, None])
    return Answer(weighted(problem, weights), attention(problem).logsumexp, weights)


def _column_sums(case: Case, batch: int, head: int) -> np.ndarray:
    """The logsumexp of each column (k,) of the scores of a head; inf where no query sees the key."""
    rows, keys = np.arange(case.plan.sizes.query_length), case.plan.sizes.key_length
    shift, total = np.full(keys, -np.inf), np.zeros(keys)
    for block in blocks(case, Sample(np.array([batch]), np.array([head]), rows)):
        case.check()
        scores = masked_scores(make_problem(case, block))[0, 0]
        before, shift = shift, np.maximum(shift, scores.max(axis=0))
        base = np.where(np.isneginf(shift), 0, shift)
        total = total * np.exp(before - base) + np.exp(scores - base).sum(axis=0)
    return np.where(total > 0, shift + np.log(total), np.inf)


def keys_as_values(case: Case) -> np.ndarray:
    """The new keys (b, g, n, d) after their steps."""
    return operand(case, "key")


def operand(case: Case, role: str) -> np.ndarray:
    """Query, new key or new value of all batch entries and heads, (b, h or g, l, d or e), after their steps."""
    sizes = case.plan.sizes
    heads = sizes.num_heads if role == "query" else sizes.num_kv_heads
    return _prepared(case, role, np.arange(sizes.batch_size), np.arange(heads))
