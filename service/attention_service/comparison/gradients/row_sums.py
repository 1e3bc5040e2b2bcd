"""The fact that a wrong gradient of query or key has another D, the row sum that is subtracted from dP."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any, Final

import numpy as np

from attention_service.attention.score_term import Part
from attention_service.attention.tile import Tile
from attention_service.backends.dense.library import Array
from attention_service.comparison.gradients.case import GradientCase
from attention_service.comparison.gradients.judge import GradientTruth
from attention_service.comparison.gradients.mutants.table import Wrong, is_softmax
from attention_service.comparison.gradients.terms import MOST_SCORES, WrongGradient, as_rows, has_plain_sums
from attention_service.comparison.wrong import TOLD, ends
from attention_service.schemas.compare import Fact

# Multiplications of the solution for the sums of all rows that share a key: half a second.
MOST_WORK: Final = 2**28
# By how much D is off in all rows, or in those where that is known.
FROM_TO: Final = " by {} to {}"
IN_ONE: Final = " by {} in one row and {} in another"
# Squares of singular values, of the largest one, below which sums of rows are not told apart.
RANK: Final = 1e-12


class OfRowSums(Wrong):
    """What D adds to the gradients, but for its sign, where it is `sums` (b, h, q): weights times a number of each row.

    kept: (b, h, q, k), gets the gradients of the products of query and key; None to keep none
    """

    def __init__(self, *arguments: Any, case: GradientCase, sums: np.ndarray, kept: np.ndarray | None = None) -> None:
        super().__init__(*arguments, case=case)
        self.sums, self.kept = sums, kept

    def softmax(
        self, tile: Tile, weights: Array, of_weights: Array | None, stages: Mapping[str, Array]
    ) -> tuple[Array, list[Part]]:
        """Weights times a number of each row."""
        return weights * self.sums[tile.batch, tile.heads, tile.rows][..., None], []

    def products(self, tile: Tile, gradient: Array) -> list[Part]:
        """What a tile adds to query and key."""
        if self.kept is not None:
            self.kept[tile.batch, tile.heads, tile.rows, tile.columns] = gradient
        return super().products(tile, gradient)


def other_row_sums(wrong: WrongGradient, truth: GradientTruth) -> Iterator[Fact]:
    """A gradient is right for another D: its error is weights times one number of each row."""
    case, sizes = truth.case, truth.case.plan.sizes
    is_plain = wrong.name in ("grad_query", "grad_key") and is_softmax(case) and has_plain_sums(wrong, truth)
    rows = case.group * sizes.query_length
    if not is_plain or case.cotangent is None or not wrong.rows.any():
        return
    work, scores = case.delta.size * rows**2, case.delta.size * sizes.key_length
    if wrong.name == "grad_key" and (work > MOST_WORK or scores > MOST_SCORES):
        return

    def made(sums: np.ndarray, kept: np.ndarray | None = None) -> np.ndarray:
        return as_rows(truth, wrong.name, case.run(partial(OfRowSums, case=case, sums=sums, kept=kept))[wrong.name])

    error, kept = wrong.right - wrong.actual, np.zeros(())
    if wrong.name == "grad_query":
        parts = made(np.ones(case.delta.shape)) / wrong.limits
        squares = np.vecdot(parts, parts)
        added = np.divide(np.vecdot(parts, error / wrong.limits), squares, out=squares * 0, where=squares > 0)
        unsure = np.divide(1, np.sqrt(squares), out=np.full(squares.shape, np.inf), where=squares > 0)
    else:  # each row adds to the gradients of all keys
        kept = np.zeros((*case.delta.shape, sizes.key_length))
        made(np.ones(case.delta.shape), kept)
        shape = (*error.shape[:2], rows, -1)
        weights, query = kept.reshape(shape), np.asarray(case.loaded.query).reshape(shape)
        squares = (weights @ weights.mT) * (query @ query.mT)
        inverse = np.linalg.pinv(squares, rcond=RANK, hermitian=True)
        added = (inverse @ np.vecdot(weights @ error, query)[..., None])[..., 0].reshape(case.delta.shape)
        weights = weights * wrong.limits.max(axis=-1)[..., None, :]
        inexact = inverse @ ((weights @ weights.mT) * (query @ query.mT)) @ inverse
        unsure = np.sqrt(np.abs(np.diagonal(inexact, axis1=-2, axis2=-1))).reshape(added.shape)
    predicted = wrong.right - made(added)
    larger = np.abs(predicted).max(axis=-1, keepdims=True) / np.abs(wrong.right).max(axis=-1, keepdims=True)
    known = TOLD * unsure < np.abs(added).max()
    lost = np.count_nonzero(added) * wrong.sums[3].max()
    if known.any() and wrong.agrees(predicted, wrong.limits * np.fmax(1, larger), lost):
        text = "{} is right for another D, the sum of output times its gradient in each row, which is off"
        text += ends(added[known], unsure[known], every=bool(known.all()), words=(FROM_TO, IN_ONE))
        yield wrong.fact("row_sums", text, off_by=[added.min(), added.max()])
