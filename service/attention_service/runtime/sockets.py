"""The sockets of this process at a port, also those that a library keeps to itself."""

from __future__ import annotations

import ctypes
import os
import socket
import struct
from collections.abc import Iterator
from contextlib import suppress
from stat import S_ISSOCK
from typing import Final

# Socket option and program of Linux (socket(7), linux/filter.h): a filter of the packets that a socket gets. It drops
# those that ask for a connection (of the flags SYN and ACK, SYN only) and keeps all others.
SO_ATTACH_FILTER, SO_DETACH_FILTER = 26, 27
DROP_SYN: Final = (
    (0x30, 0, 0, 13),  # load the byte with the flags of the TCP header
    (0x54, 0, 0, 0x12),  # and SYN | ACK
    (0x15, 0, 1, 0x02),  # if it is SYN, the next instruction, else the one after it
    (0x06, 0, 0, 0),  # drop
    (0x06, 0, 0, 0xFFFFFFFF),  # keep
)


def sockets_at(port: int | None) -> Iterator[socket.socket]:
    """Duplicates of the sockets of this process at a port of its own: those that listen, and their connections.

    port: None for all ports
    """
    with suppress(OSError):  # a system without /dev/fd
        for name in os.listdir("/dev/fd"):
            with suppress(OSError):  # closed meanwhile, or not connected any longer
                if not S_ISSOCK(os.fstat(int(name)).st_mode):
                    continue
                with socket.socket(fileno=os.dup(int(name))) as found:
                    if found.family in (socket.AF_INET, socket.AF_INET6) and port in (None, found.getsockname()[1]):
                        yield found


def is_connected(port: int) -> bool:
    """True if this process has a connection to the port."""
    return any(not _listens(found) for found in sockets_at(port))


def refuse_connections(except_port: int | None) -> None:
    """Let nobody connect to this process, other than to a port, while connections in the queue stay. Linux only.

    Closing the socket would reset these: their clients would lose the requests that they have sent already.
    """
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *step) for step in DROP_SYN))
    program = struct.pack("HP", len(DROP_SYN), ctypes.addressof(code))
    for found in sockets_at(None):
        with suppress(OSError):  # another system, or a sandbox without filters
            if found.getsockname()[1] != except_port and _listens(found):
                found.setsockopt(socket.SOL_SOCKET, SO_ATTACH_FILTER, program)


def accept_connections() -> None:
    """Undo `refuse_connections`, also what another process did to a socket that this one shares."""
    for found in sockets_at(None):
        with suppress(OSError):  # there is no filter
            if _listens(found):
                found.setsockopt(socket.SOL_SOCKET, SO_DETACH_FILTER, 0)


def disconnect_all(port: int) -> None:
    """End all connections to the port, and listen no longer."""
    for _ in range(2):  # a connection may have been accepted before the socket that listens was shut
        for found in sockets_at(port):
            with suppress(OSError):
                found.shutdown(socket.SHUT_RDWR)


def _listens(found: socket.socket) -> bool:
    return bool(found.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))
