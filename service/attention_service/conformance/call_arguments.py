"""How the arguments of functions of other libraries hold the sequences of a batch, and the same for parts of them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, Final, NamedTuple

import numpy as np

from attention_service.engines.call import Call
from attention_service.engines.tokens import Rows
from attention_service.library.engines import converted

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
        ("q_nope", "q_pe", "query"),
        ("ckv_cache", "kpe_cache", "kv_cache"),
        ("kv_indices", "block_tables"),
        {"qo_indptr": (), "kv_indptr": ("kv_indices",), "cum_seq_lens_q": ()},
        ("kv_len_arr", "seq_lens"),
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
# Arguments with the number of keys of each sequence, and of those in its last page.
LENGTHS: Final = ("cache_seqlens", "seqused_k", "seq_lens", "kv_len_arr")
LAST: Final = ("last_page_len", "paged_kv_last_page_len")


def alone_of(batch: Batch, given: Arguments, call: Call, n: int) -> Arguments:
    """The arguments of a call with one sequence alone."""
    found, rows = dict(given), call.query.rows
    assert rows is not None
    start = int(rows.first[n])
    stop = start + int(rows.lengths[n] if rows.room is None else rows.room[n])
    for name in batch.queries if rows.slots == 1 else ():
        if name in given:
            found[name] = changed(given[name], partial(_part, start, stop))
    if "num_actual_tokens" in given:  # without padding
        found["num_actual_tokens"] = stop - start
    whole = batch.caches if any(name in given for name in batch.tables) else ()
    for name, arrays in batch.bounds.items():
        if name in given:
            low, high = (int(bound) for bound in numbers_of(name, given[name])[n : n + 2])
            found[name] = like_given(given[name], np.array([0, high - low], np.int32))
            for array in {*arrays} & given.keys() - {*whole}:
                found[array] = changed(given[array], partial(_part, low, high))
    for name in _by_rows(batch, given, rows):
        if rank(given, name):
            found[name] = changed(given[name], partial(_part, n, n + 1))
    return found


def _by_rows(batch: Batch, given: Arguments, rows: Rows) -> Iterator[str]:
    """The arguments with a number or a row for each sequence."""
    cut = {array for name, arrays in batch.bounds.items() if name in given for array in arrays}
    yield from (*batch.rows, batch.slots)
    yield from batch.queries if rows.slots > 1 else ()
    yield from ("alibi_slopes",) if rank(given, "alibi_slopes") > 1 else ()
    if batch.slots not in given:  # else they say which rows of caches and tables a sequence has
        yield from (name for name in batch.tables if rank(given, name) > 1)
        is_paged = any(name in given for name in batch.tables)
        yield from (name for name in batch.caches if not is_paged and name not in cut)
    yield from {"k", "v"} - {*batch.caches} - cut  # new keys and values


def rank(given: Arguments, name: str) -> int:
    """The number of axes of an argument, 0 if it is not given."""
    return np.ndim(converted(name, given.get(name, 0)))


def with_keys(batch: Batch, given: Arguments, call: Call, start: np.ndarray, stop: np.ndarray) -> Arguments:
    """The arguments of a call with the keys from `start` to before `stop` of each sequence, (b,) each.

    In a cache with pages each start is a multiple of the size of a page.
    """
    found = dict(given)
    table = next((name for name in batch.tables if name in given), None)
    if table is not None:
        _move_table(found, batch, call, table, start, stop)
    else:
        _move_tokens(found, batch, call, start, stop)
    for name in LENGTHS:
        if name in batch.rows and (name in given or name == "cache_seqlens"):
            like = given[name] if rank(given, name) else given[batch.queries[0]]
            found[name] = like_given(like, (stop - start).astype(np.int32))
    found.pop(batch.slots, None)  # each sequence now has its own
    return found


def _move_table(found: Arguments, batch: Batch, call: Call, table: str, start: np.ndarray, stop: np.ndarray) -> None:
    """Change the table of pages, and what says where its rows begin and end."""
    assert call.key.table is not None
    page, entries = call.key.table.page, numbers_of(table, found[table])
    first, count = start // page, -(-(stop - start) // page)
    if entries.ndim > 1:
        rows = entries[numbers_of(batch.slots, found[batch.slots])] if batch.slots in found else entries
        moved = np.stack([np.roll(row, -by, axis=-1) for row, by in zip(rows, first.tolist(), strict=True)])
        if "cu_seqlens_k" in found:  # FlashAttention cumulates lengths beside a table
            found["cu_seqlens_k"] = like_given(found["cu_seqlens_k"], _bounds(stop - start))
    else:
        (bounds,) = (name for name, arrays in batch.bounds.items() if table in arrays)
        places = zip(numbers_of(bounds, found[bounds]).tolist(), first.tolist(), count.tolist(), strict=False)
        moved = np.concatenate([entries[at + by : at + by + length] for at, by, length in places])
        found[bounds] = like_given(found[bounds], _bounds(count))
        for name in found.keys() & {*LAST}:
            found[name] = like_given(found[name], ((stop - start - 1) % page + 1).astype(np.int32))
    found[table] = like_given(found[table], moved)


def _move_tokens(found: Arguments, batch: Batch, call: Call, start: np.ndarray, stop: np.ndarray) -> None:
    """Cut the keys and values that lie beside each other, or in slots, which are padded to one length."""
    rows, lengths = call.key.rows, stop - start
    assert rows is not None
    bounds = next((name for name, arrays in batch.bounds.items() if {*arrays} & {*batch.caches} & found.keys()), None)
    places = [
        (slot, slice(first + low, first + high))
        for slot, first, low, high in zip(
            rows.slot.tolist(), rows.first.tolist(), start.tolist(), stop.tolist(), strict=True
        )
    ]

    def beside(array: np.ndarray) -> np.ndarray:
        return np.concatenate([array[place] for _, place in places])

    def in_slots(array: np.ndarray) -> np.ndarray:
        new = np.zeros((len(places), int(lengths.max()), *array.shape[2:]), array.dtype)
        for row, place, length in zip(new, places, lengths.tolist(), strict=True):
            row[:length] = array[place]
        return new

    for name in found.keys() & {*batch.caches}:
        found[name] = changed(found[name], in_slots if bounds is None else beside)
    if bounds is not None:
        found[bounds] = like_given(found[bounds], _bounds(lengths))
    found.pop("cache_leftpad", None)


def _bounds(lengths: np.ndarray) -> np.ndarray:
    """Where sequences of these lengths begin, and where the last one ends, (b + 1)."""
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)


def _part(start: int, stop: int, array: np.ndarray) -> np.ndarray:
    return array[start:stop]


def listed(value: Any) -> list[Any]:
    """The arrays of an argument: one, or those of a pair."""
    return list(value) if isinstance(value, list | tuple) else [value]


def numbers_of(name: str, value: Any) -> np.ndarray:
    """An argument as an array of NumPy."""
    return np.asarray(converted(name, value))


def changed(value: Any, change: Callable[[np.ndarray], np.ndarray]) -> Any:
    """An array, or each of a pair, changed, of the kind that it was."""
    if isinstance(value, list | tuple) and hasattr(value[0], "shape"):
        return type(value)(changed(one, change) for one in value)
    return like_given(value, np.ascontiguousarray(change(numbers_of("", value))))


def like_given(value: Any, array: np.ndarray) -> Any:
    """An array as a tensor on the device of another, if that is one."""
    if not is_tensor(value):
        return array
    from attention_service.torch_arrays import as_tensor

    return as_tensor(array).to(value.device)


def is_tensor(value: Any) -> bool:
    """True for a tensor of torch."""
    torch = sys.modules.get("torch")  # whoever has a tensor has imported it
    return torch is not None and isinstance(value, torch.Tensor)
