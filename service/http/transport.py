"""Head and body of an answer leave together."""

from __future__ import annotations

from typing import Any, Final

HEAD: Final = b"HTTP/1.1 "
CONTINUE: Final = b"HTTP/1.1 100"


class Together:
    """A transport that keeps the head of an answer until its body comes, or there is none.

    uvicorn writes one after the other. Each by itself is a call of the system, and a packet that wakes the client.
    ASGI has servers wait so with the head.
    """

    __slots__ = ("_head", "_transport")

    def __init__(self, transport: Any) -> None:
        self._transport = transport
        self._head: bytes | memoryview | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def write(self, data: bytes | memoryview) -> None:
        """Send, with the head before it if that is still here; or keep what is a head."""
        head = self._head
        if head is not None:
            self._head = None
            self._transport.writelines((head, data))
        elif data[:9] == HEAD and data[:12] != CONTINUE:
            self._head = data
        else:
            self._transport.write(data)

    def flush(self) -> None:
        """Send a head that is still here: nothing follows."""
        head = self._head
        if head is not None:
            self._head = None
            self._transport.write(head)
