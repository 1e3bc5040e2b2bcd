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

from service.cli import main
from service.layers import importing
from service.layers.importing import import_layer
from service.layers.store import LayerStore
from service.layers.tensors import BadFile, TensorFile
from tests.conftest import app, serving
from tests.helpers.documents import BLOCKS

HIDDEN, HEADS, GROUPS, DIM = 8, 4, 2, 4
Q, K = HEADS * DIM, GROUPS * DIM
DECODER: dict[str, Any] = {"num_attention_heads": HEADS, "num_key_value_heads": GROUPS, "rms_norm_eps": 1e-5,
                           "rope_theta": 100.0, "max_position_embeddings": 32, "hidden_size": 16}  # fmt: skip
CAUSAL = {"num_heads": HEADS, "num_kv_heads": GROUPS, "is_causal": True, "rotary": {"base": 100.0}}
EPS = {"query_norm": {"eps": 1e-5}, "key_norm": {"eps": 1e-5}}
SEPARATE: dict[str, tuple[int, ...]] = {
    "q_proj": (Q, HIDDEN),
    "k_proj": (K, HIDDEN),
    "v_proj": (K, HIDDEN),
    "o_proj": (HIDDEN, Q),
}


def tensors(shapes: dict[str, tuple[int, ...]], place: str, seed: int = 0) -> dict[str, np.ndarray]:
    """Random tensors of these shapes; a name is that of a map or norm, unless it is that of a bias or of sinks."""
    random = np.random.default_rng(seed)
    whole = {name if name.endswith((".bias", "sinks")) else f"{name}.weight": shape for name, shape in shapes.items()}
    return {f"{place}{name}": random.normal(size=shape).astype(np.float32) for name, shape in whole.items()}


def checkpoint(folder: Path, configuration: dict[str, Any] | None, arrays: dict[str, np.ndarray]) -> Path:
    folder.mkdir(exist_ok=True)
    safetensors.numpy.save_file(arrays | {"other.weight": np.zeros(3, np.float32)}, folder / "model.safetensors")
    if configuration is not None:
        (folder / "config.json").write_text(json.dumps(configuration))
    return folder


LLAMA = tensors(SEPARATE, "model.layers.1.self_attn.")
LLAMA_CONFIG = DECODER | {"model_type": "llama"}


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    return checkpoint(tmp_path / "llama", LLAMA_CONFIG, LLAMA)


@pytest.mark.parametrize(
    ("configuration", "shapes", "place", "options"),
    [
        ({"model_type": "llama"}, SEPARATE, "model.layers.1.self_attn.", CAUSAL),
        ({"model_type": "llama", "num_key_value_heads": None},
         SEPARATE | {"k_proj": (Q, HIDDEN), "v_proj": (Q, HIDDEN)}, "layers.1.self_attn.",
         CAUSAL | {"num_kv_heads": HEADS}),
        ({"model_type": "llama", "rope_theta": None}, SEPARATE, "layers.1.self_attn.", CAUSAL | {"rotary": {
            "base": 10000.0}}),
        ({"model_type": "mistral", "sliding_window": 5}, SEPARATE, "layers.1.self_attn.",
         CAUSAL | {"window": {"left": 4}}),
        ({"model_type": "qwen2", "layer_types": ["sliding_attention", "full_attention"], "sliding_window": 5},
         SEPARATE | {"q_proj.bias": (Q,)}, "layers.1.self_attn.", CAUSAL),
        ({"model_type": "qwen2", "use_sliding_window": True, "max_window_layers": 1, "sliding_window": 5},
         SEPARATE, "layers.1.self_attn.", CAUSAL | {"window": {"left": 4}}),
        ({"model_type": "qwen3"}, SEPARATE | {"q_norm": (DIM,), "k_norm": (DIM,)}, "layers.1.self_attn.", CAUSAL | EPS),
        ({"model_type": "gemma2", "query_pre_attn_scalar": 16, "attn_logit_softcapping": 50.0, "sliding_window": 5},
         SEPARATE, "layers.1.self_attn.", CAUSAL | {"scale": 0.25, "softcap": 50.0}),
        ({"model_type": "gemma3", "text_config": DECODER | {
            "model_type": "gemma3_text", "query_pre_attn_scalar": 16, "sliding_window": 5, "head_dim": DIM,
            "rope_local_base_freq": 10.0}}, SEPARATE, "language_model.model.layers.1.self_attn.",
         CAUSAL | {"scale": 0.25, "window": {"left": 4}, "rotary": {"base": 10.0}}),
        ({"model_type": "gpt_oss", "layer_types": ["full_attention", "sliding_attention"], "sliding_window": 5},
         SEPARATE | {"sinks": (HEADS,)}, "layers.1.self_attn.", CAUSAL | {"window": {"left": 4}}),
        ({"model_type": "olmo2"}, SEPARATE | {"q_norm": (Q,), "k_norm": (K,)}, "layers.1.self_attn.",
         CAUSAL | {name: {"eps": 1e-5, "over": "all"} for name in EPS}),
        ({"model_type": "bert", "is_decoder": True},
         {"self.query": (HIDDEN, HIDDEN), "self.key": (HIDDEN, HIDDEN), "self.value": (HIDDEN, HIDDEN),
          "output.dense": (HIDDEN, HIDDEN), "output.LayerNorm": (HIDDEN,)}, "bert.encoder.layer.1.attention.",
         {"num_heads": HEADS, "is_causal": True}),
        ({"model_type": "vit"},
         {"attention.query": (HIDDEN, HIDDEN), "attention.key": (HIDDEN, HIDDEN), "attention.value": (HIDDEN, HIDDEN),
          "output.dense": (HIDDEN, HIDDEN)}, "vit.encoder.layer.1.attention.", {"num_heads": HEADS}),
        ({"model_type": "whisper", "encoder_attention_heads": HEADS},
         {"q_proj": (HIDDEN, HIDDEN), "k_proj": (HIDDEN, HIDDEN), "v_proj": (HIDDEN, HIDDEN),
          "out_proj": (HIDDEN, HIDDEN)}, "model.encoder.layers.1.self_attn.", {"num_heads": HEADS}),
    ],
    ids=lambda value: value.get("model_type", "") if isinstance(value, dict) else "",
)  # fmt: skip
def test_families_with_separate_maps(
    configuration: dict[str, Any], shapes: dict[str, Any], place: str, options: dict[str, Any], tmp_path: Path
) -> None:
    given = tensors(shapes, place)
    found = import_layer(checkpoint(tmp_path, DECODER | configuration, given), 1)
    assert found.options == options
    assert sum(array.size for array in found.arrays.values()) >= sum(
        array.size for name, array in given.items() if "LayerNorm" not in name
    )
    query = next(array for name, array in given.items() if name.endswith(("q_proj.weight", "query.weight")))
    np.testing.assert_array_equal(found.arrays["projection.query.weight"], query)
    assert place.rstrip(".") in found.source


def test_norms_of_gemma_3_are_stored_less_1(tmp_path: Path) -> None:
    given = tensors(SEPARATE | {"q_norm": (DIM,), "k_norm": (DIM,)}, "layers.0.self_attn.")
    more = {
        "model_type": "gemma3_text",
        "query_pre_attn_scalar": 16,
        "layer_types": ["full_attention"],
        "head_dim": DIM,
    }
    found = import_layer(checkpoint(tmp_path, DECODER | more, given), 0)
    np.testing.assert_array_equal(found.arrays["query_norm.weight"], given["layers.0.self_attn.q_norm.weight"] + 1)


def test_what_published_configurations_of_gemma_3_leave_out_is_known(tmp_path: Path) -> None:
    """Those of models that see have a configuration for text, and other modules whose names end alike."""
    shapes = {"q_proj": (8 * 256, HIDDEN), "k_proj": (4 * 256, HIDDEN), "v_proj": (4 * 256, HIDDEN),
              "o_proj": (HIDDEN, 8 * 256), "q_norm": (256,), "k_norm": (256,)}  # fmt: skip
    given = tensors(shapes, "language_model.model.layers.5.self_attn.")
    given |= tensors(SEPARATE, "vision_tower.vision_model.encoder.layers.5.self_attn.")
    text = {"model_type": "gemma3_text", "rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window": 1024}
    found = import_layer(checkpoint(tmp_path, {"model_type": "gemma3", "text_config": text}, given), 5)
    assert found.options["scale"] == 1 / 16
    assert "window" not in found.options  # every sixth layer has none
    np.testing.assert_allclose(found.arrays["rotary.sin"][1, 0], np.sin(1 / 8), rtol=1e-6)
    flat = text | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}
    with pytest.raises(BadFile, match="expected rope_parameters with full_attention"):
        import_layer(checkpoint(tmp_path, {"model_type": "gemma3", "text_config": flat}, given), 5)


def test_packed_kernels_of_gpt2_are_split(tmp_path: Path) -> None:
    shapes = {"c_attn": (8, 24), "c_attn.bias": (24,), "c_proj": (8, 8), "c_proj.bias": (8,), "bias": (1, 1, 2, 2)}
    given = tensors({name: shape for name, shape in shapes.items() if name != "bias"}, "h.2.attn.")
    given["h.2.attn.bias"] = np.ones((1, 1, 2, 2), bool)
    configuration = {"model_type": "gpt2", "n_head": 2, "scale_attn_by_inverse_layer_idx": True}
    found = import_layer(checkpoint(tmp_path, configuration, given), 2)
    for i, role in enumerate(("query", "key", "value")):
        part = slice(8 * i, 8 * i + 8)
        np.testing.assert_array_equal(
            found.arrays[f"projection.{role}.kernel"], given["h.2.attn.c_attn.weight"][:, part]
        )
        np.testing.assert_array_equal(found.arrays[f"projection.{role}.bias"], given["h.2.attn.c_attn.bias"][part])
    assert found.options == {"num_heads": 2, "scale": 1 / 6, "is_causal": True}
    given["h.2.attn.c_attn.weight"] = np.zeros((8, 23), np.float32)
    with pytest.raises(BadFile, match=r"expected \(n, 3 n\)"):
        import_layer(checkpoint(tmp_path, configuration, given), 2)


def test_packed_rows_of_phi3_are_split(tmp_path: Path) -> None:
    given = tensors({"qkv_proj": (Q + 2 * K, HIDDEN), "o_proj": (HIDDEN, Q)}, "layers.0.self_attn.")
    more = {"model_type": "phi3", "partial_rotary_factor": 0.5, "sliding_window": 3}
    found = import_layer(checkpoint(tmp_path, DECODER | more, given), 0)
    packed = given["layers.0.self_attn.qkv_proj.weight"]
    for role, rows in (("query", slice(0, Q)), ("key", slice(Q, Q + K)), ("value", slice(Q + K, None))):
        np.testing.assert_array_equal(found.arrays[f"projection.{role}.weight"], packed[rows])
    assert found.options == CAUSAL | {"rotary": {"base": 100.0, "dim": 2}, "window": {"left": 2}}
    with pytest.raises(BadFile, match=f"expected {Q + 2 * K + 2 * DIM} rows"):
        import_layer(checkpoint(tmp_path, DECODER | more | {"num_key_value_heads": 3}, given), 0)


def test_a_multihead_attention_of_torch_is_split(tmp_path: Path) -> None:
    given = {"in_proj_weight": np.arange(72, dtype=np.float32).reshape(12, 6)[:, :4] * 1.0,
             "in_proj_bias": np.arange(12, dtype=np.float32),
             "out_proj.weight": np.ones((4, 4), np.float32), "out_proj.bias": np.ones(4, np.float32)}  # fmt: skip
    given["in_proj_weight"] = np.ascontiguousarray(given["in_proj_weight"])
    safetensors.numpy.save_file(given, tmp_path / "one.safetensors")
    found = import_layer(tmp_path / "one.safetensors", None, family="torch", heads=2)
    np.testing.assert_array_equal(found.arrays["projection.value.weight"], given["in_proj_weight"][8:])
    np.testing.assert_array_equal(found.arrays["projection.key.bias"], given["in_proj_bias"][4:8])
    assert found.options == {"num_heads": 2}
    with pytest.raises(BadFile, match="--heads"):
        import_layer(tmp_path / "one.safetensors", None, family="torch")
    apart = {f"{letter}_proj_weight": np.ones((4, 3), np.float32) for letter in "kv"}
    apart |= {"q_proj_weight": np.ones((4, 4), np.float32), "out_proj.weight": np.ones((4, 4), np.float32)}
    safetensors.numpy.save_file(apart, tmp_path / "two.safetensors")
    assert import_layer(tmp_path / "two.safetensors", None, family="torch", heads=2).arrays[
        "projection.key.weight"
    ].shape == (4, 3)
    safetensors.numpy.save_file(apart | {"bias_k": np.ones((1, 1, 4), np.float32)}, tmp_path / "three.safetensors")
    with pytest.raises(BadFile, match="add_bias_kv"):
        import_layer(tmp_path / "three.safetensors", None, family="torch", heads=2)


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
    with pytest.raises(BadFile, match="as U8; expected one of"):
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


def _refuse(*given: Any) -> None:
    raise OSError(28, "no space left")
