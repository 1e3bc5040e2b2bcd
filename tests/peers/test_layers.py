"""Imported layers give what the attention modules of their models give: tiny checkpoints with random weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import save_file

from attention_service.backends.base import no_check
from attention_service.codecs.decoded import Decoded
from attention_service.layers.files import write_layer
from attention_service.layers.importing import import_layer
from attention_service.layers.store import LayerStore
from attention_service.layers.tensors import BadFile
from attention_service.pipeline.engine import Engine
from attention_service.settings import Settings

pytestmark = pytest.mark.filterwarnings("ignore")

LENGTH, PADDING = 9, 2
TINY: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4,
                        "vocab_size": 16, "max_position_embeddings": 64, "attn_implementation": "eager",
                        "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}  # fmt: skip
GROUPED = TINY | {"num_key_value_heads": 2}
# head_dim times heads is not the size of hidden states.
WIDE = GROUPED | {"head_dim": 16}
VIT = {name: TINY[name] for name in ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")}
GPT2: dict[str, Any] = {"n_embd": 32, "n_head": 4, "n_layer": 2, "vocab_size": 16, "n_positions": 64}
WHISPER: dict[str, Any] = {
    "d_model": 32, "encoder_layers": 2, "decoder_layers": 1, "encoder_attention_heads": 4, "decoder_attention_heads": 2,
    "vocab_size": 16, "num_mel_bins": 8, "encoder_ffn_dim": 16, "decoder_ffn_dim": 16, "max_source_positions": LENGTH,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}  # fmt: skip
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "rope_theta": 5e5,
          "original_max_position_embeddings": 16}  # fmt: skip
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "rope_theta": 1e4}
LINEAR = {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6}
LOCAL = {"rope_type": "default", "rope_theta": 1e4}
BOTH = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 4}

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "bert": ("Bert", TINY),
    "gpt2": ("GPT2", GPT2),
    "gpt2, scaled by layer": ("GPT2", GPT2 | {"scale_attn_by_inverse_layer_idx": True}),
    "gpt2, not scaled": ("GPT2", GPT2 | {"scale_attn_weights": False}),
    "gpt bigcode": ("GPTBigCode", GPT2),
    "gpt bigcode, head by head": ("GPTBigCode", GPT2 | {"multi_query": False, "scale_attn_weights": False}),
    "gpt-neox": ("GPTNeoX", TINY),
    "gpt-neox without biases": ("GPTNeoX", TINY | {"attention_bias": False, "rope_parameters": YARN | {
        "partial_rotary_factor": 0.5}}),
    "falcon": ("Falcon", TINY),
    "falcon, by groups": ("Falcon", TINY | {"new_decoder_architecture": True, "num_kv_heads": 2, "bias": True}),
    "falcon, head by head": ("Falcon", TINY | {"multi_query": False, "bias": True, "rope_parameters": LINEAR}),
    "vit": ("ViT", VIT | {"image_size": 8, "patch_size": 4}),
    "vit without biases": ("ViT", VIT | {"image_size": 8, "patch_size": 4, "qkv_bias": False}),
    "llama": ("Llama", WIDE),
    "llama with biases": ("Llama", GROUPED | {"attention_bias": True}),
    "llama 3": ("Llama", GROUPED | {"rope_parameters": LLAMA3}),
    "llama, yarn": ("Llama", GROUPED | {"rope_parameters": YARN}),
    "llama, yarn with factors": (
        "Llama", GROUPED | {"rope_parameters": YARN | {"mscale": 1.2, "mscale_all_dim": 0.7, "beta_fast": 8.0}}),
    "llama, linear": ("Llama", GROUPED | {"rope_parameters": LINEAR}),
    "bitnet": ("BitNet", GROUPED),
    "mistral": ("Mistral", WIDE | {"sliding_window": 4}),
    "mistral without a window": ("Mistral", WIDE | {"sliding_window": None}),
    "qwen 2": ("Qwen2", GROUPED),
    "qwen 2 with windows": ("Qwen2", GROUPED | {"use_sliding_window": True, "sliding_window": 4,
                                                "max_window_layers": 1}),
    "qwen 3": ("Qwen3", WIDE),
    "gemma 2": ("Gemma2", WIDE | {"query_pre_attn_scalar": 20, "sliding_window": 4, "attn_logit_softcapping": 3.0}),
    "gemma 3": ("Gemma3Text", WIDE | {"query_pre_attn_scalar": 20, "sliding_window": 4,
                                      "layer_types": ["sliding_attention", "full_attention"],
                                      "rope_parameters": {"full_attention": LINEAR, "sliding_attention": LOCAL}}),
    "gpt-oss": ("GptOss", WIDE | {"num_local_experts": 2, "num_experts_per_tok": 1, "sliding_window": 4}),
    "olmo": ("Olmo", GROUPED),
    "olmo, clipped": ("Olmo", GROUPED | {"clip_qkv": 0.5}),
    "olmo 2": ("Olmo2", GROUPED),
    "olmoe, clipped": ("Olmoe", GROUPED | {"clip_qkv": 0.8, "num_experts": 2, "num_experts_per_tok": 1}),
    "phi 3": ("Phi3", GROUPED),
    "phi 3 with a window": ("Phi3", GROUPED | {"sliding_window": 4, "rope_parameters": LOCAL | {
        "partial_rotary_factor": 0.5}}),
    "whisper": ("Whisper", WHISPER),
    "roberta": ("Roberta", TINY),
    "mixtral": ("Mixtral", WIDE | {"sliding_window": 4, "num_local_experts": 2}),
    "qwen 3 next": ("Qwen3Next", WIDE | {"layer_types": ["full_attention"] * 2, "num_experts": 2,
                                         "num_experts_per_tok": 1, "linear_num_value_heads": 4}),
    "gemma 3n": ("Gemma3nText", WIDE | BOTH | {"num_kv_shared_layers": 0, "vocab_size_per_layer_input": 16,
                                               "hidden_size_per_layer_input": 8, "laurel_rank": 4}),
    "gemma 4": ("Gemma4Text", WIDE | BOTH | {"global_head_dim": 32, "num_global_key_value_heads": 1,
                                             "attention_k_eq_v": True, "vocab_size_per_layer_input": 16,
                                             "hidden_size_per_layer_input": 8}),
    "llama 4": ("Llama4Text", WIDE | {"no_rope_layers": [1, 1], "attention_chunk_size": 4, "num_local_experts": 2,
                                      "intermediate_size_mlp": 16, "rope_parameters": LLAMA3}),
    "olmo 3": ("Olmo3", GROUPED | BOTH),
    "granite": ("Granite", GROUPED | {"attention_multiplier": 0.3}),
    "granite with sinks": ("GraniteSWA", GROUPED | BOTH | {"attention_multiplier": 0.3,
                                                           "layer_rope_theta": [1e3, 0.0]}),
    "glm 4": ("Glm4", WIDE),
    "cohere 2": ("Cohere2", GROUPED | BOTH),
    "smollm 3": ("SmolLM3", GROUPED | {"no_rope_layers": [1, 0]}),
    "exaone 4": ("Exaone4", GROUPED | BOTH),
}  # fmt: skip
# The attention module of each layer, the part that it ends with, and what models without a causal mask have.
MODULES: dict[str, tuple[str, str]] = {
    "Bert": ("encoder.layer.{}.attention", "output.dense"),
    "Roberta": ("encoder.layer.{}.attention", "output.dense"),
    "GPT2": ("h.{}.attn", ""),
    "GPTBigCode": ("h.{}.attn", ""),
    "GPTNeoX": ("layers.{}.attention", ""),
    "Falcon": ("h.{}.self_attention", ""),
    "ViT": ("layers.{}.attention", ""),
    "Whisper": ("encoder.layers.{}.self_attn", ""),
}


def made(name: str, **more: Any) -> Any:
    """A model with random weights that are not small, in double precision."""
    kind, options = MODELS[name]
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**options | more)
    model = getattr(transformers, f"{kind}Model")(config).eval()
    model.set_attn_implementation("eager")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.3)
    return model


def recorded(model: Any, kind: str, layer: int) -> tuple[np.ndarray, np.ndarray]:
    """The hidden states that enter the attention module of a layer, and what leaves it, for tokens with padding."""
    place, last = MODULES.get(kind, ("layers.{}.self_attn", ""))
    module = model.get_submodule(place.format(layer))
    seen: dict[str, Any] = {}

    def enter(_: Any, given: Any, named: dict[str, Any]) -> None:
        seen["in"] = given[0] if given else named["hidden_states"]

    def leave(_: Any, given: Any, found: Any) -> None:
        seen["out"] = found[0] if isinstance(found, tuple) else found

    module.register_forward_pre_hook(enter, with_kwargs=True)
    (module.get_submodule(last) if last else module).register_forward_hook(leave)
    mask = torch.ones(2, LENGTH, dtype=torch.long)
    mask[1, -PADDING:] = 0
    with torch.no_grad():
        if kind == "ViT":
            model(torch.randn(2, 3, 8, 8))
        elif kind == "Whisper":
            model(torch.randn(2, 8, 2 * LENGTH), decoder_input_ids=torch.ones(2, 1, dtype=torch.long))
        else:
            model(torch.arange(2 * LENGTH).reshape(2, LENGTH) % 13 + 3, attention_mask=mask)
    return seen["in"].numpy(), seen["out"].numpy()


def computed(folder: Path, checkpoint: Path, layer: int | None, fields: dict[str, Any], **how: Any) -> np.ndarray:
    """The output of an imported layer, stored and read again."""
    found = import_layer(checkpoint, layer, **how)
    write_layer(folder, "imported", found.arrays, found.options, found.source)
    engine, stored = Engine(Settings.model_construct()), LayerStore(folder, 2**30).get("imported")
    request = engine.attention.prepare(Decoded(fields, frozenset()), stored)
    output: np.ndarray = engine.attention.compute(request, no_check).arrays["output"]
    return output


def close(found: np.ndarray, expected: np.ndarray) -> None:
    assert np.abs(expected).max() > 0.05
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5 * max(1.0, float(np.abs(expected).max())))


@pytest.mark.parametrize("layer", [0, 1])
@pytest.mark.parametrize("name", MODELS)
def test_an_imported_layer_gives_what_its_module_gives(name: str, layer: int, tmp_path: Path) -> None:
    kind, _ = MODELS[name]
    model = made(name)
    model.save_pretrained(tmp_path / "checkpoint")
    entered, left = recorded(model, kind, layer)
    rows = np.full(2, entered.shape[1])
    fields: dict[str, Any] = {"input": entered}
    if kind not in ("ViT", "Whisper"):
        rows[1] -= PADDING
        fields["key_lengths"] = rows
    output = computed(tmp_path, tmp_path / "checkpoint", layer, fields)
    for entry, length in enumerate(rows):
        close(output[entry, :length], left[entry, :length])


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_a_checkpoint_may_have_several_files_and_a_prefix(name: str, tmp_path: Path) -> None:
    model = made(name)
    kind, _ = MODELS[name]
    head = {"Llama": transformers.LlamaForCausalLM, "GPT2": transformers.GPT2LMHeadModel}[kind]
    whole = head(model.config)
    whole.base_model.load_state_dict(model.state_dict())
    whole.save_pretrained(tmp_path / "checkpoint", max_shard_size="8KB")
    assert len(list((tmp_path / "checkpoint").glob("*.safetensors"))) > 2
    entered, left = recorded(model, kind, 1)
    close(computed(tmp_path, tmp_path / "checkpoint", 1, {"input": entered[:1]}), left[:1])


def test_the_single_file_is_taken_before_an_index(tmp_path: Path) -> None:
    """What transformers takes where a folder has both."""
    model = made("llama")
    whole = transformers.LlamaModel(model.config)
    whole.save_pretrained(tmp_path, max_shard_size="8KB")
    single = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    save_file(single, tmp_path / "model.safetensors", {"format": "pt"})
    taken = transformers.LlamaModel.from_pretrained(tmp_path).state_dict()
    name = "layers.1.self_attn.q_proj.weight"
    assert torch.equal(taken[name], single[name])
    assert not torch.equal(taken[name], whole.state_dict()[name])
    found = import_layer(tmp_path, 1).arrays["projection.query.weight"]
    np.testing.assert_array_equal(found, taken[name].numpy())


def rewritten(checkpoint: Path, **changes: Any) -> None:
    """Change config.json; None removes a key."""
    path = checkpoint / "config.json"
    config = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({name: value for name, value in config.items() if value is not None}))


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("llama", {"rope_parameters": None}),
        ("llama", {"rope_parameters": None, "num_key_value_heads": None, "head_dim": None, "rope_theta": 1e4}),
        ("llama 3", {"rope_parameters": None, "rope_theta": 5e5, "rope_scaling": LLAMA3}),
        ("gemma 2", {"rope_parameters": None, "rope_theta": 1e4, "layer_types": None}),
        ("gemma 3", {"rope_parameters": None, "layer_types": None, "sliding_window_pattern": 2, "rope_theta": 1e6,
                     "rope_local_base_freq": 1e4, "rope_scaling": {"factor": 8.0, "rope_type": "linear"}}),
        ("qwen 2 with windows", {"rope_parameters": None, "layer_types": None, "rope_theta": 1e4}),
    ],
)  # fmt: skip
def test_configurations_of_earlier_versions_are_read(name: str, changes: dict[str, Any], tmp_path: Path) -> None:
    model = made(name, **({"num_key_value_heads": 4} if "num_key_value_heads" in changes else {}))
    for layer in (0, 1):
        model.save_pretrained(tmp_path / "checkpoint")
        rewritten(tmp_path / "checkpoint", **changes)
        entered, left = recorded(model, MODELS[name][0], layer)
        close(computed(tmp_path, tmp_path / "checkpoint", layer, {"input": entered[:1]}), left[:1])


@pytest.mark.parametrize(
    ("name", "changes", "text"),
    [
        ("llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}, "dynamic"),
        ("phi 3", {"rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4}}, "longrope"),
        ("llama", {"rope_parameters": LLAMA3 | {"more": 1}}, "'more'"),
        ("mistral", {"rope_parameters": None}, "rope_theta"),
        ("qwen 3", {"rms_norm_eps": None}, "rms_norm_eps"),
        ("llama", {"sliding_window": 4}, "sliding_window"),
        ("llama", {"num_attention_heads": 3}, "heads"),
        ("bert", {"position_embedding_type": "relative_key"}, "relative_key"),
        ("qwen 2", {"layer_types": ["linear_attention"] * 2}, "linear_attention"),
        ("bert", {"model_type": "mamba"}, "'mamba'"),
        ("bert", {"num_attention_heads": None}, "num_attention_heads"),
        ("gemma 3", {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ("falcon", {"alibi": True}, "alibi"),
        ("falcon", {"num_kv_heads": 2}, "num_kv_heads"),
        ("falcon", {"multi_query": False}, "4 heads, 4 of keys"),
        ("falcon, by groups", {"num_kv_heads": 3}, "4 heads, 3 of keys"),
        ("falcon, head by head", {"num_kv_heads": 1}, "num_kv_heads"),
        ("gpt bigcode", {"num_key_value_heads": 4}, "num_key_value_heads"),
        ("gpt bigcode", {"n_head": 3}, "3 heads, 1 of keys"),
        ("bitnet", {"quantization_config": {"quant_method": "bitnet", "quantization_mode": "online"}}, "quantized"),
        ("gpt-neox", {"rope_theta": 100.0}, "rope_theta"),
        ("gpt-neox", {"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
    ],
)  # fmt: skip
def test_what_cannot_be_expressed_is_refused_by_its_name(
    name: str, changes: dict[str, Any], text: str, tmp_path: Path
) -> None:
    made(name).save_pretrained(tmp_path)
    rewritten(tmp_path, **changes)
    with pytest.raises(BadFile, match=text):
        import_layer(tmp_path, 0)


MULTIHEAD: dict[str, Any] = {"embed_dim": 32, "num_heads": 4, "batch_first": True}


@pytest.fixture
def hidden() -> torch.Tensor:
    torch.manual_seed(1)
    return torch.randn(2, LENGTH, 32)


@pytest.mark.parametrize("more", [{}, {"bias": False}], ids=str)
@pytest.mark.parametrize("causal", [False, True])
def test_a_multihead_attention_of_torch(
    more: dict[str, Any], causal: bool, hidden: torch.Tensor, tmp_path: Path
) -> None:
    module = torch.nn.MultiheadAttention(**MULTIHEAD, **more)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_(0, 0.3)
    save_file(module.state_dict(), tmp_path / "module.safetensors")
    padding = torch.zeros(2, LENGTH, dtype=torch.bool)
    padding[1, -PADDING:] = True
    mask = torch.triu(torch.ones(LENGTH, LENGTH, dtype=torch.bool), 1) if causal else None
    with torch.no_grad():
        expected = module(hidden, hidden, hidden, key_padding_mask=padding, attn_mask=mask)[0].numpy()
    fields = {"input": hidden.numpy(), "key_mask": ~padding.numpy(), "is_causal": causal}
    found = computed(tmp_path, tmp_path / "module.safetensors", None, fields, family="torch", heads=4)
    close(found, expected)


def test_a_multihead_attention_whose_keys_have_other_features(hidden: torch.Tensor, tmp_path: Path) -> None:
    module = torch.nn.MultiheadAttention(**MULTIHEAD, kdim=24, vdim=24)
    save_file(module.state_dict(), tmp_path / "module.safetensors")
    context = torch.randn(2, 5, 24)
    with torch.no_grad():
        expected = module(hidden, context, context)[0].numpy()
    fields = {"input": hidden.numpy(), "context": context.numpy()}
    close(computed(tmp_path, tmp_path / "module.safetensors", None, fields, family="torch", heads=4), expected)


def test_a_layer_of_an_encoder_of_torch(hidden: torch.Tensor, tmp_path: Path) -> None:
    layer = torch.nn.TransformerEncoderLayer(32, 4, 16, batch_first=True)
    encoder = torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()
    with torch.no_grad():
        for parameter in encoder.parameters():
            parameter.normal_(0, 0.3)
        expected = encoder.layers[1].self_attn(hidden, hidden, hidden)[0].numpy()
    save_file(encoder.state_dict(), tmp_path / "encoder.safetensors")
    fields = {"input": hidden.numpy()}
    close(computed(tmp_path, tmp_path / "encoder.safetensors", 1, fields, family="torch", heads=4), expected)
    with pytest.raises(BadFile, match="several modules"):
        import_layer(tmp_path / "encoder.safetensors", None, family="torch", heads=4)
    how: dict[str, Any] = {"family": "torch", "heads": 4, "prefix": "layers.1."}
    close(computed(tmp_path, tmp_path / "encoder.safetensors", None, fields, **how), expected)


def test_biases_of_keys_are_refused(tmp_path: Path) -> None:
    module = torch.nn.MultiheadAttention(**MULTIHEAD, add_bias_kv=True)
    save_file(module.state_dict(), tmp_path / "module.safetensors")
    with pytest.raises(BadFile, match="bias_k"):
        import_layer(tmp_path / "module.safetensors", None, family="torch", heads=4)


def test_halves_stay_halves(tmp_path: Path) -> None:
    made("llama").to(torch.bfloat16).save_pretrained(tmp_path)
    arrays = import_layer(tmp_path, 0).arrays
    assert {array.dtype.name for array in arrays.values()} == {"bfloat16"}
