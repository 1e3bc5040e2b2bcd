"""An event loop whose clock jumps to the next timer whenever nothing else is to be done: timeouts without waiting."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class JumpingSelector(selectors.DefaultSelector):
    """Lets the time pass at once for which it was asked to wait. now: seconds"""

    now = 0.0

    def select(self, timeout: float | None = None) -> list[Any]:
        events: list[Any] = super().select(None if timeout is None else 0)
        if not events and timeout:
            self.now += timeout
        return events


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """Good for sockets of this process, not for threads: the loop does not wait for them."""

    def __init__(self) -> None:
        self._clock = JumpingSelector()
        super().__init__(self._clock)

    def time(self) -> float:
        return self._clock.now


def run(main: Coroutine[Any, Any, T]) -> T:
    """The result of a coroutine, in virtual time."""
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        return runner.run(main)
