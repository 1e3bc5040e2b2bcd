"""FlexAttention (Dong et al. 2024): what bands, segments, lengths, softcap, ALiBi and sinks make of attention, as one
kernel that leaves out what is hidden, compiled for a GPU.

Compiling takes seconds, so no request waits for it: the first of its kind is computed otherwise, while the kernel is
compiled and tried on random numbers. Only what agrees with the definition there is used from then on.

Shapes in comments: b batch, h heads, q queries, k keys, n blocks of queries, m blocks of keys.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from functools import cache
from threading import Lock, Thread
from typing import Any, Final

import numpy as np
import torch
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from service.attention.plan import Plan
from service.attention.result import Computed
from service.backends import dense
from service.backends.dense import Library, Loaded
from service.backends.torch.fused import UNFUSED, is_plainly_causal, whole

try:
    from torch.nn.attention.flex_attention import AuxRequest
except ImportError:  # before torch 2.9
    AuxRequest = None

# Queries and keys that are hidden or not as one.
BLOCK: Final = 128
# With fewer scores than this, what is left out is not worth what comes before.
FEWEST_SCORES: Final = 2**24
# Features of a head that the kernel knows; it multiplies float32 without tensor cores, and with less room.
FEATURES: Final = {
    torch.float32: (16, 32, 64, 128),
    torch.float16: (16, 32, 64, 128, 256),
    torch.bfloat16: (16, 32, 64, 128, 256),
}
# Ids of hidden keys and queries, which no segment has.
NO_KEY, NO_QUERY = -1, -2
# Kinds of requests that are remembered, and that are tried at the same time.
MAX_KINDS, MAX_TRIALS = 1024, 4
# Kernels that are compiled at most: for other types, features, scales and options. Lengths differ within one.
MAX_COMPILED: Final = 64
# A trial's largest deviation, of the largest number: far above rounding, far below what a wrong mask does.
TOLERANCE: Final = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 3e-2}

logger = logging.getLogger("attention")


def fits(plan: Plan, loaded: Loaded) -> bool:
    """Whether this is worth it, means what the plan does, and no score can overflow unseen."""
    sizes, seen = plan.sizes, plan.visibility
    features = FEATURES.get(loaded.query.dtype, ())
    parts = (seen.keys, seen.queries, seen.segments, seen.band, plan.alibi, plan.softcap, plan.sinks)
    return (
        AuxRequest is not None
        and plan.score_count >= FEWEST_SCORES
        and min(sizes.query_length, sizes.key_length) >= BLOCK
        and sizes.head_dim == sizes.value_dim
        and sizes.head_dim in features
        and (any(part is not None for part in parts) or "logsumexp" in plan.selection.include)
        and not is_plainly_causal(plan)
        and means(plan, loaded)
    )


def means(plan: Plan, loaded: Loaded) -> bool:
    """Whether this can express the plan."""
    return (
        plan.normalization == "softmax"
        and plan.visibility.mask is None
        and plan.bias is None
        and not plan.selection.include & (UNFUSED - {"logsumexp"})
        and loaded.bad_values is None
        and dense.loose_bounds(plan, loaded).allow(plan)
    )


@dataclass(frozen=True, slots=True)
class Blocks:
    """Which blocks of keys each block of queries looks at: some scores of `part`, all of `full`.

    counts (b, 1, n) and indices (b, 1, n, m), of which the first so many count, int32
    """

    part_counts: np.ndarray
    part_indices: np.ndarray
    full_counts: np.ndarray
    full_indices: np.ndarray


@dataclass(frozen=True, slots=True)
class Hiding:
    """What hides scores: query i sees key j if low <= j - i <= high and both have the same id.

    low, high: (b,); queries (b, q) and keys (b, k): ids
    """

    low: np.ndarray
    high: np.ndarray
    queries: np.ndarray
    keys: np.ndarray

    @staticmethod
    def of(plan: Plan) -> Hiding:
        """Bands, segments, lengths and masks of keys."""
        sizes, seen = plan.sizes, plan.visibility
        b, q, k = sizes.batch_size, sizes.query_length, sizes.key_length
        low = -q if seen.band is None or seen.band.low is None else seen.band.low
        high = k if seen.band is None or seen.band.high is None else seen.band.high
        queries, keys = np.zeros((b, q), np.int32), np.zeros((b, k), np.int32)
        if seen.segments is not None:
            given = np.broadcast_to(seen.segments.query, (b, q)), np.broadcast_to(seen.segments.key, (b, k))
            ids = np.unique(np.concatenate(given, axis=1), return_inverse=True)[1].reshape(b, q + k).astype(np.int32)
            queries, keys = np.ascontiguousarray(ids[:, :q]), np.ascontiguousarray(ids[:, q:])
        if seen.queries is not None:
            queries[np.broadcast_to(~seen.queries, (b, q))] = NO_QUERY
        if seen.keys is not None:
            keys[np.broadcast_to(~seen.keys, (b, k))] = NO_KEY
        first, last = (np.ascontiguousarray(np.broadcast_to(edge, (b,)), np.int32) for edge in (low, high))
        return Hiding(first, last, queries, keys)

    def blocks(self) -> Blocks:
        """What no block of queries can see at all is left out; what is seen whole needs no look at each score."""
        i, j = _extent(self.queries.shape[1]), _extent(self.keys.shape[1])  # first and last of each block
        first_query, last_query, first_key, last_key = i[0][:, None], i[1][:, None], j[0][None], j[1][None]
        low, high = self.low[:, None, None], self.high[:, None, None]
        some = (last_key - first_query >= low) & (first_key - last_query <= high)  # b n m
        every = (first_key - last_query >= low) & (last_key - first_query <= high)
        every &= (last_query - first_query == BLOCK - 1) & (last_key - first_key == BLOCK - 1)
        least_query, most_query = (ids[:, :, None] for ids in _ids(self.queries, NO_QUERY))
        least_key, most_key = (ids[:, None, :] for ids in _ids(self.keys, NO_KEY))
        some &= (least_query <= most_key) & (least_key <= most_query)
        every &= (least_query == most_key) & (least_key == most_query)
        every &= (self._whole(self.queries, NO_QUERY)[:, :, None]) & (self._whole(self.keys, NO_KEY)[:, None, :])
        return Blocks(*_listed(some & ~every), *_listed(every))

    @staticmethod
    def _whole(ids: np.ndarray, hidden: int) -> np.ndarray:
        """The blocks in which nothing is hidden."""
        return ~np.logical_or.reduceat(ids == hidden, range(0, ids.shape[1], BLOCK), axis=1)


def _extent(length: int) -> tuple[np.ndarray, np.ndarray]:
    first = np.arange(0, length, BLOCK)
    return first, np.minimum(first + BLOCK, length) - 1


def _ids(ids: np.ndarray, hidden: int) -> tuple[np.ndarray, np.ndarray]:
    """The least and the largest id of each block, those of hidden tokens left out: then no interval meets another."""
    starts = range(0, ids.shape[1], BLOCK)
    least = np.minimum.reduceat(np.where(ids == hidden, np.iinfo(np.int32).max, ids), starts, axis=1)
    most = np.maximum.reduceat(np.where(ids == hidden, np.iinfo(np.int32).min, ids), starts, axis=1)
    return least, most


def _listed(blocks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """From (b, n, m) to how many there are in each row, and which, those first."""
    order = np.argsort(~blocks, axis=-1, kind="stable").astype(np.int32)
    return blocks.sum(axis=-1, dtype=np.int32)[:, None], np.ascontiguousarray(order[:, None])


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    hiding: tuple[torch.Tensor, ...],
    blocks: tuple[torch.Tensor, ...],
    added: tuple[torch.Tensor | None, ...],
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """What is compiled: outputs (b, h, q, e), and logsumexp (b, h, q).

    hiding, blocks: as in the classes of these names; added: softcap and slopes (h,) and offset (b,), None where absent
    """
    low, high, queries, keys = hiding
    softcap, slopes, offset = added

    def score(score: torch.Tensor, b: Any, h: Any, i: Any, j: Any) -> torch.Tensor:
        if softcap is not None:
            score = softcap[h] * torch.tanh(score / softcap[h])
        if slopes is not None and offset is not None:
            score = score - slopes[h] * torch.abs(i + offset[b] - j)
        return score

    def sees(b: Any, h: Any, i: Any, j: Any) -> torch.Tensor:
        return (j - i >= low[b]) & (j - i <= high[b]) & (queries[b, i] == keys[b, j])

    lengths = query.shape[2], key.shape[2]
    mask = BlockMask.from_kv_blocks(*blocks, BLOCK, sees, seq_lengths=lengths, compute_q_blocks=False)
    outputs, aux = flex_attention(
        query,
        key,
        value,
        score_mod=None if softcap is None and slopes is None else score,
        block_mask=mask,
        scale=scale,
        enable_gqa=query.shape[1] != key.shape[1],
        return_aux=AuxRequest(lse=True),
    )
    return outputs, aux.lse


@cache
def _compiled(backend: str) -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
    """Lengths that differ from request to request become free ones, by and by."""
    found: Callable[..., tuple[torch.Tensor, torch.Tensor]] = torch.compile(attend, fullgraph=True, backend=backend)
    return found


def compute(plan: Plan, lib: Library, loaded: Loaded) -> Computed:
    """What the plan includes. `fits` has said that this can."""
    hiding, sizes = Hiding.of(plan), plan.sizes
    blocks = hiding.blocks()
    softcap = None if plan.softcap is None else np.full(sizes.num_heads, plan.softcap, plan.compute_dtype)
    slopes = offset = None
    if plan.alibi is not None:
        slopes, offset = plan.alibi.slopes, np.broadcast_to(plan.alibi.offset, (sizes.batch_size,))
    run = _compiled("inductor" if lib.waits else "eager")  # which only traces: this is no kernel for the CPU
    with torch._dynamo.config.patch(recompile_limit=MAX_COMPILED):  # of 8, after which it is an error; this thread's
        outputs, logsumexp = run(
            *(tensor.contiguous() for tensor in (loaded.query, loaded.key, loaded.value)),  # as in the trial
            tuple(map(lib.load, (hiding.low, hiding.high, hiding.queries, hiding.keys))),
            tuple(map(lib.load, (blocks.part_counts, blocks.part_indices, blocks.full_counts, blocks.full_indices))),
            tuple(None if array is None else lib.load(array) for array in (softcap, slopes, offset)),
            plan.scale,
        )
    tile = whole(plan)
    unseen = logsumexp == -math.inf
    masked = dense.count_masked(plan, lib, unseen, tile)
    if plan.sinks is not None:  # of what a row gives, its part beside the sink
        sinks = lib.load(plan.sinks[:, None])
        outputs = (outputs * torch.sigmoid(logsumexp - sinks)[..., None]).to(outputs.dtype)
        logsumexp = torch.logaddexp(logsumexp, sinks)
    outputs = outputs.masked_fill(unseen[..., None], 0)
    if plan.roles.output_map is not None:
        outputs = outputs.to(logsumexp.dtype)
    scores = {"logsumexp": logsumexp} if "logsumexp" in plan.selection.include else {}
    arrays, fully_masked = dense.stored(plan, lib, loaded, outputs, scores, masked)
    return Computed(arrays, fully_masked, "torch", str(lib.device), "flex_attention")


class Trials:
    """Which kinds of requests the compiled kernel has been tried on, and found right."""

    def __init__(self) -> None:
        self._known: dict[Hashable, bool] = {}
        self._running = 0
        self._lock = Lock()

    def passed(self, kind: Hashable, trial: Callable[[], bool]) -> bool:
        """Whether one has been passed; the first to ask has one started."""
        with self._lock:
            if kind in self._known:
                return self._known[kind]
            if self._running < MAX_TRIALS:
                if len(self._known) >= MAX_KINDS:
                    self._known.clear()
                self._known[kind] = False
                self._running += 1
                Thread(target=self._run, args=(kind, trial), daemon=True).start()
        return False

    def fail(self, kind: Hashable) -> None:
        """Use it no more."""
        with self._lock:
            self._known[kind] = False

    def _run(self, kind: Hashable, trial: Callable[[], bool]) -> None:
        passed = False
        try:
            passed = trial()
        except Exception:  # of a compiler: anything
            logger.warning("FlexAttention is not used for %s", kind, exc_info=True)
        with self._lock:
            self._known[kind] = passed
            self._running -= 1


trials = Trials()


def kind(plan: Plan, loaded: Loaded) -> Hashable:
    """What a compiled kernel depends on."""
    query = loaded.query
    return query.device, query.dtype, plan.sizes, plan.softcap is None, plan.alibi is None, plan.scale


def agree(ours: Computed, definition: Computed, dtype: torch.dtype) -> bool:
    """Whether a trial on numbers of this type gave the right ones."""
    for name in ("output", "logsumexp"):
        if name in ours.arrays:
            one, other = (computed.arrays[name].astype(np.float32) for computed in (ours, definition))
            finite = np.isfinite(other)
            limit = TOLERANCE[dtype] * np.max(np.abs(other), where=finite, initial=1e-30)
            if not (np.array_equal(finite, np.isfinite(one)) and np.all(np.abs(one - other)[finite] <= limit)):
                return False
    return ours.fully_masked_rows == definition.fully_masked_rows
