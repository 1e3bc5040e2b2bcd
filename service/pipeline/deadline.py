"""The end of a request's time, which a computation checks between tiles."""

from __future__ import annotations

import time
from collections.abc import Callable

from service.errors import Fault, TimeLimit


class Cancelled(Exception):
    """The client is disconnected, so that nobody reads the response."""


class Deadline:
    """The time limit of one request, which ends sooner if its client disconnects."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._end = time.monotonic() + seconds
        self.cancelled = False
        self.on_cancel: Callable[[], object] = bool  # called once by `cancel`; does nothing by default

    @property
    def left(self) -> float:
        """Seconds until the end, at least 0."""
        return max(0.0, self._end - time.monotonic())

    def cancel(self) -> None:
        """End it now."""
        self.cancelled = True
        self.on_cancel()

    def check(self) -> None:
        """Errors: Cancelled, TimeLimit."""
        if self.cancelled:
            raise Cancelled
        if time.monotonic() > self._end:
            raise TimeLimit(Fault("", f"a request that takes at most {self._seconds:g} s", "more"))
