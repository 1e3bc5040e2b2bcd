"""The rows of a request where mistakes sit, judged alone: what a suite of thousands of cases can afford."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Final

import numpy as np

from attention_service.attention.plan import Plan
from attention_service.attention.planning import make_plan
from attention_service.attention.score_term import ScoreTerm
from attention_service.attention.tile import Tile
from attention_service.backends.base import Backend, Check, no_check
from attention_service.comparison.actual import read_actual
from attention_service.comparison.baseline import arrays_of, legal_errors, limit, stored_dtype
from attention_service.comparison.case import Case, make_case, unknown_options
from attention_service.comparison.engine.comparison import Comparison
from attention_service.comparison.engine.power import no_power
from attention_service.comparison.errors import distances, measure
from attention_service.comparison.judged import Judged
from attention_service.comparison.row_errors import RowErrors, evened, judges_rows, legal_squares, mean_squares
from attention_service.comparison.rules import CORRECT
from attention_service.comparison.sample import Sample, everything
from attention_service.comparison.solve import solve
from attention_service.comparison.truth import Question, pool_of

# The order in which ends of tiles of queries are looked at.
TILES: Final = (64, 128, 32, 16, 256, 512)
# Scores that are computed at a time: they stay in the cache of a core.
PART: Final = 2**17
# Copies of scores that live at the same time, for which there is as much memory as for keys and values.
COPIES: Final = 8
# Keys that are asked which rows see them: so many spread ones, and as many at which terms begin or end to hide. A term
# that takes more bytes than this for one key, beside its mask, is not asked.
PROBED: Final = 32
BYTES: Final = 2**20
# A term that begins or ends to hide at more keys than this has no structure.
FEW: Final = 8


@np.errstate(all="ignore")
def compare_rows(
    question: Question, backend: Backend, count: int, check: Check = no_check
) -> Comparison[Question] | None:
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
    rows = chosen_rows(plan, count)
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
        return most, legal_squares(alone, chosen, name, squares, here[name]) if squares else None

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


def chosen_rows(plan: Plan, count: int) -> np.ndarray:
    """So many rows in ascending order: ends of sequences, edges of what hides keys, of tiles, then evenly spread."""
    queries = plan.sizes.query_length
    if count >= queries:
        return np.arange(queries)
    near = {edge + side for edge in _edges(plan) for side in (-1, 0)}
    edges = np.array(sorted(row for row in near if 0 < row < queries - 1), np.int64)
    if len(edges) > count // 2:
        edges = edges[np.linspace(0, len(edges) - 1, count // 2).round().astype(np.int64)]
    ends = [0, queries - 1, 1, queries - 2, *edges.tolist()]
    tiles = [edge + side for tile in TILES for edge in (tile, (queries - 1) // tile * tile) for side in (-1, 0)]
    spread = np.linspace(0, queries - 1, count).round().astype(np.int64).tolist()
    wanted = dict.fromkeys(row for row in (*ends, *tiles, *spread) if 0 <= row < queries)
    return np.sort(np.array([*wanted][:count], np.int64))


def _edges(plan: Plan) -> set[int]:
    """Rows before which the keys that are visible change by more than one, by what each term says of some keys.

    A term that reads the offset moves with the row. What counts of it: changes of the first and the last key, of keys
    at which another term begins or ends to hide, and of more than two keys at once. Of other terms all changes count,
    unless a quarter of the rows has some, as in a mask of random booleans.
    """
    queries, keys = plan.sizes.query_length, plan.sizes.key_length
    terms = [term for term in plan.terms if type(term).visible is not ScoreTerm.visible]
    ends = _ends_of_keys(terms, plan)
    where = np.flatnonzero(ends.any(axis=0))
    where = where[np.linspace(0, len(where) - 1, min(len(where), PROBED)).round().astype(np.int64)]
    probed = np.unique([*np.linspace(0, keys - 1, min(keys, PROBED)).round().astype(np.int64), *where])
    found: set[int] = set()
    for term in terms:
        if term.visible_bytes((plan.sizes.batch_size, 1, queries, 1))[1] > BYTES:
            continue
        changed = np.zeros((plan.sizes.batch_size, queries - 1), np.uint8)
        is_edge = np.zeros(changed.shape, bool)
        for key in probed:
            seen = _seen(term, plan, slice(0, queries), slice(key, key + 1))[..., 0]
            changes = seen[:, 1:] != seen[:, :-1]
            changed += changes
            is_edge |= changes & ends[:, key, None]
        is_edge |= changed > (2 if term.reads_offset else 0)
        rows = np.flatnonzero(is_edge.any(axis=0)) + 1
        if term.reads_offset or len(rows) <= queries // 4:
            found |= {*rows.tolist()}
    return found


def _ends_of_keys(terms: Iterable[ScoreTerm], plan: Plan) -> np.ndarray:
    """Which keys (b, k) are the first, the last, or one at which a term begins or ends to hide, whatever the row."""
    queries, keys = plan.sizes.query_length, plan.sizes.key_length
    found = np.zeros((plan.sizes.batch_size, keys), bool)
    found[:, [0, -1]] = True
    for term in (term for term in terms if not term.reads_offset):
        for row in {0, queries // 2, queries - 1}:
            seen = _seen(term, plan, slice(row, row + 1), slice(0, keys))[:, 0]
            changes = seen[:, 1:] != seen[:, :-1]
            found[:, 1:] |= changes & (np.count_nonzero(changes, axis=-1, keepdims=True) <= FEW)
    return found


def _seen(term: ScoreTerm, plan: Plan, rows: slice, keys: slice) -> np.ndarray:
    """Which of these keys each row of the first head sees by one term alone, (b, r, k)."""
    one = slice(0, 1)
    tile = Tile(slice(0, plan.sizes.batch_size), one, one, rows, keys)
    seen = term.visible(tile, np.asarray)
    shape = (plan.sizes.batch_size, rows.stop - rows.start, keys.stop - keys.start)
    return np.broadcast_to(np.True_ if seen is None else seen[:, 0], shape)
