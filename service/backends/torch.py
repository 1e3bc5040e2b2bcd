"""The torch backend: the same definition on torch's devices, and its fused kernel where no scores are asked for."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import array_api_compat.torch as xp
import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention

from service.attention.arrays import BFLOAT16
from service.attention.operands import Operands
from service.attention.plan import Plan
from service.attention.result import Computed, Result
from service.attention.spec import ROW_STATISTICS, SCORE_MATRICES
from service.attention.tiles import Tile
from service.backends import dense
from service.backends.dense import Library, Loaded
from service.errors import UnknownBackend

# Of the scores of a tile; torch spreads each over its own threads.
TILE_BYTES = 2**26
# What the fused kernel cannot return, as it never exists there.
UNFUSED = frozenset({*SCORE_MATRICES, *ROW_STATISTICS, "received"})


@torch.inference_mode()
def quick(plan: Plan, sources: Mapping[str, np.ndarray], device: str) -> Result | None:
    """Nothing is worth leaving out of what torch does: its own ways in and out take longer."""
    return None


def execute(plan: Plan, operands: Operands, device: str, check: Callable[[], None] | None = None) -> Computed:
    """Compute what the plan includes on the device. Errors: Overflow, UnknownBackend for a device that is not there."""
    lib = library(plan, resolve_device(device))
    loaded = dense.load_operands(plan, operands, lib)
    if not operands.finite or not fits_fused(plan, lib, loaded):
        return dense.compute(plan, lib, loaded, "torch", check)
    return _fused(plan, lib, loaded)


def resolve_device(device: str) -> torch.device:
    """The device of this name; auto is CUDA where there is one. Errors: UnknownBackend."""
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu":
        return torch.device("cpu")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    index = int(device.partition(":")[2] or 0)
    if index >= count:
        got = f"{count} CUDA devices" if count else "no CUDA device"
        raise UnknownBackend.at("/device", f"a device that is there, not {device}", got)
    return torch.device("cuda", index)


def library(plan: Plan, device: torch.device) -> Library:
    """Torch, on a device, for the computing type of a plan."""
    computing = getattr(torch, plan.compute_dtype.name)

    def load(array: np.ndarray) -> torch.Tensor:
        contiguous = np.ascontiguousarray(array)
        if not contiguous.flags.writeable:  # torch has no read-only tensors, and warns
            contiguous = contiguous.copy()
        if contiguous.dtype == BFLOAT16:  # torch does not know NumPy's
            tensor = torch.from_numpy(contiguous.view(np.int16)).view(torch.bfloat16)
        else:
            tensor = torch.from_numpy(contiguous)
        return tensor.to(device, computing) if tensor.is_floating_point() else tensor.to(device)

    def store(tensor: torch.Tensor) -> np.ndarray:
        array: np.ndarray = tensor.cpu().numpy()
        return array

    def hide(tensor: torch.Tensor, seen: torch.Tensor, number: float) -> None:
        tensor.masked_fill_(~seen, number)

    return Library(
        xp=xp,
        device=device,
        load=load,
        store=store,
        matmul=lambda left, right, place: left @ right,
        in_place=False,
        scratch=lambda shape: None,
        hide=hide,
        exp=torch.Tensor.exp_,
        run=map,
        workers=1,
        tile_scores=TILE_BYTES // plan.compute_dtype.itemsize,
    )


def fits_fused(plan: Plan, lib: Library, loaded: Loaded) -> bool:
    """Whether torch's fused kernel computes what the plan means: a plain softmax of which nobody asks the scores.

    Scores must also be safe from overflow, as nobody would see it there.
    """
    plain = plan.normalization == "softmax" and plan.softcap is None and plan.sinks is None
    if not plain or plan.selection.include & UNFUSED:
        return False
    bounds = dense.close_bounds(plan, lib, loaded)
    return max(bounds.scores, bounds.exponents) < float(np.finfo(plan.compute_dtype).max) / 4


def _fused(plan: Plan, lib: Library, loaded: Loaded) -> Computed:
    """scaled_dot_product_attention, with everything that hides or adds as one mask."""
    sizes = plan.sizes
    rows, columns = slice(0, sizes.query_length), slice(0, sizes.key_length)
    whole = Tile(slice(0, sizes.batch_size), slice(0, sizes.num_kv_heads), slice(0, sizes.num_heads), rows, columns)
    seen = dense.visible(plan, lib, whole)
    causal = seen is not None and _is_plainly_causal(plan)
    head_outputs = scaled_dot_product_attention(
        loaded.query,
        loaded.key,
        loaded.value,
        attn_mask=None if causal else _attn_mask(plan, lib, seen, whole),
        is_causal=causal,
        scale=plan.scale,
        enable_gqa=sizes.num_heads != sizes.num_kv_heads,
    )
    if seen is not None:  # what the kernel gives for a row that sees nothing depends on the kernel
        head_outputs = head_outputs.masked_fill(~seen.any(dim=-1, keepdim=True), 0)
    return Computed(
        arrays=dense.stored(plan, lib, loaded, head_outputs, {}),
        fully_masked_rows=dense.fully_masked(plan, lib, seen, whole),
        backend="torch",
        device=str(lib.device),
        kernel="scaled_dot_product_attention",
    )


def _is_plainly_causal(plan: Plan) -> bool:
    """Whether the kernel's own causal masking, aligned at the first token, is all that is asked for.

    It multiplies its -inf by the scale, which must therefore be above 0.
    """
    seen = plan.visibility
    others = (seen.mask, seen.keys, seen.queries, seen.segments, plan.bias, plan.alibi)
    if any(part is not None for part in others) or seen.band is None or seen.band.low is not None:
        return False
    return plan.scale > 0 and seen.band.high is not None and not seen.band.high.any()


def _attn_mask(plan: Plan, lib: Library, seen: torch.Tensor | None, whole: Tile) -> torch.Tensor | None:
    """Booleans where scores are only hidden, numbers to add where there is a bias or ALiBi."""
    added: torch.Tensor | None = None
    for part in dense.additions(plan, lib, whole):
        added = part if added is None else added + part
    if added is None:
        return seen
    return added if seen is None else torch.where(seen, added, torch.full_like(added, -torch.inf))
