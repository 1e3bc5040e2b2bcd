"""The torch backend: the same definition on torch's devices, and its fused kernels where no scores are asked for."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import astuple, replace
from functools import partial
from typing import Any

import array_api_compat.torch as xp
import numpy as np
import torch

from service.attention import cost
from service.attention.operands import Operands, make_operands
from service.attention.plan import Plan, make_plan
from service.attention.result import COMPUTED, Computed, Result
from service.attention.spec import AttentionSpec, DType, Output
from service.attention.tiles import LARGEST_TILE, Tile
from service.backends import dense
from service.backends.dense import Library, Loaded
from service.backends.room import NoRoom
from service.backends.torch import devices, flex, fused, staging

# Of the scores of a tile; torch spreads each over its own threads, or over a GPU.
TILE_BYTES = 2**26
# Matrices of the size of a tile that exist at once: scores and what is made of them, or masks; more for some.
MATRICES = 3
FOR_TOP_K, FOR_ENTROPY = 6, 2
# Tiles that a GPU may have before it, until it is waited for.
AHEAD = 2

logger = logging.getLogger("attention")


def quick(plan: Plan, sources: Mapping[str, np.ndarray], device: str) -> Result | None:
    """Nothing is worth leaving out of what torch does: its own ways in and out take longer."""
    return None


def is_quick(plan: Plan, device: str) -> bool:
    """Whether `quick` answers."""
    return False


def is_apart(device: str) -> bool:
    """Whether it is a GPU, for which a thread waits. Errors: UnknownBackend."""
    return devices.resolve(device).type != "cpu"


def use_threads(count: int) -> None:
    """Let torch compute by so many threads on the CPU, and by IEEE's float32 everywhere, in the whole process."""
    torch.set_num_threads(count)
    torch.set_float32_matmul_precision("highest")
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False


def peak_bytes(plan: Plan, device: str, copied: int | None = None) -> int:
    """An upper estimate of the memory of the machine that computing takes, that of a GPU aside."""
    if is_apart(device):
        return _memory(plan, 0, 0, copied) + 2 * (staging.AHEAD + 1) * staging.CHUNK
    return _bytes(plan, copied)


def _bytes(plan: Plan, copied: int | None = None) -> int:
    """An upper estimate of the memory of what computes, beside what the request brings."""
    matrices = MATRICES
    matrices += FOR_TOP_K * (plan.selection.top_k is not None) + FOR_ENTROPY * ("entropy" in plan.selection.include)
    return _memory(plan, max(TILE_BYTES // plan.compute_dtype.itemsize, LARGEST_TILE), matrices, copied)


def _memory(plan: Plan, scores: int, matrices: int, copied: int | None) -> int:
    """Memory where tiles of about so many scores are at work, and so many matrices of their size for each."""
    one_query = plan.sizes.num_heads * plan.sizes.key_length
    working = matrices * min(plan.score_count, max(scores, one_query))
    return cost.peak_bytes(plan, working * plan.compute_dtype.itemsize, copied)


def device_bytes(plan: Plan, operands: Operands) -> int:
    """An upper estimate of the memory of a GPU."""
    arrays = operands.query, operands.key, operands.value, operands.past_key, operands.past_value
    return _bytes(plan) + sum(array.nbytes for array in arrays if array is not None)


def execute(plan: Plan, operands: Operands, device: str, check: Callable[[], None] | None = None) -> Computed:
    """Compute what the plan includes on the device.

    Errors: Overflow; UnknownBackend for a device that is not there; NoRoom where its memory is not enough.
    """
    where = devices.resolve(device)
    needed = _bytes(plan) if where.type == "cpu" else device_bytes(plan, operands)
    try:
        with torch.inference_mode(), devices.at_work(where, needed, check or _go_on):
            return _compute(plan, operands, where, check or _go_on)
    except RuntimeError as error:
        if not devices.is_out_of_memory(error):
            raise
    # Out here nothing holds on to what was computed so far.
    devices.forget_unused(where)
    raise NoRoom(needed, devices.free(where))


def warm_up(device: str) -> None:
    """Load what the first request would else wait for: libraries, kernels, pinned memory."""
    where = devices.resolve(device)
    if where.type != "cpu":
        staging.warm_up(where)
    random = np.random.default_rng(0)
    include: tuple[Output, ...]
    dtype: DType
    for dtype in ("float32", "float64", "bfloat16"):
        for include in ((), ("attention_weights",)):
            spec = AttentionSpec(input=random.normal(size=(2, 64, 64)), dtype=dtype, include=include, is_causal=True)
            plan = make_plan(spec)
            execute(plan, make_operands(spec, plan, spec.sources), device)


def _go_on() -> None:
    """Nobody has to stop."""


def _compute(plan: Plan, operands: Operands, device: torch.device, check: Callable[[], None]) -> Computed:
    lib = library(plan, device)
    return attend(plan, lib, load(plan, operands, lib), check, finite=operands.finite)


def load(plan: Plan, operands: Operands, lib: Library) -> Loaded:
    """The operands on the device, in the computing type; halves as they are where tensor cores multiply them so."""
    native = lib.waits and _stays_as_is(plan)
    return dense.load_operands(plan, operands, library(plan, lib.device, plan.dtype_name) if native else lib)


def attend(plan: Plan, lib: Library, loaded: Loaded, check: Callable[[], None], *, finite: bool = True) -> Computed:
    """What the plan includes, by the best way that there is. finite: whether all numbers of the operands are"""
    if finite:
        computed = _without_scores(plan, lib, loaded, check)
        if computed is not None:
            return computed
    return dense.compute(plan, lib, _in_float32(loaded), "torch", check)


def _stays_as_is(plan: Plan) -> bool:
    """Whether query, key and value are halves that nothing is done to, and nothing is added to their scores by a mask,
    which would have to be of halves, too."""
    roles = plan.roles
    changes = (plan.query_norm, plan.key_norm, plan.query_rotation, plan.key_rotation, plan.bias)
    maps = (roles.query.map, roles.key.map, roles.value.map)
    return plan.dtype.itemsize == 2 and all(change is None for change in (*changes, *maps))


def _without_scores(plan: Plan, lib: Library, loaded: Loaded, check: Callable[[], None]) -> Computed | None:
    """By a kernel that does not hold the scores, if one fits."""
    if lib.waits and flex.fits(plan, loaded):
        kind = flex.kind(plan, loaded)
        if flex.trials.passed(kind, partial(_try, plan, lib.device, loaded.query.dtype)):
            if (computed := _unless_it_fails(partial(flex.compute, plan, lib, loaded))) is not None:
                return computed
            flex.trials.fail(kind)
    if fused.fits(plan, loaded) and _is_fast(plan, lib, loaded):
        return _unless_it_fails(partial(fused.compute, plan, lib, loaded, check))
    return None


def _is_fast(plan: Plan, lib: Library, loaded: Loaded) -> bool:
    """Whether fused kernels have this type: on a GPU not float64, nor numbers to be added to scores of halves."""
    if not lib.waits:
        return True
    return plan.compute_dtype.itemsize == 4 and (plan.alibi is None or loaded.query.dtype == torch.float32)


def _unless_it_fails(compute: Callable[[], Computed | None]) -> Computed | None:
    """None where a kernel turns down what it was thought to be for. Errors: those of memory."""
    try:
        return compute()
    except RuntimeError as error:
        if devices.is_out_of_memory(error):
            raise
        logger.warning("a kernel of torch failed: the definition is computed instead", exc_info=True)
    return None


def _try(plan: Plan, device: torch.device, dtype: torch.dtype) -> bool:
    """Whether FlexAttention gives what the definition does, on random numbers of the sizes of a plan."""
    b, h, g, q, k, d, e = astuple(plan.sizes)
    with torch.inference_mode(), devices.at_work(device, 2 * _bytes(plan), _go_on):
        random = partial(torch.randn, device=device, dtype=dtype)
        loaded = Loaded(random(b, h, q, d), random(b, g, k, d), random(b, g, k, e), None, (0.0, 0.0, 0.0))
        lib = library(plan, device)
        ours = flex.compute(plan, lib, loaded)
        return flex.agree(ours, dense.compute(plan, lib, _in_float32(loaded), "torch"), dtype)


def _in_float32(loaded: Loaded) -> Loaded:
    """The same numbers, if they are halves."""
    if loaded.query.dtype.itemsize > 2:
        return loaded
    query, key, value = (tensor.to(torch.float32) for tensor in (loaded.query, loaded.key, loaded.value))
    return replace(loaded, query=query, key=key, value=value)


def top(numbers: torch.Tensor, count: int) -> torch.Tensor:
    """Where the largest numbers of the last axis are, in descending order, equal ones by lower index.

    For float32, numbers and indices in one integer each: then no two are equal, and those few need not sort all others.
    """
    if numbers.dtype != torch.float32:
        return torch.sort(numbers, dim=-1, descending=True, stable=True).indices[..., :count]
    keys = (numbers + 0.0).view(torch.int32).to(torch.int64)  # without -0
    keys ^= (keys >> 63) & 0x7FFFFFFF  # of negative numbers the bits are in the opposite order
    keys <<= 32
    keys |= torch.arange(keys.shape[-1] - 1, -1, -1, device=keys.device)
    return keys.topk(count, dim=-1).indices


def library(plan: Plan, device: torch.device, loads: str = "") -> Library:
    """Torch, on a device, for the computing type of a plan. loads: the type of what is loaded, if it is another"""
    computing = getattr(torch, loads or plan.compute_dtype.name)

    def load(array: np.ndarray) -> torch.Tensor:
        tensor = staging.to_device(array, device)
        return tensor.to(computing) if tensor.is_floating_point() else tensor

    def store(tensors: dict[str, torch.Tensor]) -> dict[str, np.ndarray]:
        returned = getattr(torch, plan.dtype_name)
        typed = {
            name: tensor.to(returned) if tensor.is_floating_point() and name not in COMPUTED else tensor
            for name, tensor in tensors.items()
        }
        return staging.to_host(typed)

    def hide(tensor: torch.Tensor, seen: torch.Tensor, number: float) -> None:
        tensor.masked_fill_(~seen, number)

    def run(function: Callable[[Tile], Any], tiles: list[Tile]) -> Iterable[Any]:
        pace = devices.Pace(device, AHEAD)
        for tile in tiles:
            yield function(tile)
            pace.step()

    return Library(
        xp=xp,
        device=device,
        returned=getattr(torch, plan.dtype_name),
        load=load,
        store=store,
        waits=device.type != "cpu",
        matmul=lambda left, right, place: left @ right,
        in_place=False,
        scratch=lambda shape: None,
        hide=hide,
        exp=torch.Tensor.exp_,
        top=top,
        run=run,
        workers=1,
        tile_scores=TILE_BYTES // plan.compute_dtype.itemsize,
    )
