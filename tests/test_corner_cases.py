"""One table of edge cases for all backends. Expected numbers are calculated by hand.

Most rows use keys of zeros, so that all visible keys have the same weight and only masking has an effect.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from attention_service import attend
from tests.helpers.backends import BACKENDS, compute_as_if_large

INF = math.inf
NAN = math.nan
LN2 = math.log(2)


def flat(q: int, k: int) -> dict[str, Any]:
    """Fields of q queries over k equal keys, with values 1, 2, 3, …"""
    return {"query": np.zeros((q, 1)), "key": np.zeros((k, 1)), "value": np.arange(1.0, k + 1)[:, None]}


def one_query(scores: list[float], **options: Any) -> dict[str, Any]:
    """Fields of one query with these scores, and values 1, 2, 3, …"""
    key = np.array(scores)[:, None]
    return {
        "query": np.ones((1, 1)),
        "key": key,
        "value": np.arange(1.0, len(scores) + 1)[:, None],
        "scale": 1,
    } | options


def self_attention(tokens: int, **options: Any) -> dict[str, Any]:
    return {"input": np.zeros((tokens, 1))} | options


@dataclass(frozen=True)
class Corner:
    name: str
    request: dict[str, Any]
    expected: dict[str, Any]
    masked_rows: int = 0
    metadata: dict[str, Any] = field(default_factory=dict)


H = 0.5
T = 1 / 3
CORNERS = [
    Corner("one key", flat(2, 1), {"attention_weights": [[1], [1]], "output": [[1], [1]]}),
    Corner("one query", flat(1, 2), {"attention_weights": [[H, H]], "output": [[1.5]], "logsumexp": [LN2]}),
    Corner("1 query, 1000 keys", flat(1, 1000), {"output": [[500.5]], "entropy": [math.log(1000)]}),
    Corner("1000 queries, 1 key", flat(1000, 1), {"output": np.ones((1000, 1)), "received": [1000]}),
    Corner("scale 0", one_query([5, -7], scale=0), {"attention_weights": [[H, H]], "scores": [[5, -7]],
           "scaled_scores": [[0, 0]]}),
    Corner("negative scale", one_query([0, LN2], scale=-1), {"attention_weights": [[2 * T, T]]}),
    Corner("extreme scores", one_query([1e4, -1e4]), {"attention_weights": [[1, 0]], "logsumexp": [1e4]}),
    Corner("extreme equal scores", one_query([-1e4, -1e4]), {"attention_weights": [[H, H]], "logsumexp": [-1e4 + LN2]}),
    Corner("value_dim is not head_dim", flat(1, 2) | {"value": [[1, 2, 3], [3, 4, 5]]}, {"output": [[2, 3, 4]]}),
    # masked rows and keys
    Corner("fully masked row", flat(2, 2) | {"mask": [[False, False], [True, False]]},
           {"attention_weights": [[0, 0], [1, 0]], "output": [[0], [1]], "logsumexp": [-INF, 0],
            "entropy": [0, 0], "masked_scores": [[-INF, -INF], [0, -INF]]}, 1),
    Corner("fully masked by bias", flat(1, 2) | {"bias": [-INF, -INF]}, {"output": [[0]], "logsumexp": [-INF]}, 1),
    Corner("fully masked, with a sink", flat(1, 2) | {"mask": [False, False], "sinks": [3.0]},
           {"attention_weights": [[0, 0]], "output": [[0]], "logsumexp": [3]}, 1),
    Corner("key_mask", flat(1, 3) | {"key_mask": [True, False, True]}, {"attention_weights": [[H, 0, H]]}),
    Corner("key_mask per batch entry", {"input": np.zeros((2, 2, 1)), "key_mask": [[True, False], [True, True]]},
           {"attention_weights": [[[1, 0], [1, 0]], [[H, H], [H, H]]]}),
    Corner("key_lengths", {"input": np.zeros((2, 2, 1)), "key_lengths": [0, 1]},
           {"attention_weights": [[[0, 0], [0, 0]], [[1, 0], [1, 0]]]}, 2),
    Corner("key_lengths for all", self_attention(3, key_lengths=2), {"attention_weights": [[H, H, 0]] * 3}),
    Corner("query_lengths: padding is not counted", {"input": np.zeros((2, 2, 1)), "query_lengths": [1, 0]},
           {"attention_weights": [[[H, H], [0, 0]], [[0, 0], [0, 0]]], "output": np.zeros((2, 2, 1)),
            "logsumexp": [[LN2, -INF], [-INF, -INF]]}),
    Corner("query_lengths beside a mask", self_attention(2, query_lengths=1, mask=[False, False]),
           {"output": [[0], [0]]}, 1),
    Corner("lengths do not move the offset", self_attention(3, is_causal=True, key_lengths=2, query_lengths=3),
           {"attention_weights": [[1, 0, 0], [H, H, 0], [H, H, 0]]}),
    Corner("segments", self_attention(3, segment_ids={"query": [7, 7, 8], "key": [7, 8, 8]}),
           {"attention_weights": [[1, 0, 0], [1, 0, 0], [0, H, H]]}),
    Corner("disjoint segments", self_attention(1, segment_ids={"query": [[1]], "key": [[2]]}),
           {"attention_weights": [[0]]}, 1),
    Corner("window", self_attention(4, window={"left": 1, "right": 0}),
           {"attention_weights": [[1, 0, 0, 0], [H, H, 0, 0], [0, H, H, 0], [0, 0, H, H]]}),
    Corner("window to the left only", self_attention(3, window={"left": 0}),
           {"attention_weights": [[T, T, T], [0, H, H], [0, 0, 1]]}),
    Corner("window and causal", self_attention(3, window={"left": 1, "right": 2}, is_causal=True),
           {"attention_weights": [[1, 0, 0], [H, H, 0], [0, H, H]]}),
    Corner("window without sides", self_attention(2, window={}), {"attention_weights": [[H, H], [H, H]]}),
    Corner("window with offset", flat(1, 4) | {"window": {"left": 0, "right": 1}, "query_offset": 2},
           {"attention_weights": [[0, 0, H, H]]}),
    Corner("window beyond everything", flat(1, 2) | {"window": {"left": 2**62, "right": 2**62}, "query_offset": 2**62},
           {"attention_weights": [[H, H]]}),
    Corner("offset beyond everything", flat(1, 2) | {"window": {"left": 1}, "query_offset": 2**62},
           {"attention_weights": [[0, 0]]}, 1),
    Corner("offset before everything", flat(1, 2) | {"is_causal": True, "query_offset": -(2**62)},
           {"output": [[0]]}, 1),
    # terms added to scores
    Corner("softcap", one_query([1, -3], softcap=2, scale=2),
           {"scaled_scores": [[2, -6]], "capped_scores": [[2 * math.tanh(1), 2 * math.tanh(-3)]],
            "masked_scores": [[2 * math.tanh(1), 2 * math.tanh(-3)]]}),
    Corner("softcap before bias", one_query([1000.0, 0], softcap=1, bias=[0, 5.0]), {"masked_scores": [[1, 5]]}),
    Corner("no softcap: a stage equals the one before", one_query([1, 2]), {"capped_scores": [[1, 2]]}),
    Corner("alibi", self_attention(3, alibi_slopes=[0.5]),
           {"masked_scores": [[0, -0.5, -1], [-0.5, 0, -0.5], [-1, -0.5, 0]], "capped_scores": np.zeros((3, 3))}),
    Corner("alibi with offset", flat(1, 3) | {"alibi_slopes": [2], "query_offset": 2},
           {"masked_scores": [[-4, -2, 0]]}),
    Corner("sinks", one_query([0.0, LN2], sinks=[0.0]),
           {"attention_weights": [[0.25, 0.5]], "output": [[1.25]], "logsumexp": [math.log(4)]}),
    Corner("a sink above all", one_query([-1e4], sinks=[0.0]), {"attention_weights": [[0]], "output": [[0]]}),
    Corner("a sink below all", one_query([0.0], sinks=[-1e4]), {"attention_weights": [[1]], "logsumexp": [0]}),
    Corner("sinks per head", {"input": np.zeros((1, 2)), "num_heads": 2, "sinks": [0.0, LN2]},
           {"attention_weights": [[[H]], [[T]]]}),
    # KV caches
    Corner("past", {"query": [[[0.0]]], "key": [[[0.0]]], "value": [[[3.0]]], "layout": "hld",
           "past_key": [[[0.0], [0.0]]], "past_value": [[[1.0], [2.0]]], "is_causal": True},
           {"output": [[[2]]], "attention_weights": [[[T, T, T]]], "present_key": [[[0], [0], [0]]],
            "present_value": [[[1], [2], [3]]], "key": [[[0]]], "value": [[[3]]]}, metadata={"key_length": 3}),
    Corner("empty past", flat(2, 2) | {"past_key": [[]], "past_value": np.zeros((1, 0, 1)), "is_causal": True},
           {"attention_weights": [[1, 0], [H, H]], "present_value": [[[1], [2]]]}),
    Corner("past in a batch of packed heads", {"input": np.zeros((1, 1, 2)), "num_heads": 2,
           "past_key": np.zeros((1, 2, 1, 1)), "past_value": [[[[2.0]], [[4.0]]]]},
           {"output": [[[1, 2]]], "present_value": [[[[2], [0]], [[4], [0]]]]}),
    # norms and rotary embedding
    Corner("norm", {"query": [[3.0, 4.0]], "key": [[1.0, 0.0]], "value": [[1.0]], "query_norm": {"eps": 0}},
           {"query": [[3 / math.sqrt(12.5), 4 / math.sqrt(12.5)]]}),
    Corner("norm with weight", {"query": [[3.0, 4.0]], "key": [[2.0, 0.0]], "value": [[1.0]],
           "key_norm": {"weight": [10, 1], "eps": 2}}, {"key": [[10, 0]], "query": [[3, 4]]}),
    Corner("rotation by a quarter, halves", {"input": [[1.0, 2, 3, 4]] * 2, "rotary": {"cos": [[1, 1], [0, 0]],
           "sin": [[0, 0], [1, 1]]}}, {"query": [[1, 2, 3, 4], [-3, -4, 1, 2]], "value": [[1, 2, 3, 4]] * 2}),
    Corner("rotation by a quarter, interleaved", {"input": [[1.0, 2, 3, 4]] * 2, "rotary": {"cos": [[1, 1], [0, 0]],
           "sin": [[0, 0], [1, 1]], "interleaved": True}}, {"key": [[1, 2, 3, 4], [-2, 1, -4, 3]]}),
    Corner("rotation of the first features", {"input": [[1.0, 2, 3]], "rotary": {"dim": 2, "base": 5.0,
           "query_positions": [1], "key_positions": [2]}},
           {"query": [[math.cos(1) - 2 * math.sin(1), math.sin(1) + 2 * math.cos(1), 3]],
            "key": [[math.cos(2) - 2 * math.sin(2), math.sin(2) + 2 * math.cos(2), 3]]}),
    Corner("rotation by base", {"input": [[1.0, 0, 0, 0]] * 3, "rotary": {"base": 16.0}},
           {"query": [[1, 0, 0, 0], [math.cos(1), 0, math.sin(1), 0], [math.cos(2), 0, math.sin(2), 0]]}),
    Corner("second pair by base", {"input": [[0, 1.0, 0, 0]] * 2, "rotary": {"base": 16.0, "dim": 4}},
           {"query": [[0, 1, 0, 0], [0, math.cos(0.25), 0, math.sin(0.25)]]}),
    Corner("positions count on from the past", {"input": [[1.0, 0]], "past_key": np.zeros((1, 3, 2)),
           "past_value": np.zeros((1, 3, 2)), "rotary": {}}, {"query": [[math.cos(3), math.sin(3)]],
           "key": [[math.cos(3), math.sin(3)]]}),
    Corner("cos and sin for each token", {"input": np.ones((2, 1, 2)), "rotary": {"cos": [[[0.0]], [[1.0]]],
           "sin": [[[1.0]], [[0.0]]]}}, {"query": [[[-1, 1]], [[1, 1]]]}),
    Corner("cos looked up by position", {"input": np.ones((2, 2)), "rotary": {"cos": [[1.0], [7.0], [0.0]],
           "sin": [[0.0], [7.0], [1.0]], "query_positions": [[2, 0]], "key_positions": [0, 2]}},
           {"query": [[-1, 1], [1, 1]], "key": [[1, 1], [-1, 1]]}),
    # outputs
    Corner("entropy", one_query([0.0, LN2]), {"entropy": [math.log(3) - 2 * T * LN2]}),
    Corner("entropy of weights beside a sink", one_query([0.0], sinks=[0.0]), {"entropy": [H * LN2]}),
    Corner("received", self_attention(2, is_causal=True), {"received": [1.5, 0.5]}),
    Corner("select_heads and select_queries", {"input": np.zeros((3, 2)), "num_heads": 2, "sinks": [0.0, 1e4],
           "is_causal": True, "select_heads": [1, 0], "select_queries": [2, 0]},
           {"attention_weights": [[[0, 0, 0], [0, 0, 0]], [[0.25, 0.25, 0.25], [H, 0, 0]]],
            "logsumexp": [[1e4, 1e4], [math.log(4), LN2]], "received": [[0, 0, 0], [H + T + 0.25, T + 0.25, 0.25]]}),
    Corner("average_heads", {"input": np.zeros((1, 2)), "num_heads": 2, "sinks": [0.0, 1e4], "average_heads": True},
           {"attention_weights": [[0.25]], "received": [0.25], "scores": [[[0]], [[0]]], "logsumexp": [[LN2], [1e4]]}),
    Corner("average of one head", {"input": np.zeros((1, 2)), "num_heads": 2, "sinks": [0.0, 1e4],
           "average_heads": True, "select_heads": [0]}, {"attention_weights": [[H]]}),
    Corner("top_k", one_query([0.0, LN2, 0.0, LN2], top_k=3),
           {"top_weights": {"indices": [[1, 3, 0]], "values": [[T, T, T / 2]]}}),
    Corner("top_k capped at k", self_attention(2, top_k=9), {"top_weights": {"indices": [[0, 1]] * 2,
           "values": [[H, H]] * 2}}),
    Corner("top_k is never swapped", {"input": np.zeros((1, 3)), "layout": "dl", "is_causal": True, "top_k": 1},
           {"top_weights": {"indices": [[0]] * 3, "values": [[1], [H], [T]]}}),
    Corner("top_k of a single query", {"query": [1.0], "key": [[1.0], [2.0]], "value": [[1.0], [2.0]], "top_k": 1},
           {"top_weights": {"indices": [1], "values": [1 / (1 + math.exp(-1))]}}),
    Corner("top_k of averaged heads", {"input": np.zeros((1, 2)), "num_heads": 2, "sinks": [0.0, 1e4], "top_k": 1,
           "average_heads": True}, {"top_weights": {"indices": [[0]], "values": [[0.25]]}}),
    # masked keys have no effect, not even with inf and NaN (which only `attend` accepts)
    Corner("hidden key and value are NaN", {"query": [[1.0], [1.0]], "key": [[0.0], [NAN]], "value": [[1.0], [NAN]],
           "key_mask": [True, False]}, {"output": [[1], [1]], "attention_weights": [[1, 0], [1, 0]],
           "masked_scores": [[0, -INF], [0, -INF]]}),
    Corner("later value is inf", {"query": [[0.0]], "key": [[0.0], [0.0]], "value": [[1.0], [INF]], "is_causal": True,
           "query_offset": 0}, {"output": [[1]]}),
    Corner("a query that sees nothing is NaN", {"query": [[NAN], [0.0]], "key": [[0.0]], "value": [[1.0]],
           "mask": [[False], [True]]}, {"output": [[0], [1]]}, 1),
    Corner("padding is inf, grouped heads", {"query": np.ones((2, 1, 1)), "key": [[[0.0], [INF]]],
           "value": [[[2.0], [-INF]]], "layout": "hld", "key_lengths": 1}, {"output": [[[2]], [[2]]]}),
    Corner("a hidden value overflows in its projection", {"input": [[1.0], [1e38]], "mask": [True, False], "scale": 0,
           "projection": {"query": {"kernel": [[0]]}, "value": {"kernel": [[1e38] * 9]}, "key": {"kernel": [[0]]}},
           "dtype": "float32"}, {"output": [[1e38] * 9] * 2}),
    Corner("the past is NaN where it is hidden", flat(1, 1) | {"past_key": [[[NAN]]], "past_value": [[[NAN]]],
           "key_mask": [False, True]}, {"output": [[1]]}),
]  # fmt: skip


def include(expected: dict[str, Any]) -> list[str]:
    return ["attention_weights" if name == "top_weights" else name for name in expected if name != "output"]


@pytest.fixture(params=["small", "large"])
def is_large(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Computes the request on the path of small requests, or on that of large ones, in tiles."""
    if request.param == "large":
        compute_as_if_large(monkeypatch)
    return bool(request.param == "large")


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("number", range(len(CORNERS)), ids=[corner.name for corner in CORNERS])
def test_an_edge_case_gives_the_expected_numbers(number: int, is_large: bool, backend: str) -> None:
    corner, dtype = CORNERS[number], ("float64", "float32")[(number + is_large) % 2]
    result = attend(**{"dtype": dtype} | corner.request, include=include(corner.expected), backend=backend)
    tolerance = 1e-14 if result.metadata.dtype == "float64" else 2e-6
    for name, expected in corner.expected.items():
        for part, value in expected.items() if isinstance(expected, dict) else [(None, expected)]:
            ours = result[name] if part is None else result[name][part]
            np.testing.assert_allclose(ours, np.array(value, float), rtol=tolerance, atol=tolerance, err_msg=name)
    assert result.metadata.fully_masked_rows == corner.masked_rows
    assert result.metadata.backend == backend
    for name, value in corner.metadata.items():
        assert getattr(result.metadata, name) == value


@pytest.mark.usefixtures("is_large")
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("corner", CORNERS, ids=lambda corner: corner.name)
def test_the_output_does_not_depend_on_include(corner: Corner, backend: str) -> None:
    """Without scores another kernel may run, and its output must be the same."""
    request = {name: value for name, value in corner.request.items() if name not in ("top_k", "select_queries")}
    alone = attend(**request, include=[], backend=backend)
    beside = attend(**request, include=["logsumexp", "scores"], backend=backend) if finite(request) else alone
    np.testing.assert_allclose(alone.output, beside.output, rtol=1e-13, atol=1e-300)
    assert alone.metadata.fully_masked_rows == corner.masked_rows


def finite(request: dict[str, Any]) -> bool:
    arrays = [value for value in request.values() if isinstance(value, list | np.ndarray)]
    return all(np.isfinite(np.asarray(x, dtype=float)).all() for x in arrays if np.asarray(x).dtype.kind == "f")
