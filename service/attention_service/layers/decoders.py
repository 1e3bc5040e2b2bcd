"""Decoders since GPT-NeoX: how their attention modules and configurations become fields of a request.

One function for each form, which takes the tensors of a module and returns its options by dotted names, as
`Family.fields` does. What they share stands at the end.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from attention_service.errors import quote
from attention_service.layers.models import FULL, SLIDING, is_turned, of_layer
from attention_service.layers.module import Module
from attention_service.layers.tensors import BadFile

Options = dict[str, Any]


def llama(module: Module) -> Options:
    """Llama, and models with the same module: Mistral and Qwen 2 with windows."""
    return _decoder(module, _rope(module))


def bitnet(module: Module) -> Options:
    """BitNet: as Llama, with a norm of the head outputs, all heads together."""
    norm = module.norm("output_norm", "attn_sub_norm") | {"output_norm.over": "all"}
    return llama(module) | norm


def qwen3(module: Module) -> Options:
    """Qwen 3: as Qwen 2, with norms."""
    return _decoder(module, _rope(module), _norms(module))


def gemma2(module: Module) -> Options:
    """Gemma 2: a scale of its own, and a softcap."""
    own = {"scale": module.positive("query_pre_attn_scalar") ** -0.5}
    if module.get("attn_logit_softcapping") is not None:
        own["softcap"] = module.positive("attn_logit_softcapping")
    return _decoder(module, _rope(module), own)


def gemma3(module: Module) -> Options:
    """Gemma 3: a scale of its own, norms whose weights are stored less 1, and two rotary embeddings."""
    rope = _typed_rope(module, _layer_type(module))
    own = _norms(module, plus=1.0) | {"scale": module.positive("query_pre_attn_scalar") ** -0.5}
    return _decoder(module, rope, own)


def gpt_oss(module: Module) -> Options:
    """gpt-oss: sinks, and windows in some layers."""
    if not (module.mapping("rope_scaling") or module.mapping("rope_parameters")):
        raise BadFile("config.json: expected rope_parameters or rope_scaling: transformers scales gpt-oss without them")
    module.arrays["sinks"] = module.tensor("sinks")
    return _decoder(module, _rope(module))


def olmo(module: Module) -> Options:
    """OLMo: queries, keys and values may be clipped."""
    return _decoder(module, _rope(module), _clip(module))


def olmoe(module: Module) -> Options:
    """OLMoE: as OLMo 2, and clipped after the norms."""
    return olmo2(module) | _clip(module)


def olmo2(module: Module) -> Options:
    """OLMo 2 and 3, and FlexOlmo: norms over all heads, in OLMo 3 also windows."""
    is_typed = module.get("model_type") == "olmo3"
    rope = _typed_rope(module, _layer_type(module)) if is_typed else _rope(module)
    return _decoder(module, rope, _norms(module) | {"query_norm.over": "all", "key_norm.over": "all"})


def interleaved(module: Module) -> Options:
    """GLM 4, Ernie 4.5 and Helium: adjacent features turn."""
    return _decoder(module, _rope(module), interleaved=True)


def granite(module: Module) -> Options:
    """Granite, whose scale is a number of its own."""
    return _decoder(module, _rope(module), {"scale": module.number("attention_multiplier")})


def granite_swa(module: Module) -> Options:
    """Granite with sinks, windows, and a rotary base for each layer."""
    module.arrays["sinks"] = module.tensor("sinks")
    rope, base = _rope(module), of_layer(module.options, "layer_rope_theta", module.layer)
    if base is not None:
        rope = {**rope, "rope_theta": base}
    own = {"scale": module.number("attention_multiplier")}
    return _decoder(module, rope if base != 0 else None, own)  # 0 for a layer without an embedding


def cohere2(module: Module) -> Options:
    """Layers with a window turn adjacent features, the others none."""
    return _decoder(module, _rope(module) if _layer_type(module) == SLIDING else None, interleaved=True)


def smollm3(module: Module) -> Options:
    """Every fourth layer has no rotary embedding."""
    return _decoder(module, _rope(module) if is_turned(module.layer, module.options) else None)


def llama4(module: Module) -> Options:
    """Chunks in layers with a rotary embedding, whose norms come after it; the others see all keys."""
    turned = is_turned(module.layer, module.options)
    if not turned and module.get("attn_temperature_tuning"):
        raise BadFile(
            "attn_temperature_tuning: the layer multiplies queries by a number of their position, which only a request "
            "can say: docs/models.md"
        )
    options = _grouped_heads(module, _rope(module) if turned else None, interleaved=True)
    if turned and module.get("use_qk_norm"):
        for field in ("query_norm", "key_norm"):
            options |= {f"{field}.eps": module.number("rms_norm_eps"), f"{field}.position": "after"}
    module.check_all_taken()
    kind = of_layer(module.options, "layer_types", module.layer)
    if kind not in (None, FULL, "chunked_attention"):
        raise _unknown_type(kind)
    chunked = turned if kind is None else kind != FULL
    return options | ({"chunk_size": module.count("attention_chunk_size")} if chunked else {})


def qwen3_next(module: Module) -> Options:
    """The layers of Qwen 3 Next and 3.5 that have attention. The rows of each head are its queries, then its gates."""
    module.refuse("attn_output_gate", True)
    kind = _layer_type(module)
    if kind != FULL:
        raise _unknown_type(kind)
    heads, groups = _heads(module)
    rows = _rows(module)
    size = rows[1] // groups
    if rows != [2 * heads * size, groups * size]:
        raise _misfit(rows, heads, groups)
    for name in ("weight", "bias") if module.has_bias("query", "q_proj") else ("weight",):
        packed = module.tensor(f"q_proj.{name}")
        for role, part in (("query", 0), ("gate", 1)):
            taken = packed.reshape(heads, 2, size, *packed.shape[1:])[:, part]
            module.arrays[f"projection.{role}.{name}"] = taken.reshape(heads * size, *packed.shape[1:])
    for role, name in (("key", "k_proj"), ("value", "v_proj"), ("output", "o_proj")):
        module.linear(role, name)
    options = {"num_heads": heads, "num_kv_heads": groups, "is_causal": True} | _norms(module, plus=1.0)
    return options | module.rotary(_rope(module), size) | _window(module, kind)


def gemma3n(module: Module) -> Options:
    """Gemma 3n: a norm of values without a weight, no scale."""
    return _gemma3n(module, _layer_type(module), "v_proj")


def gemma4(module: Module) -> Options:
    """Gemma 4: as Gemma 3n, with larger heads in some layers, and in some of them keys as values."""
    if module.get("use_bidirectional_attention") not in (None, False, "vision"):
        raise BadFile("config.json: use_bidirectional_attention cannot be imported")
    is_last = module.layer == module.count("num_hidden_layers") - 1
    kind = FULL if is_last else _layer_type(module)  # whatever layer_types says
    same = module.get("attention_k_eq_v") and kind == FULL
    return _gemma3n(module, kind, "k_proj" if same else "v_proj")


def _gemma3n(module: Module, kind: str, value: str) -> Options:
    """The options of Gemma 3n and 4. kind: of the layer; value: the map that makes values"""
    shared, layers = module.get("num_kv_shared_layers"), module.count("num_hidden_layers")
    if shared and module.layer >= layers - module.count("num_kv_shared_layers"):
        raise BadFile("num_kv_shared_layers: the layer has the keys and values of another, see docs/models.md")
    heads, rows = module.count("num_attention_heads"), _rows(module)
    size = max(rows[0] // heads, 1)
    groups = rows[1] // size
    if rows != [heads * size, groups * size]:
        raise _misfit(rows, heads)
    separate(module, "q_proj", "k_proj", value, "o_proj")
    options = {"num_heads": heads, "num_kv_heads": groups, "is_causal": True, "scale": 1.0} | _norms(module)
    options |= {"value_norm.eps": module.number("rms_norm_eps")} | module.rotary(_typed_rope(module, kind), size)
    return options | _window(module, kind)


def exaone4(module: Module) -> Options:
    """Norms, and where layers have windows, no rotary embedding in those without."""
    turned = _layer_type(module) == SLIDING or module.get("sliding_window") is None
    return _decoder(module, _rope(module) if turned else None, _norms(module))


def phi3(module: Module) -> Options:
    """Query, key and value are packed below each other."""
    heads, groups = _heads(module)
    known = module.get("head_dim") is not None
    size = module.count("head_dim") if known else module.count("hidden_size") // heads
    ends = (heads * size, (heads + groups) * size, (heads + 2 * groups) * size)
    packed = module.matrix("qkv_proj.weight")[0]
    if packed != ends[-1]:
        raise BadFile(f"qkv_proj.weight: expected {ends[-1]} rows, as config.json says, got {packed}")
    for role, first, last in zip(("query", "key", "value"), (0, *ends), ends, strict=False):
        module.linear(role, "qkv_proj", slice(first, last))
    module.linear("output", "o_proj")
    rope = _rope(module)
    if (kind := rope.get("rope_type", rope.get("type"))) not in (None, "default"):  # longrope is the only other one
        raise BadFile(f"rope type {quote(str(kind))} of this model_type cannot be expressed")
    options = {"num_heads": heads, "num_kv_heads": groups, "is_causal": True} | module.rotary(rope, size)
    return options | _window(module, _layer_type(module))


def gpt_neox(module: Module) -> Options:
    """GPT-NeoX: a share of the features of each head turns; the configuration has names of its own for the rotation."""
    rope = module.mapping("rope_scaling") or module.mapping("rope_parameters")
    for key, own in (("rope_theta", "rotary_emb_base"), ("partial_rotary_factor", "rotary_pct")):
        rope.setdefault(key, module.positive(own))
        module.refuse(key, rope[key])  # releases before 5 wrote both names, and transformers reads only its own
    heads = module.count("num_attention_heads")
    return _packed_groups(module, "query_key_value", "dense", heads, heads, _scaled(module, rope))


def falcon(module: Module) -> Options:
    """Falcon: keys and values for all heads of queries, for groups of heads, or for each head."""
    module.refuse("alibi", False)  # transformers rounds what it adds to bfloat16, which no request can say
    heads = module.count("num_attention_heads")
    if module.get("new_decoder_architecture"):
        groups = module.count("num_kv_heads") if module.get("num_kv_heads") is not None else heads
    else:
        groups = 1 if module.get("multi_query") else heads
        module.refuse("num_kv_heads", groups, heads)  # transformers writes the number of heads beside multi_query
    return _packed_groups(module, "query_key_value", "dense", heads, groups, _rope(module))


def gpt_bigcode(module: Module) -> Options:
    """GPT BigCode: keys and values for all heads of queries, or for each head."""
    heads = module.count("n_head", "num_attention_heads")
    groups = 1 if module.get("multi_query") else heads
    module.refuse("num_key_value_heads", groups)
    options = _packed_groups(module, "c_attn", "c_proj", heads, groups, None)
    return options if module.get("scale_attn_weights") else options | {"scale": 1.0}


def _norms(module: Module, plus: float = 0.0) -> Options:
    return module.norm("query_norm", "q_norm", plus=plus) | module.norm("key_norm", "k_norm", plus=plus)


def _heads(module: Module) -> tuple[int, int]:
    heads = module.count("num_attention_heads")
    return heads, module.count("num_key_value_heads") if module.get("num_key_value_heads") is not None else heads


def _rows(module: Module) -> list[int]:
    """The rows of the maps of queries and keys."""
    return [module.matrix(f"{name}.weight")[0] for name in ("q_proj", "k_proj")]


def _misfit(rows: list[int], *heads: int) -> BadFile:
    """The error for heads that do not divide the rows of the maps of queries and keys."""
    counts = " and ".join(map(str, heads))
    return BadFile(f"{counts} heads, as config.json says, do not fit maps of {rows[0]} and {rows[1]} rows")


def _decoder(
    module: Module, rope: Mapping[str, Any] | None, own: Options | None = None, *, interleaved: bool = False
) -> Options:
    """What decoders since Llama have in common: separate maps, grouped heads, a rotary embedding, a mask with windows.

    rope: the configuration of the embedding, None for a layer without it; interleaved: as of `rotary`
    own: options that only this family has, all of whose tensors are taken
    """
    options = _grouped_heads(module, rope, interleaved=interleaved)
    return options | (own or {}) | _window(module, _layer_type(module))


def _grouped_heads(module: Module, rope: Mapping[str, Any] | None, *, interleaved: bool) -> Options:
    """As `_decoder`, whatever the mask of the layer is beside causal."""
    separate(module, "q_proj", "k_proj", "v_proj", "o_proj")
    heads, groups = _heads(module)
    rows = _rows(module)
    size = rows[0] // heads
    if rows != [heads * size, groups * size] or module.get("head_dim") not in (None, size):
        raise _misfit(rows, heads, groups)
    options = {"num_heads": heads, "num_kv_heads": groups, "is_causal": True}
    if rope is None:
        return options
    return options | module.rotary(rope, size) | ({"rotary.interleaved": True} if interleaved else {})


def _packed_groups(
    module: Module, packed: str, output: str, heads: int, groups: int, rope: Mapping[str, Any] | None
) -> Options:
    """A causal module with one matrix, whose rows are group by group those of its queries, of its key, of its value."""
    rows, features = module.matrix(f"{packed}.weight")
    size, each = features // heads, heads // groups
    if (rows, features) != (groups * (each + 2) * size, heads * size) or heads % groups:
        counts = f"{heads} heads, {groups} of keys"
        raise BadFile(f"{packed}.weight: {counts}, as config.json says, do not fit a matrix ({rows}, {features})")
    for name in ("weight", "bias") if module.has_bias("query", packed) else ("weight",):
        taken = module.tensor(f"{packed}.{name}")
        parts = taken.reshape(groups, each + 2, size, *taken.shape[1:])
        for role, first, last in (("query", 0, each), ("key", each, each + 1), ("value", each + 1, each + 2)):
            module.arrays[f"projection.{role}.{name}"] = parts[:, first:last].reshape(-1, *taken.shape[1:])
    module.linear("output", output)
    module.check_all_taken()
    options = {"num_heads": heads, "num_kv_heads": groups, "is_causal": True}
    return options if rope is None else options | module.rotary(rope, size)


def _clip(module: Module) -> Options:
    """The limit of queries, keys and values, if the configuration has one."""
    return {} if module.get("clip_qkv") is None else {"clip_qkv": module.positive("clip_qkv")}


def _rope(module: Module) -> dict[str, Any]:
    """The configuration of the rotary embedding, as transformers 5 writes it, or as earlier versions did."""
    rope = module.mapping("rope_scaling") or module.mapping("rope_parameters")
    rope = {"rope_theta": module.get("rope_theta") or module.known.get("rope_theta"), **rope}
    if "partial_rotary_factor" in module.known:
        rope.setdefault("partial_rotary_factor", module.get("partial_rotary_factor"))
    return _scaled(module, rope)


def _typed_rope(module: Module, kind: str) -> dict[str, Any]:
    """The configuration of the rotary embedding for a type of layer, in models where each has its own."""
    types = module.mapping("rope_parameters")
    if types and not isinstance(types.get(kind), dict):
        raise BadFile(f"config.json: expected rope_parameters with {kind}")
    rope = dict(types.get(kind, {}))
    if kind == FULL:
        scaling = module.mapping("rope_scaling")
        if scaling.get("type", "default") != "default" and "rope_type" not in scaling:
            raise BadFile("config.json: rope_scaling: transformers does not read `type` here; expected rope_type")
        rope = {"rope_theta": module.get("rope_theta"), **rope, **module.mapping("rope_scaling")}
    elif rope.get("rope_theta") is None:
        # transformers gives the base of OLMo 3 to layers without a window only, and the others the usual one.
        if module.get("model_type") == "olmo3":
            module.refuse("rope_theta", module.known["rope_theta"])
        rope["rope_theta"] = module.get("rope_local_base_freq") or module.get("rope_theta")
    _check_places(module, rope, types)
    return _scaled(module, rope)


def _check_places(module: Module, rope: Mapping[str, Any], types: Mapping[str, Any]) -> None:
    """Errors: BadFile for an option of a scaling that transformers ignores where it stands.

    rope: the configuration of a type of layer; types: that of all types
    """
    kind, length = rope.get("rope_type", rope.get("type")), "original_max_position_embeddings"
    # transformers reads it beside the types of layers, not within them.
    if kind == "yarn" and bool(rope.get("truncate", True)) != bool(types.get("truncate", True)):
        raise BadFile(
            "config.json: rope_parameters: transformers does not read `truncate` of a type of layer; "
            "expected the same beside the types"
        )
    if kind in ("llama3", "yarn") and module.get(length) is not None:  # and this one within them only
        module.refuse(length, rope.get(length, module.get("max_position_embeddings")))


def _scaled(module: Module, rope: dict[str, Any]) -> dict[str, Any]:
    """The configuration of a rotary embedding with the length that scalings begin from."""
    kind, length = rope.get("rope_type", rope.get("type")), "original_max_position_embeddings"
    if kind in ("llama3", "yarn"):
        if module.get(length) is not None:
            rope[length] = module.get(length)
        rope.setdefault(length, module.get("max_position_embeddings"))
    share = rope.get("partial_rotary_factor")
    if share not in (None, 1) and kind != "proportional" and "partial_rotary_factor" not in module.known:
        raise BadFile(f"config.json: partial_rotary_factor {quote(str(share))} cannot be expressed for this model_type")
    return rope


def _layer_type(module: Module) -> str:
    """The type of a layer. Errors: BadFile for one that no decoder here has."""
    listed = of_layer(module.options, "layer_types", module.layer)
    kind = module.kind(module.layer, module.options) if listed is None else listed
    if kind not in (FULL, SLIDING):
        raise _unknown_type(kind)
    return str(kind)


def _unknown_type(kind: Any) -> BadFile:
    return BadFile(f"config.json: layer type {quote(str(kind))} cannot be expressed")


def _window(module: Module, kind: str) -> Options:
    """The window of a layer: so many keys, the query's own included. Errors: BadFile for a tensor that is not taken."""
    module.check_all_taken()
    if kind != SLIDING:
        return {}
    module.refuse("use_sliding_window", True)
    return {"window.left": module.count("sliding_window") - 1}


def separate(module: Module, *names: str) -> None:
    """Take the maps of query, key, value and output. names: of their linear layers, in this order"""
    for role, name in zip(("query", "key", "value", "output"), names, strict=True):
        module.linear(role, name)
