"""Noticing that a client disconnected while its request is at work."""

from __future__ import annotations

import asyncio
from types import TracebackType

from starlette.types import Receive

from service.pipeline.deadline import Deadline
from service.pipeline.execution import Execution


class CancelOnDisconnect:
    """Inside, the deadline of a request ends when its client disconnects. Its body must have been received whole.

    watch: False for what is done at once, so that there is nothing to end
    """

    __slots__ = ("_execution", "_receive", "_task", "_watch")

    def __init__(self, receive: Receive, execution: Execution, watch: bool = True) -> None:
        self._receive = receive
        self._execution = execution
        self._watch = watch
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> None:
        if self._watch:
            self._task = asyncio.create_task(_watch(self._receive, self._execution.deadline))

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        if self._task is not None:
            self._task.cancel()


async def _watch(receive: Receive, deadline: Deadline) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    deadline.cancel()
