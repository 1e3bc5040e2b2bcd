"""The service behind a real nginx (Debian's package nginx): one that keeps its connections, and the one of deploy/."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from pathlib import Path

import httpx
import pytest

from benchmarks.nginx import FRAME, nginx
from benchmarks.serving import free_port
from tests.attack.server import post
from tests.servers.servers import ROOT, SERVERS, started

SERVICE = SERVERS[0]
BODY = {"input": [[1, 0], [0, 1]]}
# How many connections to the service the proxy keeps, each of which is used twice.
CONNECTIONS = 300
# nginx with persistent connections, as its documentation describes them (module upstream, keepalive) and ingress-nginx
# has them. Each path has one of its own, which is idle from its first request to its second.
KEEPING = """
    keepalive_timeout 0;
    proxy_set_header Host localhost;
    {upstreams}
    server {{
        listen 127.0.0.1:{port};
        location / {{ proxy_pass http://127.0.0.1:{service}; }}
        {locations}
    }}
"""
UPSTREAM = "upstream u{number} {{ server 127.0.0.1:{service}; keepalive 1; keepalive_timeout {seconds}s; }}"
LOCATION = "location = /{number}/attention {{ proxy_pass http://u{number}/attention; }}"


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
        keeping = KEEPING.format(upstreams=upstreams, locations=locations, **values)
        with nginx(tmp_path, FRAME.format(http=keeping), port):
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
        url = f"http://127.0.0.1:{port}"
        with nginx(tmp_path, "daemon off;\n" + text, port), httpx.Client(base_url=url) as client:
            answers = [client.post("/attention", json=BODY) for _ in range(3)]
            assert client.get("/metrics").status_code == 404
    assert {answer.status_code for answer in answers} == {200}
    assert not any("keep-alive" in answer.headers for answer in answers)
