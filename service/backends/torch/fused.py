"""torch's fused kernels, which never hold the scores: scaled_dot_product_attention, for what it can mean.

Shapes in comments: b batch, h heads, g key/value heads, r the queries of a tile, k its keys, d and e features.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from contextlib import nullcontext
from threading import Lock
from typing import Final

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from service.attention.plan import Plan
from service.attention.result import Computed
from service.attention.spec import ROW_STATISTICS, SCORE_MATRICES
from service.attention.tiles import Cut, Tile, tiles
from service.backends import dense
from service.backends.dense import Library, Loaded

# What a fused kernel cannot return, as it never exists there.
UNFUSED: Final = frozenset({*SCORE_MATRICES, *ROW_STATISTICS, "received"})
# Of those that can compute something the first does. The last one holds all scores, and so none is left for it. cuDNN's
# is compiled anew for each size, and so comes first only for sizes that come again and again.
USUAL: Final = [
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.MATH,
]
REPEATED: Final = sorted(USUAL, key=lambda backend: backend != SDPBackend.CUDNN_ATTENTION)
OFTEN = 8
MAX_KINDS: Final = 1024
NAMES: Final = {
    SDPBackend.CUDNN_ATTENTION.value: "cudnn_attention",
    SDPBackend.FLASH_ATTENTION.value: "flash_attention",
    SDPBackend.EFFICIENT_ATTENTION.value: "efficient_attention",
}
ON_CPU: Final = "scaled_dot_product_attention"
# So many scores are computed at a time where no mask is made for them, as a kernel cannot be stopped: less than a
# second of work on the CPU, and on a GPU.
UNMASKED_SCORES = 2**27
UNMASKED_SCORES_GPU = 2**37

# The order is a setting of the whole process: who has set it has the process to itself until the kernel is launched.
_ordering = Lock()
_met: dict[Hashable, int] = {}


def fits(plan: Plan, loaded: Loaded) -> bool:
    """Whether a fused kernel computes what the plan means: a plain softmax of which nobody asks the scores.

    Scores must also be safe from overflow, as nobody would see it there.
    """
    plain = plan.normalization == "softmax" and plan.softcap is None and plan.sinks is None
    wanted = plan.selection.include & UNFUSED
    return plain and not wanted and loaded.bad_values is None and dense.loose_bounds(plan, loaded).allow(plan)


def compute(plan: Plan, lib: Library, loaded: Loaded, check: Callable[[], None]) -> Computed | None:
    """Everything that hides or adds as one mask, a tile at a time; None where no kernel is there for it."""
    most = UNMASKED_SCORES_GPU if lib.waits else UNMASKED_SCORES
    causal = is_plainly_causal(plan) and plan.score_count <= most
    scores = lib.tile_scores if _needs_mask(plan) else most
    cut = [whole(plan)] if causal else list(tiles(plan, Cut(scores, 1, streams=False)))
    order = order_for((plan.sizes, loaded.query.dtype, causal))
    head_outputs = None if len(cut) == 1 else dense.empty_outputs(plan, lib, loaded)
    masked: torch.Tensor | int = 0
    names = set()

    def run(tile: Tile) -> torch.Tensor | None:
        nonlocal masked
        check()
        seen = None if causal else dense.visible(plan, lib, tile)  # causal ones all see the first key
        found = _attend(
            loaded.query[tile.batch, tile.heads, tile.rows],
            loaded.key[tile.batch, tile.kv_heads, tile.columns],
            loaded.value[tile.batch, tile.kv_heads, tile.columns],
            None if causal else _attn_mask(plan, lib, seen, tile),
            causal=causal,
            scale=plan.scale,
            order=order,
        )
        if found is None:
            return None
        outputs, name = found
        if seen is not None:  # what a kernel gives for a row that sees nothing depends on the kernel
            outputs = outputs.masked_fill(~seen.any(dim=-1, keepdim=True), 0)
        masked = masked + dense.fully_masked(plan, lib, seen, tile)
        names.add(name)
        return outputs

    for tile, outputs in zip(cut, lib.run(run, cut), strict=True):
        if outputs is None:
            return None
        if head_outputs is None:
            head_outputs = outputs
        else:
            head_outputs[tile.batch, tile.heads, tile.rows] = outputs
    assert head_outputs is not None, "there is a tile"
    if plan.roles.output_map is not None:
        head_outputs = head_outputs.to(getattr(torch, plan.compute_dtype.name))  # the map may not be of halves
    arrays, fully_masked = dense.stored(plan, lib, loaded, head_outputs, {}, masked)
    return Computed(arrays, fully_masked, "torch", str(lib.device), "+".join(sorted(names)))


def order_for(kind: Hashable) -> list[SDPBackend]:
    """Which kernels are tried, for one more request of a kind."""
    with _ordering:
        if len(_met) >= MAX_KINDS:
            _met.clear()
        _met[kind] = _met.get(kind, 0) + 1
        return REPEATED if _met[kind] > OFTEN else USUAL


def whole(plan: Plan) -> Tile:
    """Everything as one tile."""
    sizes = plan.sizes
    lengths = sizes.batch_size, sizes.num_kv_heads, sizes.num_heads, sizes.query_length, sizes.key_length
    return Tile(*(slice(0, length) for length in lengths))


def _needs_mask(plan: Plan) -> bool:
    """Whether anything hides scores or is added to them."""
    seen = plan.visibility
    parts = (seen.mask, seen.keys, seen.queries, seen.segments, seen.band, plan.bias, plan.alibi)
    return any(part is not None for part in parts)


def is_plainly_causal(plan: Plan) -> bool:
    """Whether a kernel's own causal masking, aligned at the first token, is all that is asked for.

    It multiplies its -inf by the scale, which must therefore be above 0.
    """
    seen = plan.visibility
    others = (seen.mask, seen.keys, seen.queries, seen.segments, plan.bias, plan.alibi)
    if any(part is not None for part in others) or seen.band is None or seen.band.low is not None:
        return False
    return plan.scale > 0 and seen.band.high is not None and not seen.band.high.any()


def _attn_mask(plan: Plan, lib: Library, seen: torch.Tensor | None, tile: Tile) -> torch.Tensor | None:
    """Booleans where scores are only hidden, numbers to add where there is a bias or ALiBi."""
    added: torch.Tensor | None = None
    for part in dense.additions(plan, lib, tile):
        added = part if added is None else added + part
    if added is None:
        return seen
    return added if seen is None else torch.where(seen, added, torch.full_like(added, -torch.inf))


def _attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    *,
    causal: bool,
    scale: float,
    order: list[SDPBackend],
) -> tuple[torch.Tensor, str] | None:
    """(b, h, r, d), (b, g, k, d), (b, g, k, e) -> (b, h, r, e), and the kernel's name; None without a kernel."""
    on_cpu = query.device.type == "cpu"
    groups = query.shape[1] // key.shape[1]
    with nullcontext() if on_cpu else _ordering, nullcontext() if on_cpu else sdpa_kernel(order, set_priority=True):
        chosen = _choose(query, key, value, mask, causal, scale)
        if chosen == SDPBackend.MATH.value and groups > 1:  # some know no groups
            key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
            chosen = _choose(query, key, value, mask, causal, scale)
        if chosen not in NAMES:
            return None
        outputs = scaled_dot_product_attention(
            query, key, value, mask, is_causal=causal, scale=scale, enable_gqa=query.shape[1] != key.shape[1]
        )
    return outputs, ON_CPU if on_cpu else NAMES[chosen]


def _choose(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, causal: bool, scale: float
) -> int:
    """Which kernel scaled_dot_product_attention will run, as a value of SDPBackend."""
    gqa = query.shape[1] != key.shape[1]
    return int(torch._fused_sdp_choice(query, key, value, mask, 0.0, causal, scale=scale, enable_gqa=gqa))
