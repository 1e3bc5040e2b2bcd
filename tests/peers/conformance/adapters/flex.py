"""torch.nn.attention.flex_attention, not compiled."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch.nn.attention.flex_attention import AuxRequest, create_block_mask, flex_attention

from attention_service.conformance.target import Unsupported
from tests.peers.conformance.adapters.request import Request, adapter
from tests.peers.conformance.adapters.torch_functions import tensor

Predicate = Callable[[Any, Any, Any, Any], Any]
Edit = Callable[[Any, Any, Any, Any, Any], Any]


@adapter(
    "alibi_slopes",
    "bias",
    "chunk_size",
    "include",
    "is_causal",
    "key_lengths",
    "key_mask",
    "mask",
    "query_lengths",
    "query_offset",
    "scale",
    "segment_ids",
    "softcap",
    "window",
)
def flex(request: Request) -> Any:
    """Output and logsumexp of flex_attention, with a block mask for all that hides, and a score_mod for the rest."""
    q, k = request.lengths
    b, h = request.query.shape[:2]
    if request.offset is None and q != k and {"is_causal", "window"} & request.fields.keys():
        raise Unsupported("its mask says where queries are")
    arguments: dict[str, Any] = {"enable_gqa": request.groups > 1, "scale": request.fields.get("scale")}
    if np.ndim(arguments["scale"]):
        arguments["scale"] = 1.0  # one of each head is in the score_mod
    if hides := list(_predicates(request)):

        def visible(b: Any, h: Any, i: Any, j: Any) -> Any:
            seen = hides[0](b, h, i, j)
            for hide in hides[1:]:
                seen = seen & hide(b, h, i, j)
            return seen

        arguments["block_mask"] = create_block_mask(visible, b, h, q, k, device="cpu")
    if edits := list(_edits(request)):

        def score(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
            for edit in edits:
                s = edit(s, b, h, i, j)
            return s

        arguments["score_mod"] = score
    operands = (tensor(request.query), tensor(request.key), tensor(request.value))
    if not request.wants_logsumexp:
        return request.restored(flex_attention(*operands, **arguments))
    output, aux = flex_attention(*operands, return_aux=AuxRequest(lse=True), **arguments)
    return {"output": request.restored(output), "logsumexp": request.restored_rows(aux.lse)}


def _predicates(request: Request) -> Iterator[Predicate]:
    """What hides keys, each True where query i sees key j."""
    offset = _offset(request)
    if (mask := request.seen()) is not None:
        full = tensor(np.broadcast_to(mask, (*request.query.shape[:2], *request.lengths)))
        yield lambda b, h, i, j: full[b, h, i, j]
    if "key_lengths" in request:
        keys = _per_batch(request, request["key_lengths"])
        yield lambda b, h, i, j: j < keys[b]
    if "query_lengths" in request:
        queries = _per_batch(request, request["query_lengths"])
        yield lambda b, h, i, j: i < queries[b]
    if "segment_ids" in request:
        of_query, of_key = (_tokens(request, request["segment_ids"][role]) for role in ("query", "key"))
        yield lambda b, h, i, j: of_query[b, i] == of_key[b, j]
    if "is_causal" in request:
        yield lambda b, h, i, j: j <= i + offset[b]
    if "chunk_size" in request:
        size = request["chunk_size"]
        yield lambda b, h, i, j: (i + offset[b]) // size == j // size
    window = request.fields.get("window", {})
    if "left" in window:
        left = window["left"]
        yield lambda b, h, i, j: j >= i + offset[b] - left
    if "right" in window:
        right = window["right"]
        yield lambda b, h, i, j: j <= i + offset[b] + right


def _edits(request: Request) -> Iterator[Edit]:
    """What changes scores, in order."""
    if np.ndim(request.fields.get("scale", 0)):
        scales = tensor(request["scale"])
        yield lambda s, b, h, i, j: s * scales[h]
    if "softcap" in request:
        cap = request["softcap"]
        yield lambda s, b, h, i, j: cap * torch.tanh(s / cap)
    if "bias" in request:
        bias = tensor(np.broadcast_to(request["bias"], (*request.query.shape[:2], *request.lengths)))
        yield lambda s, b, h, i, j: s + bias[b, h, i, j]
    if "alibi_slopes" in request:
        slopes, offset = tensor(request["alibi_slopes"]), _offset(request)
        yield lambda s, b, h, i, j: s - slopes[h] * (i + offset[b] - j).abs()


def _offset(request: Request) -> torch.Tensor:
    return _per_batch(request, 0 if request.offset is None else request.offset)


def _per_batch(request: Request, numbers: Any) -> torch.Tensor:
    return tensor(np.broadcast_to(numbers, request.query.shape[:1]))


def _tokens(request: Request, ids: np.ndarray) -> torch.Tensor:
    return tensor(np.broadcast_to(ids, (request.query.shape[0], ids.shape[-1])))
