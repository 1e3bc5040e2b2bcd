"""The table of wrong formulas."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from tests.helpers.formulas.attention import TILES, Answer, Attention

# What a mistake makes of a request; None if it changes nothing there.
Mistake = Callable[[Attention], Answer | None]
MISTAKES: Final[dict[str, tuple[Mistake, tuple[str, ...]]]] = {}
# Wrong outputs that are no known mistake, and the facts that are true of them.
FACTS: Final[dict[str, tuple[Mistake, tuple[str, ...], tuple[str, ...]]]] = {}


def mistake(name: str, *needs: str) -> Callable[[Mistake], Mistake]:
    def add(function: Mistake) -> Mistake:
        MISTAKES[name] = function, needs
        return function

    return add


def unnamed(name: str, facts: tuple[str, ...], *needs: str) -> Callable[[Mistake], Mistake]:
    def add(function: Mistake) -> Mistake:
        FACTS[name] = function, needs, facts
        return function

    return add


def tile(a: Attention) -> int:
    """The size of a tile that cuts the keys."""
    return int(a.random.choice([size for size in TILES if size < a.shape[3]]))


def parts(a: Attention) -> list[slice]:
    """The keys in equal parts, or in tiles."""
    m = a.shape[3]
    size = int(a.random.choice([-(-m // 2), -(-m // 4), *(one for one in TILES if one < m)]))
    return [slice(start, min(start + size, m)) for start in range(0, m, size)]
