"""Forms of modules whose queries are multiplied by keys for distances, too: `relative_keys`."""

from __future__ import annotations

from typing import Any

import numpy as np

from tests.peers.module_families import inside
from tests.peers.module_forms import HEAD_SIZES, MAPS, Call, Fields, array, found, found_argument, heads, linear

LINEAR = {"query": ("linear_q", "q_proj"), "key": ("linear_k", "k_proj"), "value": ("linear_v", "v_proj"),
          "output": ("linear_out", "o_proj")}  # fmt: skip
# How Conformers call the positions, their map, and the biases u and v.
POSITIONS = ("relative_position_embeddings", "position_embeddings", "pos_emb")
POSITION_MAPS = ("linear_pos", "relative_k_proj")
BIASES = (("pos_bias_u", "pos_bias_v"), ("bias_u", "bias_v"))


def maps(call: Call) -> Fields:
    """Hidden states, their maps and the numbers of heads."""
    projection: Fields = {role: linear(found(call.module, names)) for role, names in LINEAR.items()}
    return {"input": call.hidden, "projection": projection} | heads(projection, found(call.module, HEAD_SIZES))


def with_u_and_v(fields: Fields, u: np.ndarray, v: np.ndarray, key: np.ndarray, **more: Any) -> Fields:
    """u is added to the query everywhere, v instead of it where keys for distances are multiplied: both (h, d)."""
    query = fields["projection"]["query"]
    query["bias"] = u.reshape(-1) + query.get("bias", np.float32(0))
    return fields | {"relative_keys": {"key": key, "query_bias": v - u} | more}


def conformer(call: Call) -> Fields:
    """Positions from the last to the first, mapped to a key for each head and distance; the biases u and v."""
    module, fields = call.module, maps(call)
    positions = found_argument(call, *POSITIONS)[:1]
    keys = array(found(module, POSITION_MAPS)(positions))[0]
    u, v = next((array(getattr(module, u)), array(getattr(module, v))) for u, v in BIASES if hasattr(module, u))
    return with_u_and_v(fields, u, v, keys.reshape(len(keys), *u.shape).swapaxes(0, 1))


def streaming(call: Call) -> Fields:
    """A Conformer whose mask hides all but some chunks: its mask, with that of the padding in it."""
    return conformer(call) | {"mask": array(call.arguments["attention_mask"])}


def shaw(call: Call) -> Fields:
    """A table of keys for the distances of an interval, which all heads share."""
    left = call.module.left_max_position_embeddings
    return maps(call) | {"relative_keys": {"key": array(call.module.distance_embedding.weight), "first": -left}}


def shaw_in_chunks(call: Call) -> Fields:
    """The same for distances from the key to the query, in chunks of their own."""
    module = call.module
    keys = {"relative_keys": {"key": array(module.rel_pos_emb.weight)[::-1]}, "chunk_size": module.context_size}
    if not hasattr(module, "to_kv"):
        return maps(call) | keys
    key, value = np.split(array(module.to_kv.weight), 2)
    projection: Fields = {"key": {"weight": key}, "value": {"weight": value}}
    projection |= {"query": linear(module.to_q), "output": linear(module.to_out)}
    return {"input": inside(call, "pre_norm"), "projection": projection, "num_heads": module.num_heads} | keys


def speecht5(call: Call) -> Fields:
    """Each pair of query and key has the key of their distance: the first column has those behind the query."""
    pairs = array(call.arguments["position_bias"])  # q k d
    projection = {role: linear(found(call.module, names)) for role, names in MAPS.items()}
    key = np.concatenate([pairs[::-1, 0], pairs[0, 1:]])
    return {"input": call.hidden, "projection": projection, "num_heads": call.module.num_heads} | {
        "relative_keys": {"key": key}
    }


def scaled(module: Any, fields: Fields, query: float, key: float = 1.0) -> Fields:
    """Queries are multiplied by a number for each feature, keys by one; both can be in their maps."""
    projection = fields["projection"]
    each = query * np.logaddexp(0, array(module.per_dim_scale))
    projection["query"]["weight"] = (projection["query"]["weight"].T * np.tile(each, module.num_heads)).T
    projection["key"]["weight"] = projection["key"]["weight"] * key
    past, future = module.max_past_horizon, module.max_future_horizon
    return fields | {"scale": 1.0, "softcap": float(module.softcap), "window": {"left": past, "right": future}}


def gemma3n_audio(call: Call) -> Fields:
    """Positions from the furthest in the window to the next, mapped to a key for each head."""
    module = call.module.attn
    embedding, past = module.relative_position_embedding, module.max_past_horizon
    positions = embedding.inv_timescales.new_tensor(range(past, -module.max_future_horizon - 1, -1))[None]
    keys = array(embedding.pos_proj(embedding._get_timing_signal_1d_pos(positions, positions.dtype)))[0]
    projection = {role: linear(getattr(module, f"{role[0]}_proj")) for role in ("query", "key", "value")}
    fields = {"input": call.hidden, "projection": projection | {"output": linear(call.module.post)}}
    key = keys.reshape(len(keys), module.num_heads, -1).swapaxes(0, 1)
    fields |= {"num_heads": module.num_heads, "relative_keys": {"key": key, "first": -past}}
    return scaled(module, fields, float(module.q_scale))


def gemma4_audio(call: Call) -> Fields:
    """The same with maps that can clip, and a window of one key less on either side."""
    module, past = call.module, call.module.max_past_horizon
    names = {"query": "q_proj", "key": "k_proj", "value": "v_proj", "output": "post"}
    projection = {role: linear(getattr(module, name).linear) for role, name in names.items()}
    keys = array(module.relative_k_proj(call.arguments["position_embeddings"]))
    key = keys.reshape(-1, module.num_heads, module.head_dim).swapaxes(0, 1)
    fields = {"input": call.hidden, "projection": projection, "num_heads": module.num_heads}
    fields |= {"relative_keys": {"key": key, "first": -past}}
    window = {"left": past - 1, "right": max(module.max_future_horizon - 1, 0)}
    return scaled(module, fields, module.q_scale, module.k_scale) | {"window": window}


def xlnet(call: Call) -> Fields:
    """Transformer-XL: positions mapped to keys, u and v; hidden states of the memory are keys only."""
    module, earlier = call.module, found_argument(call, "mems")
    states = call.hidden if earlier is None else np.concatenate([array(earlier).swapaxes(0, 1), call.hidden], axis=1)
    projection: Fields = {
        role: {"kernel": array(getattr(module, role[0])).reshape(module.d_model, -1)}
        for role in ("query", "key", "value")
    }
    projection["output"] = {"kernel": array(module.o).reshape(module.d_model, -1).T}
    keys = np.einsum("ih,hnd->nid", array(call.arguments["r"])[:, 0], array(module.r))
    fields = {
        "query": call.hidden,
        "key": states,
        "value": states,
        "num_heads": module.n_head,
        "projection": projection,
    }
    fields |= {"query_offset": states.shape[1] - call.length} if earlier is not None else {}
    return with_u_and_v(fields, array(module.r_w_bias), array(module.r_r_bias), keys, first=-states.shape[1])
