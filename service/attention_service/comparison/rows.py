"""The rows of a request where mistakes sit, judged alone: what a suite of thousands of cases can afford."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Final

import numpy as np

from attention_service.attention.plan import Plan
from attention_service.attention.planning import make_plan
from attention_service.attention.spec import AttentionSpec
from attention_service.backends.base import Backend, Check, no_check
from attention_service.comparison.actual import read_actual
from attention_service.comparison.baseline import (
    CORRECT,
    arrays_of,
    legal_errors,
    limit,
    stored_dtype,
)
from attention_service.comparison.case import Case, make_case, unknown_options
from attention_service.comparison.compare import Comparison
from attention_service.comparison.errors import distances, measure
from attention_service.comparison.judged import Judged
from attention_service.comparison.power import no_power
from attention_service.comparison.row_errors import RowErrors, evened, judges_rows, legal_squares, mean_squares
from attention_service.comparison.sample import Sample, everything
from attention_service.comparison.solve import solve
from attention_service.comparison.truth import Question, pool_of

# The order in which ends of tiles of queries are looked at.
TILES: Final = (64, 128, 32, 16, 256, 512)
# Scores that are computed at a time: they stay in the cache of a core.
PART: Final = 2**17
# Copies of scores that live at the same time, for which there is as much memory as for keys and values.
COPIES: Final = 8


@np.errstate(all="ignore")
def compare_rows(question: Question, backend: Backend, count: int, check: Check = no_check) -> Comparison | None:
    """The comparison of so many rows of each head, if all of them are right.

    None if one is not, or if something was sent or asked for that rows alone do not show, such as the reference: then
    the whole is to be compared. The baseline is that of the head with the largest error, which is at most that of all
    heads.

    Errors: as of compare_question.
    """
    plan = question.plan
    wants_all = question.reference or question.tolerance is not None or question.against is not None
    if question.actual is None or wants_all or question.gradients is not None or unknown_options(plan):
        return None
    spec = question.cast_spec
    names = tuple(name for name in question.actual if name != "output")
    exact = make_plan(spec._replace(dtype="float64", backend="numpy", device="cpu", include=names, top_k=None))  # type: ignore[arg-type]  # names of arrays
    rows = chosen_rows(question.spec, plan, count)
    actual = read_actual(question.actual, exact, base2=question.base2, field=question.field, rows=rows)
    if actual.as_sent.keys() != actual.canonical.keys():
        return None
    case = replace(make_case(spec, plan.dtype, check, question.liberties), pool=pool_of(backend))
    judged = _judged(case, rows, actual.canonical)
    if any(one.ratio > CORRECT for one in judged.values()):
        return None
    return Comparison(
        question=question,
        metadata=None,
        judged=judged,
        passes={},
        tolerances=(),
        where=[],
        hypotheses=[],
        power=no_power(()),
        suggestion=None,
        rows=len(rows),
    )


def _judged(case: Case, rows: np.ndarray, sent: Mapping[str, np.ndarray]) -> dict[str, Judged]:
    """The errors and limits of arrays (b, h, r, …) of these rows, by name. sent: as a kernel returned them"""
    right = {name: np.full(array.shape, np.nan) for name, array in sent.items()}

    def solve_part(part: Sample) -> None:
        here = Sample(part.batches, part.heads, rows[part.rows])
        for name, array in arrays_of(solve(case, here), right).items():
            part.put(right[name], array)

    whole = everything(case)
    list(case.each(solve_part, _parts(case, whole.batches, whole.heads, len(rows))))
    names = list(sent)
    errors = case.each(lambda name: measure(sent[name], right[name], stored_dtype(name, case.dtype)), names)
    limits = _limits(case, rows, sent, right)
    return {name: Judged(one, one, *limits[name]) for name, one in zip(names, errors, strict=True)}


def _limits(
    case: Case, rows: np.ndarray, sent: Mapping[str, np.ndarray], right: Mapping[str, np.ndarray]
) -> dict[str, tuple[float, RowErrors | None]]:
    """The baselines of arrays (b, h, r, …), each on the rows of the batch entry and head where its error is largest,
    and the errors of these rows if they are judged."""
    alone = replace(case, pool=None)  # threads share the parts, so that none of them waits for another within its part
    worst = {name: Sample(*_worst(case, array, right[name]), np.arange(len(rows))) for name, array in sent.items()}
    parts = [(name, part) for name in sent for part in _parts(case, worst[name].batches, worst[name].heads, len(rows))]

    def legal_error(named: tuple[str, Sample]) -> tuple[float, np.ndarray | None]:
        name, part = named
        here, chosen = (
            {each: part.of(array) for each, array in right.items()},
            Sample(part.batches, part.heads, rows[part.rows]),
        )
        squares: list[np.ndarray] = []
        see = None
        if judges_rows(case, name):
            see = lambda stored: squares.append(mean_squares(stored[name], here[name]))  # noqa: E731
        most = legal_errors(alone, chosen, here, case.dtype, see)[name]
        return most, legal_squares(alone, chosen, name, squares) if squares else None

    most, legal = dict.fromkeys(sent, 0.0), {name: np.zeros(array.shape[:3]) for name, array in sent.items()}
    for (name, part), (error, squares) in zip(parts, case.each(legal_error, parts), strict=True):
        most[name] = max(most[name], error)
        if squares is not None:
            part.put(legal[name], squares)
    found = {}
    for name, sample in worst.items():
        own, expected = sample.of(sent[name]), sample.of(right[name])
        errors = RowErrors(mean_squares(own, expected, 0.0), evened(case, sample.of(legal[name])))
        largest = limit(most[name], 0.0, expected, stored_dtype(name, case.dtype))
        found[name] = largest, errors if judges_rows(case, name) else None
    return found


def _worst(case: Case, sent: np.ndarray, right: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The batch entry and the head where the error of an array is largest; all heads if they are joined."""
    apart = distances(sent, right).reshape(*sent.shape[:2], -1).max(axis=-1)
    batch, head = np.unravel_index(int(apart.argmax()), apart.shape)
    return np.array([batch]), np.arange(case.plan.sizes.num_heads) if case.needs_all_heads else np.array([head])


def _parts(case: Case, batches: np.ndarray, heads: np.ndarray, count: int) -> Iterator[Sample]:
    """So many rows in parts of about PART scores, by batch entry and heads; small batch entries together.

    Very long keys take more scores at a time, as many as their numbers, which are read again for each part.
    """
    sizes = case.plan.sizes
    step = len(heads) if case.needs_all_heads else max(1, PART // (count * sizes.key_length))
    length = max(1, PART // (step * sizes.key_length), (sizes.head_dim + sizes.value_dim) // COPIES)
    numbers = max(len(heads) * count, sizes.num_kv_heads * (sizes.head_dim + sizes.value_dim)) * sizes.key_length
    together = max(1, PART // numbers)
    for batch in range(0, len(batches), together):
        for head in range(0, len(heads), step):
            for start in range(0, count, length):
                rows = np.arange(start, min(start + length, count))
                yield Sample(batches[batch : batch + together], heads[head : head + step], rows)


def chosen_rows(spec: AttentionSpec, plan: Plan, count: int) -> np.ndarray:
    """So many rows in ascending order: ends of sequences, edges of what hides keys, of tiles, then evenly spread."""
    queries = plan.sizes.query_length
    if count >= queries:
        return np.arange(queries)
    near = {edge + side for edge in _edges(spec, plan) for side in (-1, 0)}
    edges = np.array(sorted(row for row in near if 0 < row < queries - 1), np.int64)
    if len(edges) > count // 2:
        edges = edges[np.linspace(0, len(edges) - 1, count // 2).round().astype(np.int64)]
    ends = [0, queries - 1, 1, queries - 2, *edges.tolist()]
    tiles = [edge + side for tile in TILES for edge in (tile, (queries - 1) // tile * tile) for side in (-1, 0)]
    spread = np.linspace(0, queries - 1, count).round().astype(np.int64).tolist()
    wanted = dict.fromkeys(row for row in (*ends, *tiles, *spread) if 0 <= row < queries)
    return np.sort(np.array([*wanted][:count], np.int64))


def _edges(spec: AttentionSpec, plan: Plan) -> Iterator[int]:
    """Rows before which the keys that are visible change by more than one."""
    # Python's integers, as those of a request may be of any size.
    offsets = np.asarray(plan.roles.past_length if spec.query_offset is None else spec.query_offset, object)
    keys = plan.sizes.key_length
    positions = [0, keys]
    if spec.window is not None:
        sides = (spec.window.left, spec.window.right)
        positions += [edge for side in sides if side is not None for edge in (side + 1, keys - side)]
    if spec.chunk_size is not None:
        positions += [spec.chunk_size, (keys - 1) // spec.chunk_size * spec.chunk_size]
    yield from (position - offset for position in positions for offset in {*offsets.flat})
    if spec.key_lengths is not None:
        yield from np.unique(np.asarray(spec.key_lengths, object) - offsets).tolist()
    if spec.query_lengths is not None:
        yield from np.unique(spec.query_lengths).tolist()
    ids = None if spec.segment_ids is None else spec.segment_ids.query
    if ids is not None:
        yield from np.unique(np.nonzero(np.diff(np.atleast_2d(ids), axis=-1))[1] + 1).tolist()
