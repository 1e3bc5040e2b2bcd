"""The families of models: what a layer has of a checkpoint made by hand.

tests/peers/test_layers.py and test_modules.py compare imported layers with the models themselves.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy

from attention_service.layers.importing import import_layer
from attention_service.layers.tensors import BadFile
from tests.helpers.checkpoints import (
    CAUSAL,
    DECODER,
    DIM,
    EPS,
    HEADS,
    HIDDEN,
    SEPARATE,
    K,
    Q,
    checkpoint,
    tensors,
)


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
        ({"model_type": "gemma2", "query_pre_attn_scalar": 16, "attn_logit_softcapping": 50.0, "sliding_window": 5,
          "sliding_window_size": 5},
         SEPARATE, "layers.1.self_attn.", CAUSAL | {"scale": 0.25, "softcap": 50.0}),
        ({"model_type": "gemma3", "text_config": DECODER | {
            "model_type": "gemma3_text", "query_pre_attn_scalar": 16, "sliding_window": 5, "head_dim": DIM,
            "rope_local_base_freq": 10.0}}, SEPARATE | {"q_norm": (DIM,), "k_norm": (DIM,)},
         "language_model.model.layers.1.self_attn.",
         CAUSAL | EPS | {"scale": 0.25, "window": {"left": 4}, "rotary": {"base": 10.0}}),
        ({"model_type": "gpt_oss", "layer_types": ["full_attention", "sliding_attention"], "sliding_window": 5,
          "rope_scaling": {"rope_type": "default"}},
         SEPARATE | {"sinks": (HEADS,)}, "layers.1.self_attn.", CAUSAL | {"window": {"left": 4}}),
        ({"model_type": "olmo", "clip_qkv": 8.0}, SEPARATE, "layers.1.self_attn.", CAUSAL | {"clip_qkv": 8.0}),
        ({"model_type": "olmo2"}, SEPARATE | {"q_norm": (Q,), "k_norm": (K,)}, "layers.1.self_attn.",
         CAUSAL | {name: {"eps": 1e-5, "over": "all"} for name in EPS}),
        ({"model_type": "bitnet"}, SEPARATE | {"attn_sub_norm": (Q,)}, "layers.1.self_attn.",
         CAUSAL | {"output_norm": {"eps": 1e-5, "over": "all"}}),
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
    base = {"bert": {"num_attention_heads": HEADS}, "vit": {"num_attention_heads": HEADS}, "whisper": {}}
    whole = base.get(configuration["model_type"], DECODER) | configuration
    found = import_layer(checkpoint(tmp_path, whole, given), 1)
    assert found.options == options
    assert sum(array.size for array in found.arrays.values()) >= sum(
        array.size for name, array in given.items() if "LayerNorm" not in name
    )
    query = next(array for name, array in given.items() if name.endswith(("q_proj.weight", "query.weight")))
    np.testing.assert_array_equal(found.arrays["projection.query.weight"], query)
    assert place.rstrip(".") in found.source
    assert_strange_tensors_are_refused(tmp_path, whole, given, place, 1)


def normed(shapes: dict[str, tuple[int, ...]], **more: Any) -> dict[str, tuple[int, ...]]:
    """Shapes of a module with a norm for each head of queries and keys."""
    return shapes | {"q_norm": (DIM,), "k_norm": (DIM,)} | more


BASES = {"sliding_attention": {"rope_theta": 10.0}, "full_attention": {"rope_theta": 100.0}}
TYPES = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 5}
NO_ROTATION = {name: value for name, value in CAUSAL.items() if name != "rotary"}
TURNED = CAUSAL | {"rotary": {"base": 100.0, "interleaved": True}}
PARTLY = {"rope_parameters": {"rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": 0.5}}


@pytest.mark.parametrize(
    ("configuration", "shapes", "layer", "options"),
    [
        ({"model_type": "granite", "attention_multiplier": 0.1}, SEPARATE, 1, CAUSAL | {"scale": 0.1}),
        ({"model_type": "granite_swa", "attention_multiplier": 0.1, "layer_rope_theta": [0, 50.0]} | TYPES,
         SEPARATE | {"sinks": (HEADS,)}, 1, CAUSAL | {"scale": 0.1, "rotary": {"base": 50.0}}),
        ({"model_type": "granite_swa", "attention_multiplier": 0.1, "layer_rope_theta": [0, 50.0]} | TYPES,
         SEPARATE | {"sinks": (HEADS,)}, 0, NO_ROTATION | {"scale": 0.1, "window": {"left": 4}}),
        ({"model_type": "glm4"} | PARTLY, SEPARATE, 1, CAUSAL | {"rotary": {"base": 100.0, "dim": 2,
                                                                           "interleaved": True}}),
        ({"model_type": "cohere2"} | TYPES, SEPARATE, 0, TURNED | {"window": {"left": 4}}),
        ({"model_type": "cohere2", "sliding_window": 5}, SEPARATE, 3, NO_ROTATION),
        ({"model_type": "smollm3", "no_rope_layers": [1, 0]}, SEPARATE, 0, CAUSAL),
        ({"model_type": "smollm3"}, SEPARATE, 3, NO_ROTATION),
        ({"model_type": "exaone4"} | TYPES, normed(SEPARATE), 0, CAUSAL | EPS | {"window": {"left": 4}}),
        ({"model_type": "exaone4"} | TYPES, normed(SEPARATE), 1, NO_ROTATION | EPS),
        ({"model_type": "exaone4"} | TYPES | {"sliding_window": None}, normed(SEPARATE), 1, CAUSAL | EPS),
        ({"model_type": "olmo3", "rope_parameters": BASES} | TYPES, SEPARATE | {"q_norm": (Q,), "k_norm": (K,)}, 0,
         CAUSAL | {name: {"eps": 1e-5, "over": "all"} for name in EPS} | {"rotary": {"base": 10.0},
                                                                          "window": {"left": 4}}),
        ({"model_type": "llama4_text"}, SEPARATE, 1,
         TURNED | {name: {"eps": 1e-5, "position": "after"} for name in EPS} | {"chunk_size": 8192}),
        ({"model_type": "llama4_text", "use_qk_norm": False, "attention_chunk_size": 6}, SEPARATE, 1,
         TURNED | {"chunk_size": 6}),
        ({"model_type": "llama4_text", "attn_temperature_tuning": False}, SEPARATE, 3, NO_ROTATION),
        ({"model_type": "gemma3n_text", "num_hidden_layers": 30, "rope_parameters": BASES} | TYPES, normed(SEPARATE), 0,
         CAUSAL | EPS | {"scale": 1.0, "value_norm": {"eps": 1e-5}, "rotary": {"base": 10.0}, "window": {"left": 4}}),
        ({"model_type": "gemma4_text", "num_hidden_layers": 2, "rope_parameters": BASES, "head_dim": 2,
          "rope_theta": None, "attention_k_eq_v": True} | TYPES,
         {name: shape for name, shape in normed(SEPARATE).items() if name != "v_proj"}, 1,
         CAUSAL | EPS | {"scale": 1.0, "value_norm": {"eps": 1e-5}}),
    ],
    ids=lambda value: value.get("model_type", "") if isinstance(value, dict) else "",
)  # fmt: skip
def test_families_whose_layers_differ(
    configuration: dict[str, Any], shapes: dict[str, Any], layer: int, options: dict[str, Any], tmp_path: Path
) -> None:
    given = tensors(shapes, f"model.layers.{layer}.self_attn.")
    found = import_layer(checkpoint(tmp_path, DECODER | configuration, given), layer)
    assert found.options == options
    value = given.get(f"model.layers.{layer}.self_attn.v_proj.weight")
    keys = given[f"model.layers.{layer}.self_attn.k_proj.weight"]
    np.testing.assert_array_equal(found.arrays["projection.value.weight"], keys if value is None else value)
    assert_strange_tensors_are_refused(
        tmp_path, DECODER | configuration, given, f"model.layers.{layer}.self_attn.", layer
    )


def assert_strange_tensors_are_refused(
    folder: Path, configuration: dict[str, Any], given: dict[str, Any], place: str, layer: int
) -> None:
    """A tensor that is ignored could change what the module computes."""
    strange = given | tensors({"strange": (3,)}, place)
    with pytest.raises(BadFile, match="strange"):
        import_layer(checkpoint(folder, configuration, strange), layer)


@pytest.mark.parametrize("biased", [False, True])
def test_the_rows_of_qwen_3_next_are_those_of_queries_and_gates_head_by_head(biased: bool, tmp_path: Path) -> None:
    shapes = normed(SEPARATE, q_proj=(2 * Q, HIDDEN)) | ({"q_proj.bias": (2 * Q,)} if biased else {})
    given = tensors(shapes, "model.layers.3.self_attn.")
    published = {"model_type": "qwen3_next", "partial_rotary_factor": 0.5, "full_attention_interval": 4,
                 "attention_bias": biased}  # fmt: skip
    path = checkpoint(tmp_path, DECODER | published, given)
    found = import_layer(path, 3)
    packed = given["model.layers.3.self_attn.q_proj.weight"]
    for role, first in (("query", 0), ("gate", DIM)):
        expected = np.concatenate([packed[start + first : start + first + DIM] for start in range(0, 2 * Q, 2 * DIM)])
        np.testing.assert_array_equal(found.arrays[f"projection.{role}.weight"], expected)
        assert (f"projection.{role}.bias" in found.arrays) == biased
    np.testing.assert_array_equal(found.arrays["key_norm.weight"], given["model.layers.3.self_attn.k_norm.weight"] + 1)
    assert found.options == CAUSAL | EPS | {"rotary": {"base": 100.0, "dim": 2}}
    if biased:
        long = given | {"model.layers.3.self_attn.q_proj.bias": np.zeros(2 * Q + 1, np.float32)}
        with pytest.raises(BadFile, match=r"q_proj\.bias'?: expected a number for each row"):
            import_layer(checkpoint(tmp_path, DECODER | published, long), 3)
    with pytest.raises(BadFile, match="'linear_attention' cannot be expressed"):
        import_layer(checkpoint(tmp_path, DECODER | published, tensors(SEPARATE, "layers.1.self_attn.")), 1)


def test_a_share_of_the_pairs_turns_with_the_frequencies_of_all(tmp_path: Path) -> None:
    """By hand: of the frequencies 1 and 1/10 the first turns, the second stands still."""
    bases = {"full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.5, "rope_theta": 100.0}}
    more = {"model_type": "gemma4_text", "num_hidden_layers": 1, "rope_parameters": bases, "rope_theta": None,
            "layer_types": ["full_attention"]}  # fmt: skip
    found = import_layer(checkpoint(tmp_path, DECODER | more, tensors(normed(SEPARATE), "layers.0.self_attn.")), 0)
    np.testing.assert_allclose(found.arrays["rotary.cos"][2], [np.cos(2), 1], atol=1e-7)
    np.testing.assert_allclose(found.arrays["rotary.sin"][2], [np.sin(2), 0], atol=1e-7)


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


def test_names_of_the_same_number_must_agree(tmp_path: Path) -> None:
    """transformers reads num_attention_heads, the name that GPT-2's n_head stands for, where both are there."""
    shapes = {"c_attn": (8, 24), "c_attn.bias": (24,), "c_proj": (8, 8), "c_proj.bias": (8,)}
    configuration = {"model_type": "gpt2", "n_head": 4, "num_attention_heads": 2}
    with pytest.raises(BadFile, match="n_head and num_attention_heads are names of the same number"):
        import_layer(checkpoint(tmp_path, configuration, tensors(shapes, "h.2.attn.")), 2)
    found = import_layer(checkpoint(tmp_path, configuration | {"n_head": 2}, tensors(shapes, "h.2.attn.")), 2)
    assert found.options["num_heads"] == 2


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


# The heads of the rows of one matrix: four of queries, and those of keys and values.
APART = {"query": [0, 3, 6, 9], "key": [1, 4, 7, 10], "value": [2, 5, 8, 11]}
BY_TWO = {"query": [0, 1, 4, 5], "key": [2, 6], "value": [3, 7]}
ONE = {"query": [0, 1, 2, 3], "key": [4], "value": [5]}
FALCON = {"model_type": "falcon", "num_attention_heads": HEADS}
NEOX = {"model_type": "gpt_neox", "num_attention_heads": HEADS, "rotary_pct": 0.5}


@pytest.mark.parametrize(
    ("configuration", "place", "rows", "options"),
    [
        (FALCON | {"num_kv_heads": HEADS}, "transformer.h.1.self_attention.", ONE, {"rotary": {"base": 10000.0}}),
        (FALCON | {"new_decoder_architecture": True, "num_kv_heads": 2, "rope_theta": 100.0}, "h.1.self_attention.",
         BY_TWO, {"rotary": {"base": 100.0}}),
        (FALCON | {"new_decoder_architecture": True, "multi_query": False}, "h.1.self_attention.", APART,
         {"rotary": {"base": 10000.0}}),
        (FALCON | {"multi_query": False, "bias": True}, "h.1.self_attention.", APART, {"rotary": {"base": 10000.0}}),
        (NEOX | {"rotary_emb_base": 100}, "gpt_neox.layers.1.attention.", APART, {"rotary": {"base": 100.0, "dim": 2}}),
        (NEOX | {"rotary_pct": 1, "attention_bias": False}, "layers.1.attention.", APART,
         {"rotary": {"base": 10000.0}}),
        ({"model_type": "gpt_bigcode", "n_head": HEADS}, "transformer.h.1.attn.", ONE, {}),
        ({"model_type": "gpt_bigcode", "n_head": HEADS, "multi_query": False, "scale_attn_weights": False}, "h.1.attn.",
         APART, {"scale": 1.0}),
    ],
    ids=lambda value: value.get("model_type", "") if isinstance(value, dict) else "",
)  # fmt: skip
def test_packed_rows_are_split_group_by_group(
    configuration: dict[str, Any], place: str, rows: dict[str, list[int]], options: dict[str, Any], tmp_path: Path
) -> None:
    packed, output = ("c_attn", "c_proj") if "n_head" in configuration else ("query_key_value", "dense")
    count = DIM * sum(map(len, rows.values()))
    biased = configuration.get("bias", configuration.get("attention_bias", configuration["model_type"] != "falcon"))
    shapes: dict[str, tuple[int, ...]] = {packed: (count, Q), output: (Q, Q)}
    given = tensors(shapes | ({f"{packed}.bias": (count,), f"{output}.bias": (Q,)} if biased else {}), place)
    found = import_layer(checkpoint(tmp_path, configuration, given), 1)
    for name in ("weight", "bias") if biased else ("weight",):
        parts = np.split(given[f"{place}{packed}.{name}"], count // DIM)
        for role, heads in rows.items():
            expected = np.concatenate([parts[head] for head in heads])
            np.testing.assert_array_equal(found.arrays[f"projection.{role}.{name}"], expected)
        np.testing.assert_array_equal(found.arrays[f"projection.output.{name}"], given[f"{place}{output}.{name}"])
    assert found.options == {"num_heads": HEADS, "num_kv_heads": len(rows["key"]), "is_causal": True} | options
    assert_strange_tensors_are_refused(tmp_path, configuration, given, place, 1)
    given[f"{place}{packed}.bias"] = np.zeros(count + 1, np.float32)
    with pytest.raises(BadFile, match=rf"{packed}\.bias"):
        import_layer(checkpoint(tmp_path, configuration, given), 1)


@pytest.mark.parametrize(
    ("more", "text"),
    [
        ({"alibi": True}, "alibi"),
        ({"num_kv_heads": 2}, "num_kv_heads"),
        ({"multi_query": False}, "4 heads, 4 of keys"),
        ({"new_decoder_architecture": True, "num_kv_heads": 3}, "4 heads, 3 of keys"),
        ({"new_decoder_architecture": True, "num_kv_heads": 8}, "4 heads, 8 of keys"),
        ({"num_attention_heads": 14}, "14 heads"),
        ({"is_causal": None}, "is_causal"),
    ],
    ids=str,
)
def test_what_falcon_has_and_a_request_has_not_is_refused(more: dict[str, Any], text: str, tmp_path: Path) -> None:
    given = tensors({"query_key_value": (Q + 2 * DIM, Q), "dense": (Q, Q)}, "h.0.self_attention.")
    with pytest.raises(BadFile, match=text):
        import_layer(checkpoint(tmp_path, FALCON | more, given), 0)


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
