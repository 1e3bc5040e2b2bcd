"""An array that was sent, judged."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from attention_service.comparison.row_errors import RowErrors
from attention_service.comparison.rules import CORRECT, IMPRECISE
from attention_service.schemas.compare import ArrayErrors


@dataclass(frozen=True, eq=False)
class Judged:
    """One array that was sent: its errors, those of the worst legal rounding, and the baseline of its largest error.

    rows: the errors of its rows; None if they are not judged
    place: (b, h, q), the rows of a local error, which coarse rounding does not explain; None if there is none
    """

    errors: ArrayErrors
    baseline: ArrayErrors
    limit: float
    rows: RowErrors | None = None
    place: np.ndarray | None = None

    @property
    def largest(self) -> float:
        """The largest error, in baselines; inf if the array is infinite or NaN where it should not be."""
        if self.errors.non_finite:
            return math.inf
        return (self.errors.max_abs or 0.0) / self.limit

    @property
    def ratio(self) -> float:
        """The largest error in baselines, or CORRECT times that of rows where these are further off than is legal."""
        of_rows = 0.0 if self.rows is None else self.rows.ratio
        return max(self.largest, min(CORRECT * of_rows, IMPRECISE) if of_rows > 1 else 0.0)

    @property
    def element_limits(self) -> np.ndarray:
        """Above which an element is wrong, for all, or (b, h, q, 1) for those of each row."""
        limit = np.array(CORRECT * self.limit)
        if self.rows is None or self.place is None:
            return limit
        of_rows = np.minimum(limit, CORRECT * np.sqrt(self.rows.legal))
        return np.where(self.place, of_rows, limit)[..., None]
