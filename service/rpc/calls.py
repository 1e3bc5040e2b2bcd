"""One call over gRPC: it gets an id, needs a key, is counted and logged, and every failure has a status."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Final

import grpc

from service.errors import Fault, InternalError, MemoryLimit, ServiceError, Unauthorized, kind_of, settle
from service.observability.metrics import DISCONNECTED, Tally
from service.observability.request_id import ACCEPTABLE, LOWER, new_id
from service.pipeline.engine import Engine
from service.rpc.statuses import STATUSES
from service.settings import Settings
from service.settings.keys import Keys

# Characters of a message. It goes into trailers, of which clients take 8 KiB, encoded with up to nine for each.
MAX_DETAILS: Final = 800

REQUEST_ID: Final = str(LOWER, "ascii")

access = logging.getLogger("attention.access")
logger = logging.getLogger("attention")


class Exchange:
    """One call. execution: its way through the pipeline; noted: of an inference, for its line in the log"""

    __slots__ = ("context", "execution", "metadata", "noted", "request_id")

    def __init__(self, context: Any, engine: Engine) -> None:
        self.context = context
        self.execution = engine.start()
        self.metadata = {name: _bytes(value) for name, value in context.invocation_metadata()}
        chosen = self.metadata.get(REQUEST_ID, b"")
        self.request_id = str(chosen, "ascii") if ACCEPTABLE.fullmatch(chosen) else new_id()
        self.noted: Mapping[str, Any] = {}

    def trailers(self, error: ServiceError | None = None) -> list[tuple[str, str]]:
        """What is sent after the answer, or in its place."""
        found = [(REQUEST_ID, self.request_id)]
        if self.execution.timings.decode:
            found.append(("server-timing", str(self.execution.timings.header(), "ascii")))
        if error is not None and "Retry-After" in error.headers:  # as gRPC's clients understand it
            found.append(("grpc-retry-pushback-ms", str(1000 * int(error.headers["Retry-After"]))))
        return found


# Takes an exchange and returns the message of the answer.
Method = Callable[[Exchange], Awaitable[bytes]]


class Calls:
    """Answers calls, whatever happens inside."""

    def __init__(self, settings: Settings, engine: Engine, tally: Tally | None) -> None:
        self._engine = engine
        self._keys = Keys(settings.api_keys, settings.api_keys_file) if settings.has_keys else None
        self._tally = tally

    async def answer(self, path: str, operation: str, method: Method, requests: object, context: Any) -> None:
        """Answer one call of a method.

        path, operation: what was asked for, and how it is counted; requests: of a stream, of which there is only one
        """
        start = time.perf_counter()
        exchange = Exchange(context, self._engine)
        status, problem = DISCONNECTED, None
        if self._tally is not None:
            self._tally.in_flight += 1
        try:
            self._admit(exchange)
            message = await method(exchange)
            context.set_trailing_metadata(exchange.trailers())
            await context.write(message)  # until it is on its way: a client that is slow to take it holds its memory
            status = 200
        except ServiceError as error:
            settle(error)
            status, problem = _refuse(exchange, error)
        except MemoryError as error:
            settle(error)
            status, problem = _refuse(exchange, MemoryLimit.failed())
        except (asyncio.CancelledError, grpc.aio.InternalError):
            raise  # nobody is left to answer
        except Exception:
            logger.exception("request %s failed: a defect of the service", exchange.request_id)
            status, problem = _refuse(exchange, InternalError())
        finally:
            exchange.execution.release()
            self._note(exchange, path, operation, status, problem, time.perf_counter() - start)

    def _admit(self, exchange: Exchange) -> None:
        """Errors: Unauthorized."""
        authorization = exchange.metadata.get("authorization", b"")
        if self._keys is not None and not self._keys.admit(authorization):
            got = "another key" if authorization else "none"
            raise Unauthorized(Fault("", "metadata authorization: Bearer and a key", got))

    def _note(
        self, exchange: Exchange, path: str, operation: str, status: int, problem: str | None, seconds: float
    ) -> None:
        """Count and log a call that has been answered."""
        if self._tally is not None:
            self._tally.in_flight -= 1
            self._tally.answered(operation, status, seconds, problem, protocol="grpc")
        if access.isEnabledFor(logging.INFO):
            fields = {
                "request_id": exchange.request_id,
                "method": "gRPC",
                "path": path[:100],
                "status": status,
                "milliseconds": round(seconds * 1e3, 2),
                "code": problem,
            }
            access.info("request", extra=fields | dict(exchange.noted))


def _refuse(exchange: Exchange, error: ServiceError) -> tuple[int, str]:
    """Let the call end with an error; its status over HTTP, and its code."""
    kind = kind_of(error)
    text = str(error)
    exchange.context.set_trailing_metadata(exchange.trailers(error))
    exchange.context.set_code(grpc.StatusCode[STATUSES[kind.status]])
    exchange.context.set_details(text if len(text) <= MAX_DETAILS else f"{text[:MAX_DETAILS]}…")
    return kind.status, kind.code


def _bytes(value: str | bytes) -> bytes:
    return value if isinstance(value, bytes) else value.encode()
