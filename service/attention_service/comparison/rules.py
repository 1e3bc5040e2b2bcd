"""The rules of a verdict: how far off is correct, imprecise or wrong, and what proves a mistake.

Distances are in baselines: the error that legal rounding explains.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import numpy as np

# Up to so many baselines an array is correct, up to so many imprecise, and above wrong.
CORRECT: Final = 2.0
IMPRECISE: Final = 10.0
# A mistake is proved only if the right answer is so many times further from what was sent than that of the mistake is.
PROOF: Final = 10.0
# The smallest float64: a baseline is never 0.
TINY: Final = 5e-324
# Arrays of a sample by name.
Arrays = Mapping[str, np.ndarray]


def status_of(ratio: float, *, is_weak: bool) -> str:
    """The status of what was sent: correct, imprecise, wrong or inconclusive.

    ratio: of its largest error; is_weak: True if too little of it could have been wrong to tell
    """
    if ratio > IMPRECISE:
        return "wrong"
    if ratio > CORRECT:
        return "imprecise"
    return "inconclusive" if is_weak else "correct"


def is_ten_times_closer(to_mistake: float, to_right: float) -> bool:
    """True if what was sent is ten times closer to the answer of a mistake than to the right one."""
    return to_mistake * PROOF < to_right
