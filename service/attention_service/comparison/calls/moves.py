"""Calls whose stored keys and values lie at other places, as a kernel believes that makes a mistake."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, Final, NamedTuple

import numpy as np

from attention_service.engines.call import Call, Merge
from attention_service.engines.tokens import Rows, Table, Tokens


class Suspect(NamedTuple):
    """A call that a wrong kernel may have computed.

    unknown, nan: (b,), True for sequences of which nothing is known, and whose output is NaN; None for none
    detail: what tells it from others of the same mistake
    of_output: True if the mistake may be one of the output alone, beside a logsumexp that is right
    """

    call: Call | Merge
    unknown: np.ndarray | None = None
    nan: np.ndarray | None = None
    detail: str = ""
    of_output: bool = False


# Numbers of the tokens and scores of a sequence that a mistake may give it, unless it has more: some milliseconds.
LONG: Final = 2**20


def numbers_of(call: Call) -> np.ndarray:
    """The numbers of the tokens and scores of each sequence, (b,)."""
    q, k, features = call.query.lengths, call.keys, call.query.features + call.value.features
    found: np.ndarray = q * call.query.heads * (features + k) + np.maximum(k, 1) * call.key.heads * features
    return found


def suspects(edit: Callable[[Any], Iterator[Suspect]], call: Call | Merge) -> Iterator[Suspect]:
    """The calls that a mistake makes of one, without those whose sequences become too long to be computed."""
    most = 0 if isinstance(call, Merge) else max(LONG, int(numbers_of(call).max(initial=0)))
    for suspect in edit(call):
        if isinstance(suspect.call, Merge) or numbers_of(suspect.call).max(initial=0) <= most:
            yield suspect


def stored(call: Call) -> tuple[Tokens, Tokens]:
    """The keys and values that are not new."""
    return (call.key, call.value) if call.past is None else call.past


def moved(call: Call, change: Callable[[Any], Any], detail: str = "") -> Suspect:
    """The call whose stored keys and values lie at other places. change: of rows or of a table"""
    found, unknown = [], np.zeros(len(call.query.lengths), bool)
    for tokens in stored(call):
        places, missing = (_within_rows if tokens.table is None else _within_pages)(change(tokens.table or tokens.rows))
        found.append(tokens.at(places))
        unknown |= missing
        if tokens.factors is not None and tokens.factors.shape[2] > 1:  # of each token, none of others
            unknown |= found[-1].lengths > tokens.factors.shape[2]
    key, value = found
    other = call._replace(key=key, value=value) if call.past is None else call._replace(past=(key, value))
    if call.own is not None:  # what stands for other keys in a mask is not known
        unknown |= other.keys != call.keys
    return Suspect(other, unknown, detail=detail)


def _within_rows(rows: Rows) -> tuple[Rows, np.ndarray]:
    """Rows without tokens that are beyond their array, and whose these would be."""
    missing = rows.first + rows.lengths > rows.length
    return rows._replace(lengths=np.where(missing, 0, rows.lengths)), missing


def _within_pages(table: Table) -> tuple[Table, np.ndarray]:
    """A table without entries that are no pages, and which sequences have these."""
    is_none = (table.entries < 0) | (table.entries >= table.pages)
    none = np.concatenate([[0], np.cumsum(is_none)])  # before each entry
    stop, most = table.start + -(-table.lengths // table.page), len(table.entries)
    missing = (stop > most) | (none[np.minimum(stop, most)] > none[np.minimum(table.start, most)])
    return replace(table, lengths=np.where(missing, 0, table.lengths)), missing
