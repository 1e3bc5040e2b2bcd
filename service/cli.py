"""The command line: serve, ask a server for its health, compute without one, print the API document and the settings.

Each command imports what it runs: `health` runs every few seconds and is to cost next to nothing.
"""

from __future__ import annotations

import argparse
import errno
import json
import os
import signal
import socket
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from service.version import __version__

if TYPE_CHECKING:
    from service.settings import Settings

# Seconds that a connection may stay open without a request.
KEEP_ALIVE = 5
# Flags of serve that stand for a setting of the same name.
FLAGS = ("host", "port", "grpc_port", "workers", "threads")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status: 0, or 1 for a request that is wrong, or 2 for wrong usage."""
    options = parser().parse_args(arguments)
    try:
        status = int(options.run(options))
        print(end="", flush=True)
    except BrokenPipeError:  # as in https://docs.python.org/3/library/signal.html#note-on-sigpipe
        # Python flushes standard output once more when it exits.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    return status


def parser() -> argparse.ArgumentParser:
    """All commands and flags."""
    top = argparse.ArgumentParser(prog="attention-service", description="Exact attention over HTTP.")
    top.add_argument("--version", action="version", version=__version__)
    commands = top.add_subparsers(required=True, metavar="COMMAND")

    serve = commands.add_parser("serve", help="run the service", description="Run the service until it is stopped.")
    serve.add_argument("--host", help="address to listen on (default: ATTENTION_HOST, else 127.0.0.1)")
    serve.add_argument("--port", type=int, help="port to listen on (default: ATTENTION_PORT, else 8000)")
    serve.add_argument("--grpc-port", type=int, help="port for gRPC (default: ATTENTION_GRPC_PORT, else none)")
    serve.add_argument("--workers", type=int, help="processes that answer (default: ATTENTION_WORKERS, else 1)")
    serve.add_argument("--threads", type=int, help="threads of each (default: ATTENTION_THREADS, else as many as fit)")
    serve.set_defaults(run=_serve)

    health = commands.add_parser(
        "health",
        help="ask a running server whether it takes requests",
        description="Ask the server at ATTENTION_HOST and ATTENTION_PORT for /health/ready. Exit status 1 if it does "
        "not answer 200.",
    )
    health.set_defaults(run=_health)

    compute = commands.add_parser(
        "compute",
        help="answer one request without a server",
        description="Answer one JSON request as POST /attention would. Exit status 1 if the request is wrong.",
    )
    compute.add_argument("request", metavar="REQUEST.json", help="the request's file, or - for standard input")
    compute.set_defaults(run=_compute)

    document = commands.add_parser("openapi", help="print the OpenAPI document")
    document.set_defaults(run=_openapi)

    key = commands.add_parser("key", help="make a key, and its hash for ATTENTION_API_KEYS")
    key.set_defaults(run=_key)

    settings = commands.add_parser("settings", help="print all settings, as a Markdown table")
    settings.set_defaults(run=_settings)
    return top


def _serve(options: argparse.Namespace) -> int:
    # uvicorn finishes what runs, then raises the signal again: being asked to stop, and having stopped, is success.
    # Before all imports, as the first process of a container has no other way to be stopped while they run.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(0))

    from service.settings import load_settings

    flags = {name: getattr(options, name) for name in FLAGS if getattr(options, name) is not None}
    settings = load_settings(**flags)
    _check_port("PORT", settings.host, settings.port)

    import uvicorn

    from service.app import create_app, grpc_server
    from service.http.connection import ReportProgress
    from service.process import tune

    if settings.grpc_port is not None:
        grpc_server()  # before workers are started, which would be again and again
        flags["grpc_port"] = _port_for_grpc(settings)
        settings = load_settings(**flags)
    run: Callable[..., None] = partial(uvicorn.run, **uvicorn_options(settings))
    if settings.workers == 1:
        app = create_app(settings)
        tune()
        run(ReportProgress(app))
    else:  # each worker makes its own, from the environment, where the flags go for it
        os.environ.update({f"ATTENTION_{name.upper()}": str(value) for name, value in flags.items()})
        from tempfile import TemporaryDirectory

        with TemporaryDirectory(prefix="attention-") as folder:
            os.environ.setdefault("ATTENTION_METRICS_FOLDER", folder)
            run("service.app:worker", factory=True, workers=settings.workers)
    return 0


def uvicorn_options(settings: Settings) -> dict[str, Any]:
    """The arguments of `uvicorn.run`, other than the application."""
    from uvicorn.config import HTTP_PROTOCOLS
    from uvicorn.importer import import_from_string

    from service.http.head import MAX_HEAD
    from service.logs import log_config
    from service.server.protocol import LimitedProtocol, Limits

    limits = Limits(KEEP_ALIVE, settings.read_timeout, MAX_HEAD, settings.write_timeout)
    return {
        "host": settings.host,
        "port": settings.port,
        "log_level": settings.log_level,
        "log_config": log_config(settings),
        "access_log": False,  # requests are logged by the service
        "ssl_certfile": settings.tls_certificate,
        "ssl_keyfile": settings.tls_key,
        "http": partial(LimitedProtocol, import_from_string(HTTP_PROTOCOLS[settings.http_parser]), limits),
        "ws": "none",
        "h11_max_incomplete_event_size": MAX_HEAD,
        "timeout_keep_alive": KEEP_ALIVE,
        "timeout_graceful_shutdown": settings.grace,
        "server_header": False,
        "proxy_headers": False,  # nothing asks for the client's address
    }


def _port_for_grpc(settings: Settings) -> int:
    """The port for gRPC: one for all workers, and free, as several would share it with whoever has it."""
    port = settings.grpc_port or 0
    if port and port == settings.port:
        print(f"ATTENTION_GRPC_PORT: {settings.host}:{port}: HTTP has it", file=sys.stderr)
        sys.exit(2)
    return _check_port("GRPC_PORT", settings.host, port)


def _check_port(name: str, host: str, port: int) -> int:
    """The port, or a free one for 0. Exits with one line if the service cannot listen there."""
    from service.process import free_port

    try:
        return free_port(host, port)
    except (socket.gaierror, UnicodeError) as error:
        line = f"ATTENTION_HOST: {host}: {error.strerror if isinstance(error, OSError) else 'no host has this name'}"
    except OSError as error:
        reason = os.strerror(error.errno or 0)
        at_host = error.errno == errno.EADDRNOTAVAIL
        line = f"ATTENTION_HOST: {host}: {reason}" if at_host else f"ATTENTION_{name}: {host}:{port}: {reason}"
    print(line, file=sys.stderr)
    sys.exit(2)


def _key(_: argparse.Namespace) -> int:
    from service.http.auth import new_key

    key, hashed = new_key()
    print(f"key, for the caller, kept nowhere else: {key}\nhash, for ATTENTION_API_KEYS or its file:  {hashed}")
    return 0


def _health(_: argparse.Namespace) -> int:
    from service import health

    try:
        address = health.address(os.environ)
    except ValueError:
        print("ATTENTION_PORT: expected a number", file=sys.stderr)
        return 2
    failure = health.check(*address, encrypted=bool(os.environ.get("ATTENTION_TLS_CERTIFICATE")))
    if failure:
        print(failure, file=sys.stderr)
    return 1 if failure else 0


def _compute(options: argparse.Namespace) -> int:
    from service.codecs import CODECS
    from service.errors import ServiceError
    from service.pipeline.engine import Engine
    from service.pipeline.preparation import prepare
    from service.schemas.request import AttentionRequest
    from service.schemas.response import answer
    from service.settings import load_settings

    codec = CODECS["application/json"]
    try:
        body = sys.stdin.buffer.read() if options.request == "-" else Path(options.request).read_bytes()
    except OSError as error:
        print(f"{options.request}: {error.strerror}", file=sys.stderr)
        return 2
    try:
        prepared = prepare(AttentionRequest, codec.decode(body, len(body)))
        result = Engine(load_settings()).compute(prepared)
    except ServiceError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    fields = answer(prepared.spec, result, uuid4().hex)
    sys.stdout.buffer.writelines(codec.encode(fields, base64=prepared.body.encoding == "base64").chunks)
    sys.stdout.buffer.write(b"\n")
    return 0


def _openapi(_: argparse.Namespace) -> int:
    from service.app import create_app
    from service.settings import Settings

    # Defaults only, so that the document does not depend on the environment it is made in.
    print(json.dumps(create_app(Settings.model_construct()).openapi(), indent=2, ensure_ascii=False))
    return 0


def _settings(_: argparse.Namespace) -> int:
    from service.settings import table

    print(table())
    return 0
