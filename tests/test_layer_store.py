"""The store of layers: names, files that are replaced while they are read, and memory."""

from __future__ import annotations

import gc
import json
import os
import threading
import weakref
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from attention_service.attention.steps.rotation import RotationStep
from attention_service.codecs.table import CODECS
from attention_service.errors import LayerUnavailable, ServiceError, UnknownLayer
from attention_service.layers import files
from attention_service.layers.files import remove_layer, write_layer
from attention_service.layers.layer import MAX_PLANS
from attention_service.layers.names import is_name
from attention_service.layers.store import INTERVAL, LayerStore
from attention_service.layers.tensors import BadFile
from attention_service.pipeline.engine import Engine
from attention_service.schemas.layers import StoredLayer
from attention_service.settings import Settings
from tests.conftest import app, serving
from tests.helpers import wire
from tests.helpers.layers import (
    GIB,
    GOOD,
    HEADS,
    INPUT,
    OPTIONS,
    WEIGHT,
    arrays,
    ask,
    hashed,
    inline,
    numbers,
    safetensors,
    store,
    write_layers,
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_layers(tmp_path, 0)


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


def test_writing_leaves_no_other_files(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*given: Any) -> None:
        raise OSError("no space left")

    before = sorted(path.name for path in folder.iterdir())
    monkeypatch.setattr(os, "replace", refuse)
    with pytest.raises(OSError, match="no space left"):
        write_layer(folder, "other", arrays(), OPTIONS, "")
    assert sorted(path.name for path in folder.iterdir()) == before


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
        decoded = CODECS["application/json"].decode(body, 2**20)
        first, second = engine.attention.prepare(decoded, layer), engine.attention.prepared(decoded, layer)
        assert (second is not None and first.shared.plan is second.shared.plan) == kept
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
        if isinstance(step, RotationStep) and step.cos is not None
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


def test_arrays_of_layers_cannot_be_written_to(folder: Path) -> None:
    layer = store(folder)[0].get("bert-0")
    with pytest.raises(ValueError, match="read-only"):
        layer.arrays["sinks"][0] = 1
