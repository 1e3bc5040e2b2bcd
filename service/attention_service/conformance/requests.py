"""Requests of corners: which of them a suite has, their sizes, and their fields."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from copy import deepcopy
from dataclasses import dataclass
from math import lcm
from typing import Any, Final, Self

import numpy as np

from attention_service.attention.arrays import FLOATS
from attention_service.attention.terms import POSITIONAL
from attention_service.comparison.inputs import COTANGENTS, OPTIONS, make_input
from attention_service.comparison.recipes import HEAD_DIM, Recipe
from attention_service.conformance import changes
from attention_service.conformance.changes import Fields
from attention_service.conformance.corners import COMBINED, CORNERS, TILE_CORNERS, TYPES, Corner
from attention_service.conformance.gradient_corners import GRADIENT_CORNERS

HEADS: Final = 3
# The options of `combined`, each of which a case has with this probability, drawn in their order.
SHARE: Final = 0.3
COMBINED_OPTIONS: Final = sorted({*OPTIONS, "past"} - {"output_norm", "query_lengths"})
CACHE: Final = ("past_key", "past_value")
# What a choice need not name: `gradients` stands beside a gradient of the output.
SOURCES: Final = frozenset({"query", "key", "value", "gradients"})
# The fields that cases have beside query, key and value.
NAMES: Final = sorted(
    {*OPTIONS, *COTANGENTS} - {"output_norm"}
    | {*CACHE, "include", "layout", "normalization", "num_heads", "num_kv_heads", "projection"}
    | {"query_lengths", "query_offset", "scale"}
)
# The fields of a request that these fields of a Recipe add.
FIELD_OF: Final = {"scales_heads": "scale", "normalization": "normalization"}
# The types of kernels for tensor cores, which have head dimensions that are multiples of this, up to the other.
LONG_TYPES: Final = ("bfloat16", "float16", "float32")
MULTIPLE: Final = 8
MAX_DIM: Final = 512


@dataclass(frozen=True)
class SuiteSizes:
    """The sizes of the cases of a suite.

    queries, keys: that are drawn, primes mostly; squares: keys, where there are as many queries
    long: more keys than two tiles of 128 hold; more, fewer: queries and keys, where there are more queries
    features: of a head of `value_square`, which has as many keys
    head_dim: of all others; head_dims, value_dims: that are drawn in `combined`
    """

    queries: tuple[int, ...] = (5, 13)
    keys: tuple[int, ...] = (17, 29, 37)
    squares: tuple[int, ...] = (17, 29, 37)
    long: int = 257
    more: int = 29
    fewer: int = 17
    features: int = 17
    head_dim: int = HEAD_DIM
    head_dims: tuple[int, ...] = (4, 8, 16)
    value_dims: tuple[int, ...] = (5, 8, 16)

    @classmethod
    def of_tiles(cls, head_dim: int) -> Self:
        """Lengths that fill tiles, that end in one, and that have a token more."""
        return cls(
            queries=(17, 64, 129),
            keys=(131, 256, 385, 577),
            squares=(65, 128, 257, 577),
            long=1087,
            more=257,
            fewer=129,
            features=head_dim,
            head_dim=head_dim,
            head_dims=(head_dim,),
            value_dims=(head_dim,),
        )

    @property
    def narrow(self) -> int:
        """Features of values, where they have fewer than keys."""
        return 5 * self.head_dim // 8


@dataclass(frozen=True)
class Choice:
    """Which cases a suite has.

    only:      the fields that a request may have beside query, key and value; None for all
    head_dims: features of a head, in turn; with any, lengths are those of kernels for tensor cores
    dtypes:    the types of requests, in turn; none for those of each corner
    """

    only: frozenset[str] | None = None
    head_dims: tuple[int, ...] = ()
    dtypes: tuple[str, ...] = ()

    @classmethod
    def of(cls, only: Collection[str] | None, head_dims: Sequence[int], dtypes: Sequence[str]) -> Self:
        """The choice of these arguments. Errors: ValueError."""
        if unknown := sorted({*(only or ())} - {*NAMES}):
            raise ValueError(f"only: expected names of {', '.join(NAMES)}, got {', '.join(unknown)}")
        for head_dim in head_dims:
            if not (0 < head_dim <= MAX_DIM and head_dim % MULTIPLE == 0):
                raise ValueError(f"head_dims: expected multiples of {MULTIPLE} up to {MAX_DIM}, got {head_dim}")
        if unknown := sorted({*dtypes} - {*TYPES}):
            raise ValueError(f"dtypes: expected names of {', '.join(TYPES)}, got {', '.join(unknown)}")
        return cls(None if only is None else frozenset(only), tuple(head_dims), tuple(dtypes))

    def may(self, name: str) -> bool:
        """True if a request may have a field."""
        return self.only is None or name in SOURCES or name in self.only

    def has(self, fields: Collection[str]) -> bool:
        """True if a request may have these fields."""
        return all(self.may(name) for name in fields)

    @property
    def corners(self) -> tuple[Corner, ...]:
        """All corners but `combined`, in their order."""
        every = (*(TILE_CORNERS if self.head_dims else ()), *CORNERS, *GRADIENT_CORNERS)
        return tuple(corner for corner in every if self.types(corner))

    def types(self, corner: Corner) -> list[str]:
        """The types of the cases of a corner, in turn."""
        chosen = self.dtypes or (LONG_TYPES if self.head_dims else corner.types)
        return [dtype for dtype in chosen if dtype in corner.types]

    def turn(self, corner: Corner, turn: int) -> tuple[str, int | None]:
        """The type and the head dimension of a case of a corner: after some turns, all pairs of them."""
        types, dims = self.types(corner), self.head_dims
        shifted = turn + turn // lcm(len(types), len(dims) or 1)
        return types[turn % len(types)], dims[shifted % len(dims)] if dims else None


EVERYTHING: Final = Choice()


def make_fields(
    corner: Corner,
    dtype: str,
    random: np.random.Generator,
    head_dim: int | None = None,
    choice: Choice = EVERYTHING,
) -> Fields:
    """The fields of a request of a corner, arrays as ndarrays in the type `dtype`.

    head_dim: see Choice; None for short cases. choice: of which `combined` takes its options
    """
    own = SuiteSizes() if head_dim is None else SuiteSizes.of_tiles(head_dim)
    fixed = {name: getattr(own, size) if isinstance(size, str) else size for name, size in corner.sizes.items()}
    is_square = fixed.pop("square", False)
    sizes: dict[str, Any] = {
        "queries": int(random.choice(own.queries)),
        "keys": int(random.choice(own.squares if is_square else own.keys)),
        "heads": HEADS,
        "kv_heads": HEADS,
        "value_dim": own.head_dim,
        "head_dim": own.head_dim,
    }
    options, change = frozenset(corner.options), corner.change
    if corner is COMBINED:
        options, combined_sizes = _combined(random, own, choice)
        change, fixed = changes.combined(choice.may), fixed | combined_sizes
    sizes |= fixed
    if is_square:
        sizes["queries"] = sizes["keys"]
    fields = make_input(Recipe(options, dtype=dtype, **sizes), int(random.integers(2**31)))
    fields |= deepcopy(dict(corner.fields))
    if change is not None:
        change(fields, random)
    if fields.get("layout") == "bhld":
        del fields["layout"]  # the default
    return {name: _typed(value, FLOATS[dtype]) for name, value in fields.items()}


def _combined(random: np.random.Generator, own: SuiteSizes, choice: Choice) -> tuple[frozenset[str], dict[str, Any]]:
    """The options of a case of `combined`, and fields of its Recipe."""
    drawn = [name for name in COMBINED_OPTIONS if random.random() < SHARE]
    options = {name for name in drawn if choice.has(CACHE if name == "past" else (name,))}
    kv_heads = int(random.integers(1, 4))
    sizes: dict[str, Any] = {"kv_heads": kv_heads, "heads": kv_heads * int(random.integers(1, 4))}
    sizes |= {"value_dim": int(random.choice(own.value_dims)), "head_dim": int(random.choice(own.head_dims))}
    sizes |= {name: value for name, value in _variants(random).items() if choice.may(FIELD_OF.get(name, "query"))}
    options -= {"sinks"} if "normalization" in sizes else set()
    if options & POSITIONAL and not choice.may("query_offset"):
        sizes["has_offset"] = False
        if "past" not in options:  # whose length is the offset else
            sizes["queries"] = sizes["keys"] = int(random.choice(own.squares))
    return frozenset(options), sizes


def _variants(random: np.random.Generator) -> dict[str, Any]:
    """Fields of the Recipe of `combined` that say which form its options have."""
    choices = {"kind": ("rms", "layer"), "over": ("head", "all"), "position": ("before", "after")}
    found: dict[str, Any] = {"norm": {name: str(random.choice(names)) for name, names in choices.items()}}
    found |= {name: bool(random.random() < SHARE) for name in ("scales_heads", "has_row_sinks")}
    return found | ({"normalization": "sigmoid"} if random.random() < SHARE / 2 else {})


def _typed(value: Any, dtype: np.dtype) -> Any:
    """A field whose bfloat16 and float16 arrays keep the type that a change may have widened."""
    if isinstance(value, np.ndarray) and value.dtype == np.float64 and dtype != np.float64:
        return value.astype(np.float32)
    return value
