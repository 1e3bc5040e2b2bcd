"""Corners of gradients: what backward passes get wrong, where the forward pass is right."""

from __future__ import annotations

from typing import Final

from attention_service.comparison.recipes import KEYS_OF_TILE
from attention_service.conformance import changes
from attention_service.conformance.corners import FIRST, SQUARE, Corner

OUTPUT: Final = "grad_output"
LOGSUMEXP: Final = "grad_logsumexp"
# Types whose products nobody rounds on the way.
WIDE: Final = ("float32", "float64")
MORE_QUERIES: Final = {"queries": "more", "keys": "fewer"}
GRADIENT_CORNERS: Final = (
    Corner("gradients", "dQ, dK and dV for random gradients of the output", (OUTPUT,)),
    Corner("gradients.more_queries", "more queries than keys", (OUTPUT,), sizes=MORE_QUERIES),
    Corner(
        "gradients.long",
        "more queries and keys than two tiles of 128 hold",
        (OUTPUT,),
        sizes={"queries": KEYS_OF_TILE, "keys": "long"},
    ),
    Corner("gradients.value_dim", "values with fewer features than keys", (OUTPUT,), sizes={"value_dim": "narrow"}),
    Corner(
        "gradients.grouped_heads",
        "dK and dV are summed over the query heads of a group",
        (OUTPUT,),
        sizes={"heads": 6, "kv_heads": 2},
    ),
    Corner(
        "gradients.layouts", "axes in another order, heads packed, columns as tokens", (OUTPUT,), changes.any_layout
    ),
    Corner("gradients.large_scores", "scores whose exponentials overflow", (OUTPUT,), changes.large_scores, types=WIDE),
    Corner("gradients.softcap", "times 1 − tanh²(scaled / softcap)", (OUTPUT, "softcap")),
    Corner("gradients.softcap_near", "scores near the softcap", (OUTPUT, "softcap"), changes.near_cap, types=WIDE),
    Corner("gradients.bias", "that of a bias, summed over batch entries", (OUTPUT, "bias")),
    Corner("gradients.mask", "hidden keys have no part in any", (OUTPUT, "mask"), changes.mask_without_empty_rows),
    Corner(
        "gradients.empty_row",
        "0, and never NaN, of a row that sees no key",
        (OUTPUT, "mask"),
        changes.mask_with_empty_rows,
    ),
    Corner("gradients.key_mask", "0 of keys that each batch entry hides", (OUTPUT, "key_mask")),
    Corner("gradients.key_lengths", "0 of keys beyond the length of each batch entry", (OUTPUT, "key_lengths")),
    Corner("gradients.causal", "j ≤ i", (OUTPUT, "is_causal"), sizes=SQUARE),
    Corner("gradients.causal_first", "first query with first key, q < k", (OUTPUT, "is_causal"), fields=FIRST),
    Corner("gradients.causal_last", "last query with last key, q < k", (OUTPUT, "is_causal"), changes.offset_last),
    Corner(
        "gradients.causal_empty_rows",
        "last query with last key, q > k: 0 of the first rows",
        (OUTPUT, "is_causal"),
        changes.offset_last,
        MORE_QUERIES,
    ),
    Corner(
        "gradients.causal_more_queries",
        "first query with first key, q > k",
        (OUTPUT, "is_causal"),
        sizes=MORE_QUERIES,
        fields=FIRST,
    ),
    Corner(
        "gradients.window",
        "i − 4 ≤ j ≤ i + 2",
        (OUTPUT, "window"),
        sizes=SQUARE,
        fields={"window": {"left": 4, "right": 2}},
    ),
    Corner("gradients.sinks", "sinks take weight, and have gradients", (OUTPUT, "sinks")),
    Corner(
        "gradients.sinks_large", "sinks far above all scores, and far below", (OUTPUT, "sinks"), changes.large_sinks
    ),
    Corner(
        "gradients.cancellation",
        "values that are nearly the same: dP − D is far smaller than dP",
        (OUTPUT,),
        changes.nearly_equal_values,
        types=WIDE,
    ),
    Corner("gradients.logsumexp", "of output and logsumexp", (OUTPUT, LOGSUMEXP)),
    Corner("gradients.logsumexp_alone", "of the logsumexp alone: dV is 0", (LOGSUMEXP,)),
    Corner("gradients.zero", "0 for gradients of 0, whatever the scores are", (OUTPUT,), changes.zero_cotangent),
)
