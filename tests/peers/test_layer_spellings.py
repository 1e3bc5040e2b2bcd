"""Every `model_type` that can be imported, as each release spells its configuration: right, or refused by name.

What is right is what the module computes that transformers loads from the same files.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModel

from attention_service.layers.families import FAMILIES
from attention_service.layers.importing import import_layer
from attention_service.layers.models import MODELS
from attention_service.layers.tensors import BadFile
from tests.peers.test_layers import LLAMA3, YARN, close, computed

pytestmark = pytest.mark.filterwarnings("ignore")

LENGTH, LAYERS = 9, 6
# What a configuration is given of these, where its class has them.
SIZES: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 16, "num_hidden_layers": LAYERS, "num_attention_heads": 4, "vocab_size": 32,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2, "n_embd": 32, "n_head": 4, "n_layer": LAYERS, "n_positions": 64, "embedding_size": 32,
    "num_local_experts": 2, "num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 8,
    "moe_num_experts": 2, "moe_k": 1, "moe_topk": 1, "shared_expert_intermediate_size": 8,
    "n_routed_experts": 2, "n_shared_experts": 1,
    "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
    "vocab_size_per_layer_input": 32, "hidden_size_per_layer_input": 8, "laurel_rank": 4, "num_kv_shared_layers": 0,
    "intermediate_size_mlp": 16, "attention_chunk_size": 4, "query_pre_attn_scalar": 20, "attention_multiplier": 0.3,
    "image_size": 8, "patch_size": 4, "d_model": 32, "encoder_layers": LAYERS, "decoder_layers": 1,
    "encoder_attention_heads": 4, "decoder_attention_heads": 2, "num_mel_bins": 8, "encoder_ffn_dim": 16,
    "decoder_ffn_dim": 16, "max_source_positions": LENGTH, "decoder_start_token_id": 1, "sliding_window": 4,
    "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "mlp_only_layers": list(range(LAYERS)),
    "moe_layers": [], "attn_temperature_tuning": False,
}  # fmt: skip
MORE: dict[str, dict[str, Any]] = {
    "llama4_text": {"no_rope_layers": [1, 1, 1, 0, 1, 1]},
    "gemma4_text": {"global_head_dim": 16, "num_global_key_value_heads": 1, "attention_k_eq_v": True},
    "gpt_bigcode": {"num_key_value_heads": 1},
    "granite_swa": {"layer_rope_theta": [1e4, 1e3, 0.0, 1e4, 1e4, 0.0]},
}
PLACES = {
    **dict.fromkeys(FAMILIES["bert"].model_types, ("encoder.layer.{}.attention", "output.dense")),
    **dict.fromkeys(("gpt2", "gpt_bigcode"), ("h.{}.attn", "")),
    "gpt_neox": ("layers.{}.attention", ""),
    "falcon": ("h.{}.self_attention", ""),
    "vit": ("layers.{}.attention", ""),
    "whisper": ("encoder.layers.{}.self_attn", ""),
}
ENCODERS = {*FAMILIES["bert"].model_types, "vit", "whisper"}
LINEAR = ("qwen3_next", "qwen3_5")  # of six layers one has attention
OLD = ("rope_parameters", "layer_types", "no_rope_layers")
TYPES = [name for family in FAMILIES.values() for name in family.model_types if name != "gemma3"]


def as_saved(config: dict[str, Any]) -> dict[str, Any]:
    return config


def without_layer_types(config: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in config.items() if name != "layer_types"}


def old_rope_keys(config: dict[str, Any]) -> dict[str, Any]:
    rope = config.pop("rope_parameters", None)
    if rope is None:
        return config
    if "full_attention" in rope:
        local, rope = rope["sliding_attention"], rope["full_attention"]
        if config["model_type"].startswith("gemma"):
            config["rope_local_base_freq"] = local["rope_theta"]
    rope = dict(rope)
    for name, own in (("rope_theta", "rotary_emb_base"), ("partial_rotary_factor", "rotary_pct")):
        if name in rope:
            config[own if config["model_type"] == "gpt_neox" else name] = rope.pop(name)
    return config | {"rope_scaling": rope if rope["rope_type"] != "default" else None}


def window_on(config: dict[str, Any]) -> dict[str, Any]:
    config = without_layer_types(config) | {"sliding_window": 3}
    more = {"use_sliding_window": True, "max_window_layers": 2}
    return config | {name: value for name, value in more.items() if name in config}


def not_causal(config: dict[str, Any]) -> dict[str, Any]:
    return config | {"is_causal": False}


def causal_null(config: dict[str, Any]) -> dict[str, Any]:
    return config | {"is_causal": None}


SPELLINGS: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "as saved": as_saved,
    "without layer_types": without_layer_types,
    "old rope keys": old_rope_keys,
    "window on": window_on,
    "is_causal false": not_causal,
    "is_causal null": causal_null,
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A checkpoint of a model_type, with random weights that are not small."""
    paths: dict[str, Path] = {}

    def save(name: str) -> Path:
        if name not in paths:
            known = AutoConfig.for_model(name).to_dict()
            torch.manual_seed(0)
            config = AutoConfig.for_model(
                name, **{key: value for key, value in SIZES.items() if key in known} | MORE.get(name, {})
            )
            model = AutoModel.from_config(config)
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.normal_(0, 0.3)
            paths[name] = tmp_path_factory.mktemp("saved") / name
            model.save_pretrained(paths[name])
        return paths[name]

    return save


def spelled(saved: Path, folder: Path, spell: Callable[[dict[str, Any]], dict[str, Any]]) -> Path:
    """A copy of a checkpoint with another spelling of its configuration."""
    folder.mkdir()
    config = json.loads((saved / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(spell(config)))
    (folder / "model.safetensors").symlink_to(saved / "model.safetensors")
    return folder


def recorded(checkpoint: Path, name: str) -> dict[int, tuple[np.ndarray, np.ndarray]]:
    """What enters and leaves the attention modules of the model that transformers loads."""
    model = AutoModel.from_pretrained(checkpoint, attn_implementation="eager", dtype=torch.float32).eval()
    place, last = PLACES.get(name, ("layers.{}.self_attn", ""))
    seen: dict[int, tuple[np.ndarray, np.ndarray]] = {}
    modules = dict(model.named_modules())
    for layer in range(LAYERS):
        if (whole := modules.get(place.format(layer))) is not None:
            entered: list[Any] = []

            def enter(_: Any, given: Any, named: dict[str, Any], entered: list[Any] = entered) -> None:
                entered.append(given[0] if given else named["hidden_states"])

            def leave(_: Any, given: Any, found: Any, layer: int = layer, entered: list[Any] = entered) -> None:
                left = found[0] if isinstance(found, tuple) else found
                seen[layer] = entered[0].numpy(), left.numpy()

            whole.register_forward_pre_hook(enter, with_kwargs=True)
            (whole.get_submodule(last) if last else whole).register_forward_hook(leave)
    torch.manual_seed(1)
    with torch.no_grad():
        if name == "vit":
            model(torch.randn(2, 3, 8, 8))
        elif name == "whisper":
            model(torch.randn(2, 8, 2 * LENGTH), decoder_input_ids=torch.ones(2, 1, dtype=torch.long))
        else:
            model(torch.arange(2 * LENGTH).reshape(2, LENGTH) % 13 + 3)
    return seen


def refusal(name: str, spelling: str) -> str | None:
    """The option that an import is refused for; None where it must be right."""
    if spelling in ("is_causal false", "is_causal null"):  # transformers reads null as false
        return None if name in ENCODERS else "is_causal"
    if spelling == "window on" and "sliding_window" not in AutoConfig.for_model(name).to_dict():
        return "sliding_window"  # transformers ignores it
    if spelling == "old rope keys" and name == "gemma4_text":
        return "rope_"  # no release wrote them
    return None


@pytest.mark.parametrize("spelling", SPELLINGS)
@pytest.mark.parametrize("name", TYPES)
def test_a_spelling_is_right_or_refused_by_name(
    name: str, spelling: str, saved: Callable[[str], Path], tmp_path: Path
) -> None:
    checkpoint = spelled(saved(name), tmp_path / "spelled", SPELLINGS[spelling])
    if refused := refusal(name, spelling):
        layer = 3 if name.startswith(LINEAR) else LAYERS - 1
        with pytest.raises(BadFile, match=refused):
            import_layer(checkpoint, layer)
        return
    seen = recorded(checkpoint, name)
    assert len(seen) == (1 if name.startswith(LINEAR) else LAYERS)
    for layer, (entered, left) in seen.items():
        close(computed(tmp_path, checkpoint, layer, {"input": entered}), left)


# The rotary embeddings of types of layers: with this base and length, `truncate` changes the numbers.
SHORT = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "rope_theta": 1e2}
DEFAULT = {"rope_type": "default", "rope_theta": 1e4}
EXACT, ODD = {"truncate": False}, {"partial_rotary_factor": 0.4}
NEOX = {"rope_parameters": None}
FACTORS = {"mscale": 1.2, "mscale_all_dim": 0.7, "beta_fast": 8.0, "beta_slow": 0.5}
TYPED = {"layer_types": ["sliding_attention", "full_attention"] * 3}
TWO_ROPES = ("olmo3", "gemma3_text", "gemma3n_text", "gemma4_text")


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("mistral", {"sliding_window": None}),
        ("phi3", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}}),
        ("llama", {"rope_scaling": YARN, "original_max_position_embeddings": 32}),
        ("llama", {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4}}),
        ("llama", {"rope_scaling": {"type": "linear", "factor": 4.0}, "rope_theta": 100.0}),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 3, "layer_types": None, "max_window_layers": 0}),
        ("exaone4", {"sliding_window": None, "layer_types": ["full_attention"] * LAYERS}),
        ("olmo3", {"rope_parameters": None, "rope_scaling": YARN, "rope_theta": 5e5}),
        ("gemma3_text", {"rope_parameters": None, "rope_scaling": {"rope_type": "linear", "factor": 8.0}}),
        ("gemma2", {"attn_logit_softcapping": None}),
        ("glm4", {"rope_parameters": None, "rope_theta": 1e4}),
        ("llama4_text", {"use_qk_norm": False}),
        ("smollm3", {"no_rope_layers": None, "layer_types": None, "use_sliding_window": True, "sliding_window": 3}),
        ("gpt_oss", {"rope_parameters": None, "rope_scaling": YARN, "rope_theta": 150000.0}),
        ("gpt2", {"n_head": 4, "num_attention_heads": 4}),
        ("gpt_neox", NEOX | {"rotary_emb_base": 100, "rotary_pct": 1.0}),
        ("gpt_neox", NEOX | {"rotary_emb_base": 100, "rope_theta": 100, "rotary_pct": 0.5,
                             "partial_rotary_factor": 0.5, "rope_scaling": {"type": "linear", "factor": 4.0}}),
        ("gpt_neox", NEOX | {"rotary_emb_base": 100, "rope_scaling": YARN | {"partial_rotary_factor": 0.75}}),
        ("gpt_neox", NEOX | {"rope_scaling": YARN, "original_max_position_embeddings": 32}),
        ("gpt_neox", NEOX),
        ("falcon", {"rope_parameters": None}),
        ("falcon", {"rope_parameters": None, "rope_scaling": {"type": "linear", "factor": 4.0}, "rope_theta": 100.0}),
        ("falcon", {"num_kv_heads": 1}),
        ("gpt_bigcode", {"num_attention_heads": 4}),
        # What published configurations have, and the module does not read.
        ("gpt_bigcode", {"inference_runner": 0, "pad_key_length": True, "validate_runner_input": True}),
        ("gpt_neox", {"hidden_dropout_prob": 0, "use_parallel_residual": False}),
        ("falcon", {"apply_residual_connection_post_layernorm": False, "activation": "gelu"}),
        ("gemma2", {"sliding_window_size": 4096}),
        ("llama", {"max_sequence_length": 2048}),
        ("starcoder2", {"attention_softmax_in_fp32": True}),
        ("ernie4_5", {"compression_ratio": 1.0}),
        ("gpt2", {"n_special": 0, "predict_special_tokens": True}),
        ("electra", {"generator_size": "0.25", "sbert_ce_default_activation_function": "torch.nn.Identity"}),
        ("starcoder2", {"mlp_type": "default", "norm_type": "layer_norm", "scale_attention_softmax_in_fp32": True}),
        ("phi3", {"interpolate_factor": 1, "full_attn_mod": 1}),
        ("roberta", {"name": "Roberta", "sentence_transformers": {"version": "4.1"}}),
        ("gpt2", {"author": "A", "created_date": "2021-04-28", "license": "MIT"}),
        # Options of scalings, where transformers reads them, or where they change nothing.
        *((name, ({} if name == "gemma4_text" else TYPED) | {"rope_parameters": rope})
          for name in TWO_ROPES for rope in (
            {"full_attention": SHORT, "sliding_attention": DEFAULT},
            {"full_attention": SHORT | {"truncate": True}, "sliding_attention": SHORT},
            {"full_attention": SHORT | EXACT, "sliding_attention": DEFAULT} | EXACT,
            {"full_attention": SHORT | FACTORS, "sliding_attention": LLAMA3})),
        ("olmo3", TYPED | {"rope_parameters": {"full_attention": SHORT, "sliding_attention": DEFAULT},
                           "original_max_position_embeddings": 32}),
        ("llama", {"rope_parameters": SHORT | EXACT}),
        ("glm", {"rope_parameters": SHORT | EXACT | {"partial_rotary_factor": 0.75}}),
        # Three features: transformers turns four.
        ("glm", {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e2} | ODD}),
        ("glm", {"rope_parameters": LLAMA3 | ODD}),
        ("exaone4", {"sliding_window_pattern": "LLLG"}),
        ("exaone4", {"sliding_window_pattern": None}),
    ],
    ids=str,
)  # fmt: skip
def test_other_options_are_right(
    name: str, changes: dict[str, Any], saved: Callable[[str], Path], tmp_path: Path
) -> None:
    def spell(config: dict[str, Any]) -> dict[str, Any]:
        # What is null is left out, as the default of its class may be something else.
        return {key: value for key, value in (config | changes).items() if value is not None or key not in OLD}

    checkpoint = spelled(saved(name), tmp_path / "spelled", spell)
    for layer, (entered, left) in recorded(checkpoint, name).items():
        close(computed(tmp_path, checkpoint, layer, {"input": entered}), left)


@pytest.mark.parametrize(
    ("name", "changes", "layer", "text"),
    [
        ("gpt_oss", {"rope_theta": 150000.0}, 0, "rope_parameters or rope_scaling"),
        ("gpt_oss", {"rope_theta": 150000.0, "rope_scaling": None}, 0, "rope_parameters or rope_scaling"),
        ("gemma3_text", {"rope_theta": 1e6, "rope_scaling": {"type": "linear", "factor": 8.0}}, 5, "rope_type"),
        ("gemma3n_text", {"rope_theta": 1e6, "rope_scaling": {"type": "linear", "factor": 8.0}}, 4, "rope_type"),
        ("olmo3", {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 8.0}}, 3, "rope_type"),
        # Types of layers have no options of their own in one place, and no common ones in the other.
        *((name, TYPED | {"rope_parameters": rope}, 1, "truncate") for name in TWO_ROPES for rope in (
            {"full_attention": SHORT | EXACT, "sliding_attention": DEFAULT},
            {"full_attention": SHORT, "sliding_attention": DEFAULT} | EXACT)),
        *((name, TYPED | {"rope_parameters": {"full_attention": DEFAULT, "sliding_attention": SHORT | EXACT}}, 0,
           "truncate") for name in TWO_ROPES),
        ("olmo3", {"rope_theta": 5e5, "rope_scaling": SHORT | EXACT}, 3, "truncate"),
        ("gemma3_text", {"rope_theta": 1e6, "rope_scaling": SHORT | EXACT}, 5, "truncate"),
        *(("olmo3", TYPED | {"rope_parameters": {"full_attention": rope, "sliding_attention": DEFAULT},
                             "original_max_position_embeddings": 8}, 1, "original_max") for rope in (SHORT, LLAMA3)),
        # Odd numbers of features.
        ("glm", {"rope_parameters": SHORT | ODD}, 0, "yarn: expected an even number .*, got number 3"),
        ("qwen3_next", {"rope_parameters": SHORT | {"partial_rotary_factor": 0.125}}, 3, "expected an even number"),
        ("gpt2", {"num_attention_heads": 2}, 0, "n_head and num_attention_heads"),
        ("gpt_bigcode", {"num_attention_heads": 2}, 0, "n_head and num_attention_heads"),
        ("gpt_neox", {"rope_theta": 100.0}, 0, "rope_theta"),
        ("gpt_neox", {"rotary_pct": 0.0}, 0, "rotary_pct"),
        ("gpt_neox", {"rope_parameters": DEFAULT | {"partial_rotary_factor": 0.0}}, 0, "partial_rotary_factor"),
        ("falcon", {"rope_parameters": LLAMA3 | ODD}, 0, "partial_rotary_factor"),
        ("falcon", {"alibi": True}, 0, "alibi"),
        # transformers turns nothing.
        ("glm", {"rope_parameters": DEFAULT | {"partial_rotary_factor": 0.0}}, 0, "partial_rotary_factor"),
        ("whisper", {"num_attention_heads": 2}, 0, "num_attention_heads"),
    ],
    ids=str,
)  # fmt: skip
def test_what_transformers_reads_otherwise_is_refused(
    name: str, changes: dict[str, Any], layer: int, text: str, saved: Callable[[str], Path], tmp_path: Path
) -> None:
    def spell(config: dict[str, Any]) -> dict[str, Any]:
        return {key: value for key, value in config.items() if key != "rope_parameters"} | changes

    with pytest.raises(BadFile, match=text):
        import_layer(spelled(saved(name), tmp_path / "spelled", spell), layer)


def imported_layers(checkpoint: Path) -> set[int]:
    """The layers of a checkpoint that the import does not refuse."""
    found = set()
    for layer in range(LAYERS):
        with suppress(BadFile):
            import_layer(checkpoint, layer)
            found.add(layer)
    return found


@pytest.mark.parametrize("name", TYPES)
def test_null_means_what_it_means_to_transformers(name: str, saved: Callable[[str], Path], tmp_path: Path) -> None:
    """Each known option as null, with windows and without layer_types: right, refused, or no model that loads."""
    config = json.loads((saved(name) / "config.json").read_text())
    spell = window_on if "sliding_window" in config else without_layer_types
    for option in MODELS[name].options:
        folder = tmp_path / option
        checkpoint = spelled(saved(name), folder, lambda given, option=option: spell(given) | {option: None})
        if not (imported := imported_layers(checkpoint)):
            continue
        try:
            seen = recorded(checkpoint, name)
        except (ValueError, TypeError, ArithmeticError, RuntimeError, StrictDataclassError):
            continue  # transformers takes no null here
        for layer in imported & set(seen):
            close(computed(folder, checkpoint, layer, {"input": seen[layer][0]}), seen[layer][1])


@pytest.mark.parametrize("name", ["llama", "mistral", "qwen3", "gemma3_text", "helium", "gpt_oss"])
def test_a_bias_that_transformers_does_not_load_is_refused(
    name: str, saved: Callable[[str], Path], tmp_path: Path
) -> None:
    checkpoint = spelled(saved(name), tmp_path / "spelled", lambda config: config | {"attention_bias": False})
    tensors = load_file(checkpoint / "model.safetensors")
    (checkpoint / "model.safetensors").unlink()
    save_file(tensors | {"layers.0.self_attn.q_proj.bias": torch.ones(32)}, checkpoint / "model.safetensors")
    with pytest.raises(BadFile, match=r"q_proj\.bias"):
        import_layer(checkpoint, 0)
