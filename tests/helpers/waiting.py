"""Waits until other threads, tasks and processes fulfil a condition, never for a fixed time."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Final

import pytest

from attention_service.pipeline import deadline

# Seconds. Only a failing test waits as long, so that a busy machine changes no outcome.
TIMEOUT: Final = 240.0


def until(condition: Callable[[], object]) -> None:
    """Poll the condition until it is true. Errors: AssertionError after TIMEOUT seconds."""
    end = time.monotonic() + TIMEOUT
    while not condition():
        assert time.monotonic() < end, "the condition does not come true"
        time.sleep(0.005)


async def until_async(condition: Callable[[], object]) -> None:
    """Poll the condition until it is true, while other tasks of the event loop run. Errors: TimeoutError."""
    async with asyncio.timeout(TIMEOUT):
        while not condition():
            await asyncio.sleep(0.005)


def pass_deadlines(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the deadlines of all requests pass now, however long the requests took to get here."""
    monkeypatch.setattr(deadline, "time", SimpleNamespace(monotonic=lambda: time.monotonic() + 1e6))


async def turns(count: int = 20) -> None:
    """Run the event loop `count` times, so that all tasks proceed that wait for no timer, thread or socket."""
    for _ in range(count):
        await asyncio.sleep(0)
