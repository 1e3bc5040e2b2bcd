"""The stored layers of a service: listed, described, served as models, and read once for all requests that wait."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anyio
import httpx
import numpy as np
import pytest

from attention_service.codecs.table import CODECS
from attention_service.errors import ServiceError
from attention_service.layers.files import write_layer
from attention_service.layers.layer import Layer
from attention_service.layers.store import LayerStore
from attention_service.pipeline.engine import Engine
from attention_service.pipeline.layers import Layers
from attention_service.schemas.layers import StoredLayer
from attention_service.settings import Settings
from tests.conftest import app, serving
from tests.helpers import oip
from tests.helpers.layers import (
    FEATURES,
    GIB,
    GOOD,
    HEADS,
    INPUT,
    OPTIONS,
    arrays,
    ask,
    hashed,
    inline,
    safetensors,
    write_layers,
)
from tests.helpers.messages import request
from tests.helpers.rpc import remote


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_layers(tmp_path, 0)


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_layers(tmp_path_factory.mktemp("layers"), 0, 100)


@pytest.fixture(scope="module")
def server(stored: Path) -> Iterator[httpx.Client]:
    with serving(app(layers=stored)) as client:
        yield client


# Listed and described.


def test_layers_are_described(server: httpx.Client, stored: Path) -> None:
    listed = server.get("/layers").json()["layers"]
    assert [layer["name"] for layer in listed] == ["bert-0", "bert-1"]
    assert server.get("/layers/bert-0").json() == listed[0]
    content = (stored / "bert-0.safetensors").read_bytes()
    assert listed[0]["hash"] == f"sha256:{hashlib.sha256(content).hexdigest()}"
    assert (listed[0]["options"], listed[0]["source"]) == (OPTIONS, "made by hand")
    tensors = {tensor["name"]: tensor for tensor in listed[0]["tensors"]}
    assert tensors.keys() == arrays().keys()
    expected = {"name": "sinks", "dtype": "F32", "shape": [HEADS], "nbytes": 4 * HEADS}
    assert tensors["sinks"] == expected
    assert listed[0]["nbytes"] == sum(array.nbytes for array in arrays().values())


def test_layers_are_listed_by_one_caller_at_a_time(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(Settings.model_construct(layers=folder))
    scans, answers = [], []
    describe_all = LayerStore.describe_all

    def counted(self: LayerStore) -> list[StoredLayer]:
        scans.append(1)
        return describe_all(self)

    monkeypatch.setattr(LayerStore, "describe_all", counted)

    async def ask_for_all() -> None:
        answers.append(await engine.layers.all())

    async def main() -> None:
        for _ in range(2):  # at once, and again within the interval
            async with anyio.create_task_group() as group:
                for _ in range(20):
                    group.start_soon(ask_for_all)

    anyio.run(main)
    assert (len(scans), len(answers), len(set(answers))) == (1, 40, 1)
    assert [layer["name"] for layer in json.loads(answers[0])["layers"]] == ["bert-0"]


@pytest.mark.parametrize("name", ["bert-2", "%2e%2e%2fx", "...", "attention", "x" * 500])
def test_an_unknown_layer_is_not_found(server: httpx.Client, name: str) -> None:
    response = server.get(f"/layers/{name}")
    assert (response.status_code, response.json()["code"]) == (404, "not_found")


def test_a_broken_layer_is_a_503_and_listed_with_its_error(folder: Path) -> None:
    hashed(folder, safetensors(GOOD, b"\0" * 15))
    hashed(folder, safetensors(GOOD, b"\0" * 16), name="heads", options={"num_heads": 3})
    hashed(folder, safetensors(GOOD, b"\xff" * 16), name="nan")
    with serving(app(layers=folder)) as client:
        assert client.get("/v2/models/heads/ready").status_code == 503
        assert client.get("/v2/models/nan/ready").status_code == 200
        assert ask(client, layer="nan").status_code == ask(client, layer="heads").status_code == 503
        assert client.get("/v2/models/nan/ready").status_code == 503
        response = ask(client, layer="bad")
        assert (response.status_code, response.json()["code"]) == (503, "layer_unavailable")
        assert response.headers["retry-after"] == "1"
        assert client.get("/layers/bad").status_code == 503
        assert client.get("/v2/models/bad/ready").status_code == 503
        found = {layer["name"]: layer for layer in client.get("/layers").json()["layers"]}
        assert "truncated" in found["bad"]["error"]
        assert "a multiple of num_heads = 3" in found["heads"]["error"]
        assert "finite" in found["nan"]["error"]
        assert "error" not in found["bert-0"]
        assert ask(client, layer="bert-0").status_code == 200


def test_a_directory_that_cannot_be_read_is_an_invalid_setting(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="a folder that can be read"):
        Settings(layers=tmp_path / "missing")
    assert Settings(layers=tmp_path).layers == tmp_path


# Models of the inference protocol.


@pytest.mark.parametrize("binary", [True, False])
def test_each_layer_is_a_model_over_http(server: httpx.Client, binary: bool) -> None:
    for path in ("/v2/models/bert-0", "/v2/models/bert-0/versions/1"):
        metadata = server.get(path).json()
        assert (metadata["name"], metadata["versions"]) == ("bert-0", ["1"])
        assert metadata["inputs"] == [{"name": "input", "datatype": "FP32", "shape": [-1, FEATURES]}]
        assert metadata["outputs"] == [{"name": "output", "datatype": "FP32", "shape": [-1, FEATURES]}]
        assert server.get(f"{path}/ready").json() == {"name": "bert-0", "ready": True}
        content, headers = oip.body([oip.tensor("input", INPUT, binary)], outputs=[{"name": "output"}])
        response = server.post(f"{path}/infer", content=content, headers=headers)
        assert response.status_code == 200, response.text
        answer = oip.read(response)
        assert answer["rest"]["model_name"] == "bert-0"
        np.testing.assert_allclose(answer["output"], ask(server, **inline()).json()["output"], rtol=1e-12)
    response = server.post("/v2/models/attention/infer", content=content, headers=headers)
    assert response.status_code == 200


def test_a_layer_is_a_parameter_of_the_model_attention(server: httpx.Client) -> None:
    content, headers = oip.body([oip.tensor("input", INPUT, True)], parameters={"layer": "bert-0"})
    answer = oip.read(server.post(oip.INFER, content=content, headers=headers))
    np.testing.assert_allclose(answer["output"], ask(server, layer="bert-0").json()["output"], rtol=1e-12)
    response = server.post("/v2/models/bert-1/infer", content=content, headers=headers)
    assert (response.status_code, "/parameters/layer" in response.json()["error"]) == (422, True)
    assert server.get("/v2/models/bert-0/versions/2").status_code == 404
    assert server.get("/v2/models/bert-2").status_code == 404


@pytest.mark.parametrize("raw", [True, False])
def test_each_layer_is_a_model_over_grpc(stored: Path, raw: bool) -> None:
    with remote(layers=stored) as far:
        assert far.named("ModelReady", "bert-0").ready
        metadata = far.named("ModelMetadata", "bert-0", "1")
        assert [(entry.name, list(entry.shape)) for entry in metadata.inputs] == [("input", [-1, FEATURES])]
        message = request({"input": INPUT}, raw=raw)
        message.model_name = "bert-0"
        answer = far.infer(message)
        assert answer["rest"].model_name == "bert-0"
        np.testing.assert_allclose(answer["output"], ask(far.http, **inline()).json()["output"], rtol=1e-12)
        with pytest.raises(Exception, match="or a stored layer"):
            far.named("ModelReady", "bert-7")
        (stored / "broken.json").write_text("{")
        far.app.state.engine.layers = Layers(LayerStore(stored, GIB))  # whose list of names is not a second old
        try:
            assert not far.named("ModelReady", "broken").ready
        finally:
            (stored / "broken.json").unlink()


# Read once for all requests that wait.


def test_requests_at_once_read_a_layer_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(Settings.model_construct(layers=folder))
    decoded = CODECS["application/json"].decode(json.dumps({"input": [[1.0]], "layer": "bert-0"}).encode(), 2**20)
    reads = []
    get = LayerStore.get

    def counted(self: LayerStore, name: str) -> Layer:
        reads.append(name)
        return get(self, name)

    monkeypatch.setattr(LayerStore, "get", counted)

    async def run() -> None:
        async with anyio.create_task_group() as group:
            for _ in range(20):
                group.start_soon(engine.layers.of, decoded, engine.start())

    anyio.run(run)
    assert reads == ["bert-0"]


def test_an_answer_while_the_layer_is_read_again_is_that_of_the_version_before(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Engine(Settings.model_construct(layers=folder))
    decoded = CODECS["application/json"].decode(b'{"layer": "bert-0"}', 2**20)
    begun, may_end = threading.Event(), threading.Event()
    get = LayerStore.get

    async def run() -> None:
        first = await engine.layers.of(decoded, engine.start())
        write_layer(folder, "bert-0", arrays(50), OPTIONS, "another")
        monkeypatch.setattr(LayerStore, "fresh", lambda self, name: None)

        def slow(self: LayerStore, name: str) -> Layer:
            begun.set()
            may_end.wait()
            monkeypatch.setattr("attention_service.layers.store.INTERVAL", 0.0)
            return get(self, name)

        monkeypatch.setattr(LayerStore, "get", slow)
        found: list[Any] = []

        async def wait() -> None:
            found.append(await engine.layers.of(decoded, engine.start()))

        async with anyio.create_task_group() as group:
            group.start_soon(wait)
            await anyio.to_thread.run_sync(begun.wait)
            assert await engine.layers.of(decoded, engine.start()) is first
            may_end.set()
        assert found[0].source == "another"

    anyio.run(run)


def test_an_error_is_raised_in_each_request_that_waits(folder: Path) -> None:
    hashed(folder, b"")
    engine = Engine(Settings.model_construct(layers=folder))
    decoded = CODECS["application/json"].decode(b'{"layer": "bad"}', 2**20)
    errors: list[ServiceError] = []

    async def one() -> None:
        try:
            await engine.layers.of(decoded, engine.start())
        except ServiceError as error:
            errors.append(error)

    async def run() -> None:
        async with anyio.create_task_group() as group:
            for _ in range(5):
                group.start_soon(one)

    anyio.run(run)
    assert len(set(map(id, errors))) == 5
