"""jax.nn.dot_product_attention."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from tests.peers.conformance.adapters.request import Request, adapter

jax.config.update("jax_enable_x64", True)


@adapter(
    "bias",
    "include",
    "is_causal",
    "key_lengths",
    "key_mask",
    "mask",
    "query_lengths",
    "query_offset",
    "scale",
    "window",
)
def dot_product(request: Request) -> Any:
    """Output and logsumexp of dot_product_attention."""
    b, h = request.query.shape[:2]
    q, k = request.lengths
    request.check_offset(0)
    arguments: dict[str, Any] = {"scale": request.scale, "is_causal": "is_causal" in request}
    if (mask := request.seen()) is not None:
        arguments["mask"] = np.broadcast_to(mask, (b, h, q, k))
    if "bias" in request:
        arguments["bias"] = np.broadcast_to(request["bias"], (b, h, q, k))
    if "window" in request:  # one number for each side: as many as there are where a side is unbounded
        arguments["local_window_size"] = request["window"].get("left", q), request["window"].get("right", k)
    for ours, theirs in (("query_lengths", "query_seq_lengths"), ("key_lengths", "key_value_seq_lengths")):
        if ours in request:
            arguments[theirs] = np.broadcast_to(request[ours], b).astype(np.int32)
    operands = [array.transpose(0, 2, 1, 3) for array in (request.query, request.key, request.value)]
    if not request.wants_logsumexp:
        return request.restored(np.asarray(jax.nn.dot_product_attention(*operands, **arguments)).transpose(0, 2, 1, 3))
    output, logsumexp = jax.nn.dot_product_attention(*operands, return_residual=True, **arguments)
    return {
        "output": request.restored(np.asarray(output).transpose(0, 2, 1, 3)),
        "logsumexp": request.restored_rows(np.asarray(logsumexp).transpose(0, 2, 1)),
    }
