"""Random calls of engines, answered by a kernel that addresses its memory wrongly: element by element, in NumPy.

A kernel is read from the arguments of its library, into strides, entries of tables, and lengths. A mistake changes some
of these numbers, and attention over what lies at the addresses is computed in float64. Nothing here is shared with the
reader of calls that is under test.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

import ml_dtypes
import numpy as np

Array = np.ndarray
TYPES: Final = (np.dtype(np.float32), np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16))
LONG: Final = 10**9
# Calls that are drawn until one can have a mistake.
ATTEMPTS: Final = 40


class Outside(Exception):
    """A kernel reads what is not its memory, or its arguments cannot have the mistake."""


@dataclass
class Store:
    """Keys or values in memory. page, slot, head: strides in elements; places: of features; first: tokens that are
    skipped, of each sequence; of: from a sequence and an entry to the page; bits: of an address"""

    memory: Array
    start: int
    page: int
    slot: int
    head: int
    places: Array
    heads: int
    size: int
    pages: int
    entries: list[int]
    rows: list[int]
    first: list[int]
    of: Callable[[Store, int, int], int] | None = None
    bits: int = 0
    order: Callable[[int, int], int] | None = None
    swizzle: int = 0

    def entry(self, n: int, i: int) -> int:
        if self.of is not None:
            return self.of(self, n, i)
        at = self.rows[n] + i
        if not 0 <= at < len(self.entries):
            raise Outside
        return self.entries[at]

    def place(self, n: int, t: int, length: int) -> tuple[int, int]:
        """The page and the slot of a token."""
        t = self.first[n] + (t if self.order is None else self.order(t, length))
        if t < 0:
            raise Outside
        return self.entry(n, t // self.size), (t % self.size) ^ self.swizzle

    def read(self, n: int, length: int) -> Array:
        """(length, heads, features)"""
        places = np.array([self.place(n, t, length) for t in range(length)], np.int64).reshape(length, 2)
        at = places @ np.array([self.page, self.slot])
        at = at[:, None, None] + np.arange(self.heads)[:, None] * self.head + self.places
        at = self.start + (at % 2**self.bits if self.bits else at)
        if at.size and not 0 <= at.min() <= at.max() < self.memory.size:
            raise Outside
        found: Array = self.memory[at].astype(np.float64)
        return found


@dataclass
class Kernel:
    """A call as its kernel sees it. form: tokens (rows, h), ragged (h, rows) or dense (b, h, q) for logarithms"""

    function: str
    arguments: dict[str, Any]
    version: int | None
    queries: list[Array]
    starts: list[int]
    k: Store
    v: Store
    lengths: list[int]
    form: str
    base: float
    causal: bool = True
    left: int | None = None
    cap: float = 0.0
    scale: float | None = None
    sinks: Array | None = None
    new: list[tuple[Array, Array]] | None = None
    moved: list[int] | None = None  # offsets of queries
    only: set[int] | None = None  # sequences that the mistake is made of
    to: Callable[[list[tuple[Array, Array]]], list[tuple[Array, Array]]] | None = None
    notes: dict[str, Any] = field(default_factory=dict)

    @property
    def total(self) -> int:
        return len(self.arguments.get("q", self.arguments.get("query", ())))

    def tokens(self, n: int) -> tuple[Array, Array]:
        """What is read as keys and values."""
        k, v = self.k.read(n, self.lengths[n]), self.v.read(n, self.lengths[n])
        if self.new is not None:
            k, v = (np.concatenate([x, y.astype(np.float64)]) for x, y in zip((k, v), self.new[n], strict=True))
        return k, v

    def sequence(self, n: int) -> tuple[Array, Array]:
        """Output (q, h, e) and natural logarithms (q, h)."""
        k, v = self.tokens(n)
        q = self.queries[n].astype(np.float64)
        offset = len(k) - len(q) if self.moved is None else self.moved[n]
        group = q.shape[1] // k.shape[1]
        scale = 1 / math.sqrt(q.shape[2]) if self.scale is None else self.scale
        output, sums = np.zeros((*q.shape[:2], v.shape[2])), np.full(q.shape[:2], -np.inf)
        for h in range(q.shape[1]):
            scores = q[:, h] @ k[:, h // group].T * scale
            if self.cap:
                scores = self.cap * np.tanh(scores / self.cap)
            i, j = np.arange(len(q))[:, None] + offset, np.arange(len(k))[None]
            hidden = (j > i) & self.causal | (j < i - (LONG if self.left is None else self.left))
            scores = np.where(hidden, -np.inf, scores)
            for row in range(len(q)):
                every = scores[row] if self.sinks is None else np.append(scores[row], self.sinks[h])
                most = every.max(initial=-np.inf)
                if most == -np.inf:
                    continue
                weights = np.exp(every - most)
                sums[row, h] = most + np.log(weights.sum())
                output[row, h] = weights[: len(k)] @ v[:, h // group] / weights.sum()
        return output, sums


def answer(kernel: Kernel, right: Kernel | None = None) -> tuple[Array, Array]:
    """Output and logarithms as the function returns them. right: answers sequences without the mistake"""
    found = [
        (kernel if right is None or kernel.only is None or n in kernel.only else right).sequence(n)
        for n in range(len(kernel.queries))
    ]
    found = found if kernel.to is None else kernel.to(found)
    if kernel.form == "dense":
        output, sums = (np.stack([one[at] for one in found]) for at in (0, 1))
        return output, sums.swapaxes(1, 2) / math.log(kernel.base)
    h, e = found[0][0].shape[1:]
    output, sums = np.full((kernel.total, h, e), np.nan), np.full((kernel.total, h), np.nan)
    for start, (rows, logs) in zip(kernel.starts, found, strict=True):
        output[start : start + len(rows)], sums[start : start + len(rows)] = rows, logs / math.log(kernel.base)
    return output, sums.T if kernel.form == "ragged" else sums


# The calls.


@dataclass
class Draw:
    """Random numbers of a call: pages of each sequence, lengths and arrays."""

    random: np.random.Generator
    dtype: np.dtype = TYPES[0]

    def __post_init__(self) -> None:
        self.dtype = TYPES[int(self.random.choice(3, p=[0.5, 0.25, 0.25]))]
        self.hk, self.group = self.number(1, 3), self.number(1, 3)
        self.h, self.d = self.hk * self.group, int(self.random.choice([4, 8, 16]))
        self.b = self.number(1, 6)
        self.page = int(self.random.choice([1, 2, 4, 8, 16]))
        self.lengths = self.random.integers(1, 5 * self.page + 8, self.b).tolist()
        if self.maybe(0.4):
            n = self.number(0, self.b - 1)
            self.lengths[n] = -(-self.lengths[n] // self.page) * self.page
        counts = [-(-n // self.page) for n in self.lengths]
        self.spare = self.number(1, 6)
        more = 300 if self.maybe(0.15) else 0  # pages beyond a byte
        order = self.random.permutation(sum(counts) + self.spare + more).tolist()
        self.pages = len(order)
        self.tables = [[order.pop() for _ in range(count)] for count in counts]

    def number(self, low: int, high: int) -> int:
        return int(self.random.integers(low, high + 1))

    def maybe(self, chance: float = 0.5) -> bool:
        return bool(self.random.random() < chance)

    def normal(self, *shape: int) -> Array:
        return self.random.normal(size=shape).astype(self.dtype)

    def table(self) -> Array:
        """(b, max pages), with any page where a row has ended."""
        width = max(map(len, self.tables)) + self.number(0, 3)
        rows = [[*row, *(self.number(0, self.pages - 1) for _ in range(width - len(row)))] for row in self.tables]
        return np.array(rows, np.int32).reshape(self.b, width)

    def ends(self, lengths: list[int]) -> Array:
        return np.array([0, *np.cumsum(lengths)], np.int32)


def paged(
    cache: Array, base: Array, axes: tuple[int, int, int, int], table: Array | list[int], rows: list[int]
) -> Store:
    """The store of a cache, a view of the memory of `base`. axes: of pages, slots, heads and features"""
    memory = base.reshape(-1)
    size = base.itemsize
    start = (cache.__array_interface__["data"][0] - base.__array_interface__["data"][0]) // size
    page, slot, head, feature = (cache.strides[axis] // size for axis in axes)
    places = np.arange(cache.shape[axes[3]]) * feature
    entries = np.asarray(table).reshape(-1).tolist()
    heads, length = cache.shape[axes[2]], cache.shape[axes[1]]
    return Store(
        memory, start, page, slot, head, places, heads, length, cache.shape[axes[0]], entries, rows, [0] * len(rows)
    )


def of_rows(draw: Draw, columns: int) -> list[int]:
    return [n * columns for n in range(draw.b)]


NHD: Final = (0, 1, 2, 3)
HND: Final = (0, 2, 1, 3)


def options(draw: Draw, arguments: dict[str, Any], cap: str, left: str, sinks: str) -> dict[str, Any]:
    """Options that most functions have, under these names."""
    found: dict[str, Any] = {}
    if cap and draw.maybe(0.2):
        found["cap"] = arguments[cap] = 2.0
    if left and draw.maybe(0.2):
        found["left"] = arguments[left] = draw.number(1, 12)
    if sinks and draw.maybe(0.2):
        found["sinks"] = arguments[sinks] = draw.random.normal(size=draw.h)
    return found


def flash_kvcache(draw: Draw) -> Kernel:
    version, q = draw.number(2, 3), draw.number(1, 3)
    queries = draw.normal(draw.b, q, draw.h, draw.d)
    arguments: dict[str, Any] = {"q": queries, "causal": True}
    extra = draw.number(1, 3) if draw.maybe(0.3) else 0
    new = None
    if extra:
        arguments["k"], arguments["v"] = (draw.normal(draw.b, extra, draw.hk, draw.d) for _ in "kv")
        new = list(zip(arguments["k"], arguments["v"], strict=True))
    pads = [0] * draw.b
    if draw.maybe():
        k, v = (draw.normal(draw.pages, draw.page, draw.hk, draw.d) for _ in "kv")
        table = draw.table()
        if extra:  # room for the new tokens
            table = np.concatenate([table, table[:, :1].repeat(4, axis=1)], axis=1)
        arguments |= {"k_cache": k, "v_cache": v, "block_table" if version == 2 else "page_table": table}
        stores = [paged(x, x, NHD, table, of_rows(draw, table.shape[1])) for x in (k, v)]
    else:
        slots, most = draw.b + draw.number(0, 2), max(draw.lengths) + 6
        k, v = (draw.normal(slots, most, draw.hk, draw.d) for _ in "kv")
        arguments |= {"k_cache": k, "v_cache": v}
        chosen = draw.random.permutation(slots)[: draw.b].tolist()
        if slots > draw.b or draw.maybe():
            arguments["cache_batch_idx"] = np.array(chosen, np.int32)
        else:
            chosen = list(range(draw.b))
        stores = [paged(x, x, NHD, chosen, list(range(draw.b))) for x in (k, v)]
        if draw.maybe(0.4):
            pads = [draw.number(0, n - 1) for n in draw.lengths]
            arguments["cache_leftpad"] = np.array(pads, np.int32)
    arguments["cache_seqlens"] = np.array(draw.lengths, np.int32)
    for one in stores:
        one.first = list(pads)
    lengths = [n - pad for n, pad in zip(draw.lengths, pads, strict=True)]
    found = options(draw, arguments, "softcap", "", "")
    starts = [0] * draw.b
    return Kernel(
        "flash_attn.flash_attn_with_kvcache",
        arguments,
        version,
        list(queries),
        starts,
        stores[0],
        stores[1],
        lengths,
        "dense",
        math.e,
        new=new,
        **found,
    )


def beside(draw: Draw, most: int = 9) -> tuple[Array, Array, list[Array]]:
    """Queries beside each other, and where each sequence begins."""
    counts = [draw.number(1, most) for _ in range(draw.b)]
    ends = draw.ends(counts)
    q = draw.normal(int(ends[-1]), draw.h, draw.d)
    return q, ends, [q[start:stop] for start, stop in itertools.pairwise(ends)]


def ragged(draw: Draw, used: list[int], room: list[int]) -> tuple[Array, Array, Array, list[Store]]:
    """Keys and values beside each other: one page that all sequences share."""
    ends = draw.ends(room)
    k, v = (draw.normal(int(ends[-1]) + draw.number(0, 9), draw.hk, draw.d) for _ in "kv")
    stores = [paged(x[None], x, NHD, [0] * draw.b, list(range(draw.b))) for x in (k, v)]
    for one in stores:
        one.first, one.size, one.slot = ends[:-1].tolist(), LONG, draw.hk * draw.d
    return k, v, ends, stores


def flash_varlen(draw: Draw) -> Kernel:
    version = draw.number(2, 4)
    q, ends, queries = beside(draw)
    arguments: dict[str, Any] = {"q": q, "cu_seqlens_q": ends, "causal": True}
    if version != 3 and draw.maybe():
        k, v = (draw.normal(draw.pages, draw.page, draw.hk, draw.d) for _ in "kv")
        table = draw.table()
        arguments |= {"k": k, "v": v, "block_table" if version == 2 else "page_table": table}
        arguments |= (
            {"cu_seqlens_k": draw.ends(draw.lengths)}
            if version == 2
            else {"seqused_k": np.array(draw.lengths, np.int32)}
        )
        stores = [paged(x, x, NHD, table, of_rows(draw, table.shape[1])) for x in (k, v)]
    else:
        room = [n + (draw.number(0, 5) if version > 2 else 0) for n in draw.lengths]
        arguments["k"], arguments["v"], arguments["cu_seqlens_k"], stores = ragged(draw, draw.lengths, room)
        if version > 2:
            arguments["seqused_k"] = np.array(draw.lengths, np.int32)
    found = options(draw, arguments, "softcap", "", "learnable_sink" if version == 4 else "")
    return Kernel(
        "flash_attn.flash_attn_varlen_func",
        arguments,
        version,
        queries,
        ends[:-1].tolist(),
        stores[0],
        stores[1],
        list(draw.lengths),
        "ragged",
        math.e,
        **found,
    )


def infer_cache(draw: Draw, arguments: dict[str, Any], name: str, default: str) -> list[Store]:
    """A cache of one array or of two, NHD or HND; its table comes later."""
    layout = str(draw.random.choice(["NHD", "HND"]))
    if layout != default or draw.maybe():
        arguments["kv_layout"] = layout
    inner = (draw.page, draw.hk) if layout == "NHD" else (draw.hk, draw.page)
    axes = NHD if layout == "NHD" else HND
    if draw.maybe():
        cache = arguments[name] = draw.normal(draw.pages, 2, *inner, draw.d)
        return [paged(cache[:, n], cache, axes, [], of_rows(draw, 0)) for n in (0, 1)]
    arguments[name] = tuple(draw.normal(draw.pages, *inner, draw.d) for _ in "kv")
    return [paged(x, x, axes, [], of_rows(draw, 0)) for x in arguments[name]]


def infer_lists(draw: Draw, arguments: dict[str, Any], stores: list[Store], prefix: str) -> None:
    indices = [page for row in draw.tables for page in row] + [draw.number(0, draw.pages - 1) for _ in range(6)]
    ends = draw.ends(list(map(len, draw.tables)))
    last = np.array([(n - 1) % draw.page + 1 for n in draw.lengths], np.int32)
    arguments |= {
        f"{prefix}indptr": ends,
        f"{prefix}indices": np.array(indices, np.int32),
        f"{prefix}last_page_len": last,
    }
    for one in stores:
        one.entries, one.rows = indices, ends[:-1].tolist()


def infer_decode(draw: Draw) -> Kernel:
    arguments: dict[str, Any] = {"q": draw.normal(draw.b, draw.h, draw.d)}
    stores = infer_cache(draw, arguments, "paged_kv_cache", "NHD")
    infer_lists(draw, arguments, stores, "")
    found = options(draw, arguments, "logits_soft_cap", "window_left", "sinks")
    queries = [arguments["q"][n : n + 1] for n in range(draw.b)]
    return Kernel(
        "flashinfer.BatchDecodeWithPagedKVCacheWrapper.run",
        arguments,
        None,
        queries,
        list(range(draw.b)),
        stores[0],
        stores[1],
        list(draw.lengths),
        "tokens",
        2.0,
        **found,
    )


def infer_prefill(draw: Draw) -> Kernel:
    q, ends, queries = beside(draw)
    causal = draw.maybe(0.8)
    arguments: dict[str, Any] = {"q": q, "qo_indptr": ends, "causal": causal}
    if draw.maybe(0.7):
        kind = "Paged"
        stores = infer_cache(draw, arguments, "paged_kv_cache", "NHD")
        infer_lists(draw, arguments, stores, "paged_kv_")
    else:
        kind = "Ragged"
        arguments["k"], arguments["v"], arguments["kv_indptr"], stores = ragged(draw, draw.lengths, draw.lengths)
    found = options(draw, arguments, "logits_soft_cap", "window_left", "sinks" if kind == "Paged" else "")
    return Kernel(
        f"flashinfer.BatchPrefillWith{kind}KVCacheWrapper.run",
        arguments,
        None,
        queries,
        ends[:-1].tolist(),
        stores[0],
        stores[1],
        list(draw.lengths),
        "tokens",
        2.0,
        causal=causal,
        **found,
    )


def torch_varlen(draw: Draw) -> Kernel:
    q, ends, queries = beside(draw)
    arguments: dict[str, Any] = {"query": q, "cu_seq_q": ends, "enable_gqa": True, "window_size": (-1, 0)}
    if draw.maybe():
        k, v = (draw.normal(draw.pages, draw.page, draw.hk, draw.d) for _ in "kv")
        table = draw.table()
        arguments |= {"key": k, "value": v, "cu_seq_k": None, "block_table": table}
        arguments["seqused_k"] = np.array(draw.lengths, np.int32)
        stores = [paged(x, x, NHD, table, of_rows(draw, table.shape[1])) for x in (k, v)]
    else:
        arguments["key"], arguments["value"], arguments["cu_seq_k"], stores = ragged(draw, draw.lengths, draw.lengths)
    return Kernel(
        "torch.varlen_attn",
        arguments,
        None,
        queries,
        ends[:-1].tolist(),
        stores[0],
        stores[1],
        list(draw.lengths),
        "ragged",
        math.e,
    )


def vllm(draw: Draw) -> Kernel:
    q, ends, queries = beside(draw)
    table, kind = draw.table(), draw.number(0, 4)
    arguments: dict[str, Any] = {"query": q, "query_start_loc": ends, "block_table": table}
    arguments["seq_lens"] = np.array(draw.lengths, np.int32)
    pages, page, hk, d = draw.pages, draw.page, draw.hk, draw.d
    rows = of_rows(draw, table.shape[1])
    if kind == 0 and pages != 2:
        cache = arguments["kv_cache"] = draw.normal(2, pages, page, hk, d)
        stores = [paged(cache[n], cache, NHD, table, rows) for n in (0, 1)]
    elif kind == 1 and pages != 2:
        cache = arguments["kv_cache"] = draw.normal(pages, 2, page, hk, d)
        stores = [paged(cache[:, n], cache, NHD, table, rows) for n in (0, 1)]
    elif kind == 2:
        cache = arguments["kv_cache"] = draw.normal(pages, hk, page, 2 * d)
        stores = [paged(one, cache, HND, table, rows) for one in (cache[..., :d], cache[..., d:])]
    elif kind == 3:
        k, v = draw.normal(pages, hk, d // 4, page, 4), draw.normal(pages, hk, d, page)
        arguments |= {"key_cache": k, "value_cache": v}
        stores = [paged(k[..., 0], k, (0, 3, 1, 2), table, rows), paged(v, v, (0, 3, 1, 2), table, rows)]
        stores[0].places = (np.arange(d // 4)[:, None] * page * 4 + np.arange(4)).reshape(-1)
    else:
        k, v = (draw.normal(pages, page, hk, d) for _ in "kv")
        arguments |= {"key_cache": k, "value_cache": v}
        stores = [paged(x, x, NHD, table, rows) for x in (k, v)]
    found = options(draw, arguments, "logits_soft_cap", "", "sinks")
    if draw.maybe(0.2):
        found["left"] = draw.number(1, 12)
        arguments["sliding_window"] = found["left"] + 1
    return Kernel(
        "vllm.attention",
        arguments,
        None,
        queries,
        ends[:-1].tolist(),
        stores[0],
        stores[1],
        list(draw.lengths),
        "ragged",
        math.e,
        **found,
    )


def trtllm(draw: Draw) -> Kernel:
    arguments: dict[str, Any] = {"bmm1_scale": 1 / math.sqrt(draw.d), "bmm2_scale": 1.0}
    stores = infer_cache(draw, arguments, "kv_cache", "HND")
    arguments["seq_lens"] = np.array(draw.lengths, np.int32)
    table = draw.table()
    if draw.maybe(0.3):
        other = draw.random.permutation(draw.pages)[: table.size] if table.size <= draw.pages else table.reshape(-1)
        tables = [table, np.asarray(other, np.int32).reshape(table.shape)]
        arguments |= {"block_tables": np.stack(tables, axis=1), "uses_shared_paged_kv_idx": False}
    else:
        tables, arguments["block_tables"] = [table, table], table
    for one, entries in zip(stores, tables, strict=True):
        one.entries, one.rows = entries.reshape(-1).tolist(), of_rows(draw, table.shape[1])
    is_decode = draw.maybe()
    if is_decode:
        q, ends = draw.normal(draw.b, draw.h, draw.d), draw.ends([1] * draw.b)
        queries = [q[n : n + 1] for n in range(draw.b)]
    else:
        q, ends, queries = beside(draw)
        arguments["cum_seq_lens_q"] = ends
    arguments["query"] = q
    found = options(draw, arguments, "", "window_left", "sinks")
    name = "decode" if is_decode else "context"
    return Kernel(
        f"flashinfer.trtllm_batch_{name}_with_kv_cache",
        arguments,
        None,
        queries,
        ends[:-1].tolist(),
        stores[0],
        stores[1],
        list(draw.lengths),
        "tokens",
        2.0,
        **found,
    )


def mla(draw: Draw) -> Kernel:
    """One head, whose keys begin with the values."""
    draw.hk, draw.h = 1, draw.number(1, 4)
    q, ends, queries = beside(draw, 4)
    cache = draw.normal(draw.pages, draw.page, draw.d)
    e = draw.d // 2
    arguments: dict[str, Any] = {"query": q, "kv_cache": cache, "head_dim_ckv": e, "causal": True, "sm_scale": 0.3}
    table = draw.table()
    arguments |= {"block_tables": table, "seq_lens": np.array(draw.lengths, np.int32), "cum_seq_lens_q": ends}
    k, v = cache[:, :, None], cache[:, :, None, :e]
    stores = [paged(x, cache, NHD, table, of_rows(draw, table.shape[1])) for x in (k, v)]
    return Kernel(
        "flashinfer.BatchMLAPagedAttentionWrapper.run",
        arguments,
        None,
        queries,
        ends[:-1].tolist(),
        stores[0],
        stores[1],
        list(draw.lengths),
        "tokens",
        2.0,
        scale=0.3,
    )


CALLS: Final = (
    flash_kvcache, flash_varlen, infer_decode, infer_prefill, torch_varlen, vllm, trtllm, mla,
)  # fmt: skip


def is_paged(kernel: Kernel) -> bool:
    return (kernel.k.size < LONG and "table" in " ".join(kernel.arguments)) or "indices" in " ".join(kernel.arguments)


# The mistakes: each changes numbers of some stores, or of the kernel.


def need(holds: bool) -> None:
    if not holds:
        raise Outside


Change = Callable[[Kernel, list[Store], np.random.Generator], None]


def row_other(kernel: Kernel, stores: list[Store], random: np.random.Generator) -> None:
    b = len(kernel.queries)
    need(b > 1)
    order = [np.roll(range(b), 1), np.roll(range(b), -1), np.zeros(b, int), random.permutation(b)][random.integers(4)]
    for one in stores:
        one.rows, one.first = ([x[n] for n in order] for x in (one.rows, one.first))


def entry_shifted(kernel: Kernel, stores: list[Store], random: np.random.Generator) -> None:
    need(is_paged(kernel))
    by = int(random.choice([1, -1, 2]))
    for one in stores:
        one.rows = [row + by for row in one.rows]


def entry_by(of: Callable[[Store, int, int], int]) -> Change:
    def change(kernel: Kernel, stores: list[Store], random: np.random.Generator) -> None:
        need(is_paged(kernel))
        for one in stores:
            one.of = of

    return change


def page_of(one: Store, n: int, i: int) -> int:
    need(one.rows[n] + i < len(one.entries))
    return one.entries[one.rows[n] + i]


def entry_narrow(kernel: Kernel, stores: list[Store], random: np.random.Generator) -> None:
    need(is_paged(kernel) and kernel.k.pages > 256)
    for one in stores:
        one.entries = [entry % 256 for entry in one.entries]


def entry_wide(kernel: Kernel, stores: list[Store], random: np.random.Generator) -> None:
    """A table of 64 bits, of which 32 are read."""
    need(is_paged(kernel))
    for one in stores:
        one.entries = [x for entry in one.entries for x in (entry, 0)]


def row_width(kernel: Kernel, stores: list[Store], random: np.random.Generator) -> None:
    need(is_paged(kernel) and len(kernel.queries) > 1 and "indices" not in " ".join(kernel.arguments))
    width = kernel.k.rows[1] - kernel.k.rows[0] + int(random.choice([-1, 1]))
    for one in stores:
        one.rows = [n * width for n in range(len(one.rows))]


def ordered(descending: bool) -> Change:
    def change(kernel: Kernel, stores: list[Store], random: np.random.Generator) -> None:
        need(is_paged(kernel))
        for one in stores:
            known = []
            for n, length in enumerate(kernel.lengths):
                count = -(-(one.first[n] + length) // one.size)
                row = [one.entries[one.rows[n] + i] for i in range(count)]
                known.append(row[::-1] if descending else sorted(row))
            one.of = lambda _, n, i, known=known: known[n][i]

    return change


def size_other(kernel: Kernel, stores: list[Store], random: np.random.Generator) -> None:
    need(is_paged(kernel))
    size = kernel.k.size
    factor = float(random.choice([0.5, 2]))
    strides = bool(random.integers(2))
    need(factor > 1 or size % 2 == 0)
    for one in stores:
        one.size = int(size * factor)
        one.page = int(one.page * factor) if strides else one.page


def slot_shifted(kernel: Kernel, stores: list[Store], random: np.random.Generator) -> None:
    by = int(random.choice([1, -1, 2]))
    for one in stores:
        one.first = [first + by for first in one.first]


def reversed_tokens(kernel: Kernel, stores: list[Store], random: np.random.Generator) -> None:
    for one in stores:
        one.order = lambda t, length: length - 1 - t


def slot_swizzled(kernel: Kernel, stores: list[Store], random: np.random.Generator) -> None:
    size = kernel.k.size
    need(is_paged(kernel) and size > 1 and size & (size - 1) == 0)
    by = 2 ** int(random.integers(size.bit_length() - 1))
    for one in stores:
        one.swizzle = by


def no_first(kernel: Kernel, stores: list[Store], random: np.random.Generator) -> None:
    need(any(kernel.k.first))
    for one in stores:
        one.first = [0] * len(one.first)


def page_stride(kernel: Kernel, stores: list[Store], random: np.random.Generator) -> None:
    need(is_paged(kernel))
    factor = float(random.choice([0.5, 2]))
    for one in stores:
        need(one.page * factor == int(one.page * factor))
        one.page = int(one.page * factor)


def other_axes(kernel: Kernel, stores: list[Store], random: np.random.Generator) -> None:
    """NHD read as HND, or the reverse."""
    for one in stores:
        need(one.heads > 1 and 1 < one.size < LONG)
        d = min(one.slot, one.head)
        one.slot, one.head = (d, d * one.size) if one.slot > one.head else (d * one.heads, d)


def token_stride(kernel: Kernel, stores: list[Store], random: np.random.Generator) -> None:
    """The heads are forgotten in the stride of tokens."""
    for one in stores:
        need(one.heads > 1 and one.slot > one.head)
        one.slot = one.head


def narrow_address(kernel: Kernel, stores: list[Store], random: np.random.Generator) -> None:
    for one in stores:
        bits = int(math.log2(one.memory.size - 1)) if one.memory.size > 2 else 0
        need(bits >= 7)
        one.bits = bits


def batch_index(kernel: Kernel, stores: list[Store], random: np.random.Generator) -> None:
    need("cache_batch_idx" in kernel.arguments)
    for one in stores:
        one.entries = list(range(one.pages))


def start_of_queries(kernel: Kernel, stores: list[Store], random: np.random.Generator) -> None:
    need(kernel.k.size == LONG)
    for one in stores:
        one.first = list(kernel.starts)


def start_of_padded(kernel: Kernel, stores: list[Store], random: np.random.Generator) -> None:
    need(kernel.k.size == LONG)
    for one in stores:
        one.first = [n * max(kernel.lengths) for n in range(len(one.first))]


def values_of_keys(kernel: Kernel, stores: list[Store], random: np.random.Generator) -> None:
    need(len(kernel.k.places) == len(kernel.v.places) and (kernel.k.places == kernel.v.places).all())
    kind = int(random.integers(3))
    k, v = copy.copy(kernel.k), copy.copy(kernel.v)
    kernel.k, kernel.v = ((k, k), (v, v), (v, k))[kind]


def table_of_keys(kernel: Kernel, stores: list[Store], random: np.random.Generator) -> None:
    need("uses_shared_paged_kv_idx" in kernel.arguments)
    kernel.v.entries = kernel.k.entries


def appended(kernel: Kernel) -> list[int]:
    """How many new tokens come after those of the cache."""
    return [0] * len(kernel.lengths) if kernel.new is None else [len(keys) for keys, _ in kernel.new]


def length_by(change: Callable[[list[int], np.random.Generator], list[int]], keeps: bool) -> Change:
    def changed(kernel: Kernel, stores: list[Store], random: np.random.Generator) -> None:
        new = appended(kernel)
        if keeps:
            sizes = zip(kernel.lengths, new, kernel.queries, strict=True)
            kernel.moved = [length + more - len(q) for length, more, q in sizes]
        kernel.lengths = change(kernel.lengths, random)
        need(min(kernel.lengths) >= 0)

    return changed


def swapped(lengths: list[int], random: np.random.Generator) -> list[int]:
    need(len(lengths) > 1)
    one, other = random.permutation(len(lengths))[:2]
    found = list(lengths)
    found[one], found[other] = found[other], found[one]
    return found


def all_room(kernel: Kernel, stores: list[Store], random: np.random.Generator) -> None:
    """All tokens of the slots of a ragged batch."""
    need(kernel.k.size == LONG)
    ends = next(kernel.arguments[x] for x in ("cu_seqlens_k", "kv_indptr", "cu_seq_k") if x in kernel.arguments)
    kernel.lengths = np.diff(ends).tolist()


def full_pages(kernel: Kernel, stores: list[Store], random: np.random.Generator) -> None:
    need(is_paged(kernel))
    both, size = zip(kernel.k.first, kernel.lengths, strict=True), kernel.k.size
    kernel.lengths = [-(-(first + n) // size) * size - first for first, n in both]


def one_more(kernel: Kernel, stores: list[Store], random: np.random.Generator) -> None:
    need(is_paged(kernel))
    kernel.lengths = [
        n + kernel.k.size * ((f + n) % kernel.k.size == 0) for f, n in zip(kernel.k.first, kernel.lengths, strict=True)
    ]


def other_queries(kernel: Kernel, stores: list[Store], random: np.random.Generator) -> None:
    """Queries of another sequence, in its place."""
    b = len(kernel.queries)
    need(b > 1)
    order = np.roll(range(b), 1)
    found = [kernel.queries[n] for n in order]
    need([len(x) for x in found] == [len(x) for x in kernel.queries])
    kernel.queries = found


def output_elsewhere(kernel: Kernel, stores: list[Store], random: np.random.Generator) -> None:
    """Rows of the answer are written to other sequences, heads or queries."""
    kind, by = int(random.integers(3)), int(random.choice([1, -1]))
    need((len(kernel.queries), kernel.queries[0].shape[1], max(map(len, kernel.queries)))[kind] > 1)
    need(kind > 0 or len({len(x) for x in kernel.queries}) == 1)

    def to(found: list[tuple[Array, Array]]) -> list[tuple[Array, Array]]:
        if kind == 0:
            return found[by:] + found[:by]
        return [(np.roll(x, by, axis=2 - kind), np.roll(y, by, axis=2 - kind)) for x, y in found]

    kernel.to = to


def offset_of(change: Callable[[list[int]], list[int]]) -> Change:
    def changed(kernel: Kernel, stores: list[Store], random: np.random.Generator) -> None:
        need(kernel.causal or kernel.left is not None)
        new = appended(kernel)
        sizes = zip(kernel.lengths, new, kernel.queries, strict=True)
        kernel.moved = change([length + more - len(q) for length, more, q in sizes])

    return changed


def sink_each(kernel: Kernel, stores: list[Store], random: np.random.Generator) -> None:
    need(kernel.sinks is not None)
    assert kernel.sinks is not None
    kernel.sinks = kernel.sinks + math.log(int(random.choice([2, 4, 8])))


# Each with the names that say the same, and whether it may be of keys or of values alone.
MISTAKES: Final[dict[str, tuple[Change, tuple[str, ...], bool]]] = {
    "row.other": (row_other, ("pages.batch_shifted",), True),
    "row.width": (row_width, (), True),
    "entry.shifted": (entry_shifted, (), True),
    "entry.not_read": (entry_by(lambda one, n, i: i), (), True),
    "entry.from_first": (entry_by(lambda one, n, i: page_of(one, n, 0) + i), (), True),
    "entry.first": (entry_by(lambda one, n, i: page_of(one, n, 0)), (), True),
    "entry.ascending": (ordered(False), ("pages.order",), True),
    "entry.descending": (ordered(True), (), True),
    "entry.wide": (entry_wide, (), True),
    "entry.narrow": (entry_narrow, (), True),
    "size.other": (size_other, ("pages.size",), True),
    "slot.shifted": (slot_shifted, (), True),
    "slot.reversed": (reversed_tokens, (), True),
    "slot.swizzled": (slot_swizzled, (), True),
    "slot.no_first": (no_first, (), True),
    "stride.page": (page_stride, (), True),
    "stride.axes": (other_axes, (), True),
    "stride.token": (token_stride, (), True),
    "stride.narrow": (narrow_address, (), True),
    "batch.ignored": (batch_index, (), True),
    "start.of_queries": (start_of_queries, (), True),
    "start.padded": (start_of_padded, (), True),
    "values.of_keys": (values_of_keys, ("value.is_key",), False),
    "table.of_keys": (table_of_keys, (), False),
    "length.less": (length_by(lambda x, r: [n - 1 for n in x], keeps=True), (), False),
    "length.less_aligned": (length_by(lambda x, r: [n - 1 for n in x], keeps=False), (), False),
    "length.more": (length_by(lambda x, r: [n + 1 for n in x], keeps=False), (), False),
    "length.previous": (length_by(lambda x, r: x[-1:] + x[:-1], keeps=False), (), False),
    "length.swapped": (length_by(swapped, keeps=False), (), False),
    "length.first": (length_by(lambda x, r: x[:1] * len(x), keeps=False), ("ragged.lengths_of_first",), False),
    "length.longest": (length_by(lambda x, r: [max(x)] * len(x), keeps=False), (), False),
    "length.room": (all_room, ("ragged.padded_length",), False),
    "length.full_pages": (full_pages, ("pages.last_full",), False),
    "length.one_page_more": (one_more, ("pages.one_more",), False),
    "queries.other": (other_queries, (), False),
    "output.elsewhere": (output_elsewhere, ("heads.permuted", "heads.reversed"), False),
    "offset.zero": (offset_of(lambda x: [0] * len(x)), ("ragged.top_left",), False),
    "offset.previous": (offset_of(lambda x: x[-1:] + x[:-1]), ("ragged.previous_offset",), False),
    "sink.each": (sink_each, ("merge.sink_each",), False),
}


@dataclass
class Planted:
    """A call, its kernel without and with the mistake, and what the latter returns: in the type of the call, and
    expected exactly."""

    right: Kernel
    wrong: Kernel
    output: Array
    sums: Array
    expected: tuple[Array, Array]
    roles: str

    @property
    def call(self) -> tuple[Kernel, Array, Array]:
        """The call, and what came back for it."""
        return self.right, self.output, self.sums


def copied(kernel: Kernel) -> Kernel:
    one = copy.copy(kernel)
    one.k, one.v = copy.copy(kernel.k), copy.copy(kernel.v)
    return one


def typed(found: tuple[Array, Array], dtype: np.dtype) -> tuple[Array, Array]:
    return found[0].astype(dtype), found[1].astype(np.float32)


def draw_call(seed: int, name: str = "") -> tuple[Kernel, Draw]:
    """A random call of a random function."""
    random = np.random.default_rng([seed, *name.encode()])
    draw = Draw(random)
    return CALLS[int(random.integers(len(CALLS)))](draw), draw


def plant(name: str, seed: int) -> Planted | None:
    """A random call that a kernel with a mistake answered; None if no call of some can have it, or nothing changes."""
    for attempt in range(ATTEMPTS):
        if (found := _planted(name, seed * ATTEMPTS + attempt)) is not None:
            return found
    return None


def _planted(name: str, seed: int) -> Planted | None:
    right, draw = draw_call(seed, name)
    change, _, of_roles = MISTAKES[name]
    wrong = copied(right)
    roles = str(draw.random.choice(["kv", "k", "v"], p=[0.5, 0.25, 0.25])) if of_roles else "kv"
    if draw.maybe(0.3) and len(right.queries) > 1:
        wrong.only = set(range(draw.number(1, len(right.queries) - 1), len(right.queries)))
    try:
        change(wrong, [getattr(wrong, role) for role in roles], draw.random)
        wrong.only = None if wrong.to is not None else wrong.only
        found, expected = answer(wrong, right), answer(right)
    except Outside:
        return None
    if alike(found, expected, 1e-3):
        return None
    return Planted(right, wrong, *typed(found, draw.dtype), found, roles)


def right(seed: int) -> tuple[Kernel, Array, Array]:
    """A random call, and what a right kernel returns for it."""
    kernel, draw = draw_call(seed)
    return kernel, *typed(answer(kernel), draw.dtype)


def alike(one: tuple[Array, Array], other: tuple[Array, Array], tolerance: float) -> bool:
    return all(np.allclose(x, y, tolerance, tolerance, equal_nan=True) for x, y in zip(one, other, strict=True))


# What names of the product mean, where another planted mistake may say the same of a call.


def each_offset(by: range) -> Callable[[Kernel], list[Kernel]]:
    """Kernels whose offset is another one, by so much."""

    def of(right: Kernel) -> list[Kernel]:
        found = []
        for step in by:
            one = copied(right)
            sizes = zip(right.lengths, appended(right), right.queries, strict=True)
            one.moved = [length + new - len(q) + step for length, new, q in sizes]
            found.append(one)
        return found

    return of


def by_changes(*names: str) -> Callable[[Kernel], list[Kernel]]:
    """Kernels with mistakes of this table, with every random choice that is likely."""

    def of(right: Kernel) -> list[Kernel]:
        found = []
        for name, roles, seed in itertools.product(names, ("kv", "k", "v"), range(12)):
            one = copied(right)
            with contextlib.suppress(Outside):
                MISTAKES[name][0](one, [getattr(one, role) for role in roles], np.random.default_rng(seed))
                found.append(one)
        return found

    return of


def rolled_heads(right: Kernel) -> list[Kernel]:
    """Kernels whose heads are returned in another order: rolled, and reversed."""
    found = []
    for by in (1, -1, None):
        one = copied(right)
        order = np.arange(right.queries[0].shape[1])
        order = order[::-1] if by is None else np.roll(order, by)
        one.to = lambda rows, order=order: [(x[:, order], y[:, order]) for x, y in rows]
        found.append(one)
    return found


MEANS: Final[dict[str, Callable[[Kernel], list[Kernel]]]] = {
    "causal.strict": lambda right: each_offset(range(-1, 0))(right) + by_changes("length.less")(right),
    "causal.other_offset": each_offset(range(-90, 91)),
    "causal.absent": each_offset(range(400, 401)),
    "keys.last_dropped": by_changes("length.less", "length.less_aligned"),
    "keys.layout": by_changes("stride.axes"),
    "values.layout": by_changes("stride.axes"),
    "value.is_key": by_changes("values.of_keys"),
    "ragged.lengths_of_first": by_changes("length.first"),
    "ragged.top_left": by_changes("offset.zero"),
    "ragged.previous_offset": by_changes("offset.previous"),
    "ragged.padded_length": by_changes("length.room"),
    "pages.batch_shifted": by_changes("row.other"),
    "pages.order": by_changes("entry.ascending"),
    "pages.size": by_changes("size.other"),
    "pages.last_full": by_changes("length.full_pages"),
    "pages.one_more": by_changes("length.one_page_more"),
    "merge.sink_each": by_changes("sink.each"),
    "heads.permuted": rolled_heads,
    "heads.reversed": rolled_heads,
}


def says(name: str, planted: Planted) -> bool:
    """True if a mistake with this name of the product, made by the formulas here, explains each sequence."""
    found, right = planted.expected, answer(planted.right)
    if name not in MEANS:
        return False
    left = np.ones(len(planted.right.queries), bool)
    for one in MEANS[name](planted.right):
        for n in np.flatnonzero(left).tolist():
            one.only = {n} if one.to is None else None
            with contextlib.suppress(Outside):
                other = answer(one, planted.right)
                rows = [own(planted.right, n, x) for x in (found, other, right)]
                left[n] = not (alike(rows[0], rows[1], 1e-4) or alike(rows[0], rows[2], 1e-4))
    return not left.any()


def own(kernel: Kernel, n: int, found: tuple[Array, Array]) -> tuple[Array, Array]:
    """The rows of a sequence."""
    if kernel.form == "dense":
        return found[0][n], found[1][n]
    rows = slice(kernel.starts[n], kernel.starts[n] + len(kernel.queries[n]))
    return found[0][rows], found[1][:, rows] if kernel.form == "ragged" else found[1][rows]


def is_true(fact: Any, planted: Planted) -> bool:
    """True if what a fact says of tokens is what the kernel read: each listed token of a place is one of these."""
    numbers = fact.numbers
    if "token" not in numbers:
        return True
    n, wrong = int(numbers["sequences"][0]), planted.wrong
    kernel = wrong if wrong.only is None or n in wrong.only else planted.right
    role = "v" if "other values" in fact.message.split(";")[0] else "k"
    right, other = getattr(planted.right, role), getattr(kernel, role)
    read = other.read(n, kernel.lengths[n])
    pages, slots = (numbers[a] for a in (("page", "slot") if "page" in numbers else ("slot", "place")))
    for page, slot in zip(pages, slots, strict=True):
        at = right.start + int(page) * right.page + int(slot) * right.slot + right.places
        at = at + np.arange(right.heads)[:, None] * right.head
        content = right.memory[at].astype(np.float64)
        if not (np.abs(read - content).max(axis=(1, 2)) == 0).any():
            return False
    return True
