"""Calls over gRPC, by the library grpcio."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import grpc
import httpx

from attention_service.codecs.oip.messages import MESSAGES, SERVICE
from tests.conftest import app, serving
from tests.helpers.messages import read


class Remote:
    """A client of a server over gRPC. http: a client of the same server over HTTP; app: the application."""

    def __init__(self, channel: grpc.Channel, http: httpx.Client, app: Any) -> None:
        self.channel = channel
        self.http = http
        self.app = app
        self.trailers: dict[str, Any] = {}

    def send(self, method: str, data: bytes = b"", **more: Any) -> bytes:
        """The bytes of the response to a request in bytes. Errors: grpc.RpcError."""
        call: Any = self.channel.unary_unary(f"/{SERVICE}/{method}")
        answer, info = call.with_call(data, timeout=more.pop("timeout", 600), **more)
        self.trailers = dict(info.trailing_metadata())
        return bytes(answer)

    def ask(self, method: str, message: Any = None, **more: Any) -> Any:
        """The response message to a request message. Errors: grpc.RpcError."""
        data = b"" if message is None else message.SerializeToString()
        return MESSAGES[f"{method}Response"].FromString(self.send(method, data, **more))

    def infer(self, message: Any, **more: Any) -> dict[str, Any]:
        """The outputs of an inference as arrays, and the message itself as `rest`."""
        return read(self.ask("ModelInfer", message, **more))

    def named(self, method: str, name: str, version: str = "") -> Any:
        """The response of a method that takes the name and version of a model."""
        prefix = "model_" * (method == "ModelInfer")
        names = {f"{prefix}name": name, f"{prefix}version": version}
        return self.ask(method, MESSAGES[f"{method}Request"](**names))


@contextmanager
def remote(credentials: grpc.ChannelCredentials | None = None, **settings: Any) -> Iterator[Remote]:
    """A client of a server with these settings and gRPC on a free port."""
    application = app(grpc_port=0, **settings)
    with serving(application) as http, connected(application.state.rpc.port, credentials) as channel:
        yield Remote(channel, http, application)


@contextmanager
def connected(port: int, credentials: grpc.ChannelCredentials | None = None) -> Iterator[grpc.Channel]:
    options = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]
    if credentials is not None:
        channel = grpc.secure_channel(f"localhost:{port}", credentials, options)
    else:
        channel = grpc.insecure_channel(f"127.0.0.1:{port}", options)
    with channel:
        yield channel
