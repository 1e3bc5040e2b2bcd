"""torch.nn.functional.scaled_dot_product_attention and torch.nn.MultiheadAttention."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch.nn.attention.bias import causal_lower_right

from attention_service.attention.arrays import BFLOAT16
from attention_service.conformance.target import Unsupported
from tests.peers.conformance.adapters.request import Request, adapter


def tensor(array: np.ndarray) -> torch.Tensor:
    """An array as a tensor of the same type."""
    array = np.array(array, order="C")  # writable
    if array.dtype == BFLOAT16:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


@adapter("mask", "key_mask", "bias", "is_causal", "query_offset", "scale")
def scaled_dot_product(request: Request) -> Any:
    """The output of scaled_dot_product_attention."""
    q, k = request.lengths
    request.check_offset(0, k - q)
    arguments: dict[str, Any] = {"enable_gqa": request.groups > 1}
    if request.scale is not None:
        arguments["scale"] = request.scale
    masks: list[Any] = []
    if (seen := request.seen()) is not None:
        masks.append(tensor(seen))
    if "bias" in request:
        masks.append(tensor(request["bias"]))
    if "is_causal" in request:
        if request.offset is not None and request.offset[0] != 0:
            masks.append(causal_lower_right(q, k))
        else:
            arguments["is_causal"] = True
    if len(masks) + ("is_causal" in arguments) > 1:
        raise Unsupported("one of attn_mask and is_causal only")
    operands = (tensor(request.query), tensor(request.key), tensor(request.value))
    attention = torch.nn.functional.scaled_dot_product_attention
    return request.restored(attention(*operands, attn_mask=masks[0] if masks else None, **arguments))


@adapter("mask", "key_mask", "bias", "is_causal", "query_offset")
def multihead(request: Request) -> Any:
    """The output of MultiheadAttention with maps that change nothing, and with weights, as it returns by default."""
    b, h, q, d = request.query.shape
    k = request.lengths[1]
    request.check_offset(0)
    if request.groups > 1 or request.value.shape[-1] != d:
        raise Unsupported("as many key/value heads as query heads, and as many features of values only")
    kind = tensor(request.query).dtype
    module = torch.nn.MultiheadAttention(h * d, h, bias=False, batch_first=True, dtype=kind).eval()
    identity = torch.eye(h * d, dtype=kind)
    arguments: dict[str, Any] = {}
    if "key_mask" in request:
        hidden = ~np.atleast_2d(request["key_mask"])
        arguments["key_padding_mask"] = tensor(np.broadcast_to(hidden, (b, k)))
    if len(request.fields.keys() & {"mask", "bias", "is_causal"}) > 1:
        raise Unsupported("one attn_mask only")
    if "mask" in request:
        arguments["attn_mask"] = tensor(np.broadcast_to(~request["mask"], (b, h, q, k)).reshape(b * h, q, k))
    if "bias" in request:
        arguments["attn_mask"] = tensor(np.broadcast_to(request["bias"], (b, h, q, k)).reshape(b * h, q, k))
    if "is_causal" in request:
        if q != k:
            raise Unsupported("no causal mask for other numbers of keys than queries")
        mask = torch.nn.Transformer.generate_square_subsequent_mask(q, dtype=kind)
        arguments |= {"attn_mask": mask, "is_causal": True}
    packed = [
        tensor(array.transpose(0, 2, 1, 3).reshape(b, -1, h * d))
        for array in (request.query, request.key, request.value)
    ]
    with torch.no_grad():
        module.in_proj_weight.copy_(identity.repeat(3, 1))
        module.out_proj.weight.copy_(identity)
        output, _ = module(*packed, **arguments)
    return request.restored(output.reshape(b, q, h, d).permute(0, 2, 1, 3))
