"""Random requests with a batch, and each of their entries as a request of its own."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from attention_service.attention.terms import POSITIONAL

LAYOUTS: Final = ("bhld", "blhd", "bld", "lbd", "bdl")
# Sizes with which each matrix of an array that begins at a multiple of 64 bytes begins at one, too.
ALIGNED: Final = (16, 32, 48, 64)
SIZES: Final = (1, 2, 3, 5, 8, 16, 17, 31, 64, 65)
LONG: Final = (96, 128, 130, 257, 300)
# What an entry's queries, keys and values are multiplied by: scores that need more care, in some entries.
FACTORS: Final = (1.0, 1.0, 1.0, 1e-3, 4.0, 30.0, 1e3, 1e10, 3e17)
OF_HALVES: Final = FACTORS[:7]
STAGES: Final = (
    *("attention_weights", "scores", "scaled_scores", "capped_scores", "masked_scores", "hidden_by", "logsumexp"),
    *("entropy", "received", "query", "key", "value", "head_outputs", "present_key", "present_value"),
)


@dataclass(frozen=True, slots=True)
class Entries:
    """An array with a part for each batch entry. axis: of the entries"""

    array: np.ndarray
    axis: int = 0

    def alone(self, entry: int) -> np.ndarray:
        """The part of one entry, as an array of its own."""
        return np.ascontiguousarray(np.take(self.array, [entry], self.axis))


def whole(fields: Any) -> Any:
    """The fields of a request for all entries."""
    if isinstance(fields, dict):
        return {name: whole(value) for name, value in fields.items()}
    return fields.array if isinstance(fields, Entries) else fields


def alone(fields: Any, entry: int) -> Any:
    """The fields of a request for one entry."""
    if isinstance(fields, dict):
        return {name: alone(value, entry) for name, value in fields.items()}
    return fields.alone(entry) if isinstance(fields, Entries) else fields


class Draw:
    """Draws the fields of a request. h, g, b, q, k, d, e: its sizes, the keys with the past"""

    def __init__(self, random: np.random.Generator, sizes: tuple[int, ...], long: tuple[int, ...]) -> None:
        self.random, self.sizes = random, sizes
        self.unit = 16 if sizes == ALIGNED else 1  # of positions
        self.b = int(random.integers(2, 6))
        self.g, groups = (int(random.integers(1, 4)) for _ in range(2))
        self.h = self.g * groups
        self.layout = str(random.choice(LAYOUTS))
        self.dtype = str(random.choice(["float32", "float32", "float64", "float16"]))
        lengths = (*sizes, *long) if random.random() < 0.4 else sizes
        self.q, self.new, self.d, self.e = (int(random.choice(x)) for x in (lengths, lengths, sizes, sizes))
        self.d += self.d % 2
        if random.random() < 0.5:
            self.new, self.e = self.q, self.d
        self.past = int(random.choice(sizes)) if random.random() < 0.2 else 0
        self.k = self.new + self.past

    def some(self, chance: float = 0.15) -> bool:
        """True by chance."""
        return bool(self.random.random() < chance)

    def normal(self, *shape: int) -> np.ndarray:
        """Normal numbers."""
        return self.random.normal(size=shape)

    def matrix(self, numbers: np.ndarray) -> Entries:
        """Numbers (b, h, q, k), as the layout has score matrices."""
        return Entries(numbers.swapaxes(2, 3) if self.layout == "bdl" else numbers)

    def source(self, heads: int, length: int, features: int) -> Entries:
        """A query, key or value in the layout, each entry in its own order of magnitude."""
        numbers = self.normal(self.b, heads, length, features)
        if self.some(0.5):
            factors = OF_HALVES if self.dtype == "float16" else FACTORS
            numbers *= self.random.choice(factors, self.b)[:, None, None, None]
        if "h" in self.layout:
            moved = numbers.transpose(["bhld".index(axis) for axis in self.layout])
        else:
            tokens = numbers.transpose(0, 2, 1, 3).reshape(self.b, length, heads * features)
            moved = tokens.transpose(["bld".index(axis) for axis in self.layout])
        return Entries(np.ascontiguousarray(moved), self.layout.index("b"))


def draw(random: np.random.Generator, *, is_aligned: bool = False) -> tuple[dict[str, Any], int]:
    """The fields of a random request, which may be refused; and the number of its entries."""
    one = Draw(random, *((ALIGNED, (128,)) if is_aligned else (SIZES, LONG)))
    fields: dict[str, Any] = {"layout": one.layout, "dtype": one.dtype}
    fields |= _sources(one)
    if one.past:
        fields["past_key"] = Entries(one.normal(one.b, one.g, one.past, one.d))
        fields["past_value"] = Entries(one.normal(one.b, one.g, one.past, one.e))
    fields |= _steps(one) | _positions(one) | _masks(one) | _outputs(one)
    return fields, one.b


def _sources(one: Draw) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    shapes = {"query": (one.h, one.q, one.d), "key": (one.g, one.new, one.d), "value": (one.g, one.new, one.e)}
    if "h" in one.layout:
        return {name: one.source(*shape) for name, shape in shapes.items()}
    fields |= {"num_heads": one.h, "num_kv_heads": one.g}
    maps: dict[str, Any] = {}
    for name, (heads, length, features) in shapes.items():
        # torch leaves mapped heads of one entry where they are, and copies those of several.
        given = int(one.random.choice(one.sizes)) if one.unit == 1 and one.some(0.3) else 0
        fields[name] = one.source(1, length, given) if given else one.source(heads, length, features)
        if given:
            maps[name] = {"weight": one.normal(heads * features, given) / math.sqrt(given)}
            if one.some(0.5):
                maps[name]["bias"] = one.normal(heads * features)
    if one.some():
        out = int(one.random.choice(one.sizes))
        maps["output"] = {"weight": one.normal(out, one.h * one.e), "bias": one.normal(out)}
    if one.some():
        source = fields["query"].array.shape[one.layout.index("d")]
        maps["gate"] = {"weight": one.normal(one.h * one.e, source), "activation": "silu"}
    return fields | ({"projection": maps} if maps else {})


def _steps(one: Draw) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    for role, heads, features in (("query", one.h, one.d), ("key", one.g, one.d), ("value", one.g, one.e)):
        if one.some():
            over = "all" if one.some(0.4) else "head"
            width = heads * features if over == "all" else features
            kind = "layer" if one.some(0.4) else "rms"
            fields[f"{role}_norm"] = {"kind": kind, "over": over, "weight": one.normal(width)}
            if one.some():
                fields[f"{role}_norm"]["eps"] = 0.0
    if one.some():
        fields["output_norm"] = {"weight": one.normal(one.h * one.e), "over": "all"}
    if one.some():
        fields["clip_qkv"] = 1.5
    if one.some():
        fields["rotary"] = {"interleaved": one.some(0.5)}
        if one.some(0.5):
            fields["rotary"]["query_positions"] = Entries(one.random.integers(0, 50, (one.b, one.q)))
            fields["rotary"]["key_positions"] = Entries(one.random.integers(0, 50, (one.b, one.new)))
    if "h" in one.layout and one.some():
        fields["gate"] = Entries(one.normal(one.b, one.h, one.q, one.e))
    return fields


def _positions(one: Draw) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    if one.some(0.3):
        fields["is_causal"] = True
    if one.some(0.1):
        fields["window"] = {"left": int(one.random.integers(0, one.k)) // one.unit * one.unit, "right": one.unit}
    if one.some(0.1):
        fields["chunk_size"] = int(one.random.integers(1, one.k + 1)) * one.unit
    if one.some(0.1):
        fields["alibi_slopes"] = one.normal(one.h)
    if one.some(0.1):
        fields["relative_keys"] = {"key": one.normal(int(one.random.integers(1, 20)), one.d)}
    reads = POSITIONAL & fields.keys()
    if reads and (one.past == 0 or one.some()):
        offsets = one.random.integers(0, one.k, one.b) // one.unit * one.unit
        fields["query_offset"] = Entries(offsets) if one.some(0.6) else int(offsets[0])
    return fields


def _masks(one: Draw) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    b, h, q, k = one.b, one.h, one.q, one.k
    if one.some():
        sizes = one.random.choice((1.0, 100.0), b)[:, None, None, None]
        fields["bias"] = one.matrix(one.normal(b, h, q, k) * sizes)
        if one.some(0.4):
            fields["bias"] = fields["bias"].alone(0)
    if one.some():
        fields["mask"] = one.matrix(one.random.random((b, h, q, k)) < 0.8)
    if one.some():
        fields["key_mask"] = Entries(one.random.random((b, k)) < 0.8)
    if one.some():
        fields["key_lengths"] = Entries(one.random.integers(0, k + 1, b))
    if one.some(0.1):
        fields["query_lengths"] = Entries(one.random.integers(0, q + 1, b))
    if one.some(0.1):
        fields["segment_ids"] = {
            "query": Entries(one.random.integers(0, 2, (b, q))),
            "key": Entries(one.random.integers(0, 2, (b, k))),
        }
    if one.some(0.1):
        heads, rows = (h if one.some(0.5) else 1), (q if one.some(0.7) else 1)
        fields["selected_keys"] = Entries(one.random.integers(-1, k, (b, heads, rows, max(1, k // 8))))
    return fields


def _outputs(one: Draw) -> dict[str, Any]:
    fields: dict[str, Any] = {"include": []}
    if one.some(0.6):
        fields["include"] = [str(x) for x in one.random.choice(STAGES, int(one.random.integers(1, 4)), replace=False)]
    if one.some(0.1):
        fields["scale"] = one.normal(one.h)
    if one.some(0.1):
        fields["softcap"] = 3.0
    if one.some():
        sinks = one.normal(one.h) if one.some(0.5) else None
        fields["sinks"] = Entries(one.normal(one.b, one.h, one.q) * 30) if sinks is None else sinks
    if one.some(0.1) and not {"logsumexp", "entropy"} & set(fields["include"]) and "sinks" not in fields:
        fields["normalization"] = str(one.random.choice(["sum", "sigmoid"]))
    if one.some(0.1) and "hidden_by" not in fields["include"]:
        fields["average_heads"] = True
    if one.some(0.1) and "attention_weights" in fields["include"]:
        fields["top_k"] = int(one.random.integers(1, one.k + 1))
    if one.some(0.1):
        fields["select_queries"] = one.random.permutation(one.q)[: max(1, one.q // 2)]
    return fields


def aligned(fields: Any, dtype: np.dtype) -> Any:
    """The fields, with numbers of a type that begin at a multiple of 64 bytes."""
    if isinstance(fields, dict):
        return {name: aligned(value, dtype) for name, value in fields.items()}
    if isinstance(fields, Entries):
        return Entries(aligned(fields.array, dtype), fields.axis)
    if not isinstance(fields, np.ndarray) or fields.dtype.kind != "f":
        return fields
    memory = np.empty(fields.size * dtype.itemsize + 64, np.uint8)
    start = -memory.ctypes.data % 64
    found = memory[start : start + fields.size * dtype.itemsize].view(dtype).reshape(fields.shape)
    found[...] = fields
    return found
