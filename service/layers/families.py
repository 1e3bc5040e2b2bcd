"""The families of models whose attention layers can be imported, one row each.

A row says where the tensors of the module are, and how they and the configuration become fields of a request. What a
request cannot express is refused: every tensor of the module must be taken, and every option that changes attention
must be known.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple

from service.errors import quote
from service.layers.module import Module
from service.layers.tensors import BadFile

Options = dict[str, Any]

FULL: Final = "full_attention"
SLIDING: Final = "sliding_attention"


class Family(NamedTuple):
    """A family of models.

    title: its name in words; model_types: `model_type` in config.json
    module: where its attention modules are; first: a tensor that each of them has
    fields: takes the tensors of a module, and returns its options by dotted names. Errors: BadFile
    enters: what goes into the module
    defaults: what configurations of the family leave out
    """

    title: str
    model_types: tuple[str, ...]
    module: str
    first: str
    fields: Callable[[Module], Options]
    enters: str
    defaults: Mapping[str, Any] = {}


def _separate(module: Module, *names: str) -> None:
    for role, name in zip(("query", "key", "value", "output"), names, strict=True):
        module.linear(role, name)


def _bert(module: Module) -> Options:
    module.refuse("position_embedding_type", "absolute")
    _separate(module, "self.query", "self.key", "self.value", "output.dense")
    module.check_all_taken("output.LayerNorm.")
    causal = {"is_causal": True} if module.get("is_decoder") else {}
    return {"num_heads": module.count("num_attention_heads"), **causal}


def _vit(module: Module) -> Options:
    _separate(module, "attention.query", "attention.key", "attention.value", "output.dense")
    module.check_all_taken()
    return {"num_heads": module.count("num_attention_heads")}


def _gpt2(module: Module) -> Options:
    """Conv1D has its matrix as (in, out), query, key and value beside each other."""
    heads, (inner, packed) = module.count("n_head", "num_attention_heads"), module.shape("c_attn.weight")
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
    _separate(module, "q_proj", "k_proj", "v_proj", "out_proj")
    module.check_all_taken()
    return {"num_heads": module.count("encoder_attention_heads")}


def _llama(module: Module) -> Options:
    module.refuse("sliding_window")
    options = _decoder(module)
    module.check_all_taken()
    return options


def _mistral(module: Module) -> Options:
    return _decoder(module) | _window(module, sliding=module.get("sliding_window") is not None)


def _qwen(module: Module) -> Options:
    """Qwen 2, with biases, and Qwen 3, with norms."""
    options = _decoder(module)
    if module.has("q_norm.weight"):
        options |= module.norm("query_norm", "q_norm") | module.norm("key_norm", "k_norm")
    sliding = _layer_type(module, _old_qwen_type) == SLIDING
    return options | _window(module, sliding=sliding)


def _old_qwen_type(module: Module) -> str:
    windowed = module.get("use_sliding_window") and module.layer >= module.count("max_window_layers")
    return SLIDING if windowed else FULL


def _gemma(module: Module) -> Options:
    """Gemma 2, with a softcap, and Gemma 3, with norms whose weights are stored less 1, and two rotary bases."""
    kind = _layer_type(module, _old_gemma_type)
    options = _decoder(module, kind) | {"scale": module.number("query_pre_attn_scalar") ** -0.5}
    if module.has("q_norm.weight"):
        options |= module.norm("query_norm", "q_norm", plus=1.0) | module.norm("key_norm", "k_norm", plus=1.0)
    if module.get("attn_logit_softcapping") is not None:
        options["softcap"] = module.number("attn_logit_softcapping")
    if module.get("use_bidirectional_attention"):
        raise BadFile("config.json: use_bidirectional_attention cannot be imported")
    return options | _window(module, sliding=kind == SLIDING)


def _old_gemma_type(module: Module) -> str:
    """Every second layer slides in Gemma 2, in Gemma 3 all but every sixth."""
    pattern = 2 if module.get("model_type") == "gemma2" else module.count("sliding_window_pattern")
    return SLIDING if (module.layer + 1) % pattern else FULL


def _gpt_oss(module: Module) -> Options:
    kind = _layer_type(module, None)
    options = _decoder(module, kind)
    module.arrays["sinks"] = module.tensor("sinks")
    return options | _window(module, sliding=kind == SLIDING)


def _olmo2(module: Module) -> Options:
    module.refuse("clip_qkv")
    options = _decoder(module) | module.norm("query_norm", "q_norm") | module.norm("key_norm", "k_norm")
    module.check_all_taken()
    return options | {"query_norm.over": "all", "key_norm.over": "all"}


def _phi3(module: Module) -> Options:
    """Query, key and value are packed below each other."""
    heads, groups = _heads(module)
    size = module.get("head_dim") or module.count("hidden_size") // heads
    ends = (heads * size, (heads + groups) * size, (heads + 2 * groups) * size)
    packed = module.shape("qkv_proj.weight")[0]
    if packed != ends[-1]:
        raise BadFile(f"qkv_proj.weight: expected {ends[-1]} rows, as config.json says, got {packed}")
    for role, first, last in zip(("query", "key", "value"), (0, *ends), ends, strict=False):
        module.linear(role, "qkv_proj", slice(first, last))
    module.linear("output", "o_proj")
    rope = dict(_rope(module, None))
    rope.setdefault("partial_rotary_factor", module.get("partial_rotary_factor"))
    options = {"num_heads": heads, "num_kv_heads": groups, "is_causal": True} | module.rotary(rope, size)
    return options | _window(module, sliding=module.get("sliding_window") is not None)


def _torch(module: Module) -> Options:
    """torch.nn.MultiheadAttention: packed unless key or value have other features than the query."""
    if module.heads is None:
        raise BadFile("how many heads? The tensors do not say it; say --heads N")
    for name in ("bias_k", "bias_v"):
        if module.has(name):
            raise BadFile(f"{name}, by add_bias_kv, cannot be expressed")
    if module.has("in_proj_weight"):
        size = module.shape("in_proj_weight")[0] // 3
        parts = [("in_proj_weight", slice(i * size, (i + 1) * size)) for i in range(3)]
    else:
        size = module.shape("q_proj_weight")[0]
        parts = [(f"{letter}_proj_weight", slice(0, size)) for letter in "qkv"]
    for i, (role, (name, rows)) in enumerate(zip(("query", "key", "value"), parts, strict=True)):
        module.arrays[f"projection.{role}.weight"] = module.tensor(name, rows)
        if module.has("in_proj_bias"):
            bias = module.tensor("in_proj_bias", slice(i * size, (i + 1) * size))
            module.arrays[f"projection.{role}.bias"] = bias
    module.linear("output", "out_proj")
    module.check_all_taken()
    return {"num_heads": module.heads}


def _heads(module: Module) -> tuple[int, int]:
    heads = module.count("num_attention_heads")
    return heads, module.count("num_key_value_heads") if module.get("num_key_value_heads") is not None else heads


def _decoder(module: Module, kind: str | None = None) -> Options:
    """What decoders since Llama have in common: separate maps, grouped heads, a rotary embedding, a causal mask.

    kind: of the layer, where the embedding depends on it
    """
    _separate(module, "q_proj", "k_proj", "v_proj", "o_proj")
    heads, groups = _heads(module)
    rows = [module.shape(f"{name}.weight")[0] for name in ("q_proj", "k_proj")]
    size = rows[0] // heads
    if rows != [heads * size, groups * size] or module.get("head_dim") not in (None, size):
        raise BadFile(
            f"{heads} and {groups} heads, as config.json says, do not fit maps of {rows[0]} and {rows[1]} rows"
        )
    options = {"num_heads": heads, "num_kv_heads": groups, "is_causal": True}
    return options | module.rotary(_rope(module, kind), size)


def _rope(module: Module, kind: str | None) -> Mapping[str, Any]:
    """The configuration of the rotary embedding, as transformers 5 writes it, or as earlier versions did."""
    rope = module.get("rope_parameters")
    if isinstance(rope, dict):
        if kind is not None and isinstance(rope.get(kind), dict):
            rope = rope[kind]
        elif kind is not None and module.get("rope_local_base_freq") is not None:
            raise BadFile(f"config.json: expected rope_parameters with {kind}")
        return rope if rope.get("rope_theta") is not None else {**rope, "rope_theta": module.get("rope_theta")}
    if kind == SLIDING and module.get("rope_local_base_freq") is not None:
        return {"rope_theta": module.get("rope_local_base_freq")}
    # The configurations of the first two Llamas do not say it.
    theta = module.get("rope_theta") or (10000.0 if module.get("model_type") == "llama" else None)
    return {**(module.get("rope_scaling") or {}), "rope_theta": theta}


def _layer_type(module: Module, old: Callable[[Module], str] | None) -> str:
    """The type of a layer. old: for configurations without layer_types"""
    types = module.get("layer_types")
    if types is None and old is not None:
        return old(module)
    if not isinstance(types, list) or len(types) <= module.layer:
        raise BadFile(f"config.json: expected layer_types with a type for layer {module.layer}")
    if types[module.layer] not in (FULL, SLIDING):
        raise BadFile(f"config.json: layer type {quote(str(types[module.layer]))} cannot be expressed")
    return str(types[module.layer])


def _window(module: Module, *, sliding: bool) -> Options:
    """The window of a layer: so many keys, the query's own included."""
    module.check_all_taken()
    return {"window.left": module.count("sliding_window") - 1} if sliding else {}


AFTER_NORM: Final = "hidden states after the norm in front of the module"
AS_THEY_ARE: Final = "hidden states as they are: the norm comes after the residual sum"
# As in Gemma3TextConfig of transformers: the published configurations have only what differs.
GEMMA3: Final = {
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "query_pre_attn_scalar": 256,
    "rms_norm_eps": 1e-6,
    "sliding_window": 4096,
    "sliding_window_pattern": 6,
    "rope_theta": 1e6,
    "rope_local_base_freq": 1e4,
    "max_position_embeddings": 131072,
}
FAMILIES: Final[dict[str, Family]] = {
    "bert": Family("BERT", ("bert",), "encoder.layer.{layer}.attention", "self.query.weight", _bert, AS_THEY_ARE),
    "gpt2": Family("GPT-2", ("gpt2",), "h.{layer}.attn", "c_attn.weight", _gpt2, AFTER_NORM),
    "vit": Family("ViT", ("vit",), "encoder.layer.{layer}.attention", "attention.query.weight", _vit, AFTER_NORM),
    "llama": Family("Llama", ("llama",), "layers.{layer}.self_attn", "q_proj.weight", _llama, AFTER_NORM),
    "mistral": Family("Mistral", ("mistral",), "layers.{layer}.self_attn", "q_proj.weight", _mistral, AFTER_NORM),
    "qwen": Family("Qwen 2 or 3", ("qwen2", "qwen3"), "layers.{layer}.self_attn", "q_proj.weight", _qwen, AFTER_NORM),
    "gemma2": Family("Gemma 2", ("gemma2",), "layers.{layer}.self_attn", "q_proj.weight", _gemma, AFTER_NORM),
    "gemma3": Family(
        "Gemma 3", ("gemma3", "gemma3_text"), "layers.{layer}.self_attn", "q_proj.weight", _gemma, AFTER_NORM, GEMMA3
    ),
    "gpt_oss": Family("gpt-oss", ("gpt_oss",), "layers.{layer}.self_attn", "q_proj.weight", _gpt_oss, AFTER_NORM),
    "olmo2": Family("OLMo 2", ("olmo2",), "layers.{layer}.self_attn", "q_proj.weight", _olmo2, AS_THEY_ARE),
    "phi3": Family("Phi-3", ("phi3",), "layers.{layer}.self_attn", "qkv_proj.weight", _phi3, AFTER_NORM),
    "whisper": Family(
        "Whisper (encoder)", ("whisper",), "encoder.layers.{layer}.self_attn", "q_proj.weight", _whisper, AFTER_NORM
    ),
    "torch": Family(
        "torch.nn.MultiheadAttention", (), "", "out_proj.weight", _torch, "what the module is called with, batch first"
    ),
}
