"""Which other tokens a kernel read, if what it returned is right for these: a fact about all wrong sequences."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import islice
from typing import Final, NamedTuple

import numpy as np

from attention_service.backends.base import Backend, Check
from attention_service.comparison.calls.addresses import Addresses, other_addresses, page_lengths
from attention_service.comparison.calls.explain import agrees
from attention_service.comparison.calls.moves import Suspect, numbers_of, stored
from attention_service.comparison.calls.question import CallQuestion
from attention_service.comparison.errors import distance, distances
from attention_service.comparison.rules import CORRECT, PROOF
from attention_service.comparison.wrong import bits_of
from attention_service.engines.call import Call, Form
from attention_service.engines.tokens import Rows, Tokens
from attention_service.errors import InvalidRequest
from attention_service.pipeline.calls import exact_answer
from attention_service.schemas.compare import Fact

# Numbers of tokens and scores that are computed together, of a sequence that is looked at, and of all readings of it.
TOGETHER: Final = 2**18
LONGEST: Final = 2**22
ALL: Final = 2**26
# Readings that are tried on all sequences, and sequences that are looked at one by one if none holds.
TRIED: Final = 4
ALONE: Final = 16
# What was returned must fit so many bits better than the right tokens do, beside those that choosing a reading takes.
BITS: Final = 10.0
# Sequences of a call for which all other addresses are made.
MOST: Final = 2**12
# Tokens that are listed.
LISTED: Final = 4

Read = Callable[[int], np.ndarray]


class Reading(NamedTuple):
    """Tokens that a kernel may have read. said: what it says; of: what was read; roles: of these

    query, key, value: the tokens of a sequence, None for the right ones; they raise IndexError outside of memory
    lengths: how many keys are stored, None for as many; offset: of the first query, None for that of these lengths
    """

    said: str
    of: str
    query: Read | None = None
    key: Read | None = None
    value: Read | None = None
    lengths: np.ndarray | None = None
    offset: np.ndarray | None = None
    addresses: tuple[Addresses, Addresses] | None = None


def readings(call: Call) -> Iterator[Reading]:
    """Other tokens that a kernel may read for a call."""
    key, value = stored(call)
    if any(tokens.table is None and tokens.rows is None for tokens in (key, value)):
        return
    right = Addresses.of(key), Addresses.of(value)
    if right[0].count > MOST:
        return
    queries = call.query.rows
    starts = queries.first if queries is not None and queries.slots == 1 else None
    pairs = list(zip(other_addresses(right[0], starts), other_addresses(right[1], starts), strict=False))
    for (said, one), (_, other) in pairs:
        yield Reading(said, "keys and values", None, _at(key, one), _at(value, other), addresses=(one, other))
    for (said, one), (_, other) in pairs:
        yield Reading(said, "keys", None, _at(key, one), addresses=(one, right[1]))
        yield Reading(said, "values", None, None, _at(value, other), addresses=(right[0], other))
    yield from _exchanged(key, value, right)
    if call.own is None:
        yield from _of_lengths(call, key, value, right)
    yield from _of_queries(call)


def _at(tokens: Tokens, one: Addresses) -> Read:
    return tokens.at(one.places).of


def _exchanged(key: Tokens, value: Tokens, right: tuple[Addresses, Addresses]) -> Iterator[Reading]:
    """Keys and values for each other, and by the table of each other."""
    if key.features == value.features:
        for said, one, other in (
            ("values are the keys", None, key.of),
            ("keys are the values", value.of, None),
            ("keys and values are exchanged", value.of, key.of),
        ):
            yield Reading(said, "keys and values", None, one, other)
    if right[0].is_paged and not np.array_equal(right[0].entries, right[1].entries):
        by_other = replace(right[1], entries=right[0].entries), replace(right[0], entries=right[1].entries)
        yield Reading("they are read by the table of keys", "values", None, None, _at(value, by_other[0]))
        yield Reading("they are read by the table of values", "keys", None, _at(key, by_other[1]), None)


def _of_lengths(call: Call, key: Tokens, value: Tokens, right: tuple[Addresses, Addresses]) -> Iterator[Reading]:
    """More or fewer keys, with masks that are aligned with them, or with the right number."""
    new = call.keys - key.lengths
    for said, lengths in page_lengths(right[0]).items():
        if (lengths >= 0).all() and (lengths != key.lengths).any():
            both = replace(right[0], lengths=lengths), replace(right[1], lengths=lengths)
            read = _at(key, both[0]), _at(value, both[1])
            moved = call.offsets + lengths - key.lengths if call.offset is not None else call.offsets
            for offset in (moved, call.offsets):
                yield Reading(f"there are {said}", "keys and values", None, *read, lengths + new, offset, both)
    if key.rows is not None and right[0].count > 1:  # another sequence as it is
        every = np.arange(right[0].count)
        for order, whose in ((np.roll(every, 1), "before"), (np.roll(every, -1), "after")):
            key_of, value_of = (
                replace(one, start=one.start[order], first=one.first[order], lengths=one.lengths[order])
                for one in right
            )
            lengths = key.lengths[order]
            moved = call.offsets + lengths - key.lengths if call.offset is not None else call.offsets
            read = _at(key, key_of), _at(value, value_of)
            said = f"they are all those of the sequence {whose}"
            yield Reading(said, "keys and values", None, *read, lengths + new, moved, (key_of, value_of))


def _of_queries(call: Call) -> Iterator[Reading]:
    """Queries of other places."""
    rows = call.query.rows
    assert rows is not None
    for said, slot, first in (
        ("they are those of the sequence before", np.roll(rows.slot, 1), np.roll(rows.first, 1)),
        ("they are those of the sequence after", np.roll(rows.slot, -1), np.roll(rows.first, -1)),
        ("token t+1 is read for token t", rows.slot, rows.first + 1),
        ("token t-1 is read for token t", rows.slot, rows.first - 1),
    ):
        yield Reading(said, "queries", _within(call.query, rows._replace(slot=slot, first=first)))


def _within(tokens: Tokens, rows: Rows) -> Read:
    read = tokens.at(rows._replace(lengths=tokens.lengths)).of

    def of(sequence: int) -> np.ndarray:
        first = int(rows.first[sequence])
        if first < 0 or first + int(tokens.lengths[sequence]) > rows.length:
            raise IndexError
        return read(sequence)

    return of


@dataclass
class Search:
    """The search for what was read. wrong: the sequences that are wrong, the worst first; limits: of each array"""

    asked: CallQuestion
    wrong: list[int]
    limits: Mapping[str, float]
    backend: Backend
    check: Check

    def fact(self) -> Fact | None:
        """The fact about what was read in the place of the right tokens; None if nothing explains all sequences."""
        call = self.asked.addressed
        sizes = numbers_of(call)
        short = [n for n in self.wrong if sizes[n] <= LONGEST]
        if not short:
            return None
        every = list(islice(readings(call), max(1, ALL // int(sizes[short[0]]))))
        first = self._close(short[0], every)
        close = first
        for n in short[1:ALONE]:
            close = self._close(n, close)
        for reading in close[:TRIED]:
            if self._holds(dict.fromkeys(self.wrong, reading), len(every)):
                return self._said([(self.wrong, reading)])
        if not first or len(short) < max(2, len(self.wrong)) or len(self.wrong) > ALONE:
            return None
        each = {n: found[0] for n in self.wrong if (found := self._close(n, every))}
        if len(each) == len(self.wrong) and self._holds(each, len(every)):
            same: dict[str, tuple[list[int], Reading]] = {}
            for n, reading in each.items():
                same.setdefault(f"{reading.of} {reading.said}", ([], reading))[0].append(n)
            return self._said(list(same.values()))
        return None

    def _close(self, sequence: int, every: list[Reading]) -> list[Reading]:
        """The readings by which what was returned for a sequence may be right, the closest first."""
        found: list[tuple[float, Reading]] = []
        sent = self._sent(sequence)
        right = self._errors(sequence, sent, [Reading("", "")])[0]
        wrong = [name for name, error in right.items() if error > CORRECT * self.limits[name]]
        every = [one for one in every if self._numbers(sequence, one) <= LONGEST]
        step = max(1, TOGETHER // max((self._numbers(sequence, one) for one in every), default=1))
        for start in range(0, len(every), step):
            self.check()
            some = every[start : start + step]
            for reading, errors in zip(some, self._errors(sequence, sent, some), strict=True):
                if errors and (not wrong or errors[wrong[0]] * PROOF < right[wrong[0]]):
                    ratio = max(error / self.limits[name] for name, error in errors.items())
                    found.append((max(ratio, CORRECT), reading))  # those that rounding explains are as close
        return [reading for _, reading in sorted(found, key=lambda one: one[0])]

    def _numbers(self, sequence: int, reading: Reading) -> int:
        """About how many numbers of tokens and scores a reading of a sequence takes."""
        call = self.asked.addressed
        more = 1.0 if reading.lengths is None else reading.lengths[sequence] / max(1, call.keys[sequence])
        return math.ceil(numbers_of(call)[sequence] * max(1.0, more))

    def _sent(self, sequence: int) -> dict[str, np.ndarray]:
        rows = self.asked.addressed.query.rows
        assert rows is not None
        return {name: array[rows.of(sequence)].astype(np.float64) for name, array in (self.asked.actual or {}).items()}

    def _errors(self, sequence: int, sent: Mapping[str, np.ndarray], some: list[Reading]) -> list[Mapping[str, float]]:
        """The largest error of each array for each reading of a sequence; none for those outside of memory."""
        inside = [
            (at, tokens) for at, one in enumerate(some) if (tokens := tokens_of(self.asked.addressed, sequence, one))
        ]
        found: list[Mapping[str, float]] = [{} for _ in some]
        if inside:
            call = _together(self.asked.addressed, sequence, [tokens for _, tokens in inside])
            try:
                answer = exact_answer(call, self.backend, self.check)
            except InvalidRequest:  # numbers that no kernel could compute
                return found if len(some) == 1 else [self._errors(sequence, sent, [one])[0] for one in some]
            arrays = {"output": answer.output, "logsumexp": answer.logsumexp}
            for n, (at, _) in enumerate(inside):
                found[at] = {name: distance(array, arrays[name][n]) for name, array in sent.items()}
        return found

    def _holds(self, read: Mapping[int, Reading], tried: int) -> bool:
        """True if all that was returned is right for these readings, by more than chance. tried: how many were"""
        call = _mixed(self.asked.addressed, read, self.check)
        if call is None or agrees(self.asked, Suspect(call), next(iter(read)), self.backend, self.check) is None:
            return False
        bits = 0.0
        for n in read:
            sent, tokens = self._sent(n), tokens_of(self.asked.addressed, n, Reading("", ""))
            assert tokens is not None, "the right tokens are in memory"
            right = exact_answer(_together(self.asked.addressed, n, [tokens]), self.backend, self.check)
            for name, array in (("output", right.output), ("logsumexp", right.logsumexp)):
                if name in sent:
                    apart = distances(sent[name], array[0]) / (CORRECT * self.limits[name])
                    bits += float(bits_of(np.nan_to_num(apart, nan=1.0)).sum())
        kinds = len({id(one) for one in read.values()})
        return bits - kinds * math.log2(tried) >= BITS

    def _said(self, found: list[tuple[list[int], Reading]]) -> Fact:
        """The fact. found: sequences with what was read for them"""
        count = len(self.asked.addressed.query.lengths)
        texts, numbers = [], {"sequences": [float(n) for sequences, _ in found for n in sequences][:16]}
        for sequences, reading in found:
            listed = ", ".join(map(str, sorted(sequences)[:LISTED])) + (", …" if len(sequences) > LISTED else "")
            where = f"sequence{'s' * (len(sequences) > 1)} {listed} of {count}"
            texts.append(f"{where} is right for other {reading.of}: {reading.said}")
        first, reading = found[0][0][0], found[0][1]
        example = ""
        if reading.addresses is not None:
            example, listed_places = self._example(first, reading)
            numbers |= listed_places
        message = f"What came back for {'; for '.join(texts)}{example}."
        return Fact(name="read_elsewhere", array="output", message=message, numbers=numbers)

    def _example(self, sequence: int, reading: Reading) -> tuple[str, dict[str, list[float]]]:
        """The first tokens of a sequence that are read elsewhere."""
        call = self.asked.addressed
        assert reading.addresses is not None
        which = int(reading.key is None)
        right, other = (
            one.places.of(sequence) for one in (Addresses.of(stored(call)[which]), reading.addresses[which])
        )
        length = min(len(right[0]), len(other[0]))
        apart = (right[0][:length] != other[0][:length]) | (right[1][:length] != other[1][:length])
        at = np.flatnonzero(apart)[:LISTED]
        if not len(at) or reading.addresses[which].strides is not None or reading.addresses[which].bits:
            return "", {}
        first = int(at[0])
        names = ("page", "slot") if reading.addresses[which].is_paged else ("slot", "place")
        read, wanted = ([int(places[n][first]) for n in (0, 1)] for places in (other, right))
        texts = (" ".join(map(str, (names[0], one[0], names[1], one[1]))) for one in (read, wanted))
        example = f". Token {first} of sequence {sequence} is read at {', where '.join(texts)} is right"
        numbers = {"token": at, names[0]: other[0][at], names[1]: other[1][at]}
        return example, {name: values.astype(float).tolist() for name, values in numbers.items()}


class ReadTokens(NamedTuple):
    """Queries, stored keys and values of a sequence as they are read, and the offset."""

    arrays: tuple[np.ndarray, np.ndarray, np.ndarray]
    offset: int


def tokens_of(call: Call, sequence: int, reading: Reading) -> ReadTokens | None:
    """What is read of a sequence; None for places outside of memory."""
    key, value = stored(call)
    try:
        query, key_read, value_read = (
            (tokens.of if read is None else read)(sequence)
            for tokens, read in ((call.query, reading.query), (key, reading.key), (value, reading.value))
        )
    except IndexError:
        return None
    offsets = call.offsets if reading.offset is None else reading.offset
    return ReadTokens((query, key_read, value_read), int(offsets[sequence]))


def _together(call: Call, sequence: int, read: list[ReadTokens]) -> Call:
    """A call of one sequence, again and again, with the tokens that are read for each."""
    count, q = len(read), len(read[0].arrays[0])
    queries, keys, values = (dict(enumerate(one.arrays[at] for one in read)) for at in range(3))
    rows = Rows(count, q, np.arange(count), np.zeros(count, np.int64), np.full(count, q))
    query = call.query._replace(lengths=rows.lengths, of=queries.__getitem__, rows=rows)
    lengths = np.array([len(one) for one in keys.values()])
    found = [
        tokens._replace(lengths=lengths, of=arrays.__getitem__, rows=None, table=None)
        for tokens, arrays in zip(stored(call), (keys, values), strict=True)
    ]
    form, offset = Form(lambda x: x, lambda x: x, call.form.base), np.array([one.offset for one in read])
    own = call.own
    fields = None if own is None else (lambda n: own(sequence))
    call = call._replace(query=query, form=form, own=fields, offset=offset)
    if call.past is None:
        return call._replace(key=found[0], value=found[1])
    fixed = np.full(count, int(call.key.lengths[sequence]))
    key, value = (
        one._replace(lengths=fixed, of=dict.fromkeys(range(count), one.of(sequence)).__getitem__)
        for one in (call.key, call.value)
    )
    return call._replace(key=key, value=value, past=(found[0], found[1]))


def _mixed(call: Call, read: Mapping[int, Reading], check: Check) -> Call | None:
    """The call with other tokens of some sequences, read when needed; None if they are outside of memory."""
    own, offsets = (call.query, *stored(call)), call.offsets.copy()
    lengths = [tokens.lengths.copy() for tokens in own]
    for n, reading in read.items():
        check()
        three = tokens_of(call, n, reading)
        if three is None:
            return None
        offsets[n] = three.offset
        for role, array in zip(lengths, three.arrays, strict=True):
            role[n] = len(array)

    def other(at: int) -> Tokens:
        def of(n: int) -> np.ndarray:
            three = tokens_of(call, n, read[n]) if n in read else None
            return own[at].of(n) if three is None else three.arrays[at]

        return own[at]._replace(lengths=lengths[at], of=of)

    query, key, value = other(0), other(1), other(2)
    if call.past is not None:
        return call._replace(query=query, past=(key, value), offset=offsets)
    return call._replace(query=query, key=key, value=value, offset=offsets)
