"""Laws of ragged batches and paged caches: what holds for every right function of another library, for a call of it.

No reference is computed. The function is called with arguments that must give the same bits: pages in another order,
NaN where no token is read, and each sequence by itself.
"""

from __future__ import annotations

import copy
import math
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, NamedTuple

import numpy as np

from attention_service.codecs.array_objects import as_numpy
from attention_service.conformance.law_checks import LawResult, LawsResult, differ
from attention_service.conformance.target import Unsupported, described
from attention_service.engines.call import Call
from attention_service.engines.table import FUNCTIONS, decode
from attention_service.engines.tokens import Rows, Tokens
from attention_service.library.engine_calls import named, returned, taken

Arguments = dict[str, Any]


class Batch(NamedTuple):
    """How the arguments of a function hold the sequences of a batch.

    caches: keys and values, in pages where there is a table, which is the first of `tables` that is given
    bounds: arguments (b + 1), with the arrays that they cut; rows: arguments with a number or a row for each sequence
    slots: argument that says which slot of the cache, or row of the table, each sequence has
    """

    queries: tuple[str, ...]
    caches: tuple[str, ...]
    tables: tuple[str, ...] = ()
    bounds: Mapping[str, tuple[str, ...]] = {}
    rows: tuple[str, ...] = ()
    slots: str = ""


# Factors of the two arrays that keys of MLA are made of.
SCALES: Final = ("ckv_scale", "kpe_scale")
FACTORS: Final = ("q_descale", "k_descale", "v_descale")
# By the short names of functions.
BATCHES: Final[Mapping[str, Batch]] = {
    "func": Batch(("q", "qv"), ("k", "v"), rows=FACTORS),
    "varlen": Batch(
        ("q", "qv"),
        ("k", "v"),
        ("block_table", "page_table"),
        {"cu_seqlens_q": (), "cu_seqlens_k": ("k", "v")},
        ("seqused_q", "seqused_k", *FACTORS),
    ),
    "kvcache": Batch(
        ("q", "qv"),
        ("k_cache", "v_cache"),
        ("block_table", "page_table"),
        {"cu_seqlens_q": (), "cu_seqlens_k_new": ("k", "v")},
        ("cache_seqlens", "cache_leftpad", "rotary_seqlens", *FACTORS),
        slots="cache_batch_idx",
    ),
    "decode": Batch(("q",), ("paged_kv_cache",), ("indices",), {"indptr": ("indices",)}, ("last_page_len",)),
    "paged": Batch(
        ("q",),
        ("paged_kv_cache",),
        ("paged_kv_indices",),
        {"qo_indptr": (), "paged_kv_indptr": ("paged_kv_indices",)},
        ("paged_kv_last_page_len",),
    ),
    "ragged": Batch(("q",), ("k", "v"), (), {"qo_indptr": (), "kv_indptr": ("k", "v")}),
    "mla": Batch(
        ("q_nope", "q_pe"),
        ("ckv_cache", "kpe_cache"),
        ("kv_indices",),
        {"qo_indptr": (), "kv_indptr": ("kv_indices",)},
        ("kv_len_arr",),
    ),
    "trt_decode": Batch(("query",), ("kv_cache",), ("block_tables",), {"cum_seq_lens_q": ()}, ("seq_lens",)),
    "trt_context": Batch(("query",), ("kv_cache",), ("block_tables",), {"cum_seq_lens_q": ()}, ("seq_lens",)),
    "varlen_attn": Batch(
        ("query",), ("key", "value"), ("block_table",), {"cu_seq_q": (), "cu_seq_k": ("key", "value")}, ("seqused_k",)
    ),
    "attention": Batch(
        ("query",), ("kv_cache", "key_cache", "value_cache"), ("block_table",), {"query_start_loc": ()}, ("seq_lens",)
    ),
}
# Arguments that hold sequences in ways which are not cut here.
UNCUT: Final = ("custom_mask", "packed_custom_mask", "cum_seq_lens_kv", "batch_size")


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
        found = decode(self.name, {name: _plain(name, value) for name, value in arguments.items()}, self.version)
        if not isinstance(found, Call):
            raise Unsupported(f"{self.name} merges parts")
        return found

    def run(self, arguments: Arguments) -> dict[str, np.ndarray]:
        """What the function returns, with the axes (slots, l, h, …). It may write into copies of the arguments."""
        call = self.decoded(arguments)
        found = returned(self.function(**taken(self.function, {k: _copied(v) for k, v in arguments.items()})))
        features = call.value.features
        return {name: call.form.read(name, array, call.query, features, f"/{name}") for name, array in found.items()}

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
    entries, order = _numbers(table, arguments[table]), np.empty(0, np.int64)
    for name in batch.caches:
        if name in arguments:
            axis = _page_axis(subject, name)
            pages = _numbers(name, _listed(arguments[name])[0]).shape[axis]
            order = np.roll(np.arange(pages)[::-1], 1)  # so that a kernel that sorts them is noticed
            arguments[name] = _changed(arguments[name], partial(np.take, indices=order, axis=axis))
    places = np.argsort(order)
    is_page = (entries >= 0) & (entries < len(order))  # others belong to no sequence
    moved = np.where(is_page, places[np.where(is_page, entries, 0)], entries).astype(entries.dtype)
    arguments[table] = _like(arguments[table], moved)
    return subject.changes(arguments, "with pages in another order")


def unused_ignored(subject: Subject) -> str | None:
    """NaN in slots of caches that no sequence uses, and in tokens between sequences, changes no bit."""
    arguments, found = dict(subject.arguments), False
    for name, used in _used(subject).items():
        floats = [_numbers(name, array).dtype.kind not in "iu" for array in _listed(arguments[name])]
        found = found or any(is_float and not one.all() for is_float, one in zip(floats, used, strict=True))
        arguments[name] = _changed(arguments[name], partial(_poisoned, iter(used)))
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
        (by_itself,) = subject.sequences(_cut(batch, subject.arguments, call, n))
        if (message := differ(by_itself, together[n], f"alone, as sequence {n} of its batch")) is not None:
            return message
    return None


# In the order in which they are checked.
LAWS: Final = (deterministic, pages_permuted, unused_ignored, alone)


def _cut(batch: Batch, given: Arguments, call: Call, n: int) -> Arguments:
    """The arguments of a call with one sequence alone."""
    found, rows = dict(given), call.query.rows
    assert rows is not None
    start = int(rows.first[n])
    stop = start + int(rows.lengths[n] if rows.room is None else rows.room[n])
    for name in batch.queries if rows.slots == 1 else ():
        if name in given:
            found[name] = _changed(given[name], partial(_part, start, stop))
    if "num_actual_tokens" in given:  # without padding
        found["num_actual_tokens"] = stop - start
    whole = batch.caches if any(name in given for name in batch.tables) else ()
    for name, arrays in batch.bounds.items():
        if name in given:
            low, high = (int(bound) for bound in _numbers(name, given[name])[n : n + 2])
            found[name] = _like(given[name], np.array([0, high - low], np.int32))
            for array in {*arrays} & given.keys() - {*whole}:
                found[array] = _changed(given[array], partial(_part, low, high))
    for name in _by_rows(batch, given, rows):
        if _rank(given, name):
            found[name] = _changed(given[name], partial(_part, n, n + 1))
    return found


def _by_rows(batch: Batch, given: Arguments, rows: Rows) -> Iterator[str]:
    """The arguments with a number or a row for each sequence."""
    cut = {array for name, arrays in batch.bounds.items() if name in given for array in arrays}
    yield from (*batch.rows, batch.slots)
    yield from batch.queries if rows.slots > 1 else ()
    yield from ("alibi_slopes",) if _rank(given, "alibi_slopes") > 1 else ()
    if batch.slots not in given:  # else they say which rows of caches and tables a sequence has
        yield from (name for name in batch.tables if _rank(given, name) > 1)
        is_paged = any(name in given for name in batch.tables)
        yield from (name for name in batch.caches if not is_paged and name not in cut)
    yield from {"k", "v"} - {*batch.caches} - cut  # new keys and values


def _rank(given: Arguments, name: str) -> int:
    """The number of axes of an argument, 0 if it is not given."""
    return np.ndim(_plain(name, given.get(name, 0)))


def _used(subject: Subject) -> dict[str, list[np.ndarray]]:
    """For each array of keys and values, which of its numbers are used: found by numbers that say where they are."""
    arguments = {name: value for name, value in subject.arguments.items() if name not in SCALES}
    shapes: dict[str, list[tuple[int, ...]]] = {}
    count = 0
    for name in subject.batch.caches:
        if name in arguments:
            shapes[name] = [_numbers(name, array).shape for array in _listed(arguments[name])]
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


def _part(start: int, stop: int, array: np.ndarray) -> np.ndarray:
    return array[start:stop]


def _codes(tokens: Tokens) -> Tokens:
    """The tokens without factors."""
    return tokens if tokens.codes is None else tokens.codes


def _page_axis(subject: Subject, name: str) -> int:
    """The axis of pages of a cache: the second of vLLM's pair of caches in one array."""
    is_pair = subject.name == "vllm.attention" and name == "kv_cache"
    return 1 if is_pair and _numbers(name, subject.arguments[name]).shape[0] == 2 else 0


def _plain(name: str, value: Any) -> Any:
    """An argument with arrays of NumPy in the place of others."""
    if isinstance(value, list | tuple) and value and all(hasattr(one, "shape") for one in value):
        return [as_numpy(one, f"/{name}") for one in value]
    return as_numpy(value, f"/{name}") if hasattr(value, "shape") else value


def _listed(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list | tuple) else [value]


def _numbers(name: str, value: Any) -> np.ndarray:
    return np.asarray(_plain(name, value))


def _changed(value: Any, change: Callable[[np.ndarray], np.ndarray]) -> Any:
    """An array, or each of a pair, changed, of the kind that it was."""
    if isinstance(value, list | tuple) and hasattr(value[0], "shape"):
        return type(value)(_changed(one, change) for one in value)
    return _like(value, np.ascontiguousarray(change(_numbers("", value))))


def _like(value: Any, array: np.ndarray) -> Any:
    """An array as a tensor on the device of another, if that is one."""
    if not _is_tensor(value):
        return array
    from attention_service.torch_arrays import as_tensor

    return as_tensor(array).to(value.device)


def _is_tensor(value: Any) -> bool:
    torch = sys.modules.get("torch")  # whoever has a tensor has imported it
    return torch is not None and isinstance(value, torch.Tensor)


def _copied(value: Any) -> Any:
    """A copy, which a function may write into."""
    return value.clone() if _is_tensor(value) else copy.deepcopy(value)
