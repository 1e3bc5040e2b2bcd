"""Importing layers from checkpoints made by hand.

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
from attention_service.layers.families import FAMILIES
from attention_service.layers.importing import import_layer
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

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}


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
        ({"model_type": "gpt_oss", "layer_types": ["full_attention"] * 2, "rope_scaling": {"rope_type": "default"}},
         "no tensor .*sinks"),
        ({"model_type": "gemma2", "query_pre_attn_scalar": 4, "use_bidirectional_attention": True}, "bidirectional"),
        ({"model_type": "mistral", "rope_theta": None}, "rope_theta"),
        ({"model_type": "olmo2", "clip_qkv": 8.0}, "clip_qkv"),
        ({"model_type": "bert", "position_embedding_type": "relative_key"}, "ends in encoder.layer.1"),
        ({"model_type": "llama4_text", "no_rope_layers": [1, 0]}, "attn_temperature_tuning"),
        ({"model_type": "gemma3n_text", "num_hidden_layers": 4, "num_kv_shared_layers": 3}, "num_kv_shared_layers"),
        ({"model_type": "gemma4_text", "rope_theta": None, "num_hidden_layers": 4,
          "use_bidirectional_attention": "all"}, "bidirectional"),
        ({"model_type": "granite"}, "attention_multiplier"),
        ({"model_type": "smollm3", "no_rope_layers": [1]}, "no_rope_layers with a value for layer 1"),
        ({"model_type": "smollm3", "no_rope_layers": 1}, "no_rope_layers with a value for layer 1"),
        ({"model_type": "qwen3_next", "layer_types": ["full_attention"] * 2}, "do not fit maps of 16 and 8 rows"),
        ({"model_type": "gemma4_text", "rope_theta": None, "num_hidden_layers": 4, "num_attention_heads": 3,
          "layer_types": ["full_attention"] * 2}, "do not fit"),
        ({"is_causal": False}, "'is_causal' is not known"),
        ({"is_causal": None}, "'is_causal' is not known"),  # which transformers reads as false
        ({"model_type": "gpt_oss", "rope_parameters": None, "rope_theta": 150000.0}, "expected rope_parameters or"),
        ({"model_type": "gemma3_text", "rope_parameters": None, "layer_types": ["full_attention"] * 2,
          "rope_scaling": {"type": "linear", "factor": 8.0}}, "rope_scaling: .* expected rope_type"),
        ({"model_type": "olmo3", "rope_parameters": None, "layer_types": ["full_attention"] * 2,
          "rope_scaling": {"type": "linear", "factor": 8.0}}, "rope_scaling: .* expected rope_type"),
        # transformers has no types of layers for these, and loads no model.
        ({"model_type": "exaone4", "sliding_window_pattern": "LLLG"}, "expected sliding_window_pattern"),
        ({"model_type": "exaone4", "sliding_window_pattern": None}, "expected sliding_window_pattern"),
        ({"attn_logit_softcapping": 30.0}, "'attn_logit_softcapping'"),
        ({"alibi": True}, "'alibi'"),
        ({"pretraining_tp": 2}, "'pretraining_tp'"),
        ({"partial_rotary_factor": 0.5}, "'partial_rotary_factor'"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
        ({"text_config": LLAMA_CONFIG, "compression_config": {"bits": 4}}, "compression_config"),
        ({"no_such_option": 1}, "'no_such_option'"),
        ({"no_such_option": {"is": "on"}}, "'no_such_option'"),
        ({"layer_types": ["sliding_attention"] * 2}, "'layer_types'"),
        ({"per_layer_config": {"1": {"head_dim": 8}}}, "'per_layer_config'"),
        ({"model_type": "mistral", "attention_bias": True}, "'attention_bias'"),
        ({"model_type": "qwen2", "layer_types": ["sliding_attention"] * 2}, "use_sliding_window"),
        ({"model_type": "gemma3_text", "attn_logit_softcapping": 30.0}, "'attn_logit_softcapping'"),
        ({"model_type": "olmo3", "layer_types": ["sliding_attention"] * 2}, "rope_theta"),
        ({"model_type": "olmo3", "rope_parameters": {"rope_theta": 5e5}}, "rope_parameters with sliding_attention"),
        ({"model_type": "phi3", "rope_scaling": {"type": "yarn", "factor": 2.0}}, "qkv_proj"),
        ({"model_type": "qwen3"}, "no tensor .*q_norm"),
        ({"model_type": "llama4_text", "layer_types": ["sliding_attention"] * 2}, "'sliding_attention' cannot"),
        ({"num_attention_heads": 0}, "num_attention_heads, a whole number of at least 1; got '0'"),
        ({"num_attention_heads": 2.5}, "num_attention_heads"),
        ({"num_key_value_heads": 0}, "num_key_value_heads"),
        ({"model_type": "mistral", "sliding_window": 0}, "sliding_window"),
        ({"model_type": "cohere2", "sliding_window_pattern": 0}, "sliding_window_pattern"),
        ({"model_type": "cohere2", "sliding_window_pattern": "LLLG"}, "sliding_window_pattern"),
        ({"model_type": "gemma2", "query_pre_attn_scalar": 0}, "query_pre_attn_scalar"),
        ({"rope_theta": 10**400}, "rope_theta"),
        ({"rope_theta": -1.0}, "rope_theta, a number above 0"),
        ({"rope_parameters": ["yarn"]}, "rope_parameters, an object"),
        ({"rope_parameters": {"rope_type": ["yarn"]}}, "rope type .* cannot be expressed"),
        ({"rope_scaling": YARN | {"original_max_position_embeddings": 0}}, "original_max_position_embeddings"),
        ({"rope_scaling": YARN | {"rope_theta": 1}}, "rope type yarn do not fit"),
        ({"rope_scaling": YARN | {"beta_fast": "a"}}, "beta_fast"),
        ({"rope_scaling": YARN | {"mscale": [1], "mscale_all_dim": 1}}, "mscale"),
        ({"rope_scaling": {"type": "linear", "factor": 0}}, "factor"),
        ({"model_type": "glm4", "partial_rotary_factor": 7}, "partial_rotary_factor"),
        ({"model_type": "glm4", "partial_rotary_factor": 0}, "partial_rotary_factor"),
        ({"interpolate_factor": 2}, "'interpolate_factor'"),
        ({"full_attn_mod": 2}, "'full_attn_mod'"),
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
    for dtype in (np.int32, np.uint8):
        given[f"{place}q_proj.weight"] = np.ones((Q, HIDDEN), dtype)
        with pytest.raises(BadFile, match=f"holds {np.dtype(dtype)}"):
            import_layer(checkpoint(tmp_path, LLAMA_CONFIG, given), 1)


@pytest.mark.parametrize(
    "more",
    [
        {"attention_dropout": 0.1, "torch_dtype": "bfloat16", "vocab_size": 9, "architectures": ["LlamaForCausalLM"]},
        {"_name_or_path": "x", "eos_token_id": [1, 2], "id2label": {"0": "a"}, "transformers_version": "4.31.0"},
        {"alibi": False, "pretraining_tp": 1, "is_causal": True, "quantization_config": None, "sliding_window": None},
        {
            "num_experts": 8,
            "router_aux_loss_coef": 0.1,
            "max_length": 20,
            "rope_interleaved": False,
            "pruned_heads": {},
        },
        {"partial_rotary_factor": 1.0, "layer_norm_eps": 1e-5, "mlp_bias": True, "use_cache": True, "top_k": 50},
        {"max_sequence_length": 2048, "attention_softmax_in_fp32": True, "compression_ratio": 1.0},
        {"predict_special_tokens": True, "mlp_type": "default", "norm_type": "layer_norm", "generator_size": "0.25"},
        {"scale_attention_softmax_in_fp32": True, "interpolate_factor": 1, "full_attn_mod": 1, "name": "Roberta"},
        {"author": "A", "created_date": "2021-04-28", "license": "MIT", "sentence_transformers": {"version": "4.1"}},
        {"sbert_ce_default_activation_function": "torch.nn.modules.linear.Identity"},
    ],
)
def test_options_that_change_nothing_are_no_reason_to_refuse(more: dict[str, Any], tmp_path: Path) -> None:
    assert import_layer(checkpoint(tmp_path, LLAMA_CONFIG | more, LLAMA), 1).options == CAUSAL


@pytest.mark.parametrize(
    ("configuration", "normed", "slide"),
    [  # the layers of 0 to 5 that slide, by configuration_*.py of transformers
        ({"model_type": "mistral"}, False, [0, 1, 2, 3, 4, 5]),
        ({"model_type": "ministral"}, False, [0, 1, 2, 3, 4, 5]),
        ({"model_type": "qwen2"}, False, []),
        ({"model_type": "qwen2", "use_sliding_window": True, "max_window_layers": 3}, False, [3, 4, 5]),
        ({"model_type": "qwen2_moe", "use_sliding_window": True, "max_window_layers": 3}, False, [0, 2]),
        ({"model_type": "qwen3", "use_sliding_window": True, "max_window_layers": 4}, True, [4, 5]),
        ({"model_type": "qwen3_moe", "use_sliding_window": True}, True, [0, 1, 2, 3, 4, 5]),
        ({"model_type": "qwen3_moe", "use_sliding_window": False}, True, []),
        ({"model_type": "dots1", "max_window_layers": 5}, True, [5]),
        ({"model_type": "vaultgemma", "query_pre_attn_scalar": 1, "attn_logit_softcapping": None}, False, [0, 2, 4]),
        ({"model_type": "smollm3", "use_sliding_window": True, "no_rope_layers": [0, 1, 1, 0, 1, 1]}, False, [0, 3]),
    ],
    ids=str,
)  # fmt: skip
def test_the_layers_that_slide_where_layer_types_are_not_listed(
    configuration: dict[str, Any], normed: bool, slide: list[int], tmp_path: Path
) -> None:
    shapes = SEPARATE | ({"q_norm": (DIM,), "k_norm": (DIM,)} if normed else {})
    given = {name: array for i in range(6) for name, array in tensors(shapes, f"layers.{i}.self_attn.").items()}
    path = checkpoint(tmp_path, DECODER | {"sliding_window": 4} | configuration, given)
    windows = {i: import_layer(path, i).options.get("window") for i in range(6)}
    assert windows == {i: {"left": 3} if i in slide else None for i in range(6)}


@pytest.mark.parametrize(
    ("configuration", "name"),
    [
        ({"model_type": "llama", "attention_bias": False}, "q_proj"),
        ({"model_type": "llama"}, "o_proj"),
        ({"model_type": "mistral"}, "k_proj"),
        ({"model_type": "qwen2"}, "o_proj"),
        ({"model_type": "qwen2_moe", "qkv_bias": False}, "v_proj"),
        ({"model_type": "seed_oss"}, "o_proj"),
        ({"model_type": "starcoder2", "use_bias": False}, "q_proj"),
        ({"model_type": "helium", "attention_bias": True}, "o_proj"),
        ({"model_type": "ernie4_5"}, "q_proj"),
    ],
    ids=str,
)
def test_a_bias_that_the_model_lacks_is_refused(configuration: dict[str, Any], name: str, tmp_path: Path) -> None:
    bias = {f"model.layers.1.self_attn.{name}.bias": np.ones(HIDDEN if name == "o_proj" else K, np.float32)}
    with pytest.raises(BadFile, match=rf"{name}\.bias' is a bias that models of this kind lack"):
        import_layer(checkpoint(tmp_path, DECODER | configuration, LLAMA | bias), 1)


def test_a_module_that_was_left_as_it_is_can_be_taken_from_a_quantized_checkpoint(tmp_path: Path) -> None:
    left = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}
    assert import_layer(checkpoint(tmp_path, LLAMA_CONFIG | {"quantization_config": left}, LLAMA), 1).options == CAUSAL


@pytest.mark.parametrize("shape", [(), (Q,), (Q, HIDDEN, 1)])
def test_maps_must_have_two_axes(shape: tuple[int, ...], tmp_path: Path) -> None:
    for name in ("q_proj", "v_proj", "o_proj"):
        given = LLAMA | {f"model.layers.1.self_attn.{name}.weight": np.ones(shape, np.float32)}
        with pytest.raises(BadFile, match=f"{name}.weight': expected two axes, got {len(shape)}"):
            import_layer(checkpoint(tmp_path, LLAMA_CONFIG, given), 1)


@pytest.mark.parametrize("more", [{"positions": 10**12}, {"positions": 0}, {"positions": -1}, {"heads": 0}], ids=str)
def test_numbers_of_the_command_have_limits(more: dict[str, int], llama: Path) -> None:
    with pytest.raises(BadFile, match=f"--{next(iter(more))}: expected"):
        import_layer(llama, 1, **more)  # type: ignore[arg-type]


def test_which_module_must_be_clear(tmp_path: Path) -> None:
    both = LLAMA | tensors(SEPARATE, "vision.layers.1.self_attn.")
    path = checkpoint(tmp_path, LLAMA_CONFIG, both)
    with pytest.raises(BadFile, match=r"several modules fit, say which by --prefix: model.*vision"):
        import_layer(path, 1)
    assert "vision" in import_layer(path, 1, prefix="vision.").source
    with pytest.raises(BadFile, match="which layer"):
        import_layer(path, None)
    with pytest.raises(BadFile, match=r"ends in layers\.0\.self_attn"):
        import_layer(path, 0)


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


def test_the_single_file_is_taken_before_an_index(llama: Path) -> None:
    """As transformers chooses, 5.23 and 5.24: tests/peers/test_layers.py asks it."""
    whole = (llama / "model.safetensors").read_bytes()
    expected = import_layer(llama, 1).arrays
    for name, file in sharded(llama).items():
        safetensors.numpy.save_file({name: np.zeros_like(LLAMA[name])}, llama / file)
    (llama / "model.safetensors").write_bytes(whole)
    found = import_layer(llama, 1).arrays
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        np.testing.assert_array_equal(found[name], array)


@pytest.mark.parametrize(("family", "extra"), [(None, {}), ("torch", {"heads": HEADS})])
def test_negative_layers_count_from_the_end(tmp_path: Path, family: str | None, extra: dict[str, Any]) -> None:
    arrays = {name.replace("layers.1.", f"layers.{n}."): array + n for name, array in LLAMA.items() for n in range(3)}
    config = LLAMA_CONFIG
    if family == "torch":
        arrays = {
            f"encoder.layers.{n}.self_attn.{name}": np.full(shape, n + 1.0, np.float32)
            for n in range(12)
            for name, shape in {"in_proj_weight": (3 * HIDDEN, HIDDEN), "out_proj.weight": (HIDDEN, HIDDEN)}.items()
        }
        config = {}
    path = checkpoint(tmp_path, config, arrays)
    last = max(int(name.split("layers.")[1].split(".")[0]) for name in arrays)
    for back in range(1, last + 2):
        found, expected = (import_layer(path, n, family=family, **extra) for n in (-back, last + 1 - back))
        assert found.source == expected.source
        assert found.arrays.keys() == expected.arrays.keys()
        for name, array in expected.arrays.items():
            np.testing.assert_array_equal(found.arrays[name], array)
    for layer in (last + 1, -last - 2):
        with pytest.raises(BadFile, match=f"--layer: expected 0 to {last}, or -1 for the last of them, got {layer}"):
            import_layer(path, layer, family=family, **extra)


@pytest.mark.parametrize(
    "index",
    ["{", "[]", "{}", '{"weight_map": {"a": "../x"}}', '{"weight_map": {"a": "x\\u0000"}}', '{"weight_map": {"a": 1}}'],
)
def test_a_hostile_index_is_refused(index: str, llama: Path) -> None:
    (llama / "model.safetensors").unlink()
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
    with pytest.raises(BadFile, match=r"model\.safetensors: .*truncated"):
        import_layer(llama, 1)
    file.unlink()
    with pytest.raises(BadFile, match="expected a directory with"):
        import_layer(llama, 1)


# The pages.


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
