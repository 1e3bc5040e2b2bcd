"""Wrong attention by formulas: random requests, and what a kernel that makes a mistake returns for them.

Plain NumPy in float64, written from the sentences of docs/mistakes.md and docs/attention.md: no line of the product runs
here, so that a mistake is what its sentence says, and not what the search for it computes.

Axes: b batch entries, h query heads, g key/value heads, n queries, m keys (those of a cache first), d and e features.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from copy import copy
from dataclasses import dataclass, field
from typing import Any, Final

import ml_dtypes
import numpy as np

LOG2E: Final = math.log2(math.e)
TYPES: Final = (np.float32, np.float32, ml_dtypes.bfloat16, np.float16, np.float64)
TILES: Final = (16, 32, 64)
MASKS: Final = ("is_causal", "window", "chunk_size", "mask", "key_mask", "key_lengths", "segment_ids", "selected_keys")
# Options that a request may have beside those that its mistake needs.
EXTRAS: Final = (*MASKS[:2], *MASKS[3:5], "bias", "alibi_slopes", "softcap", "sinks", "rotary", "past", "clip_qkv")
Answer = tuple[np.ndarray, np.ndarray | None]


@dataclass
class Attention:
    """A request, and the parts of its formula, which a mistake replaces.

    fields: of the request, as it is sent; options: which it has
    query, key, value: (b, h or g, tokens, features), after clipping and norms, before the rotation; of new tokens
    cache: keys and values of the past, (b, g, past, features)
    positions: of new queries and keys, for the rotation; base, pairs: of the rotation, "halves" or "neighbours"
    key_head, value_head: (h,), which each head reads
    scale: one number, or (h, 1, 1); cap: of the scores; sinks: (h, 1)
    offset: (b,), the key at the place of the first query
    masks, added: by the name of the option, (b, h, n, m) each
    """

    random: np.random.Generator
    dtype: Any
    fields: dict[str, Any] = field(default_factory=dict)
    options: frozenset[str] = frozenset()
    query: np.ndarray = field(default_factory=lambda: np.zeros(0))
    key: np.ndarray = field(default_factory=lambda: np.zeros(0))
    value: np.ndarray = field(default_factory=lambda: np.zeros(0))
    cache: tuple[np.ndarray, np.ndarray] | None = None
    base: float | None = None
    pairs: str = "halves"
    positions: tuple[np.ndarray, np.ndarray] = (np.zeros(0), np.zeros(0))
    key_head: np.ndarray = field(default_factory=lambda: np.zeros(0, int))
    value_head: np.ndarray = field(default_factory=lambda: np.zeros(0, int))
    scale: Any = 1.0
    cap: float | None = None
    sinks: np.ndarray | None = None
    offset: np.ndarray = field(default_factory=lambda: np.zeros(1, int))
    masks: dict[str, np.ndarray] = field(default_factory=dict)
    added: dict[str, np.ndarray] = field(default_factory=dict)

    def but(self, **parts: Any) -> Attention:
        """The same with other parts."""
        found = copy(self)
        found.masks, found.added = dict(self.masks), dict(self.added)
        for name, part in parts.items():
            setattr(found, name, part)
        return found

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """b, h, n, m."""
        b, h, n, _ = self.query.shape
        return b, h, n, self.key.shape[2] + self.past

    @property
    def past(self) -> int:
        return 0 if self.cache is None else self.cache[0].shape[2]

    def operands(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Query, and for each query head its keys and values, rotated."""
        query, key = self.query, self.key
        if self.base is not None:
            query, key = (
                rotated(one, places, self.base, self.pairs)
                for one, places in zip((query, key), self.positions, strict=True)
            )
        value = self.value
        if self.cache is not None:
            key, value = (np.concatenate(both, axis=2) for both in zip(self.cache, (key, value), strict=True))
        return query, key[:, self.key_head], value[:, self.value_head]

    def products(self) -> np.ndarray:
        query, key, _ = self.operands()
        return np.asarray(np.einsum("bhnd,bhmd->bhnm", query, key))

    def scores(self) -> np.ndarray:
        """Scaled, capped, and with what is added."""
        scores = self.products() * self.scale
        if self.cap is not None:
            scores = self.cap * np.tanh(scores / self.cap)
        return np.asarray(scores + sum(self.added.values()))

    def seen(self) -> np.ndarray:
        seen = np.ones(self.shape, bool)
        for mask in self.masks.values():
            seen = seen & mask
        return seen

    def values(self) -> np.ndarray:
        return self.operands()[2]

    def answer(self, scores: np.ndarray | None = None, seen: np.ndarray | None = None) -> Answer:
        """Output and logsumexp, of these scores and masks if they are given."""
        scores, seen = self.scores() if scores is None else scores, self.seen() if seen is None else seen
        if "sigmoid" in self.options:
            return np.where(seen, 1 / (1 + np.exp(-scores)), 0) @ self.values(), None
        return softmax(np.where(seen, scores, -np.inf), self.values(), self.sinks)


def softmax(scores: np.ndarray, values: np.ndarray, sinks: np.ndarray | None = None) -> Answer:
    """Output and logsumexp of scores of which hidden ones are minus infinity; 0 for a row without any."""
    every = (
        scores
        if sinks is None
        else np.concatenate([scores, np.broadcast_to(sinks[..., None], (*scores.shape[:3], 1))], 3)
    )
    top = np.where(np.isneginf(every.max(-1)), 0, every.max(-1))
    total = np.exp(every - top[..., None]).sum(-1)
    weights = np.exp(scores - top[..., None]) / np.where(total, total, 1)[..., None]
    with np.errstate(divide="ignore"):
        return weights @ values, top + np.log(total)


def rotated(array: np.ndarray, places: np.ndarray, base: float, pairs: str) -> np.ndarray:
    """Tokens (…, l, d) whose pairs of features are turned by their places times base ** (-2 i / d)."""
    d = array.shape[-1]
    angles = places[:, None] * base ** (-np.arange(d // 2) * 2 / d)
    cos, sin = np.cos(angles), np.sin(angles)
    if pairs == "halves":
        x, y = array[..., : d // 2], array[..., d // 2 :]
        return np.concatenate([x * cos - y * sin, y * cos + x * sin], axis=-1)
    x, y = array[..., ::2], array[..., 1::2]
    return np.stack([x * cos - y * sin, y * cos + x * sin], axis=-1).reshape(array.shape)


def normed(array: np.ndarray, weight: np.ndarray) -> np.ndarray:
    """The RMS norm of the features of each token."""
    return np.asarray(array / np.sqrt(np.mean(array**2, axis=-1, keepdims=True) + 1e-6) * weight)


def request(random: np.random.Generator, needs: tuple[str, ...]) -> Attention:
    """A random request that has some options. needs: options, and words on sizes"""
    found = Attention(random, TYPES[random.integers(len(TYPES))])
    options = {*needs} | {name for name in EXTRAS if random.random() < 0.12}
    if "sigmoid" in options:
        options -= {"sinks"}
    b, g = int(random.integers(1, 4)), int(random.integers(1, 4))
    group = int(random.integers(1, 4))
    if "grouped" in options:
        g, group = int(random.integers(2, 4)), int(random.integers(2, 4))
    b = max(b, 2) if "batches" in options else b
    if "heads" in options and g * group < 2:
        group = 2
    if "kv_heads" in options:
        g = max(g, 2)
    if "ungrouped" in options:
        group = 1
    d = int(random.choice([4, 8, 16]))
    e = d if "same_dim" in options or random.random() < 0.4 else int(random.choice([5, 8, 12]))
    if "other_dim" in options:
        e = d + 2
    m = int(random.choice([23, 37, 67, 131])) if "long" not in options else int(random.choice([67, 131, 149]))
    n = m if "square" in options or random.random() < 0.4 else int(random.choice([5, 13, 19]))
    if "few" in options:
        n = int(random.choice([5, 13, 19]))
    past = int(random.integers(2, 6)) if "past" in options else 0
    n = min(n, m - past) if "square" not in options else n
    if "square" in options:
        options -= {"past"}
        past = 0

    def normal(*shape: int, spread: float = 1.0) -> np.ndarray:
        return np.asarray(random.normal(size=shape) * spread).astype(found.dtype)

    query = normal(b, g * group, n, d, spread=float(random.choice([1.0, 2.5])))
    key = normal(b, g, m - past, d)
    value = (normal(b, g, m - past, e) + random.normal(size=(1, g, 1, 1)) * 2).astype(found.dtype)
    found.fields = {"query": query, "key": key, "value": value, "layout": "bhld"}
    found.options = frozenset(options)
    found.query, found.key, found.value = (one.astype(np.float64) for one in (query, key, value))
    found.key_head = found.value_head = np.arange(g * group) // group
    found.scale = 1 / math.sqrt(d)
    if past:
        cached = normal(b, g, past, d), normal(b, g, past, e)
        found.fields |= {"past_key": cached[0], "past_value": cached[1]}
        found.cache = (cached[0].astype(np.float64), cached[1].astype(np.float64))
    _steps(found, past)
    _scores(found)
    _masks(found, past)
    return found


def _floats(found: Attention, array: np.ndarray) -> np.ndarray:
    return array.astype(np.float64 if found.dtype == np.float64 else np.float32)


def _steps(found: Attention, past: int) -> None:
    """Clip, normalise and rotate."""
    options, random, d = found.options, found.random, found.query.shape[-1]
    if "clip_qkv" in options:
        found.fields["clip_qkv"] = 0.8
        found.query, found.key, found.value = (np.clip(x, -0.8, 0.8) for x in (found.query, found.key, found.value))
    if "norms" in options:
        for name in ("query", "key"):
            weight = _floats(found, random.normal(size=d) + 1)
            found.fields[f"{name}_norm"] = {"weight": weight, "eps": 1e-6}
            setattr(found, name, normed(getattr(found, name), weight.astype(np.float64)))
    if "rotary" in options:
        found.base, found.pairs = 500.0, "neighbours" if random.random() < 0.5 else "halves"
        found.fields["rotary"] = {"base": 500.0, "interleaved": found.pairs == "neighbours"}
        found.positions = past + np.arange(found.query.shape[2]), past + np.arange(found.key.shape[2])


def _scores(found: Attention) -> None:
    """Scale, cap, bias, slopes and sinks."""
    options, random, (b, h, n, m) = found.options, found.random, found.shape
    if "scale" in options or random.random() < 0.15:
        found.fields["scale"] = found.scale = float(random.choice([0.2, 0.5]))
    if "zero_scale" in options:
        found.fields["scale"] = found.scale = 0.0
    if "head_scales" in options:
        scales = _floats(found, random.uniform(0.2, 0.8, h))
        found.fields["scale"], found.scale = scales, scales.astype(np.float64)[:, None, None]
    if "softcap" in options:
        found.fields["softcap"] = found.cap = float(random.choice([1.5, 3.0]))
    if "bias" in options:
        bias = _floats(found, random.normal(size=(1, h, n, m)))
        found.fields["bias"], found.added["bias"] = bias, np.broadcast_to(bias.astype(np.float64), found.shape)
    if "hiding_bias" in options:
        low = float(random.choice([-np.inf, -1e4, -1e9, np.finfo(np.float32).min]))
        hidden = random.random((1, h, n, m)) < 0.4
        hidden[..., 0], hidden[..., -1] = False, True
        bias = _floats(found, np.where(hidden, low, 0.0))
        found.fields["bias"], found.added["bias"] = bias, np.broadcast_to(bias.astype(np.float64), found.shape)
    if "sinks" in options:
        sinks = _floats(found, random.normal(size=h) * 2)
        found.fields["sinks"], found.sinks = sinks, sinks.astype(np.float64)[:, None]


def _masks(found: Attention, past: int) -> None:
    """Masks, and what depends on the place of the queries."""
    options, random, (b, h, n, m), fields = found.options, found.random, found.shape, found.fields
    found.offset = np.full(b, past)
    if {"is_causal", "window", "chunk_size", "alibi_slopes"} & options and ("offset" in options or n != m):
        found.offset = (
            random.integers(1, m - n + 2, b) if "offset" in options else np.full(b, random.integers(0, m - n + 1))
        )
        fields["query_offset"] = found.offset
    if "is_causal" in options:
        fields["is_causal"], found.masks["is_causal"] = True, causal(found, found.offset)
    if "window" in options:
        fields["window"] = {"left": int(random.integers(2, 8)), "right": int(random.integers(1, 4))}
        found.masks["window"] = band(found, found.offset, **fields["window"])
    if "chunk_size" in options:
        fields["chunk_size"] = 7
        found.masks["chunk_size"] = chunks(found, found.offset)
    if "alibi_slopes" in options:
        slopes = _floats(found, 2.0 ** -np.arange(1, h + 1))
        fields["alibi_slopes"], found.added["alibi_slopes"] = (
            slopes,
            alibi(found, slopes.astype(np.float64), found.offset),
        )
    if "mask" in options:
        fields["mask"] = mask = random.random((b, h, n, m)) < 0.6
        mask[..., 0] |= "no_empty" in options
        found.masks["mask"] = mask
    if "empty" in options:
        fields["mask"] = fields["mask"].copy()
        fields["mask"][0, 0, n // 3] = fields["mask"][:, -1, -1] = False
        found.masks["mask"] = fields["mask"]
    if "key_mask" in options:
        fields["key_mask"] = mask = random.random((b, m)) < 0.7
        found.masks["key_mask"] = np.broadcast_to(mask[:, None, None], found.shape)
    if "left_padding" in options:
        fields["key_mask"] = mask = np.arange(m) >= random.integers(2, max(3, n // 2), (b, 1))
        found.masks["key_mask"] = np.broadcast_to(mask[:, None, None], found.shape)
    if "key_lengths" in options:
        fields["key_lengths"] = lengths = random.integers(m // 2, m, b)
        found.masks["key_lengths"] = np.broadcast_to((np.arange(m) < lengths[:, None])[:, None, None], found.shape)
    if "segment_ids" in options:
        ids = {"query": random.integers(0, 2, (b, n)), "key": random.integers(0, 2, (b, m))}
        fields["segment_ids"] = ids
        same = ids["query"][:, :, None] == ids["key"][:, None]
        found.masks["segment_ids"] = np.broadcast_to(same[:, None], found.shape)
    if "selected_keys" in options:
        fields["selected_keys"] = random.integers(-1, m, (b, h, n, m // 3))
        found.masks["selected_keys"] = selected(found, fields["selected_keys"])
    if "sigmoid" in options:
        fields["normalization"] = "sigmoid"


def places(found: Attention, offset: Any) -> tuple[np.ndarray, np.ndarray]:
    """The place of each query among the keys, (b, 1, n, 1), and of each key, (m,)."""
    b, _, n, m = found.shape
    return np.broadcast_to(offset, b)[:, None, None, None] + np.arange(n)[:, None], np.arange(m)


def causal(found: Attention, offset: Any) -> np.ndarray:
    i, j = places(found, offset)
    return np.broadcast_to(j <= i, found.shape)


def band(found: Attention, offset: Any, left: int | None = None, right: int | None = None) -> np.ndarray:
    i, j = places(found, offset)
    seen = np.ones(np.broadcast_shapes(i.shape, j.shape), bool)
    seen = seen if left is None else seen & (j >= i - left)
    return np.broadcast_to(seen if right is None else seen & (j <= i + right), found.shape)


def chunks(found: Attention, offset: Any) -> np.ndarray:
    i, j = places(found, offset)
    return np.broadcast_to(i // 7 == j // 7, found.shape)


def alibi(found: Attention, slopes: np.ndarray, offset: Any) -> np.ndarray:
    i, j = places(found, offset)
    return np.broadcast_to(-slopes[:, None, None] * np.abs(i - j), found.shape)


def selected(found: Attention, indices: np.ndarray) -> np.ndarray:
    return np.asarray((indices[..., None] == np.arange(found.shape[3])).any(axis=-2))


# What a mistake makes of a request; None if it changes nothing there.
Mistake = Callable[[Attention], Answer | None]
MISTAKES: Final[dict[str, tuple[Mistake, tuple[str, ...]]]] = {}
# Wrong outputs that are no known mistake, and the facts that are true of them.
FACTS: Final[dict[str, tuple[Mistake, tuple[str, ...], tuple[str, ...]]]] = {}


def mistake(name: str, *needs: str) -> Callable[[Mistake], Mistake]:
    def add(function: Mistake) -> Mistake:
        MISTAKES[name] = function, needs
        return function

    return add


def unnamed(name: str, facts: tuple[str, ...], *needs: str) -> Callable[[Mistake], Mistake]:
    def add(function: Mistake) -> Mistake:
        FACTS[name] = function, needs, facts
        return function

    return add


def tile(a: Attention) -> int:
    """The size of a tile that cuts the keys."""
    return int(a.random.choice([size for size in TILES if size < a.shape[3]]))


def parts(a: Attention) -> list[slice]:
    """The keys in equal parts, or in tiles."""
    m = a.shape[3]
    size = int(a.random.choice([-(-m // 2), -(-m // 4), *(one for one in TILES if one < m)]))
    return [slice(start, min(start + size, m)) for start in range(0, m, size)]


# Heads, operands and outputs.
def _tiled(a: Attention) -> np.ndarray:
    return np.arange(a.shape[1]) % a.key.shape[1]


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
    found = query[..., :half] @ keys.swapaxes(-1, -2)
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
    b, h, n, m = a.shape
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


@mistake("mask.inverted", "hiding_bias")
def _inverted_bias(a: Attention) -> Answer:
    found = a.but()
    found.added["bias"] = np.where(a.added["bias"] == 0, -np.inf, 0.0)
    scores = found.scores()
    return found.answer(np.where(np.isneginf(scores), 0, scores), found.seen() & ~np.isneginf(scores))


MISTAKES["mask.inverted (bias)"] = MISTAKES["mask.inverted"]
mistake("mask.inverted", "mask")(with_mask("mask", lambda a: ~a.masks["mask"]))


@mistake("mask.added", "mask")
def _mask_added(a: Attention) -> Answer:
    found = a.but()
    found.added["mask"] = found.masks.pop("mask").astype(np.float64)
    return found.answer()


@mistake("mask.finite", "mask", "empty")
def _mask_finite(a: Attention) -> Answer:
    return softmax(np.where(a.seen(), a.scores(), -1e4), a.values(), a.sinks)


@mistake("mask.in_max", "is_causal", "mask", "no_empty")
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
        return np.where(seen.any(-1)[..., None], powers @ a.values() / total[..., None], 0), None


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
        return np.where(a.seen().any(-1)[..., None], a.answer()[0], make(a)), None

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


# The softmax and its tiles.
@mistake("softmax.over_queries", "square")
def _over_queries(a: Attention) -> Answer | None:
    if a.sinks is not None or "sigmoid" in a.options:
        return None
    scores = np.where(a.seen(), a.scores(), -np.inf)
    top = scores.max(2, keepdims=True)
    powers = np.exp(scores - np.where(np.isneginf(top), 0, top))
    total = powers.sum(2, keepdims=True)
    return np.divide(powers, total, out=np.zeros_like(powers), where=total > 0) @ a.values(), None


def by_tiles(*, rescales_sum: bool) -> Mistake:
    def made(a: Attention) -> Answer:
        size, scores, values = tile(a), np.where(a.seen(), a.scores(), -np.inf), a.values()
        shape = scores.shape[:3]
        start = np.full(shape, -np.inf) if a.sinks is None else np.broadcast_to(a.sinks, shape)
        top, total = start, np.zeros(shape) if a.sinks is None else np.ones(shape)
        sums = np.zeros((*shape, values.shape[-1]))
        for first in range(0, scores.shape[3], size):
            part = scores[..., first : first + size]
            new = np.maximum(top, part.max(-1))
            shift = np.where(np.isneginf(new), 0, new)
            powers = np.exp(part - shift[..., None])
            if rescales_sum:
                total = total * np.where(np.isneginf(top), 0, np.exp(np.where(np.isneginf(top), 0, top) - shift))
            total = total + powers.sum(-1)
            sums = sums + powers @ values[:, :, first : first + size]
            top = new
        return np.divide(sums, total[..., None], out=np.zeros_like(sums), where=total[..., None] > 0), None

    return made


mistake("softmax.no_rescale", "long")(by_tiles(rescales_sum=False))
mistake("softmax.accumulator_no_rescale", "long")(by_tiles(rescales_sum=True))


def _last_tile_of(a: Attention) -> np.ndarray:
    """True for the keys of the last tile in which a row sees any."""
    place = np.arange(a.shape[3]) // tile(a)
    return np.asarray(place == np.where(a.seen(), place, -1).max(-1, keepdims=True))


mistake("softmax.last_tile", "long")(lambda a: a.answer(seen=a.seen() & _last_tile_of(a)))


@mistake("softmax.denominator_last_tile", "long")
def _denominator_last_tile(a: Attention) -> Answer | None:
    if a.sinks is not None:
        return None
    scores = np.where(a.seen(), a.scores(), -np.inf)
    top = np.where(a.seen().any(-1), scores.max(-1), 0)[..., None]
    powers = np.exp(scores - top)
    total = np.where(_last_tile_of(a), powers, 0).sum(-1, keepdims=True)
    with np.errstate(all="ignore"):
        return np.where(total > 0, powers @ a.values() / total, 0), None


@mistake("softmax.padded_lanes")
def _padded_lanes(a: Attention) -> Answer | None:
    lanes = -a.shape[3] % int(a.random.choice([16, 32, 64, 128]))
    return _diluted(a, lanes) if lanes else None


def _diluted(a: Attention, count: Any) -> Answer:
    out, lse = a.answer()
    assert lse is not None
    with np.errstate(divide="ignore", invalid="ignore"):
        total = np.logaddexp(lse, np.log(count))
        return np.where(np.isneginf(lse)[..., None], out, out * np.exp(lse - total)[..., None]), total


@mistake("softmax.unnormalized")
def _unnormalized(a: Attention) -> Answer:
    scores = np.where(a.seen(), a.scores(), -np.inf)
    top = scores.max(-1) if a.sinks is None else np.maximum(scores.max(-1), a.sinks)
    return np.exp(scores - np.where(np.isneginf(top), 0, top)[..., None]) @ a.values(), None


mistake("softmax.base2")(
    lambda a: softmax(
        np.where(a.seen(), a.scores() / LOG2E, -np.inf), a.values(), None if a.sinks is None else a.sinks / LOG2E
    )
)


def merged(weigh: Callable[[Attention, np.ndarray], np.ndarray], needs: str = "") -> Mistake:
    """Outputs of parts of the keys, by weights that are made of their logsumexps (parts, b, h, n)."""

    def made(a: Attention) -> Answer | None:
        if a.sinks is not None:
            return None
        scores, values = np.where(a.seen(), a.scores(), -np.inf), a.values()
        every = [softmax(scores[..., keys], values[:, :, keys]) for keys in parts(a)]
        outputs, sums = (np.stack(one) for one in zip(*every, strict=True))  # type: ignore[arg-type]
        weights = weigh(a, sums)
        return (weights[..., None] * outputs).sum(0), None

    return made


def _shares(logs: np.ndarray, power: float) -> np.ndarray:
    top = logs.max(0)
    found = np.exp((logs - np.where(np.isneginf(top), 0, top)) * power)
    return np.asarray(found / np.maximum(found.sum(0), 1e-300))


mistake("merge.base2")(merged(lambda a, logs: _shares(logs, math.log(2) if a.random.random() < 0.5 else LOG2E)))
mistake("merge.unweighted")(merged(lambda a, logs: np.full_like(logs, 1 / len(logs))))
mistake("merge.empty_part", "is_causal")(merged(lambda a, logs: _shares(np.where(np.isneginf(logs), 0, logs), 1.0)))
mistake("sigmoid.softmax", "sigmoid")(lambda a: softmax(np.where(a.seen(), a.scores(), -np.inf), a.values()))
mistake("sigmoid.biased", "sigmoid")(lambda a: a.answer(a.scores() - math.log(a.shape[3])))


# Rotations, clipping and norms.
def turned(**parts: Callable[[Attention], Any]) -> Mistake:
    def made(a: Attention) -> Answer:
        return a.but(**{name: make(a) for name, make in parts.items()}).answer()

    return made


mistake("rotary.absent", "rotary")(turned(base=lambda a: None))
mistake("rotary.interleaving", "rotary")(turned(pairs=lambda a: "halves" if a.pairs == "neighbours" else "neighbours"))
mistake("rotary.sign", "rotary")(turned(positions=lambda a: tuple(-one for one in a.positions)))
mistake("rotary.base", "rotary")(turned(base=lambda a: 10000.0))
mistake("rotary.twice", "rotary")(turned(positions=lambda a: tuple(2 * one for one in a.positions)))
mistake("rotary.no_offset", "rotary", "past")(turned(positions=lambda a: tuple(one - a.past for one in a.positions)))
mistake("rotary.query_only", "rotary")(turned(positions=lambda a: (a.positions[0], 0 * a.positions[1])))
mistake("rotary.positions_shifted", "rotary")(
    turned(positions=lambda a: (a.positions[0] + int(a.random.choice([-1, 1])), a.positions[1]))
)


@mistake("rotary.cache_again", "rotary", "past")
def _cache_again(a: Attention) -> Answer:
    assert a.cache is not None and a.base is not None
    return a.but(cache=(rotated(a.cache[0], np.arange(a.past), a.base, a.pairs), a.cache[1])).answer()


def _unclipped(a: Attention) -> dict[str, np.ndarray]:
    return {name: a.fields[name].astype(np.float64) for name in ("query", "key", "value")}


mistake("clip.absent", "clip_qkv")(lambda a: None if "norms" in a.options else a.but(**_unclipped(a)).answer())
mistake("norm.absent", "norms")(
    lambda a: (
        None
        if "clip_qkv" in a.options
        else a.but(**{name: a.fields[name].astype(np.float64) for name in ("query", "key")}).answer()
    )
)


# Scores.
def scaled(make: Callable[[Attention], Any]) -> Mistake:
    return lambda a: a.but(scale=make(a)).answer()


mistake("scale.absent")(scaled(lambda a: 1.0))
mistake("scale.twice")(scaled(lambda a: a.scale**2))
mistake("scale.inverse_dim")(scaled(lambda a: 1 / a.query.shape[-1]))
mistake("scale.value_dim", "other_dim")(scaled(lambda a: 1 / math.sqrt(a.value.shape[-1])))
mistake("scale.log2e")(scaled(lambda a: a.scale * LOG2E))
mistake("scale.zero_is_default", "zero_scale")(scaled(lambda a: 1 / math.sqrt(a.query.shape[-1])))
mistake("scale.first_head", "head_scales", "heads")(scaled(lambda a: a.scale[0, 0, 0]))
mistake("scale.shifted", "head_scales", "heads")(scaled(lambda a: np.concatenate([a.scale[1:], a.scale[:1]])))
mistake("scale.other")(scaled(lambda a: a.scale * float(a.random.choice([0.37, 0.8, 1.7, 3.1]))))


@mistake("scale.by_tile", "long")
def _scale_by_tile(a: Attention) -> Answer:
    return a.but(scale=a.scale ** (np.arange(a.shape[3]) // tile(a) + 1)).answer()


mistake("softcap.absent", "softcap")(lambda a: a.but(cap=None).answer())


@mistake("softcap.after_bias", "softcap", "bias")
def _after_bias(a: Attention) -> Answer:
    assert a.cap is not None
    return a.answer(a.cap * np.tanh((a.products() * a.scale + sum(a.added.values())) / a.cap))


@mistake("softcap.before_scale", "softcap")
def _before_scale(a: Attention) -> Answer:
    assert a.cap is not None
    return a.answer(a.cap * np.tanh(a.products() / a.cap) * a.scale + sum(a.added.values()))


@mistake("softcap.not_divided", "softcap")
def _not_divided(a: Attention) -> Answer:
    assert a.cap is not None
    return a.answer(a.cap * np.tanh(a.products() * a.scale) + sum(a.added.values()))


@mistake("softcap.times_score", "softcap")
def _times_score(a: Attention) -> Answer:
    assert a.cap is not None
    scores = a.products() * a.scale
    return a.answer(scores * np.tanh(scores / a.cap) + sum(a.added.values()))


mistake("sinks.absent", "sinks")(lambda a: a.but(sinks=None).answer())


def sunk(make: Callable[[Attention, np.ndarray], np.ndarray]) -> Mistake:
    def made(a: Attention) -> Answer:
        assert a.sinks is not None
        return a.but(sinks=make(a, a.sinks)).answer()

    return made


mistake("sinks.shifted", "sinks", "heads")(sunk(lambda a, sinks: np.concatenate([sinks[1:], sinks[:1]])))
mistake("sinks.repeated_per_tile", "sinks", "long")(sunk(lambda a, sinks: sinks + math.log(-(-a.shape[3] // tile(a)))))
mistake("sinks.scaled", "sinks")(sunk(lambda a, sinks: sinks * np.reshape(a.scale, (-1, 1))))
mistake("sinks.base2", "sinks")(sunk(lambda a, sinks: sinks * (LOG2E if a.random.random() < 0.5 else 1 / LOG2E)))


def with_added(name: str, make: Callable[[Attention], np.ndarray]) -> Mistake:
    def made(a: Attention) -> Answer:
        found = a.but()
        found.added[name] = make(a)
        return found.answer()

    return made


def _slopes(a: Attention) -> np.ndarray:
    return np.asarray(a.fields["alibi_slopes"].astype(np.float64))


mistake("bias.before_scale", "bias")(with_added("bias", lambda a: a.added["bias"] * a.scale))
mistake("bias.log2e", "bias")(
    with_added("bias", lambda a: a.added["bias"] * (LOG2E if a.random.random() < 0.5 else 1 / LOG2E))
)
mistake("alibi.sign", "alibi_slopes")(with_added("alibi_slopes", lambda a: -a.added["alibi_slopes"]))
mistake("alibi.first_head", "alibi_slopes", "heads")(
    with_added("alibi_slopes", lambda a: alibi(a, np.full(a.shape[1], _slopes(a)[0]), a.offset))
)
mistake("alibi.factor", "alibi_slopes")(
    with_added("alibi_slopes", lambda a: a.added["alibi_slopes"] * (a.scale if a.random.random() < 0.5 else 2.0))
)
mistake("alibi.log2e", "alibi_slopes")(
    with_added("alibi_slopes", lambda a: a.added["alibi_slopes"] * (LOG2E if a.random.random() < 0.5 else 1 / LOG2E))
)
mistake("alibi.offset_ignored", "alibi_slopes", "few", "offset")(
    with_added("alibi_slopes", lambda a: alibi(a, _slopes(a), 0))
)


# Logsumexps.
def summed(make: Callable[[Attention, np.ndarray], np.ndarray | None]) -> Mistake:
    def made(a: Attention) -> Answer | None:
        out, lse = a.answer()
        assert lse is not None
        changed = make(a, lse)
        return None if changed is None else (out, changed)

    return made


mistake("logsumexp.base2")(summed(lambda a, lse: lse * (LOG2E if a.random.random() < 0.5 else 1 / LOG2E)))
mistake("logsumexp.unscaled")(summed(lambda a, lse: a.but(scale=1.0).answer()[1]))
mistake("logsumexp.no_sink", "sinks")(summed(lambda a, lse: a.but(sinks=None).answer()[1]))
mistake("logsumexp.empty_finite", "mask", "empty")(
    summed(lambda a, lse: None if a.sinks is not None else np.where(np.isneginf(lse), 0.0, lse))
)
mistake("logsumexp.empty_positive", "mask", "empty")(
    summed(lambda a, lse: None if a.sinks is not None else np.where(np.isneginf(lse), np.inf, lse))
)


# Right numbers in other places, or of other entries, in the place of the right ones or added to them.
PLACES: Final = ("moved", "permuted", "reordered", "elsewhere", "other_places")


def at(change: Callable[[Attention, np.ndarray], np.ndarray | None]) -> Mistake:
    def made(a: Attention) -> Answer | None:
        changed = change(a, a.answer()[0])
        return None if changed is None else (changed, None)

    return made


def _order(a: Attention, length: int) -> np.ndarray:
    """Another order of so many things: shifted, reversed, in pairs, or any."""
    n = np.arange(length)
    kinds = (
        (n + int(a.random.integers(1, length))) % length,
        n[::-1],
        np.minimum(n ^ 1, length - 1),
        a.random.permutation(length),
    )
    return kinds[a.random.integers(4)]


for _axis, (_what, _needs) in enumerate(
    (("batch entries", ("batches",)), ("heads", ("heads",)), ("rows", ()), ("features", ()))
):
    unnamed(f"other {_what}", PLACES, *_needs)(
        at(lambda a, out, axis=_axis: out.take(_order(a, out.shape[axis]), axis=axis))  # type: ignore[misc]
    )
    unnamed(f"other {_what} added", PLACES, *_needs)(
        at(lambda a, out, axis=_axis: out + out.take(_order(a, out.shape[axis]), axis=axis))  # type: ignore[misc]
    )
unnamed("any rows", PLACES)(
    at(lambda a, out: out.reshape(-1, out.shape[3])[a.random.permutation(out[..., 0].size)].reshape(out.shape))
)
unnamed("any rows added", PLACES)(
    at(lambda a, out: out + out.reshape(-1, out.shape[3])[a.random.permutation(out[..., 0].size)].reshape(out.shape))
)
unnamed("rows of the last tile added", PLACES, "square")(
    at(lambda a, out: out + np.where(np.arange(out.shape[2])[:, None] >= 16, np.roll(out, 16, axis=2), 0))
)


@unnamed("half of the features of another row", PLACES)
def _half_features(a: Attention) -> Answer:
    out = a.answer()[0]
    half = out.shape[3] // 2
    return np.concatenate(
        [out[..., :half], np.roll(out[..., half:], int(a.random.integers(1, 4)), axis=2)], axis=3
    ), None


@unnamed("half of the features of another head", PLACES, "heads")
def _half_of_head(a: Attention) -> Answer:
    out = a.answer()[0]
    half = out.shape[3] // 2
    return np.concatenate([out[..., :half], np.roll(out[..., half:], 1, axis=1)], axis=3), None


@unnamed("rows and features swapped in memory", PLACES)
def _swapped(a: Attention) -> Answer:
    out = a.answer()[0]
    return np.ascontiguousarray(out.swapaxes(2, 3)).reshape(out.shape), None


@unnamed("heads and rows swapped in memory", PLACES, "heads", "ungrouped")
def _swapped_heads(a: Attention) -> Answer:
    out = a.answer()[0]
    return np.ascontiguousarray(out.swapaxes(1, 2)).reshape(out.shape), None


# A cap that is another function: told if the logsumexp or the weights are sent.
CAPS: Final[dict[str, Callable[[np.ndarray, float], np.ndarray]]] = {
    "clipped": lambda x, cap: np.clip(x, -cap, cap),
    "x / (1 + |x|)": lambda x, cap: x / (1 + np.abs(x) / cap),
    "arctangent": lambda x, cap: cap * np.arctan(x / cap),
    "another cap": lambda x, cap: 2 * cap * np.tanh(x / cap / 2),
}


def capped_by(a: Attention, function: Callable[[np.ndarray, float], np.ndarray]) -> dict[str, np.ndarray]:
    """Output, logsumexp and weights with another function in the place of cap · tanh(x / cap)."""
    assert a.cap is not None
    scores = function(a.products() * a.scale, a.cap) + sum(a.added.values())
    output, total = a.answer(scores)
    assert total is not None
    with np.errstate(invalid="ignore"):
        weights = np.where(a.seen(), np.exp(scores - np.where(np.isneginf(total), 0, total)[..., None]), 0)
    return {"output": output, "logsumexp": total, "attention_weights": weights}


@dataclass(frozen=True)
class Planted:
    """A request, and what a wrong kernel returns for it; the name of its mistake, or what facts may say of it."""

    name: str
    fields: dict[str, Any]
    right: dict[str, np.ndarray]
    sent: dict[str, np.ndarray]
    facts: tuple[str, ...] = ()


def plant(name: str, seed: int) -> Planted | None:
    """A random request, and the answer with a mistake; None if that changes nothing."""
    random = np.random.default_rng([seed, *name.encode()])
    facts: tuple[str, ...] = ()
    if name in MISTAKES:
        make, needs = MISTAKES[name]
    else:
        make, needs, facts = FACTS[name]
    asked = request(random, needs)
    with np.errstate(all="ignore"):
        wrong, right = make(asked), asked.answer()
    if wrong is None:
        return None
    kept = ["output", "logsumexp"] if name.startswith("logsumexp") else ["output"]
    types = {"output": asked.dtype, "logsumexp": np.float64 if asked.dtype == np.float64 else np.float32}
    sent, known = (
        {
            one: array.astype(types[one])
            for one, array in zip(("output", "logsumexp"), arrays, strict=True)
            if one in kept and array is not None
        }
        for arrays in (wrong, right)
    )
    return Planted(name, asked.fields, known, sent, facts)


def answers(name: str, planted: Planted, seed: int) -> Iterator[np.ndarray]:
    """What the mistake of a name makes of the request of another, in each of several draws of its forms."""
    if name not in MISTAKES:
        return
    random = np.random.default_rng([seed, *planted.name.encode()])
    needs = MISTAKES[planted.name][1] if planted.name in MISTAKES else FACTS[planted.name][1]
    asked = request(random, needs)
    for form in range(12):
        asked.random = np.random.default_rng(form)
        try:
            with np.errstate(all="ignore"):
                answer = MISTAKES[name][0](asked)
        except (AssertionError, KeyError, ValueError):
            return
        if answer is not None:
            yield answer[0]
