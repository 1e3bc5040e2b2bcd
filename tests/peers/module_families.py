"""Forms of single families, whose attention modules do something in their own way."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np

from tests.helpers.documents import BLOCKS
from tests.peers.module_forms import (
    CONTEXT,
    HEAD_SIZES,
    MAPS,
    Call,
    Fields,
    apart,
    array,
    but_not_turned,
    found,
    found_argument,
    heads,
    imported,
    linear,
    norm,
    norms,
    options,
    rotary,
    rows,
    separate,
    tables,
    tempered,
)


def packed(call: Call, name: str = "query_key_value", order: str = "h3d") -> Fields:
    """A module with one matrix for query, key and value.

    order: of its rows: `h3d`, head by head, or `3hd`, all queries first
    """
    module, head_dim = call.module, found(call.module, HEAD_SIZES)
    layer = found(module, (name,))
    projection: Fields = {"output": linear(found(module, MAPS["output"]))}
    for index, role in enumerate(("query", "key", "value")):

        def pick(value: np.ndarray, index: int = index) -> np.ndarray:
            split = (-1, 3, head_dim) if order == "h3d" else (3, -1, head_dim)
            parts = value.reshape(*split, *value.shape[1:])
            chosen = parts[:, index] if order == "h3d" else parts[index]
            return chosen.reshape(-1, *value.shape[1:])

        projection[role] = rows(layer, pick)
    fields = {"input": call.hidden, "projection": projection} | heads(projection, head_dim)
    return fields | rotary(call) | options(call) | norms(module, head_dim)


def bloom(call: Call) -> Fields:
    """ALiBi, whose slopes are the first differences of what the module gets. The output has the residual sum in it."""
    alibi = array(call.arguments["alibi"])  # (b·h, 1, k)
    count = call.module.num_heads
    slopes = (alibi[..., -1] - alibi[..., -2]).reshape(-1, count)[-1]
    return packed(call) | {"alibi_slopes": slopes, "is_causal": True}


def esm(call: Call) -> Fields:
    """The module scales its queries itself, so that its `scaling` is 1."""
    rotates = call.module.self.position_embedding_type == "rotary"
    return {name: value for name, value in but_not_turned(separate(call), rotates).items() if name != "scale"}


def nanochat(call: Call) -> Fields:
    """Turns the other way round; the norms come after it."""
    fields = separate(call, position="after")
    return fields | {"rotary": fields["rotary"] | {"sin": -fields["rotary"]["sin"]}}


def windowed(call: Call) -> Fields:
    """The window of the configuration holds for all layers."""
    window = call.module.config.sliding_window
    return separate(call) | ({"window": {"left": window - 1}} if window is not None else {})


def t5(call: Call) -> Fields:
    """A bias by the distance of query and key, which the first layer makes for all. There is no scale."""
    module, context = call.module, found_argument(call, *CONTEXT)
    projection = {role: linear(found(module, names)) for role, names in MAPS.items()}
    fields = {"input": call.hidden, "projection": projection, "num_heads": module.n_heads, "scale": 1.0}
    if context is not None:
        return fields | {"context": array(context)}
    given = found_argument(call, "position_bias")
    bias = module.compute_bias(call.length, call.length) if given is None else given
    return fields | {"bias": array(bias)} | ({"is_causal": True} if module.is_decoder else {})


def gemma(call: Call) -> Fields:
    """Gemma 3n and 4: some layers have the keys and values of another layer, normalised and turned already."""
    module = call.module
    if not module.is_kv_shared_layer:
        return imported(call)
    shared = {name: array(each) for name, each in zip(("key", "value"), call.arguments["shared"], strict=True)}
    groups, count = shared["key"].shape[1:3]
    sources = {name: each.swapaxes(1, 2).reshape(len(each), count, -1) for name, each in shared.items()}
    cos, sin = (each[0] for each in tables(call) or ())
    still = np.ones((count, cos.shape[-1]), np.float32), np.zeros((count, cos.shape[-1]), np.float32)
    projection = {"query": linear(module.q_proj), "output": linear(module.o_proj)}
    fields = {"num_heads": len(projection["query"]["weight"]) // module.head_dim, "num_kv_heads": groups}
    offset = {"query_offset": count - call.length} if count != call.length else {}
    normalised = {"query_norm": norm(module.q_norm, module.head_dim, 0.0, "before")}
    return {"query": call.hidden, **sources, "projection": projection} | fields | offset | normalised | options(
        call
    ) | apart((cos, sin), still)  # fmt: skip


def llama4(call: Call) -> Fields:
    """Layers without a rotation have a temperature by the position."""
    module = call.module
    if module.use_rope:
        return imported(call)
    still = call._replace(arguments={**call.arguments, "position_embeddings": None})
    steps = np.floor((position_ids(call) + 1) / module.floor_scale)
    return separate(still) | tempered(still, np.log1p(steps) * module.attn_scale + 1)


def position_ids(call: Call) -> np.ndarray:
    """The positions of the new tokens, (l,)."""
    given = found_argument(call, "position_ids")
    positions: np.ndarray = np.arange(call.length) + call.arguments["past"] if given is None else array(given)[0]
    return positions


def ministral3(call: Call) -> Fields:
    """A rotation, and a temperature by the position beside it."""
    return windowed(call) | tempered(call, temperature_of(call))


def temperature_of(call: Call) -> np.ndarray:
    """The temperature of Mistral's models by the position, (l,)."""
    rope = call.module.config.rope_parameters
    lengths = np.floor(position_ids(call) / rope["original_max_position_embeddings"])
    found: np.ndarray = 1 + rope["llama_4_scaling_beta"] * np.log1p(lengths)
    return found


def mistral4(call: Call) -> Fields:
    """Latent attention, with a temperature of all features of a query: those that stand still turn by nothing."""
    fields = latent(call)
    assert fields["rotary"]["interleaved"]
    still = call.module.qk_nope_head_dim // 2
    cos, sin = (fields["rotary"][name][0] for name in ("cos", "sin"))
    cos, sin = np.pad(cos, ((0, 0), (0, still)), constant_values=1), np.pad(sin, ((0, 0), (0, still)))
    factor = temperature_of(call)[:, None].astype(np.float32)
    return fields | apart((cos * factor, sin * factor), (cos, sin), interleaved=True)


def beam(call: Call) -> Fields:
    """A gate whose bias is one number for each head; the temperature is an argument of the module."""
    fields = separate(call)
    head_dim = call.module.head_dim
    fields["projection"]["gate"]["bias"] = array(call.module.gate_bias).repeat(head_dim)
    given = found_argument(call, "attention_scaling")
    return fields if given is None else fields | tempered(call, array(given).ravel()[-call.length :])


def mimo(call: Call) -> Fields:
    """Values are multiplied by a number, which their map can do; they have another number of features than keys."""
    fields = separate(call)
    value = fields["projection"]["value"]
    fields["projection"]["value"] = {name: each * np.float32(call.module.v_scale) for name, each in value.items()}
    return fields


def gptj(call: Call) -> Fields:
    """The module has a table of its own: sines, then cosines."""
    table = array(call.module.embed_positions)
    half = table.shape[-1] // 2
    turned = {"rotary": {"cos": table[:, half:], "sin": table[:, :half], "interleaved": True}}
    return separate(call) | turned


def mpt(call: Call) -> Fields:
    """ALiBi, whose slopes are the differences of what the module gets, which ends at the last key."""
    alibi = array(call.arguments["position_bias"])
    return packed(call, "Wqkv", "3hd") | {"alibi_slopes": alibi[:, 0, -1] - alibi[:, 0, -2], "is_causal": True}


def mobilebert(call: Call) -> Fields:
    """Query, key and value come from hidden states of their own."""
    fields = separate(call)
    del fields["input"]
    sources = {role: array(call.arguments[f"{role}_tensor"]) for role in ("query", "key", "value")}
    return sources | fields


def inside(call: Call, name: str) -> np.ndarray:
    """What a part of the module returned in the call."""
    return array(call.arguments["inside"][name])


def joined(states: np.ndarray) -> np.ndarray:
    """Features by head (b, l, h, d) with the heads side by side."""
    return states.reshape(*states.shape[:2], -1)


def inkling(call: Call) -> Fields:
    """Begins behind the short convolutions of keys and values; a bias that the queries choose by the distance."""
    module, config = call.module, call.module.config
    fields: Fields = {"num_heads": module.num_heads, "num_kv_heads": module.num_key_value_heads}
    fields |= {"query": inside(call, "q_proj"), "key": inside(call, "k_sconv"), "value": inside(call, "v_sconv")}
    bias = inside(call, "rel_logits_proj")
    temperature = np.ones(call.length)
    if not module.is_sliding and config.log_scaling_n_floor is not None:
        above = (position_ids(call) + 1) / config.log_scaling_n_floor
        temperature = 1 + config.log_scaling_alpha * np.log(np.maximum(above, 1))
    projection: Fields = {"output": linear(module.o_proj)}
    if hasattr(module, "q_norm"):  # Inkling 2 clips instead, which no norm does
        fields |= norms(module, module.head_dim)
        bias = bias * temperature[:, None].astype(np.float32)
    else:
        gate = 1 / (1 + np.exp(-inside(call, "gate_proj")))
        by_head = gate.reshape(*gate.shape[:2], module.num_heads, -1).swapaxes(1, 2)
        fields |= {"query": joined(inside(call, "q_l2_clip")), "key": joined(inside(call, "k_l2_clip"))}
        fields |= {"gate": by_head, "sinks": inside(call, "sink_proj").swapaxes(1, 2)}
        fields |= {"value_norm": {"eps": module.v_norm.eps}}
    # a sliding cache has dropped the first keys, which the window hides
    dropped = call.arguments["past"] + call.length - bias.shape[-1]
    fields["bias"] = np.pad(bias, ((0, 0), (0, 0), (0, 0), (dropped, 0)))
    turned = {} if module.is_sliding else tempered(call, temperature)
    return fields | {"projection": projection} | options(call) | turned


def sparse(call: Call) -> Fields:
    """Multi-head latent attention to the keys that an indexer selects."""
    return latent(call, interleaved=True) | {"selected_keys": inside(call, "indexer")[:, None]}


def latent(call: Call, *, interleaved: bool | None = None) -> Fields:
    """Multi-head latent attention, by the program of docs/models.md.

    interleaved: of `rotary`; by default as the configuration says
    """
    module, cosines = call.module, call.arguments["position_embeddings"]
    if interleaved is None:
        interleaved = not isinstance(cosines, tuple) or bool(getattr(module.config, "rope_interleave", False))
    fields = latent_request()(module, call.arguments["hidden_states"])
    return fields | rotary(call, interleaved=interleaved)


@cache
def latent_request() -> Callable[[Any, Any], Fields]:
    """The function of docs/models.md that makes the request."""
    (program,) = (block for block in BLOCKS if block.page == "docs/models.md" and "def latent_request" in block.text)
    names: dict[str, Any] = {}
    exec(program.text, names)
    request: Callable[[Any, Any], Fields] = names["latent_request"]
    return request
