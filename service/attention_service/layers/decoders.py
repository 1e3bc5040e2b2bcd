"""Decoders since Llama: how their attention modules and configurations become fields of a request.

One function for each form, which takes the tensors of a module and returns its options by dotted names, as
`Family.fields` does. What they share stands at the end.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from attention_service.errors import quote
from attention_service.layers.module import Module
from attention_service.layers.tensors import BadFile

Options = dict[str, Any]

FULL: Final = "full_attention"
SLIDING: Final = "sliding_attention"


def llama(module: Module) -> Options:
    """Llama, and models with the same module: all layers see all keys before them."""
    module.refuse("sliding_window")
    options = _decoder(module)
    module.check_all_taken()
    return options


def mistral(module: Module) -> Options:
    """Mistral, Mixtral and StarCoder 2: one window for all layers, if there is one."""
    return _decoder(module) | _window(module, sliding=module.get("sliding_window") is not None)


def qwen(module: Module) -> Options:
    """Qwen 2, with biases, and Qwen 3, with norms."""
    options = _decoder(module)
    if module.has("q_norm.weight"):
        options |= _norms(module)
    sliding = _layer_type(module, _old_qwen_type) == SLIDING
    return options | _window(module, sliding=sliding)


def gemma(module: Module) -> Options:
    """Gemma 2, with a softcap, and Gemma 3, with norms whose weights are stored less 1, and two rotary bases."""
    kind = _layer_type(module, _old_gemma_type)
    options = _decoder(module, kind) | {"scale": module.number("query_pre_attn_scalar") ** -0.5}
    if module.has("q_norm.weight"):
        options |= _norms(module, plus=1.0)
    if module.get("attn_logit_softcapping") is not None:
        options["softcap"] = module.number("attn_logit_softcapping")
    if module.get("use_bidirectional_attention"):
        raise BadFile("config.json: use_bidirectional_attention cannot be imported")
    return options | _window(module, sliding=kind == SLIDING)


def gpt_oss(module: Module) -> Options:
    """gpt-oss: sinks, and windows in some layers."""
    kind = _layer_type(module, None)
    options = _decoder(module, kind)
    module.arrays["sinks"] = module.tensor("sinks")
    return options | _window(module, sliding=kind == SLIDING)


def olmo2(module: Module) -> Options:
    """OLMo 2 and 3, and their mixtures of experts: norms over all heads, in OLMo 3 also windows."""
    module.refuse("clip_qkv")
    kind = _layer_type(module, lambda _: FULL)
    options = _decoder(module, kind) | _norms(module) | _window(module, sliding=kind == SLIDING)
    return options | {"query_norm.over": "all", "key_norm.over": "all"}


def interleaved(module: Module) -> Options:
    """GLM 4, Ernie 4.5 and Helium: adjacent features turn."""
    options = _decoder(module, interleaved=True)
    module.check_all_taken()
    return options


def granite(module: Module) -> Options:
    """Granite, whose scale is a number of its own; with sinks also windows, and a rotary base for each layer."""
    options = {"scale": module.number("attention_multiplier")}
    kind, base = FULL, _of_layer(module, "layer_rope_theta")
    if module.has("sinks"):
        kind = _layer_type(module, None)
        module.arrays["sinks"] = module.tensor("sinks")
    options |= _decoder(module, turned=base is None)
    if base:  # 0 for a layer without an embedding
        size = module.shape("q_proj.weight")[0] // module.count("num_attention_heads")
        options |= module.rotary({**_rope(module, None), "rope_theta": base}, size)
    return options | _window(module, sliding=kind == SLIDING)


def cohere2(module: Module) -> Options:
    """Layers with a window turn adjacent features, the others none."""
    kind = _layer_type(
        module, lambda _: FULL if (module.layer + 1) % module.count("sliding_window_pattern") == 0 else SLIDING
    )
    options = _decoder(module, turned=kind == SLIDING, interleaved=True)
    return options | _window(module, sliding=kind == SLIDING)


def smollm3(module: Module) -> Options:
    """Every fourth layer has no rotary embedding."""
    options = _decoder(module, turned=_turned(module))
    return options | _window(module, sliding=_layer_type(module, lambda _: FULL) == SLIDING)


def llama4(module: Module) -> Options:
    """Chunks in layers with a rotary embedding, whose norms come after it; the others see all keys."""
    turned = _turned(module)
    if not turned and module.get("attn_temperature_tuning"):
        raise BadFile(
            "attn_temperature_tuning: the layer multiplies queries by a number of their position, which only a request "
            "can say: docs/models.md"
        )
    options = _decoder(module, turned=turned, interleaved=True)
    if turned and module.get("use_qk_norm"):
        for field in ("query_norm", "key_norm"):
            options |= {f"{field}.eps": module.number("rms_norm_eps"), f"{field}.position": "after"}
    module.check_all_taken()
    kind = _of_layer(module, "layer_types")
    chunked = turned if kind is None else kind == "chunked_attention"
    return options | ({"chunk_size": module.count("attention_chunk_size")} if chunked else {})


def qwen3_next(module: Module) -> Options:
    """The layers of Qwen 3 Next and 3.5 that have attention. The rows of each head are its queries, then its gates."""
    interval = module.get("full_attention_interval")
    kind = _layer_type(
        module, lambda _: FULL if interval and (module.layer + 1) % interval == 0 else "linear_attention"
    )
    if kind != FULL:
        raise BadFile(f"config.json: layer type {quote(kind)} cannot be expressed")
    heads, groups = _heads(module)
    rows = _rows(module)
    size = rows[1] // groups
    if rows != [2 * heads * size, groups * size]:
        raise _misfit(rows, heads, groups)
    for role, part in (("query", 0), ("gate", 1)):
        for name in ("weight", "bias") if module.has("q_proj.bias") else ("weight",):
            packed = module.tensor(f"q_proj.{name}")
            taken = packed.reshape(heads, 2, size, *packed.shape[1:])[:, part]
            module.arrays[f"projection.{role}.{name}"] = taken.reshape(heads * size, *packed.shape[1:])
    for role, name in (("key", "k_proj"), ("value", "v_proj"), ("output", "o_proj")):
        module.linear(role, name)
    options = {"num_heads": heads, "num_kv_heads": groups, "is_causal": True} | _norms(module, plus=1.0)
    module.check_all_taken()
    return options | module.rotary(_rope(module, None), size)


def gemma3n(module: Module) -> Options:
    """Gemma 3n and 4: a norm of values without a weight, no scale; heads of Gemma 4 are larger in some layers."""
    shared, layers = module.get("num_kv_shared_layers"), module.count("num_hidden_layers")
    if shared and module.layer >= layers - shared:
        raise BadFile("num_kv_shared_layers: the layer has the keys and values of another, see docs/models.md")
    if module.get("use_bidirectional_attention") == "all":
        raise BadFile("config.json: use_bidirectional_attention cannot be imported")
    kind, heads = _layer_type(module, None), module.count("num_attention_heads")
    rows = _rows(module)
    size = max(rows[0] // heads, 1)
    groups = rows[1] // size
    if rows != [heads * size, groups * size]:
        raise _misfit(rows, heads)
    value = "v_proj" if module.has("v_proj.weight") else "k_proj"  # attention_k_eq_v
    separate(module, "q_proj", "k_proj", value, "o_proj")
    options = {"num_heads": heads, "num_kv_heads": groups, "is_causal": True, "scale": 1.0} | _norms(module)
    options |= {"value_norm.eps": module.number("rms_norm_eps")} | module.rotary(_rope(module, kind), size)
    return options | _window(module, sliding=kind == SLIDING)


def exaone4(module: Module) -> Options:
    """Norms, and where layers have windows, no rotary embedding in those without."""
    kind, windows = _layer_type(module, None), module.get("sliding_window") is not None
    options = _decoder(module, turned=kind == SLIDING or not windows) | _norms(module)
    return options | _window(module, sliding=kind == SLIDING)


def phi3(module: Module) -> Options:
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
    options = {"num_heads": heads, "num_kv_heads": groups, "is_causal": True} | module.rotary(_rope(module, None), size)
    return options | _window(module, sliding=module.get("sliding_window") is not None)


def _old_qwen_type(module: Module) -> str:
    windowed = module.get("use_sliding_window") and module.layer >= module.count("max_window_layers")
    return SLIDING if windowed else FULL


def _old_gemma_type(module: Module) -> str:
    """Every second layer slides in Gemma 2, in Gemma 3 all but every sixth."""
    pattern = 2 if module.get("model_type") == "gemma2" else module.count("sliding_window_pattern")
    return SLIDING if (module.layer + 1) % pattern else FULL


def _norms(module: Module, plus: float = 0.0) -> Options:
    return module.norm("query_norm", "q_norm", plus=plus) | module.norm("key_norm", "k_norm", plus=plus)


def _turned(module: Module) -> bool:
    """True if a layer has a rotary embedding, in models that say so by layer."""
    listed = _of_layer(module, "no_rope_layers")  # 1 for a layer that has one
    return bool((module.layer + 1) % module.count("no_rope_layer_interval") if listed is None else listed)


def _of_layer(module: Module, key: str) -> Any:
    """The value for a layer in a list of the configuration with one for each; None for no list or an empty one.

    Errors: BadFile.
    """
    listed = module.get(key)
    if not listed:
        return None
    if not isinstance(listed, list) or len(listed) <= module.layer:
        raise BadFile(f"config.json: expected {key} with a value for layer {module.layer}")
    return listed[module.layer]


def _heads(module: Module) -> tuple[int, int]:
    heads = module.count("num_attention_heads")
    return heads, module.count("num_key_value_heads") if module.get("num_key_value_heads") is not None else heads


def _rows(module: Module) -> list[int]:
    """The rows of the maps of queries and keys."""
    return [module.shape(f"{name}.weight")[0] for name in ("q_proj", "k_proj")]


def _misfit(rows: list[int], *heads: int) -> BadFile:
    """The error for heads that do not divide the rows of the maps of queries and keys."""
    counts = " and ".join(map(str, heads))
    return BadFile(f"{counts} heads, as config.json says, do not fit maps of {rows[0]} and {rows[1]} rows")


def _decoder(module: Module, kind: str | None = None, *, turned: bool = True, interleaved: bool = False) -> Options:
    """What decoders since Llama have in common: separate maps, grouped heads, a rotary embedding, a causal mask.

    kind: of the layer, where the embedding depends on it; turned: False for a layer without it
    interleaved: as of `rotary`
    """
    separate(module, "q_proj", "k_proj", "v_proj", "o_proj")
    heads, groups = _heads(module)
    rows = _rows(module)
    size = rows[0] // heads
    if rows != [heads * size, groups * size] or module.get("head_dim") not in (None, size):
        raise _misfit(rows, heads, groups)
    options = {"num_heads": heads, "num_kv_heads": groups, "is_causal": True}
    if not turned:
        return options
    return options | module.rotary(_rope(module, kind), size) | ({"rotary.interleaved": True} if interleaved else {})


def _rope(module: Module, kind: str | None) -> Mapping[str, Any]:
    """The configuration of the rotary embedding, as transformers 5 writes it, or as earlier versions did."""
    return {"partial_rotary_factor": module.get("partial_rotary_factor"), **_rope_parameters(module, kind)}


def _rope_parameters(module: Module, kind: str | None) -> Mapping[str, Any]:
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
    found = _of_layer(module, "layer_types")
    if found is None and old is not None:
        return old(module)
    if found is None:
        raise BadFile("config.json: expected layer_types")
    if found not in (FULL, SLIDING):
        raise BadFile(f"config.json: layer type {quote(str(found))} cannot be expressed")
    return str(found)


def _window(module: Module, *, sliding: bool) -> Options:
    """The window of a layer: so many keys, the query's own included."""
    module.check_all_taken()
    return {"window.left": module.count("sliding_window") - 1} if sliding else {}


def separate(module: Module, *names: str) -> None:
    """Take the maps of query, key, value and output. names: of their linear layers, in this order"""
    for role, name in zip(("query", "key", "value", "output"), names, strict=True):
        module.linear(role, name)
