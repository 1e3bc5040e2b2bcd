"""Where an output is wrong: batch entries, heads, rows, features and keys, and the worst elements."""

from __future__ import annotations

from typing import Final

import numpy as np

from attention_service.comparison.errors import distances
from attention_service.schemas.compare import Place, WorstElement

# Indices that are listed where no run or stride describes them, and elements that are shown.
LISTED: Final = 16
SHOWN: Final = 3
# Tiles that kernels use: a run of wrong rows that ends or begins at one is likely its tail.
TILES: Final = (256, 128, 64, 32, 16)


def places(actual: np.ndarray, expected: np.ndarray, limit: float, axes: tuple[str, ...]) -> list[Place]:
    """Where an array is wrong by more than a limit, one place for each axis that is wrong in parts only.

    axes: the names of the axes of both arrays, like ("batch entry", "head", "row", "feature")
    """
    wrong = distances(actual, expected) > limit
    if not wrong.any():
        return []
    found = []
    for axis, what in enumerate(axes):
        others = tuple(i for i in range(wrong.ndim) if i != axis)
        indices = np.flatnonzero(wrong.any(axis=others))
        if len(indices) < wrong.shape[axis]:
            found.append(_place(what, indices, wrong.shape[axis]))
    share = np.count_nonzero(wrong) / wrong.size
    message = f"{np.count_nonzero(wrong)} of {wrong.size} elements ({share:.1%}) are wrong"
    return [Place(what="elements", message=message), *found]


def _place(what: str, indices: np.ndarray, length: int) -> Place:
    first, last = int(indices[0]), int(indices[-1])
    plural = {"batch entry": "batch entries"}.get(what, f"{what}s")
    if len(indices) == 1:
        return Place(what=plural, indices=[first], message=f"{what} {first} only")
    steps = np.diff(indices)
    if (steps == steps[0]).all():
        stride = int(steps[0])
        every = "" if stride == 1 else f" in steps of {stride}"
        tail = _tail(first, last, length) if stride == 1 else ""
        text = f"{plural} {first} to {last} only{every}{tail}"
        return Place(what=plural, start=first, stop=last + 1, stride=stride, message=text)
    listed = indices[:LISTED].tolist()
    more = f" and {len(indices) - LISTED} more" if len(indices) > LISTED else ""
    return Place(what=plural, indices=listed, message=f"{plural} {', '.join(map(str, listed))}{more} only")


def _tail(first: int, last: int, length: int) -> str:
    """What a run of wrong indices may be."""
    if last == length - 1:
        for tile in TILES:
            if first and first % tile == 0 and last - first < tile:
                return f": the tail of a tile of {tile}"
    return ""


def worst(actual: np.ndarray, expected: np.ndarray) -> list[WorstElement]:
    """The elements with the largest errors."""
    apart = distances(actual, expected)
    found = []
    for _ in range(min(SHOWN, apart.size)):
        place = np.unravel_index(np.argmax(apart), apart.shape)
        if apart[place] > 0:
            index = [int(i) for i in place]
            found.append(WorstElement(index=index, actual=float(actual[place]), reference=float(expected[place])))
        apart[place] = 0
    return found
