"""How a process that does nothing but serve is tuned."""

from __future__ import annotations

import gc


def spare_garbage_collection() -> None:
    """Look for cycles less often, and never among what was there from the start: requests leave hardly any."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, 10, 10)
