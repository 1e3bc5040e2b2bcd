"""How a computation is told to end before it is done: it looks between tiles."""

from __future__ import annotations

import time
from collections.abc import Callable

from service.errors import Fault, TimeLimit


class Abandoned(Exception):
    """Whoever asked is gone: nobody is left to answer."""


class Stop:
    """The end of one request's time, which comes sooner if its client hangs up."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._end = time.monotonic() + seconds
        self.abandoned = False
        self.on_abandon: Callable[[], object] = bool  # called once by `abandon`; nothing by default

    @property
    def left(self) -> float:
        """Seconds until the end, at least 0."""
        return max(0.0, self._end - time.monotonic())

    def abandon(self) -> None:
        """End it now, as the client has hung up."""
        self.abandoned = True
        self.on_abandon()

    def check(self) -> None:
        """Errors: Abandoned, TimeLimit."""
        if self.abandoned:
            raise Abandoned
        if time.monotonic() > self._end:
            raise TimeLimit(Fault("", f"a request that takes at most {self._seconds:g} s", "more"))
