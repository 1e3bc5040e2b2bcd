"""An event loop whose clock jumps to the next timer when no event is pending, so that timeouts take no time."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class JumpingSelector(selectors.DefaultSelector):
    """Advances its clock instead of waiting. now: seconds of virtual time"""

    now = 0.0

    def select(self, timeout: float | None = None) -> list[Any]:
        events: list[Any] = super().select(None if timeout is None else 0)
        if not events and timeout:
            self.now += timeout
        return events


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """An event loop in virtual time, for sockets of this process only: it does not wait for threads."""

    def __init__(self) -> None:
        self._clock = JumpingSelector()
        super().__init__(self._clock)

    def time(self) -> float:
        return self._clock.now


def run(main: Coroutine[Any, Any, T]) -> T:
    """The result of a coroutine, in virtual time."""
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        return runner.run(main)
