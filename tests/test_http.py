"""HTTP: request ids, timings, content negotiation, limits, paths, methods and problems."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import logging
import re
import socket
from collections.abc import Iterator
from functools import partial, reduce

import httpx
import numpy as np
import pytest
from fastapi import Depends, FastAPI, Request, Response
from fastapi_offline import FastAPIOffline
from pydantic import ByteSize
from starlette.background import BackgroundTask
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from attention_service.codecs.table import CODECS
from attention_service.errors import MissingField, UnknownField, error_classes
from attention_service.http.negotiation import response_type
from attention_service.runtime.machine import cpu_count
from attention_service.settings import Settings
from tests.conftest import app, serving
from tests.helpers.raw import connect, receive_all
from tests.helpers.waiting import TIMEOUT

GOOD = {"query": [[1, 0]], "key": [[1, 0], [0, 1]], "value": [[1, 2], [3, 4]]}


def test_health_checks_are_answered(client: httpx.Client) -> None:
    for path in ("/health/live", "/health/ready"):
        response = client.get(path)
        assert (response.status_code, response.json()) == (200, {"status": "ok"})


def test_a_response_has_a_new_request_id(client: httpx.Client) -> None:
    response = client.post("/attention", json=GOOD)
    assert re.fullmatch("[0-9a-f]{32}", response.headers["x-request-id"])
    assert response.json()["metadata"]["request_id"] == response.headers["x-request-id"]
    assert response.headers["x-request-id"] != client.get("/health/live").headers["x-request-id"]


def test_a_valid_request_id_of_the_client_is_returned(client: httpx.Client) -> None:
    for chosen in ("order-66", "a" * 128):
        assert client.get("/", headers={"X-Request-ID": chosen}).headers["x-request-id"] == chosen
    for harmful in ("a b", "a" * 129, "<script>", ""):
        assert client.get("/", headers={"X-Request-ID": harmful}).headers["x-request-id"] != harmful


def test_problems_carry_the_request_id(client: httpx.Client) -> None:
    response = client.post("/attention", json={}, headers={"X-Request-ID": "mine"})
    assert response.json()["request_id"] == response.headers["x-request-id"] == "mine"


def test_timings_are_in_the_server_timing_header(client: httpx.Client) -> None:
    header = client.post("/attention", json=GOOD).headers["server-timing"]
    steps = dict(part.split(";dur=") for part in header.split(", "))
    assert list(steps) == ["decode", "prepare", "queue", "compute", "encode"]
    assert all(float(duration) >= 0 for duration in steps.values())


def test_a_large_request_is_computed_in_a_thread_with_the_same_result() -> None:
    request = {"input": [[0.1 * i, -0.2 * i] for i in range(20)]}
    with serving(app(inline_flops=0)) as threaded, serving(app()) as inline:
        first, second = (c.post("/attention", json=request).json() for c in (threaded, inline))
    assert first["attention_weights"] == second["attention_weights"]


def test_unknown_paths_and_methods_get_a_404_or_405(client: httpx.Client) -> None:
    missing = client.get("/nowhere")
    assert (missing.status_code, missing.json()["code"], missing.json()["instance"]) == (404, "not_found", "/nowhere")
    wrong = client.get("/attention")
    assert (wrong.status_code, wrong.json()["code"], wrong.headers["allow"]) == (405, "method_not_allowed", "POST")
    assert client.post("/attention/", json=GOOD).status_code == 404
    assert len(client.get("/" + "x" * 5000).content) < 1000


def test_workers_divide_the_threads() -> None:
    assert Settings.model_construct(threads=3, workers=2).compute_threads == 3
    assert Settings.model_construct(workers=1).compute_threads == cpu_count()
    assert Settings.model_construct(workers=256).compute_threads == max(1, cpu_count() // 256)


@pytest.mark.parametrize(
    "content_type", ["application/json", "Application/JSON", "application/json; charset=utf-8", "application/json ;a=b"]
)
def test_all_forms_of_the_json_media_type_are_accepted(client: httpx.Client, content_type: str) -> None:
    body = b'{"query": [[1]], "key": [[1]], "value": [[1]]}'
    assert client.post("/attention", content=body, headers={"Content-Type": content_type}).status_code == 200


@pytest.mark.parametrize("media_type", CODECS)
@pytest.mark.parametrize("encoding", ["gzip", "GZip, identity", "deflate", "br", "zstd", "nonsense"])
def test_encoded_bodies_are_refused(client: httpx.Client, media_type: str, encoding: str) -> None:
    """The response names the accepted encodings (RFC 9110, section 15.5.16)."""
    headers = {"Content-Type": media_type, "Content-Encoding": encoding}
    response = client.post("/attention", content=gzip.compress(b'{"input": [[1]]}'), headers=headers)
    assert (response.status_code, response.json()["code"]) == (415, "unsupported_encoding")
    assert response.headers["accept-encoding"] == "identity"
    inference = client.post("/v2/models/attention/infer", content=b"x", headers=headers)
    assert (inference.status_code, inference.headers["accept-encoding"]) == (415, "identity")


@pytest.mark.parametrize("encoding", ["identity", "Identity", ""])
def test_the_content_encoding_identity_is_accepted(client: httpx.Client, encoding: str) -> None:
    assert client.post("/attention", json=GOOD, headers={"Content-Encoding": encoding}).status_code == 200


@pytest.mark.parametrize(
    ("accept", "status"),
    [
        ("application/json", 200),
        ("*/*", 200),
        ("application/*", 200),
        ("", 200),
        ("text/html, application/json;q=0.1", 200),
        ("text/html", 406),
        ("application/json;q=0", 406),
        ("application/json;q=0, */*", 200),  # another media type
        ("application/json;q=high", 406),
        ("application/xml", 406),
    ],
)
def test_the_accept_header_chooses_the_status(client: httpx.Client, accept: str, status: int) -> None:
    response = client.post("/attention", json=GOOD, headers={"Accept": accept})
    assert response.status_code == status
    if status == 406:
        assert response.json()["code"] == "not_acceptable"


@pytest.mark.parametrize(
    ("accept", "chosen"),
    [
        ("", "a/own"),
        ("*/*", "a/own"),
        ("a/*", "a/own"),
        ("a/other", "a/other"),
        ("a/own;q=0.4, a/other;q=0.5", "a/other"),
        ("*/*;q=0.9, a/other", "a/other"),
        ("a/other;version=1;q=0.5, */*;q=0.1", "a/other"),
    ],
)
def test_the_preferred_media_type_is_chosen(accept: str, chosen: str) -> None:
    assert response_type(accept, "a/own", ["a/other", "a/own"]) == chosen


@pytest.fixture(scope="module")
def small() -> Iterator[httpx.Client]:
    """A client of a server with low limits."""
    with serving(app(max_body_bytes=1000, memory_limit=ByteSize(64 * 1024))) as client:
        yield client


def test_a_body_too_large_is_refused_by_its_content_length(small: httpx.Client) -> None:
    """The response arrives before the client sends the body."""
    with socket.create_connection((small.base_url.host, small.base_url.port or 0), timeout=TIMEOUT) as connection:
        connection.sendall(
            b"POST /attention HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 1001\r\n\r\n"
        )
        answer = connection.recv(65536)
    assert answer.startswith(b"HTTP/1.1 413")
    assert b"Content-Length 1001" in answer
    assert b"or raise ATTENTION_MAX_BODY_BYTES" in answer
    assert b"connection: close" in answer.lower()


def test_a_chunked_body_too_large_is_refused_while_it_arrives(small: httpx.Client) -> None:
    response = small.post(
        "/attention", content=(b"[" * 100 for _ in range(11)), headers={"Content-Type": "application/json"}
    )
    assert (response.status_code, response.json()["code"]) == (413, "body_too_large")
    (fault,) = response.json()["errors"]
    assert fault["expected"] == "at most 1000 bytes"
    assert re.search("npz or safetensors.*stored layer.*ATTENTION_MAX_BODY_BYTES", fault["hint"])
    fitting = small.post(
        "/attention", content=(b" " * 100 for _ in range(10)), headers={"Content-Type": "application/json"}
    )
    assert fitting.status_code == 400


def test_a_body_too_large_once_it_is_unpacked_names_the_setting_too(small: httpx.Client) -> None:
    body = io.BytesIO()
    np.savez_compressed(body, input=np.zeros((200, 1)))
    assert len(body.getvalue()) < 1000
    response = small.post("/attention", content=body.getvalue(), headers={"Content-Type": "application/x-npz"})
    assert (response.status_code, response.json()["code"]) == (413, "body_too_large")
    assert "ATTENTION_MAX_BODY_BYTES" in response.json()["detail"]


def test_a_body_that_would_need_too_much_memory_to_decode_names_the_ways_out() -> None:
    with serving(app(max_body_bytes=2**20, memory_limit=ByteSize(2**20))) as client:
        response = client.post("/attention", json=[1] * 100_000)
    assert (response.status_code, response.json()["code"]) == (413, "memory_limit")
    assert re.search("npz or safetensors.*ATTENTION_MEMORY_LIMIT", response.json()["errors"][0]["hint"])


def test_a_request_that_would_need_too_much_memory_is_refused(small: httpx.Client) -> None:
    response = small.post("/attention", json={"input": [[0]] * 150})
    assert (response.status_code, response.json()["code"]) == (413, "memory_limit")
    (fault,) = response.json()["errors"]
    assert re.fullmatch(r"a request that needs about [\d.]+MiB, while 64\.0KiB is allowed", fault["got"])
    assert small.post("/attention", json={"input": [[0]] * 30}).status_code == 200


def test_requests_to_upgrade_the_protocol_are_ignored(client: httpx.Client) -> None:
    """curl --http2 and Java's client send such requests; the body arrives with the request head, or after it."""
    body = b'{"input": [[2]]}'
    head = (
        b"POST /attention HTTP/1.1\r\nHost: x\r\nConnection: Upgrade, HTTP2-Settings\r\n"
        b"Content-Type: application/json\r\nContent-Length: %d\r\n"
        b"HTTP2-Settings: AAEAAEAAAAIAAAAB\r\nUpgrade: h2c\r\n\r\n" % len(body)
    )
    for pieces in ([head + body], [head, body]):
        with socket.create_connection((client.base_url.host, client.base_url.port or 0), timeout=TIMEOUT) as connection:
            for piece in pieces:
                connection.sendall(piece)
                # The event loop has read the piece when it responds to a later request.
                assert client.get("/health/live").status_code == 200
            assert connection.recv(65536).startswith(b"HTTP/1.1 200")


def test_a_client_that_disconnects_is_not_logged_as_an_error(
    small: httpx.Client, caplog: pytest.LogCaptureFixture
) -> None:
    address = (small.base_url.host, small.base_url.port or 0)
    with socket.create_connection(address, timeout=TIMEOUT) as connection:
        connection.sendall(b"POST /attention HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
                           b"Content-Length: 500\r\n\r\n[")  # fmt: skip
    assert small.get("/health/live").status_code == 200
    assert caplog.records == []


@pytest.mark.parametrize("code", error_classes())
def test_the_type_of_every_problem_leads_to_its_description(client: httpx.Client, code: str) -> None:
    described = client.get(f"/problems/{code}").json()
    assert described["code"] == code
    assert described["description"]


def test_an_unknown_problem_code_gets_a_404(client: httpx.Client) -> None:
    response = client.get("/problems/nonsense")
    assert (response.status_code, response.json()["code"]) == (404, "not_found")


def broken() -> FastAPI:
    """The application with two routes that raise: before and after the response starts."""
    service = app()

    @service.get("/defect")
    async def defect() -> None:
        raise ZeroDivisionError("secret")

    @service.get("/late", response_model=None)
    async def late() -> Response:
        def fail() -> None:
            raise ZeroDivisionError("secret")

        return Response("done", background=BackgroundTask(fail))

    return service


def test_an_unexpected_exception_is_a_problem_and_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    with serving(broken()) as client:
        response = client.get("/defect", headers={"X-Request-ID": "find-me"})
    assert (response.status_code, response.json()["code"]) == (500, "internal_error")
    assert "secret" not in response.text
    assert "find-me" in caplog.text


def test_an_exception_after_the_response_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    with serving(broken()) as client:
        response = client.get("/late", headers={"X-Request-ID": "find-me"})
    assert (response.status_code, response.text) == (200, "done")
    assert "find-me" in caplog.text


def test_an_exception_of_a_dependency_is_a_problem() -> None:
    """An organisation may add its own dependencies to the application."""

    def forbid(number: int = 0) -> None:
        if number:
            raise HTTPException(403, "not on Sundays", headers={"X-Reason": "Sunday"})

    service = app()
    service.get("/checked", dependencies=[Depends(forbid)])(lambda: "fine")
    with serving(service) as client:
        assert client.get("/checked").json() == "fine"
        forbidden = client.get("/checked?number=1")
        assert (forbidden.status_code, forbidden.headers["X-Reason"]) == (403, "Sunday")
        assert forbidden.headers["content-type"] == "application/problem+json"
        found = forbidden.json()
        assert (found["status"], found["code"], found["detail"]) == (403, "forbidden", "not on Sundays")
        wrong = client.get("/checked?number=x").json()
        assert (wrong["status"], wrong["code"]) == (422, "invalid_value")
        assert [fault["pointer"] for fault in wrong["errors"]] == ["/query/number"]


def tensor_paths(service: FastAPI) -> list[str]:
    """The paths of all operations on tensors, with the model of every service."""
    posts = [path for path, operations in service.openapi()["paths"].items() if "post" in operations]
    assert len(posts) >= 6
    return [path.format(model_name="attention", model_version="1") for path in posts]


def test_every_operation_sees_a_dependency_of_the_application(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also operations on tensors, which FastAPI otherwise only documents."""

    def forbid(number: int = 0) -> None:
        if number:
            raise HTTPException(403, "not on Sundays", headers={"X-Reason": "Sunday"})

    monkeypatch.setattr("attention_service.app.FastAPIOffline", partial(FastAPIOffline, dependencies=[Depends(forbid)]))
    service = app()
    with serving(service) as client:
        for path in tensor_paths(service):
            forbidden = client.post(f"{path}?number=1", json={})
            assert (forbidden.status_code, forbidden.headers["X-Reason"]) == (403, "Sunday"), path
            assert client.post(path, json={}).status_code in (400, 422)
        assert client.post("/attention", json=GOOD).status_code == 200


def test_every_operation_sees_a_middleware_of_the_application() -> None:
    seen: list[str] = []

    class Middleware:
        def __init__(self, app: ASGIApp) -> None:
            self._app = app

        async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
            async def send_marked(message: Message) -> None:
                if message["type"] == "http.response.start":
                    seen.append(scope["path"])
                    message["headers"].append((b"x-seen", b"yes"))
                await send(message)

            await self._app(scope, receive, send_marked)

    service = app()
    service.add_middleware(Middleware)
    with serving(service) as client:
        paths = tensor_paths(service)
        for path in paths:
            assert client.post(path, json={}).headers["x-seen"] == "yes"
        assert seen == paths
        assert client.post("/attention", json=GOOD).headers["x-seen"] == "yes"


def test_a_route_and_a_handler_that_an_application_adds_come_first() -> None:
    """They do as everywhere in FastAPI, also in the place of an operation on tensors."""
    service = app()

    async def on_unknown_field(request: Request, error: Exception) -> Response:
        return Response("unknown", 418)

    def on_missing_field(request: Request, error: Exception) -> Response:
        return Response('"missing"', 422)

    service.add_exception_handler(UnknownField, on_unknown_field)
    service.add_exception_handler(MissingField, on_missing_field)
    service.post("/attention/merge")(lambda: "mine")
    service.router.routes.insert(0, service.router.routes.pop())
    with serving(service) as client:
        assert client.post("/attention/merge").json() == "mine"
        assert client.post("/attention", json=GOOD | {"unknown": 1}).status_code == 418
        assert client.post("/attention", json={}).json() == "missing"
        assert client.post("/attention", json=GOOD).status_code == 200


def test_every_error_below_v2_has_the_format_of_the_inference_protocol() -> None:
    """Also errors of unknown paths, and of requests that are refused before routing."""
    # httptools, as h11 refuses two Host headers before the application gets the request.
    service = app(api_keys=f"sha256:{hashlib.sha256(b'key').hexdigest()}", http_parser="httptools")

    @service.get("/v2/closed")
    async def closed() -> None:
        raise HTTPException(403, "not on Sundays")

    key = {"Authorization": "Bearer key"}
    with serving(service) as client:
        for method, path, headers, status in (
            ("GET", "/v2/health/live", {}, 401),
            ("GET", "/v2/closed", key, 403),
            ("GET", "/v2/nothing", key, 404),
            ("DELETE", "/v2", key, 405),
            ("POST", "/v2/models/attention/infer", key | {"Content-Encoding": "gzip"}, 415),
        ):
            response = client.request(method, path, headers=headers)
            assert (response.status_code, list(response.json())) == (status, ["error"])
            assert response.headers["content-type"] == "application/json"
        with connect(client) as connection:
            connection.sendall(b"GET /v2/health/live HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n")
            assert receive_all(connection).endswith(b'\r\n\r\n{"error":"expected one Host header, got 2"}')
        assert client.get("/v20", headers=key).json()["code"] == "not_found"
        assert 'attention_problems_total{code="forbidden"} 1.0' in client.get("/metrics", headers=key).text


GETS = sorted(path for path, item in app().openapi()["paths"].items() if "get" in item)
GIVEN = {"{code}": "busy", "{name}": "no", "{model_name}": "attention", "{model_version}": "1"}


@pytest.mark.parametrize("template", [*GETS, "/", "/page/app.js", "/docs", "/openapi.json", "/docs-assets/x", "/no"])
def test_head_is_answered_as_get_without_the_body(client: httpx.Client, template: str) -> None:
    """On one connection, as `curl -I` asks: a body would be read as the next response."""
    path = reduce(lambda text, name: text.replace(name, GIVEN[name]), GIVEN, template)
    whole, head = client.get(path), client.head(path)
    assert (head.status_code, head.content) == (whole.status_code, b"")
    assert int(head.headers["content-length"]) > 0
    assert head.headers.keys() == whole.headers.keys()
    assert head.headers["content-type"] == whole.headers["content-type"]
    assert client.get("/health/live").json() == {"status": "ok"}


def test_head_is_counted_as_the_operation_and_logged_as_head(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "attention.access")
    with serving(app()) as client:
        client.head("/problems/busy")
        metrics = client.get("/metrics").text
    assert 'operation="/problems/{code}",protocol="http",status="200"} 1.0' in metrics
    (record,) = (found.__dict__ for found in caplog.records if found.__dict__["method"] == "HEAD")
    assert "sent" not in record  # of GET's body, nothing was


def test_a_response_to_head_does_not_affect_the_next_one(client: httpx.Client) -> None:
    assert client.head("/attention").status_code == 405
    assert client.get("/health/live").status_code == 200


def test_a_client_that_expects_100_continue_receives_it(client: httpx.Client) -> None:
    """The header is Expect: 100-continue (RFC 9110, section 10.1.1)."""
    body = json.dumps(GOOD).encode()
    with socket.create_connection((client.base_url.host, client.base_url.port or 0), timeout=TIMEOUT) as connection:
        connection.sendall(
            b"POST /attention HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            b"Expect: 100-continue\r\nContent-Length: %d\r\n\r\n" % len(body)
        )
        assert connection.recv(2**16) == b"HTTP/1.1 100 Continue\r\n\r\n"
        connection.sendall(body)
        assert connection.recv(2**16).startswith(b"HTTP/1.1 200 OK\r\n")


def test_a_list_of_too_many_names_is_refused(client: httpx.Client) -> None:
    answer = client.post("/attention", json=GOOD | {"include": [f"name {number}" for number in range(1000)]}).json()
    assert [(fault["pointer"], fault["expected"]) for fault in answer["errors"]] == [
        ("/include", "a list of at most 64 names")
    ]


def test_several_accept_headers_count_as_one(client: httpx.Client) -> None:
    for accepted in (["text/html", "application/x-npz"], ["application/x-npz", "text/html"]):
        response = client.post("/attention", json=GOOD, headers=[("Accept", media_type) for media_type in accepted])
        assert response.headers["content-type"] == "application/x-npz"


def test_only_the_first_media_ranges_are_considered(client: httpx.Client) -> None:
    many = ", ".join(["text/html"] * 1000)
    found = client.post("/attention", json=GOOD, headers={"Accept": f"application/json, {many}"})
    assert found.headers["content-type"] == "application/json"
    assert client.post("/attention", json=GOOD, headers={"Accept": many}).status_code == 406
