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
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final, NoReturn
from uuid import uuid4

from attention_service.commands import compare, conformance, heatmap, layers, page
from attention_service.commands.terminal import CommandError, natural, reported
from attention_service.printable import printable
from attention_service.version import __version__

# Flags of `serve`: the setting that each replaces, its type, its help text.
FLAGS: Final = (
    ("host", str, "address to listen on (default: ATTENTION_HOST or 127.0.0.1)"),
    ("port", int, "port to listen on (default: ATTENTION_PORT or 8000)"),
    ("grpc_port", int, "port for gRPC (default: ATTENTION_GRPC_PORT or no gRPC)"),
    ("workers", int, "worker processes (default: ATTENTION_WORKERS or 1)"),
    (
        "threads",
        int,
        "threads of each worker that compute (default: ATTENTION_THREADS or an equal share of the processors)",
    ),
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit status: 0, 1 if it failed, or 2 for invalid arguments or settings.

    Commands that judge an answer have others: 1 if it is wrong, 2 if nothing can be said, 3 if they failed.
    """
    options = parser().parse_args(arguments)
    try:
        status = int(options.run(options))
        print(end="", flush=True)
    except CommandError as error:
        print(printable(str(error)), file=sys.stderr)
        return error.status
    except BrokenPipeError:  # as in https://docs.python.org/3/library/signal.html#note-on-sigpipe
        # Python flushes standard output once more when it exits.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OSError as error:  # of standard output, for example on a full disk: commands report those of files
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        print(printable(f"{error.filename or 'standard output'}: {error.strerror}"), file=sys.stderr)
        return 2
    return status


class Parser(argparse.ArgumentParser):
    """A parser whose errors show no control characters: an argument may be the name of a stranger's file.

    usage_status: the exit status of its errors; commands for which 2 is a result have another
    """

    usage_status = 2

    def error(self, message: str) -> NoReturn:
        """Print the usage, and the error on one line, and exit."""
        if message.endswith("expected one argument"):
            message += "; one that begins with - stands behind =, as in --layers=-2,-1"
        self.print_usage(sys.stderr)
        self.exit(self.usage_status, f"{self.prog}: error: {printable(message)}\n")

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        """The arguments. An unknown one is an error of the command that it was given to, not of the whole program."""
        found, others = super().parse_known_args(args, namespace)
        if others:
            self.error(f"unrecognized arguments: {' '.join(others)}")
        return found, others


def parser() -> argparse.ArgumentParser:
    """The parser of all subcommands and their flags."""
    top = Parser(prog="attention-service", description="Exact attention over HTTP.")
    top.add_argument("--version", action="version", version=__version__)
    commands = top.add_subparsers(required=True, metavar="COMMAND")

    def add(name: str, run: Callable[[argparse.Namespace], int], text: str, description: str | None = None) -> Any:
        command = commands.add_parser(name, help=text, description=description)
        command.set_defaults(run=run)
        return command

    serve = add(
        "serve",
        _serve,
        "run the service",
        "Run the service until SIGINT or SIGTERM. All other settings are environment variables, which "
        "`attention-service settings` prints with their defaults.",
    )
    for setting, kind, text in FLAGS:
        serve.add_argument(f"--{setting.replace('_', '-')}", type=kind, help=text)
    add(
        "health",
        _health,
        "check whether a running server accepts requests",
        "Request /health/ready of the server at ATTENTION_HOST and ATTENTION_PORT. Exit status 1 if the response is "
        "not 200.",
    )
    _add_compute(add)
    heatmap.add_commands(add)
    page.add_commands(add)
    compare.add_commands(add)
    add("openapi", _openapi, "print the OpenAPI document")
    add("key", _key, "make an API key, and its hash for ATTENTION_API_KEYS")
    settings = add("settings", _settings, "print all settings as a Markdown table")
    settings.add_argument(
        "--effective", action="store_true", help="print their values in this environment instead, without secrets"
    )
    conformance.add_commands(commands)
    layers.add_commands(commands)
    return top


def _add_compute(add: Callable[..., Any]) -> None:
    """Add the command `compute`. add: as of add_commands of other modules"""
    compute = add(
        "compute",
        _compute,
        "compute one request without a server",
        "Compute one JSON request of POST /attention or /attention/call and print its response, or one call of a "
        "recording by the flight recorder of FlashInfer: its output, logsumexp and weights. Exit status 1 if the "
        "request is not valid.",
    )
    text = "file with the request, or - for standard input; or the folder of a recording, or of one of its calls"
    compute.add_argument("request", metavar="REQUEST.json", help=text)
    compute.add_argument("--call", type=natural, metavar="N", help="which call of attention of the recording, from 0")


def _serve(options: argparse.Namespace) -> int:
    # uvicorn finishes running requests, then raises the signal again: after a graceful stop the exit status is 0.
    # Set before all imports: the first process of a container ignores SIGTERM until it has a handler.
    stopped = []

    def stop(number: int, frame: object) -> None:
        stopped.append(number)
        sys.exit(0)

    signal.signal(signal.SIGTERM, stop)
    flags = {name: value for name, _, _ in FLAGS if (value := getattr(options, name)) is not None}
    try:
        from attention_service.server.run import serve

        serve(flags, lambda: bool(stopped))
    except Exception:  # pydantic raises another in the place of SystemExit, or none
        if not stopped:
            raise
    return 0


def _key(_: argparse.Namespace) -> int:
    from attention_service.settings.keys import new_key

    print(*new_key(), sep="\n", flush=True)
    print(
        "(the key, for the client: it is not stored; and its hash, for ATTENTION_API_KEYS or its file)", file=sys.stderr
    )
    return 0


def _health(_: argparse.Namespace) -> int:
    from attention_service.runtime import health

    try:
        address = health.address(os.environ)
    except ValueError:
        raise CommandError("ATTENTION_PORT: expected a number", 2) from None
    failure = health.check(*address, encrypted=bool(os.environ.get("ATTENTION_TLS_CERTIFICATE")))
    if failure:
        raise CommandError(failure)
    return 0


def _compute(options: argparse.Namespace) -> int:
    from attention_service.codecs.table import CODECS
    from attention_service.commands.files import MAX_BYTES, holds_call
    from attention_service.pipeline.engine import Engine
    from attention_service.pipeline.execution import Execution
    from attention_service.pipeline.run import run
    from attention_service.settings import load_settings

    async def write(body: bytes) -> None:
        engine, codec = Engine(load_settings()), CODECS["application/json"]
        operation: Any = engine.call if holds_call(codec.decode(body, MAX_BYTES)) else engine.attention
        execution = Execution(engine.admission, math.inf)
        encoded = await run(engine, operation, body, codec, codec, execution, uuid4().hex)
        sys.stdout.buffer.writelines(encoded.chunks)

    with reported():
        if options.request != "-" and Path(options.request).is_dir():
            from attention_service.commands.recordings import write_computed

            write_computed(Path(options.request), options.call, sys.stdout.buffer)
        elif options.call is not None:
            raise CommandError(f"--call: expected the folder of a recording, got {options.request}", 2)
        else:
            body = sys.stdin.buffer.read() if options.request == "-" else Path(options.request).read_bytes()
            asyncio.run(write(body))
    sys.stdout.buffer.write(b"\n")
    return 0


def _openapi(_: argparse.Namespace) -> int:
    from attention_service.app import create_app
    from attention_service.settings import Settings

    # Defaults only, so that the document does not depend on the environment it is made in.
    print(json.dumps(create_app(Settings.model_construct()).openapi(), indent=2, ensure_ascii=False))
    return 0


def _settings(options: argparse.Namespace) -> int:
    from attention_service.settings import effective, load_settings, table, unknown_variables

    if options.effective:
        sys.stderr.writelines(unknown_variables(os.environ))
    print(effective(load_settings()) if options.effective else table())
    return 0
