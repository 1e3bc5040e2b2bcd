"""Run the application with uvicorn, in one process or several."""

from __future__ import annotations

import errno
import logging
import os
import socket
import ssl
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from ipaddress import ip_address
from logging.config import dictConfig
from math import inf
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import uvicorn
from fastapi import FastAPI
from pydantic import ByteSize
from uvicorn.config import HTTP_PROTOCOLS
from uvicorn.importer import import_from_string

from attention_service.app import create_app, from_environment, grpc_server, tracing
from attention_service.http.head import MAX_HEAD
from attention_service.observability.logs import log_config
from attention_service.observability.metrics import remove_stale_files
from attention_service.pipeline.decode import oversized_body
from attention_service.runtime.machine import memory_limit, memory_total
from attention_service.runtime.process import tune
from attention_service.server.drain import Drain
from attention_service.server.protocol import LimitedProtocol, Limits
from attention_service.server.supervisor import Supervisor
from attention_service.server.tls import renewing_context
from attention_service.server.workers import Workers
from attention_service.settings import Settings, load_settings, unknown_variables
from attention_service.version import __version__

logger = logging.getLogger("attention")

# Connections of a process up to which idle ones are kept: they take 25 MB, over TLS 110 MB.
MOST_KEPT: Final = 2048
# File descriptors that connections leave free, for modules and files that are read when they are asked for.
FOR_FILES: Final = 32
# Seconds that a worker may leave the process that started it without an answer, as it does while it imports modules.
# With uvicorn's five seconds, workers of a slow or busy machine are replaced before they have started, again and again.
# A worker that is killed is replaced within a second, also while it is asked: see Supervisor.
SILENCE: Final = 60
# The variable with the folder that only the workers of this service have.
FOLDER: Final = "ATTENTION_WORKERS_FOLDER"


def serve(flags: Mapping[str, Any], is_stopped: Callable[[], bool] = lambda: False) -> None:
    """Run the service until it is stopped.

    flags: settings that replace those of the environment; is_stopped: True once it was stopped before it ran

    Errors: SystemExit with status 2, after one line on standard error, for a wrong setting or a port that is taken.
    """
    sys.stderr.writelines(unknown_variables(os.environ))
    settings = load_settings(**flags)
    check_port("PORT", settings.host, settings.port)
    flags = dict(flags)
    if not settings.allowed_hosts and is_loopback(settings.host):
        # Addresses of this machine always are.
        flags["allowed_hosts"] = "localhost" if ":" in settings.host else settings.host
        settings = load_settings(**flags)
    if settings.grpc_port is not None:
        grpc_server()  # fail now if the extra is missing: uvicorn would start failing workers again and again
        flags["grpc_port"] = grpc_port(settings)
        settings = load_settings(**flags)
    if settings.tracing:
        tracing()  # likewise
    if settings.metrics_folder is not None:
        remove_stale_files(settings.metrics_folder)
    dictConfig(log_config(settings))  # as uvicorn will do, which logs nothing before
    log_start(settings)
    options = uvicorn_options(settings)
    if settings.workers == 1:
        app = create_app(settings)
        tune()
        if not is_stopped():
            uvicorn.run(served(app, Workers(None)), **options)
        return
    if settings.backend == "ray" and not settings.ray_address:
        flags["ray_address"] = start_ray(settings)
    # Each worker loads its settings from the environment.
    os.environ.update({f"ATTENTION_{name.upper()}": str(value) for name, value in flags.items()})
    with TemporaryDirectory(prefix="attention-") as folder:
        os.environ.setdefault("ATTENTION_METRICS_FOLDER", folder)
        os.environ[FOLDER] = folder
        factory = "attention_service.server.run:worker"
        supervisor = Supervisor(uvicorn.Config(factory, factory=True, workers=settings.workers, **options))
        if not is_stopped():
            supervisor.run()


def log_start(settings: Settings) -> None:
    """Log what the service starts with, and warn of a memory budget that the machine cannot have."""
    keys = "on" if settings.has_keys else "off"
    fields = {"version": __version__, "keys": keys, "threads": settings.compute_threads}
    names = ("backend", "workers", "memory_limit")
    logger.info("starting", extra=fields | {name: getattr(settings, name) for name in names})
    most = memory_limit() or memory_total()
    if most is not None and settings.memory_limit > most:
        text = "ATTENTION_MEMORY_LIMIT (%s) is above the memory of this machine or container (%s)"
        logger.warning(text, settings.memory_limit.human_readable(), ByteSize(most).human_readable())
    if warning := oversized_body(settings):
        logger.warning(warning)


def start_ray(settings: Settings) -> str:
    """Start the cluster that all workers share, and return its address. It ends with this process."""
    from attention_service.backends.ray.cluster import start

    return start(settings.workers * settings.compute_threads)


def is_loopback(host: str) -> bool:
    """True if all addresses of a host are those of this machine that no other machine reaches."""
    found = {str(address[0]) for *_, address in socket.getaddrinfo(host, None)}
    return all(ip_address(address.partition("%")[0]).is_loopback for address in found)


def worker() -> Drain:
    """The application of one of several workers."""
    return served(from_environment(), Workers(Path(os.environ[FOLDER])))


def served(app: FastAPI, workers: Workers) -> Drain:
    """The application with what only this server adds around it."""
    settings: Settings = app.state.settings
    return Drain(app, settings.drain, workers, grpc_port=settings.grpc_port)


def uvicorn_options(settings: Settings) -> dict[str, Any]:
    """The arguments of `uvicorn.run`, other than the application."""
    write, write_rate = settings.write_timeout, settings.read_rate
    descriptors = most_descriptors()
    limits = Limits(
        settings.keep_alive,
        settings.read_timeout,
        MAX_HEAD,
        write,
        write_rate,
        connections=int(min(MOST_KEPT, descriptors / 2)),
        descriptors=descriptors - min(FOR_FILES, descriptors / 4),
    )
    return {
        "host": settings.host,
        "port": settings.port,
        "log_level": settings.log_level,
        "log_config": log_config(settings),
        "access_log": False,  # Entry logs requests
        "ssl_certfile": settings.tls_certificate,
        "ssl_keyfile": settings.tls_key,
        "ssl_context_factory": tls_context(settings),
        "http": partial(LimitedProtocol, import_from_string(HTTP_PROTOCOLS[settings.http_parser]), limits),
        "ws": "none",
        "h11_max_incomplete_event_size": MAX_HEAD,
        "timeout_keep_alive": settings.keep_alive,
        "timeout_graceful_shutdown": settings.grace,
        "timeout_worker_healthcheck": SILENCE,
        "server_header": False,
        "proxy_headers": True,  # of the proxies in FORWARDED_ALLOW_IPS, which uvicorn reads
    }


def most_descriptors() -> float:
    """How many files and connections a process may have open (`ulimit -n`)."""
    with suppress(ImportError):  # Windows
        import resource

        descriptors, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        return descriptors if descriptors != resource.RLIM_INFINITY else inf
    return inf


def tls_context(settings: Settings) -> Callable[..., ssl.SSLContext] | None:
    """The function that makes uvicorn's TLS context; None without TLS."""
    if settings.tls_certificate is None:
        return None
    return partial(renewing_context, settings.tls_certificate, settings.tls_key)


def grpc_port(settings: Settings) -> int:
    """The port for gRPC, chosen and checked once for all workers.

    gRPC itself would not refuse a port that another process uses, but share it.
    """
    port = settings.grpc_port or 0
    if port and port == settings.port:
        print(f"ATTENTION_GRPC_PORT: {settings.host}:{port}: HTTP has it", file=sys.stderr)
        sys.exit(2)
    return check_port("GRPC_PORT", settings.host, port)


def check_port(name: str, host: str, port: int) -> int:
    """The port, or a free one for 0. Exits with one line on standard error if the service cannot listen there.

    name: of the setting, without its prefix
    """
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


def free_port(host: str, port: int) -> int:
    """The port, if no process listens on it at any address of the host; a free one, for 0.

    Errors: OSError, also (EADDRNOTAVAIL, socket.gaierror) where the host is none of this machine's; UnicodeError for
    what is no host name.
    """
    addresses = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    refusal: OSError | None = None
    found = 0
    for family, _, _, _, (name, _, *rest) in addresses:
        try:
            with socket.create_server((name, found or port, *rest), family=family) as server:
                found = int(server.getsockname()[1])
        except OSError as error:
            if error.errno != errno.EADDRNOTAVAIL:  # of several families one may be switched off
                raise
            refusal = error
    if not found and refusal is not None:
        raise refusal
    return found
