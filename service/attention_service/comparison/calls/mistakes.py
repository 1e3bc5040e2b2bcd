"""The table of mistakes of addressing: each makes of a call those that a wrong kernel computes in its place."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final

import numpy as np

from attention_service.attention.terms import POSITIONAL
from attention_service.comparison.calls.moves import Suspect, moved, stored
from attention_service.comparison.mutants import MUTANTS
from attention_service.engines.call import Call, Merge
from attention_service.engines.partial import State, merge
from attention_service.engines.tokens import Rows, Table, Tokens, times

# Parts of the keys that a sink is counted in, each.
SPLITS: Final = (2, 4, 8)
ROLES: Final = ("query", "key", "value")


@dataclass(frozen=True, slots=True)
class Mistake:
    """A row of the table.

    name: stable: group.mistake; message: what the kernel did, as one sentence; edit: the calls that it makes of one
    applies: True for calls of which it could be made; unseen: why a call of these makes no other one
    """

    name: str
    message: str
    edit: Callable[[Any], Iterator[Suspect]]
    applies: Callable[[Any], bool]
    unseen: str


MISTAKES: Final[dict[str, Mistake]] = {}


def _mistake(
    name: str, message: str, applies: Callable[[Any], bool], unseen: str
) -> Callable[[Callable[[Any], Iterator[Suspect]]], Callable[[Any], Iterator[Suspect]]]:
    """Put a function into the table. Arguments: see Mistake"""

    def add(edit: Callable[[Any], Iterator[Suspect]]) -> Callable[[Any], Iterator[Suspect]]:
        MISTAKES[name] = Mistake(name, message, edit, applies, unseen)
        return edit

    return add


def _has_pages(call: Call | Merge) -> bool:
    return isinstance(call, Call) and stored(call)[0].table is not None


def _grows(call: Call | Merge) -> bool:
    """True for pages that no new keys come after."""
    return isinstance(call, Call) and _has_pages(call) and call.past is None


def _table(call: Call) -> Table:
    found = stored(call)[0].table
    assert found is not None
    return found


def _is_aligned(call: Call | Merge) -> bool:
    return isinstance(call, Call) and bool(POSITIONAL & call.options.keys())


def _has_many(call: Call | Merge) -> bool:
    return isinstance(call, Call) and len(call.query.lengths) > 1


FILLED: Final = "these lengths fill every page"


@_mistake(
    "pages.stale_slot",
    "NaN in slots that no token fills gets into the output: 0 times NaN is NaN.",
    _grows,
    FILLED,
)
def _stale_slot(call: Call) -> Iterator[Suspect]:
    table = _table(call)
    is_stale = (table.lengths % table.page > 0) & (call.query.lengths > 0)
    if is_stale.any():
        yield Suspect(call, nan=is_stale)


@_mistake("pages.last_full", "Every slot of the last page counts as a key.", _grows, FILLED)
def _last_full(call: Call) -> Iterator[Suspect]:
    table = _table(call)
    full = -(-table.lengths // table.page) * table.page
    if (full > table.lengths).any():
        yield moved(call, lambda one: replace(one, lengths=full))


@_mistake(
    "pages.one_more",
    "A sequence that fills its pages reads one page more.",
    _grows,
    "no sequence fills its pages and has an entry after them",
)
def _one_more(call: Call) -> Iterator[Suspect]:
    table = _table(call)
    is_full = (table.lengths > 0) & (table.lengths % table.page == 0)
    found = moved(call, lambda one: replace(one, lengths=one.lengths + is_full * one.page))
    if (is_full if found.unknown is None else is_full & ~found.unknown).any():
        yield found


@_mistake(
    "pages.order", "The pages of a sequence are read in ascending order.", _has_pages, "all rows of the table ascend"
)
def _order(call: Call) -> Iterator[Suspect]:
    def ascending(table: Table) -> Table:
        counts = -(-table.lengths // table.page)
        first = np.cumsum(counts) - counts
        entries = table.entries[np.arange(counts.sum()) + np.repeat(table.start - first, counts)]
        order = np.lexsort((entries, np.repeat(np.arange(len(counts)), counts)))
        return replace(table, entries=entries[order], start=first)

    yield moved(call, ascending)


@_mistake(
    "pages.batch_shifted",
    "A sequence reads the pages of its neighbour.",
    lambda call: _has_pages(call) and _has_many(call),
    "all sequences have the same pages",
)
def _batch_shifted(call: Call) -> Iterator[Suspect]:
    def shifted(by: int, table: Table) -> Table:
        return replace(table, start=np.roll(table.start, by))

    for by, whose in ((1, "the one before"), (-1, "the one after")):
        yield moved(call, partial(shifted, by), whose)


@_mistake(
    "pages.size", "Pages have half of their size.", _has_pages, "no sequence has more tokens than half a page has slots"
)
def _size(call: Call) -> Iterator[Suspect]:
    page = _table(call).page
    if page % 2 == 0 and (_table(call).lengths > page // 2).any():
        yield moved(call, lambda one: replace(one, page=page // 2))


@_mistake(
    "ragged.previous_offset",
    "A sequence has the causal offset of the one before.",
    lambda call: _is_aligned(call) and _has_many(call),
    "all sequences have the same offset",
)
def _previous_offset(call: Call) -> Iterator[Suspect]:
    offsets = call.offsets
    for first, detail in ((offsets[0], ""), (offsets[-1], "the first that of the last")):
        found = np.append(first, offsets[:-1])
        if (found != offsets).any():
            yield Suspect(call._replace(offset=found), detail=detail)


@_mistake(
    "ragged.lengths_of_first",
    "All sequences have as many keys as the first.",
    lambda call: _has_many(call) and call.past is None,
    "all sequences have as many keys",
)
def _lengths_of_first(call: Call) -> Iterator[Suspect]:
    lengths = np.full_like(call.key.lengths, call.key.lengths[0])
    if (lengths == call.key.lengths).all():
        return

    def equal(places: Any) -> Any:
        return (
            places._replace(lengths=lengths)
            if isinstance(places, Rows)
            else replace(places, lengths=np.full_like(places.lengths, places.lengths[0]))
        )

    yield moved(call, equal)


@_mistake(
    "ragged.top_left",
    "The mask aligns the first query of a sequence with its first key.",
    lambda call: _is_aligned(call) and call.offset is not None,
    "all sequences have as many queries as keys",
)
def _top_left(call: Call) -> Iterator[Suspect]:
    side = call.offset if isinstance(call.offset, int) else 0
    if (call.offsets != side).any():
        yield Suspect(call._replace(offset=np.full_like(call.offsets, side)))


@_mistake(
    "ragged.padded_length",
    "All keys of a slot count, not only the used ones.",
    lambda call: isinstance(call, Call) and call.past is None and _room(call) is not None,
    "every slot is full",
)
def _padded_length(call: Call) -> Iterator[Suspect]:
    yield moved(call, lambda rows: rows._replace(lengths=rows.room))


def _room(call: Call) -> np.ndarray | None:
    """How many tokens the slot of each sequence has; None where all are used."""
    rows = call.key.rows
    return None if rows is None or rows.room is None or (rows.room == rows.lengths).all() else rows.room


def _tokens(call: Call, role: str) -> list[Tokens]:
    """Queries, keys or values, those of the past, too."""
    past = () if call.past is None or role == "query" else (call.past[ROLES.index(role) - 1],)
    return [getattr(call, role), *past]


def _factored(call: Call | Merge) -> list[str]:
    """The roles of a call that are codes with factors."""
    if isinstance(call, Merge):
        return []
    return [role for role in ROLES if all(one.factors is not None for one in _tokens(call, role))]


def _with_factors(call: Call, changed: dict[str, np.ndarray | None]) -> Call:
    """The call with other factors, by role; None for none."""
    for role, factors in changed.items():
        found = []
        for one in _tokens(call, role):
            assert one.codes is not None
            found.append(one.codes if factors is None else times(one.codes, factors))
        call = call._replace(**{role: found[0]})  # type: ignore[arg-type]  # one of ROLES
        if call.past is not None and len(found) > 1:
            past = list(call.past)
            past[ROLES.index(role) - 1] = found[1]
            call = call._replace(past=(past[0], past[1]))
    return call


def _each_factor(call: Call, change: Callable[[np.ndarray], np.ndarray | None]) -> Iterator[Suspect]:
    """The call with changed factors of each role, then of several."""
    roles = _factored(call)
    for chosen in itertools.chain.from_iterable(itertools.combinations(roles, n + 1) for n in range(len(roles))):
        changed = {}
        for role in chosen:
            factors = getattr(call, role).factors
            other = change(factors)
            if not np.array_equal(np.broadcast_to(1.0 if other is None else other, factors.shape), factors):
                changed[role] = other
        if len(changed) == len(chosen):
            yield Suspect(_with_factors(call, changed), detail=f"of {' and '.join(chosen)}")


def _has_factors(call: Call | Merge) -> bool:
    return bool(_factored(call))


def _has_several(call: Call | Merge, axis: int) -> bool:
    return any(getattr(call, role).factors.shape[axis] > 1 for role in _factored(call))


@_mistake("descale.absent", "The factors of codes are not applied.", _has_factors, "all factors are 1")
def _absent(call: Call) -> Iterator[Suspect]:
    yield from _each_factor(call, lambda factors: None)


@_mistake("descale.twice", "The factors of codes are applied twice.", _has_factors, "all factors are 1")
def _twice(call: Call) -> Iterator[Suspect]:
    yield from _each_factor(call, lambda factors: factors**2)


@_mistake(
    "descale.first_head",
    "All heads have the factors of the first.",
    lambda call: _has_several(call, 1),
    "all heads have the same factors",
)
def _first_head(call: Call) -> Iterator[Suspect]:
    yield from _each_factor(call, lambda factors: factors[:, :1])


@_mistake(
    "descale.swapped",
    "The factors of keys and values are exchanged.",
    lambda call: {"key", "value"} <= {*_factored(call)},
    "keys and values have the same factors",
)
def _swapped(call: Call) -> Iterator[Suspect]:
    key, value = call.key.factors, call.value.factors
    if key is not None and value is not None and not np.array_equal(key, value):
        yield Suspect(_with_factors(call, {"key": value, "value": key}))


@_mistake(
    "descale.scalar",
    "The first factor counts for all sequences and heads.",
    lambda call: _has_several(call, 0) or _has_several(call, 1) or _has_several(call, 2),
    "all factors are the same",
)
def _scalar(call: Call) -> Iterator[Suspect]:
    yield from _each_factor(call, lambda factors: factors[:1, :1, :1])


def _merges(call: Call | Merge) -> bool:
    return isinstance(call, Merge)


@_mistake("merge.base2", MUTANTS["merge.base2"].message, _merges, "")
def _base2(call: Merge) -> Iterator[Suspect]:
    other = "e" if call.base == "2" else "2"
    yield Suspect(call._replace(base=other), of_output=True)
    factor = math.log2(math.e) if call.base == "2" else math.log(2)
    parts = [State(output, np.asarray(sums, np.float64) * factor) for output, sums in call.parts]
    yield Suspect(call._replace(parts=parts))


@_mistake(
    "merge.equal_weights",
    "The outputs of the parts are averaged, whatever their logsumexps.",
    _merges,
    "all parts have the same logsumexp",
)
def _equal_weights(call: Merge) -> Iterator[Suspect]:
    total = merge(call.parts, call.base, names=call.names).logsumexp
    empty = np.stack([np.isinf(part.logsumexp) for part in call.parts])
    present = np.maximum((~empty).sum(axis=0), 1)
    kept = [np.where(at[..., None], 0, part.output) for at, part in zip(empty, call.parts, strict=True)]
    for outputs, hidden, count in (
        ([part.output for part in call.parts], np.zeros_like(empty), len(call.parts)),
        (kept, np.zeros_like(empty), len(call.parts)),
        (kept, empty, present),
    ):
        each = total - np.log(count) / (math.log(2) if call.base == "2" else 1)
        sums = [np.where(at, -np.inf, each) for at in hidden]
        yield Suspect(call._replace(parts=[State(*one) for one in zip(outputs, sums, strict=True)]))


@_mistake(
    "merge.empty_weighs",
    "A part without keys is merged as if its logsumexp were 0.",
    _merges,
    "every part has keys",
)
def _empty_weighs(call: Merge) -> Iterator[Suspect]:
    if any(np.isinf(part.logsumexp).any() for part in call.parts):
        for keeps in (True, False):  # what a part without keys holds, or 0
            parts = []
            for output, sums in call.parts:
                empty = np.isinf(sums)
                parts.append(
                    State(output if keeps else np.where(empty[..., None], 0, output), np.where(empty, 0, sums))
                )
            yield Suspect(call._replace(parts=parts), of_output=True)


@_mistake(
    "merge.sink_each",
    "Each part of the keys counts the sink.",
    lambda call: isinstance(call, Call) and "sinks" in call.options,
    "",
)
def _sink_each(call: Call) -> Iterator[Suspect]:
    for count in SPLITS:
        sinks = np.asarray(call.options["sinks"], np.float64) + math.log(count)
        yield Suspect(call._replace(options={**call.options, "sinks": sinks}), detail=f"{count} parts")
