"""Attention by its definition (Vaswani et al. 2017, section 3.2.1), for any library with the Python array API.

A block of queries at a time: only what the plan returns ever exists for all of them.

Shapes in comments: b batch, h heads, g key/value heads, r the queries of a block, k keys, d and e features.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from service.attention.operands import Operand
from service.attention.plan import Notice, Plan
from service.attention.positions import Rotation
from service.attention.projections import DenseMap
from service.attention.result import Computed, overflow
from service.attention.spec import STAGES, Norm

ZERO_SUM = Notice("zero_sum", "the visible scores of some rows sum to 0: their weights and outputs are 0")

Array = Any  # of the library in use


@dataclass(frozen=True, slots=True)
class Library:
    """An array library and where its arrays live.

    load: from NumPy to the device, in the plan's computing type if it is a float; store: back to NumPy
    """

    xp: Any
    device: Any
    load: Callable[[np.ndarray], Array]
    store: Callable[[Array], np.ndarray]


@dataclass(frozen=True, slots=True)
class Loaded:
    """Query (b, h, q, d), key (b, g, k, d) and value (b, g, k, e) as attention sees them, the past included."""

    query: Array
    key: Array
    value: Array
    bad_values: Array | None  # (b, g, 1, k) where a value is not finite (and 0 here instead); None where all are


def compute(plan: Plan, lib: Library, loaded: Loaded, backend: str) -> Computed:
    """Every number on the way. Errors: Overflow where a visible score is not finite."""
    collected = _Collected(plan, lib)
    head_outputs = lib.xp.empty(
        (*loaded.query.shape[:3], loaded.value.shape[-1]), dtype=loaded.query.dtype, device=lib.device
    )
    for start in range(0, plan.sizes.query_length, plan.block_rows):
        rows = slice(start, min(start + plan.block_rows, plan.sizes.query_length))
        block = _Block(plan, lib, loaded, rows)
        head_outputs[:, :, rows] = block.run(collected)
    return Computed(
        arrays=stored(plan, lib, loaded, head_outputs, collected.arrays),
        fully_masked_rows=collected.fully_masked_rows,
        backend=backend,
        device=str(lib.device),
        kernel="dense",
        notices=(ZERO_SUM,) if collected.zero_sum else (),
    )


# Before the scores: operands.


def load_operands(plan: Plan, lib: Library) -> Loaded:
    """Project, split heads, normalise, rotate, append to the cache."""
    xp, ops = lib.xp, plan.operands
    query = _heads(ops.query, plan.sizes.num_heads, lib)
    key = _heads(ops.key, plan.sizes.num_kv_heads, lib)
    value = _heads(ops.value, plan.sizes.num_kv_heads, lib)
    query = _rotated(_normalised(query, plan.query_norm, lib), plan.query_rotation, lib)
    key = _rotated(_normalised(key, plan.key_norm, lib), plan.key_rotation, lib)
    if ops.past_key is not None and ops.past_value is not None:
        key = xp.concat([lib.load(ops.past_key), key], axis=2)
        value = xp.concat([lib.load(ops.past_value), value], axis=2)
    if plan.finite:
        return Loaded(query, key, value, None)
    good = xp.isfinite(value)
    zero = xp.zeros_like(value)
    return Loaded(query, key, xp.where(good, value, zero), ~xp.all(good, axis=-1)[:, :, None, :])


def _heads(operand: Operand, heads: int, lib: Library) -> Array:
    """The operand as (b, heads, l, d), projected if it has a map."""
    array = lib.load(operand.array)
    if operand.map is None:
        return array
    tokens = _apply(operand.map, array, lib)  # b l heads·d
    b, length, features = tokens.shape
    return lib.xp.permute_dims(lib.xp.reshape(tokens, (b, length, heads, features // heads)), (0, 2, 1, 3))


def _apply(linear: DenseMap, tokens: Array, lib: Library) -> Array:
    """y = x Wᵀ + bias over the last axis: (b, l, in) -> (b, l, out)."""
    mapped = tokens @ lib.load(linear.weight.T)
    return mapped if linear.bias is None else mapped + lib.load(linear.bias)


def _normalised(array: Array, norm: Norm | None, lib: Library) -> Array:
    """RMS normalisation over the last axis."""
    if norm is None:
        return array
    scaled = array / lib.xp.sqrt(lib.xp.mean(array * array, axis=-1, keepdims=True) + norm.eps)
    return scaled if norm.weight is None else scaled * lib.load(norm.weight)


def _rotated(array: Array, rotation: Rotation | None, lib: Library) -> Array:
    """Pairs (x, y) of the first features become (x cos - y sin, x sin + y cos)."""
    if rotation is None:
        return array
    xp = lib.xp
    cos, sin = lib.load(rotation.cos)[:, None], lib.load(rotation.sin)[:, None]  # b 1 l dim/2
    half = cos.shape[-1]
    turned, rest = array[..., : 2 * half], array[..., 2 * half :]
    if rotation.interleaved:
        x, y = turned[..., 0::2], turned[..., 1::2]
        pairs = xp.stack([x * cos - y * sin, x * sin + y * cos], axis=-1)
        turned = xp.reshape(pairs, turned.shape)
    else:
        x, y = turned[..., :half], turned[..., half:]
        turned = xp.concat([x * cos - y * sin, x * sin + y * cos], axis=-1)
    return xp.concat([turned, rest], axis=-1)


# After the weights: the output.


def stored(
    plan: Plan, lib: Library, loaded: Loaded, head_outputs: Array, scores: dict[str, Array]
) -> dict[str, np.ndarray]:
    """All that the plan returns: the output, what it includes of the operands, and what was collected of the scores."""
    past = plan.operands.past_length
    arrays = {
        "query": loaded.query,
        "key": loaded.key[:, :, past:],
        "value": loaded.value[:, :, past:],
        "present_key": loaded.key,
        "present_value": loaded.value,
        "head_outputs": head_outputs,
    }
    wanted = {name: array for name, array in arrays.items() if name in plan.selection.include} | scores
    wanted["output"] = _output(plan, lib, head_outputs)
    return {name: lib.store(array) for name, array in wanted.items()}


def _output(plan: Plan, lib: Library, head_outputs: Array) -> Array:
    """Join the heads, unless the layout shows them, and apply the output map."""
    if "h" in plan.layout:
        return head_outputs
    b, h, q, e = head_outputs.shape
    joined = lib.xp.reshape(lib.xp.permute_dims(head_outputs, (0, 2, 1, 3)), (b, q, h * e))
    return joined if plan.operands.output_map is None else _apply(plan.operands.output_map, joined, lib)


# What hides scores, and what is added to them, for some rows.


def visible(plan: Plan, lib: Library, rows: slice) -> Array | None:
    """Which scores of these rows take part, broadcasting to (b, h, r, k); None where all do."""
    parts, seen = [], plan.visibility
    if seen.mask is not None:
        parts.append(lib.load(_rows(seen.mask, rows)))
    if plan.bias is not None and np.isneginf(plan.bias).any():
        parts.append(lib.load(~np.isneginf(_rows(plan.bias, rows))))
    if seen.keys is not None:
        parts.append(lib.load(seen.keys[:, None, None, :]))
    if seen.queries is not None:
        parts.append(lib.load(seen.queries[:, None, rows, None]))
    if seen.segments is not None:
        ids = lib.load(seen.segments.query[:, None, rows, None])
        parts.append(ids == lib.load(seen.segments.key[:, None, None, :]))
    if seen.band is not None:
        i = np.arange(rows.start, rows.stop)[:, None]
        j = lib.load(np.arange(plan.sizes.key_length))
        if seen.band.low is not None:
            parts.append(j >= lib.load(i + seen.band.low[:, None, None, None]))
        if seen.band.high is not None:
            parts.append(j <= lib.load(i + seen.band.high[:, None, None, None]))
    found = None
    for part in parts:
        found = part if found is None else found & part
    return found


def fully_masked(plan: Plan, lib: Library, seen: Array | None, rows: slice) -> int:
    """How many of these rows of b·h·q see no key, those of padding not counted. `seen` is what `visible` gave."""
    if seen is None:
        return 0
    unseen = ~lib.xp.any(seen, axis=-1)  # each axis full or 1
    if plan.visibility.queries is not None:
        unseen = unseen & lib.load(plan.visibility.queries[:, None, rows])
    shape = (plan.sizes.batch_size, plan.sizes.num_heads, rows.stop - rows.start)
    return int(lib.xp.sum(lib.xp.broadcast_to(unseen, shape)))


def additions(plan: Plan, lib: Library, rows: slice) -> list[Array]:
    """What is added to the scores of these rows: the bias and ALiBi, each broadcasting to (b, h, r, k)."""
    found = []
    if plan.bias is not None:
        found.append(lib.load(_rows(plan.bias, rows)))
    if plan.alibi is not None:
        i = np.arange(rows.start, rows.stop)[:, None] + plan.alibi.offset[:, None, None, None]  # b 1 r 1
        distance = np.abs(i - np.arange(plan.sizes.key_length)).astype(plan.compute_dtype)
        found.append(lib.load(distance) * lib.load(-plan.alibi.slopes[:, None, None]))
    return found


def _rows(array: np.ndarray, rows: slice) -> np.ndarray:
    """These rows of an array (b, h, q, k) whose q axis is full or 1."""
    return array if array.shape[2] == 1 else array[:, :, rows]


class _Block:
    """The scores of some queries, from the product to the weights."""

    def __init__(self, plan: Plan, lib: Library, loaded: Loaded, rows: slice) -> None:
        self._plan = plan
        self._lib = lib
        self._loaded = loaded
        self._rows = rows
        self._visible = visible(plan, lib, rows)

    def run(self, collected: _Collected) -> Array:
        """Collect what the plan returns of these rows; the result is their head outputs (b, h, r, e)."""
        stages = self._stages()
        collected.add(self._rows, {name: stages[name] for name in STAGES})
        masked = stages["masked_scores"]
        if self._plan.normalization == "sum":
            weights = self._divide_by_sum(masked, collected)
            logsumexp = None
        else:
            weights, logsumexp = self._softmax(masked)
        collected.add_weights(self._rows, weights, logsumexp)
        collected.fully_masked_rows += fully_masked(self._plan, self._lib, self._visible, self._rows)
        return grouped_matmul(weights, self._loaded.value, self._lib)

    def _stages(self) -> dict[str, Array]:
        plan, xp = self._plan, self._lib.xp
        key = xp.permute_dims(self._loaded.key, (0, 1, 3, 2))  # b g d k
        scores = grouped_matmul(self._loaded.query[:, :, self._rows], key, self._lib)  # b h r k
        scaled = scores * plan.scale
        capped = scaled if plan.softcap is None else plan.softcap * xp.tanh(scaled / plan.softcap)
        biased = capped
        for addition in additions(plan, self._lib, self._rows):
            biased = biased + addition
        self._check(biased)
        return {
            "scores": scores,
            "scaled_scores": scaled,
            "capped_scores": capped,
            "masked_scores": biased if self._visible is None else self._where_visible(biased, -np.inf),
        }

    def _check(self, scores: Array) -> None:
        """Errors: Overflow for a visible score that is not finite, or a visible value."""
        xp = self._lib.xp
        bad = ~xp.isfinite(scores)
        if self._loaded.bad_values is not None:
            values, h = self._loaded.bad_values, self._plan.sizes.num_heads
            bad = bad | xp.repeat(values, h // values.shape[1], axis=1)
        if self._visible is not None and xp.any(bad):
            bad = bad & self._visible
        if xp.any(bad):
            raise overflow(self._plan, "scores")

    def _where_visible(self, array: Array, other: float) -> Array:
        """The array where it is visible, whatever stands elsewhere."""
        return self._lib.xp.where(self._visible, array, self._scalar(other, array))

    def _scalar(self, number: float, like: Array) -> Array:
        return self._lib.xp.asarray(number, dtype=like.dtype, device=self._lib.device)

    def _softmax(self, masked: Array) -> tuple[Array, Array]:
        """Weights (b, h, r, k) and logsumexp (b, h, r), the sinks counted in the sum but not returned."""
        xp = self._lib.xp
        largest = xp.max(masked, axis=-1, keepdims=True)  # b h r 1
        sinks = None
        if self._plan.sinks is not None:
            sinks = self._lib.load(self._plan.sinks[:, None, None])  # h 1 1
            largest = xp.maximum(largest, sinks)
        shift = xp.where(xp.isfinite(largest), largest, self._scalar(0, largest))
        exponentials = xp.exp(masked - shift)
        total = xp.sum(exponentials, axis=-1, keepdims=True)
        if sinks is not None:
            total = total + xp.exp(sinks - shift)
        weights = exponentials / xp.where(total == 0, self._scalar(1, total), total)  # a row that sees nothing: 0
        return weights, (largest + xp.log(total))[..., 0]

    def _divide_by_sum(self, masked: Array, collected: _Collected) -> Array:
        xp = self._lib.xp
        counted = masked if self._visible is None else self._where_visible(masked, 0)
        total = xp.sum(counted, axis=-1, keepdims=True)
        if not xp.all(xp.isfinite(total)):
            raise overflow(self._plan, "sums of scores")
        zero = total == 0
        sees = True if self._visible is None else xp.any(self._visible, axis=-1, keepdims=True)
        collected.zero_sum |= bool(xp.any(zero & sees))
        return xp.where(zero, self._scalar(0, total), counted / xp.where(zero, self._scalar(1, total), total))


def grouped_matmul(left: Array, right: Array, lib: Library) -> Array:
    """(b, h, q, x) @ (b, g, x, y) -> (b, h, q, y), where head n of the left meets head n // (h // g) of the right."""
    b, h, q, x = left.shape
    g, y = right.shape[1], right.shape[-1]
    if h == g:
        return left @ right
    grouped = lib.xp.reshape(left, (b, g, h // g, q, x)) @ right[:, :, None]
    return lib.xp.reshape(grouped, (b, h, q, y))


class _Collected:
    """What is returned of the score matrices, cut to the heads and queries that were asked for, filled row by row."""

    def __init__(self, plan: Plan, lib: Library) -> None:
        self.arrays: dict[str, Array] = {}
        self.fully_masked_rows = 0
        self.zero_sum = False
        self._chosen = plan.selection
        self._lib = lib
        self._queries = plan.sizes.query_length if self._chosen.queries is None else len(self._chosen.queries)

    def add(self, rows: slice, matrices: dict[str, Array]) -> None:
        """Keep rows (b, h, r, …) of arrays (b, h, q, …), those that the plan includes."""
        for name, block in matrices.items():
            if name in self._chosen.include:
                self._write(name, self._heads(block), rows)

    def add_weights(self, rows: slice, weights: Array, logsumexp: Array | None) -> None:
        """Keep the weights of these rows, or what is made of them."""
        xp, include = self._lib.xp, self._chosen.include
        if logsumexp is not None:
            self.add(rows, {"logsumexp": logsumexp})
        if "entropy" in include:
            self.add(rows, {"entropy": -xp.sum(_x_log_x(weights, xp), axis=-1)})
        if not include & {"attention_weights", "received"}:
            return
        kept = self._heads(weights)
        if self._chosen.average_heads:
            kept = xp.mean(kept, axis=1, keepdims=True)
        if "received" in include:
            received = xp.sum(kept, axis=2)  # b h k
            self.arrays["received"] = received if rows.start == 0 else self.arrays["received"] + received
        if "attention_weights" not in include:
            return
        if self._chosen.top_k is not None:
            # A stable sort of the negated weights: ties by lower index.
            order = xp.argsort(-kept, axis=-1, stable=True)[..., : self._chosen.top_k]
            self._write("top_indices", order, rows)
            kept = xp.take_along_axis(kept, order, axis=-1)
        self._write("attention_weights", kept, rows)

    def _heads(self, array: Array) -> Array:
        if self._chosen.heads is None:
            return array
        return self._lib.xp.take(array, self._lib.load(self._chosen.heads), axis=1)

    def _write(self, name: str, block: Array, rows: slice) -> None:
        b, h = block.shape[:2]
        if name not in self.arrays:
            shape = (b, h, self._queries, *block.shape[3:])
            self.arrays[name] = self._lib.xp.empty(shape, dtype=block.dtype, device=self._lib.device)
        target = self.arrays[name]
        if self._chosen.queries is None:
            target[:, :, rows] = block
            return
        chosen = self._chosen.queries
        (here,) = np.nonzero((rows.start <= chosen) & (chosen < rows.stop))
        for place in here:
            target[:, :, int(place)] = block[:, :, int(chosen[place]) - rows.start]


def _x_log_x(weights: Array, xp: Any) -> Array:
    """w ln w, and 0 for 0."""
    one = xp.ones_like(weights)
    return weights * xp.log(xp.where(weights > 0, weights, one))
