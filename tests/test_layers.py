"""Stored layers: what requests with a layer compute, how files are read and replaced, and hostile files."""

from __future__ import annotations

import gc
import hashlib
import json
import os
import re
import subprocess
import sys
import threading
import tracemalloc
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anyio
import httpx
import numpy as np
import pytest

from attention_service.attention.steps.rotation import RotationStep
from attention_service.codecs.safetensors import file_chunks
from attention_service.codecs.table import CODECS
from attention_service.errors import LayerUnavailable, ServiceError, UnknownLayer
from attention_service.layers import files
from attention_service.layers.files import remove_layer, write_layer
from attention_service.layers.layer import MAX_PLANS, Layer
from attention_service.layers.names import is_name
from attention_service.layers.store import INTERVAL, LayerStore
from attention_service.layers.tensors import BadFile
from attention_service.pipeline.engine import Engine
from attention_service.pipeline.layers import Layers
from attention_service.schemas.layers import StoredLayer
from attention_service.settings import Settings
from tests.conftest import app, serving
from tests.helpers import oip, wire
from tests.helpers.messages import request
from tests.helpers.rpc import remote

HEADS, FEATURES, LENGTH = 2, 8, 5
ROLES = ("query", "key", "value", "output")
OPTIONS: dict[str, Any] = {"num_heads": HEADS, "scale": 0.3, "rotary": {"base": 100.0}, "is_causal": True}
GIB = 2**30


def numbers(*shape: int, seed: int = 0, dtype: Any = np.float32) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(dtype)


def arrays(seed: int = 0, features: int = FEATURES) -> dict[str, np.ndarray]:
    found = {f"projection.{role}.weight": numbers(features, features, seed=seed + i) for i, role in enumerate(ROLES)}
    return found | {"projection.query.bias": numbers(features, seed=seed + 9), "sinks": numbers(HEADS, seed=seed + 10)}


def inline(seed: int = 0) -> dict[str, Any]:
    """The fields of a request that are the layer of `arrays`, as lists."""
    found: dict[str, Any] = {}
    for name, array in arrays(seed).items():
        *path, last = name.split(".")
        inner = found
        for step in path:
            inner = inner.setdefault(step, {})
        inner[last] = array.tolist()
    return found | OPTIONS


INPUT = numbers(LENGTH, FEATURES, seed=20, dtype=np.float64)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_layer(tmp_path, "bert-0", arrays(), OPTIONS, "made by hand")
    return tmp_path


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("layers")
    write_layer(path, "bert-0", arrays(), OPTIONS, "made by hand")
    write_layer(path, "bert-1", arrays(100), OPTIONS, "made by hand")
    return path


@pytest.fixture(scope="module")
def server(stored: Path) -> Iterator[httpx.Client]:
    with serving(app(layers=stored)) as client:
        yield client


def ask(client: httpx.Client, **fields: Any) -> httpx.Response:
    return client.post("/attention", json={"input": INPUT.tolist()} | fields)


def store(folder: Path, limit: int = GIB, **more: Any) -> tuple[LayerStore, list[float]]:
    """A store whose clock is the first number of a list."""
    now = [0.0]
    return LayerStore(folder, limit, clock=lambda: now[0], pause=more.pop("pause", lambda seconds: None)), now


# What requests with a layer compute.


@pytest.mark.parametrize("media_type", wire.MEDIA_TYPES)
def test_a_layer_computes_what_its_fields_compute(server: httpx.Client, media_type: str) -> None:
    body = wire.write({"input": INPUT, "layer": "bert-0"}, media_type)
    for _ in range(3):  # with and without a plan
        response = server.post("/attention", content=body, headers={"Content-Type": media_type})
        assert response.status_code == 200, response.text
        expected = ask(server, **inline()).json()
        found = wire.read(response.content, media_type)
        for name in ("output", "attention_weights"):
            np.testing.assert_allclose(found[name], expected[name], rtol=1e-12)


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bfloat16"])
def test_a_layer_is_cast_to_the_type_of_the_request(server: httpx.Client, dtype: str) -> None:
    for _ in range(2):
        assert (
            ask(server, layer="bert-0", dtype=dtype).json()["output"]
            == ask(server, **inline(), dtype=dtype).json()["output"]
        )


def test_a_context_goes_through_the_layer_too(server: httpx.Client) -> None:
    context = numbers(3, FEATURES, seed=21).tolist()
    more = {"context": context, "query_offset": 0}
    assert ask(server, layer="bert-0", **more).json()["output"] == ask(server, **inline(), **more).json()["output"]


def test_query_key_and_value_go_through_the_layer_too(server: httpx.Client) -> None:
    sources = {name: numbers(LENGTH, FEATURES, seed=seed).tolist() for seed, name in enumerate(ROLES[:3])}
    found = server.post("/attention", json={**sources, "layer": "bert-0"}).json()
    assert found["output"] == server.post("/attention", json=sources | inline()).json()["output"]


@pytest.mark.parametrize(
    "more",
    [
        {"scale": 2.0},
        {"rotary": {"dim": 2}},
        {"is_causal": False},
        {"sinks": [0.5, -0.5]},
        {"num_heads": 4, "sinks": [0.0] * 4},
        {"softcap": 1.5, "include": ["logsumexp"], "key_lengths": 3},
    ],
    ids=str,
)
def test_fields_of_the_request_replace_those_of_the_layer_as_a_whole(
    server: httpx.Client, more: dict[str, Any]
) -> None:
    assert (
        ask(server, layer="bert-0", **more).json().items()
        >= {"output": ask(server, **(inline() | more)).json()["output"]}.items()
    )


def test_null_keeps_the_fields_of_the_layer(server: httpx.Client) -> None:
    nothing = dict.fromkeys(("projection", "scale", "sinks", "rotary", "num_heads", "is_causal", "include"))
    assert ask(server, layer="bert-0", **nothing).json()["output"] == ask(server, layer="bert-0").json()["output"]
    assert ask(server, layer=None, **inline()).status_code == 200


def test_a_projection_beside_a_layer_is_refused(server: httpx.Client) -> None:
    for projection in ({}, {"query": {"weight": numbers(FEATURES, FEATURES).tolist()}}):
        problem = ask(server, layer="bert-0", projection=projection).json()
        fault = problem["errors"][0]
        assert (problem["status"], fault["code"], fault["pointer"]) == (422, "field_conflict", "/projection")


@pytest.mark.parametrize(
    ("fields", "code", "pointer", "text"),
    [
        ({"layer": "bert-2"}, "unknown_layer", "/layer", "bert-0"),
        ({"layer": "nothing like it"}, "unknown_layer", "/layer", "bert-0"),
        ({"layer": "attention"}, "unknown_layer", "/layer", "bert-0"),
        ({"layer": "../bert-0"}, "unknown_layer", "/layer", "bert-0"),
        ({"layer": "/etc/passwd"}, "unknown_layer", "/layer", "bert-0"),
        ({"layer": "bert-0\u0000"}, "unknown_layer", "/layer", "bert-0"),
        ({"layer": "x" * 100_000}, "unknown_layer", "/layer", "bert-0"),
        ({"layer": 7}, "invalid_value", "/layer", "string"),
        ({"layer": ["bert-0"]}, "invalid_value", "/layer", "string"),
        ({"layer": "bert-0", "input": [[1.0, 2.0]]}, "shape_mismatch", "/layer", "projection.query.weight"),
        ({"layer": "bert-0", "num_heads": 3}, "shape_mismatch", "/layer", "in layer bert-0"),
        ({"layer": "bert-0", "softcap": 0}, "invalid_value", "/softcap", "above 0"),
        ({"layer": "bert-0", "sinks": [1.0]}, "shape_mismatch", "/sinks", "(2,)"),
        ({"layer": "bert-0", "layers": 1}, "unknown_field", "/layers", "layer"),
    ],
    ids=str,
)  # fmt: skip
def test_bad_requests_with_layers(server: httpx.Client, fields: Any, code: str, pointer: str, text: str) -> None:
    for operation in ("/attention", "/attention/compare", "/attention/heatmap"):
        response = server.post(operation, json={"input": INPUT.tolist()} | fields)
        problem = response.json()
        fault = problem["errors"][0]
        assert (response.status_code, fault["code"], fault["pointer"]) == (422, code, pointer), problem
        assert text in problem["detail"]
        assert len(problem["detail"]) < 400


def test_a_service_without_layers_says_how_to_set_them_up(client: httpx.Client) -> None:
    problem = ask(client, layer="bert-0").json()
    assert (problem["status"], problem["code"], problem["errors"][0]["pointer"]) == (422, "unknown_layer", "/layer")
    assert "ATTENTION_LAYERS" in problem["detail"]
    assert client.get("/layers").json() == {"layers": []}
    assert client.get("/layers/bert-0").status_code == 404


def test_the_library_has_no_layers() -> None:
    from attention_service import attend
    from attention_service.errors import InvalidRequest

    more: Any = {"layer": "bert-0"}
    with pytest.raises(InvalidRequest, match=r"/layer: .*a service"):
        attend(input=INPUT, **more)


def test_comparisons_and_heatmaps_take_layers(server: httpx.Client) -> None:
    output = ask(server, **inline()).json()["output"]
    body = {"input": INPUT.tolist(), "actual": {"output": output}}
    report = server.post("/attention/compare", json=body | {"layer": "bert-0"}).json()
    assert report["verdict"]["status"] == "correct"
    assert server.post("/attention/compare", json=body | {"layer": "bert-1"}).json()["verdict"]["status"] == "wrong"
    pictures = [
        server.post("/attention/heatmap", json={"input": INPUT.tolist()} | fields).content
        for fields in ({"layer": "bert-0"}, inline())
    ]
    assert pictures[0] == pictures[1]


def test_the_command_line_computes_with_layers(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capfdbinary: Any, server: httpx.Client
) -> None:
    from attention_service.cli import main

    monkeypatch.setenv("ATTENTION_LAYERS", str(folder))
    (folder / "request").write_text(json.dumps({"input": INPUT.tolist(), "layer": "bert-0"}))
    assert main(["compute", str(folder / "request")]) == 0
    expected = ask(server, layer="bert-0").json()["output"]
    assert json.loads(capfdbinary.readouterr().out)["output"] == expected


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


def test_files_that_did_not_change_are_not_described_again(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for i in range(5):
        write_layer(folder, f"layer-{i}", arrays(i), OPTIONS, "before")
    for path in folder.iterdir():
        os.utime(path, (10**9, 10**9))  # else a change might keep the time
    layers, now = store(folder)
    before = layers.describe_all()
    opened: list[str] = []
    describe = files.describe

    def recorded(folder: Path, name: str, limit: int) -> StoredLayer:
        opened.append(name)
        return describe(folder, name, limit)

    monkeypatch.setattr("attention_service.layers.store.describe", recorded)
    now[0] += 2 * INTERVAL
    assert (layers.describe_all(), opened) == (before, [])
    write_layer(folder, "layer-3", arrays(30), OPTIONS, "after")
    remove_layer(folder, "layer-4")
    now[0] += 2 * INTERVAL
    assert [(layer.name, layer.source) for layer in layers.describe_all()[1:]] == [
        ("layer-0", "before"), ("layer-1", "before"), ("layer-2", "before"), ("layer-3", "after"),
    ]  # fmt: skip
    assert opened == ["layer-3"]


@pytest.mark.parametrize("name", ["bert-2", "%2e%2e%2fx", "...", "attention", "x" * 500])
def test_an_unknown_layer_is_not_found(server: httpx.Client, name: str) -> None:
    response = server.get(f"/layers/{name}")
    assert (response.status_code, response.json()["code"]) == (404, "not_found")


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


# Names.


@pytest.mark.parametrize("name", ["a", "bert-0", "A.b_c-9", "x" * 64, "_", "-a"])
def test_valid_names(name: str) -> None:
    assert is_name(name)


@pytest.mark.parametrize("name", ["", ".a", "..", "a/b", "a\\b", "a b", "ä", "x" * 65, "attention", "a\n", "a\0"])
def test_invalid_names(name: str) -> None:
    assert not is_name(name)


# Replacing files.


def test_files_are_looked_at_once_a_second(folder: Path) -> None:
    layers, now = store(folder)
    first = layers.get("bert-0")
    write_layer(folder, "bert-0", arrays(50), OPTIONS, "another")
    now[0] += INTERVAL * 0.9
    assert layers.fresh("bert-0") is first
    assert layers.get("bert-0") is first
    now[0] += INTERVAL * 0.2
    assert layers.fresh("bert-0") is None
    second = layers.get("bert-0")
    assert (second.source, second.hash != first.hash) == ("another", True)
    now[0] += 2 * INTERVAL
    assert layers.get("bert-0") is second  # unchanged files are not read again


def test_changed_options_are_read(folder: Path) -> None:
    layers, now = store(folder)
    first = layers.get("bert-0")
    write_layer(folder, "bert-0", arrays(), OPTIONS | {"scale": 1.0}, "another scale")
    now[0] += 2 * INTERVAL
    assert layers.get("bert-0").options["scale"] == 1.0
    assert first.options["scale"] == 0.3


def test_the_old_version_is_used_while_files_do_not_agree(folder: Path) -> None:
    layers, now = store(folder)
    first = layers.get("bert-0")
    before = (folder / "bert-0.safetensors").read_bytes()
    write_layer(folder, "bert-0", arrays(50), OPTIONS, "another")
    after = (folder / "bert-0.safetensors").read_bytes()
    (folder / "bert-0.safetensors").write_bytes(before)
    for broken in (before, after[:-1], after[:20], b"", after + b"\0"):
        (folder / "bert-0.safetensors").write_bytes(broken)
        now[0] += 2 * INTERVAL
        assert layers.get("bert-0") is first
    (folder / "bert-0.safetensors").unlink()
    now[0] += 2 * INTERVAL
    assert layers.get("bert-0") is first
    (folder / "bert-0.safetensors").write_bytes(after)
    now[0] += 2 * INTERVAL
    assert layers.get("bert-0").source == "another"


def test_files_that_agree_a_moment_later_are_read_again_at_once(folder: Path) -> None:
    content = (folder / "bert-0.safetensors").read_bytes()
    (folder / "bert-0.safetensors").write_bytes(content[:100])
    pauses = []

    def pause(seconds: float) -> None:
        pauses.append(seconds)
        (folder / "bert-0.safetensors").write_bytes(content)

    layers, _ = store(folder, pause=pause)
    assert layers.get("bert-0").source == "made by hand"
    assert len(pauses) == 1


def test_a_removed_layer_is_gone(folder: Path) -> None:
    layers, now = store(folder)
    layers.get("bert-0")
    remove_layer(folder, "bert-0")
    assert sorted(folder.iterdir()) == []
    now[0] += 2 * INTERVAL
    with pytest.raises(UnknownLayer, match="none"):
        layers.get("bert-0")
    assert layers.nbytes == 0


@pytest.mark.slow
def test_nobody_reads_half_a_layer(folder: Path) -> None:
    """Each answer is that of one version, while two writers and the clock go on."""
    versions = [arrays(0), arrays(50)]
    hashes = set()
    done = threading.Event()
    clock = [0.0]
    layers = LayerStore(folder, GIB, clock=lambda: clock[0])

    def write() -> None:
        for i in range(60):
            write_layer(folder, "bert-0", versions[i % 2], OPTIONS | {"scale": 0.3 + i % 2}, str(i % 2))
        done.set()

    writer = threading.Thread(target=write)
    writer.start()
    while not done.is_set():
        clock[0] += 2 * INTERVAL
        layer = layers.get("bert-0")
        hashes.add(layer.hash)
        version = versions[int(layer.options["scale"] > 1)]
        assert all((layer.arrays[name] == array).all() for name, array in version.items())
    writer.join()
    assert len(hashes) == 2


# Times that files are replaced, if clients do not see both versions before.
MOST_WRITES = 4000
SUFFIXES = ("safetensors", "json")


def replace_layer(folder: Path, version: int, content: list[bytes] | None) -> None:
    """Renames files into place, or writes `content` into those that are there."""
    if content is None:
        write_layer(folder, "bert-0", arrays(50 * version), OPTIONS, "")
    else:
        for suffix, part in zip(SUFFIXES, content, strict=True):
            (folder / f"bert-0.{suffix}").write_bytes(part)


@pytest.mark.slow
def test_every_answer_is_that_of_one_version(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients ask while the files are renamed into place, and also overwritten where they are, until they saw both."""
    monkeypatch.setattr("attention_service.layers.store.INTERVAL", 0.0)
    contents = []
    for version in (0, 1):
        replace_layer(folder, version, None)
        contents.append([(folder / f"bert-0.{suffix}").read_bytes() for suffix in SUFFIXES])
    done = threading.Event()
    found: list[httpx.Response] = []

    def write() -> None:
        for i in range(MOST_WRITES):
            seen = {response.text.partition("metadata")[0] for response in found}
            if i >= 40 and len(seen) > 1:
                break
            replace_layer(folder, i % 2, None if i % 4 < 2 else contents[i % 2])
        done.set()

    def read() -> None:
        while not done.is_set():
            found.append(ask(client, layer="bert-0"))

    with serving(app(layers=folder)) as client:
        expected = [ask(client, **inline(seed)).json()["output"] for seed in (0, 50)]
        # The promise is for a version that was read: without one, files that do not agree are a 503.
        assert ask(client, layer="bert-0").status_code == 200
        threads = [threading.Thread(target=target) for target in (write, read, read, read)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert {response.status_code for response in found} == {200}
    outputs = [response.json()["output"] for response in found]
    assert all(output in expected for output in outputs)
    assert all(output in outputs for output in expected)


@pytest.mark.torch
def test_layers_are_computed_by_torch(server: httpx.Client) -> None:
    for dtype in ("float32", "float64", "bfloat16"):
        answers = [
            ask(server, layer="bert-0", dtype=dtype, backend=name).json() for name in ("numpy", "torch", "torch")
        ]
        assert [answer["metadata"]["backend"] for answer in answers] == ["numpy", "torch", "torch"]
        for answer in answers[1:]:
            tolerance = 0.05 if dtype == "bfloat16" else 1e-5
            np.testing.assert_allclose(answer["output"], answers[0]["output"], rtol=tolerance, atol=tolerance)


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


# Memory.


def test_layers_not_used_for_longest_make_room(tmp_path: Path) -> None:
    for i in range(3):
        write_layer(tmp_path, f"layer-{i}", arrays(i, features=64), OPTIONS, "")
    size = (tmp_path / "layer-0.safetensors").stat().st_size
    layers, _ = store(tmp_path, int(2.5 * size))
    layers.get("layer-0")
    layers.get("layer-1")
    layers.get("layer-0")
    layers.get("layer-2")
    assert layers.last("layer-1") is None
    assert layers.last("layer-0") is not None
    assert layers.nbytes <= 2.5 * size
    assert layers.get("layer-1").name == "layer-1"
    assert layers.nbytes <= 2.5 * size


def test_a_layer_larger_than_all_memory_is_refused(folder: Path) -> None:
    layers, _ = store(folder, 1000)
    with pytest.raises(LayerUnavailable, match="ATTENTION_LAYERS_MEMORY allows 1000B"):
        layers.get("bert-0")


def test_casts_and_plans_count_as_memory_of_their_layer(folder: Path) -> None:
    size = (folder / "bert-0.safetensors").stat().st_size
    for limit, kept in ((GIB, True), (size, False)):
        engine = Engine(Settings.model_construct())
        layers, _ = store(folder, limit)
        layer = layers.get("bert-0")
        body = json.dumps({"input": INPUT.tolist(), "layer": "bert-0"}).encode()
        first, second = (
            engine.attention.prepare(CODECS["application/json"].decode(body, 2**20), layer) for _ in range(2)
        )
        assert (first.shared.plan is second.shared.plan) == kept
        assert (layers.nbytes > size) == kept
        assert layers.nbytes <= limit


def test_memory_is_given_back(folder: Path) -> None:
    """By requests that fail while the layer is cast or a backend is chosen, and by plans that make room for others."""
    engine = Engine(Settings.model_construct())
    layers, _ = store(folder)
    layer = layers.get("bert-0")

    def prepare(**more: Any) -> None:
        body = json.dumps({"input": INPUT.tolist(), "layer": "bert-0"} | more).encode()
        engine.attention.prepare(CODECS["application/json"].decode(body, 2**20), layer)

    prepare(dtype="float32", scale=0.5)
    before = layers.nbytes
    for _ in range(3):
        with pytest.raises(ServiceError, match=r"/(backend|device)"):
            prepare(dtype="float32", device="cuda")
    assert layers.nbytes == before
    prepare()
    for i in range(100):
        prepare(scale=float(i))
    assert len(layer.plans) <= MAX_PLANS
    kept = sum(
        step.cos.nbytes
        for kept in layer.plans.values()
        for step in (*kept.plan.query_steps, *kept.plan.key_steps)
        if isinstance(step, RotationStep)
    )
    assert kept < layers.nbytes < before + 10**5

    write_layer(folder, "large", {WEIGHT: np.full((2, 2), 1e30, np.float32)}, {}, "")
    large = layers.get("large")
    before = layers.nbytes
    decoded = CODECS["application/json"].decode(b'{"input": [[1, 2]], "layer": "large", "dtype": "float16"}', 2**20)
    for _ in range(3):
        with (
            pytest.raises(ServiceError, match=r"/layer: .*projection.query.weight.* float16"),
            large.blamed(decoded.fields),
        ):
            engine.attention.prepare(decoded, large)
    assert layers.nbytes == before


def test_an_evicted_layer_is_freed_at_once(folder: Path) -> None:
    write_layer(folder, "other", arrays(3), OPTIONS, "")
    limit = int(1.5 * (folder / "bert-0.safetensors").stat().st_size)
    layers, _ = store(folder, limit)
    gc.disable()
    try:
        array = weakref.ref(layers.get("bert-0").arrays["sinks"])
        assert array() is not None
        layers.get("other")
        assert array() is None
    finally:
        gc.enable()


def test_the_memory_of_a_layer_is_not_that_of_its_requests(tmp_path: Path) -> None:
    """A request of a few kilobytes with a layer of megabytes, which need a plan of its own type."""
    write_layer(tmp_path, "wide", arrays(features=512), {"num_heads": HEADS}, "")
    engine = Engine(Settings.model_construct(layers=tmp_path))
    layer = store(tmp_path)[0].get("wide")
    body = wire.write({"input": numbers(2, 512), "layer": "wide"}, wire.SAFETENSORS)
    prepared = engine.attention.prepare(CODECS[wire.SAFETENSORS].decode(body, 2**20), layer)
    assert layer.nbytes > 4 * 2**20
    assert prepared.decoded.nbytes < 2**14
    assert prepared.shared.cost.compute < 2**20


def test_a_cached_plan_is_not_that_of_another_layer(server: httpx.Client) -> None:
    outputs = [ask(server, layer=name).json()["output"] for name in ("bert-0", "bert-1", "bert-0", "bert-1")]
    assert outputs[0] == outputs[2] != outputs[1] == outputs[3]
    assert outputs[1] == ask(server, **inline(100)).json()["output"]


def test_arrays_of_layers_cannot_be_written_to(folder: Path) -> None:
    layer = store(folder)[0].get("bert-0")
    with pytest.raises(ValueError, match="read-only"):
        layer.arrays["sinks"][0] = 1


# Hostile files.


def hashed(folder: Path, content: bytes, name: str = "bad", **more: Any) -> None:
    """Write a layer with any tensors, and a hash that agrees with them."""
    (folder / f"{name}.safetensors").write_bytes(content)
    about = {"hash": hashlib.sha256(content).hexdigest(), "options": {"num_heads": HEADS}} | more
    (folder / f"{name}.json").write_text(json.dumps(about))


def safetensors(header: Any, data: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def entry(shape: Any, begin: Any, end: Any, dtype: Any = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


WEIGHT = "projection.query.weight"
GOOD = {WEIGHT: entry([2, 2], 0, 16)}
HOSTILE: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "fewer than 8 bytes"),
    "a header of exabytes": (b"\xff" * 8, "header of 18446744073709551615 bytes"),
    "a header above 1 MiB": (safetensors(b" " * (2**20 + 1)), "at most 1048576"),
    "a header longer than the file": ((100).to_bytes(8, "little") + b"{}", "truncated"),
    "no JSON": (safetensors(b"{]"), "not valid JSON"),
    "no UTF-8": (safetensors(b'{"\xff": 1}'), "not valid JSON"),
    "no object": (safetensors([]), "no object"),
    "deep": (safetensors(b"[" * 200_000), "nested too deeply"),
    "long numbers": (safetensors(b'{"a": ' + b"9" * 5000 + b"}"), "not valid JSON"),
    "twice": (safetensors(b'{"a": 1, "a": 2}'), "'a' once"),
    "no entry": (safetensors({"a": 1}), "dtype, shape and data_offsets"),
    "truncated data": (safetensors(GOOD, b"\0" * 15), "truncated"),
    "more data": (safetensors(GOOD, b"\0" * 17), "longer"),
    "a gap": (safetensors({WEIGHT: entry([2, 2], 1, 17)}, b"\0" * 17), "begins at byte 0"),
    "offsets back": (safetensors({WEIGHT: entry([2, 2], 16, 0)}, b"\0" * 16), "do not agree"),
    "negative": (safetensors({WEIGHT: entry([2, -2], 0, 16)}, b"\0" * 16), "axes of"),
    "huge shapes": (safetensors({WEIGHT: entry([2**62, 2**62], 0, 16)}, b"\0" * 16), "do not agree"),
    "texts as offsets": (safetensors({WEIGHT: entry([2, 2], "0", "16")}, b"\0" * 16), "do not agree"),
    "another type": (safetensors({WEIGHT: entry([2, 2], 0, 4, "F8_E4M3")}, b"\0" * 4), "one of BOOL"),
    "a type that is no text": (safetensors({WEIGHT: entry([2, 2], 0, 16, [1])}, b"\0" * 16), "one of BOOL"),
    "booleans": (safetensors({"mask": entry([1], 0, 1, "BOOL")}, b"\x02"), "bytes of 0 and 1"),
    "not finite": (safetensors(GOOD, b"\xff" * 16), "finite number"),
    "an unknown field": (safetensors({"weights": entry([2], 0, 8)}, b"\0" * 8), "known field"),
    "a field of requests": (safetensors({"input": entry([2, 2], 0, 16)}, b"\0" * 16), "and no layer"),
    "a field within another": (
        safetensors({"sinks": entry([2], 0, 8), "sinks.x": entry([2], 8, 16)}, b"\0" * 16), "beside 'sinks.x'"),
    "a number as an array": (safetensors({"num_heads": entry([2], 0, 8)}, b"\0" * 8), "both of its files"),
    "shapes that do not agree": (
        safetensors({WEIGHT: entry([4, 3], 0, 48), "projection.key.weight": entry([2, 3], 48, 72)}, b"\0" * 72),
        "features out"),
    "sinks for other heads": (
        safetensors({WEIGHT: entry([2, 2], 0, 16), "sinks": entry([3], 16, 28)}, b"\0" * 28), "sinks: expected (2,)"),
    "a vector as weight": (safetensors({WEIGHT: entry([4], 0, 16)}, b"\0" * 16), "(out, in)"),
    "a number as weight": (safetensors({WEIGHT: entry([], 0, 4)}, b"\0" * 4), "(out, in)"),
    "no features in": (safetensors({WEIGHT: entry([4, 0], 0, 0)}), "projection.query.weight: expected (out, in)"),
    "a bias without a weight": (
        safetensors({"projection.query.bias": entry([2], 0, 8)}, b"\0" * 8), "projection.query: expected weight"),
    "an output map for other heads": (
        safetensors({"projection.output.weight": entry([2, 3], 0, 24)}, b"\0" * 24), "expected (·, 2)"),
    "norms for other heads": (
        safetensors({"query_norm.weight": entry([2], 0, 8), "key_norm.bias": entry([3], 8, 20)}, b"\0" * 20),
        "key_norm.bias: expected (2,)"),
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_tensors_are_an_error_that_says_why(name: str, folder: Path) -> None:
    content, text = HOSTILE[name]
    hashed(folder, content)
    layers, _ = store(folder)
    with pytest.raises(LayerUnavailable) as error:
        layers.get("bad")
    assert text in str(error.value)
    assert len(str(error.value)) < 500
    assert layers.get("bert-0").name == "bert-0"
    assert text in str(listed(layers)["bad"])
    assert listed(layers)["bert-0"] == ""


def listed(layers: LayerStore) -> dict[str, str]:
    """Why each layer cannot be used, as the list says it; "" for those that can."""
    return {layer.name: layer.error or "" for layer in layers.describe_all()}


# What the header of the tensors does not tell.
UNSEEN = ("booleans", "not finite")


@pytest.mark.parametrize("name", [name for name in HOSTILE if name not in UNSEEN])
def test_a_layer_that_was_not_read_is_listed_with_its_error(name: str, folder: Path) -> None:
    content, text = HOSTILE[name]
    hashed(folder, content)
    layers, _ = store(folder)
    assert text in listed(layers)["bad"]
    with pytest.raises(LayerUnavailable, match=re.escape(text)):
        layers.describe("bad")
    assert layers.nbytes == 0


@pytest.mark.parametrize("name", UNSEEN)
def test_numbers_that_are_wrong_are_listed_once_they_were_read(name: str, folder: Path) -> None:
    hashed(folder, HOSTILE[name][0])
    layers, now = store(folder)
    assert listed(layers)["bad"] == ""
    for _ in range(2):  # at once, and when the files are looked at again
        with pytest.raises(LayerUnavailable):
            layers.get("bad")
        assert HOSTILE[name][1] in listed(layers)["bad"]
        now[0] += 2 * INTERVAL
    hashed(folder, safetensors(GOOD, b"\0" * 16))
    now[0] += 2 * INTERVAL
    assert listed(layers)["bad"] == ""


FINITE: dict[str, tuple[int, ...]] = {
    "projection.query.weight": (8, 8), "projection.query.bias": (8,), "projection.output.kernel": (8, 8),
    "projection.gate.weight": (2, 8), "query_norm.weight": (4,), "value_norm.weight": (4,), "value_norm.bias": (4,),
    "rotary.cos": (9, 2), "rotary.sin": (9, 2), "sinks": (2,), "scale": (2,), "alibi_slopes": (2,), "bias": (1, 1),
}  # fmt: skip


@pytest.mark.parametrize("name", FINITE)
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_every_number_of_a_layer_is_finite(name: str, dtype: str, folder: Path) -> None:
    good = {each: np.ones(shape, dtype) for each, shape in FINITE.items()}
    good["rotary.sin"] = good["rotary.cos"] = np.ones((9, 2), dtype)
    write_layer(folder, "good", good, {"num_heads": 2}, "")
    assert store(folder)[0].get("good").nbytes
    bad = good[name].copy()
    bad.flat[-1] = np.nan
    hashed(folder, b"".join(file_chunks(good | {name: bad}, {})[0]))
    with pytest.raises(LayerUnavailable, match="a finite number"):
        store(folder)[0].get("bad")


def test_a_layer_may_have_any_shapes_that_fit(folder: Path) -> None:
    """Sources of different sizes, one map of many, or none."""
    for tensors, options in (
        ({"query.weight": (8, 8), "key.weight": (8, 6), "value.weight": (8, 10), "output.weight": (3, 8)}, {}),
        ({"query.kernel": (4, 8)}, {}),
        ({"key.weight": (2, 3, 6)}, {"num_heads": 4}),
        ({"output.weight": (6, 8)}, {}),
        ({"gate.weight": (2, 8)}, {}),
        ({"gate.weight": (8, 8)}, {"layout": "dl"}),
        ({}, {"rotary": {"dim": 6}, "layout": "bhld"}),
        ({}, {"rotary": {}}),
    ):
        found = {f"projection.{name}": np.ones(shape, np.float32) for name, shape in tensors.items()}
        write_layer(folder, "any", found, {"num_heads": 2} | options, "")
        layers, _ = store(folder)
        assert listed(layers)["any"] == ""
        assert layers.get("any").name == "any"


def test_a_broken_replacement_leaves_the_version_before(folder: Path) -> None:
    """In answers, in the list and for readiness alike."""
    layers, now = store(folder)
    first = layers.get("bert-0")
    for content, _ in HOSTILE.values():
        hashed(folder, content)
        for suffix in ("safetensors", "json"):
            (folder / f"bad.{suffix}").replace(folder / f"bert-0.{suffix}")
        now[0] += 2 * INTERVAL
        assert layers.get("bert-0") is first
        assert (layers.describe("bert-0").hash, listed(layers)["bert-0"]) == (first.hash, "")
        assert [tensor.name for tensor in layers.describe("bert-0").tensors] == list(first.arrays)


def test_listing_layers_takes_no_memory_for_their_tensors(folder: Path) -> None:
    """The file is sparse: it has many more bytes than are written."""
    size = 2**28
    header = {
        f"projection.{role}.weight": entry([2**13, 2**13], i * size, (i + 1) * size) for i, role in enumerate(ROLES)
    }
    with (folder / "bad.safetensors").open("wb") as file:
        file.write(safetensors(header))
        file.truncate(file.tell() + 4 * size)
    (folder / "bad.json").write_text(json.dumps({"hash": "0" * 64, "options": {"num_heads": HEADS}}))
    layers, _ = store(folder, 8 * GIB)
    tracemalloc.start()
    try:
        assert listed(layers)["bad"] == ""
        assert tracemalloc.get_traced_memory()[1] < 2**22
    finally:
        tracemalloc.stop()
    assert "ATTENTION_LAYERS_MEMORY" in listed(store(folder)[0])["bad"]


# Half of a surrogate pair, which no answer can hold, wherever the JSON of a layer has text.
SURROGATES = {
    "in a text": b'{"source": "\\ud800"}',
    "in a text, beside others": b'{"source": "caf\\u00e9 \\ud83d\\ude00 \\ude00"}',
    "in an option": b'{"options": {"layout": "\\udfff"}}',
    "in a list": b'{"options": {"include": ["\\ud800"]}}',
    "in the name of an option": b'{"options": {"rotary": {"\\ud800": 1}}}',
    "in the name of a field": b'{"\\ud800": 1}',
}


@pytest.mark.parametrize("text", [*SURROGATES.values(), None], ids=[*SURROGATES, "in the name of a tensor"])
def test_text_that_no_answer_can_hold_makes_one_layer_unusable(text: bytes | None, stored: Path) -> None:
    """In the list, by itself, as a model over HTTP and gRPC, in a request, and on the command line."""
    with remote(layers=stored) as far:
        hashed(stored, safetensors({"\ud800": entry([2, 2], 0, 16)} if text is None else GOOD, b"\0" * 16))
        if text is not None:
            (stored / "bad.json").write_bytes(text)
        far.app.state.engine.layers = Layers(LayerStore(stored, GIB))  # whose list of names is not a second old
        try:
            listed = {layer["name"]: layer.get("error", "") for layer in far.http.get("/layers").json()["layers"]}
            assert (listed["bert-0"], "half of a surrogate pair" in listed["bad"]) == ("", True)
            for path in ("/layers/bad", "/v2/models/bad", "/v2/models/bad/ready"):
                assert far.http.get(path).status_code == 503
            assert ask(far.http, layer="bad").json()["code"] == "layer_unavailable"
            assert not far.named("ModelReady", "bad").ready
            with pytest.raises(Exception, match="half of a surrogate pair"):
                far.named("ModelMetadata", "bad")
            commands = [["list"], ["show", "bad"], ["show", "bad", "--json"]]
            for command in commands:
                ran = subprocess.run(
                    [sys.executable, "-m", "attention_service", "layers", *command, "--dir", stored],
                    capture_output=True,
                    text=True,
                )
                assert (ran.returncode, "Traceback" in ran.stderr) == (1, False)
                assert "half of a surrogate pair" in ran.stdout + ran.stderr
        finally:
            remove_layer(stored, "bad")


@pytest.mark.parametrize(
    ("about", "text"),
    [
        (b"", "cannot be parsed"),
        (b"{", "cannot be parsed"),
        (b"[]", "is wrong"),
        (b"\xff", "cannot be parsed"),
        (b"[" * 100_000, "nested too deeply"),
        (b'{"options": {"scale": NaN}}', "cannot be parsed"),
        (b'{"hash": 1}', "'hash' is wrong"),
        (b'{"hash": "%s"}' % (b"0" * 64), "hash"),
        (b'{"hash": "%s", "more": 1}' % (b"0" * 64), "'more' is wrong"),
        (b'{"hash": "a", "hash": "b"}', "twice"),
        *((text, "half of a surrogate pair") for text in SURROGATES.values()),
        (b" " * (2**20 + 1), "at most 1048576"),
    ],
)
def test_a_hostile_description_is_an_error_that_says_why(about: bytes, text: str, folder: Path) -> None:
    hashed(folder, safetensors(GOOD, b"\0" * 16))
    (folder / "bad.json").write_bytes(about)
    with pytest.raises(LayerUnavailable) as error:
        store(folder)[0].get("bad")
    assert text in str(error.value)


@pytest.mark.parametrize(
    "options",
    [
        {"num_heads": "2"},
        {"num_head": 2},
        {"layer": "bert-0"},
        {"input": [[1.0]]},
        {"past_key": [[1.0]]},
        {"encoding": "list"},
        {"top_k": 1},
        {"device": "cuda"},
        {"projection": {"query": {"weight": [[1.0]]}}},
        {"softcap": -1},
        {"num_heads": 3},
        {"rotary": {"dim": 3}},
        {"bias": json.loads("[" * 900 + "]" * 900)},
    ],
    ids=lambda options: str(options)[:60],
)
def test_wrong_options_are_an_error_of_the_layer(options: dict[str, Any], folder: Path) -> None:
    hashed(folder, safetensors(GOOD, b"\0" * 16), options=options)
    assert_refused(folder)


@pytest.mark.parametrize("options", [{"num_heads": 10**30}, {"num_heads": 10**9}, {"rotary": {"dim": 10**12}}], ids=str)
def test_options_that_ask_for_much_memory_are_refused(options: dict[str, Any], folder: Path) -> None:
    hashed(folder, safetensors({}), options=options)
    assert_refused(folder)


def assert_refused(folder: Path) -> None:
    """The list and a request give the same reason against the layer `bad`."""
    layers, _ = store(folder)
    reason = listed(layers)["bad"]
    assert reason
    with pytest.raises(LayerUnavailable, match=re.escape(reason)):
        layers.get("bad")


@pytest.mark.parametrize("suffix", ["json", "safetensors"])
def test_links_pipes_and_directories_are_refused(suffix: str, folder: Path) -> None:
    for kind in ("link", "pipe", "directory"):
        hashed(folder, safetensors(GOOD, b"\0" * 16))
        path = folder / f"bad.{suffix}"
        if kind == "link":
            target = folder / "elsewhere"
            path.rename(target)
            path.symlink_to(target)
        else:
            path.unlink()
            os.mkfifo(path) if kind == "pipe" else path.mkdir()
        with pytest.raises(LayerUnavailable, match="symbolic link" if kind == "link" else "no regular file|cannot be"):
            store(folder)[0].get("bad")
        path.rmdir() if kind == "directory" else path.unlink()


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


def test_broken_files_are_not_read_again_and_again(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hashed(folder, safetensors(GOOD, b"\0" * 15))
    for suffix in ("json", "safetensors"):
        os.utime(folder / f"bad.{suffix}", (1, 1))
    reads = []

    def read(*given: Any) -> Any:
        reads.append(given)
        raise BadFile("is broken")

    monkeypatch.setattr("attention_service.layers.store.read_layer", read)
    layers, now = store(folder)
    for _ in range(5):
        with pytest.raises(LayerUnavailable):
            layers.get("bad")
        now[0] += 2 * INTERVAL
    assert len(reads) == 1


def test_a_directory_that_cannot_be_read_is_an_invalid_setting(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="a folder that can be read"):
        Settings(layers=tmp_path / "missing")
    assert Settings(layers=tmp_path).layers == tmp_path


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


def test_writing_leaves_no_other_files(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*given: Any) -> None:
        raise OSError("no space left")

    before = sorted(path.name for path in folder.iterdir())
    monkeypatch.setattr(os, "replace", refuse)
    with pytest.raises(OSError, match="no space left"):
        write_layer(folder, "other", arrays(), OPTIONS, "")
    assert sorted(path.name for path in folder.iterdir()) == before
