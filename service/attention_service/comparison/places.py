"""Where an output is wrong: batch entries, heads, rows, features and keys, and the worst elements."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Final

import numpy as np

from attention_service.comparison.errors import distances
from attention_service.comparison.wrong import NOUNS
from attention_service.schemas.compare import Place, WorstElement

# Indices that are listed, runs of indices that are said one by one, and elements that are shown.
LISTED: Final = 16
RUNS: Final = 4
SHOWN: Final = 3
# Tiles that kernels use: a run of wrong rows that ends or begins at one is likely its tail.
TILES: Final = (256, 128, 64, 32, 16)


def places(
    name: str, actual: np.ndarray, expected: np.ndarray, limit: float | np.ndarray, axes: tuple[str, ...]
) -> list[Place]:
    """Where an array is wrong by more than a limit, one place for each axis that is wrong in parts only.

    limit: one number, or some that broadcast to the array
    name: of the array; axes: the names of the axes of both arrays, like ("batch entry", "head", "row", "feature")
    """
    wrong = distances(actual, expected) > limit
    if not wrong.any():
        return []
    found = []
    for axis, what in enumerate(axes):
        others = tuple(i for i in range(wrong.ndim) if i != axis)
        indices = np.flatnonzero(wrong.any(axis=others))
        if len(indices) < wrong.shape[axis]:
            found.append(place_of(name, what, indices, wrong.shape[axis]))
    share = np.count_nonzero(wrong) / wrong.size
    message = f"{np.count_nonzero(wrong)} of {wrong.size} elements of {NOUNS.get(name, name)} ({share:.1%}) are wrong"
    return [Place(array=name, what="elements", message=message), *found]


def place_of(name: str, what: str, indices: np.ndarray, length: int) -> Place:
    """The wrong indices of an axis in the shortest way that is exact; else the first and the last, and how many.

    name: of the array; what: the axis counts; length: of the axis
    """
    first, last, count = int(indices[0]), int(indices[-1]), len(indices)
    plural = plural_of(what)
    place = partial(Place, array=name, what=plural)
    runs = runs_of(indices)
    listed = indices[:LISTED].tolist()
    if count == 1:
        return place(indices=[first], message=f"{what} {first} only")
    if len(runs) > 1 and (found := residues_of(indices, length)):
        modulus, residues = found
        text = f"{plural} whose index mod {modulus} is {in_words(runs_of(residues), 'or')} only"
        return place(modulus=modulus, residues=residues[:LISTED].tolist(), message=text)
    steps = np.diff(indices)
    if (steps == steps[0]).all():
        stride = int(steps[0])
        every = _tail(first, last, length) if stride == 1 else f" in steps of {stride}"
        text = f"{plural} {first} to {last} only{every}"
        return place(start=first, stop=last + 1, stride=stride, message=text)
    if len(runs) <= RUNS or count <= LISTED:
        return place(indices=listed, message=f"{plural} {in_words(runs, 'and')} only")
    share = count / (last + 1 - first)
    text = f"{plural} {first} to {last} only, {count} of these {last + 1 - first} ({math.floor(100 * share)}%)"
    return place(indices=listed, start=first, stop=last + 1, share=share, message=text)


def plural_of(what: str) -> str:
    """The plural of what an axis counts."""
    return f"{what[:-1]}ies" if what.endswith("y") and not what.endswith("ey") else f"{what}s"


def residues_of(indices: np.ndarray, length: int) -> tuple[int, np.ndarray] | None:
    """A power of two, and what indices leave when they are divided by it, if all that leave this are there."""
    for modulus in (2**power for power in range(1, length.bit_length() - 1)):
        residues = np.unique(indices % modulus)
        if np.isin(np.arange(length) % modulus, residues).sum() == len(indices):
            return (modulus, residues) if len(runs_of(residues)) <= RUNS else None
    return None


def runs_of(indices: np.ndarray) -> list[np.ndarray]:
    """Ascending indices as runs of consecutive ones."""
    return np.split(indices, np.flatnonzero(np.diff(indices) != 1) + 1)


def in_words(runs: Sequence[Sequence[int] | np.ndarray], word: str) -> str:
    """Runs as in "0 to 15, 20 and 30"."""
    words = [f"{run[0]} to {run[-1]}" if len(run) > 1 else f"{run[0]}" for run in runs]
    return f" {word} ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)


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
