"""What the operating system knows of a socket."""

from __future__ import annotations

import errno
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


def free_port(host: str, port: int) -> int:
    """The port, if no process listens on it at any address of the host; a free one, for 0.

    Errors: OSError, also (EADDRNOTAVAIL, socket.gaierror) where the host is none of this machine's; UnicodeError for
    what is no host name.
    """
    addresses = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    refusal: OSError | None = None
    found = 0
    for family, _, _, _, (name, _, *rest) in addresses:
        try:
            with socket.create_server((name, found or port, *rest), family=family) as server:
                found = int(server.getsockname()[1])
        except OSError as error:
            if error.errno != errno.EADDRNOTAVAIL:  # of several families one may be switched off
                raise
            refusal = error
    if not found and refusal is not None:
        raise refusal
    return found
