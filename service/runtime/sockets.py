"""What the operating system knows of a socket."""

from __future__ import annotations

import socket
from contextlib import suppress

with suppress(ImportError):  # Windows
    import fcntl
    import termios


def undelivered_bytes(connection: socket.socket) -> int:
    """Bytes that were sent and that the other end has not acknowledged yet; 0 where the system does not tell."""
    with suppress(OSError, NameError):  # not every kind of socket tells
        return int.from_bytes(fcntl.ioctl(connection.fileno(), termios.TIOCOUTQ, bytes(4)), "little")
    return 0
