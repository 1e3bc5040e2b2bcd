"""The deadline and cancellation flag of a request. Computations check both between tiles."""

from __future__ import annotations

import asyncio
import time
from typing import Any, TypeVar

from attention_service.errors import TimeLimit

T = TypeVar("T")


class Cancelled(Exception):
    """Raised when a request is cancelled because its client is disconnected."""


class Deadline:
    """The time limit of one request, in seconds from now, and whether it was cancelled, as its client disconnected."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self.cancelled = False
        self._waits_for: asyncio.Future[Any] | None = None
        self.restart()

    def restart(self, used: float = 0.0) -> None:
        """Start the time limit anew: the time that a client takes to send its body does not count.

        used: seconds of the limit that are over already
        """
        self._end = time.monotonic() + self._seconds - used

    @property
    def left(self) -> float:
        """Seconds until the end, at least 0."""
        return max(0.0, self._end - time.monotonic())

    def cancel(self) -> None:
        """Mark the request as cancelled: what it waits for ends now, a computation at its next `check`."""
        self.cancelled = True
        if self._waits_for is not None:
            self._waits_for.cancel()

    async def wait(self, future: asyncio.Future[T]) -> T:
        """The result of a future, which `cancel` cancels. Errors: those of the future; Cancelled."""
        self._waits_for = future
        try:
            return await future
        except asyncio.CancelledError:
            if self.cancelled:
                raise Cancelled from None
            raise
        finally:
            self._waits_for = None

    def check(self) -> None:
        """Raise if the request has ended. Errors: Cancelled, TimeLimit."""
        if self.cancelled:
            raise Cancelled
        if time.monotonic() > self._end:
            raise TimeLimit.at("", f"a request that takes at most {self._seconds:g} s", "more")
