"""The server of gRPC: where it listens, what it bounds, how it starts and stops. Imports the extra grpc."""

from __future__ import annotations

import asyncio
import logging
import os
from functools import partial
from typing import Any, Final

os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # else its library logs what clients do wrong, in a form of its own

import grpc

from service.codecs.oip.messages import SERVICE
from service.observability.metrics import Metrics
from service.pipeline.engine import Engine
from service.rpc.calls import Calls
from service.rpc.inference import Inference
from service.settings import Settings

# Calls of one connection at a time: each may have 64 KiB of a message that nobody reads yet.
MAX_STREAMS: Final = 100
# Seconds after which a connection without calls is closed, and after which one makes room for another, which may come
# to another worker.
IDLE: Final = 300.0
AGE: Final = 600.0

logger = logging.getLogger("attention")


class RPC(grpc.GenericRpcHandler):
    """The protocol on a port of its own. port: where, once it is started."""

    def __init__(self, settings: Settings, engine: Engine, metrics: Metrics | None) -> None:
        self._settings = settings
        self._inference = Inference(settings, engine)
        self._calls = Calls(settings, engine, metrics)
        self._server: Any = None
        self._stopping: asyncio.Task[None] | None = None
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

    def begin_stop(self) -> None:
        """Take no new calls, and give those at work time to end."""
        if self._stopping is None:
            self._stopping = asyncio.create_task(self._server.stop(self._settings.grace))

    async def stop(self) -> None:
        """Wait until all have ended."""
        self.begin_stop()
        assert self._stopping is not None
        await self._stopping

    def service(self, handler_call_details: Any) -> Any:
        """What answers a call.

        A call is read and written by its method: gRPC would read a message of any length before anybody looks at it,
        and answer what cannot be parsed with INTERNAL. On the wire one message of a stream is one message.
        """
        path = handler_call_details.method
        name = path.removeprefix(f"/{SERVICE}/")
        method = self._inference.methods.get(name)
        operation = "other" if method is None else path
        run = partial(self._calls.answer, path, operation, method or self._inference.unknown)
        return grpc.stream_stream_rpc_method_handler(run)


def _credentials(settings: Settings) -> Any:
    certificate = settings.tls_certificate
    assert certificate is not None
    key = settings.tls_key or certificate
    return grpc.ssl_server_credentials([(key.read_bytes(), certificate.read_bytes())])


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
        # Who takes nothing from the connection does not answer a ping either.
        ("grpc.keepalive_time_ms", _milliseconds(settings.write_timeout / 2)),
        ("grpc.keepalive_timeout_ms", _milliseconds(settings.write_timeout / 2)),
    ]


def _milliseconds(seconds: float) -> int:
    return min(int(seconds * 1000), 2**31 - 1)
