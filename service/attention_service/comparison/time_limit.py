"""The time after which the search for mistakes ends."""

from __future__ import annotations

from time import monotonic

from attention_service.backends.base import Check


class TimeIsUp(Exception):
    """Raised by a check where the time of a comparison is over."""


def limited(check: Check, end: float | None) -> Check:
    """A check that raises what this one raises, and TimeIsUp after `end`, in seconds of `time.monotonic`."""
    if end is None:
        return check

    def check_time() -> None:
        check()
        if monotonic() > end:
            raise TimeIsUp

    return check_time
