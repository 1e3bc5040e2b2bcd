"""One call over gRPC: it gets an id, needs a key, is counted and logged, and every failure has a status."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Any, Final

import grpc

from service.errors import Fault, InternalError, MemoryLimit, ServiceError, Unauthorized, kind_of, settle
from service.observability.metrics import DISCONNECTED, ComputedRequest, Metrics
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
    """One call, and for the metrics and the log how it was answered.

    execution: its way through the pipeline; status: over HTTP; code: of an error; computed: set by an inference
    sent: bytes of the answer
    """

    __slots__ = ("code", "computed", "context", "execution", "metadata", "request_id", "sent", "status")

    def __init__(self, context: Any, engine: Engine) -> None:
        self.context = context
        self.execution = engine.start()
        self.metadata = {name: _bytes(value) for name, value in context.invocation_metadata()}
        chosen = self.metadata.get(REQUEST_ID, b"")
        self.request_id = str(chosen, "ascii") if ACCEPTABLE.fullmatch(chosen) else new_id()
        self.status = DISCONNECTED
        self.code: str | None = None
        self.computed: ComputedRequest | None = None
        self.sent = 0

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

    def __init__(self, settings: Settings, engine: Engine, metrics: Metrics | None) -> None:
        self._engine = engine
        self._keys = Keys(settings.api_keys, settings.api_keys_file) if settings.has_keys else None
        self._metrics = metrics

    async def answer(self, path: str, operation: str, method: Method, requests: object, context: Any) -> None:
        """Answer one call of a method.

        path, operation: what was asked for, and how it is counted; requests: of a stream, of which there is only one
        """
        start = time.perf_counter()
        exchange = Exchange(context, self._engine)
        if self._metrics is not None:
            self._metrics.request_started()
        try:
            self._admit(exchange)
            message = await method(exchange)
            context.set_trailing_metadata(exchange.trailers())
            await context.write(message)  # until it is on its way: a client that is slow to take it holds its memory
            exchange.status, exchange.sent = 200, len(message)
        except ServiceError as error:
            settle(error)
            _refuse(exchange, error)
        except MemoryError as error:
            settle(error)
            _refuse(exchange, MemoryLimit.failed())
        except (asyncio.CancelledError, grpc.aio.InternalError):
            raise  # nobody is left to answer
        except Exception:
            logger.exception("request %s failed: a defect of the service", exchange.request_id)
            _refuse(exchange, InternalError())
        finally:
            exchange.execution.release()
            self._count_and_log(exchange, path, operation, time.perf_counter() - start)

    def _admit(self, exchange: Exchange) -> None:
        """Errors: Unauthorized."""
        authorization = exchange.metadata.get("authorization", b"")
        if self._keys is not None and not self._keys.admit(authorization):
            got = "another key" if authorization else "none"
            raise Unauthorized(Fault("", "metadata authorization: Bearer and a key", got))

    def _count_and_log(self, exchange: Exchange, path: str, operation: str, seconds: float) -> None:
        computed = exchange.computed
        if self._metrics is not None:
            self._metrics.request_answered("grpc", operation, exchange.status, seconds, exchange.code)
            if computed is not None:
                self._metrics.tensors_computed(computed, exchange.sent)
        if access.isEnabledFor(logging.INFO):
            fields = {
                "request_id": exchange.request_id,
                "method": "gRPC",
                "path": path[:100],
                "status": exchange.status,
                "milliseconds": round(seconds * 1e3, 2),
                "code": exchange.code,
            }
            access.info("request", extra=fields | (computed.log_fields(exchange.sent) if computed else {}))


def _refuse(exchange: Exchange, error: ServiceError) -> None:
    """Let the call end with an error."""
    kind = kind_of(error)
    text = str(error)
    exchange.context.set_trailing_metadata(exchange.trailers(error))
    exchange.context.set_code(grpc.StatusCode[STATUSES[kind.status]])
    exchange.context.set_details(text if len(text) <= MAX_DETAILS else f"{text[:MAX_DETAILS]}…")
    exchange.status, exchange.code = kind.status, kind.code


def _bytes(value: str | bytes) -> bytes:
    return value if isinstance(value, bytes) else value.encode()
