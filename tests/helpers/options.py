"""The table of options: for each field of a request, and each nested field, a value that differs from its default."""

from __future__ import annotations

import dataclasses
from functools import cache
from typing import Any

import numpy as np

from attention_service.attention.spec import (
    AttentionSpec,
    GateMap,
    LinearMap,
    Norm,
    Projection,
    RelativeKeys,
    Rotary,
    SegmentIds,
    Window,
)


@cache
def numbers(*shape: int, seed: int = 0) -> np.ndarray:
    """Random numbers, which many options share: they cannot be changed."""
    made = np.random.default_rng(seed).normal(size=shape)
    made.flags.writeable = False
    return made


def plain(b: int, h: int, l: int, d: int) -> AttentionSpec:  # noqa: E741
    """A request without options: b batch entries of h heads, l queries and keys, d features each."""
    roles: dict[str, Any] = {
        name: numbers(b, l, h * d, seed=seed) for seed, name in enumerate(("query", "key", "value"))
    }
    return AttentionSpec(**roles, num_heads=h, include=("attention_weights",))


def unusual(b: int, h: int, l: int, d: int) -> dict[str, dict[str, Any]]:  # noqa: E741
    """What differs from `plain` of these sizes, by the name of the option. b is 2; 6 divides d."""
    return {
        "projection.query.weight": {"projection": Projection(query=LinearMap(weight=numbers(h * d, h * d)))},
        "projection.query.kernel": {"projection": Projection(query=LinearMap(kernel=numbers(h * d, h * d)))},
        "projection.query.bias": {
            "projection": Projection(query=LinearMap(weight=numbers(h * d, h * d), bias=numbers(h * d)))
        },
        "projection.key": {"projection": Projection(key=LinearMap(weight=numbers(h * d, h * d)))},
        "projection.value": {"projection": Projection(value=LinearMap(weight=numbers(h * d, h * d)))},
        "projection.output": {"projection": Projection(output=LinearMap(weight=numbers(5, h * d)))},
        "projection.output.bias": {
            "projection": Projection(output=LinearMap(weight=numbers(5, h * d), bias=numbers(5)))
        },
        "projection.gate": {"projection": Projection(gate=GateMap(weight=numbers(h * d, h * d), bias=numbers(h * d)))},
        "projection.gate of heads": {
            "projection": Projection(gate=GateMap(kernel=numbers(h * d, h), activation="none"))
        },
        "projection.gate by softplus": {
            "projection": Projection(gate=GateMap(weight=numbers(h * d, h * d), activation="softplus"))
        },
        "projection.gate by silu": {
            "projection": Projection(gate=GateMap(weight=numbers(h, d, h * d), activation="silu"))
        },
        "gate": {"gate": numbers(b, h, l, d)},
        "gate of heads": {"gate": numbers(b, h, l, 1), "include": ("attention_weights", "head_outputs")},
        "layout": {"layout": "lbd"},
        "num_heads": {"num_heads": 1},
        "num_kv_heads": {"num_kv_heads": 1, "key": numbers(b, l, d), "value": numbers(b, l, d, seed=1)},
        "past_key": {"past_key": numbers(b, h, 3, d), "past_value": numbers(b, h, 3, d, seed=1)},
        "past_value": {"past_key": numbers(b, h, 1, d), "past_value": numbers(b, h, 1, d, seed=1)},
        "query_norm.weight": {"query_norm": Norm(weight=numbers(d))},
        "query_norm.eps": {"query_norm": Norm(eps=0.5)},
        "query_norm.kind": {"query_norm": Norm(kind="layer")},
        "query_norm.over": {"query_norm": Norm(over="all", weight=numbers(h * d), bias=numbers(h * d, seed=1))},
        "query_norm.position": {"query_norm": Norm(position="after", weight=numbers(d)), "rotary": Rotary()},
        "query_norm.bias": {"query_norm": Norm(bias=numbers(d))},
        "key_norm": {"key_norm": Norm()},
        "value_norm": {"value_norm": Norm()},
        "value_norm of layers": {"value_norm": Norm(kind="layer", over="all", weight=numbers(h * d))},
        "output_norm": {"output_norm": Norm(weight=numbers(h, d))},
        "output_norm.over": {"output_norm": Norm(over="all", weight=numbers(h * d), bias=numbers(h * d, seed=1))},
        "clip_qkv": {"clip_qkv": 0.5},
        "rotary.base": {"rotary": Rotary(base=100.0)},
        "rotary.cos": {"rotary": Rotary(cos=numbers(l, d // 2), sin=numbers(l, d // 2, seed=1))},
        "rotary.sin": {"rotary": Rotary(cos=numbers(l, d // 3), sin=numbers(l, d // 3, seed=1))},
        "rotary.dim": {"rotary": Rotary(dim=d // 3 * 2)},
        "rotary.interleaved": {"rotary": Rotary(interleaved=True)},
        "rotary.query_positions": {"rotary": Rotary(query_positions=np.arange(l) + 3)},
        "rotary.key_positions": {"rotary": Rotary(key_positions=np.arange(l) * 2)},
        "relative_keys.key": {"relative_keys": RelativeKeys(key=numbers(2 * l - 1, d))},
        "relative_keys.first": {"relative_keys": RelativeKeys(key=numbers(h, 3, d), first=-2)},
        "relative_keys.query_bias": {"relative_keys": RelativeKeys(key=numbers(l, d), query_bias=numbers(h, d))},
        "scale": {"scale": 3.0},
        "scale of each head": {"scale": np.resize([0.5, -2.0], h)},
        "softcap": {"softcap": 0.5},
        "bias": {"bias": numbers(l, l)},
        "bias of each score": {"bias": numbers(b, h, l, l)},
        "alibi_slopes": {"alibi_slopes": np.resize([0.5, 2.0], h)},
        "mask": {"mask": numbers(l, l) > 0},
        "key_mask": {"key_mask": np.arange(l) != 1},
        "is_causal": {"is_causal": True},
        "query_offset": {"is_causal": True, "query_offset": np.array(-2)},
        "chunk_size": {"chunk_size": 3, "query_offset": np.array(-1)},
        "window.left": {"window": Window(left=1)},
        "window.right": {"window": Window(right=0)},
        "query_lengths": {"query_lengths": np.array(2)},
        "key_lengths": {"key_lengths": np.array(2)},
        "key_lengths of each entry": {"key_lengths": np.array([2, 3])},
        "query_offset of each entry": {"is_causal": True, "query_offset": np.array([0, -2])},
        "segment_ids.query": {"segment_ids": SegmentIds(np.resize([0, 0, 1, 2], l), np.arange(l))},
        "segment_ids.key": {"segment_ids": SegmentIds(np.arange(l), np.resize([0, 0, 1, 2], l))},
        "selected_keys": {"selected_keys": np.resize([[0, 0, 3], [-1, 2, 1], [-1, -1, -1], [3, 2, 1]], (l, 3))},
        "selected_keys of each head": {"selected_keys": np.arange(b * h * l).reshape(b, h, l, 1) % (l + 1) - 1},
        "sinks": {"sinks": np.resize([1.0, -2.0], h)},
        "sinks of each row": {"sinks": numbers(b, h, l) * 3},
        "sinks of each row, weights without them": {
            "sinks": numbers(b, h, l) * 3,
            "include": ("attention_weights", "weights_without_sinks", "logsumexp"),
        },
        "normalization": {"normalization": "sum"},
        "normalization by the sigmoid": {"normalization": "sigmoid"},
        "grad_output": {"grad_output": numbers(b, l, h * d, seed=5), "include": ("grad_query", "grad_value")},
        "grad_logsumexp": {"grad_logsumexp": numbers(b, h, l), "include": ("grad_query", "grad_masked_scores")},
        "gradients": {"grad_output": numbers(b, l, h * d, seed=5), "gradients": "all", "include": ()},
        "dtype": {"dtype": "float16"},
        "device": {"device": "cpu"},
        "backend": {"backend": "numpy"},
        "select_heads": {"select_heads": np.array([1])},
        "select_queries": {"select_queries": np.array([3, 1])},
        "average_heads": {"average_heads": True},
        "top_k": {"top_k": 2},
        "query_tokens": {"query_tokens": ("a",) * l},
        "key_tokens": {"key_tokens": ("a",) * l},
        "untyped": {"untyped": frozenset({"query"})},
        "allow_non_finite": {"allow_non_finite": True},
    }


def as_fields(spec: AttentionSpec) -> dict[str, Any]:
    """The fields of a request as a client writes them, nested ones as dicts."""
    default = AttentionSpec()._asdict()
    given = spec._asdict().items()
    return {name: _as_field(value) for name, value in given if value is not default[name] or name == "include"}


def _as_field(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        nested = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        return {name: _as_field(inner) for name, inner in nested.items() if inner is not None}
    if isinstance(value, np.ndarray) and value.ndim == 0:
        return value.item()
    return list(value) if isinstance(value, tuple) else value
