"""FlexAttention (Dong et al. 2024): one kernel for bands, segments, lengths, softcap, ALiBi and sinks, which leaves out
hidden blocks, compiled for a GPU.

Compiling takes seconds, so no request waits for it: the first request of a kind is computed by another kernel while
FlexAttention is compiled and tried on random numbers. It is used afterwards if it agreed with the dense computation.

Shapes in comments: b batch, h heads, q queries, k keys.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Hashable
from functools import cache, partial
from threading import Lock, Thread
from typing import Any, Final, TypeVar

import numpy as np
import torch
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from attention_service.attention.options import ALWAYS
from attention_service.attention.plan import Plan
from attention_service.attention.result import Computed
from attention_service.attention.score_term import ScoreTerm
from attention_service.attention.terms import Alibi, Band, KeyMask, QueryLengths, Segments
from attention_service.attention.tiles import whole
from attention_service.backends.dense.compute import stored
from attention_service.backends.dense.numerics import cannot_overflow
from attention_service.backends.dense.operands import OPERAND_OPTIONS, LoadedOperands
from attention_service.backends.dense.scores import count_rows
from attention_service.backends.torch.library import TorchLibrary
from attention_service.backends.torch.sdpa import is_plainly_causal

try:
    from torch.nn.attention.flex_attention import AuxRequest
except ImportError:  # before torch 2.9
    AuxRequest = None

# Options that are a reason to use FlexAttention.
REASONS: Final = frozenset({
    "terms.Alibi.slopes",
    "terms.Alibi.offset",
    "terms.KeyMask.booleans",
    "terms.KeyLengths.booleans",
    "terms.QueryLengths.booleans",
    "terms.Segments.query",
    "terms.Segments.key",
    "terms.SlidingWindow.low",
    "terms.SlidingWindow.high",
    "terms.Causal.high",
    "softcap",
    "sinks",
    "selection.include.logsumexp",
})  # fmt: skip
# The options that FlexAttention knows.
KNOWN: Final = ALWAYS | OPERAND_OPTIONS | REASONS
# Queries and keys of a block, which is hidden or computed as a whole.
BLOCK: Final = 128
# With fewer scores than this, leaving out blocks saves less than preparing them takes.
FEWEST_SCORES: Final = 2**24
# Features of a head that the kernel supports; it multiplies float32 without tensor cores and with less shared memory.
FEATURES: Final = {
    torch.float32: (16, 32, 64, 128),
    torch.float16: (16, 32, 64, 128, 256),
    torch.bfloat16: (16, 32, 64, 128, 256),
}
# Ids of hidden keys and queries, which no segment has.
NO_KEY, NO_QUERY = -1, -2
# Kinds of requests that are remembered, and that are tried at the same time.
MAX_KINDS, MAX_TRIALS = 1024, 4
# Kernels that are kept compiled: one for each combination of type, head size, scale and options. Lengths are dynamic.
MAX_COMPILED: Final = 64
# The largest deviation in a trial, as a part of the largest number: far above rounding, far below that of a wrong mask.
TOLERANCE: Final = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 3e-2}

logger = logging.getLogger("attention")

Term = TypeVar("Term", bound=ScoreTerm)
# Returns True if FlexAttention computes plans like this one correctly, on a device, for a type.
Trial = Callable[[Plan, torch.device, torch.dtype], bool]


class Flex:
    """Uses FlexAttention for the kinds of requests that it was tried on.

    trial: see Trial; fewest_scores: smaller plans are left to other kernels
    """

    def __init__(self, trial: Trial, fewest_scores: int = FEWEST_SCORES) -> None:
        self.trials = Trials()
        self.fewest_scores = fewest_scores
        self._trial = trial

    def compute(self, plan: Plan, lib: TorchLibrary, loaded: LoadedOperands) -> Computed | None:
        """Compute a plan; None if it does not fit, or if its kind has not been tried yet or failed."""
        if not self.fits(plan, loaded):
            return None
        kind = kind_of(plan, loaded)
        if not self.trials.passed(kind, partial(self._trial, plan, lib.device, loaded.query.dtype)):
            return None
        try:
            return compute(plan, lib, loaded)
        except RuntimeError:
            self.trials.fail(kind)
            raise

    def fits(self, plan: Plan, loaded: LoadedOperands) -> bool:
        """True if FlexAttention can express the plan, no score can overflow, and it is worth it."""
        sizes = plan.sizes
        return (
            AuxRequest is not None
            and plan.score_count >= self.fewest_scores
            and min(sizes.query_length, sizes.key_length) >= BLOCK
            and sizes.head_dim == sizes.value_dim
            and sizes.head_dim in FEATURES.get(loaded.query.dtype, ())
            and bool(plan.options & REASONS)
            and not is_plainly_causal(plan)
            and can_express(plan, loaded)
        )


def can_express(plan: Plan, loaded: LoadedOperands) -> bool:
    """True if FlexAttention knows all options of the plan, and no score can overflow, which it would not report."""
    return plan.options <= KNOWN and cannot_overflow(plan, loaded)


def bounds_and_ids(plan: Plan) -> tuple[np.ndarray, ...]:
    """What the terms of a plan hide, as int32: low (b,), high (b,), ids of queries (b, q), ids of keys (b, k).

    Query i sees key j if low <= j - i <= high and both have the same id.
    """
    _, _, b, q, k, _, _ = plan.sizes
    low, high = np.full(b, -q), np.full(b, k)
    for band in _terms(plan, Band):
        low = low if band.low is None else np.maximum(low, band.low)
        high = high if band.high is None else np.minimum(high, band.high)
    queries, keys = np.zeros((b, q), np.int32), np.zeros((b, k), np.int32)
    for segments in _terms(plan, Segments):
        given = np.broadcast_to(segments.query, (b, q)), np.broadcast_to(segments.key, (b, k))
        ids = np.unique(np.concatenate(given, axis=1), return_inverse=True)[1].reshape(b, q + k).astype(np.int32)
        queries, keys = np.ascontiguousarray(ids[:, :q]), np.ascontiguousarray(ids[:, q:])
    for lengths in _terms(plan, QueryLengths):
        queries[np.broadcast_to(~lengths.booleans[:, 0, :, 0], (b, q))] = NO_QUERY
    for mask in _terms(plan, KeyMask):
        keys[np.broadcast_to(~mask.booleans[:, 0, 0], (b, k))] = NO_KEY
    return low.astype(np.int32), high.astype(np.int32), queries, keys


def mask_mod(plan: Plan, lib: TorchLibrary) -> Callable[..., torch.Tensor]:
    """The function of batch entry, head, query and key that tells whether the key is visible."""
    low, high, queries, keys = map(lib.load, bounds_and_ids(plan))

    def sees(b: Any, h: Any, i: Any, j: Any) -> torch.Tensor:
        return (j - i >= low[b]) & (j - i <= high[b]) & (queries[b, i] == keys[b, j])

    return sees


def score_mod(plan: Plan, lib: TorchLibrary) -> Callable[..., torch.Tensor] | None:
    """The function that caps scores and adds ALiBi; None if the plan has neither."""
    softcap = slopes = offset = None
    if plan.softcap is not None:
        softcap = lib.load(np.full(plan.sizes.num_heads, plan.softcap, plan.compute_dtype))
    for alibi in _terms(plan, Alibi):
        slopes = lib.load(alibi.slopes)
        offset = lib.load(np.broadcast_to(alibi.offset, (plan.sizes.batch_size,)))

    def change(score: torch.Tensor, b: Any, h: Any, i: Any, j: Any) -> torch.Tensor:
        if softcap is not None:
            score = softcap[h] * torch.tanh(score / softcap[h])
        if slopes is not None and offset is not None:
            score = score - slopes[h] * torch.abs(i + offset[b] - j)
        return score

    return None if softcap is None and slopes is None else change


@cache
def _compiled(backend: str) -> Callable[..., Any]:
    """flex_attention, compiled. torch makes lengths that change from call to call dynamic by itself."""
    found: Callable[..., Any] = torch.compile(flex_attention, fullgraph=True, backend=backend)
    return found


def compute(plan: Plan, lib: TorchLibrary, loaded: LoadedOperands) -> Computed:
    """Compute a plan that `can_express` accepts."""
    sizes = plan.sizes
    run = _compiled("inductor" if lib.is_asynchronous else "eager")  # which only traces: this is no kernel for the CPU
    mask = create_block_mask(
        mask_mod(plan, lib), sizes.batch_size, None, sizes.query_length, sizes.key_length, lib.device, BLOCK
    )
    with torch._dynamo.config.patch(recompile_limit=MAX_COMPILED):  # for this thread; by default 8
        outputs, aux = run(
            *(tensor.contiguous() for tensor in (loaded.query, loaded.key, loaded.value)),  # as in the trial
            score_mod=score_mod(plan, lib),
            block_mask=mask,
            scale=plan.scale,
            enable_gqa=sizes.num_heads != sizes.num_kv_heads,
            return_aux=AuxRequest(lse=True),
        )
    logsumexp = aux.lse
    unseen = logsumexp == -math.inf
    masked = count_rows(plan, lib, unseen, whole(plan))
    if plan.sinks is not None:  # the part of the weight that the sink does not take
        sinks = lib.load(plan.sinks[:, None])
        outputs = (outputs * torch.sigmoid(logsumexp - sinks)[..., None]).to(outputs.dtype)
        logsumexp = torch.logaddexp(logsumexp, sinks)
    outputs = outputs.masked_fill(unseen[..., None], 0)
    if plan.roles.output_map is not None:
        outputs = outputs.to(logsumexp.dtype)
    scores = {"logsumexp": logsumexp} if "logsumexp" in plan.selection.include else {}
    arrays, fully_masked = stored(plan, lib, loaded, outputs, scores, masked)
    return Computed(arrays, fully_masked, "torch", str(lib.device), "flex_attention")


class Trials:
    """The kinds of requests that the compiled kernel was tried on, and the outcomes."""

    def __init__(self) -> None:
        self._known: dict[Hashable, bool] = {}
        self._running = 0
        self._lock = Lock()

    def passed(self, kind: Hashable, trial: Callable[[], bool]) -> bool:
        """True if a trial of this kind was passed. The first call for a kind starts its trial in a thread."""
        with self._lock:
            if kind not in self._known and self._running < MAX_TRIALS:
                if len(self._known) >= MAX_KINDS:
                    self._known.clear()
                self._known[kind] = False
                self._running += 1
                Thread(target=self._run, args=(kind, trial), daemon=True).start()
            return self._known.get(kind, False)

    def fail(self, kind: Hashable) -> None:
        """Do not use FlexAttention for this kind any more."""
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


def kind_of(plan: Plan, loaded: LoadedOperands) -> Hashable:
    """The key of all plans that one compiled kernel fits: the device, the type, sizes, options and the scale."""
    return loaded.query.device, loaded.query.dtype, plan.sizes, plan.options, plan.scale


def _terms(plan: Plan, kind: type[Term]) -> list[Term]:
    return [term for term in plan.terms if isinstance(term, kind)]


def agree(ours: Computed, definition: Computed, dtype: torch.dtype) -> bool:
    """True if FlexAttention gave the numbers of the dense computation, within the rounding of this type."""
    for name in ("output", "logsumexp"):
        if name in ours.arrays:
            one, other = (computed.arrays[name].astype(np.float32) for computed in (ours, definition))
            limit = TOLERANCE[dtype] * np.max(np.abs(other), where=np.isfinite(other), initial=1e-30)
            if not np.allclose(one, other, rtol=0, atol=limit):
                return False
    return ours.fully_masked_rows == definition.fully_masked_rows
