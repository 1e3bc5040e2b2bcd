"""Laws of ragged batches and paged caches: what holds for every right function of another library, for a call of it.

No reference is computed. The function is called with arguments that must give the same bits: pages in another order,
NaN where no token is read, and each sequence by itself; and with parts of the keys, whose answers are merged.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final

import numpy as np

from attention_service.conformance.call_arguments import (
    BATCHES,
    FACTORS,
    SCALES,
    UNCUT,
    Arguments,
    Batch,
    alone_of,
    changed,
    is_tensor,
    like_given,
    listed,
    numbers_of,
    rank,
    with_keys,
)
from attention_service.conformance.law_checks import LawResult, LawsResult, apart, differ, tolerance_of
from attention_service.conformance.target import Unsupported, described, parameters
from attention_service.engines.call import Call
from attention_service.engines.partial import State, merge
from attention_service.engines.table import FUNCTIONS, decode
from attention_service.engines.tokens import Tokens
from attention_service.errors import InvalidRequest
from attention_service.library.engine_calls import named, returned, taken
from attention_service.library.engines import converted

# Arguments that ask a function for its logsumexp.
ASKING: Final = ("return_lse", "return_softmax_lse", "return_attn_probs")


@dataclass(frozen=True)
class Subject:
    """A function and a call of it. name: of the function that it stands for; arguments: as they were given"""

    function: Callable[..., Any]
    name: str
    version: int | None
    arguments: Arguments

    @property
    def batch(self) -> Batch:
        """How its arguments hold sequences. Errors: Unsupported."""
        if (short := FUNCTIONS[self.name].name) not in BATCHES:
            raise Unsupported(f"{self.name} has no batch of sequences")
        return BATCHES[short]

    def decoded(self, arguments: Arguments) -> Call:
        """The call. Errors: Unsupported for one that merges, InvalidRequest."""
        found = decode(self.name, {name: converted(name, value) for name, value in arguments.items()}, self.version)
        if not isinstance(found, Call):
            raise Unsupported(f"{self.name} merges parts")
        return found

    def run(self, arguments: Arguments) -> dict[str, np.ndarray]:
        """Copies of what the function returns, with the axes (slots, l, h, …): its next call may overwrite them.

        It gets copies of the arguments, which it may change.
        """
        call = self.decoded(arguments)
        found = returned(self.function(**taken(self.function, {k: _copied(v) for k, v in arguments.items()})))
        features = call.value.features
        read = {name: call.form.read(name, array, call.query, features, f"/{name}") for name, array in found.items()}
        return {name: np.array(array) for name, array in read.items()}

    def sequences(self, arguments: Arguments) -> list[dict[str, np.ndarray]]:
        """What the function returns for each sequence, (l, h, …)."""
        call, found = self.decoded(arguments), self.run(arguments)
        assert call.query.rows is not None
        places = [call.query.rows.of(n) for n in range(len(call.query.lengths))]
        return [{name: array[place] for name, array in found.items()} for place in places]

    def changes(self, arguments: Arguments, when: str) -> str | None:
        """What to say if other arguments give other bits."""
        both = zip(self.sequences(self.arguments), self.sequences(arguments), strict=True)
        found = (differ(other, one, f"in sequence {n} {when}") for n, (one, other) in enumerate(both))
        return next((message for message in found if message is not None), None)


def call_laws(
    function: Callable[..., Any], /, *, call: str | None = None, version: int | None = None, **arguments: Any
) -> LawsResult:
    """Which laws of ragged batches and paged caches a function breaks, in a call of it.

        call_laws(flash_attn_with_kvcache, q=q, k_cache=k, v_cache=v, block_table=table, cache_seqlens=lengths)

    call, version, arguments: as of `assert_call`, arguments by their names. The function is called several times, with
    copies of them. Errors: attention_service.errors.InvalidRequest.
    """
    name, version = named(function, call, version)
    subject = Subject(function, name, version, {key: value for key, value in arguments.items() if value is not None})
    if name in FUNCTIONS:
        subject.decoded(subject.arguments)
    return LawsResult(tuple(_checked(law, subject) for law in LAWS))


def _checked(law: Callable[[Subject], str | None], subject: Subject) -> LawResult:
    name = law.__name__
    try:
        message = law(subject)
    except Unsupported as reason:
        return LawResult(name, "unsupported", str(reason))
    except (Exception, SystemExit) as error:  # whatever the function raises
        return LawResult(name, "error", described(error, subject.function))
    return LawResult(name, "holds") if message is None else LawResult(name, "broken", message)


def deterministic(subject: Subject) -> str | None:
    """The same call twice gives the same bits."""
    return subject.changes(subject.arguments, "the second time")


def pages_permuted(subject: Subject) -> str | None:
    """Pages in another order, with a table that says so, give the same bits."""
    batch, arguments = subject.batch, dict(subject.arguments)
    table = next((name for name in batch.tables if name in arguments), None)
    if table is None:
        raise Unsupported("the call has no table of pages")
    entries, order = numbers_of(table, arguments[table]), np.empty(0, np.int64)
    for name in batch.caches:
        if name in arguments:
            axis = _page_axis(subject, name)
            pages = numbers_of(name, listed(arguments[name])[0]).shape[axis]
            order = np.roll(np.arange(pages)[::-1], 1)  # so that a kernel that sorts them is noticed
            arguments[name] = changed(arguments[name], partial(np.take, indices=order, axis=axis))
    places = np.argsort(order)
    is_page = (entries >= 0) & (entries < len(order))  # others belong to no sequence
    moved = np.where(is_page, places[np.where(is_page, entries, 0)], entries).astype(entries.dtype)
    arguments[table] = like_given(arguments[table], moved)
    return subject.changes(arguments, "with pages in another order")


def unused_ignored(subject: Subject) -> str | None:
    """NaN in slots of caches that no sequence uses, and in tokens between sequences, changes no bit."""
    arguments, found = dict(subject.arguments), False
    for name, used in _used(subject).items():
        floats = [numbers_of(name, array).dtype.kind not in "iu" for array in listed(arguments[name])]
        found = found or any(is_float and not one.all() for is_float, one in zip(floats, used, strict=True))
        arguments[name] = changed(arguments[name], partial(_poisoned, iter(used)))
    if not found:
        raise Unsupported("the call uses all tokens that it has")
    return subject.changes(arguments, "with NaN in tokens that no sequence has")


def alone(subject: Subject) -> str | None:
    """A sequence has the same bits alone as in its batch."""
    batch, call = subject.batch, subject.decoded(subject.arguments)
    if any(name in subject.arguments for name in UNCUT) or len(call.query.lengths) < 2:
        raise Unsupported("the call has one sequence, or arguments that cannot be cut by sequences")
    together = subject.sequences(subject.arguments)
    for n in np.flatnonzero((call.query.lengths > 0) & (call.keys > 0)).tolist():
        (by_itself,) = subject.sequences(alone_of(batch, subject.arguments, call, n))
        if (message := differ(by_itself, together[n], f"alone, as sequence {n} of its batch")) is not None:
            return message
    return None


def mergeable(subject: Subject) -> str | None:
    """Keys cut in two, of pages between two of them, and both answers merged give the answer of all keys."""
    batch, call = subject.batch, subject.decoded(subject.arguments)
    page = 1 if call.key.table is None else call.key.table.page
    cut = page * (-(-call.keys // page) // 2)
    cuts = np.flatnonzero((cut > 0) & (call.query.lengths > 0)).tolist()
    if not (cuts and _sees_all(call) and _can_be_cut(subject.arguments)):
        raise Unsupported("no query that sees all keys has two pages or tokens of them, or they cannot be cut")
    asked = [
        name for name in ASKING if name in FUNCTIONS[subject.name].rows.keys() & (parameters(subject.function) or {})
    ]
    subject = replace(subject, arguments=subject.arguments | dict.fromkeys(asked, True))
    whole = subject.sequences(subject.arguments)
    if {"output", "logsumexp"} - whole[0].keys():
        raise Unsupported("returns no logsumexp")
    ends = ((np.zeros_like(cut), np.where(cut > 0, cut, call.keys)), (cut, call.keys))  # what is not cut stays whole
    parts = [subject.sequences(with_keys(batch, subject.arguments, call, *both)) for both in ends]
    for n in cuts:
        try:
            merged = merge([State(part[n]["output"], part[n]["logsumexp"]) for part in parts], call.form.base)
        except InvalidRequest as error:  # NaN
            return f"sequence {n} cut before key {cut[n]}: {error}"
        for name, found in merged._asdict().items():
            when = f"in sequence {n} cut before key {cut[n]} and merged"
            tolerance = tolerance_of(whole[n]["output"].dtype)
            if (message := apart(found, whole[n][name], when, tolerance, name)) is not None:
                return message
    return None


# In the order in which they are checked.
LAWS: Final = (deterministic, pages_permuted, unused_ignored, alone, mergeable)


def _sees_all(call: Call) -> bool:
    """True if every query sees all keys of its sequence, also of parts of them, and nothing else."""
    options = call.options.keys() - {"scale", "softcap"}
    if call.query.lengths.max(initial=0) <= 1 and isinstance(call.offset, int) and call.offset == 0:
        options -= {"is_causal"}  # one query, which is aligned with the last key
    return not options and call.own is None and call.past is None


def _can_be_cut(given: Arguments) -> bool:
    """True if no argument says something of single keys, or of where they are, that is not cut with them."""
    is_padded = "cache_leftpad" in given and "page_table" in given
    return not is_padded and not any(name in given for name in UNCUT) and all(rank(given, name) < 3 for name in FACTORS)


def _used(subject: Subject) -> dict[str, list[np.ndarray]]:
    """For each array of keys and values, which of its numbers are used: found by numbers that say where they are."""
    arguments = {name: value for name, value in subject.arguments.items() if name not in SCALES}
    shapes: dict[str, list[tuple[int, ...]]] = {}
    count = 0
    for name in subject.batch.caches:
        if name in arguments:
            shapes[name] = [numbers_of(name, array).shape for array in listed(arguments[name])]
            places = []
            for sizes in shapes[name]:
                places.append(np.arange(count, count + math.prod(sizes), dtype=np.float64).reshape(sizes))
                count += math.prod(sizes)
            arguments[name] = places if isinstance(arguments[name], list | tuple) else places[0]
    used = np.zeros(count, bool)
    call = subject.decoded(arguments)
    for tokens in call.past or (call.key, call.value):
        for n in range(len(tokens.lengths)):
            used[_codes(tokens).of(n).astype(np.int64)] = True
    found: dict[str, list[np.ndarray]] = {}
    start = 0
    for name, every in shapes.items():
        found[name] = []
        for sizes in every:
            found[name].append(used[start : start + math.prod(sizes)].reshape(sizes))
            start += math.prod(sizes)
    return found


def _poisoned(used: Iterator[np.ndarray], array: np.ndarray) -> np.ndarray:
    """An array of floats with NaN where the next of these says that it is not used."""
    is_used = next(used)
    return array if array.dtype.kind in "iu" else np.where(is_used, array, np.array(np.nan, array.dtype))


def _codes(tokens: Tokens) -> Tokens:
    """The tokens without factors."""
    return tokens if tokens.codes is None else tokens.codes


def _page_axis(subject: Subject, name: str) -> int:
    """The axis of pages of a cache: the second of vLLM's pair of caches in one array."""
    is_pair = subject.name == "vllm.attention" and name == "kv_cache"
    return 1 if is_pair and numbers_of(name, subject.arguments[name]).shape[0] == 2 else 0


def _copied(value: Any) -> Any:
    """A copy, which a function may write into."""
    return value.clone() if is_tensor(value) else copy.deepcopy(value)
