"""The NumPy backend: tiles that fit the cache of a core, computed by threads, each with a single-threaded BLAS."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterable, Mapping
from copy import copy
from dataclasses import replace
from itertools import pairwise
from typing import ClassVar, Final, Self, TypeVar

import numpy as np

from attention_service.attention import cost
from attention_service.attention.arrays import is_float
from attention_service.attention.operands import Operands
from attention_service.attention.plan import Plan
from attention_service.attention.result import Computed, Metadata, Result, make_metadata
from attention_service.attention.spec import AttentionSpec
from attention_service.attention.tiles import SHARED_FLOPS, Tiling
from attention_service.backends.base import Backend, Check, Program, no_check
from attention_service.backends.dense.binning import BinnedBuffers, BinnedScores, Bins, bin_weights
from attention_service.backends.dense.compute import compute
from attention_service.backends.dense.library import Array, ArrayLibrary
from attention_service.backends.dense.operands import load_operands
from attention_service.backends.numpy.small import SmallProgram, fits
from attention_service.backends.threads import TilePool
from attention_service.errors import UnknownBackend, quote

CPU: Final = ("auto", "cpu")
# Bytes of the scores of a tile, which a core can keep in its cache, with enough rows for fast products.
TILE_BYTES: Final = 2**21
# Plans of at most so many scores are computed without tiles, if they have no other options.
SMALL_SCORES: Final = 2**14
# Keys of a row that are sorted in less time than it takes to part the largest from the others.
FEW_KEYS: Final = 128
# Bytes of scores that a thread keeps for its next tile; a larger tile is a single row of a very long key.
MAX_SCRATCH: Final = 16 * 2**20

S = TypeVar("S")
T = TypeVar("T")
_local = threading.local()


class NumpyBackend(Backend):
    """Computes on the CPU.

    tiling: how plans are cut, with `scores` for float32; small_scores: plans up to this size may take the small path.
    Tests make both small.
    """

    name = "numpy"

    def __init__(self, threads: int | None = None) -> None:
        super().__init__(threads)
        self.tiling = Tiling(scores=TILE_BYTES // 4, workers=threads or 1)
        self.small_scores = SMALL_SCORES
        self.pool = TilePool(threads) if threads else None

    def cut_for(self, workers: int) -> Self:
        """This backend with plans cut as for so many threads, see Backend.cut_for."""
        found = copy(self)
        found.tiling = replace(self.tiling, workers=workers)
        return found

    def program(self, plan: Plan, spec: AttentionSpec) -> Program:
        """The small path if the plan takes it, with the general path for numbers that it does not take."""
        if spec.device not in CPU or not self._takes_small_path(plan):
            return super().program(plan, spec)
        small_program = SmallProgram(plan)

        @np.errstate(all="ignore")
        def run(sources: Mapping[str, np.ndarray], check: Check | None = None) -> Result:
            result = small_program.run(sources)
            return self.run(plan, spec, sources, check) if result is None else result

        return run

    def execute(self, plan: Plan, operands: Operands, device: str, check: Check = no_check) -> Computed:
        """Compute all that the plan includes, see Backend.execute. NumPy may warn of overflow on the way."""
        if device not in CPU:
            got, hint = quote(device), "ask for backend torch"
            raise UnknownBackend.at("/device", "cpu, all that the numpy backend has", got, hint)
        lib = NumpyLibrary(plan, self._tiling(plan), self.pool)
        return compute(plan, lib, load_operands(plan, operands, lib), self.name, check)

    @np.errstate(all="ignore")
    def bin_scores(
        self, plan: Plan, operands: Operands, bins: Bins, check: Check = no_check
    ) -> tuple[BinnedScores, Metadata]:
        """Scores or weights of a plan in bins, tile by tile, so that no whole matrix exists.

        plan: includes the stage of the bins, hidden_by, and for sinks logsumexp. Errors: as of `execute`.
        """
        lib = NumpyLibrary(plan, self._tiling(plan), self.pool)
        buffers = BinnedBuffers(bins)
        computed = compute(plan, lib, load_operands(plan, operands, lib), self.name, check, buffers)
        return buffers.result(), make_metadata(plan, computed)

    def bin_weights(self, plan: Plan, weights: np.ndarray, bins: Bins) -> BinnedScores:
        """Weights that were computed before in bins, see `binning.bin_weights`."""
        return bin_weights(plan, self._tiling(plan), weights, bins)

    def peak_bytes(self, plan: Plan, device: str, copied: int) -> int:
        """Upper bound of the memory for computing a plan, see Backend.peak_bytes."""
        return cost.peak_bytes(plan, cost.working_bytes(plan, self._tiling(plan)), copied)

    def _tiling(self, plan: Plan) -> Tiling:
        """Tiles of the same number of bytes for every type."""
        return replace(self.tiling, scores=max(1, self.tiling.scores * 4 // plan.compute_dtype.itemsize))

    def _takes_small_path(self, plan: Plan) -> bool:
        # Alone, too, an entry that workers would share is cut into tiles.
        is_shared = plan.flops // plan.sizes.batch_size > SHARED_FLOPS
        return plan.score_count <= self.small_scores and not is_shared and fits(plan)


class NumpyLibrary(ArrayLibrary):
    """NumPy. pool: computes tiles in parallel; None for one after the other"""

    xp = np
    device = "cpu"
    writes_in_place: ClassVar[bool] = True

    def __init__(self, plan: Plan, tiling: Tiling, pool: TilePool | None) -> None:
        super().__init__(plan)
        self.tiling = tiling
        self._pool = pool

    def load(self, array: np.ndarray) -> Array:
        """The array; floats in the type that the plan is computed in."""
        return array.astype(self.plan.compute_dtype, copy=False) if is_float(array.dtype) else array

    def store(self, arrays: dict[str, Array]) -> dict[str, np.ndarray]:
        """The same arrays."""
        return arrays

    def native(self, dtype: np.dtype) -> np.dtype:
        """The same type, as it is NumPy's."""
        return dtype

    def matmul(self, left: Array, right: Array, out: Array | None = None) -> Array:
        """The product over the last two axes."""
        return np.matmul(left, right, out=out)

    def row_sums(self, array: Array) -> Array:
        """The sums over the last axis, (…, x) -> (…, 1), as a product with ones, which is faster than a reduction."""
        return np.matmul(array, np.ones((array.shape[-1], 1), array.dtype))

    def linear(self, tokens: Array, weight: Array) -> Array:
        """tokens @ weight.T, a product for each entry, so that its bits do not depend on the number of entries.

        Of large products each thread of the pool computes some features, or some entries.
        """
        features, threads, entries = len(weight), self.tiling.workers, len(tokens)
        if self._pool is None or 2 * tokens.size * features < SHARED_FLOPS:
            return tokens @ weight.T
        by_feature = 2 * tokens[0].size * features >= SHARED_FLOPS
        length = features if by_feature else entries
        ends = [length * i // threads for i in range(threads + 1)]
        out = np.empty((*tokens.shape[:-1], features), tokens.dtype)

        def multiply(part: slice) -> None:
            if by_feature:
                np.matmul(tokens, weight[part].T, out=out[..., part])
            else:
                np.matmul(tokens[part], weight.T, out=out[part])

        list(self._pool.run(multiply, [slice(*pair) for pair in pairwise(ends)]))
        return out

    def scratch(self, shape: tuple[int, ...]) -> Array | None:
        """Memory that this thread uses again for each tile: the system clears fresh memory page by page."""
        dtype = self.plan.compute_dtype
        size = math.prod(shape) * dtype.itemsize
        if size > MAX_SCRATCH:
            return np.empty(shape, dtype)
        if not hasattr(_local, "memory") or _local.memory.nbytes < size:
            _local.memory = np.empty(size, np.uint8)
        memory: np.ndarray = _local.memory[:size].view(dtype).reshape(shape)
        return memory

    def hide(self, array: Array, visible: Array, number: float) -> None:
        """Put a number wherever `visible` is False, in place."""
        np.copyto(array, array.dtype.type(number), where=~visible)

    def top_indices(self, array: Array, count: int) -> Array:
        """The indices of the largest numbers of the last axis, in descending order, equal ones by lower index."""
        negative, keys = -array, array.shape[-1]
        if keys < FEW_KEYS or count >= keys // 4:
            return np.argsort(negative, axis=-1, stable=True)[..., :count]
        parts = np.argpartition(negative, (count - 1, count), axis=-1)
        last, next_one = np.moveaxis(np.take_along_axis(negative, parts[..., count - 1 : count + 1], -1), -1, 0)
        indices = np.sort(parts[..., :count], axis=-1)
        del parts
        order = np.argsort(np.take_along_axis(negative, indices, -1), axis=-1, stable=True)
        indices = np.take_along_axis(indices, order, -1)
        tied = last == next_one  # so that any of the equal numbers may be among the first
        if tied.any():
            indices[tied] = np.argsort(negative[tied], axis=-1, stable=True)[..., :count]
        return indices

    def sums_at(self, array: Array, places: np.ndarray, count: int) -> Array:
        """The numbers (…, x) with the same place in the last axis summed: (…, count)."""
        sums = np.zeros((math.prod(array.shape[:-1]), count), array.dtype)
        rows = np.arange(len(sums))[:, None]
        np.add.at(sums, (rows, places.reshape(len(sums), -1)), array.reshape(len(sums), -1))
        return sums.reshape(*array.shape[:-1], count)

    def take(self, array: Array, indices: Array, out: Array) -> None:
        """Write rows at indices to an array. np.take is faster, but first copies what is not contiguous."""
        if array.flags.c_contiguous:
            np.take(array, indices, axis=0, mode="clip", out=out)
        else:
            out[...] = array[indices]

    def run(self, function: Callable[[S], T], tiles: Iterable[S]) -> Iterable[T]:
        """The results of a function for each tile or part, in order."""
        return map(function, tiles) if self._pool is None else self._pool.run(function, tiles)
