"""What the kernels share: requests, one head, the online softmax over tiles of keys, the merge of partial results.

A kernel computes in float32 and rounds its output to the type of the request. It takes the request and whether it makes
its mistake, so that the same code without the mistake can be judged, too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import ml_dtypes
import numpy as np
from numpy.lib.stride_tricks import as_strided

Fields = dict[str, Any]
Arrays = np.ndarray | dict[str, np.ndarray]
Part = tuple[np.ndarray, np.ndarray]
Drawn = Callable[[np.random.Generator], Any]

F32: Final = np.float32
BF16: Final = ml_dtypes.bfloat16
F16: Final = np.float16
LOG2E: Final = 1.4426950408889634
# Scores hold log2(e) for exp2, and what is added to them does not: two mistakes that cancel for scores alone.
IN_BASE_TWO: Final = "softmax.base2 and scale.log2e"


@dataclass(frozen=True, slots=True)
class Bug:
    """A bug of an attention kernel.

    thread:  the public thread that describes it
    what:    what the kernel did
    request: draws the fields of a request with usual shapes
    kernel:  takes the fields, and whether it makes the mistake
    names:   the known mistakes that are true descriptions of it; none if no known mistake describes it
    is_visible: False if rounding makes errors of this size
    """

    thread: str
    what: str
    request: Callable[[np.random.Generator], Fields]
    kernel: Callable[[Fields, bool], Arrays]
    names: frozenset[str] = frozenset()
    is_visible: bool = True


def named(*names: str) -> frozenset[str]:
    return frozenset(names)


def normal(*shape: int, times: float = 1.0, mean: float = 0.0) -> Drawn:
    """An option that is drawn: normal numbers."""
    return lambda random: (random.standard_normal(shape) * times + mean).astype(F32)


def asks(
    *, b: int = 1, h: int = 4, g: int = 2, q: int = 128, k: int = 0, d: int = 64, e: int = 0,
    dtype: Any = F32, times: float = 1.0, layout: str = "bhld", **options: Any,
) -> Callable[[np.random.Generator], Fields]:  # fmt: skip
    """A request of normal numbers. k, e: as q and d if 0; times: on the query; options: numbers, or how to draw them"""

    def request(random: np.random.Generator) -> Fields:
        shapes = (b, h, q, d), (b, g, k or q, d), (b, g, k or q, e or d)
        arrays = [random.standard_normal(shape, F32) for shape in shapes]
        arrays[0] *= F32(times)
        if layout == "blhd":
            arrays = [array.swapaxes(1, 2).copy() for array in arrays]
        names = ("query", "key", "value")
        fields: Fields = {name: array.astype(dtype) for name, array in zip(names, arrays, strict=True)}
        drawn = {name: value(random) if callable(value) else value for name, value in options.items()}
        return fields | {"layout": layout} | drawn

    return request


@dataclass(frozen=True, slots=True)
class Head:
    """What a kernel has of one query head: query (q, d), key (k, d), value (k, e) in float32.

    group: query heads for each key/value head
    """

    b: int
    h: int
    group: int
    query: np.ndarray
    key: np.ndarray
    value: np.ndarray
    scale: float

    def scores(self, keys: slice = slice(None)) -> np.ndarray:
        return self.query @ self.key[keys].T * F32(self.scale)

    def rows(self, rows: slice) -> Head:
        return replace(self, query=self.query[rows])

    def keys(self, keys: slice | np.ndarray) -> Head:
        return replace(self, key=self.key[keys], value=self.value[keys])

    def longer(self, key: np.ndarray, value: np.ndarray) -> Head:
        """The head with more keys behind its own."""
        return replace(self, key=np.concatenate([self.key, key]), value=np.concatenate([self.value, value]))

    @property
    def sizes(self) -> tuple[int, int]:
        return len(self.query), len(self.key)


def operands(fields: Fields) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """query, key and value of a request, the past before the new ones, as (b, h, l, d) in float32."""
    query, key, value = (np.asarray(fields[name]).astype(F32) for name in ("query", "key", "value"))
    if fields["layout"] == "blhd":
        query, key, value = (array.swapaxes(1, 2) for array in (query, key, value))
    if "past_key" in fields:
        key = np.concatenate([np.asarray(fields["past_key"]).astype(F32), key], axis=2)
        value = np.concatenate([np.asarray(fields["past_value"]).astype(F32), value], axis=2)
    return query, key, value


def heads_of(query: np.ndarray, key: np.ndarray, value: np.ndarray, scale: Any = None) -> Iterator[Head]:
    group = query.shape[1] // key.shape[1]
    scales = np.broadcast_to(query.shape[-1] ** -0.5 if scale is None else scale, query.shape[1])
    for b in range(len(query)):
        for h in range(query.shape[1]):
            yield Head(b, h, group, query[b, h], key[b, h // group], value[b, h // group], float(scales[h]))


def collected(fields: Fields, one: Callable[[Head], np.ndarray]) -> np.ndarray:
    """The output of a kernel that computes one head after the other."""
    query, key, value = operands(fields)
    outputs = [one(head) for head in heads_of(query, key, value, fields.get("scale"))]
    return returned(fields, np.stack(outputs).reshape(*query.shape[:2], *outputs[0].shape))


def returned(fields: Fields, outputs: np.ndarray) -> np.ndarray:
    """Outputs (b, h, q, e) in the layout and the type of a request."""
    moved = outputs.swapaxes(1, 2) if fields["layout"] == "blhd" else outputs
    return moved.astype(fields["query"].dtype)


def tiles(count: int, size: int) -> Iterator[slice]:
    for start in range(0, count, size):
        yield slice(start, min(start + size, count))


def divided(sums: np.ndarray, total: np.ndarray) -> np.ndarray:
    """sums / total, 0 where nothing was added. total: without the last axis"""
    total = total[..., None]
    return np.where(total == 0, 0, sums / np.where(total == 0, 1, total))


class Online:
    """The softmax of some rows over tiles of keys: the largest score, the sum of exponentials, the weighted values."""

    def __init__(self, rows: int, width: int) -> None:
        self.top = np.full(rows, -np.inf, F32)
        self.total = np.zeros(rows, F32)
        self.sums = np.zeros((rows, width), F32)

    def add(self, scores: np.ndarray, values: np.ndarray) -> None:
        top = np.maximum(self.top, scores.max(axis=-1, initial=-np.inf))
        base = np.where(np.isneginf(top), 0, top)
        old, weights = np.exp(self.top - base), np.exp(scores - base[:, None])
        self.total = self.total * old + weights.sum(axis=-1)
        self.sums = self.sums * old[:, None] + weights @ values
        self.top = top

    @property
    def output(self) -> np.ndarray:
        return divided(self.sums, self.total)

    @property
    def logsumexp(self) -> np.ndarray:
        return self.top + np.log(self.total)


def flash(head: Head, visible: np.ndarray | None = None, added: np.ndarray | None = None, tile: int = 64) -> Online:
    """The usual kernel: tiles of keys from the first to the last. visible, added: (q, k)"""
    online = Online(len(head.query), head.value.shape[-1])
    for keys in tiles(len(head.key), tile):
        scores = head.scores(keys)
        if added is not None:
            scores = scores + added[:, keys].astype(F32)
        if visible is not None:
            scores = np.where(visible[:, keys], scores, F32(-np.inf))
        online.add(scores, head.value[keys])
    return online


def part_of(head: Head, visible: np.ndarray | None = None) -> Part:
    """What a split, a chunk or a device has of its keys: output and logsumexp."""
    online = flash(head, visible)
    return online.output, online.logsumexp


def band(q: int, k: int, offset: int = 0, *, left: int | None = None, right: int | None = None) -> np.ndarray:
    """The keys from i + offset - left to i + offset + right, (q, k)."""
    distance = np.arange(k) - (np.arange(q)[:, None] + offset)
    visible = np.ones((q, k), bool)
    if left is not None:
        visible &= distance >= -left
    if right is not None:
        visible &= distance <= right
    return visible


def causal(q: int, k: int, offset: int = 0) -> np.ndarray:
    return band(q, k, offset, right=0)


def masked(fields: Fields, visible: Callable[[Head], np.ndarray]) -> np.ndarray:
    """The output of the usual kernel with these keys visible."""
    return collected(fields, lambda head: flash(head, visible(head)).output)


def merged(parts: Sequence[Part]) -> np.ndarray:
    """Outputs (q, e) of parts of the keys, weighted by their logsumexps (q,)."""
    outputs, logsumexps = (np.stack(arrays) for arrays in zip(*parts, strict=True))
    top = logsumexps.max(axis=0)
    weights = np.exp(logsumexps - np.where(np.isneginf(top), 0, top))
    return divided((weights[..., None] * outputs).sum(axis=0), weights.sum(axis=0))


def read(memory: np.ndarray, shape: Sequence[int], strides: Sequence[int], start: int = 0) -> np.ndarray:
    """What a kernel reads at start + index · strides, in elements of a memory; zeros behind its end."""
    last = start + sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True))
    flat = np.concatenate([memory.ravel(), np.zeros(max(0, last + 1 - memory.size), memory.dtype)])
    return as_strided(flat[start:], shape, [stride * flat.itemsize for stride in strides]).copy()


def stale(*shape: int, seed: int = 7) -> np.ndarray:
    """Numbers that another sequence left in memory."""
    return np.random.default_rng(seed).standard_normal(shape).astype(F32)
