"""Head and body of an answer leave together."""

from __future__ import annotations

import asyncio
from typing import Any, Final

HEAD: Final = b"HTTP/1.1 "


class Together:
    """A transport that keeps the head of an answer until its body comes, for a turn of the loop at most.

    uvicorn writes one after the other. Each by itself is a call of the system, and a packet that wakes the client.
    """

    __slots__ = ("_head", "_loop", "_transport")

    def __init__(self, transport: Any, loop: asyncio.AbstractEventLoop) -> None:
        self._transport = transport
        self._loop = loop
        self._head: bytes | memoryview | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def write(self, data: bytes | memoryview) -> None:
        """Send, with the head before it if that is still here; or keep what is a head."""
        head = self._head
        if head is not None:
            self._head = None
            self._transport.writelines((head, data))
        elif data[:9] == HEAD:
            self._head = data
            self._loop.call_soon(self.flush)
        else:
            self._transport.write(data)

    def flush(self) -> None:
        """Send a head that is still here."""
        head, self._head = self._head, None
        if head is not None:
            self._transport.write(head)
