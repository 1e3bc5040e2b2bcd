"""The service behind a real nginx (Debian's package nginx): one that keeps its connections, and the one of deploy/."""

from __future__ import annotations

import asyncio
import json
import subprocess
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from benchmarks.serving import free_port
from tests.attack.server import TIMEOUT, post, within
from tests.servers.servers import ROOT, SERVERS, is_ready, started

SERVICE = SERVERS[0]
BODY = {"input": [[1, 0], [0, 1]]}
# How many connections to the service the proxy keeps, each of which is used twice.
CONNECTIONS = 300
# nginx with persistent connections, as its documentation describes them (module upstream, keepalive) and ingress-nginx
# has them. Each path has one of its own, which is idle from its first request to its second.
KEEPING = """\
worker_processes 1;
daemon off;
pid nginx.pid;
error_log stderr warn;
events {{ worker_connections 1024; }}
http {{
    access_log off;
    client_body_temp_path body; proxy_temp_path proxy; fastcgi_temp_path fastcgi; scgi_temp_path scgi;
    uwsgi_temp_path uwsgi;
    keepalive_timeout 0;
    proxy_http_version 1.1;
    proxy_set_header Connection "";
    proxy_set_header Host localhost;
    {upstreams}
    server {{
        listen 127.0.0.1:{port};
        location / {{ proxy_pass http://127.0.0.1:{service}; }}
        {locations}
    }}
}}
"""
UPSTREAM = "upstream u{number} {{ server 127.0.0.1:{service}; keepalive 1; keepalive_timeout {seconds}s; }}"
LOCATION = "location = /{number}/attention {{ proxy_pass http://u{number}/attention; }}"


@contextmanager
def proxy(folder: Path, configuration: str, port: int) -> Iterator[str]:
    """The URL of an nginx that runs in the folder with this configuration, and listens at the port."""
    (folder / "nginx.conf").write_text(configuration)
    command = ["nginx", "-e", "stderr", "-p", str(folder), "-c", str(folder / "nginx.conf")]
    with subprocess.Popen(command, stderr=subprocess.PIPE) as process:
        try:
            assert within(TIMEOUT, lambda: process.poll() is not None or is_ready(port))
            assert process.poll() is None, process.stderr and process.stderr.read().decode()
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()


async def ask_twice(port: int, number: int, pause: float) -> list[int]:
    """Statuses of two POSTs that the proxy sends on one connection of its own. pause: seconds between them"""
    statuses = []
    for delay in (0, pause):
        await asyncio.sleep(delay)
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(post(json.dumps(BODY).encode(), path=f"/{number}/attention"))
        statuses.append(int((await reader.read()).split()[1]))
        writer.close()
    return statuses


async def ask_all(port: int, pauses: tuple[float, float]) -> Counter[int]:
    """Statuses of two POSTs on each connection, with pauses between them that are spread between these seconds."""
    first, last = pauses
    step = (last - first) / CONNECTIONS
    statuses = await asyncio.gather(*(ask_twice(port, number, first + number * step) for number in range(CONNECTIONS)))
    return Counter(status for both in statuses for status in both)


@pytest.mark.parametrize(
    ("settings", "seconds", "pauses"),
    [
        # The defaults of both. Within these pauses a service that closes idle connections after 5 s loses requests.
        ({}, 60, (4.97, 5.01)),
        # The proxy's time is over first, as the documentation of the setting wants it.
        ({"keep_alive": 3}, 2, (1.9, 3.1)),
    ],
)
def test_a_proxy_that_keeps_connections_loses_no_request(
    settings: dict[str, int], seconds: int, pauses: tuple[float, float], tmp_path: Path
) -> None:
    port = free_port()
    with started(SERVICE, **settings) as server:
        values = {"service": server.port, "port": port, "seconds": seconds}
        lines = (
            "\n".join(line.format(number=n, **values) for n in range(CONNECTIONS)) for line in (UPSTREAM, LOCATION)
        )
        upstreams, locations = lines
        with proxy(tmp_path, KEEPING.format(upstreams=upstreams, locations=locations, **values), port):
            assert asyncio.run(ask_all(port, pauses)) == {200: 2 * CONNECTIONS}


def test_the_proxy_of_the_compose_file_passes_requests(tmp_path: Path) -> None:
    """Its configuration as it is, but for where it and the service listen. What is said of a connection stays on it."""
    port = free_port()
    text = (ROOT / "deploy" / "nginx" / "nginx.conf").read_text()
    with started(SERVICE) as server:
        for given, wanted in {
            "listen 8080;": f"listen 127.0.0.1:{port};",
            "server replica:8000 ": f"server 127.0.0.1:{server.port} ",
            " /tmp/": f" {tmp_path}/",
            "access_log /dev/stdout requests;": "access_log off;",
        }.items():
            assert given in text
            text = text.replace(given, wanted)
        with proxy(tmp_path, "daemon off;\n" + text, port) as url, httpx.Client(base_url=url) as client:
            answers = [client.post("/attention", json=BODY) for _ in range(3)]
            assert client.get("/metrics").status_code == 404
    assert {answer.status_code for answer in answers} == {200}
    assert not any("keep-alive" in answer.headers for answer in answers)
