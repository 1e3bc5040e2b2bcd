"""How a process that does nothing but serve is tuned."""

from __future__ import annotations

import gc
import sys

# Seconds after which a thread that computes in Python lets another run; the event loop is to have its turn soon.
SWITCH = 0.001


def tune() -> None:
    """Look for cycles less often, and never among what was there from the start: requests leave hardly any."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, 10, 10)
    sys.setswitchinterval(SWITCH)
