"""Wrong formulas of heads, operands, masks and keys."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from tests.helpers.formulas.attention import (
    Answer,
    Attention,
    band,
    causal,
    chunks,
    places,
    selected,
    softmax,
)
from tests.helpers.formulas.table import Mistake, mistake, tile


# Heads, operands and outputs.
def _tiled(a: Attention) -> np.ndarray:
    return np.asarray(np.arange(a.shape[1]) % a.key.shape[1])


mistake("heads.tiled", "grouped")(lambda a: a.but(key_head=_tiled(a), value_head=_tiled(a)).answer())
mistake("heads.first", "kv_heads")(lambda a: a.but(key_head=0 * a.key_head, value_head=0 * a.key_head).answer())
mistake("heads.keys_only", "grouped")(lambda a: a.but(value_head=_tiled(a)).answer())
mistake("heads.values_only", "grouped")(lambda a: a.but(key_head=_tiled(a)).answer())
mistake("heads.kv_reversed", "kv_heads")(
    lambda a: a.but(key_head=a.key_head.max() - a.key_head, value_head=a.key_head.max() - a.key_head).answer()
)
mistake("heads.reversed", "heads")(lambda a: (a.answer()[0][:, ::-1], None))


def _as_heads_first(array: np.ndarray) -> np.ndarray:
    """Memory (b, l, h, d) of an array (b, h, l, d), read as (b, h, l, d)."""
    return np.ascontiguousarray(array.transpose(0, 2, 1, 3)).reshape(array.shape)


@mistake("heads.layout", "heads", "kv_heads")
def _heads_layout(a: Attention) -> Answer:
    return a.but(**{name: _as_heads_first(getattr(a, name)) for name in ("query", "key", "value")}).answer()


mistake("query.layout", "heads")(lambda a: a.but(query=_as_heads_first(a.query)).answer())
mistake("keys.layout", "kv_heads")(lambda a: a.but(key=_as_heads_first(a.key)).answer())
mistake("values.layout", "kv_heads")(lambda a: a.but(value=_as_heads_first(a.value)).answer())
mistake("kv.layout", "kv_heads")(lambda a: a.but(key=_as_heads_first(a.key), value=_as_heads_first(a.value)).answer())
mistake("value.is_key", "same_dim")(
    lambda a: a.but(
        value=a.fields["key"].astype(np.float64), cache=None if a.cache is None else (a.cache[0], a.cache[0])
    ).answer()
)
mistake("output.zeros")(lambda a: (np.zeros_like(a.answer()[0]), None))
mistake("output.mean_value")(
    lambda a: (np.broadcast_to(a.values().mean(axis=2, keepdims=True), a.answer()[0].shape), None)
)


@mistake("output.packed", "heads")
def _output_packed(a: Attention) -> Answer:
    out = a.answer()[0]
    b, h, n, e = out.shape
    memory = np.ascontiguousarray(out.transpose(0, 2, 3, 1))  # b n e h
    return memory.reshape(b, n, h, e).transpose(0, 2, 1, 3), None


@mistake("output.unmoved", "heads")
def _output_unmoved(a: Attention) -> Answer:
    out = a.answer()[0]
    b, h, n, e = out.shape
    return np.ascontiguousarray(out).reshape(b, n, h, e).transpose(0, 2, 1, 3), None


mistake("features.first_part")(
    lambda a: a.but(base=None).answer(_of_products(a, _half(a, again=False))) if a.base is None else None
)
mistake("features.read_again")(
    lambda a: a.but(base=None).answer(_of_products(a, _half(a, again=True))) if a.base is None else None
)


def _half(a: Attention, *, again: bool) -> np.ndarray:
    query, key, _ = a.operands()
    half = query.shape[-1] // 2
    keys = key[..., :half]
    found: np.ndarray = query[..., :half] @ keys.swapaxes(-1, -2)
    return found + query[..., half:] @ keys.swapaxes(-1, -2) if again else found


def _of_products(a: Attention, products: np.ndarray) -> np.ndarray:
    """The scores of other products of query and key."""
    scores = products * a.scale
    scores = scores if a.cap is None else a.cap * np.tanh(scores / a.cap)
    return np.asarray(scores + sum(a.added.values()))


# Masks.
def without(*names: str) -> Mistake:
    def make(a: Attention) -> Answer:
        found = a.but()
        for name in names:
            found.masks.pop(name, None)
            found.added.pop(name, None)
        return found.answer()

    return make


def with_mask(name: str, make: Callable[[Attention], np.ndarray]) -> Mistake:
    def changed(a: Attention) -> Answer:
        found = a.but()
        found.masks[name] = make(a)
        return found.answer()

    return changed


mistake("causal.absent", "is_causal")(without("is_causal"))
mistake("window.absent", "window")(without("window"))
mistake("chunk.absent", "chunk_size")(without("chunk_size"))
mistake("mask.absent", "mask")(without("mask"))
mistake("padding.ignored", "key_mask")(without("key_mask", "key_lengths"))
mistake("segments.ignored", "segment_ids")(without("segment_ids"))
mistake("selected.absent", "selected_keys")(without("selected_keys"))
mistake("bias.absent", "bias")(without("bias"))
mistake("alibi.absent", "alibi_slopes")(without("alibi_slopes"))
mistake("causal.strict", "is_causal")(with_mask("is_causal", lambda a: causal(a, a.offset - 1)))
mistake("causal.top_left", "is_causal", "few", "offset")(with_mask("is_causal", lambda a: causal(a, 0)))
mistake("causal.bottom_right", "is_causal", "few", "offset")(
    with_mask("is_causal", lambda a: causal(a, a.shape[3] - a.shape[2]))
)
mistake("causal.offset_plus_one", "is_causal")(with_mask("is_causal", lambda a: causal(a, a.offset + 1)))
mistake("causal.first_offset", "is_causal", "few", "offset", "batches")(
    with_mask("is_causal", lambda a: causal(a, a.offset[0]))
)
mistake("chunk.no_offset", "chunk_size", "few", "offset")(with_mask("chunk_size", lambda a: chunks(a, 0)))
mistake("window.offset_ignored", "window", "few", "offset")(
    with_mask("window", lambda a: band(a, 0, **a.fields["window"]))
)
for _name, _left, _right in (("left_plus", 1, 0), ("left_minus", -1, 0), ("right_plus", 0, 1), ("right_minus", 0, -1)):
    mistake(f"window.{_name}_one", "window")(
        with_mask(
            "window",
            lambda a, left=_left, right=_right: band(  # type: ignore[misc]
                a, a.offset, a.fields["window"]["left"] + left, a.fields["window"]["right"] + right
            ),
        )
    )
mistake("window.one_sided", "window")(with_mask("window", lambda a: band(a, a.offset, a.fields["window"]["left"])))


@mistake("causal.last_row", "is_causal", "few", "offset")
def _causal_last_row(a: Attention) -> Answer:
    seen = causal(a, a.offset).copy()
    seen[:, :, -1] = True
    return with_mask("is_causal", lambda _: seen)(a)  # type: ignore[return-value]


@mistake("causal.added", "square")
def _causal_added(a: Attention) -> Answer | None:
    return None if "is_causal" in a.options else with_mask("is_causal", lambda a: causal(a, 0))(a)


@mistake("causal.by_tile", "is_causal")
def _causal_by_tile(a: Attention) -> Answer:
    i, j = places(a, a.offset)
    size, shows = tile(a), a.random.random() < 0.5
    seen = j // size <= i // size if shows else j // size < i // size
    return with_mask("is_causal", lambda _: np.broadcast_to(seen, a.shape))(a)  # type: ignore[return-value]


@mistake("causal.packed_group", "is_causal", "grouped")
def _causal_packed_group(a: Attention) -> Answer:
    _, h, n, m = a.shape
    group = h // a.key.shape[1]
    row, member = np.arange(n), (np.arange(h) % group)[:, None]
    kinds = row * group + member, row + member * n, np.broadcast_to(row // group, (h, n))
    last = kinds[a.random.integers(3)][None] + a.offset[:, None, None]
    return with_mask("is_causal", lambda _: np.arange(m) <= last[..., None])(a)  # type: ignore[return-value]


mistake("mask.inverted", "mask")(with_mask("mask", lambda a: ~a.masks["mask"]))
mistake("mask.transposed", "mask", "square")(with_mask("mask", lambda a: a.masks["mask"].swapaxes(2, 3)))
mistake("mask.first_batch", "mask", "batches")(
    with_mask("mask", lambda a: np.broadcast_to(a.masks["mask"][:1], a.shape))
)
mistake("mask.first_head", "mask", "heads")(
    with_mask("mask", lambda a: np.broadcast_to(a.masks["mask"][:, :1], a.shape))
)


@mistake("mask.inverted (bias)", "hiding_bias")
def _inverted_bias(a: Attention) -> Answer:
    found = a.but()
    found.added["bias"] = np.where(a.added["bias"] == 0, -np.inf, 0.0)
    scores = found.scores()
    return found.answer(np.where(np.isneginf(scores), 0, scores), found.seen() & ~np.isneginf(scores))


@mistake("mask.added", "mask")
def _mask_added(a: Attention) -> Answer:
    found = a.but()
    found.added["mask"] = found.masks.pop("mask").astype(np.float64)
    return found.answer()


@mistake("mask.finite", "mask", "empty")
def _mask_finite(a: Attention) -> Answer:
    return softmax(np.where(a.seen(), a.scores(), -1e4), a.values(), a.sinks)


@mistake("mask.in_max", "is_causal", "mask", "no_empty", "low")
def _mask_in_max(a: Attention) -> Answer:
    """Scores far below 0: in float32, exponentials of less than -104 are 0."""
    type_ = np.float64 if a.dtype == np.float64 else np.float32
    scores, seen = a.scores(), a.seen()
    top = np.where(seen, scores, -np.inf).max(-1, keepdims=True)
    top = np.where(seen.all(-1, keepdims=True), top, np.maximum(top, 0))
    powers = np.exp(np.where(seen, scores - top, -np.inf).astype(type_)).astype(np.float64)
    total = powers.sum(-1)
    if a.sinks is not None:
        total = total + np.exp(a.sinks - top[..., 0])
    with np.errstate(all="ignore"):
        return np.where(a.sees_any(), powers @ a.values() / total[..., None], 0), None


def _sum_of(a: Attention, counted: np.ndarray) -> Answer:
    """Attention whose sum holds the exponentials of these keys, hidden ones, too."""
    scores, seen = a.scores(), a.seen()
    all_scores = np.where(counted, scores, -np.inf)
    _, total = softmax(all_scores, a.values(), a.sinks)
    assert total is not None
    with np.errstate(invalid="ignore"):
        weights = np.where(seen, np.exp(scores - total[..., None]), 0)
    return weights @ a.values(), total


@mistake("padding.in_sum", "key_mask")
def _padding_in_sum(a: Attention) -> Answer:
    others = a.but()
    for name in ("key_mask", "key_lengths"):
        others.masks.pop(name, None)
    return _sum_of(a, others.seen() if a.random.random() < 0.5 else np.ones(a.shape, bool))


mistake("selected.none_is_last", "selected_keys")(
    with_mask(
        "selected_keys",
        lambda a: selected(a, np.where(a.fields["selected_keys"] < 0, a.shape[3] - 1, a.fields["selected_keys"])),
    )
)
mistake("selected.past_ignored", "selected_keys", "past")(
    with_mask(
        "selected_keys",
        lambda a: selected(a, np.where(a.fields["selected_keys"] < 0, -1, a.fields["selected_keys"] + a.past)),
    )
)


# Keys that are not read.
def only(make: Callable[[Attention], np.ndarray]) -> Mistake:
    """Attention that sees some of the keys (m,)."""
    return lambda a: a.answer(seen=a.seen() & make(a))


mistake("keys.last_dropped")(only(lambda a: np.arange(a.shape[3]) < a.shape[3] - 1))
mistake("keys.half")(only(lambda a: np.arange(a.shape[3]) < (a.shape[3] + a.random.integers(2)) // 2))
mistake("keys.second_half")(only(lambda a: np.arange(a.shape[3]) >= (a.shape[3] + a.random.integers(2)) // 2))
mistake("keys.as_queries", "few")(only(lambda a: np.arange(a.shape[3]) < a.shape[2]))
mistake("keys.last_split", "long")(
    only(lambda a: np.arange(a.shape[3]) < -(-a.shape[3] // (s := int(a.random.choice([4, 8])))) * (s - 1))
)
mistake("cache.ignored", "past")(only(lambda a: np.arange(a.shape[3]) >= a.past))


@mistake("keys.tail_dropped", "long")
def _tail_dropped(a: Attention) -> Answer:
    size = tile(a)
    return a.answer(seen=a.seen() & (np.arange(a.shape[3]) < a.shape[3] // size * size))


@mistake("keys.share_read", "long")
def _share_read(a: Attention) -> Answer:
    m = a.shape[3]
    read = np.arange(m) % -(-m // int(a.random.choice([2, 4, 8])))
    query, key, value = a.operands()
    scores = _of_products(a, (query @ key.swapaxes(-1, -2))[..., read])
    if "sigmoid" in a.options:
        return np.where(a.seen(), 1 / (1 + np.exp(-scores)), 0) @ value[:, :, read], None
    return softmax(np.where(a.seen(), scores, -np.inf), value[:, :, read], a.sinks)


# Rows that see no key.
def where_empty(make: Callable[[Attention], np.ndarray]) -> Mistake:
    def changed(a: Attention) -> Answer:
        return np.where(a.sees_any(), a.answer()[0], make(a)), None

    return changed


mistake("empty.uniform", "mask", "empty")(where_empty(lambda a: a.values().mean(axis=2, keepdims=True)))
mistake("empty.nan", "mask", "empty")(where_empty(lambda a: np.full((1, 1, 1, 1), np.nan)))
mistake("empty.last_key", "mask", "empty")(where_empty(lambda a: a.values()[:, :, -1:]))


@mistake("empty.hidden_keys", "is_causal", "left_padding", "square")
def _hidden_keys(a: Attention) -> Answer | None:
    if len(a.masks) != 2 or "sigmoid" in a.options:
        return None
    one, two = a.masks["is_causal"], a.masks["key_mask"]
    other = (one, two, one ^ two, np.ones_like(one))[a.random.integers(4)]
    seen = np.where((one & two).any(-1, keepdims=True), one & two, other)
    return a.answer(seen=seen)
