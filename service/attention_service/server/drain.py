"""Draining: after SIGTERM the server goes on to accept requests for a while, before uvicorn closes its port.

A load balancer takes a moment to notice that the service stops, and a client may send its next request on a kept
connection at any time. Until the end of the drain each of them gets a response, with `Connection: close`.
"""

from __future__ import annotations

import asyncio
import signal
import threading
from typing import Any, Final

from starlette.types import ASGIApp, Receive, Scope, Send

from attention_service.server.workers import Workers

# Seconds at the end of the drain in which no connection is accepted, so that kept ones can send their next requests.
LAST_REQUESTS: Final = 0.1
# Seconds for a connection to send its first request, if it was accepted just before: its client may be slow to begin.
FIRST_REQUEST: Final = 1.0
# Seconds between two looks at whether a client is still connected.
INTERVAL: Final = 0.02
# Seconds after its drain in which a worker waits for the others, which may get the same signal a little later.
OTHERS: Final = 0.5


class Drain:
    """Delays uvicorn's handlers: of SIGTERM by `seconds`, or until no client is connected; of SIGINT by a moment.

    It goes around the application, in whose lifespan state connections find it as `drain`. SIGINT and a
    further SIGTERM end the drain, but for the requests on connections that wait to be accepted. Requests that uvicorn
    cancels at the end close their connections.

    grpc_port: the port that is not HTTP's, if any
    """

    def __init__(self, app: ASGIApp, seconds: float, workers: Workers, *, grpc_port: int | None) -> None:
        self._app = app
        self._seconds = self._left = seconds
        self._begin = 0.0
        self._workers = workers
        self._grpc_port = grpc_port
        self._connections: set[Any] = set()
        self._draining: asyncio.Task[None] | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on; when the application starts, before it adds handlers of its own, delay the present ones."""
        if scope["type"] == "lifespan":
            scope["state"]["drain"] = self
            if self._seconds and threading.current_thread() is threading.main_thread():
                for number in (signal.SIGTERM, signal.SIGINT):
                    self._delay_handler(number, asyncio.get_running_loop())
        try:
            await self._app(scope, receive, send)
        except asyncio.CancelledError:
            if (connection := scope.get("state", {}).get("connection")) is None:
                raise
            connection.transport.abort()
            try:
                await connection.disconnected(receive)
            except asyncio.CancelledError:  # by the event loop, which ends: over TLS, uvicorn notices later
                await connection.disconnected(receive)

    @property
    def has_begun(self) -> bool:
        """True from the first signal on."""
        return self._draining is not None

    def opened(self, connection: Any) -> None:
        """A client has connected."""
        self._connections.add(connection)

    def closed(self, connection: Any) -> None:
        """The connection is lost."""
        self._connections.discard(connection)

    def _delay_handler(self, number: int, loop: asyncio.AbstractEventLoop) -> None:
        """Install a handler of the signal that drains and then calls the present handler."""
        stop = signal.getsignal(number)
        if not callable(stop):
            return

        def begin() -> None:
            if number == signal.SIGINT or self._draining is not None:
                self._left, self._begin = 0.0, loop.time()
            if self._draining is None:
                self._draining = loop.create_task(self._drain())
                self._draining.add_done_callback(lambda _: stop(number, None))
            elif self._draining.done():
                stop(number, None)

        signal.signal(number, lambda *_: loop.call_soon_threadsafe(begin))

    async def _drain(self) -> None:
        """Return when no client of any worker is connected, or after `seconds`, with no connection left in the queue.

        Workers that still accept connections would get those that this one no longer does, but it might have accepted
        one whose request is on the way: it waits for the others. The wait is in vain if only this worker stops.
        """
        loop = asyncio.get_running_loop()
        busy = bool(self._connections)
        self._begin = loop.time()

        def is_left(more: float) -> bool:
            return loop.time() < self._begin + self._left + more

        while self._connections and is_left(0):
            await asyncio.sleep(INTERVAL)
        while not self._workers.refuse_connections(self._grpc_port) and is_left(OTHERS):
            await asyncio.sleep(INTERVAL)
        await asyncio.sleep(INTERVAL)  # in which the queue is emptied
        end = loop.time() + FIRST_REQUEST
        if busy or self._connections:
            await asyncio.sleep(LAST_REQUESTS - INTERVAL)
        while not all(connection.has_begun for connection in self._connections) and loop.time() < end:
            await asyncio.sleep(INTERVAL)
