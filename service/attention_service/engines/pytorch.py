"""PyTorch: scaled_dot_product_attention of torch.nn.functional, varlen_attn of torch.nn.attention.varlen."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from attention_service.attention.arrays import cast, is_float
from attention_service.engines.arguments import Arguments, options
from attention_service.engines.call import RAGGED, Call, Fields, Form, window_of
from attention_service.engines.tokens import Table, Tokens, dense, numbers, paged, ragged
from attention_service.errors import FieldConflict, InvalidValue, MissingField, ShapeMismatch, shape


def sdpa(given: Arguments) -> Call:
    """scaled_dot_product_attention."""
    arrays = {name: given.array(name) for name in ("query", "key", "value")}
    lead = arrays["query"].shape[:-2]
    for name, array in arrays.items():
        if array.ndim < 2 or array.ndim != len(lead) + 2 or array.shape[:-3] != lead[:-1]:
            raise ShapeMismatch.of(f"/{name}", "(…, h, l, d), leading axes as query", array)
    tokens = {}
    for name, array in arrays.items():
        heads = array.shape[-3] if lead else 1
        by_head = array.reshape(math.prod(lead[:-1]), heads, *array.shape[-2:])
        tokens[name] = dense(name, by_head.transpose(0, 2, 1, 3))
    _check_groups(given, tokens["query"], tokens["key"])
    fields, names = options(given, tokens["query"], scale="scale", softcap="", sinks="")
    q, k = arrays["query"].shape[-2], arrays["key"].shape[-2]
    mask, own = _mask(given, (*lead, q, k))
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
    return Call(tokens["query"], tokens["key"], tokens["value"], form, fields, own, offset=None, names=names)


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


def _mask(given: Arguments, scores: tuple[int, ...]) -> tuple[Fields, Callable[[int], Fields] | None]:
    """attn_mask, for all sequences or of each, as (b, h, q, k), or with axes of length 1. scores: (…, q, k).

    Errors: ShapeMismatch.
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
    field = "mask" if mask.dtype == np.bool_ else "bias"
    mask = mask.reshape((1,) * (4 - mask.ndim) + mask.shape)
    if math.prod(mask.shape[:-3]) == 1:
        return {field: mask.reshape(1, *mask.shape[-3:])}, None
    leading = scores[:-3]
    masks = np.broadcast_to(mask, (*leading, *mask.shape[-3:]))

    def own(sequence: int) -> Fields:
        part = masks[np.unravel_index(sequence, leading)]
        if is_float(part.dtype):  # an error of the request would name its only sequence
            cast(part, part.dtype, f"/attn_mask/{sequence}", minus_infinity=True)
        return {field: part[None]}

    return {}, own
