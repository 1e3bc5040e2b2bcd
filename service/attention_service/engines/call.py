"""A call of an engine as requests, one for each length of sequences, and its answer in the axes of the library."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from itertools import pairwise
from types import MappingProxyType
from typing import Any, Final, NamedTuple

import numpy as np

from attention_service.attention.arrays import compute_dtype
from attention_service.engines.partial import State, in_base, merge, rounded
from attention_service.engines.tokens import Tokens, same
from attention_service.errors import (
    FieldConflict,
    InvalidArray,
    InvalidRequest,
    InvalidValue,
    Overflow,
    ShapeMismatch,
    shape,
)

Fields = dict[str, Any]
# From the fields of a request to its results.
Run = Callable[[Fields], Mapping[str, Any]]
# Numbers of the tokens of sequences that are computed together: a few of these arrays are held at a time.
TOGETHER: Final = 2**20
# Sequences that are computed together, before the deadline is checked again.
MOST: Final = 4096


class Form(NamedTuple):
    """The axes of an answer, from (slots, l, h, e) and (slots, l, h), and the base of its logarithms.

    heads_first: True if logsumexp has heads before tokens, which output has behind them
    """

    output: Callable[[np.ndarray], np.ndarray]
    logsumexp: Callable[[np.ndarray], np.ndarray]
    base: str = "e"
    heads_first: bool = False

    def read(self, name: str, given: np.ndarray, query: Tokens, features: int, pointer: str) -> np.ndarray:
        """An array that the library returned, with the axes (slots, l, h, e), a logsumexp with (slots, l, h).

        name: output or logsumexp; features: e; pointer: for errors. Errors: ShapeMismatch.
        """
        rows = query.rows
        assert rows is not None, "queries lie in slots"
        lengths = (rows.slots, rows.length, query.heads)
        found = np.empty(lengths if name == "logsumexp" else (*lengths, features), given.dtype)
        view = self.logsumexp(found) if name == "logsumexp" else self.output(found)
        if view.shape != given.shape:
            raise ShapeMismatch.of(pointer, f"{shape(view.shape)}, as the function returns it", given)
        view[...] = given  # all forms are views
        return found


DENSE: Final = Form(lambda x: x, lambda x: x.transpose(0, 2, 1), heads_first=True)
RAGGED: Final = Form(lambda x: x[0], lambda x: x[0].T, heads_first=True)
TOKENS: Final = Form(lambda x: x[0], lambda x: x[0], "2")


class Answer(NamedTuple):
    """What a call returns, in the axes of the library. Rows that belong to no sequence are NaN.

    weights: (h, q, k) of each sequence, if they were asked for; heads_first: as of its form
    """

    output: np.ndarray
    logsumexp: np.ndarray
    weights: list[np.ndarray] | None = None
    heads_first: bool = False

    def rounded(self, dtype: np.dtype) -> Answer:
        """The answer in a type, its logsumexp in float32 for halves. Errors: Overflow for what the type cannot hold."""
        output = rounded("output", self.output, dtype)
        sums = rounded("logsumexp", self.logsumexp, compute_dtype(dtype))
        weights = None if self.weights is None else [array.astype(dtype) for array in self.weights]
        return Answer(output, sums, weights, self.heads_first)


class Merge(NamedTuple):
    """A call that merges parts. names: of output and logsumexp of each part, for errors; base: of all logarithms"""

    parts: list[State]
    names: list[tuple[str, str]]
    base: str = "2"

    def answer(self, run: Run, *, weights: bool = False, check: Callable[[], None] = lambda: None) -> Answer:
        """The answer: there is no request to run, and no weight. Errors: those of `merge`, and what `check` raises."""
        return Answer(*merge(self.parts, self.base, names=self.names, check=check))


class Call(NamedTuple):
    """A call, decoded: where the tokens of each sequence are, and the options that all of them have.

    own: further options of a sequence; past: keys and values before those of `key` and `value`
    offset: of the first query among the keys, beyond the one that aligns the last query with the last key;
    None aligns the first with the first, an array (b,) has those of all sequences
    names: of arguments by fields of the request, for errors
    """

    query: Tokens
    key: Tokens
    value: Tokens
    form: Form
    options: Mapping[str, Any]
    own: Callable[[int], Fields] | None = None
    past: tuple[Tokens, Tokens] | None = None
    offset: int | np.ndarray | None = 0
    names: Mapping[str, str] = MappingProxyType({})

    @property
    def keys(self) -> np.ndarray:
        """The number of keys of each sequence, (b,)."""
        return self.key.lengths if self.past is None else self.key.lengths + self.past[0].lengths

    @property
    def offsets(self) -> np.ndarray:
        """The position of the first query among the keys of each sequence, (b,)."""
        if isinstance(self.offset, np.ndarray):
            return self.offset
        last = self.keys - self.query.lengths
        return np.zeros_like(last) if self.offset is None else last + self.offset

    def check(self) -> None:
        """Refuse tokens that do not fit each other. Errors: ShapeMismatch, FieldConflict."""
        query, key = self.query, self.key
        same(key.name, key, self.value)
        if self.past is not None:
            before, values = self.past
            same(before.name, before, values)
            same(key.name, key, before._replace(lengths=key.lengths))
            _fits(values, self.value.features, self.value.name)
            _fits(before, query.features, query.name)
        _fits(key, query.features, query.name)
        if query.heads % key.heads:
            raise ShapeMismatch.at(
                f"/{key.name}", f"a divisor of {query.heads}, the heads of {query.name}", str(key.heads)
            )
        b = len(query.lengths)
        if len(key.lengths) != b or (self.past is not None and len(self.past[0].lengths) != b):
            raise FieldConflict.at(f"/{key.name}", f"{b} sequences, as {query.name}", "another number")

    def groups(self) -> Iterator[list[int]]:
        """The sequences that have queries and keys; small ones of the same lengths and options together."""
        index, kinds, _ = self._kinds()
        if not len(index):
            return
        order = np.argsort(kinds, kind="stable")
        cuts = [0, *(np.flatnonzero(np.diff(kinds[order])) + 1).tolist(), len(order)]
        for start, stop in pairwise(cuts):
            alike = index[order[start:stop]]
            step = int(self._together(alike[:1]).sum())
            yield from (alike[at : at + step].tolist() for at in range(0, len(alike), step))

    def largest(self) -> list[list[int]]:
        """Groups of the most queries, keys and scores. All sequences of a group are the same one, to ask for shapes."""
        index, kinds, first = self._kinds()
        ones = index[first]
        count = np.minimum(np.bincount(kinds), self._together(ones)) if len(ones) else first
        queries, keys = count * self.query.lengths[ones], count * self.keys[ones]
        best = {int(sizes.argmax()) for sizes in (queries, keys, queries * keys // count) if len(sizes)}
        return [[int(ones[n])] * int(count[n]) for n in best]

    def _kinds(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The sequences with queries and keys, the kind of each, and the first of each kind among them."""
        index = np.flatnonzero((self.query.lengths > 0) & (self.keys > 0))
        if self.own is not None:
            return index, np.arange(len(index)), np.arange(len(index))
        sizes = np.stack([self.query.lengths, self.key.lengths, self.keys, self.offsets])[:, index]
        order = np.lexsort(sizes)  # as np.unique over rows, in a fifth of the time
        is_first = np.append(True, np.diff(sizes[:, order]).any(axis=0))[: len(order)]
        kinds = np.empty_like(order)
        kinds[order] = np.cumsum(is_first) - 1
        return index, kinds, order[is_first]

    def _together(self, sequences: np.ndarray) -> np.ndarray:
        """How many sequences of the size of each are computed together."""
        tokens = self.query.lengths[sequences] * self.query.heads + self.keys[sequences] * self.key.heads
        together: np.ndarray = np.clip(TOGETHER // (tokens * max(self.query.features, self.value.features)), 1, MOST)
        return together

    def request(self, group: list[int], *, shapes_only: bool = False) -> Fields:
        """The fields of the request for a group of sequences, in layout blhd.

        shapes_only: True for arrays of zeros that take no memory in the place of tokens
        """
        first = group[0]
        arrays: Fields = {"query": self.query, "key": self.key, "value": self.value}
        if self.past is not None:
            if self.key.lengths[first]:
                arrays |= {"past_key": self.past[0], "past_value": self.past[1]}
            else:
                arrays |= {"key": self.past[0], "value": self.past[1]}
        made = _shape_of if shapes_only else _stacked
        fields: Fields = {name: made(tokens, group) for name, tokens in arrays.items()}
        for name in arrays.keys() & {"past_key", "past_value"}:
            fields[name] = fields[name].transpose(0, 2, 1, 3)
        fields |= {"layout": "blhd", "query_offset": int(self.offsets[first]), "dtype": "float64"}
        return fields | dict(self.options) | ({} if self.own is None else self.own(first))

    def fault(self, group: list[int]) -> InvalidArray | None:
        """The error for the first number of these sequences that is infinite or NaN, None if there is none."""
        for tokens in (self.query, *(self.past or ()), self.key, self.value):
            for n in group:
                if (bad := np.argwhere(~np.isfinite(tokens.of(n).astype(np.float64)))).size:
                    token, head, feature = bad[0].tolist()
                    got = f"{float(tokens.of(n)[token, head, feature])} in token {token} of sequence {n}"
                    return InvalidArray.at(f"/{tokens.name}", "finite numbers in tokens that a query sees", got)
        return None

    def renamed(self, error: InvalidRequest) -> InvalidRequest:
        """The error of a request with the names of the library in the place of the fields."""
        names = dict(self.names) | {"query": self.query.name, "key": self.key.name, "value": self.value.name}
        faults = []
        for fault in error.faults:
            _, name, *rest = (fault.pointer or "/").split("/")
            faults.append(replace(fault, pointer="/".join(["", names.get(name, name), *rest]) if name else ""))
        return type(error)(*faults)

    def answer(
        self,
        run: Run,
        *,
        weights: bool = False,
        check: Callable[[], None] = lambda: None,
    ) -> Answer:
        """The answer, from the results that `run` returns for each request. weights: True for all weights, too

        Errors: InvalidRequest of every kind, and what `run` and `check` raise.
        """
        collected = Collected(self, check, weights=weights)
        include = ["logsumexp", *["attention_weights"] * weights]
        for group in self.groups():
            try:
                collected.add(group, run({**self.request(group), "include": include}))
            except InvalidRequest as error:
                is_number = isinstance(error, Overflow) or any("finite" in fault.expected for fault in error.faults)
                raise (self.fault(group) if is_number else None) or self.renamed(error) from None
        return collected.answer()


class Collected:
    """The answer of a call, while the results of its requests come."""

    def __init__(self, call: Call, check: Callable[[], None], *, weights: bool) -> None:
        """weights: True if the results have attention_weights. Errors: what `check` raises."""
        rows, heads = call.query.rows, call.query.heads
        assert rows is not None, "queries lie in slots"
        self._call, self._rows = call, rows
        self._output = np.full((rows.slots, rows.length, heads, call.value.features), np.nan)
        self._sums = np.full((rows.slots, rows.length, heads), np.nan)
        self._weights: list[np.ndarray] | None = [] if weights else None
        sinks = call.options.get("sinks")
        for n, k in enumerate(call.keys.tolist()):  # what a sequence without keys has
            if n % MOST == 0:
                check()
            self._output[rows.of(n)] = 0.0
            self._sums[rows.of(n)] = -np.inf if sinks is None else sinks
            if self._weights is not None:
                self._weights.append(np.zeros((heads, int(rows.lengths[n]), k)))

    def add(self, group: list[int], results: Mapping[str, Any]) -> None:
        """Add the results of a request: output (n, q, h, e), logsumexp (n, h, q), attention_weights (n, h, q, k)."""
        for at, n in enumerate(group):
            self._output[self._rows.of(n)] = results["output"][at]
            self._sums[self._rows.of(n)] = results["logsumexp"][at].T
            if self._weights is not None:
                self._weights[n] = results["attention_weights"][at]

    def answer(self) -> Answer:
        """The answer, in float64."""
        form = self._call.form
        sums = form.logsumexp(in_base(self._sums, form.base))
        return Answer(form.output(self._output), sums, self._weights, form.heads_first)


def window_of(name: str, left: int | None, right: int | None) -> tuple[Fields, int]:
    """The fields for a window that is inclusive on both sides, and what its offset is moved by.

    None is unbounded. A side may be negative where the other leaves keys between them. Errors: InvalidValue.
    """
    if left is not None and right is not None and left + right < 0:
        raise InvalidValue.at(f"/{name}", "sides whose sum is at least 0", f"{left} and {right}")
    moved = -left if left is not None and left < 0 else min(right, 0) if right is not None else 0
    sides = {"left": None if left is None else left + moved, "right": None if right is None else right - moved}
    fields: Fields = {}
    if sides["right"] == 0:  # causal, so that mistakes of the window and of the mask have names of their own
        fields, sides["right"] = {"is_causal": True}, None
    if any(side is not None for side in sides.values()):
        fields["window"] = sides
    return fields, moved


def _fits(tokens: Tokens, features: int, name: str) -> None:
    """Refuse another number of features. Errors: ShapeMismatch."""
    if tokens.features != features:
        raise ShapeMismatch.at(f"/{tokens.name}", f"{features} features, as {name}", str(tokens.features))


def _shape_of(tokens: Tokens, group: list[int]) -> np.ndarray:
    """Zeros of the shape of the tokens together."""
    shape = (len(group), int(tokens.lengths[group[0]]), tokens.heads, tokens.features)
    return np.broadcast_to(np.zeros(()), shape)


def _stacked(tokens: Tokens, group: list[int]) -> np.ndarray:
    """The tokens of sequences of one length, (n, l, h, d) in float64; a view of one sequence in float64."""
    found = [tokens.of(n) for n in group]
    array = found[0][None] if len(found) == 1 else np.stack(found)
    return array.astype(np.float64, copy=False)
