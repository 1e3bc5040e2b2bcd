"""Hostile and broken files of stored layers: each is an error that says why, and leaves other layers usable."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from attention_service.cli import main
from attention_service.codecs.safetensors import file_chunks
from attention_service.errors import LayerUnavailable
from attention_service.layers.checks import check_header
from attention_service.layers.files import write_layer
from attention_service.layers.store import INTERVAL, LayerStore
from attention_service.layers.tensors import BadFile
from attention_service.pipeline.layers import Layers
from tests.helpers.layers import (
    GIB,
    GOOD,
    HEADS,
    ROLES,
    WEIGHT,
    ask,
    entry,
    hashed,
    listed,
    safetensors,
    store,
    write_layers,
)
from tests.helpers.rpc import remote


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_layers(tmp_path, 0)


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
    "another type": (safetensors({WEIGHT: entry([2, 2], 0, 4, "F8_E8M0")}, b"\0" * 4), "one of BOOL"),
    "codes": (safetensors({WEIGHT: entry([2, 2], 0, 4, "F8_E4M3")}, b"\0" * 4), "expected numbers, got codes"),
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


@pytest.mark.slow
@pytest.mark.parametrize("text", [*SURROGATES.values(), None], ids=[*SURROGATES, "in the name of a tensor"])
def test_text_that_no_answer_can_hold_makes_one_layer_unusable(
    text: bytes | None, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In the list, by itself, as a model over HTTP and gRPC, in a request, and on the command line."""
    with remote(layers=folder) as far:
        hashed(folder, safetensors({"\ud800": entry([2, 2], 0, 16)} if text is None else GOOD, b"\0" * 16))
        if text is not None:
            (folder / "bad.json").write_bytes(text)
        far.app.state.engine.layers = Layers(LayerStore(folder, GIB))  # whose list of names is not a second old
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
            assert main(["layers", *command, "--dir", str(folder)]) == 1
            assert "half of a surrogate pair" in "".join(capsys.readouterr())


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


def test_a_name_of_too_many_levels_is_a_fault_of_the_file() -> None:
    """Not of the request that lists all layers."""
    with pytest.raises(BadFile, match="at most 32 levels"):
        check_header({}, [("a." * 40 + "b", "F32", (2, 2))])


def test_a_layer_that_cannot_be_written_whole_leaves_the_layer_of_before(tmp_path: Path) -> None:
    """The disk has room for the tensors, and not for what describes them: here it is longer than a file may be."""
    program = (
        "import resource, sys; from pathlib import Path; import numpy as np\n"
        "from attention_service.layers.files import write_layer\n"
        "maps = {f'projection.{name}.weight': np.eye(2) for name in ('query', 'key', 'value')}\n"
        "write_layer(Path(sys.argv[1]), 'layer', maps, {'num_heads': 1}, 'first')\n"
        "import signal; signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (3000, 3000))\n"
        "others = {name: 2 * array for name, array in maps.items()}\n"
        "write_layer(Path(sys.argv[1]), 'layer', others, {'num_heads': 2}, 'second' * 1000)\n"
    )
    command = [sys.executable, "-B", "-c", program, str(tmp_path)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert "File too large" in done.stderr
    assert len(list(tmp_path.iterdir())) == 2
    assert json.loads((tmp_path / "layer.json").read_text())["source"] == "first"
    layers, _ = store(tmp_path)
    assert listed(layers) == {"layer": ""}
    assert layers.get("layer").nbytes
