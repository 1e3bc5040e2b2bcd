"""Calls over gRPC: each gets a request id, is authenticated, counted and logged, and every error has a status."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Any, Final

import grpc

from service.errors import Fault, InternalError, MemoryLimit, ServiceError, Unauthorized, drop_tracebacks, kind_of
from service.observability.metrics import DISCONNECTED, ComputedRequest, Metrics
from service.observability.request_id import ACCEPTABLE, LOWER, new_id
from service.pipeline.engine import Engine
from service.pipeline.execution import Execution
from service.settings import Settings
from service.settings.keys import Keys

# Characters of a message. It goes into trailers, of which clients take 8 KiB, encoded with up to nine for each.
MAX_DETAILS: Final = 800

REQUEST_ID: Final = str(LOWER, "ascii")
# The gRPC status of an error, by its status over HTTP.
STATUSES: Final = {
    400: "INVALID_ARGUMENT",
    401: "UNAUTHENTICATED",
    404: "NOT_FOUND",
    405: "UNIMPLEMENTED",
    406: "INVALID_ARGUMENT",
    408: "DEADLINE_EXCEEDED",
    413: "RESOURCE_EXHAUSTED",
    415: "UNIMPLEMENTED",
    422: "INVALID_ARGUMENT",
    431: "INVALID_ARGUMENT",
    500: "INTERNAL",
    503: "UNAVAILABLE",
    504: "DEADLINE_EXCEEDED",
}

access = logging.getLogger("attention.access")
logger = logging.getLogger("attention")


class Call:
    """One call. execution: what it holds; computed: set by an inference; sent: bytes of the answer"""

    __slots__ = ("computed", "context", "execution", "metadata", "request_id", "sent")

    def __init__(self, context: Any, execution: Execution) -> None:
        self.context = context
        self.execution = execution
        self.metadata = {name: _bytes(value) for name, value in context.invocation_metadata()}
        chosen = self.metadata.get(REQUEST_ID, b"")
        self.request_id = str(chosen, "ascii") if ACCEPTABLE.fullmatch(chosen) else new_id()
        self.computed: ComputedRequest | None = None
        self.sent = 0

    def trailers(self, error: ServiceError | None = None) -> list[tuple[str, str]]:
        """The trailing metadata of the answer, or of the error."""
        found = [(REQUEST_ID, self.request_id)]
        if self.execution.timings.decode:
            found.append(("server-timing", str(self.execution.timings.header(), "ascii")))
        if error is not None and "Retry-After" in error.headers:  # as gRPC's clients understand it
            found.append(("grpc-retry-pushback-ms", str(1000 * int(error.headers["Retry-After"]))))
        return found


# Takes a call and returns the message of the answer.
Method = Callable[[Call], Awaitable[bytes]]


class Calls:
    """Answers calls: authenticates, counts and logs them, and gives every error a status."""

    def __init__(self, settings: Settings, engine: Engine, metrics: Metrics | None) -> None:
        self._engine = engine
        self._keys = Keys(settings.api_keys, settings.api_keys_file) if settings.has_keys else None
        self._metrics = metrics

    async def answer(self, path: str, operation: str, method: Method, requests: object, context: Any) -> None:
        """Answer one call of a method.

        path, operation: what was asked for, and how it is counted; requests: of a stream, of which there is only one
        """
        start = time.perf_counter()
        if self._metrics is not None:
            self._metrics.request_started()
        status, problem = DISCONNECTED, None
        with self._engine.start() as execution:
            call = Call(context, execution)
            try:
                status, problem = await self._answer(call, method)
            finally:
                self._count_and_log(call, path, operation, status, problem, time.perf_counter() - start)

    async def _answer(self, call: Call, method: Method) -> tuple[int, str | None]:
        """Send the answer or the error of a call; return its status over HTTP, and the code of the error."""
        try:
            self._authenticate(call)
            message = await method(call)
            call.context.set_trailing_metadata(call.trailers())
            # Until it is on its way: a client that is slow to take it holds its memory.
            await call.context.write(message)
            call.sent = len(message)
        except ServiceError as error:
            drop_tracebacks(error)
            return _set_error(call, error)
        except MemoryError as error:
            drop_tracebacks(error)
            return _set_error(call, MemoryLimit.failed())
        except (asyncio.CancelledError, grpc.aio.InternalError):
            raise  # the client is disconnected
        except Exception:
            logger.exception("request %s failed: a defect of the service", call.request_id)
            return _set_error(call, InternalError())
        return 200, None

    def _authenticate(self, call: Call) -> None:
        """Refuse a call without a valid API key. Errors: Unauthorized."""
        authorization = call.metadata.get("authorization", b"")
        if self._keys is not None and not self._keys.admit(authorization):
            got = "another key" if authorization else "none"
            raise Unauthorized(Fault("", "metadata authorization: Bearer and a key", got))

    def _count_and_log(
        self, call: Call, path: str, operation: str, status: int, problem: str | None, seconds: float
    ) -> None:
        """Count and log a call that has been answered."""
        if self._metrics is not None:
            self._metrics.request_answered("grpc", operation, status, seconds, problem)
            if call.computed is not None:
                self._metrics.tensors_computed(call.computed, call.sent)
        if access.isEnabledFor(logging.INFO):
            fields = {
                "request_id": call.request_id,
                "method": "gRPC",
                "path": path[:100],
                "status": status,
                "milliseconds": round(seconds * 1e3, 2),
                "code": problem,
            }
            access.info("request", extra=fields | (call.computed.log_fields(call.sent) if call.computed else {}))


def _set_error(call: Call, error: ServiceError) -> tuple[int, str]:
    """End a call with an error; return its status over HTTP, and its code."""
    kind = kind_of(error)
    text = str(error)
    call.context.set_trailing_metadata(call.trailers(error))
    call.context.set_code(grpc.StatusCode[STATUSES[kind.status]])
    call.context.set_details(text if len(text) <= MAX_DETAILS else f"{text[:MAX_DETAILS]}…")
    return kind.status, kind.code


def _bytes(value: str | bytes) -> bytes:
    return value if isinstance(value, bytes) else value.encode()
