"""torch's scaled_dot_product_attention: fused kernels that never hold the scores.

Shapes in comments: b batch, h heads, g key/value heads, r the queries of a tile, k its keys, d and e features.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial, reduce
from itertools import chain, tee
from threading import Lock
from typing import Final, NamedTuple

import numpy as np
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from attention_service.attention.options import ALWAYS
from attention_service.attention.plan import Plan
from attention_service.attention.terms.positions import Causal
from attention_service.attention.tile import Tile
from attention_service.attention.tiles import tiles, whole, whole_entries
from attention_service.attention.visibility import additions, visible
from attention_service.backends.base import Check
from attention_service.backends.dense.compute import empty_outputs
from attention_service.backends.dense.numerics import cannot_overflow
from attention_service.backends.dense.operands import OPERAND_OPTIONS, LoadedOperands
from attention_service.backends.dense.scores import count_rows
from attention_service.backends.torch.library import TorchLibrary

# The options that fused kernels know: what is done to operands and outputs, and terms, of which one mask is made. The
# dense computation takes a plan with any other option. Each fast path has a list of its own.
KNOWN: Final = ALWAYS | OPERAND_OPTIONS | {
    "terms.Bias.numbers",
    "terms.Alibi.slopes",
    "terms.Alibi.offset",
    "terms.Mask.booleans",
    "terms.KeyMask.booleans",
    "terms.KeyLengths.booleans",
    "terms.QueryLengths.booleans",
    "terms.Segments.query",
    "terms.Segments.key",
    "terms.Chunks.size",
    "terms.Chunks.offset",
    "terms.SlidingWindow.low",
    "terms.SlidingWindow.high",
    "terms.Causal.high",
    "selection.heads",
    "selection.queries",
    "selection.average_heads",
}  # fmt: skip
# The first of these that can compute a plan does. MATH holds all scores: if it is chosen, no fused kernel fits.
ORDER: Final = (
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.MATH,
)
NAMES: Final = {
    SDPBackend.CUDNN_ATTENTION.value: "cudnn_attention",
    SDPBackend.FLASH_ATTENTION.value: "flash_attention",
    SDPBackend.EFFICIENT_ATTENTION.value: "efficient_attention",
}
ON_CPU: Final = "scaled_dot_product_attention"
# Scores that are computed at a time if no mask is made for them. A kernel cannot be stopped, so this is less than a
# second of work, on a CPU and on a GPU.
UNMASKED_SCORES: Final = 2**27
UNMASKED_SCORES_GPU: Final = 2**37


class Fused(NamedTuple):
    """What fused kernels computed: head outputs (b, h, q, e), rows that see no key, and the names of the kernels."""

    head_outputs: torch.Tensor
    masked: torch.Tensor | int
    names: frozenset[str]


def fitting(plan: Plan, lib: TorchLibrary, loaded: LoadedOperands) -> np.ndarray:
    """(b,): True for entries without a score that can overflow, if fused kernels know the plan's options and its type.

    They would not report an overflow. On a GPU none of them computes float64, and all entries are computed alike.
    """
    has_type = not lib.is_asynchronous or plan.compute_dtype.itemsize == 4
    if not has_type or not plan.options <= KNOWN:
        return np.full(plan.sizes.batch_size, False)
    safe = cannot_overflow(plan, loaded)
    return np.full_like(safe, safe.all()) if lib.is_asynchronous else safe


def is_plainly_causal(plan: Plan) -> bool:
    """True if a kernel's own causal masking, aligned at the first token, is the only term.

    A kernel multiplies its -inf by the scale, which must therefore be above 0.
    """
    if len(plan.terms) != 1 or plan.scale <= 0:
        return False
    (term,) = plan.terms
    return isinstance(term, Causal) and term.high is not None and not term.high.any()


class Kernels:
    """The fused kernels.

    unmasked_scores: scores computed at a time without a mask on the CPU; tests make it small
    """

    def __init__(self) -> None:
        self.unmasked_scores = UNMASKED_SCORES
        # sdpa_kernel sets the order for the whole process.
        self._ordering = Lock()

    def compute(
        self, plan: Plan, lib: TorchLibrary, loaded: LoadedOperands, check: Check, entries: Iterable[slice]
    ) -> Fused | None:
        """The head outputs of these entries, all terms as one mask, tile by tile; None if there is no kernel."""
        most = UNMASKED_SCORES_GPU if lib.is_asynchronous else self.unmasked_scores
        causal = is_plainly_causal(plan) and plan.entry_scores <= most
        tiling = lib.tiling if plan.terms and not causal else replace(lib.tiling, scores=most)
        every = None if plan.output_steps else whole(plan)  # a norm sums up in the order of memory of `empty_outputs`
        cut_part = partial(whole_entries if causal else tiles, plan, tiling)
        cut, running = tee(chain.from_iterable(map(cut_part, entries)))  # which may be millions
        dtype = plan.dtype if loaded.query.dtype.itemsize == 2 else plan.compute_dtype
        head_outputs = None
        masked: torch.Tensor | int = 0
        names: set[str] = set()

        def run(tile: Tile) -> tuple[torch.Tensor, str, torch.Tensor | int] | None:
            check()
            seen = None if causal else visible(plan.terms, tile, lib.load)  # causal rows all see the first key
            found = self._attend(
                loaded.query[tile.batch, tile.heads, tile.rows],
                loaded.key[tile.batch, tile.kv_heads, tile.columns],
                loaded.value[tile.batch, tile.kv_heads, tile.columns],
                None if causal else _attn_mask(additions(plan.terms, tile, lib.load), seen),
                causal=causal,
                scale=plan.scale,
            )
            if found is None or seen is None:
                return found and (*found, 0)
            outputs, name = found
            unseen = ~seen.any(dim=-1, keepdim=True)  # kernels differ in what they return for such rows
            return outputs.masked_fill(unseen, 0), name, count_rows(plan, lib, unseen[..., 0], tile)

        for tile, found in zip(cut, lib.run(run, running), strict=True):
            if found is None:
                return None
            outputs, name, unseen = found
            names.add(name)
            masked = masked + unseen
            if every and (tile.batch, tile.heads, tile.rows) == (every.batch, every.heads, every.rows):
                head_outputs = outputs
                continue
            if head_outputs is None:
                head_outputs = empty_outputs(plan, lib, dtype)
            head_outputs[tile.batch, tile.heads, tile.rows] = outputs
        assert head_outputs is not None
        if plan.roles.output_map is not None or plan.output_steps:
            head_outputs = head_outputs.to(getattr(torch, plan.compute_dtype.name))  # what follows may not be of halves
        return Fused(head_outputs, masked, frozenset(names))

    def _attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None,
        *,
        causal: bool,
        scale: float,
    ) -> tuple[torch.Tensor, str] | None:
        """(b, h, r, d), (b, g, k, d), (b, g, k, e) -> (b, h, r, e), and the kernel's name; None without a kernel."""
        on_cpu = query.device.type == "cpu"
        groups = query.shape[1] // key.shape[1]
        if mask is not None and not on_cpu and mask.shape[-1] != key.shape[2]:
            # torch would repeat the column by a stride of 0, which kernels read in 16 bytes. After a misaligned address
            # a process can no longer use its GPU.
            mask = mask.expand(*mask.shape[:-1], key.shape[2]).contiguous()
        with (
            nullcontext() if on_cpu else self._ordering,
            nullcontext() if on_cpu else sdpa_kernel(list(ORDER), set_priority=True),
        ):
            chosen = choose(query, key, value, mask, causal, scale)
            if chosen == SDPBackend.MATH.value and groups > 1:  # some kernels have no grouped heads
                key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
                chosen = choose(query, key, value, mask, causal, scale)
            if chosen not in NAMES:
                return None
            outputs = scaled_dot_product_attention(
                query, key, value, mask, is_causal=causal, scale=scale, enable_gqa=query.shape[1] != key.shape[1]
            )
        return outputs, ON_CPU if on_cpu else NAMES[chosen]


def choose(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, causal: bool, scale: float
) -> int:
    """The kernel that scaled_dot_product_attention will run, as a value of SDPBackend."""
    gqa = query.shape[1] != key.shape[1]
    return int(torch._fused_sdp_choice(query, key, value, mask, 0.0, causal, scale=scale, enable_gqa=gqa))


def _attn_mask(added: list[torch.Tensor], seen: torch.Tensor | None) -> torch.Tensor | None:
    """The mask of a tile: booleans if scores are only hidden; numbers if something is added to them."""
    if not added:
        return seen
    total = reduce(torch.add, added)
    return total if seen is None else torch.where(seen, total, -torch.inf)
