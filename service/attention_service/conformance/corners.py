"""Corners: what implementations of attention get wrong.

A corner has as few options as possible, so that a failure is the corner's own. The last one, `combined`, has many.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from attention_service.comparison.case import TILES
from attention_service.conformance import changes
from attention_service.conformance.changes import Change

TYPES: Final = ("float32", "bfloat16", "float64", "float16")


@dataclass(frozen=True)
class Corner:
    """One thing that implementations get wrong.

    text:    what is right, in a sentence
    options: of the request, as in a Recipe
    change:  edits the fields of the request
    sizes:   fields of the Recipe that are fixed, by a number or the name of a size of SuiteSizes; `square` for as many
             keys as queries
    fields:  of the request, the same in each case
    types:   the types of the cases, in turn
    """

    name: str
    text: str
    options: tuple[str, ...] = ()
    change: Change | None = None
    sizes: Mapping[str, Any] = field(default_factory=dict)
    fields: Mapping[str, Any] = field(default_factory=dict)
    types: tuple[str, ...] = TYPES


# Without an offset, which is 0 then.
SQUARE: Final = {"square": True, "has_offset": False}
LAYER: Final = {"norm": {"kind": "layer"}}
# The first query is aligned with the first key.
FIRST: Final = {"query_offset": 0}
SIGMOID: Final = {"normalization": "sigmoid"}
LOGSUMEXP: Final = {"include": ["logsumexp"]}
WITHOUT_SINKS: Final = {"include": ["weights_without_sinks"]}
NORMS: Final = ("query_norm", "key_norm", "value_norm")
CORNERS: Final = (
    Corner("plain", "softmax(q kᵀ / √d) v"),
    Corner("one_query", "a single query", sizes={"queries": 1}),
    Corner("long_keys", "more keys than two tiles of 128 hold", change=changes.tile_ends, sizes={"keys": "long"}),
    Corner("value_dim", "values with fewer features than keys", sizes={"value_dim": "narrow"}),
    Corner(
        "value_square",
        "as many keys as features: values are not transposed",
        sizes={"keys": "features", "head_dim": "features", "value_dim": "features"},
    ),
    Corner("grouped_heads", "query head n reads key/value head n // 3", sizes={"heads": 6, "kv_heads": 2}),
    Corner("multi_query", "all query heads read one key/value head", sizes={"heads": 4, "kv_heads": 1}),
    Corner("layouts", "axes in another order, heads packed, columns as tokens", change=changes.any_layout),
    Corner("scale.own", "a factor other than 1/√d", fields={"scale": 0.3}),
    Corner("scale.zero", "a scale of 0: the mean of the values", fields={"scale": 0.0}),
    Corner("scale.negative", "a negative scale", fields={"scale": -0.5}),
    Corner("scale.by_head", "a factor for each head", fields={"scale": np.array([0.2, 0.5, 0.9])}),
    Corner("scale.by_head_zero", "a factor for each head, one of them 0", fields={"scale": np.array([0.5, 0.0, 0.3])}),
    Corner(
        "scale.by_head_negative",
        "a factor for each head, one of them negative",
        fields={"scale": np.array([0.2, 0.5, -0.5])},
    ),
    Corner(
        "scale.zero_causal",
        "a scale of 0 with a causal mask",
        ("is_causal",),
        sizes=SQUARE,
        fields={"scale": 0.0},
    ),
    Corner(
        "scale.negative_causal",
        "a negative scale with a causal mask",
        ("is_causal",),
        sizes=SQUARE,
        fields={"scale": -0.5},
    ),
    Corner("large_scores", "scores whose exponentials overflow", change=changes.large_scores),
    Corner("hidden_nan", "NaN and infinity in hidden keys and values have no effect", change=changes.poison),
    Corner("softcap", "softcap · tanh(scaled / softcap)", ("softcap",)),
    Corner("softcap.bias", "the softcap comes before the bias", ("softcap", "bias")),
    Corner("bias", "numbers added to the scaled scores", ("bias",)),
    Corner("bias.minus_infinity", "−∞ in a bias hides a key", ("bias",), changes.bias_with_infinities),
    Corner("bias.finite", "−10,000, −1e9 and the least number in a bias hide keys", ("bias",), changes.finite_bias),
    Corner("bias.empty_row", "a row of −∞ in a bias: output 0", ("bias",), changes.bias_with_empty_row),
    Corner("mask", "booleans for each batch entry", ("mask",), changes.shared_mask, SQUARE),
    Corner("mask.by_head", "booleans for each head", ("mask",), changes.mask_without_empty_rows),
    Corner("mask.empty_row", "a row that sees no key: output 0", ("mask",), changes.mask_with_empty_rows),
    Corner("key_mask", "hidden keys", ("key_mask",)),
    Corner("key_lengths", "keys beyond a length are padding", ("key_lengths",)),
    Corner("key_lengths.zero", "a batch entry without keys: output 0", ("key_lengths",), changes.no_keys),
    Corner("query_lengths", "queries beyond a length have output 0", change=changes.query_lengths),
    Corner("causal", "j ≤ i", ("is_causal",), sizes=SQUARE),
    Corner("causal.first", "first query with first key, q < k", ("is_causal",), fields=FIRST),
    Corner("causal.last", "last query with last key, q < k", ("is_causal",), changes.offset_last),
    Corner(
        "causal.empty_rows",
        "last query with last key, q > k: the first rows see no key",
        ("is_causal",),
        changes.offset_last,
        {"queries": "more", "keys": "fewer"},
    ),
    Corner("causal.by_batch", "another offset for each batch entry", ("is_causal",)),
    Corner("causal.mask", "a causal mask and another mask", ("is_causal", "mask"), changes.causal_and_mask, SQUARE),
    Corner(
        "causal.padding",
        "rows that a causal mask and padding empty together: output 0",
        ("is_causal", "key_mask"),
        changes.left_padding,
        SQUARE,
    ),
    Corner(
        "causal.low_scores",
        "scores of about −200 beside a causal mask",
        ("is_causal",),
        changes.low_scores,
        SQUARE,
    ),
    Corner("window", "i − 4 ≤ j ≤ i + 2", ("window",), sizes=SQUARE, fields={"window": {"left": 4, "right": 2}}),
    Corner("window.left", "a left side only: i − 4 ≤ j", ("window",), sizes=SQUARE, fields={"window": {"left": 4}}),
    Corner(
        "window.zero",
        "a window of 0 and 0: each query sees its own key",
        ("window",),
        sizes=SQUARE,
        fields={"window": {"left": 0, "right": 0}},
    ),
    Corner(
        "window.causal",
        "the last four keys",
        ("window", "is_causal"),
        sizes=SQUARE,
        fields={"window": {"left": 3}},
    ),
    Corner(
        "window.offset",
        "a window that ends at the last key, q < k",
        ("window",),
        changes.offset_last,
        fields={"window": {"left": 5, "right": 0}},
    ),
    Corner(
        "window.causal_offset",
        "the last four keys, last query with last key, q < k",
        ("window", "is_causal"),
        changes.offset_last,
        fields={"window": {"left": 3}},
    ),
    Corner("window.empty_rows", "a window beyond the last key: output 0", ("window",), changes.window_beyond),
    Corner("chunk", "⌊i / 5⌋ = ⌊j / 5⌋", ("chunk_size", "is_causal"), sizes=SQUARE, fields={"chunk_size": 5}),
    Corner("chunk.offset", "⌊(i + 3) / 5⌋ = ⌊j / 5⌋", ("chunk_size",), fields={"chunk_size": 5, "query_offset": 3}),
    Corner("segments", "tokens see their own sequence", ("segment_ids",), changes.segments, SQUARE),
    Corner("segments.empty_row", "a sequence without keys: output 0", ("segment_ids",), changes.lonely_segment),
    Corner("selected", "indices of the only keys that a query sees", change=changes.select),
    Corner("selected.by_head", "other indices for each head", ("selected_keys",)),
    Corner("selected.repeated", "an index twice counts once, and −1 is no key", change=changes.select_repeatedly),
    Corner("selected.empty_row", "a row of −1 sees no key: output 0", change=changes.select_nothing),
    Corner("selected.hidden", "a row whose selected keys are all hidden: output 0", change=changes.select_hidden),
    Corner(
        "selected.causal",
        "selected keys and a causal mask",
        ("is_causal",),
        changes.both(changes.offset_last, changes.select),
    ),
    Corner("selected.past", "indices count from the first cached key", ("past",), changes.select_of_past),
    Corner("alibi", "− slope × distance of query and key", ("alibi_slopes",), sizes=SQUARE),
    Corner(
        "alibi.offset", "− slope × distance, the last query beside the last key", ("alibi_slopes",), changes.offset_last
    ),
    Corner("sinks", "a logit for each head that takes weight", ("sinks",)),
    Corner(
        "sinks.empty_row", "a row that sees the sink only: output 0", ("sinks", "mask"), changes.mask_with_empty_rows
    ),
    Corner("sinks.large", "sinks whose exponentials overflow or vanish", ("sinks",), changes.large_sinks),
    Corner("sinks.long_keys", "sinks beside more keys than two tiles of 128 hold", ("sinks",), sizes={"keys": "long"}),
    Corner("sinks.by_query", "a logit for each query of each head", ("sinks",), sizes={"has_row_sinks": True}),
    Corner(
        "sinks.by_query_padding",
        "a logit for each query, beside padding of queries and keys",
        ("sinks",),
        changes.padded,
        {"has_row_sinks": True},
    ),
    Corner("sinks.without", "the weights of the softmax over the keys alone", ("sinks",), fields=WITHOUT_SINKS),
    Corner(
        "sinks.without_empty_row",
        "weights without sinks, where only the sink remains: 0",
        ("sinks", "mask"),
        changes.mask_with_empty_rows,
        fields=WITHOUT_SINKS,
    ),
    Corner(
        "sinks.without_large",
        "weights without sinks, beside a sink that takes all weight",
        ("sinks",),
        changes.large_sinks,
        fields=WITHOUT_SINKS,
    ),
    Corner("rotary", "pairs of features from both halves", ("rotary",), changes.rotary_positions),
    Corner(
        "rotary.interleaved",
        "pairs of adjacent features",
        ("rotary",),
        fields={"rotary": {"base": 500.0, "interleaved": True}},
    ),
    Corner("rotary.partial", "the first features only", ("rotary",), changes.rotary_partial),
    Corner("rotary.tables", "cosines and sines given", ("rotary",), changes.rotary_tables),
    Corner("rotary.past", "the cache is not rotated again", ("rotary", "past")),
    Corner("clip", "query, key and value are clipped, before the rotation", ("clip_qkv", "rotary")),
    Corner("clip.past", "the cache is not clipped again", ("clip_qkv", "past")),
    Corner("norm", "RMS norms of the features of a head", ("query_norm", "key_norm")),
    Corner("norm.rotary", "the norm comes before the rotation", ("query_norm", "key_norm", "rotary")),
    Corner(
        "norm.after_rotary",
        "the norm comes after the rotation",
        ("query_norm", "key_norm", "rotary"),
        sizes={"norm": {"position": "after"}},
    ),
    Corner(
        "norm.all_heads",
        "a norm of the features of all heads of a token together",
        NORMS,
        sizes={"norm": {"over": "all"}},
    ),
    Corner("norm.layer", "layer norms: the mean is subtracted first", NORMS, sizes=LAYER),
    Corner("norm.bias", "x / √(mean(x²) + eps) · weight + bias", NORMS, changes.biased_norms),
    Corner("norm.value", "norms of values", ("value_norm",)),
    Corner("norm.past", "the cache is not normalised again", (*NORMS, "past")),
    Corner("norm.zero_row", "a norm of zeros is 0", NORMS, changes.zero_rows),
    Corner("norm.equal_features", "a layer norm of equal numbers is its bias", NORMS, changes.constant_rows, LAYER),
    Corner("gate", "head outputs times gates", ("gate",)),
    Corner(
        "gate.by_head", "one gate for each query and head, negative ones and zeros too", change=changes.gate_by_head
    ),
    Corner(
        "gate.empty_row",
        "a row that sees no key, whatever its gates: output 0",
        ("gate", "mask"),
        changes.mask_with_empty_rows,
    ),
    Corner(
        "gate.padding", "queries beyond a length have output 0, whatever their gates", ("gate",), changes.query_lengths
    ),
    Corner("gate.map", "gates are the sigmoid of a map of the query", change=changes.mapped_gate("sigmoid", None)),
    Corner(
        "gate.map_by_head",
        "one gate for each head: softplus of a map with a bias",
        change=changes.mapped_gate("softplus", 1),
    ),
    Corner("past", "cached keys and values, with a causal mask", ("past", "is_causal"), sizes={"has_offset": False}),
    Corner(
        "past.one_query",
        "one causal query with a past sees the first of several new keys",
        ("past", "is_causal"),
        sizes={"has_offset": False, "queries": 1},
    ),
    Corner("logsumexp", "ln Σ exp(score)", fields=LOGSUMEXP),
    Corner(
        "logsumexp.empty_row",
        "−∞ for a row that sees no key",
        ("mask",),
        changes.mask_with_empty_rows,
        fields=LOGSUMEXP,
    ),
    Corner("logsumexp.sinks", "the sink included", ("sinks",), fields=LOGSUMEXP),
    Corner("normalization.sum", "scores divided by their sum", change=changes.sum_of_scores),
    Corner("sigmoid", "each score becomes a weight by itself", fields=SIGMOID),
    Corner(
        "sigmoid.empty_row",
        "a row that sees no key: output 0",
        ("mask",),
        changes.mask_with_empty_rows,
        fields=SIGMOID,
    ),
    Corner(
        "sigmoid.minus_infinity",
        "−∞ in a bias hides a key, or all keys of a row",
        ("bias",),
        changes.both(changes.bias_with_infinities, changes.bias_with_empty_row),
        fields=SIGMOID,
    ),
    Corner(
        "sigmoid.large_scores",
        "scores whose exponentials overflow",
        change=changes.large_scores,
        fields=SIGMOID,
    ),
    Corner("float64", "errors of double precision only", types=("float64",)),
    Corner("float16", "errors of half precision only", types=("float16",)),
    Corner("bfloat16", "errors of bfloat16 only", types=("bfloat16",)),
    Corner(
        "float16.equal_scores",
        "a mean of 4,097 values, which a sum in float16 does not hold",
        change=changes.equal_scores,
        sizes={"keys": 4097, "queries": 1, "heads": 1, "kv_heads": 1},
        types=("float16",),
    ),
    Corner("float16.large", "q kᵀ beyond 65504", change=changes.beyond_float16, types=("float16",)),
)
COMBINED: Final = Corner("combined", "many options at once")
# Tiles of keys that kernels for tensor cores use, and what is wrong at their ends, in suites of long cases alone.
LONG_TILES: Final = (*TILES, 512)
MOST: Final = 2 * max(LONG_TILES) + 1
TILE_CORNERS: Final = (
    *(
        Corner(
            f"tiles.{tile}",
            f"two tiles of {tile} keys, and a key",
            change=changes.tile_ends,
            sizes={"keys": 2 * tile + 1},
        )
        for tile in LONG_TILES
    ),
    Corner(
        "tiles.causal",
        f"j ≤ i, in two tiles of {max(LONG_TILES)} keys and a key",
        ("is_causal",),
        changes.tile_ends,
        {"queries": MOST, "keys": MOST, "heads": 1, "kv_heads": 1, "has_offset": False},
    ),
    Corner(
        "tiles.key_lengths",
        "keys that end with a tile of 512, or a key further; all later tiles are padding",
        change=changes.lengths_of_tiles,
        sizes={"keys": MOST},
    ),
)
