"""PyTorch: scaled_dot_product_attention of torch.nn.functional, varlen_attn of torch.nn.attention.varlen."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Final

import numpy as np

from attention_service.attention.arrays import cast, is_float
from attention_service.engines.arguments import Arguments, options
from attention_service.engines.call import RAGGED, Call, Fields, Form, window_of
from attention_service.engines.tokens import (
    Rows,
    Table,
    Tokens,
    check_sequences,
    numbers,
    paged,
    ragged,
    repeated,
    slots,
)
from attention_service.errors import FieldConflict, InvalidArray, InvalidValue, MissingField, ShapeMismatch, shape

# Sequences that leading axes are broadcast to, at most, unless an argument has as many.
MOST: Final = 2**16


def sdpa(given: Arguments) -> Call:
    """scaled_dot_product_attention. Leading axes and heads are broadcast, as its matrix products do it."""
    arrays = {name: given.array(name) for name in ("query", "key", "value")}
    scored, lead = _leading(arrays, is_grouped=given.flag("enable_gqa"))
    query, key, value = (_tokens(name, array, lead[:-1]) for name, array in arrays.items())
    heads, q, k = lead[-1] if lead else 1, arrays["query"].shape[-2], arrays["key"].shape[-2]
    query = repeated(query, heads)
    if key.heads != value.heads:
        key, value = repeated(key, heads), repeated(value, heads)
    b = len(query.lengths)
    query = query._replace(rows=Rows(b, q, np.arange(b), np.zeros(b, np.int64), query.lengths))  # of the answer
    fields, names = options(given, query, scale="scale", softcap="", sinks="")
    mask, own = _mask(given, (*scored, q, k), lead[:-1])
    fields |= mask
    if given.flag("is_causal"):
        if "attn_mask" in given:
            raise FieldConflict.at("/is_causal", "attn_mask or is_causal", "both")
        fields["is_causal"] = True
    form = Form(
        lambda x: x.transpose(0, 2, 1, 3).reshape(*lead, q, x.shape[-1]),
        lambda x: x.transpose(0, 2, 1).reshape(*lead, q),
    )
    names |= {"mask": "attn_mask", "bias": "attn_mask"}
    return Call(query, key, value, form, fields, own, offset=None, names=names)


def _leading(arrays: Mapping[str, np.ndarray], *, is_grouped: bool) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The leading axes (…, h) of scores and of the output. Errors: ShapeMismatch for what torch does not broadcast."""
    leads = {}
    for name, array in arrays.items():
        if array.ndim < 2 + is_grouped:
            raise ShapeMismatch.of(f"/{name}", "(…, h, l, d)" if is_grouped else "(…, l, d)", array)
        leads[name] = array.shape[:-2]
        if is_grouped:
            *outer, own = array.shape[:-2]
            heads = leads["query"][-1]
            if not own or heads % own:
                raise ShapeMismatch.at(f"/{name}", f"a divisor of {heads}, the heads of query", str(own))
            leads[name] = (*outer, heads)
    scored = _broadcast("key", leads["query"], leads["key"], is_grouped=is_grouped)
    lead = _broadcast("value", scored, leads["value"], is_grouped=is_grouped)
    sequences = math.prod(lead[:-1])
    check_sequences("query", sequences)
    if sequences > max(MOST, *(math.prod(array.shape[:-3]) for array in arrays.values())):
        raise ShapeMismatch.at("/query", f"at most {MOST} sequences where axes are broadcast", str(sequences))
    return scored, lead


def _broadcast(name: str, axes: tuple[int, ...], own: tuple[int, ...], *, is_grouped: bool) -> tuple[int, ...]:
    """Both leading axes broadcast. name: of the argument that has its own. Errors: ShapeMismatch."""
    try:
        return np.broadcast_shapes(axes, own)
    except ValueError:
        more = "" if is_grouped else ", or enable_gqa for groups of heads"
        wanted = f"leading axes that broadcast with {shape(axes)}{more}"
        raise ShapeMismatch.at(f"/{name}", wanted, shape(own)) from None


def _tokens(name: str, array: np.ndarray, leading: tuple[int, ...]) -> Tokens:
    """The tokens of (…, h, l, d), or (l, d), broadcast to leading axes without heads. Errors: as of `slots`."""
    own, heads = array.shape[:-3], array.shape[-3] if array.ndim > 2 else 1
    by_head = array.reshape(math.prod(own), heads, *array.shape[-2:]).transpose(0, 2, 1, 3)
    count, length = by_head.shape[:2]
    slot = np.broadcast_to(np.arange(count).reshape(own), leading).reshape(-1)
    lengths = np.full(len(slot), length, np.int64)
    return slots(name, by_head, Rows(count, length, slot, np.zeros_like(slot), lengths))


def varlen(given: Arguments) -> Call:
    """varlen_attn: sequences beside each other; keys may lie in pages."""
    query = ragged(*given.named("query"), given.named("cu_seq_q"))
    if "block_table" in given:
        if "seqused_k" not in given:
            raise MissingField.at("/seqused_k", "the lengths of the sequences, beside block_table", "none")
        page = numbers("key", given.array("key"), 4, "pages, page, hk, d").shape[1]
        used, b = given.named("seqused_k"), len(query.lengths)
        table = Table.of_rows("block_table", given.array("block_table"), used, page, b)
        key, value = (paged(name, given.array(name), "NHD", table) for name in ("key", "value"))
    else:
        bounds, first = given.named("cu_seq_k"), given.maybe_named("seqused_k")
        key, value = (ragged(*given.named(name), bounds, first) for name in ("key", "value"))
    _check_groups(given, query, key)
    fields, names = options(given, query, scale="scale", softcap="", sinks="")
    sides = given.sides("window_size")
    if any(side is not None and side < -1 for side in sides):
        raise InvalidValue.of("/window_size", "sides of at least 0, or -1 for no bound", list(sides))
    window, moved = window_of("window_size", *(None if side == -1 else side for side in sides))
    return Call(query, key, value, RAGGED, fields | window, offset=moved, names=names)


def _check_groups(given: Arguments, query: Tokens, key: Tokens) -> None:
    if query.heads != key.heads and not given.flag("enable_gqa"):
        raise ShapeMismatch.at(f"/{key.name}", f"{query.heads} heads, or enable_gqa", str(key.heads))


def _mask(
    given: Arguments, scores: tuple[int, ...], leading: tuple[int, ...]
) -> tuple[Fields, Callable[[int], Fields] | None]:
    """attn_mask, for all sequences or of each, as (b, h, q, k), or with axes of length 1.

    scores: (…, h, q, k) that it is added to; leading: axes of the sequences. Errors: ShapeMismatch.
    """
    mask = given.maybe("attn_mask")
    if mask is None:
        return {}, None
    try:
        fits = np.broadcast_shapes(mask.shape, scores) == scores
    except ValueError:
        fits = False
    if not fits:
        raise ShapeMismatch.of("/attn_mask", f"what broadcasts to {shape(scores)}", mask)
    if mask.dtype.kind in "iu" and (not given.is_untyped("attn_mask") or np.isin(mask, (0, 1)).all()):
        hint = "integers would be added to the scores"
        raise InvalidArray.of("/attn_mask", "booleans, or floats that are added to the scores", mask, hint)
    field = "mask" if mask.dtype == np.bool_ else "bias"
    mask = mask.reshape((1,) * (4 - mask.ndim) + mask.shape)
    if math.prod(mask.shape[:-3]) == 1:
        return {field: mask.reshape(1, *mask.shape[-3:])}, None
    masks = np.broadcast_to(mask, (*leading, *mask.shape[-3:]))

    def own(sequence: int) -> Fields:
        part = masks[np.unravel_index(sequence, leading)]
        if is_float(part.dtype):  # an error of the request would name its only sequence
            cast(part, part.dtype, f"/attn_mask/{sequence}", minus_infinity=True)
        return {field: part[None]}

    return {}, own
