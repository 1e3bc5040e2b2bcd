"""Importing layers from checkpoints made by hand, and the commands of attention-service layers.

tests/peers/test_layers.py compares imported layers with the models themselves.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy

from attention_service.cli import main
from attention_service.layers import importing
from attention_service.layers.families import FAMILIES
from attention_service.layers.importing import import_layer
from attention_service.layers.store import LayerStore
from attention_service.layers.tensors import BadFile, TensorFile
from tests.conftest import app, serving
from tests.helpers.checkpoints import (
    CAUSAL,
    DECODER,
    DIM,
    HEADS,
    HIDDEN,
    LLAMA,
    LLAMA_CONFIG,
    SEPARATE,
    K,
    Q,
    checkpoint,
    tensors,
)
from tests.helpers.documents import BLOCKS, ROOT
from tests.peers import modules


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    return checkpoint(tmp_path / "llama", LLAMA_CONFIG, LLAMA)


# Rotary tables.


def test_scaled_embeddings_become_tables(tmp_path: Path) -> None:
    """By hand: the frequencies of dim 4 and base 100 are 1 and 1/10."""
    rope = {"rope_type": "linear", "factor": 4.0}
    found = import_layer(checkpoint(tmp_path, LLAMA_CONFIG | {"rope_scaling": rope}, LLAMA), 1, positions=3)
    expected = np.outer([0, 1, 2], [0.25, 0.025])
    np.testing.assert_allclose(found.arrays["rotary.cos"], np.cos(expected), atol=1e-7)
    np.testing.assert_allclose(found.arrays["rotary.sin"], np.sin(expected), atol=1e-7)
    assert "rotary" not in found.options
    assert "3 positions" in found.source


def test_llama3_keeps_short_waves_and_slows_long_ones(tmp_path: Path) -> None:
    """The waves of both frequencies are 2 pi and 20 pi tokens long: of 40 tokens, less than a quarter, and more than
    all of them."""
    rope = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 40}  # fmt: skip
    found = import_layer(checkpoint(tmp_path, LLAMA_CONFIG | {"rope_parameters": rope}, LLAMA), 1, positions=2)
    np.testing.assert_allclose(found.arrays["rotary.sin"][1], np.sin([1, 0.1 / 8]), atol=1e-7)


@pytest.mark.parametrize(
    ("more", "factor"),
    [
        ({}, 0.1 * math.log(4) + 1),
        ({"attention_factor": 1.5}, 1.5),
        ({"mscale": 1.0, "mscale_all_dim": 0.5, "truncate": False}, (0.1 * math.log(4) + 1) / (0.05 * math.log(4) + 1)),
    ],
)
def test_yarn_scales_all_numbers(more: dict[str, Any], factor: float, tmp_path: Path) -> None:
    rope = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "rope_theta": 100.0} | more
    found = import_layer(checkpoint(tmp_path, LLAMA_CONFIG | {"rope_parameters": rope}, LLAMA), 1)
    assert len(found.arrays["rotary.cos"]) == DECODER["max_position_embeddings"]
    np.testing.assert_allclose(found.arrays["rotary.cos"][0], factor, rtol=1e-6)


# What is refused.


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"model_type": "mamba"}, "'mamba' is not known"),
        ({"model_type": None}, "none is not known"),
        ({"sliding_window": 3}, "sliding_window"),
        ({"rope_scaling": {"rope_type": "longrope", "factor": 1}}, "'longrope' cannot be expressed"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2}}, "'dynamic' cannot be expressed"),
        ({"rope_scaling": {"type": "linear"}}, "expected factor, a number; got nothing"),
        ({"rope_scaling": {"type": "linear", "factor": "4"}}, "expected factor, a number"),
        ({"rope_scaling": {"type": "linear", "factor": 4, "low": 1}}, "'low'"),
        ({"head_dim": 5}, "do not fit"),
        ({"num_attention_heads": True}, "num_attention_heads"),
        ({"model_type": "qwen2", "layer_types": ["full_attention"]}, "for layer 1"),
        ({"model_type": "qwen2", "layer_types": ["chunked_attention"] * 2}, "'chunked_attention' cannot"),
        ({"model_type": "gpt_oss"}, "layer_types"),
        ({"model_type": "gpt_oss", "layer_types": ["full_attention"] * 2}, "no tensor .*sinks"),
        ({"model_type": "gemma2", "query_pre_attn_scalar": 4, "use_bidirectional_attention": True}, "bidirectional"),
        ({"model_type": "mistral", "rope_theta": None}, "rope_theta"),
        ({"model_type": "olmo2", "clip_qkv": 8.0}, "clip_qkv"),
        ({"model_type": "bert", "position_embedding_type": "relative_key"}, "ends in encoder.layer.1"),
        ({"model_type": "llama4_text", "no_rope_layers": [1, 0]}, "attn_temperature_tuning"),
        ({"model_type": "gemma3n_text", "num_hidden_layers": 4, "num_kv_shared_layers": 3}, "num_kv_shared_layers"),
        ({"model_type": "gemma4_text", "num_hidden_layers": 4, "use_bidirectional_attention": "all"}, "bidirectional"),
        ({"model_type": "granite"}, "attention_multiplier"),
        ({"model_type": "smollm3", "no_rope_layers": [1]}, "no_rope_layers with a value for layer 1"),
        ({"model_type": "smollm3", "no_rope_layers": 1}, "no_rope_layers with a value for layer 1"),
        ({"model_type": "qwen3_next", "layer_types": ["full_attention"] * 2}, "do not fit maps of 16 and 8 rows"),
        ({"model_type": "gemma4_text", "num_hidden_layers": 4, "num_attention_heads": 3, "layer_types": [
            "full_attention"] * 2}, "do not fit"),
    ],
    ids=str,
)  # fmt: skip
def test_what_is_not_known_is_refused_by_its_name(changes: dict[str, Any], text: str, tmp_path: Path) -> None:
    with pytest.raises(BadFile, match=text):
        import_layer(checkpoint(tmp_path, LLAMA_CONFIG | changes, LLAMA), 1)


def test_tensors_that_no_field_holds_are_refused(tmp_path: Path) -> None:
    place = "model.layers.1.self_attn."
    given = LLAMA | {f"{place}rotary_emb.inv_freq": np.ones(2, np.float32)}
    import_layer(checkpoint(tmp_path, LLAMA_CONFIG, given), 1)
    with pytest.raises(BadFile, match=r"q_norm.weight.* has a meaning that is not known"):
        import_layer(checkpoint(tmp_path, LLAMA_CONFIG, given | {f"{place}q_norm.weight": np.ones(4, np.float32)}), 1)
    given[f"{place}q_proj.weight"] = np.ones((Q, HIDDEN), np.int32)
    with pytest.raises(BadFile, match="holds int32"):
        import_layer(checkpoint(tmp_path, LLAMA_CONFIG, given), 1)
    given[f"{place}q_proj.weight"] = np.ones((Q, HIDDEN), np.uint8)
    with pytest.raises(BadFile, match="as 'U8'; expected one of"):
        import_layer(checkpoint(tmp_path, LLAMA_CONFIG, given), 1)


def test_a_norm_that_requests_cannot_express_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Older:
        model_fields = ("weight", "eps")

    monkeypatch.setattr(importing, "Norm", Older)
    given = tensors(SEPARATE | {"q_norm": (Q,), "k_norm": (K,)}, "layers.0.self_attn.")
    with pytest.raises(BadFile, match="norm over all heads"):
        import_layer(checkpoint(tmp_path, DECODER | {"model_type": "olmo2"}, given), 0)


def test_which_module_must_be_clear(tmp_path: Path) -> None:
    both = LLAMA | tensors(SEPARATE, "vision.layers.1.self_attn.")
    path = checkpoint(tmp_path, LLAMA_CONFIG, both)
    with pytest.raises(BadFile, match=r"several modules fit, say which by --prefix: model.*vision"):
        import_layer(path, 1)
    assert "vision" in import_layer(path, 1, prefix="vision.").source
    with pytest.raises(BadFile, match="which layer"):
        import_layer(path, None)
    with pytest.raises(BadFile, match=r"ends in layers\.7\.self_attn"):
        import_layer(path, 7)


# Files.


def sharded(path: Path) -> dict[str, str]:
    """Put each tensor of a checkpoint into a file of its own, and return the index."""
    names = {}
    for i, (name, array) in enumerate(LLAMA.items()):
        names[name] = f"model-{i}.safetensors"
        safetensors.numpy.save_file({name: array}, path / names[name])
    (path / "model.safetensors").unlink()
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    return names


def test_a_checkpoint_of_several_files(llama: Path) -> None:
    whole = import_layer(llama, 1)
    names = sharded(llama)
    apart = import_layer(llama, 1)
    for name, array in whole.arrays.items():
        np.testing.assert_array_equal(apart.arrays[name], array)
    (llama / names["model.layers.1.self_attn.v_proj.weight"]).unlink()
    with pytest.raises(BadFile, match="is missing"):
        import_layer(llama, 1)
    safetensors.numpy.save_file({"x": np.ones(1)}, llama / names["model.layers.1.self_attn.v_proj.weight"])
    with pytest.raises(BadFile, match="which the index says"):
        import_layer(llama, 1)


@pytest.mark.parametrize("index", ["{", "[]", "{}", '{"weight_map": {"a": "../x"}}', '{"weight_map": {"a": 1}}'])
def test_a_hostile_index_is_refused(index: str, llama: Path) -> None:
    (llama / "model.safetensors.index.json").write_text(index)
    with pytest.raises(BadFile, match=r"model\.safetensors\.index\.json"):
        import_layer(llama, 1)


def test_only_the_tensors_of_the_module_are_read(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[int] = []
    shown: list[tuple[str, int]] = []
    monkeypatch.setattr(TensorFile, "read", _counting(TensorFile.read, read))
    import_layer(llama, 1, progress=lambda name, size: shown.append((name, size)))
    header = int.from_bytes((llama / "model.safetensors").read_bytes()[:8], "little")
    assert sum(read) == 8 + header + sum(array.nbytes for array in LLAMA.values())
    assert dict(shown) == {name: array.nbytes for name, array in LLAMA.items()}


def _counting(original: Any, read: list[int]) -> Any:
    def counted(self: Any, begin: int, length: int) -> Any:
        read.append(length)
        return original(self, begin, length)

    return counted


def test_a_truncated_checkpoint_is_refused(llama: Path) -> None:
    file = llama / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-10])
    with pytest.raises(BadFile, match=r"model\.safetensors: is truncated"):
        import_layer(llama, 1)
    file.unlink()
    with pytest.raises(BadFile, match="expected a directory with"):
        import_layer(llama, 1)


# Commands.


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "layers"
    path.mkdir()
    monkeypatch.setenv("ATTENTION_LAYERS", str(path))
    return path


def run(capfd: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    status = main(["layers", *arguments])
    captured = capfd.readouterr()
    return status, captured.out, captured.err


def test_the_commands(folder: Path, llama: Path, capfd: pytest.CaptureFixture[str]) -> None:
    how = ("import", str(llama), "--layer", "1", "--name", "llama-1")
    status, out, err = run(capfd, *how)
    assert (status, err) == (0, "")
    assert "model.layers.1.self_attn of llama" in out
    assert "hidden states after the norm" in out
    assert LayerStore(folder, 2**20).get("llama-1").options == CAUSAL
    status, _, err = run(capfd, *how)
    assert (status, "--replace" in err) == (1, True)
    assert run(capfd, *how, "--replace")[0] == 0
    status, out, _ = run(capfd, "list")
    assert (status, out.split()[0]) == (0, "llama-1")
    status, out, _ = run(capfd, "show", "llama-1")
    assert "option   num_heads = 4" in out
    assert "tensor   projection.query.weight F32 (16, 8)" in out
    assert "Hidden states enter where the family's attention module takes them" in out
    status, out, _ = run(capfd, "show", "llama-1", "--json")
    assert json.loads(out)["options"] == CAUSAL
    (folder / "broken.json").write_text("{")
    status, out, _ = run(capfd, "list", "--dir", str(folder))
    assert (status, "cannot be parsed" in out) == (1, True)
    assert run(capfd, "show", "broken")[0] == 1
    assert run(capfd, "remove", "broken")[0] == 0
    assert run(capfd, "remove", "llama-1")[0] == 0
    assert list(folder.iterdir()) == []
    for command in (("remove", "llama-1"), ("remove", "../x"), ("show", "llama-1")):
        assert run(capfd, *command)[0] == 1


@pytest.mark.parametrize(
    ("more", "status", "text"),
    [
        (("--name", "attention"), 2, "--name: expected"),
        (("--name", "a/b"), 2, "--name: expected"),
        (("--family", "mamba"), 2, "--family: expected one of bert"),
        (("--layer", "5"), 1, "no tensor"),
        (("--dir", "/nowhere"), 2, "no such directory"),
    ],
)
def test_wrong_imports(
    more: tuple[str, ...], status: int, text: str, folder: Path, llama: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    try:
        found = main(["layers", "import", str(llama), "--layer", "1", "--name", "x", *more])
    except SystemExit as error:
        found = int(str(error.code))
    assert found == status
    assert text in capfd.readouterr().err
    assert list(folder.iterdir()) == []


def test_a_directory_must_be_named(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.delenv("ATTENTION_LAYERS", raising=False)
    with pytest.raises(SystemExit):
        main(["layers", "list"])
    assert "ATTENTION_LAYERS" in capfd.readouterr().err


def test_progress_is_shown_on_a_terminal(
    folder: Path, llama: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    status, _, err = run(capfd, "import", str(llama), "--layer", "1", "--name", "llama-1")
    assert (status, "MB read: model.layers.1.self_attn.q_proj.weight" in err) == (0, True)
    assert err.endswith("\r\033[K")
    monkeypatch.setattr("os.replace", _refuse)
    status, _, err = run(capfd, "import", str(llama), "--layer", "1", "--name", "llama-2")
    assert (status, "no space left" in err) == (1, True)


def test_the_page_on_layers_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its program makes a layer, its command imports one, and its request is answered by the service."""
    monkeypatch.chdir(tmp_path)
    blocks = {block.language: block for block in BLOCKS if block.page == "docs/layers.md"}
    blocks["python"].execute()
    given = tensors(SEPARATE | {"q_norm": (DIM,), "k_norm": (DIM,)}, "model.layers.3.self_attn.")
    checkpoint(tmp_path / "Qwen3-0.6B", DECODER | {"model_type": "qwen3"}, given)
    command = blocks["sh"].text.splitlines()[1].split()
    assert command[0] == "attention-service"
    assert main(command[1:]) == 0
    request = json.loads(blocks["json"].text) | {"input": np.eye(3, HIDDEN).tolist()}
    with serving(app(layers=tmp_path / "layers")) as client:
        assert [layer["name"] for layer in client.get("/layers").json()["layers"]] == ["plain", "qwen3-3"]
        answer = client.post("/attention", json=request)
        assert (answer.status_code, np.shape(answer.json()["query"])) == (200, (HEADS, 3, DIM))
        answer = client.post("/attention", json={"layer": "plain", "input": [[1, 2, 3, 4]]})
        assert answer.json()["output"] == [[1, 2, 3, 4]]


def test_the_tables_of_the_page_on_models_are_those_that_are_tested() -> None:
    """`python -m tests.peers.modules` writes them; tests/peers/test_modules.py computes what they say."""
    page = (ROOT / "docs" / "models.md").read_text(encoding="utf-8")
    assert modules.placed(page) == page
    assert len(modules.ROWS) > 100
    known = {name for family in FAMILIES.values() for name in family.model_types}
    assert known - set(modules.ROWS) == {"gemma3"}  # a model that sees; its text model is there


def _refuse(*given: Any) -> None:
    raise OSError(28, "no space left")
