"""nginx in front of the servers, as a proxy that keeps its connections and adds X-Request-ID."""

from __future__ import annotations

import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Final

from benchmarks.serving import NotStarted, Running, free_port
from benchmarks.table import Server

NGINX: Final = shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin")
MISSING: Final = "nginx is not installed (Debian package nginx)"
START_SECONDS: Final = 10.0
# What every configuration has, with what stands in `http`.
FRAME: Final = """\
worker_processes 1;
daemon off;
pid nginx.pid;
error_log stderr warn;
events {{ worker_connections 1024; }}
http {{
    access_log off;
    client_body_temp_path body; proxy_temp_path proxy; fastcgi_temp_path fastcgi; scgi_temp_path scgi;
    uwsgi_temp_path uwsgi;
    proxy_http_version 1.1;
    proxy_set_header Connection "";
    {http}
}}
"""
HEADERS: Final = """
    keepalive_requests 1000000000;
    proxy_set_header Host $host;
    proxy_set_header X-Request-ID $request_id;
    proxy_set_header X-Forwarded-For $remote_addr;
    proxy_set_header X-Forwarded-Proto $scheme;
"""
# It connects anew where a connection was idle: uvicorn closes one after 5 s, while others are measured.
SERVER: Final = """
    upstream u{service} {{
        server 127.0.0.1:{service}; keepalive 64; keepalive_timeout 2s; keepalive_requests 1000000000;
    }}
    server {{ listen 127.0.0.1:{port}; location / {{ proxy_pass http://u{service}; }} }}
"""


@contextmanager
def proxied(servers: Mapping[Server, Running]) -> Iterator[dict[Server, Running]]:
    """Run one nginx: yield each server with the port of nginx that leads to it; none where nginx is not installed.

    Errors: NotStarted.
    """
    if NGINX is None:
        yield {}
        return
    behind = {server: replace(running, port=free_port()) for server, running in servers.items()}
    parts = (SERVER.format(service=servers[server].port, port=running.port) for server, running in behind.items())
    ports = [running.port for running in behind.values()]
    configuration = FRAME.format(http=HEADERS + "".join(parts))
    with tempfile.TemporaryDirectory() as folder, nginx(Path(folder), configuration, *ports):
        yield behind


@contextmanager
def nginx(folder: Path, configuration: str, *ports: int) -> Iterator[None]:
    """Run nginx in a folder with this configuration, once it takes connections at the ports. Errors: NotStarted."""
    assert NGINX is not None, MISSING
    path = folder / "nginx.conf"
    path.write_text(configuration)
    with subprocess.Popen([NGINX, "-e", "stderr", "-p", folder, "-c", path], stderr=subprocess.PIPE) as process:
        try:
            _wait(process, ports)
            yield
        finally:
            process.terminate()


def _wait(process: subprocess.Popen[bytes], ports: Sequence[int]) -> None:
    """Return once all ports take connections. Errors: NotStarted."""
    end = time.monotonic() + START_SECONDS
    for port in ports:
        while True:
            if process.poll() is not None or time.monotonic() > end:
                process.terminate()
                assert process.stderr is not None
                raise NotStarted(f"nginx: {process.stderr.read().decode(errors='replace')}")
            try:
                socket.create_connection(("127.0.0.1", port), 1).close()
                break
            except OSError:
                time.sleep(0.05)
