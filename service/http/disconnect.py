"""Noticing that a client hung up while its request is at work."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from starlette.types import Receive

from service.stop import Stop


@asynccontextmanager
async def watching(receive: Receive, stop: Stop) -> AsyncIterator[None]:
    """Inside, a client that hangs up abandons the work. The body has been read, so that nothing else can come."""
    task = asyncio.create_task(_watch(receive, stop))
    try:
        yield
    finally:
        task.cancel()


async def _watch(receive: Receive, stop: Stop) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    stop.abandon()
