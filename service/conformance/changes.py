"""Changes of the fields of a request, each of which makes one corner. Arrays are in layout bhld before."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import numpy as np

Fields = dict[str, Any]
Change = Callable[[Fields, np.random.Generator], None]
# Layouts whose score matrices have the axes b, h, q, k, so that masks need not change.
PLAIN_LAYOUTS: Final = ("bhld", "blhd", "bld", "lbd")
CHUNK: Final = 5


def unchanged(fields: Fields, random: np.random.Generator) -> None:
    """Change nothing."""


def lengths(fields: Fields) -> tuple[int, int]:
    """The numbers of queries and keys; the keys of the cache count."""
    past = fields["past_key"].shape[2] if "past_key" in fields else 0
    return fields["query"].shape[2], fields["key"].shape[2] + past


def scale(number: float) -> Change:
    """Set the scale."""

    def change(fields: Fields, random: np.random.Generator) -> None:
        fields["scale"] = number

    return change


def scaled_causal(number: float) -> Change:
    """Set the scale beside a causal mask."""

    def change(fields: Fields, random: np.random.Generator) -> None:
        fields |= {"scale": number, "query_offset": 0}

    return change


def large_scores(fields: Fields, random: np.random.Generator) -> None:
    """Multiply queries, so that exp(score) overflows in every type."""
    fields["query"] = (fields["query"] * 300).astype(fields["query"].dtype)


def beyond_float16(fields: Fields, random: np.random.Generator) -> None:
    """Multiply queries and keys, so that unscaled scores are beyond 65504, and scale them to a few units."""
    for name in ("query", "key"):
        fields[name] = (fields[name] * 200).astype(fields[name].dtype)
    fields["scale"] = 1e-5


def poison(fields: Fields, random: np.random.Generator) -> None:
    """Hide the last keys of each batch entry, and put NaN into their keys and infinity into their values."""
    _, k = lengths(fields)
    seen = np.ones((fields["query"].shape[0], k), np.bool_)
    seen[:, -4:] = False
    fields["key_mask"] = seen
    fields["key"][:, :, -2] = np.nan
    fields["value"][:, :, -3] = np.inf


def bias_with_infinities(fields: Fields, random: np.random.Generator) -> None:
    """Hide a fifth of the keys by −∞ in the bias, never the first one."""
    hidden = random.random(fields["bias"].shape) < 0.2
    hidden[..., 0] = False
    fields["bias"][hidden] = -np.inf


def bias_with_empty_row(fields: Fields, random: np.random.Generator) -> None:
    """Hide all keys from two rows by −∞ in the bias: one of all heads, one of the last head."""
    fields["bias"][:, :, 1] = -np.inf
    fields["bias"][:, -1, -1] = -np.inf


def mask_without_empty_rows(fields: Fields, random: np.random.Generator) -> None:
    """Let each query see a key."""
    mask = fields["mask"]
    mask[..., 0] |= ~mask.any(axis=-1)


def shared_mask(fields: Fields, random: np.random.Generator) -> None:
    """Take the same mask for all heads, in which each query sees a key."""
    fields["mask"] = fields["mask"][:, :1].copy()
    mask_without_empty_rows(fields, random)


def mask_with_empty_rows(fields: Fields, random: np.random.Generator) -> None:
    """Take the same mask for all heads, and hide all keys from two rows."""
    fields["mask"] = fields["mask"][:, :1].copy()
    fields["mask"][0, :, 1] = False
    fields["mask"][1, :, -1] = False


def no_keys(fields: Fields, random: np.random.Generator) -> None:
    """Let the second batch entry have no keys."""
    fields["key_lengths"][1] = 0


def query_lengths(fields: Fields, random: np.random.Generator) -> None:
    """Let the last queries of the second batch entry be padding."""
    q, _ = lengths(fields)
    fields["query_lengths"] = np.array([q, q - 2])


def offset_zero(fields: Fields, random: np.random.Generator) -> None:
    """Align the first query with the first key."""
    fields["query_offset"] = 0


def offset_last(fields: Fields, random: np.random.Generator) -> None:
    """Align the last query with the last key."""
    q, k = lengths(fields)
    fields["query_offset"] = k - q


def offset_of_past(fields: Fields, random: np.random.Generator) -> None:
    """Let the queries come after the cache, which is the default."""
    del fields["query_offset"]


def causal_and_mask(fields: Fields, random: np.random.Generator) -> None:
    """Let each query see its own key, beside a causal mask."""
    shared_mask(fields, random)
    fields["mask"] |= np.eye(fields["mask"].shape[-1], dtype=np.bool_)
    fields["query_offset"] = 0


def window(left: int | None, right: int | None) -> Change:
    """Set both sides of the window, and align the first query with the first key."""

    def change(fields: Fields, random: np.random.Generator) -> None:
        sides = {"left": left, "right": right}
        fields["window"] = {side: width for side, width in sides.items() if width is not None}
        fields["query_offset"] = 0

    return change


def last_window(fields: Fields, random: np.random.Generator) -> None:
    """Let the last query see the last six keys."""
    fields["window"] = {"left": 5, "right": 0}
    offset_last(fields, random)


def window_beyond(fields: Fields, random: np.random.Generator) -> None:
    """Move the window so far that the last queries see no key."""
    q, k = lengths(fields)
    fields["window"] = {"left": 2, "right": 1}
    fields["query_offset"] = k - q // 2


def chunk(offset: int) -> Change:
    """Set the size of chunks, and the offset."""

    def change(fields: Fields, random: np.random.Generator) -> None:
        fields |= {"chunk_size": CHUNK, "query_offset": offset}

    return change


def segments(fields: Fields, random: np.random.Generator) -> None:
    """Pack three sequences into each batch entry."""
    _, k = lengths(fields)
    cuts = np.sort(random.choice(np.arange(1, k), (fields["query"].shape[0], 2)), axis=-1)
    ids = (np.arange(k) >= cuts[..., None]).sum(axis=1)
    fields["segment_ids"] = {"query": ids, "key": ids.copy()}


def lonely_segment(fields: Fields, random: np.random.Generator) -> None:
    """Give a query an id that no key has."""
    fields["segment_ids"]["query"][0, 1] = 7


def rotary_positions(fields: Fields, random: np.random.Generator) -> None:
    """Let positions begin elsewhere than at 0, another place for each batch entry."""
    q, k = lengths(fields)
    start = np.array([[k - q], [3]])
    fields["rotary"] |= {"query_positions": start + np.arange(q), "key_positions": np.arange(k)}


def interleaved(fields: Fields, random: np.random.Generator) -> None:
    """Rotate pairs of adjacent features."""
    fields["rotary"]["interleaved"] = True


def partial_rotary(fields: Fields, random: np.random.Generator) -> None:
    """Rotate the first half of the features only."""
    fields["rotary"]["dim"] = fields["query"].shape[-1] // 2


def rotary_tables(fields: Fields, random: np.random.Generator) -> None:
    """Give cosines and sines by position."""
    q, k = lengths(fields)
    angles = np.arange(max(q, k))[:, None] * 300.0 ** (-np.arange(4) / 4)
    kind = np.float64 if fields["query"].dtype == np.float64 else np.float32
    fields["rotary"] = {"cos": np.cos(angles).astype(kind), "sin": np.sin(angles).astype(kind)}


def ask_for_logsumexp(fields: Fields, random: np.random.Generator) -> None:
    """Ask for the logsumexp."""
    fields["include"] = ["logsumexp"]


def logsumexp_of_empty_rows(fields: Fields, random: np.random.Generator) -> None:
    """Hide all keys from two rows, and ask for the logsumexp."""
    mask_with_empty_rows(fields, random)
    ask_for_logsumexp(fields, random)


def sum_of_scores(fields: Fields, random: np.random.Generator) -> None:
    """Divide scores by their sum. All are positive, so that the sum is not near 0."""
    fields |= {"query": np.abs(fields["query"]), "key": np.abs(fields["key"]), "normalization": "sum"}


def to_layout(fields: Fields, layout: str) -> None:
    """Bring query, key and value from layout bhld into another. Layouts without b take the first batch entry."""
    for name in ("query", "key", "value"):
        array = fields[name]
        if "b" not in layout:
            array = array[:1]
        if "h" not in layout:  # features of heads one after the other
            b, h, length, d = array.shape
            array = array.transpose(0, 2, 1, 3).reshape(b, length, h * d)
        axes = "bhld" if "h" in layout else "bld"
        array = array.transpose([axes.index(letter) for letter in ("" if "b" in layout else "b") + layout])
        fields[name] = np.ascontiguousarray(array if "b" in layout else array[0])
    fields["layout"] = layout


def any_layout(fields: Fields, random: np.random.Generator) -> None:
    """Bring the request into any layout but bhld."""
    heads = fields["query"].shape[1]
    layout = str(random.choice(["blhd", "bld", "lbd", "bdl", "hld", "ld", "dl"]))
    to_layout(fields, layout)
    if "h" not in layout:
        fields["num_heads"] = heads


def combined(fields: Fields, random: np.random.Generator) -> None:
    """Set what the options of the request leave open: offset, scale, layout, and whether logsumexp is asked for."""
    q, k = lengths(fields)
    heads, kv_heads = fields["query"].shape[1], fields["key"].shape[1]
    if "query_offset" in fields or random.random() < 0.2:
        fields["query_offset"] = int(random.integers(-2, k - q + 3)) if random.random() < 0.6 else np.array([3, k - q])
    if "window" in fields:
        sides = {"left": int(random.integers(0, 9)), "right": int(random.integers(0, 4))}
        kept = random.choice(["left", "right", "both"])
        fields["window"] = {side: width for side, width in sides.items() if kept in (side, "both")}
    if "chunk_size" in fields:
        fields["chunk_size"] = int(random.integers(2, 12))
    if random.random() < 0.3:
        fields["scale"] = round(float(random.normal()), 3)
    if random.random() < 0.3:
        fields["include"] = ["logsumexp"]
    layout = str(random.choice(PLAIN_LAYOUTS))
    if layout != "bhld" and heads > 1:
        to_layout(fields, layout)
        if "h" not in layout:
            fields |= {"num_heads": heads, "num_kv_heads": kv_heads}
