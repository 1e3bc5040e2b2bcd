"""The families of models whose attention layers can be imported, one row each.

A row says where the tensors of the module are, and how they and the configuration become fields of a request. What a
request cannot express is refused: every tensor of the module must be taken, and every option that changes attention
must be known.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, NamedTuple

from attention_service.layers import decoders
from attention_service.layers.decoders import Options, separate
from attention_service.layers.module import Module
from attention_service.layers.tensors import BadFile

AFTER_NORM: Final = "hidden states after the norm in front of the module"
AS_THEY_ARE: Final = "hidden states as they are: the norm comes after the residual sum"


class Family(NamedTuple):
    """A family of models.

    title: its name in words; model_types: `model_type` in config.json
    fields: takes the tensors of a module, and returns its options by dotted names. Errors: BadFile
    module: where its attention modules are; first: a tensor that each of them has
    enters: what goes into the module
    """

    title: str
    model_types: tuple[str, ...]
    fields: Callable[[Module], Options]
    module: str = "layers.{layer}.self_attn"
    first: str = "q_proj.weight"
    enters: str = AFTER_NORM


def _bert(module: Module) -> Options:
    module.refuse("is_causal", bool(module.get("is_decoder")))
    separate(module, "self.query", "self.key", "self.value", "output.dense")
    module.check_all_taken("output.LayerNorm.")
    causal = {"is_causal": True} if module.get("is_decoder") else {}
    return {"num_heads": module.count("num_attention_heads"), **causal}


def _vit(module: Module) -> Options:
    module.refuse("is_causal", False)
    separate(module, "attention.query", "attention.key", "attention.value", "output.dense")
    module.check_all_taken()
    return {"num_heads": module.count("num_attention_heads")}


def _gpt2(module: Module) -> Options:
    """Conv1D has its matrix as (in, out), query, key and value beside each other."""
    heads, (inner, packed) = module.count("n_head", "num_attention_heads"), module.matrix("c_attn.weight")
    if packed % 3 or inner * 3 != packed:
        raise BadFile(f"c_attn.weight: expected (n, 3 n), got ({inner}, {packed})")
    kernel, bias = module.tensor("c_attn.weight"), module.tensor("c_attn.bias")
    for i, role in enumerate(("query", "key", "value")):
        part = slice(i * inner, (i + 1) * inner)
        module.arrays[f"projection.{role}.kernel"] = kernel[:, part]
        module.arrays[f"projection.{role}.bias"] = bias[part]
    module.arrays["projection.output.kernel"] = module.tensor("c_proj.weight")
    module.arrays["projection.output.bias"] = module.tensor("c_proj.bias")
    module.check_all_taken()
    scale = (inner // heads) ** -0.5 if module.get("scale_attn_weights") is not False else 1.0
    if module.get("scale_attn_by_inverse_layer_idx"):
        scale /= module.layer + 1
    return {"num_heads": heads, "scale": scale, "is_causal": True}


def _whisper(module: Module) -> Options:
    module.refuse("is_causal", False)
    separate(module, "q_proj", "k_proj", "v_proj", "out_proj")
    module.check_all_taken()
    return {"num_heads": module.count("encoder_attention_heads")}


def _torch(module: Module) -> Options:
    """torch.nn.MultiheadAttention: packed unless key or value have other features than the query."""
    if module.heads is None:
        raise BadFile("how many heads? The tensors do not say it; say --heads N")
    for name in ("bias_k", "bias_v"):
        if module.has(name):
            raise BadFile(f"{name}, by add_bias_kv, cannot be expressed")
    if module.has("in_proj_weight"):
        size = module.matrix("in_proj_weight")[0] // 3
        parts = [("in_proj_weight", slice(i * size, (i + 1) * size)) for i in range(3)]
    else:
        size = module.matrix("q_proj_weight")[0]
        parts = [(f"{letter}_proj_weight", slice(0, size)) for letter in "qkv"]
    for i, (role, (name, rows)) in enumerate(zip(("query", "key", "value"), parts, strict=True)):
        module.arrays[f"projection.{role}.weight"] = module.tensor(name, rows)
        if module.has("in_proj_bias"):
            bias = module.tensor("in_proj_bias", slice(i * size, (i + 1) * size))
            module.arrays[f"projection.{role}.bias"] = bias
    module.linear("output", "out_proj")
    module.check_all_taken()
    return {"num_heads": module.heads}


FAMILIES: Final[dict[str, Family]] = {
    "bert": Family(
        "BERT",
        (
            *("bert", "roberta", "xlm-roberta", "camembert", "electra", "ernie", "data2vec-text", "layoutlm"),
            "bert-generation",
        ),
        _bert,
        module="encoder.layer.{layer}.attention",
        first="self.query.weight",
        enters=AS_THEY_ARE,
    ),
    "gpt2": Family("GPT-2", ("gpt2",), _gpt2, module="h.{layer}.attn", first="c_attn.weight"),
    "gpt_bigcode": Family(
        "GPT BigCode", ("gpt_bigcode",), decoders.gpt_bigcode, module="h.{layer}.attn", first="c_attn.weight"
    ),
    "gpt_neox": Family(
        "GPT-NeoX",
        ("gpt_neox",),
        decoders.gpt_neox,
        module="layers.{layer}.attention",
        first="query_key_value.weight",
    ),
    "falcon": Family(
        "Falcon",
        ("falcon",),
        decoders.falcon,
        module="h.{layer}.self_attention",
        first="query_key_value.weight",
    ),
    "vit": Family("ViT", ("vit",), _vit, module="encoder.layer.{layer}.attention", first="attention.query.weight"),
    "llama": Family("Llama", ("llama", "arcee", "aria_text", "seed_oss"), decoders.llama),
    "bitnet": Family("BitNet", ("bitnet",), decoders.bitnet),
    "mistral": Family("Mistral", ("mistral", "mixtral", "starcoder2"), decoders.llama),
    "qwen": Family("Qwen 2", ("qwen2", "qwen2_moe", "ministral"), decoders.llama),
    "qwen3": Family("Qwen 3", ("qwen3", "qwen3_moe", "dots1"), decoders.qwen3),
    "qwen3_next": Family("Qwen 3 Next", ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"), decoders.qwen3_next),
    "gemma2": Family("Gemma 2", ("gemma2", "vaultgemma"), decoders.gemma2),
    "gemma3": Family("Gemma 3", ("gemma3", "gemma3_text"), decoders.gemma3),
    "gemma3n": Family("Gemma 3n", ("gemma3n_text",), decoders.gemma3n),
    "gemma4": Family("Gemma 4", ("gemma4_text",), decoders.gemma4),
    "llama4": Family("Llama 4", ("llama4_text",), decoders.llama4),
    "gpt_oss": Family("gpt-oss", ("gpt_oss",), decoders.gpt_oss),
    "olmo": Family("OLMo", ("olmo",), decoders.olmo),
    "olmo2": Family("OLMo 2 or 3", ("olmo2", "olmo3", "flex_olmo"), decoders.olmo2, enters=AS_THEY_ARE),
    "olmoe": Family("OLMoE", ("olmoe",), decoders.olmoe),
    "granite": Family("Granite", ("granite", "granitemoe", "granitemoeshared"), decoders.granite),
    "granite_swa": Family("Granite with windows", ("granite_swa", "granitemoe_swa"), decoders.granite_swa),
    "glm4": Family(
        "GLM 4, Ernie 4.5 or Helium", ("glm", "glm4", "ernie4_5", "ernie4_5_moe", "helium"), decoders.interleaved
    ),
    "cohere2": Family("Cohere 2", ("cohere2",), decoders.cohere2),
    "smollm3": Family("SmolLM 3", ("smollm3",), decoders.smollm3),
    "exaone4": Family("EXAONE 4", ("exaone4",), decoders.exaone4, enters=AS_THEY_ARE),
    "exaone_moe": Family("EXAONE MoE", ("exaone_moe",), decoders.exaone4),
    "phi3": Family("Phi-3", ("phi3",), decoders.phi3, first="qkv_proj.weight"),
    "whisper": Family("Whisper (encoder)", ("whisper",), _whisper, module="encoder.layers.{layer}.self_attn"),
    "torch": Family(
        "torch.nn.MultiheadAttention",
        (),
        _torch,
        module="",
        first="out_proj.weight",
        enters="what the module is called with, batch first",
    ),
}
