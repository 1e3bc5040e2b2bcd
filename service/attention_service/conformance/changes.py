"""Changes of the fields of a request, each of which makes one corner. Arrays are in layout bhld before."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import numpy as np

from attention_service.comparison.errors import largest_number

Fields = dict[str, Any]
Change = Callable[[Fields, np.random.Generator], None]
# Layouts whose score matrices have the axes b, h, q, k, so that masks need not change.
PLAIN_LAYOUTS: Final = ("bhld", "blhd", "bld", "lbd")


def lengths(fields: Fields) -> tuple[int, int]:
    """The numbers of queries and keys; the keys of the cache count."""
    past = fields["past_key"].shape[2] if "past_key" in fields else 0
    return fields["query"].shape[2], fields["key"].shape[2] + past


def both(first: Change, second: Change) -> Change:
    """One change after the other."""

    def change(fields: Fields, random: np.random.Generator) -> None:
        first(fields, random)
        second(fields, random)

    return change


def large_scores(fields: Fields, random: np.random.Generator) -> None:
    """Multiply queries, so that exp(score) overflows in every type."""
    fields["query"] = (fields["query"] * 300).astype(fields["query"].dtype)


def near_cap(fields: Fields, random: np.random.Generator) -> None:
    """Multiply queries, so that many scores are near the softcap."""
    fields["query"] = (fields["query"] * 3).astype(fields["query"].dtype)


def nearly_equal_values(fields: Fields, random: np.random.Generator) -> None:
    """Let the values of a head differ by thousandths."""
    value = fields["value"]
    fields["value"] = (value[:, :, :1] + 1e-3 * (value - value[:, :, :1])).astype(value.dtype)


def zero_cotangent(fields: Fields, random: np.random.Generator) -> None:
    """Let the gradient of the output be 0."""
    fields["grad_output"] = np.zeros_like(fields["grad_output"])


def beyond_float16(fields: Fields, random: np.random.Generator) -> None:
    """Multiply queries and keys, so that unscaled scores are beyond 65504, and scale them to a few units."""
    for name in ("query", "key"):
        fields[name] = (fields[name] * 200).astype(fields[name].dtype)
    fields["scale"] = 1e-5


def equal_scores(fields: Fields, random: np.random.Generator) -> None:
    """Let all keys be the same, and values be about 1."""
    fields["key"] = np.repeat(fields["key"][:, :, :1], fields["key"].shape[2], axis=2)
    fields["value"] = random.uniform(0.5, 1.5, fields["value"].shape).astype(fields["value"].dtype)


def low_scores(fields: Fields, random: np.random.Generator) -> None:
    """Let the first features subtract about 200 from all scores."""
    size = round((200 * fields["query"].shape[-1] ** 0.5) ** 0.5)
    fields["query"][..., 0], fields["key"][..., 0] = -size, size


def left_padding(fields: Fields, random: np.random.Generator) -> None:
    """Let the first two keys be padding, of the last batch entry the first four."""
    fields["key_mask"] = np.arange(lengths(fields)[1]) >= np.array([[2], [4]])


def finite_bias(fields: Fields, random: np.random.Generator) -> None:
    """Hide a fifth of the keys, never the first one, by another low number in each head."""
    bias = fields["bias"]
    least = -largest_number(fields["query"].dtype if fields["query"].dtype == np.float16 else np.dtype(np.float32))
    low = np.array([-10_000.0, -1e9, least])[np.arange(bias.shape[1]) % 3, None, None]
    hidden = random.random(bias.shape) < 0.2
    hidden[..., 0] = False
    fields["bias"] = np.where(hidden, low, 0).astype(bias.dtype)


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


def tile_ends(fields: Fields, random: np.random.Generator) -> None:
    """Give the last query a large score with the last visible key, and the first queries small scores.

    Without the former few rows would need the last tile, if that has one key; beside the latter a score of 0 that
    nobody hides has weight.
    """
    query, (q, k) = fields["query"].astype(np.float64), lengths(fields)
    last = int(np.max(fields.get("key_lengths", k))) - 1
    sought = query[:, :, -1] * (12 * np.sqrt(query.shape[-1]) / (query[:, :, -1] ** 2).sum(axis=-1, keepdims=True))
    fields["key"][:, :, last] = sought
    fields["query"] = (query * np.linspace(0.1, 1, q)[:, None]).astype(fields["query"].dtype)


def lengths_of_tiles(fields: Fields, random: np.random.Generator) -> None:
    """Let the first batch entry end with a tile of 512 keys, and the second have a key more."""
    fields["key_lengths"] = np.array([512, 513])
    tile_ends(fields, random)


def query_lengths(fields: Fields, random: np.random.Generator) -> None:
    """Let the last queries of the second batch entry be padding."""
    q, _ = lengths(fields)
    fields["query_lengths"] = np.array([q, q - 2])


def offset_last(fields: Fields, random: np.random.Generator) -> None:
    """Align the last query with the last key."""
    q, k = lengths(fields)
    fields["query_offset"] = k - q


def causal_and_mask(fields: Fields, random: np.random.Generator) -> None:
    """Let each query see its own key, beside a causal mask."""
    shared_mask(fields, random)
    fields["mask"] |= np.eye(fields["mask"].shape[-1], dtype=np.bool_)


def window_beyond(fields: Fields, random: np.random.Generator) -> None:
    """Move the window so far that the last queries see no key."""
    q, k = lengths(fields)
    fields["window"] = {"left": 2, "right": 1}
    fields["query_offset"] = k - q // 2


def segments(fields: Fields, random: np.random.Generator) -> None:
    """Pack three sequences into each batch entry."""
    _, k = lengths(fields)
    cuts = np.sort(random.choice(np.arange(1, k), (fields["query"].shape[0], 2)), axis=-1)
    ids = (np.arange(k) >= cuts[..., None]).sum(axis=1)
    fields["segment_ids"] = {"query": ids, "key": ids.copy()}


def lonely_segment(fields: Fields, random: np.random.Generator) -> None:
    """Give a query an id that no key has."""
    fields["segment_ids"]["query"][0, 1] = 7


def of_query(fields: Fields) -> np.dtype:
    """The type of what is given beside query, key and value."""
    return np.dtype(np.float64 if fields["query"].dtype == np.float64 else np.float32)


def select(fields: Fields, random: np.random.Generator) -> None:
    """Let each query see a third of the keys, the same for all heads, in any order."""
    (b, _, q, _), (_, k) = fields["query"].shape, lengths(fields)
    fields["selected_keys"] = random.random((b, 1, q, k)).argsort(axis=-1)[..., : k // 3]


def select_repeatedly(fields: Fields, random: np.random.Generator) -> None:
    """Let each query see few keys, each of them chosen several times, between places that choose none."""
    select(fields, random)
    chosen = fields["selected_keys"][..., [0, 1, 1, 2, 0, 0, 3, 1]]
    chosen[..., [2, 6]] = -1
    fields["selected_keys"] = chosen


def select_nothing(fields: Fields, random: np.random.Generator) -> None:
    """Choose no key for two rows."""
    select(fields, random)
    fields["selected_keys"][0, :, 1] = -1
    fields["selected_keys"][1, :, -1] = -1


def select_hidden(fields: Fields, random: np.random.Generator) -> None:
    """Let the mask of two rows hide the keys that are selected for them, and no others."""
    select(fields, random)
    chosen = fields["selected_keys"]
    mask = np.ones((*chosen.shape[:3], lengths(fields)[1]), np.bool_)
    for row in ((0, 0, 1), (1, 0, -1)):
        mask[row][chosen[row]] = False
    fields["mask"] = mask


def select_of_past(fields: Fields, random: np.random.Generator) -> None:
    """Choose a key of the cache and two new ones for each query."""
    select(fields, random)
    past = fields["past_key"].shape[2]
    shape = fields["selected_keys"].shape[:3]
    new = random.integers(past, lengths(fields)[1], (*shape, 2))
    fields["selected_keys"] = np.concatenate([random.integers(0, past, (*shape, 1)), new], axis=-1)


def padded(fields: Fields, random: np.random.Generator) -> None:
    """Let the last queries and keys of each batch entry be padding."""
    q, k = lengths(fields)
    fields |= {"query_lengths": np.array([q, q - 2]), "key_lengths": np.array([k - 3, k // 2])}


def large_sinks(fields: Fields, random: np.random.Generator) -> None:
    """Let the sink of the first head take all weight, and that of the second none; exp of both is out of range."""
    fields["sinks"][:2] = 1000, -1000


def biased_norms(fields: Fields, random: np.random.Generator) -> None:
    """Add a bias to each norm."""
    for name in ("query_norm", "key_norm", "value_norm"):
        if name in fields:
            weight = fields[name]["weight"]
            fields[name]["bias"] = random.normal(size=weight.shape).astype(weight.dtype)


def zero_rows(fields: Fields, random: np.random.Generator) -> None:
    """Let a query, a key and a value be 0."""
    for name in ("query", "key", "value"):
        fields[name][:, :, 1] = 0


def constant_rows(fields: Fields, random: np.random.Generator) -> None:
    """Let the features of a query, a key and a value be the same number, and add a bias to each norm."""
    biased_norms(fields, random)
    for name in ("query", "key", "value"):
        fields[name][:, :, 1] = 3


def gate_by_head(fields: Fields, random: np.random.Generator) -> None:
    """Take one gate for each query and head, negative ones and zeros too."""
    b, h, q, _ = fields["query"].shape
    fields["gate"] = random.normal(size=(b, h, q, 1)).astype(of_query(fields))
    fields["gate"][:, :, ::4] = 0


def mapped_gate(activation: str, features: int | None) -> Change:
    """Map the query to gates. features: of a head; None for as many as a value has"""

    def change(fields: Fields, random: np.random.Generator) -> None:
        heads = fields["query"].shape[1]
        count = heads * (features or fields["value"].shape[-1])
        to_layout(fields, "bld")
        fields["num_heads"] = heads
        weight = random.normal(size=(count, fields["query"].shape[-1])) * 0.3
        gate: dict[str, Any] = {"weight": weight.astype(of_query(fields))}
        if activation != "sigmoid":
            gate |= {"bias": random.normal(size=count).astype(of_query(fields)), "activation": activation}
        fields["projection"] = {"gate": gate}

    return change


def rotary_positions(fields: Fields, random: np.random.Generator) -> None:
    """Let positions begin elsewhere than at 0, another place for each batch entry."""
    q, k = lengths(fields)
    start = np.array([[k - q], [3]])
    fields["rotary"] |= {"query_positions": start + np.arange(q), "key_positions": np.arange(k)}


def rotary_partial(fields: Fields, random: np.random.Generator) -> None:
    """Rotate half of the features."""
    fields["rotary"] = {"base": 500.0, "dim": fields["query"].shape[-1] // 2}


def rotary_tables(fields: Fields, random: np.random.Generator) -> None:
    """Give cosines and sines by position."""
    q, k = lengths(fields)
    pairs = fields["query"].shape[-1] // 2
    angles = np.arange(max(q, k))[:, None] * 300.0 ** (-np.arange(pairs) / pairs)
    fields["rotary"] = {"cos": np.cos(angles).astype(of_query(fields)), "sin": np.sin(angles).astype(of_query(fields))}


def sum_of_scores(fields: Fields, random: np.random.Generator) -> None:
    """Divide scores by their sum. All are positive, so that the sum is not near 0."""
    fields |= {"query": np.abs(fields["query"]), "key": np.abs(fields["key"]), "normalization": "sum"}


def to_layout(fields: Fields, layout: str) -> None:
    """Bring query, key, value and the gradient of the output from layout bhld into another.

    Layouts without b take the first batch entry.
    """
    for name in ("query", "key", "value", "grad_output"):
        if name not in fields:
            continue
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


def combined(may: Callable[[str], bool]) -> Change:
    """Set what the options of the request leave open: offset, scale, layout, and whether logsumexp is asked for.

    may: says of each field by its name whether the request may have it
    """

    def change(fields: Fields, random: np.random.Generator) -> None:
        q, k = lengths(fields)
        has_offset = "query_offset" in fields or random.random() < 0.2
        if has_offset and may("query_offset"):
            one = random.random() < 0.6
            fields["query_offset"] = int(random.integers(-2, k - q + 3)) if one else np.array([3, k - q])
        if "window" in fields:
            sides = {"left": int(random.integers(0, 9)), "right": int(random.integers(0, 4))}
            kept = random.choice(["left", "right", "both"])
            fields["window"] = {side: width for side, width in sides.items() if kept in (side, "both")}
        if "chunk_size" in fields:
            fields["chunk_size"] = int(random.integers(2, 12))
        if "scale" not in fields and random.random() < 0.3 and may("scale"):
            fields["scale"] = round(float(random.normal()), 3)
        if random.random() < 0.3:
            biased_norms(fields, random)
        if "normalization" not in fields and random.random() < 0.3 and may("include"):
            fields["include"] = ["logsumexp"]
        _any_plain_layout(fields, random, may)

    return change


def _any_plain_layout(fields: Fields, random: np.random.Generator, may: Callable[[str], bool]) -> None:
    heads, kv_heads = fields["query"].shape[1], fields["key"].shape[1]
    packs = may("num_heads") and may("num_kv_heads")
    layouts = [name for name in PLAIN_LAYOUTS if name == "bhld" or (may("layout") and (packs or "h" in name))]
    layout = str(random.choice(layouts))
    if layout != "bhld" and heads > 1:
        to_layout(fields, layout)
        if "h" not in layout:
            fields |= {"num_heads": heads, "num_kv_heads": kv_heads}
