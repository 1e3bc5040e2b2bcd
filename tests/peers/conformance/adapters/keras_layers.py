"""keras.layers.MultiHeadAttention and GroupQueryAttention, with maps that change nothing but the gate's."""

from __future__ import annotations

import math
import os
from typing import Any

os.environ.setdefault("KERAS_BACKEND", "torch")

import keras
import numpy as np

from attention_service.conformance.target import Unsupported
from tests.peers.conformance.adapters.request import Request, adapter


@adapter("mask", "key_mask", "is_causal", "projection", "query_offset", "window")
def multi_head(request: Request) -> Any:
    """The output of a layer."""
    b, h, q, d = request.query.shape
    k, e, g = request.lengths[1], request.value.shape[-1], request.key.shape[1]
    request.check_offset(0)
    arguments: dict[str, Any] = {}
    if "mask" in request:
        mask = request["mask"]
        if mask.ndim == 4 and mask.shape[1] > 1:
            raise Unsupported("no mask of its own for each head")
        arguments["attention_mask"] = np.broadcast_to(mask, (b, 1, q, k))[:, 0]
    if "key_mask" in request:
        arguments["key_mask"] = np.broadcast_to(request["key_mask"], (b, k))
    if "is_causal" in request:
        arguments["use_causal_mask"] = True
    kind = request.query.dtype.name
    gate = _gate(request)
    options = {
        "use_bias": False,
        "dtype": kind,
        "sliding_window": _sliding_window(request),
        "use_gate": gate is not None,
    }
    packed = [
        keras.ops.convert_to_tensor(array.transpose(0, 2, 1, 3).reshape(b, -1, array.shape[1] * array.shape[3]), kind)
        for array in (request.query, request.key, request.value)
    ]
    if g == h:
        layer = keras.layers.MultiHeadAttention(h, d, value_dim=e, output_shape=h * e, **options)
        layer.build(packed[0].shape, packed[2].shape, packed[1].shape)
    elif d == e:
        layer = keras.layers.GroupQueryAttention(d, h, g, **options)
        layer.build(packed[0].shape, packed[2].shape, packed[1].shape)
    else:
        raise Unsupported("as many features of values as of keys only")
    # Each is square if two of its axes are joined.
    for weight in layer.weights:
        identity = np.eye(math.isqrt(math.prod(weight.shape)))
        weight.assign((gate if gate is not None and "/gate/" in weight.path else identity).reshape(weight.shape))
    output = layer(packed[0], packed[2], key=packed[1], **arguments)
    heads = keras.ops.convert_to_numpy(output).reshape(b, q, h, e)
    return request.restored(heads.transpose(0, 2, 1, 3))


def _gate(request: Request) -> np.ndarray | None:
    """The kernel of the gate (in, out), whose activation is the sigmoid; None for no gate."""
    maps = request.fields.get("projection", {})
    if not maps:
        return None
    given = maps.get("gate", {})
    width = request.heads * request.value.shape[-1]
    if maps.keys() != {"gate"} or given.keys() != {"weight"} or given["weight"].shape[0] != width:
        raise Unsupported("a gate without a bias for each feature only")
    kernel: np.ndarray = given["weight"].T
    return kernel


def _sliding_window(request: Request) -> int | None:
    """One number for both sides, the query's own key counted; None for no window."""
    if "window" not in request:
        return None
    left, right = request["window"].get("left"), request["window"].get("right")
    if left is None or not (left == right or (right is None and "is_causal" in request)):
        raise Unsupported("one number for both sides of a window")
    return int(left) + 1
