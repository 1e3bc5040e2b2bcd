"""The command `attention-service` and its subcommands.

Each subcommand imports the modules that it needs itself: `health` runs every few seconds and must start quickly.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from uuid import uuid4

from service.version import __version__

# Flags of `serve`. Each has the name of the setting that it replaces.
FLAGS = ("host", "port", "grpc_port", "workers", "threads")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit status: 0, 1 if it failed, or 2 for invalid arguments or settings."""
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
    """The parser of all subcommands and their flags."""
    top = argparse.ArgumentParser(prog="attention-service", description="Exact attention over HTTP.")
    top.add_argument("--version", action="version", version=__version__)
    commands = top.add_subparsers(required=True, metavar="COMMAND")

    serve = commands.add_parser("serve", help="run the service", description="Run the service until SIGINT or SIGTERM.")
    serve.add_argument("--host", help="address to listen on (default: ATTENTION_HOST or 127.0.0.1)")
    serve.add_argument("--port", type=int, help="port to listen on (default: ATTENTION_PORT or 8000)")
    serve.add_argument("--grpc-port", type=int, help="port for gRPC (default: ATTENTION_GRPC_PORT or no gRPC)")
    serve.add_argument("--workers", type=int, help="worker processes (default: ATTENTION_WORKERS or 1)")
    serve.add_argument(
        "--threads",
        type=int,
        help="threads of each worker that compute (default: ATTENTION_THREADS or an equal share of the processors)",
    )
    serve.set_defaults(run=_serve)

    health = commands.add_parser(
        "health",
        help="check whether a running server accepts requests",
        description="Request /health/ready of the server at ATTENTION_HOST and ATTENTION_PORT. Exit status 1 if the "
        "response is not 200.",
    )
    health.set_defaults(run=_health)

    compute = commands.add_parser(
        "compute",
        help="compute one request without a server",
        description="Compute one JSON request and print the response of POST /attention. Exit status 1 if the request "
        "is not valid.",
    )
    compute.add_argument("request", metavar="REQUEST.json", help="file with the request, or - for standard input")
    compute.set_defaults(run=_compute)

    document = commands.add_parser("openapi", help="print the OpenAPI document")
    document.set_defaults(run=_openapi)

    key = commands.add_parser("key", help="make an API key, and its hash for ATTENTION_API_KEYS")
    key.set_defaults(run=_key)

    settings = commands.add_parser("settings", help="print all settings as a Markdown table")
    settings.set_defaults(run=_settings)
    return top


def _serve(options: argparse.Namespace) -> int:
    # uvicorn finishes running requests, then raises the signal again: after a graceful stop the exit status is 0.
    # Set before all imports: the first process of a container ignores SIGTERM until it has a handler.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(0))

    from service.server.run import serve

    serve({name: value for name in FLAGS if (value := getattr(options, name)) is not None})
    return 0


def _key(_: argparse.Namespace) -> int:
    from service.settings.keys import new_key

    key, hashed = new_key()
    print(f"key, for the client (it is not stored):      {key}\nhash, for ATTENTION_API_KEYS or its file:   {hashed}")
    return 0


def _health(_: argparse.Namespace) -> int:
    from service.runtime import health

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
    from service.pipeline.execution import Execution
    from service.pipeline.run import run
    from service.settings import load_settings

    async def write(body: bytes) -> None:
        engine, codec = Engine(load_settings()), CODECS["application/json"]
        encoded = await run(engine, body, codec, codec, Execution(engine.admission, math.inf), uuid4().hex)
        sys.stdout.buffer.writelines(encoded.chunks)

    try:
        body = sys.stdin.buffer.read() if options.request == "-" else Path(options.request).read_bytes()
    except OSError as error:
        print(f"{options.request}: {error.strerror}", file=sys.stderr)
        return 2
    try:
        asyncio.run(write(body))
    except ServiceError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
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
