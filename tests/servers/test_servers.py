"""The application gives the same responses under every ASGI server as under `attention-service serve`."""

from __future__ import annotations

import hashlib
import http.client
import json
import re
import shlex
import time
from collections.abc import Iterator
from contextlib import closing
from functools import cache
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families
from safetensors.numpy import save

from tests.attack.server import TIMEOUT, Live, ResponseReader, post, within
from tests.cases import CASES, Case
from tests.helpers import oip
from tests.helpers.wire import JSON, MEDIA_TYPES, SAFETENSORS, read, write
from tests.servers.servers import ROOT, SERVERS, Server, started
from tests.test_bad_requests import BAD, Bad

MB = 2**20
LIMIT = 44 * MB
PIECE = 2**16
KEY = "correct horse"
AUTHORIZATION = {"Authorization": f"Bearer {KEY}"}
ORIGIN = "https://a.example"
PROBLEM = "application/problem+json"
GOOD: dict[str, Any] = {"query": [[1.0]], "key": [[1.0]], "value": [[2.0]]}


@pytest.fixture(scope="module", params=SERVERS, ids=str)
def server(request: pytest.FixtureRequest) -> Iterator[Live]:
    hashed = f"sha256:{hashlib.sha256(KEY.encode()).hexdigest()}"
    with started(
        request.param, max_body_bytes=LIMIT, api_keys=hashed, cors_origins=ORIGIN, threads=2, time_limit=600
    ) as live:
        yield live


@pytest.fixture(scope="module")
def client(server: Live) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=f"http://127.0.0.1:{server.port}", headers=AUTHORIZATION, timeout=60) as client:
        yield client


def assert_success(response: httpx.Response, media_type: str) -> None:
    """Asserts that a tensor operation succeeded, with all headers that the service sets."""
    assert response.status_code == 200, response.text
    assert response.headers["content-type"] == media_type
    assert response.headers["x-request-id"]
    assert re.search(r"\bcompute;dur=[\d.]+", response.headers["server-timing"])


def test_only_the_server_of_the_service_announces_how_long_it_keeps_a_connection(
    client: httpx.Client, request: pytest.FixtureRequest
) -> None:
    """Others have options of their own, which the application does not know; granian and hypercorn announce nothing."""
    name = request.node.callspec.params["server"].name
    announced = client.post("/attention", json=GOOD).headers.get("keep-alive")
    assert announced == ("timeout=620" if name == "serve" else None)


# Golden cases.


@pytest.mark.parametrize("media_type", MEDIA_TYPES)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_golden_cases_give_the_expected_numbers(case: Case, media_type: str, client: httpx.Client) -> None:
    content = write(case.request, media_type)
    response = client.post("/attention", content=content, headers={"Content-Type": media_type})
    assert_success(response, media_type)
    answer = read(response.content, media_type)
    assert answer["metadata"]["request_id"] == response.headers["x-request-id"]
    for expected in case.expected:
        expected.compare(answer)


@pytest.mark.parametrize("binary", [True, False], ids=["binary", "JSON"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_golden_cases_by_the_inference_protocol(case: Case, binary: bool, client: httpx.Client) -> None:
    content, headers = oip.request_of(case.request, binary)
    response = client.post(oip.INFER, content=content, headers=headers)
    assert_success(response, "application/octet-stream" if binary else JSON)
    answer = oip.read(response)
    for expected in case.expected:
        expected.compare(answer)


# Bodies and responses of many megabytes.


@cache
def large_request(media_type: str, megabytes: int) -> tuple[np.ndarray, bytes]:
    """A key of so many megabytes, and a request that returns it transposed.

    The queries are the rows of the identity matrix, so that the scores are the features of the keys, exactly.
    """
    key: np.ndarray = np.random.default_rng(megabytes).integers(100_000, 1_000_000, (megabytes * MB // 512, 64))
    if media_type != JSON:  # in JSON a number of six digits and its separator take eight bytes, too
        key = key / 7
    request = {"query": np.eye(64), "key": key, "value": np.ones((len(key), 1)), "include": ["scores"]}
    return key, write(request, media_type)


def split_body(body: bytes) -> Iterator[bytes]:
    """The body in pieces, which make the client send chunks without a Content-Length."""
    return (body[start : start + PIECE] for start in range(0, len(body), PIECE))


@pytest.mark.parametrize("framing", ["counted", "chunked"])
@pytest.mark.parametrize("megabytes", [1, 2, 5, 12, 40])
@pytest.mark.parametrize("media_type", MEDIA_TYPES)
def test_large_bodies_are_received_completely(
    media_type: str, megabytes: int, framing: str, client: httpx.Client
) -> None:
    key, body = large_request(media_type, megabytes)
    accept = SAFETENSORS if media_type == JSON else media_type  # large responses in JSON have a separate test
    response = client.post(
        "/attention",
        content=body if framing == "counted" else split_body(body),
        headers={"Content-Type": media_type, "Accept": accept},
    )
    assert_success(response, accept)
    answer = read(response.content, accept)
    np.testing.assert_array_equal(answer["scores"], key.T)
    np.testing.assert_allclose(answer["output"], 1, rtol=1e-12)


@pytest.mark.parametrize("media_type", MEDIA_TYPES)
def test_large_responses_are_sent_completely(media_type: str, client: httpx.Client) -> None:
    """A query of zeros gives 1,024 keys equal weights, so that the output is the mean of the values."""
    values = np.arange(1024.0)[:, None]
    body = write({"query": np.zeros((1024, 1)), "key": values, "value": values}, SAFETENSORS)
    headers = {"Content-Type": SAFETENSORS, "Accept": media_type}
    response = client.post("/attention", content=body, headers=headers)
    assert_success(response, media_type)
    answer = read(response.content, media_type)
    np.testing.assert_array_equal(answer["attention_weights"], np.full((1024, 1024), 2.0**-10))
    np.testing.assert_allclose(answer["output"], np.full((1024, 1), 511.5), rtol=1e-12)


# Requests that are refused.


@pytest.mark.parametrize("bad", BAD, ids=lambda bad: bad.name)
def test_bad_requests_get_their_problem(bad: Bad, client: httpx.Client) -> None:
    body = bad.body if isinstance(bad.body, bytes) else json.dumps(bad.body).encode()
    headers = {"Content-Type": bad.content_type} if bad.content_type else {}
    response = client.post("/attention", content=body, headers=headers)
    assert (response.status_code, response.headers["content-type"]) == (bad.status, PROBLEM), response.text
    problem = response.json()
    assert (problem["status"], problem["code"]) == (bad.status, bad.code)
    assert problem["request_id"] == response.headers["x-request-id"]
    assert (problem["errors"][0]["pointer"], problem["errors"][0]["code"]) == (bad.pointer, bad.code)


JSON_WITH_KEY = AUTHORIZATION | {"Content-Type": JSON}
# Path, headers, megabytes, how the body is sent; status and code.
UNREAD: dict[str, tuple[str, dict[str, str], int, str, int, str]] = {
    "an announced body": ("/attention", JSON_WITH_KEY, 56, "counted", 413, "body_too_large"),
    "a chunked body": ("/attention", JSON_WITH_KEY, 56, "chunked", 413, "body_too_large"),
    "no key": ("/attention", {"Content-Type": JSON}, 12, "counted", 401, "unauthorized"),
    "no such path": ("/nowhere", JSON_WITH_KEY, 12, "counted", 404, "not_found"),
    "no such method": ("/health/live", JSON_WITH_KEY, 12, "counted", 405, "method_not_allowed"),
    "no such format": ("/attention", AUTHORIZATION | {"Content-Type": "text/csv"}, 12, "counted", 415,
                       "unsupported_media_type"),
}  # fmt: skip


@pytest.mark.parametrize("name", UNREAD)
def test_a_client_that_reads_only_after_sending_gets_the_whole_problem(
    name: str, server: Live, request: pytest.FixtureRequest
) -> None:
    """Python's http.client does so. If the server closes the connection too early, its send fails."""
    if str(request.node.callspec.params["server"]) == "granian":
        pytest.skip("granian closes the connection as soon as a response is complete: docs/deployment.md says so")
    path, headers, megabytes, framing, status, code = UNREAD[name]
    length = {"Content-Length": str(megabytes * MB)} if framing == "counted" else {"Transfer-Encoding": "chunked"}

    def body() -> Iterator[bytes]:
        time.sleep(0.05)  # the server may respond to the request head alone
        yield from [b" " * PIECE] * (megabytes * MB // PIECE)

    with closing(http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)) as connection:
        connection.request("POST", path, body(), headers | length, encode_chunked=framing == "chunked")
        response = connection.getresponse()
        problem = json.loads(response.read())
        assert (response.status, problem["status"], problem["code"]) == (status, status, code)
        assert response.headers["content-type"] == PROBLEM
        assert response.headers["x-request-id"] == problem["request_id"]
        connection.request("GET", "/health/live")  # on the same connection, if the server kept it
        assert json.loads(connection.getresponse().read()) == {"status": "ok"}


@pytest.mark.parametrize("authorization", [None, "Bearer", "Bearer wrong", f"Basic {KEY}"])
def test_requests_without_a_valid_key_get_a_401(authorization: str | None, server: Live) -> None:
    headers = {} if authorization is None else {"Authorization": authorization}
    with httpx.Client(base_url=f"http://127.0.0.1:{server.port}", headers=headers, timeout=60) as client:
        for path in ("/attention", oip.INFER):
            response = client.post(path, json=GOOD)
            assert response.status_code == 401
            assert response.headers["www-authenticate"] == "Bearer"
        assert client.get("/v2").status_code == 401
        assert client.get("/docs").status_code == 200
        assert client.get("/health/ready").json() == {"status": "ok"}


def test_only_allowed_origins_get_cors_headers(client: httpx.Client) -> None:
    preflight = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization"}
    for origin, status, allowed in ((ORIGIN, 200, ORIGIN), ("https://b.example", 400, None)):
        response = client.options("/attention", headers=preflight | {"Origin": origin})
        assert (response.status_code, response.headers.get("access-control-allow-origin")) == (status, allowed)
        response = client.post("/attention", json=GOOD, headers={"Origin": origin})
        assert (response.status_code, response.headers.get("access-control-allow-origin")) == (200, allowed)


# Request ids, methods, and metrics.


@pytest.mark.parametrize("chosen", ["order-66", "a" * 128])
def test_request_ids_are_returned(chosen: str, client: httpx.Client) -> None:
    headers = {"X-Request-ID": chosen}
    response = client.post("/attention", json=GOOD, headers=headers)
    assert response.headers["x-request-id"] == response.json()["metadata"]["request_id"] == chosen
    response = client.post("/attention", json={}, headers=headers)
    assert response.headers["x-request-id"] == response.json()["request_id"] == chosen
    assert client.get("/nowhere", headers=headers).headers["x-request-id"] == chosen


@pytest.mark.parametrize("chosen", ["a b", "a" * 129, "<script>"])
def test_harmful_request_ids_are_replaced(chosen: str, client: httpx.Client) -> None:
    made = client.get("/health/live", headers={"X-Request-ID": chosen}).headers["x-request-id"]
    assert made not in ("", chosen)


@pytest.mark.parametrize(
    ("method", "path", "status", "allow"),
    [
        ("GET", "/nowhere", 404, None),
        ("POST", "/attention/", 404, None),
        ("GET", "/attention", 405, "POST"),
        ("HEAD", "/attention", 405, "POST"),
        ("OPTIONS", "/attention", 405, "POST"),
        ("DELETE", "/health/live", 405, "GET, HEAD"),
        ("GET", "/problems/busy", 200, None),
        ("GET", "/docs", 200, None),
        ("GET", "/openapi.json", 200, None),
        ("GET", "/health/live", 200, None),
        ("GET", "/v2/health/ready", 200, None),
        ("HEAD", "/health/live", 200, None),
        ("HEAD", "/health/ready", 200, None),
        ("HEAD", "/metrics", 200, None),
        ("HEAD", "/layers", 200, None),
        ("HEAD", "/layers/no", 404, None),
        ("HEAD", "/problems/busy", 200, None),
        ("HEAD", "/v2", 200, None),
        ("HEAD", "/", 200, None),
        ("HEAD", "/docs", 200, None),
        ("HEAD", "/docs-assets/swagger-ui.css", 200, None),
        ("HEAD", "/openapi.json", 200, None),
    ],
)
def test_paths_and_methods_get_their_status(
    method: str, path: str, status: int, allow: str | None, client: httpx.Client
) -> None:
    response = client.request(method, path)
    assert (response.status_code, response.headers.get("allow")) == (status, allow)
    assert response.headers["x-request-id"]
    if method == "HEAD":
        assert response.content == b""
        assert int(response.headers["content-length"]) > 0
    elif status >= 400:
        assert response.headers["content-type"] == PROBLEM
        assert response.json()["status"] == status
    else:
        assert response.content
    assert client.get("/health/live").json() == {"status": "ok"}, "the connection does not serve the next request"


def test_the_document_is_compressed_and_conditional(client: httpx.Client) -> None:
    first = client.get("/openapi.json", headers={"Accept-Encoding": "gzip"})
    assert (first.headers["content-encoding"], first.json()["openapi"]) == ("gzip", "3.1.0")
    assert first.num_bytes_downloaded <= 30_000
    headers = {"Accept-Encoding": "gzip", "If-None-Match": first.headers["etag"]}
    assert client.get("/openapi.json", headers=headers).status_code == 304


def test_only_names_of_this_machine_and_of_the_setting_are_answered(client: httpx.Client) -> None:
    hosts = {"x": 200, "localhost": 200, "127.0.0.1": 200, "[::1]:80": 200, "evil.example": 400, "x.evil.example": 400}
    assert {host: client.get("/layers", headers={"Host": host}).status_code for host in hosts} == hosts


def samples(client: httpx.Client) -> dict[str, float]:
    """Every sample of /metrics by its name and the values of its labels."""
    response = client.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain; version=")
    return {
        " ".join([sample.name, *(value for _, value in sorted(sample.labels.items()))]): sample.value
        for family in text_string_to_metric_families(response.text)
        for sample in family.samples
    }


def test_metrics_count_requests_and_problems(client: httpx.Client) -> None:
    before = samples(client)
    for _ in range(3):
        client.post("/attention", json=GOOD)
    client.post("/attention", json={})
    # The end of a request may be counted after its client has the answer.
    assert within(TIMEOUT, lambda: samples(client)["attention_requests_in_flight"] == 1), "this one"
    after = samples(client)
    for name, requests in (
        ("attention_requests_total /attention http 200", 3),
        ("attention_requests_total /attention http 422", 1),
        ("attention_problems_total missing_field", 1),
        ("attention_request_seconds_count /attention", 4),
    ):
        assert after[name] - before.get(name, 0) == requests, name


# Clients that disconnect or stall, and the shutdown of the server.


def test_a_client_that_disconnects_cancels_its_computation(server: Live, client: httpx.Client) -> None:
    """The metrics count status 499 for a request without a response."""
    inputs = np.random.default_rng(0).normal(size=(200_000, 16)).astype(np.float32)
    request = post(save({"input": inputs}, {"request": '{"include": []}'}), SAFETENSORS,
                   more=f"Authorization: Bearer {KEY}\r\n")  # fmt: skip
    disconnected = "attention_requests_total /attention http 499"
    before = samples(client).get(disconnected, 0)
    with server.connect() as connection:
        used = server.running.processor_seconds()
        connection.sendall(request)
        assert within(60, lambda: server.running.processor_seconds() > used + 0.5), "it does not compute"
    assert within(60, lambda: samples(client).get(disconnected, 0) == before + 1), "the computation goes on"

    def is_idle() -> bool:
        used = server.running.processor_seconds()
        time.sleep(0.5)
        return server.running.processor_seconds() - used < 0.1

    assert within(60, is_idle), "the processor is still busy"
    assert client.post("/attention", json=GOOD).json()["output"] == [[2.0]]


@pytest.mark.parametrize("kind", SERVERS, ids=str)
def test_a_body_that_does_not_arrive_gets_a_408(kind: Server) -> None:
    head = f"POST /attention HTTP/1.1\r\nHost: x\r\nContent-Type: {JSON}\r\n"
    with started(kind, read_timeout=1) as live:
        for rest in ("Content-Length: 10\r\n\r\n{", "Transfer-Encoding: chunked\r\n\r\n5\r\n{"):
            with live.connect() as connection:
                connection.sendall((head + rest).encode())
                status, problem = ResponseReader(connection).next()
            assert (status, json.loads(problem)["code"]) == (408, "too_slow")


@pytest.mark.parametrize("kind", SERVERS, ids=str)
def test_sigterm_completes_running_requests_before_the_exit(kind: Server) -> None:
    """All inputs are equal, so that the output equals each of them."""
    inputs = np.ones((6000, 64), np.float32)
    request = post(save({"input": inputs}, {"request": '{"include": []}'}), SAFETENSORS)
    with started(kind, threads=2) as live, httpx.Client(base_url=f"http://127.0.0.1:{live.port}", timeout=60) as client:

        def received() -> bool:
            found = samples(client)
            in_flight = found["attention_requests_in_flight"] - 1  # without the request for /metrics
            return in_flight + found.get("attention_requests_total /attention http 200", 0) == len(connections)

        idle = live.connect(timeout=60)
        connections = [live.connect(timeout=60) for _ in range(4)]
        for connection in connections:
            connection.sendall(request)
        assert within(60, received), "the requests do not arrive"
        assert live.stop() == kind.exit_status, live.logged()
        answers = [ResponseReader(connection).next() for connection in connections]
        assert idle.recv(1) == b""
    for connection in (idle, *connections):
        connection.close()
    for status, body in answers:
        assert status == 200, body
        np.testing.assert_allclose(read(body, SAFETENSORS)["output"], inputs, rtol=1e-4)


def test_the_docs_show_the_commands_of_all_servers() -> None:
    page = (ROOT / "docs" / "deployment.md").read_text(encoding="utf-8")
    for server in SERVERS[1:]:
        program, *rest = server.command(8000)
        assert f"`{shlex.join([Path(program).name, *rest])}`" in page, server.name
