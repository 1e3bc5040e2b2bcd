"""What docs/ promise of a request holds for every operation: attention, calls, comparisons and heatmaps."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, NamedTuple

import httpx
import numpy as np
import pytest
from fastapi import FastAPI

from attention_service.backends.numpy.backend import NumpyBackend
from attention_service.codecs.chunks import ENCODE_BYTES
from attention_service.layers.files import write_layer
from attention_service.layers.layer import Layer
from attention_service.settings.model import LEAST_MEMORY
from tests.conftest import app, serving
from tests.helpers.raw import connect
from tests.helpers.waiting import TIMEOUT, pass_deadlines, until
from tests.helpers.wire import JSON, MEDIA_TYPES, NPZ, SAFETENSORS, write
from tests.test_observability import samples

SVG, PNG = "image/svg+xml", "image/png"
QUERY: Final = np.random.default_rng(0).normal(size=(5, 4))
# With an option that keeps NumPy from taking its path for small requests, which has no tiles to check between.
REQUEST: Final[dict[str, Any]] = {"query": QUERY, "key": QUERY, "value": QUERY, "is_causal": True}


# The same as the call of a library.
CALL: Final[dict[str, Any]] = {
    "call": "flash_attn.flash_attn_func",
    "arguments": dict.fromkeys("qkv", QUERY[None, :, None]) | {"causal": True},
}


class Kind(NamedTuple):
    """An operation: its path, the fields beside those of its request, the media types of its answers, and its request.

    For a call that is the call itself, which has no stored layers.
    """

    path: str
    fields: dict[str, Any]
    default: str
    media_types: tuple[str, ...]
    request: dict[str, Any] = REQUEST


KINDS: Final = {
    "attention": Kind("/attention", {}, JSON, MEDIA_TYPES),
    "compare": Kind("/attention/compare", {"actual": {"output": np.zeros((5, 4))}}, JSON, (JSON,)),
    "heatmap": Kind("/attention/heatmap", {"heatmap": {"theme": "light"}}, SVG, (SVG, PNG)),
    "call": Kind("/attention/call", {}, JSON, MEDIA_TYPES, CALL),
    "compare a call": Kind(
        "/attention/call/compare", {"actual": {"output": np.zeros((1, 5, 1, 4))}}, JSON, (JSON,), CALL
    ),
}
each_kind = pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)


@contextmanager
def service(**settings: Any) -> Iterator[tuple[FastAPI, httpx.Client]]:
    """A service that computes in worker threads. Asserts at the end that all its memory and slots are free again."""
    made = app(inline_flops=0, **settings)
    with serving(made) as client:
        yield made, client
        admission = made.state.engine.admission
        until(lambda: (admission.free, admission.slots_taken) == (admission.memory, 0))
        assert admission.counted_requests == 0


@pytest.fixture(scope="module")
def client() -> Iterator[httpx.Client]:
    with service() as (_, client):
        yield client


def send(client: httpx.Client, kind: Kind, media_type: str = JSON, accept: str = "", **fields: Any) -> httpx.Response:
    headers = {"content-type": media_type, "x-request-id": "same"} | ({"accept": accept} if accept else {})
    return client.post(kind.path, content=write(kind.request | kind.fields | fields, media_type), headers=headers)


def problem(response: httpx.Response) -> tuple[int, str]:
    assert response.headers["content-type"] == "application/problem+json"
    return response.status_code, response.json()["code"]


@each_kind
@pytest.mark.parametrize("media_type", MEDIA_TYPES)
def test_every_wire_format_gives_the_same_answer(client: httpx.Client, kind: Kind, media_type: str) -> None:
    plain, other = send(client, kind, accept=kind.default), send(client, kind, media_type, accept=kind.default)
    assert (plain.status_code, other.status_code) == (200, 200), other.text
    assert other.content == plain.content


@each_kind
def test_the_media_type_of_an_answer_is_negotiated(client: httpx.Client, kind: Kind) -> None:
    for accept in ("", "*/*", "text/html, */*;q=0.1"):
        assert send(client, kind, accept=accept).headers["content-type"] == kind.default
    for media_type in kind.media_types:
        answer = send(client, kind, accept=f"text/html, {media_type};q=0.5")
        assert (answer.status_code, answer.headers["content-type"]) == (200, media_type)
        assert int(answer.headers["content-length"]) == len(answer.content)
    for accept in ("text/html", f"{kind.default};q=0", *({JSON, NPZ, SVG} - {*kind.media_types})):
        assert problem(send(client, kind, accept=accept)) == (406, "not_acceptable")


@each_kind
def test_without_a_preference_an_answer_has_the_type_of_the_request_if_there_is_such_an_answer(
    client: httpx.Client, kind: Kind
) -> None:
    for media_type in (NPZ, SAFETENSORS):
        expected = media_type if media_type in kind.media_types else kind.default
        assert send(client, kind, media_type, accept="*/*").headers["content-type"] == expected


@each_kind
def test_bodies_that_cannot_be_read_are_refused(client: httpx.Client, kind: Kind) -> None:
    for media_type in ("text/plain", ""):
        response = client.post(kind.path, content=b"{}", headers={"content-type": media_type})
        assert problem(response) == (415, "unsupported_media_type")
    response = client.post(kind.path, content=b"{}", headers={"content-type": JSON, "content-encoding": "gzip"})
    assert problem(response) == (415, "unsupported_encoding")
    assert response.headers["accept-encoding"] == "identity"
    with service(max_body_bytes=100) as (_, small):
        assert problem(send(small, kind)) == (413, "body_too_large")


@each_kind
def test_a_request_is_timed_counted_and_logged(kind: Kind, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "attention.access")
    with service() as (made, client):
        answer = send(client, kind)
        until(lambda: made.state.metrics.in_flight == 0)
        counted = samples(client)
    steps = re.findall(r"(\w+);dur=", answer.headers["server-timing"])
    assert steps == ["decode", "prepare", "queue", "compute", "encode"]
    (line,) = [record.__dict__ for record in caplog.records if record.__dict__.get("path") == kind.path]
    assert (line["status"], line["sent"], line["code"]) == (200, len(answer.content), None)
    assert line["kernel"].startswith("numpy/")
    assert counted[f"attention_requests_total operation={kind.path} protocol=http status=200"] == 1


@each_kind
def test_a_request_that_needs_too_much_memory_is_refused_by_its_estimate(
    kind: Kind, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = hold(monkeypatch)
    rows = np.zeros((2000, 1))
    fields: dict[str, Any] = {"query": rows, "key": rows, "value": rows, "include": ["attention_weights"]}
    fields |= {"actual": {"output": rows}} if "actual" in kind.fields else {}
    if kind.request is CALL:
        rows = rows[None, :, None]
        fields = {"arguments": dict.fromkeys("qkv", rows), "include": ["attention_weights"]}
        fields |= {"actual": {"output": rows}} if kind.fields else {}
    fields |= {"heatmap": {"max_cells": 2000}} if "heatmap" in kind.fields else {}
    with service(memory_limit=LEAST_MEMORY) as (_, client):
        response = send(client, kind, SAFETENSORS, **fields)
    assert problem(response) == (413, "memory_limit")
    (fault,) = response.json()["errors"]
    assert re.fullmatch(r"a request that needs about [\d.]+MiB, while 16\.0MiB is allowed", fault["got"])
    assert "need" in fault["hint"]
    assert not held.begun.is_set()


@each_kind
def test_an_allocation_that_fails_is_a_413(kind: Kind, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*given: object) -> None:
        raise MemoryError

    replace_kernels(monkeypatch, lambda kernel: fail)
    with service() as (_, client):
        response = send(client, kind)
    assert problem(response) == (413, "memory_limit")
    (fault,) = response.json()["errors"]
    assert fault["expected"] == "a request that fits into memory"
    assert "need" in fault["hint"]


class Held(NamedTuple):
    """A computation that checks its deadline until it may end."""

    begun: threading.Event
    may_end: threading.Event


def replace_kernels(monkeypatch: pytest.MonkeyPatch, replaced: Callable[[Any], Any]) -> None:
    """Replace what computes attention and references, and what computes pictures."""
    for name in ("execute", "bin_scores"):
        monkeypatch.setattr(NumpyBackend, name, replaced(getattr(NumpyBackend, name)))


def hold(monkeypatch: pytest.MonkeyPatch) -> Held:
    """Computations of NumPy check their deadlines until they may end; then they compute."""
    held = Held(threading.Event(), threading.Event())

    def replaced(kernel: Any) -> Any:
        def checking(self: NumpyBackend, *given: Any) -> Any:
            held.begun.set()

            def ended() -> bool:
                given[-1]()
                return held.may_end.is_set()

            until(ended)
            return kernel(self, *given)

        return checking

    replace_kernels(monkeypatch, replaced)
    return held


@each_kind
def test_a_request_is_refused_while_the_queue_is_full(kind: Kind, monkeypatch: pytest.MonkeyPatch) -> None:
    held = hold(monkeypatch)
    with service(concurrency=1, queue=0) as (_, client), ThreadPoolExecutor(1) as thread:
        first = thread.submit(send, client, kind)
        assert held.begun.wait(TIMEOUT)
        response = send(client, kind)
        held.may_end.set()
        assert first.result().status_code == 200
    assert problem(response) == (503, "busy")
    assert int(response.headers["retry-after"]) >= 1


@each_kind
def test_a_request_ends_at_its_deadline(kind: Kind, monkeypatch: pytest.MonkeyPatch) -> None:
    held = hold(monkeypatch)
    with service() as (_, client), ThreadPoolExecutor(1) as thread:
        answer = thread.submit(send, client, kind)
        assert held.begun.wait(TIMEOUT)
        pass_deadlines(monkeypatch)
        assert problem(answer.result()) == (504, "time_limit")


@each_kind
def test_a_request_ends_when_its_client_disconnects(kind: Kind, monkeypatch: pytest.MonkeyPatch) -> None:
    held = hold(monkeypatch)
    content = write(kind.request | kind.fields, JSON)
    head = f"POST {kind.path} HTTP/1.1\r\nHost: x\r\nContent-Type: {JSON}\r\nContent-Length: {len(content)}\r\n\r\n"
    with service() as (made, client):
        with connect(client) as connection:
            connection.sendall(head.encode() + content)
            assert held.begun.wait(TIMEOUT)
            assert made.state.engine.admission.slots_taken == 1
        until(lambda: made.state.metrics.in_flight == 0)


@pytest.mark.parametrize("kind", [kind for kind in KINDS.values() if kind.request is REQUEST])
@pytest.mark.parametrize("large", [False, True])
def test_a_stored_layer_means_the_same_as_its_fields(
    tmp_path: Path, kind: Kind, large: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a large layer, also that it is cast in a worker thread."""
    weight = np.random.default_rng(1).normal(size=(4, 4)).astype(np.float32)
    roles = ("query", "key", "value")
    write_layer(tmp_path, "mine", {f"projection.{role}.weight": weight for role in roles}, {"num_heads": 2}, "")
    write_layer(tmp_path, "large", {"projection.query.weight": np.full((4, 4), 1e30, np.float32)}, {}, "")
    threads = []
    cast = Layer.projection_in

    def recorded(self: Layer, *given: Any) -> Any:
        threads.append(threading.current_thread().name)
        return cast(self, *given)

    monkeypatch.setattr(Layer, "projection_in", recorded)
    if large:
        monkeypatch.setattr("attention_service.pipeline.run.INLINE_ELEMENTS", 0)
    fields = {**kind.fields, "input": QUERY, "dtype": "float64"}
    inline = {"projection": {role: {"weight": weight.astype(np.float64)} for role in roles}, "num_heads": 2}
    with service(layers=tmp_path) as (_, client):

        def ask(**more: Any) -> httpx.Response:
            return client.post(kind.path, content=write(fields | more, JSON), headers={"content-type": JSON})

        own, stored = ask(**inline), ask(layer="mine")
        assert (own.status_code, stored.status_code) == (200, 200), stored.text
        unknown, overflow = ask(layer="no"), ask(layer="large", dtype="float16")
    if kind.default == JSON:
        answers = [json.loads(answer.content) for answer in (own, stored)]
        for answer in answers:
            del answer["metadata"]["request_id"]
        assert answers[0] == answers[1]
    else:
        assert own.content == stored.content
    assert {"AnyIO" in name for name in threads} == {large}
    assert problem(unknown) == (422, "unknown_layer")
    assert overflow.status_code == 422
    assert [fault["pointer"] for fault in overflow.json()["errors"]] == ["/layer"]


def test_a_response_that_is_being_sent_holds_the_request_and_its_results() -> None:
    """Beside what encoding takes: 1700² weights and 1700 · 2 numbers of output in float64, more than sockets hold."""
    application = app()
    admission = application.state.engine.admission
    body = write({"input": np.zeros((1700, 2))}, SAFETENSORS)
    results = (1700 * 1700 + 1700 * 2) * 8
    with serving(application) as client:
        headers = {"Content-Type": SAFETENSORS, "Accept": SAFETENSORS}
        with client.stream("POST", "/attention", content=body, headers=headers) as response:
            assert response.status_code == 200
            held = admission.memory - admission.free
            assert len(body) <= held - results - ENCODE_BYTES <= len(body) + 1000
        until(lambda: admission.free == admission.memory)
