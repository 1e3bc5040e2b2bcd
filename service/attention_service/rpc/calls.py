"""Calls over gRPC: each gets a request id, is authenticated, counted and logged, and every error has a status."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import unquote

import grpc

from attention_service.errors import (
    InternalError,
    MemoryLimit,
    ServiceError,
    Unauthorized,
    drop_tracebacks,
)
from attention_service.observability.metrics import Metrics
from attention_service.observability.requests import (
    DISCONNECTED,
    REQUEST_ID,
    TRACEPARENT,
    RequestRecord,
    choose_request_id,
    find_trace_id,
)
from attention_service.pipeline.engine import Engine
from attention_service.pipeline.execution import Execution
from attention_service.settings import Settings
from attention_service.settings.keys import Keys

if TYPE_CHECKING:  # an extra
    from attention_service.observability.tracing import Tracing

# Characters of an error message. It is sent in the trailers, percent-encoded with up to nine bytes a character, and
# clients accept 8 KiB of trailers.
MAX_DETAILS: Final = 800

HEADER: Final = str(REQUEST_ID, "ascii")
# The gRPC status of an answer, by its status over HTTP.
STATUSES: Final = {
    200: "OK",
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
    DISCONNECTED: "CANCELLED",
    500: "INTERNAL",
    503: "UNAVAILABLE",
    504: "DEADLINE_EXCEEDED",
}

logger = logging.getLogger("attention")


class Call:
    """One call. execution: what it holds; record: what metrics and log tell of it"""

    def __init__(self, context: Any, execution: Execution, path: str) -> None:
        self.context = context
        self.execution = execution
        self.metadata: dict[str, bytes] = {
            name: value if isinstance(value, bytes) else value.encode() for name, value in context.invocation_metadata()
        }
        request_id = choose_request_id(self.metadata.get(HEADER))
        trace_id = find_trace_id(self.metadata.get(TRACEPARENT.decode()))
        self.record = RequestRecord(
            "grpc", "gRPC", path, request_id, _address(context.peer()), trace_id=trace_id, timings=execution.timings
        )

    def trailers(self, error: ServiceError | None = None) -> list[tuple[str, str]]:
        """The trailing metadata of the answer, or of the error."""
        found = [(HEADER, self.record.request_id)]
        if self.execution.timings.decode:
            found.append(("server-timing", self.execution.timings.header()))
        if error is not None and "Retry-After" in error.headers:  # as gRPC's clients understand it
            found.append(("grpc-retry-pushback-ms", str(1000 * int(error.headers["Retry-After"]))))
        return found


# Takes a call and returns the message of the answer.
Method = Callable[[Call], Awaitable[bytes]]


class Calls:
    """Answers calls: authenticates, counts, logs and traces them, and gives every error a status."""

    def __init__(self, settings: Settings, engine: Engine, metrics: Metrics | None, tracing: Tracing | None) -> None:
        self._engine = engine
        self._keys = Keys(settings.api_keys, settings.api_keys_file) if settings.has_keys else None
        self._metrics = metrics
        self._tracing = tracing
        self._running: set[asyncio.Task[Any]] = set()

    async def answer(
        self, path: str, operation: str, method: Method, needs_key: bool, requests: object, context: Any
    ) -> None:
        """Answer one call of a method.

        path: the method as the client named it; operation: its label in the metrics; needs_key: if there are keys
        requests: the stream of messages, unused, as `context.read()` receives the only one
        """
        call = Call(context, self._engine.start(), path)
        call.record.operation = operation
        if self._metrics is not None:
            self._metrics.in_flight += 1
        task = asyncio.current_task()
        assert task is not None
        self._running.add(task)
        task.add_done_callback(self._running.discard)  # only then has gRPC sent the status
        with call.execution.lease:
            try:
                await self._answer(call, method, needs_key)
            finally:
                if self._metrics is not None:
                    self._metrics.request_answered(call.record)
                if self._tracing is not None:
                    self._tracing.grpc_answered(call.record, call.metadata, STATUSES[call.record.status])
                call.record.log()

    async def wait(self, seconds: float) -> None:
        """Return when the calls that run now have ended, or after that time."""
        if self._running:
            await asyncio.wait(self._running, timeout=seconds)

    async def _answer(self, call: Call, method: Method, needs_key: bool) -> None:
        """Send the answer or the error of a call."""
        try:
            if needs_key:
                self._authenticate(call)
            message = await method(call)
            call.context.set_trailing_metadata(call.trailers())
            # Until it is on its way: a client that is slow to take it holds its memory.
            await call.context.write(message)
            call.record.status, call.record.sent = 200, len(message)
        except ServiceError as error:
            drop_tracebacks(error)
            _set_error(call, error)
        except MemoryError as error:
            drop_tracebacks(error)
            _set_error(call, MemoryLimit.failed())
        except (asyncio.CancelledError, grpc.aio.InternalError):
            raise  # the client is disconnected
        except Exception:
            logger.exception("request %s failed: a defect of the service", call.record.request_id)
            _set_error(call, InternalError())

    def _authenticate(self, call: Call) -> None:
        """Refuse a call without a valid API key. Errors: Unauthorized."""
        authorization = call.metadata.get("authorization", b"")
        if self._keys is None:
            return
        name = self._keys.find(authorization)
        if name is None:
            got = "another key" if authorization else "none"
            raise Unauthorized.at("", "metadata authorization: Bearer and a key", got)
        call.record.key = name


def _set_error(call: Call, error: ServiceError) -> None:
    """End a call with an error."""
    text = str(error)
    call.context.set_trailing_metadata(call.trailers(error))
    call.context.set_code(grpc.StatusCode[STATUSES[error.status]])
    call.context.set_details(text if len(text) <= MAX_DETAILS else f"{text[:MAX_DETAILS]}…")
    call.record.status, call.record.code = error.status, error.code


def _address(peer: str) -> str:
    """The address in gRPC's name of a peer: `ipv4:10.0.0.7:50312`, or `ipv6:%5B::1%5D:50312`."""
    return unquote(peer).partition(":")[2].rpartition(":")[0].strip("[]")
