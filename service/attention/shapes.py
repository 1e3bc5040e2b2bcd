"""Layouts: the order of axes in a request, and its conversion to the one order that this package uses."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Final, get_args

import numpy as np

from service.attention.spec import AttentionSpec, Layout
from service.errors import Fault, FieldConflict, InvalidArray, MissingField, ShapeMismatch, shape

LAYOUTS: Final[tuple[str, ...]] = get_args(Layout)
DEFAULT_LAYOUTS: Final[dict[int, Layout]] = {2: "ld", 3: "bld", 4: "bhld"}
SOURCES: Final = "query, key and value; or input alone; or input and context"


def sources(spec: AttentionSpec) -> dict[str, tuple[str, np.ndarray]]:
    """The field and array that query, key and value each come from.

    Errors: MissingField for none or half a source, FieldConflict for two.
    """
    given = [name for name in ("query", "key", "value", "input", "context") if getattr(spec, name) is not None]
    if not given:
        raise MissingField(Fault("", SOURCES, "none of them"))
    if spec.input is not None:
        extra = [name for name in given if name in ("query", "key", "value")]
        if extra:
            raise FieldConflict(*(Fault(f"/{name}", "no other source beside input", name) for name in extra))
        other = "input" if spec.context is None else "context"
        chosen = {"query": "input", "key": other, "value": other}
    elif spec.context is not None:
        raise MissingField(Fault("/input", "input beside context", ", ".join(given), "queries come from input"))
    else:
        missing = [name for name in ("query", "key", "value") if name not in given]
        if missing:
            raise MissingField(*(Fault(f"/{name}", SOURCES, f"only {', '.join(given)}") for name in missing))
        chosen = {name: name for name in given}
    return {role: (field, getattr(spec, field)) for role, field in chosen.items()}


def resolve_layout(asked: Layout | None, arrays: Mapping[str, tuple[str, np.ndarray]]) -> Layout:
    """The layout of a request: the one asked for, else that of the highest rank. Every array must have its rank.

    A query of rank 1 is one token of `ld` or `dl`. Errors: ShapeMismatch, InvalidArray for an axis of length 0.
    """
    ranks = {field: array.ndim for field, array in arrays.values()}
    highest = max(ranks.values())
    if asked is None and highest not in DEFAULT_LAYOUTS:
        field, array = next(item for item in arrays.values() if item[1].ndim == highest)
        raise ShapeMismatch.of(f"/{field}", "2 to 4 axes (or 1 for a single query)", array)
    layout = asked or DEFAULT_LAYOUTS[highest]
    single_allowed = len(layout) == 2 and arrays["query"][0] != arrays["key"][0]
    for role, (field, array) in arrays.items():
        if array.ndim != len(layout) and not (array.ndim == 1 and role == "query" and single_allowed):
            raise ShapeMismatch.of(f"/{field}", f"{len(layout)} axes, as layout {layout} has", array)
        if 0 in array.shape:
            raise InvalidArray.of(f"/{field}", "at least one element on every axis", array)
    return layout


# Axes in their own order.
UNCHANGED: Final = frozenset(tuple(range(rank)) for rank in range(5))


@dataclass(frozen=True, slots=True)
class View:
    """A reshape and a transposition of an array, which copy nothing."""

    shape: tuple[int, ...]
    axes: tuple[int, ...]

    def of(self, array: np.ndarray) -> np.ndarray:
        """The array with these axes."""
        shaped = array if array.shape == self.shape else array.reshape(self.shape)
        return shaped if self.axes in UNCHANGED else shaped.transpose(self.axes)


def to_canonical(layout: str, target: str, lengths: Mapping[str, int]) -> View:
    """The view from a layout to `bhld`, or to `bld` without splitting features.

    lengths: of each axis. A batch of one is added if the layout has none; d is split into heads if only the target has
    them.
    """
    letters = layout if "b" in layout else "b" + layout
    if "h" in target and "h" not in layout:
        letters = letters.replace("d", "hd")
    return View(tuple(lengths[letter] for letter in letters), tuple(letters.index(letter) for letter in target))


def from_canonical(array: np.ndarray, layout: str) -> np.ndarray:
    """A view of an array b, [h,] l, d in the axes of a layout."""
    return (array if "b" in layout else array[0]).transpose(_order(layout))


@cache
def _order(layout: str) -> tuple[int, ...]:
    ordered = [letter for letter in "bhld" if letter in layout]
    return tuple(ordered.index(letter) for letter in layout)


def has_columns(layout: str) -> bool:
    """True if tokens are columns: score matrices are then swapped too, so that their columns sum to one."""
    return layout in ("dl", "bdl")


def expected(layout: str, sizes: Mapping[str, int]) -> str:
    """The text of a shape in a layout, with a dot for each axis of any length."""
    return shape(tuple(sizes.get(letter, "·") for letter in layout))
