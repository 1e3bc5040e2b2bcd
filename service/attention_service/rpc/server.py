"""The gRPC server: its port, its limits, start and stop. Imports the extra grpc."""

from __future__ import annotations

import asyncio
import logging
import os
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, Final

os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # else its library logs what clients do wrong, in a form of its own

import grpc

from attention_service.codecs.oip.messages import SERVICE
from attention_service.observability.metrics import Metrics
from attention_service.pipeline.engine import Engine
from attention_service.rpc.calls import STATUSES, Calls
from attention_service.rpc.inference import Inference
from attention_service.runtime.sockets import disconnect_all, is_connected
from attention_service.settings import Settings
from attention_service.settings.certificate import Certificate

if TYPE_CHECKING:  # an extra
    from attention_service.observability.tracing import Tracing

# Concurrent calls of one connection: each may buffer 64 KiB of a message before its method receives it.
MAX_STREAMS: Final = 100
# Seconds after which a connection without calls is closed, and after which any is, so that the client's next connection
# may go to another worker.
IDLE: Final = 300.0
AGE: Final = 600.0
# Seconds that calls have to end after they are cancelled.
LAST: Final = 1.0
# Seconds between two looks at whether a client is still connected.
INTERVAL: Final = 0.02

logger = logging.getLogger("attention")


class RPC(grpc.GenericRpcHandler):
    """The gRPC server on a port of its own. port: the port, once it is started"""

    def __init__(self, settings: Settings, engine: Engine, metrics: Metrics | None, tracing: Tracing | None) -> None:
        self._settings = settings
        self._inference = Inference(settings, engine)
        self._calls = Calls(settings, engine, metrics, tracing)
        self._server: Any = None
        if metrics is not None:
            metrics.start_at_0("grpc", f"/{SERVICE}/ModelInfer", STATUSES)
        self._stopping: asyncio.Task[None] | None = None
        self._drained = asyncio.Event()
        self.port = 0

    async def start(self) -> None:
        """Listen. Errors: RuntimeError where the port is taken, OSError for certificates that cannot be read."""
        settings = self._settings
        self._server = grpc.aio.server(options=_options(settings))
        self._server.add_generic_rpc_handlers((self,))
        host = f"[{settings.host}]" if ":" in settings.host else settings.host
        address = f"{host}:{settings.grpc_port}"
        if settings.tls_certificate is None:
            self.port = self._server.add_insecure_port(address)
        else:
            self.port = self._server.add_secure_port(address, _credentials(settings))
        await self._server.start()
        logger.info("gRPC running on %s:%d", host, self.port)

    def begin_stop(self, *, drain: bool = False) -> None:
        """Stop after the running calls, which have the grace period; new inferences are refused.

        drain: go on to accept inferences for a while, if a client is connected. A second call ends that while.
        """
        if self._stopping is None:
            self._stopping = asyncio.create_task(self._stop(self._settings.drain if drain else 0))
        else:
            self._drained.set()

    async def stop(self) -> None:
        """Stop, and wait until all calls have ended."""
        if self._stopping is None:
            self.begin_stop()
        assert self._stopping is not None
        await self._stopping

    async def _stop(self, drain: float) -> None:
        """Stop when all calls have ended, or the grace period has.

        While gRPC stops, it answers calls that no method got yet with CANCELLED, after which clients do not try again.
        So the connections end first: such calls end as UNAVAILABLE.
        """
        with suppress(TimeoutError):
            async with asyncio.timeout(drain):
                while not self._drained.is_set() and await asyncio.to_thread(is_connected, self.port):
                    await asyncio.sleep(INTERVAL)
        self._inference.refusing = True
        await self._calls.wait(self._settings.grace)
        disconnect_all(self.port)
        await self._server.stop(None)
        await self._calls.wait(LAST)  # asyncio would cancel what is left of them, and gRPC log a traceback

    def service(self, handler_call_details: Any) -> Any:
        """The handler of a call: a stream in both directions, so that the method itself reads and writes the message.

        As a unary call, gRPC would receive a message of any length before admission control, and answer one that cannot
        be parsed with INTERNAL. On the wire a stream of one message is the same.
        """
        path = handler_call_details.method
        free = self._inference.open_methods.get(path)
        method = free or self._inference.methods.get(path)
        operation = "other" if method is None else path
        run = partial(self._calls.answer, path, operation, method or self._inference.unknown, free is None)
        return grpc.stream_stream_rpc_method_handler(run)


def _credentials(settings: Settings) -> Any:
    certificate = settings.tls_certificate
    assert certificate is not None
    key = settings.tls_key or certificate

    def load() -> Any:
        return grpc.ssl_server_certificate_configuration([(key.read_bytes(), certificate.read_bytes())])

    files = Certificate(certificate, settings.tls_key, load)
    return grpc.dynamic_ssl_server_credentials(files.current(), files.current)


def _options(settings: Settings) -> list[tuple[str, int]]:
    """Channel arguments of gRPC's core. Times in milliseconds."""
    longest = settings.read_timeout + settings.time_limit + settings.write_timeout
    return [
        ("grpc.max_receive_message_length", min(settings.max_body_bytes, 2**31 - 1)),
        ("grpc.max_concurrent_streams", MAX_STREAMS),
        ("grpc.compression_enabled_algorithms_bitset", 1),  # none: there is no bound on what is unpacked
        ("grpc.so_reuseport", int(settings.workers > 1)),
        ("grpc.server_handshake_timeout_ms", _milliseconds(settings.read_timeout)),
        ("grpc.max_connection_idle_ms", _milliseconds(IDLE)),
        ("grpc.max_connection_age_ms", _milliseconds(AGE)),
        ("grpc.max_connection_age_grace_ms", _milliseconds(longest)),
        # A client that reads nothing from the connection does not answer a ping either.
        ("grpc.keepalive_time_ms", _milliseconds(settings.write_timeout / 2)),
        ("grpc.keepalive_timeout_ms", _milliseconds(settings.write_timeout / 2)),
    ]


def _milliseconds(seconds: float) -> int:
    return min(int(seconds * 1000), 2**31 - 1)
