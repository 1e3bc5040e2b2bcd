"""The rows of a request where mistakes sit, judged alone: what a suite of thousands of cases can afford."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, Final

import numpy as np

from attention_service.attention.operands import as_cast
from attention_service.attention.plan import Plan
from attention_service.attention.planning import make_plan
from attention_service.attention.spec import AttentionSpec
from attention_service.backends.base import Backend, Check, no_check
from attention_service.comparison.actual import read_actual
from attention_service.comparison.baseline import CORRECT, arrays_of, baselines, stored_dtype
from attention_service.comparison.case import Case, make_case, unknown_options
from attention_service.comparison.compare import Comparison, Judged, Question, pool_of
from attention_service.comparison.errors import distances, measure
from attention_service.comparison.power import no_power
from attention_service.comparison.sample import Sample
from attention_service.comparison.solve import solve

# The order in which ends of tiles of queries are looked at.
TILES: Final = (64, 128, 32, 16, 256, 512)
# Scores that are computed at a time: they stay in the cache of a core.
PART: Final = 2**17


@np.errstate(all="ignore")
def compare_rows(question: Question, backend: Backend, count: int, check: Check = no_check) -> Comparison | None:
    """The comparison of so many rows of each head, if all of them are right.

    None if one is not, or if something was sent that rows alone do not show: then the whole is to be compared. The
    baseline is that of the head with the largest error, which is at most that of all heads.

    Errors: as of compare_question.
    """
    plan = question.plan
    if question.actual is None or question.against is not None or unknown_options(plan):
        return None
    spec = as_cast(question.spec, plan.dtype)
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

    list(case.each(solve_part, _parts(case, len(rows))))
    errors = [partial(measure, array, right[name], stored_dtype(name, case.dtype)) for name, array in sent.items()]
    limits = [partial(_limit_at_worst, case, rows, name, array, right) for name, array in sent.items()]
    tasks: list[Callable[[], Any]] = [*errors, *limits]
    made = list(case.each(lambda task: task(), tasks))
    count = len(sent)
    return {name: Judged(one, one, most) for name, one, most in zip(sent, made[:count], made[count:], strict=True)}


def _parts(case: Case, count: int) -> Iterator[Sample]:
    """A sample of so many rows in parts of about PART scores, by batch entry and heads."""
    sizes = case.plan.sizes
    step = sizes.num_heads if case.needs_all_heads else max(1, PART // (count * sizes.key_length))
    length = max(1, PART // (step * sizes.key_length))
    for batch in range(sizes.batch_size):
        for head in range(0, sizes.num_heads, step):
            heads = np.arange(head, min(head + step, sizes.num_heads))
            for start in range(0, count, length):
                yield Sample(np.array([batch]), heads, np.arange(start, min(start + length, count)))


def _limit_at_worst(
    case: Case, rows: np.ndarray, name: str, sent: np.ndarray, right: Mapping[str, np.ndarray]
) -> float:
    """The baseline of an array (b, h, r, …) on the rows of the batch entry and head where its error is largest."""
    apart = distances(sent, right[name]).reshape(*sent.shape[:2], -1).max(axis=-1)
    batch, head = (int(index) for index in np.unravel_index(int(apart.argmax()), apart.shape))
    heads = np.arange(case.plan.sizes.num_heads) if case.needs_all_heads else np.array([head])
    sample = Sample(np.array([batch]), heads, rows)
    here = replace(sample, rows=np.arange(len(rows)))
    return baselines(case, sample, {each: here.of(array) for each, array in right.items()}, case.dtype)[name]


def chosen_rows(spec: AttentionSpec, plan: Plan, count: int) -> np.ndarray:
    """So many rows in ascending order: ends of sequences, edges of what hides keys, of tiles, then evenly spread."""
    queries = plan.sizes.query_length
    if count >= queries:
        return np.arange(queries)
    edges = np.unique([edge + side for edge in _edges(spec, plan) for side in (-1, 0)])
    edges = edges[(edges > 0) & (edges < queries - 1)]
    if len(edges) > count // 2:
        edges = edges[np.linspace(0, len(edges) - 1, count // 2).round().astype(np.int64)]
    ends = [0, queries - 1, 1, queries - 2, *edges.tolist()]
    tiles = [edge + side for tile in TILES for edge in (tile, (queries - 1) // tile * tile) for side in (-1, 0)]
    spread = np.linspace(0, queries - 1, count).round().astype(np.int64).tolist()
    wanted = dict.fromkeys(row for row in (*ends, *tiles, *spread) if 0 <= row < queries)
    return np.sort(np.array([*wanted][:count], np.int64))


def _edges(spec: AttentionSpec, plan: Plan) -> Iterator[int]:
    """Rows before which the keys that are visible change by more than one."""
    offset = plan.roles.past_length if spec.query_offset is None else int(np.min(spec.query_offset))
    keys = plan.sizes.key_length
    positions = [0, keys]
    if spec.window is not None:
        sides = (spec.window.left, spec.window.right)
        positions += [edge for side in sides if side is not None for edge in (side + 1, keys - side)]
    if spec.chunk_size is not None:
        positions += [spec.chunk_size, (keys - 1) // spec.chunk_size * spec.chunk_size]
    yield from (position - offset for position in positions)
    for lengths in (spec.query_lengths, spec.key_lengths):
        if lengths is not None:
            yield from np.unique(lengths).tolist()
    ids = None if spec.segment_ids is None else spec.segment_ids.query
    if ids is not None:
        yield from np.unique(np.nonzero(np.diff(np.atleast_2d(ids), axis=-1))[1] + 1).tolist()
