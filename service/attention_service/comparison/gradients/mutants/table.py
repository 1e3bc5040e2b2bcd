"""The table of mistakes of backward passes: each a function from a case to the gradients that it makes.

They keep the right output and logsumexp. Mistakes of the forward pass that another request would say are differentiated
as that request is, see `search`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, NamedTuple

import numpy as np

from attention_service.attention.score_term import Part
from attention_service.attention.tile import Tile
from attention_service.backends.dense.gradients import TileBackward
from attention_service.backends.dense.library import Array
from attention_service.comparison.gradients.case import GradientCase, Gradients, Sums


class Variant(NamedTuple):
    """One form of a mistake. run: makes its gradients; detail: what tells it from the others, like "of the query" """

    run: Callable[[], Gradients]
    detail: str = ""


# From a case to the forms of a mistake that change its meaning; none where it has none.
Edit = Callable[[GradientCase], Iterator[Variant]]


@dataclass(frozen=True, slots=True)
class GradientMutant:
    """A row of the table. name: stable, part of the contract; message: what the kernel did, as one sentence

    in_power: False if it has so many forms that those that may explain wrong gradients are estimated
    of_all: True if it cannot be made of some gradients alone, as an exchange cannot
    """

    name: str
    message: str
    edit: Edit
    in_power: bool = True
    of_all: bool = False


GRADIENT_MUTANTS: Final[dict[str, GradientMutant]] = {}


def mutant(name: str, message: str, *, in_power: bool = True, of_all: bool = False) -> Callable[[Edit], Edit]:
    """Put a function into the table, as the mutant `grad.` and this name. in_power, of_all: see GradientMutant"""

    def add(edit: Edit) -> Edit:
        GRADIENT_MUTANTS[f"grad.{name}"] = GradientMutant(f"grad.{name}", message, edit, in_power, of_all)
        return edit

    return add


class Wrong(TileBackward):
    """The backward pass of tiles with a mistake. case: whose forward pass is right"""

    def __init__(self, *arguments: Any, case: GradientCase) -> None:
        super().__init__(*arguments)
        self.case = case

    def deltas(self, tile: Tile) -> np.ndarray:
        """The right D of the rows of a tile, (b, h, r, 1)."""
        found: np.ndarray = self.case.delta[tile.batch, tile.heads, tile.rows][..., None]
        return found


class Recomputed(Wrong):
    """Weights are computed again from scores, as kernels do, but by something else than their logsumexp; D is right."""

    def __init__(self, *arguments: Any, case: GradientCase) -> None:
        super().__init__(*arguments, case=case)
        self.reads = self.reads | {"masked_scores"}

    def subtracted(self, tile: Tile, scores: Array) -> Array:
        """What is subtracted from the masked scores (b, h, r, k) before exp, (b, h, r, 1)."""
        found = self.case.logsumexp[tile.batch, tile.heads, tile.rows][..., None]
        return np.where(np.isfinite(found), found, 0.0)

    def run(self, tile: Tile, weights: Array, stages: Mapping[str, Array], write: Any) -> list[Part]:
        """What a tile adds, from other weights."""
        scores = stages["masked_scores"]
        return super().run(tile, np.exp(scores - self.subtracted(tile, scores)), stages, write)

    def delta(self, tile: Tile, weights: Array, of_weights: Array) -> Array:
        """The right D, of the output and its cotangent."""
        return self.deltas(tile)


def made_by(case: GradientCase, kind: Callable[..., TileBackward], detail: str = "") -> Variant:
    """The form of a mistake that a class of tiles makes. kind: takes `case` by name"""
    return Variant(partial(case.run, partial(kind, case=case)), detail)


def edited(case: GradientCase, edit: Callable[[Sums], Sums], detail: str = "") -> Variant:
    """The form of a mistake that changes what the tiles added up."""
    return Variant(partial(case.run, edit=edit), detail)


def is_softmax(case: GradientCase) -> bool:
    """True if weights are a softmax."""
    return case.plan.normalization == "softmax"
