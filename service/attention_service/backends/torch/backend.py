"""The torch backend: chooses between the fused kernels and the dense computation."""

from __future__ import annotations

import logging
from dataclasses import replace
from math import prod
from typing import Final

import numpy as np
import torch

from attention_service.attention import cost
from attention_service.attention.operands import Operands, make_operands
from attention_service.attention.plan import Plan
from attention_service.attention.planning import make_plan
from attention_service.attention.result import Computed
from attention_service.attention.spec import ROLES, AttentionSpec, DType, Output
from attention_service.attention.steps import STEPPED
from attention_service.attention.tiles import Tiling, tile_size
from attention_service.backends.base import Backend, Check, OutOfMemory, no_check
from attention_service.backends.dense.buffers import ResultBuffers
from attention_service.backends.dense.compute import KERNEL, compute, compute_tiles, stored
from attention_service.backends.dense.operands import LoadedOperands, load_operands
from attention_service.backends.torch import devices, sdpa, staging
from attention_service.backends.torch.library import TorchLibrary

# Bytes of the scores of a tile. torch spreads each over its own threads, or over a GPU.
TILE_BYTES: Final = 2**26
# Matrices of the size of a tile that exist at once: scores and what is made of them, or masks; more for top_k.
MATRICES: Final = 3
FOR_TOP_K: Final = 6

# Options for which fused kernels get halves in float32: they change query, key or value, or are added to the scores.
MAPS: Final = tuple(f"roles.{role}.map" for role in ROLES)
IN_FLOAT32: Final = (*MAPS, *(f"{role}_steps" for role in STEPPED), "terms.Bias", "terms.Alibi")
IN_HALVES: Final = frozenset(name for name in sdpa.KNOWN if not name.startswith(IN_FLOAT32))

logger = logging.getLogger("attention")


class TorchBackend(Backend):
    """Computes on the CPU or on a GPU.

    tiling: how plans are cut, with `scores` for float32; kernels: the fused kernels
    """

    name = "torch"

    def __init__(self, threads: int | None = None) -> None:
        super().__init__(threads)
        self.tiling = Tiling(scores=TILE_BYTES // 4)
        self.kernels = sdpa.Kernels()
        if threads:
            torch.set_num_threads(threads)
        # The float32 of IEEE 754, and sums of halves in float32, in the whole process.
        torch.set_float32_matmul_precision("highest")
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
        torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False

    def is_gpu(self, device: str) -> bool:
        """True if the device is a GPU, which a thread waits for. Errors: UnknownBackend."""
        return devices.resolve(device).type != "cpu"

    def peak_bytes(self, plan: Plan, device: str, copied: int) -> int:
        """Upper bound of the machine's memory for computing a plan, see Backend.peak_bytes."""
        if self.is_gpu(device):
            arrays = cost.peak_bytes(plan, self._mask_bytes(plan), copied)
            return arrays + min(2 * arrays, 2 * (staging.AHEAD + 1) * staging.CHUNK)  # torch pins powers of two
        return self._dense_bytes(plan, copied)

    def execute(self, plan: Plan, operands: Operands, device: str, check: Check = no_check) -> Computed:
        """Compute all that the plan includes, see Backend.execute.

        Errors: Overflow; UnknownBackend for a device that is not there; OutOfMemory.
        """
        found = devices.resolve(device)
        needed = self._dense_bytes(plan) if found.type == "cpu" else self.device_bytes(plan, operands)
        try:
            with torch.inference_mode(), devices.reserved(found, needed, check):
                return self.compute(plan, operands, found, check)
        except RuntimeError as error:
            if not devices.is_out_of_memory(error):
                self.lost = self.lost or devices.is_lost(found)
                raise
        # Outside of the handler no traceback keeps the tensors alive.
        devices.release_unused(found)
        raise OutOfMemory(needed, devices.free(found))

    def device_bytes(self, plan: Plan, operands: Operands) -> int:
        """Upper bound of the memory of a GPU for computing a plan."""
        return self._dense_bytes(plan) + sum(array.nbytes for array in operands if isinstance(array, np.ndarray))

    def warm_up(self, device: str) -> None:
        """Load libraries, kernels and pinned memory."""
        found = devices.resolve(device)
        if found.type != "cpu":
            staging.warm_up(found)
        random = np.random.default_rng(0)
        include: tuple[Output, ...]
        dtype: DType
        for dtype in ("float32", "float64", "bfloat16"):
            for include in ((), ("attention_weights",)):
                source = random.normal(size=(2, 64, 64))
                spec = AttentionSpec(input=source, dtype=dtype, include=include, is_causal=True)
                plan = make_plan(spec)
                self.execute(plan, make_operands(spec, plan, spec.sources), device)

    def compute(self, plan: Plan, operands: Operands, device: torch.device, check: Check) -> Computed:
        """Compute a plan on a device whose memory is reserved."""
        lib = self.library(plan, device)
        loaded = self.load(plan, operands, lib)
        return self.attend(plan, lib, loaded, check, operands.finite)

    def library(self, plan: Plan, device: torch.device, dtype: np.dtype | None = None) -> TorchLibrary:
        """torch on a device, for a plan. dtype: of loaded floats, by default the type that the plan is computed in"""
        return TorchLibrary(plan, device, self._tiling(plan), dtype)

    def load(self, plan: Plan, operands: Operands, lib: TorchLibrary) -> LoadedOperands:
        """The operands on the device, in the computing type; halves as they are if tensor cores multiply them so."""
        as_halves = lib.is_asynchronous and keeps_halves(plan)
        return load_operands(plan, operands, self.library(plan, lib.device, plan.dtype) if as_halves else lib)

    def attend(
        self,
        plan: Plan,
        lib: TorchLibrary,
        loaded: LoadedOperands,
        check: Check,
        finite: np.ndarray | bool = True,
    ) -> Computed:
        """Compute a plan from loaded operands, by a fused kernel the entries that one fits, if it does not fail.

        finite: (b,), True if all numbers of an entry are
        """
        fitting = finite & sdpa.fitting(plan, lib, loaded)
        fused = self._by_kernel(plan, lib, loaded, check, fitting) if fitting.any() else None
        if fused is None:
            return compute(plan, lib, _in_float32(loaded), self.name, check)
        masked, names = fused.masked, fused.names
        if not fitting.all():
            buffers = ResultBuffers(plan, lib)
            compute_tiles(plan, lib, loaded, fused.head_outputs, buffers, check, ~fitting)
            masked, names = masked + buffers.fully_masked_rows, names | {KERNEL}
        arrays, fully_masked = stored(plan, lib, loaded, fused.head_outputs, {}, masked)
        return Computed(arrays, fully_masked, self.name, str(lib.device), "+".join(sorted(names)))

    def _by_kernel(
        self, plan: Plan, lib: TorchLibrary, loaded: LoadedOperands, check: Check, fitting: np.ndarray
    ) -> sdpa.Fused | None:
        """Compute these entries by a fused kernel; None if there is none, or if it fails. Errors: those of memory."""
        runs = [slice(0, len(fitting))]
        if not fitting.all():
            runs = [slice(i, i + 1) for i in np.flatnonzero(fitting).tolist()]
        try:
            return self.kernels.compute(plan, lib, loaded, check, runs)
        except RuntimeError as error:
            if devices.is_out_of_memory(error):
                raise
            logger.warning("a kernel of torch failed: the dense computation takes its place", exc_info=True)
        return None

    def _dense_bytes(self, plan: Plan, copied: int | None = None) -> int:
        """Upper bound of the memory of the dense computation, beyond the arrays of the request."""
        chosen, matrices = plan.selection, MATRICES
        matrices += FOR_TOP_K * (chosen.top_k is not None) + chosen.matrices + (chosen.matrices > 0)
        itemsize, sizes, gathered = plan.compute_dtype.itemsize, plan.sizes, plan.gathered_numbers
        row = sizes.num_heads * plan.computed_keys + gathered
        scores = max(self.tiling.scores * 4 // itemsize, self.tiling.max_scores, row)
        every = plan.computed_scores + sizes.batch_size * sizes.query_length * gathered
        working = matrices * min(every, scores) * itemsize + self._mask_bytes(plan) + self._product_bytes(plan)
        step = tile_size(plan, self._tiling(plan))
        tile = step.batch, step.kv_heads * (sizes.num_heads // sizes.num_kv_heads), step.rows, plan.computed_keys
        return cost.peak_bytes(plan, working + cost.gradient_tile_bytes(plan, tile), copied)

    def _product_bytes(self, plan: Plan) -> int:
        """Bytes that terms take which read the queries of a tile: their products, and places in eight bytes each."""
        reading = [term for term in plan.terms if term.reads_query]
        if not reading:
            return 0
        (h, g, *_), step = plan.sizes, tile_size(plan, self._tiling(plan))
        tile = step.batch, step.kv_heads * (h // g), step.rows, plan.computed_keys
        return sum(term.added_size(tile) for term in reading) * plan.compute_dtype.itemsize + 8 * prod(tile)

    def _mask_bytes(self, plan: Plan) -> int:
        """Bytes that masks made from indices take in the machine's memory, for a tile."""
        if "terms.SelectedKeys.indices" not in plan.options:
            return 0
        h, g, *_ = plan.sizes
        step = tile_size(plan, self._tiling(plan))
        return sum(cost.mask_bytes(plan, (step.batch, step.kv_heads * (h // g), step.rows, plan.computed_keys)))

    def _tiling(self, plan: Plan) -> Tiling:
        """Tiles of the same number of bytes for every type."""
        return replace(self.tiling, scores=max(1, self.tiling.scores * 4 // plan.compute_dtype.itemsize))


def keeps_halves(plan: Plan) -> bool:
    """True if tensor cores may multiply query, key and value as the halves that they are.

    A fused kernel must compute the plan, nothing may change the operands, and nothing be added to the scores: a
    kernel's mask would have to be of halves too.
    """
    return plan.dtype.itemsize == 2 and plan.options <= IN_HALVES


def _in_float32(loaded: LoadedOperands) -> LoadedOperands:
    """The operands, halves in float32."""
    if loaded.query.dtype.itemsize > 2:
        return loaded
    query, key, value = (tensor.to(torch.float32) for tensor in (loaded.query, loaded.key, loaded.value))
    return replace(loaded, query=query, key=key, value=value)
