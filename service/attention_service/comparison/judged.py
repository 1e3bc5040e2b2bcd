"""An array that was sent, judged."""

from __future__ import annotations

import math
from dataclasses import dataclass

from attention_service.schemas.compare import ArrayErrors


@dataclass(frozen=True)
class Judged:
    """One array that was sent: its errors, those of the worst legal rounding, and the baseline of its largest error."""

    errors: ArrayErrors
    baseline: ArrayErrors
    limit: float

    @property
    def ratio(self) -> float:
        """The largest error, in baselines; inf if the array is infinite or NaN where it should not be."""
        if self.errors.non_finite:
            return math.inf
        return (self.errors.max_abs or 0.0) / self.limit
