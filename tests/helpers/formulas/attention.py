"""Random requests, and the parts of the formula of attention, which a mistake replaces.

Plain NumPy in float64, written from docs/attention.md: no line of the product runs here.

Axes: b batch entries, h query heads, g key/value heads, n queries, m keys (those of a cache first), d and e features.
"""

from __future__ import annotations

import math
from copy import copy
from dataclasses import dataclass, field
from typing import Any, Final

import ml_dtypes
import numpy as np

LOG2E: Final = math.log2(math.e)
TYPES: Final = (np.float32, np.float32, ml_dtypes.bfloat16, np.float16, np.float64)
TILES: Final = (16, 32, 64)
CHUNK: Final = 7
# Options that a request may have beside those that its mistake needs.
EXTRAS: Final = ("is_causal", "window", "mask", "key_mask", "bias", "alibi_slopes", "softcap", "sinks", "rotary",
                 "past", "clip_qkv")  # fmt: skip
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

    def sees_any(self) -> np.ndarray:
        """(b, h, n, 1), True for a query that sees a key."""
        return np.asarray(self.seen().any(axis=-1, keepdims=True))

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
    options -= {"past", "softcap", "clip_qkv", "rotary"} if "low" in options else set()
    options -= {"sinks"} if "sigmoid" in options else set()
    options -= {"past"} if "square" in options else set()
    b, g, group, n, m, d, e = _sizes(random, options)
    past = int(random.integers(2, 6)) if "past" in options else 0
    n = min(n, m - past)

    def normal(*shape: int, spread: float = 1.0) -> np.ndarray:
        return np.asarray(random.normal(size=shape) * spread).astype(found.dtype)

    query = normal(b, g * group, n, d, spread=float(random.choice([1.0, 2.5])))
    key = normal(b, g, m - past, d)
    if "low" in options:  # all scores are about -200
        size = round(math.sqrt(200 * math.sqrt(d)))
        query[..., 0], key[..., 0] = -size, size
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
    _offset(found, past)
    _by_place(found)
    _by_content(found)
    return found


def _sizes(random: np.random.Generator, options: set[str]) -> tuple[int, ...]:
    """Batch entries, key/value heads, heads of each, queries, keys, features of keys and of values."""
    b, g, group = (int(one) for one in random.integers(1, 4, 3))
    g = max(g, 2) if {"grouped", "kv_heads"} & options else g
    group = 1 if "ungrouped" in options else group
    group = max(group, 2) if "grouped" in options or ("heads" in options and g == 1) else group
    d = int(random.choice([4, 8, 16]))
    e = d if "same_dim" in options or random.random() < 0.4 else int(random.choice([5, 8, 12]))
    m = int(random.choice([67, 131, 149] if "long" in options else [23, 37, 67, 131]))
    n = m if random.random() < 0.4 and "few" not in options else int(random.choice([5, 13, 19]))
    return (
        max(b, 2) if "batches" in options else b,
        g,
        group,
        m if "square" in options else n,
        m,
        d,
        (d + 2 if "other_dim" in options else e),
    )


def _floats(found: Attention, numbers: Any) -> np.ndarray:
    return np.asarray(numbers).astype(np.float64 if found.dtype == np.float64 else np.float32)


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
    options, random, (_, h, n, m) = found.options, found.random, found.shape
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
        low = float(random.choice([-np.inf, -1e4, -1e9, -3.4028234663852886e38]))
        hidden = random.random((1, h, n, m)) < 0.4
        hidden[..., 0], hidden[..., -1] = False, True
        bias = _floats(found, np.where(hidden, low, np.zeros(1)))
        found.fields["bias"], found.added["bias"] = bias, np.broadcast_to(bias.astype(np.float64), found.shape)
    if "sinks" in options:
        sinks = _floats(found, random.normal(size=h) * 2)
        found.fields["sinks"], found.sinks = sinks, sinks.astype(np.float64)[:, None]


def _offset(found: Attention, past: int) -> None:
    """The key at the place of the first query, where an option reads it."""
    (b, _, n, m), random = found.shape, found.random
    found.offset = np.full(b, past)
    if {"is_causal", "window", "chunk_size", "alibi_slopes"} & found.options and ("offset" in found.options or n != m):
        own = "offset" in found.options
        found.offset = random.integers(1, m - n + 2, b) if own else np.full(b, random.integers(0, m - n + 1))
        found.fields["query_offset"] = found.offset


def _by_place(found: Attention) -> None:
    """What depends on the place of queries and keys."""
    options, random, fields, masks = found.options, found.random, found.fields, found.masks
    if "is_causal" in options:
        fields["is_causal"], masks["is_causal"] = True, causal(found, found.offset)
    if "window" in options:
        fields["window"] = {"left": int(random.integers(2, 8)), "right": int(random.integers(1, 4))}
        masks["window"] = band(found, found.offset, **fields["window"])
    if "chunk_size" in options:
        fields["chunk_size"], masks["chunk_size"] = CHUNK, chunks(found, found.offset)
    if "alibi_slopes" in options:
        slopes = _floats(found, 2.0 ** -np.arange(1, found.shape[1] + 1))
        fields["alibi_slopes"] = slopes
        found.added["alibi_slopes"] = alibi(found, slopes.astype(np.float64), found.offset)


def _by_content(found: Attention) -> None:
    """What hides keys by booleans, lengths, ids and indices."""
    options, random, (b, h, n, m), fields = found.options, found.random, found.shape, found.fields
    if "mask" in options:
        fields["mask"] = mask = random.random((b, h, n, m)) < 0.6
        mask[..., 0] |= "no_empty" in options
        if "empty" in options:
            mask[0, 0, n // 3] = mask[:, -1, -1] = False
        found.masks["mask"] = mask
    if {"key_mask", "left_padding"} & options:
        padding = np.arange(m) >= random.integers(2, max(3, n // 2), (b, 1))
        fields["key_mask"] = padding if "left_padding" in options else random.random((b, m)) < 0.7
        found.masks["key_mask"] = np.broadcast_to(fields["key_mask"][:, None, None], found.shape)
    if "key_lengths" in options:
        fields["key_lengths"] = lengths = random.integers(m // 2, m, b)
        found.masks["key_lengths"] = np.broadcast_to((np.arange(m) < lengths[:, None])[:, None, None], found.shape)
    if "segment_ids" in options:
        ids = {"query": random.integers(0, 2, (b, n)), "key": random.integers(0, 2, (b, m))}
        fields["segment_ids"], same = ids, ids["query"][:, None, :, None] == ids["key"][:, None, None]
        found.masks["segment_ids"] = np.broadcast_to(same, found.shape)
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
    return np.broadcast_to(i // CHUNK == j // CHUNK, found.shape)


def alibi(found: Attention, slopes: np.ndarray, offset: Any) -> np.ndarray:
    i, j = places(found, offset)
    return np.broadcast_to(-slopes[:, None, None] * np.abs(i - j), found.shape)


def selected(found: Attention, indices: np.ndarray) -> np.ndarray:
    return np.asarray((indices[..., None] == np.arange(found.shape[3])).any(axis=-2))
