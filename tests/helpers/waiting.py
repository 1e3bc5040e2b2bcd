"""Waiting for what other threads, tasks and processes do: by a condition, never for a length of time."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Final

# Seconds. Only a test that fails waits as long, so that a busy machine changes no outcome.
PATIENCE: Final = 240.0


def until(condition: Callable[[], object]) -> None:
    """Return when the condition is true, which is asked again and again. Errors: AssertionError after PATIENCE."""
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end, "the condition does not come true"
        time.sleep(0.005)


async def until_async(condition: Callable[[], object]) -> None:
    """The same, while the tasks of the event loop go on."""
    async with asyncio.timeout(PATIENCE):
        while not condition():
            await asyncio.sleep(0.005)


async def turns(count: int = 20) -> None:
    """Let every task of the event loop go as far as it can without time, threads or sockets."""
    for _ in range(count):
        await asyncio.sleep(0)
