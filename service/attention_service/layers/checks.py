"""Is a stored layer one: are its fields those of a request, and do their shapes agree with each other?

All is checked that does not depend on the request, by the plan of a request for one token.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import Any, Final

import numpy as np

from attention_service.attention.arrays import BFLOAT16, is_float, widest
from attention_service.attention.planning import make_plan
from attention_service.attention.spec import SOURCES, AttentionSpec, LinearMap, Norm, Projection
from attention_service.codecs.safetensors import dtype_of
from attention_service.errors import BadRequest, InvalidRequest
from attention_service.layers.layer import LAYER, Layer
from attention_service.layers.tensors import BadFile, as_bad_file
from attention_service.schemas.request import AttentionRequest
from attention_service.schemas.validate import validate

# Fields of a request that no layer has: what is computed, where, and which parts of it are returned.
OF_REQUESTS: Final = frozenset(
    {*SOURCES, LAYER, "past_key", "past_value", "query_tokens", "key_tokens", "backend", "device"}
    | {"include", "select_heads", "select_queries", "average_heads", "top_k", "encoding"}
)
TOO_DEEP: Final = "has options that are nested too deeply"
# Features of a head of a layer that would take any even number.
ANY_FEATURES: Final = 2
# Features of a token at most. More would take the check of a few bytes of options much memory.
MAX_FEATURES: Final = 2**22
# Checked headers that are kept. Layers of one model often have the same shapes and options.
MAX_CHECKED: Final = 64


def check(layer: Layer) -> None:
    """Check a layer with all its numbers. Errors: BadFile."""
    _check(layer, widest([array.dtype for array in layer.arrays.values()]))


def check_header(options: Mapping[str, Any], tensors: Iterable[tuple[str, str, tuple[int, ...]]]) -> None:
    """Check a layer by its options, and the names, types and shapes of its tensors. Errors: BadFile."""
    try:
        reason = _fault_of(json.dumps(options), tuple(tensors))
    except RecursionError:
        reason = TOO_DEEP
    if reason:
        raise BadFile(reason)


@lru_cache(MAX_CHECKED)
def _fault_of(options: str, tensors: tuple[tuple[str, str, tuple[int, ...]], ...]) -> str:
    """What `check_header` finds, "" if nothing is wrong. options: as JSON"""
    try:
        arrays = {name: _stand_in(name, dtype, shape) for name, dtype, shape in tensors}
        _check(Layer("", "", "", json.loads(options), arrays), BFLOAT16, by_shape=True)
    except BadFile as error:
        return str(error)
    return ""


def _stand_in(name: str, dtype: str, shape: tuple[int, ...]) -> np.ndarray:
    """An array of this shape and kind, which takes no memory. All floats have one type, so that no cast copies them."""
    with as_bad_file():
        found = dtype_of(name, dtype)
    return np.broadcast_to(np.zeros((), BFLOAT16 if is_float(found) else found), shape)


def _check(layer: Layer, dtype: np.dtype, *, by_shape: bool = False) -> None:
    """Check a layer by a request of this type. by_shape: True for one whose arrays only stand for its own

    Errors: BadFile.
    """
    try:
        known = layer.fields
        strange = sorted(OF_REQUESTS & known.keys())
        if strange:
            raise BadFile(f"has {strange[0]}, which a request has and no layer")
        spec = validate(AttentionRequest, known).attention_spec(frozenset())
        if by_shape:
            spec = spec._replace(dtype=None)  # to which all arrays would be cast
        make_plan(spec._replace(**_one_token(spec, dtype)))
    except (BadRequest, InvalidRequest) as error:
        fault = error.faults[0]
        place = fault.pointer.lstrip("/").replace("/", ".")
        raise BadFile(f"is no layer: {place}: expected {fault.expected}, got {fault.got}") from None
    except RecursionError:
        raise BadFile(TOO_DEEP) from None


def _one_token(spec: AttentionSpec, dtype: np.dtype) -> dict[str, Any]:
    """Query, key and value of one token each, with as many features as the fields of a layer ask for.

    Fields that contradict each other leave no right number. Then any does: the plan says what is wrong.
    """
    maps = spec.projection or Projection()
    query, key, value = (_size_of(linear) for linear in (maps.query, maps.key, maps.value))
    heads = spec.num_heads or _heads_of(maps.query) or 1
    kv_heads = spec.num_kv_heads or _heads_of(maps.key) or _heads_of(maps.value) or heads
    d = _head_dim(spec, heads, kv_heads)
    e = _value_dim(spec, heads, kv_heads) or d
    layout = spec.layout or "ld"
    found = {}
    for name, size, count, features in (
        ("query", query, heads, d), ("key", key, kv_heads, d), ("value", value, kv_heads, e),
    ):  # fmt: skip
        lengths = {"h": count, "d": features if "h" in layout else size[1] if size else count * features}
        shape = [lengths.get(axis) or 1 for axis in layout]
        if math.prod(shape) > MAX_FEATURES:
            raise BadFile(f"asks for a {name} of {math.prod(shape)} features; expected at most {MAX_FEATURES}")
        found[name] = np.zeros(shape, dtype)
    return found


def _head_dim(spec: AttentionSpec, heads: int, kv_heads: int) -> int:
    """The features of a head of queries and keys: as the maps make them, else as other fields need them."""
    maps = spec.projection or Projection()
    rotary = spec.rotary
    sizes = [
        _per_head(maps.query, heads),
        _per_head(maps.key, kv_heads),
        _of_norm(spec.query_norm, heads),
        _of_norm(spec.key_norm, kv_heads),
        _last(spec.relative_keys.key) if spec.relative_keys else None,
        # Without a map, what goes into that of the gates is the queries.
        size[1] // heads if maps.query is None and (size := _size_of(maps.gate)) else None,
        # It may be more: not all features need to turn.
        rotary.dim if rotary else None,
        2 * (_last(rotary.cos) or 0) if rotary else None,
    ]
    return next((size for size in sizes if size and size > 0), ANY_FEATURES)


def _value_dim(spec: AttentionSpec, heads: int, kv_heads: int) -> int | None:
    """The features of a head of values: as the map makes them, else as other fields need them; None for any."""
    maps = spec.projection or Projection()
    output = _size_of(maps.output)
    of_gate = _per_head(maps.gate, heads)
    sizes = [
        _per_head(maps.value, kv_heads),
        output[1] // heads if output else None,
        _of_norm(spec.value_norm, kv_heads),
        _of_norm(spec.output_norm, heads),
        of_gate if of_gate != 1 else None,  # one gate for each head goes with any
        _last(spec.gate) if _last(spec.gate) != 1 else None,
    ]
    return next((size for size in sizes if size), None)


def _last(array: np.ndarray | None) -> int | None:
    """The length of the last axis; None without an array, or for a single number."""
    return int(array.shape[-1]) if array is not None and array.ndim else None


def _of_norm(norm: Norm | None, heads: int) -> int | None:
    """The features of a head that the weight or bias of a norm is for."""
    array = None if norm is None else norm.bias if norm.weight is None else norm.weight
    if norm is None or array is None or not array.ndim:
        return None
    return int(array.shape[-1]) // (heads if norm.over == "all" else 1)


def _per_head(linear: LinearMap | None, heads: int) -> int | None:
    """The features of a head that come out of a map."""
    size = _size_of(linear)
    return size[0] // heads if size else None


def _size_of(linear: LinearMap | None) -> tuple[int, int] | None:
    """The features that come out of a map, those of all heads, and that go in; None if it has no matrix."""
    matrix = _matrix_of(linear)
    if linear is None or matrix is None or matrix.ndim < 2:
        return None
    *heads, out, into = matrix.shape if linear.weight is not None else (*matrix.shape[:-2], *matrix.shape[:-3:-1])
    return math.prod(heads) * out, into


def _heads_of(linear: LinearMap | None) -> int | None:
    """The heads of a map that has a matrix for each."""
    matrix = _matrix_of(linear)
    return int(matrix.shape[0]) if matrix is not None and matrix.ndim == 3 else None


def _matrix_of(linear: LinearMap | None) -> np.ndarray | None:
    return None if linear is None else linear.kernel if linear.weight is None else linear.weight
