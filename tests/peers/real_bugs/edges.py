"""Bugs of what a query may see by position: causal masks, sliding windows, tiles that are skipped."""

from __future__ import annotations

from typing import Final

import numpy as np

from tests.peers.real_bugs.parts import (
    BF16,
    F16,
    Arrays,
    Bug,
    Fields,
    Head,
    Online,
    asks,
    band,
    causal,
    collected,
    flash,
    masked,
    named,
    normal,
    tiles,
)


def end_by_row(fields: Fields, wrong: bool) -> Arrays:
    def visible(head: Head) -> np.ndarray:
        q, k = head.sizes
        ends = np.minimum(k, np.arange(q) + 1 + (0 if wrong else k - q))
        return np.arange(k) < ends[:, None]

    return masked(fields, visible)


def lower_triangle(fields: Fields, wrong: bool) -> Arrays:
    def visible(head: Head) -> np.ndarray:
        q, k = head.sizes
        return np.tril(np.ones((q, k), bool), 0 if wrong else k - q)

    return masked(fields, visible)


def last_with_last(fields: Fields, wrong: bool) -> Arrays:
    def visible(head: Head) -> np.ndarray:
        q, k = head.sizes
        return causal(q, k, k - q if wrong else 0)

    return masked(fields, visible)


def rows_as_if_packed(fields: Fields, wrong: bool) -> Arrays:
    def visible(head: Head) -> np.ndarray:
        q, k = head.sizes
        packed = head.group if wrong else 1
        return np.arange(k) <= np.arange(q)[:, None] // packed

    return masked(fields, visible)


def tiles_up_to_the_diagonal(fields: Fields, wrong: bool) -> Arrays:
    def one(head: Head) -> np.ndarray:
        q, k = head.sizes
        outputs = []
        for rows in tiles(q, 16):
            end = min(k, -(-rows.stop // 32) * 32) if wrong else k
            outputs.append(flash(head.rows(rows).keys(slice(0, end)), fields["mask"][rows, :end], tile=32).output)
        return np.concatenate(outputs)

    return collected(fields, one)


def _image_and_text(length: int, start: int, stop: int) -> np.ndarray:
    """A causal mask whose tokens from start to stop see each other."""
    mask = causal(length, length)
    mask[start:stop, start:stop] = True
    return mask


def symmetric_window(fields: Fields, wrong: bool) -> Arrays:
    left = fields["window"]["left"]
    return masked(fields, lambda head: band(*head.sizes, left=left, right=left if wrong else 0))


def no_window(fields: Fields, wrong: bool) -> Arrays:
    window = {} if wrong else fields["window"]
    return masked(fields, lambda head: band(*head.sizes, **window))


def window_without_right_side(fields: Fields, wrong: bool) -> Arrays:
    left, right = fields["window"]["left"], fields["window"]["right"]
    return masked(fields, lambda head: band(*head.sizes, left=left, right=None if wrong else right))


def window_of_all_tokens(fields: Fields, wrong: bool) -> Arrays:
    """The number of tokens of the window, its own among them, taken for the distance of its last key."""
    tokens = fields["window"]["left"] + 1
    left = tokens if wrong else tokens - 1
    return masked(fields, lambda head: band(*head.sizes, left=left, right=0))


def window_exclusive(fields: Fields, wrong: bool) -> Arrays:
    """(i - left, i] where [i - left, i] is meant."""
    left = fields["window"]["left"]

    def visible(head: Head) -> np.ndarray:
        keys, rows = np.arange(head.sizes[1]), np.arange(head.sizes[0])[:, None]
        return (keys <= rows) & ((keys > rows - left) if wrong else (keys >= rows - left))

    return masked(fields, visible)


def window_before_the_token(fields: Fields, wrong: bool) -> Arrays:
    """Decoding whose window leaves its own token out of the count."""
    local = fields["window"]["left"] + 1

    def one(head: Head) -> np.ndarray:
        start = max(0, len(head.key) - local - (1 if wrong else 0))
        return flash(head.keys(slice(start, None))).output

    return collected(fields, one)


def window_lost_in_decoding(fields: Fields, wrong: bool) -> Arrays:
    def one(head: Head) -> np.ndarray:
        start = 0 if wrong else len(head.key) - fields["window"]["left"] - 1
        return flash(head.keys(slice(start, None))).output

    return collected(fields, one)


def tiles_safe_at_the_end_only(fields: Fields, wrong: bool) -> Arrays:
    """Tiles that the causal mask shows to all rows of a block are computed without any mask."""
    tile, window = 16, fields["window"]["left"] + 1

    def one(head: Head) -> np.ndarray:
        (q, k), outputs = head.sizes, []
        context = k - q
        for rows in tiles(q, 16):
            block = head.rows(rows)
            online = Online(rows.stop - rows.start, head.value.shape[-1])
            visible = band(q, k, context, left=window - 1, right=0)[rows]
            first = max(0, context + rows.start - window + 1) // tile
            safe = (context + rows.start + 1) // tile
            for n in range(first, -(-(context + rows.stop) // tile)):
                keys = slice(n * tile, min(k, (n + 1) * tile))
                scores = block.scores(keys)
                if n >= safe or not wrong:
                    scores = np.where(visible[:, keys], scores, -np.inf)
                online.add(scores, head.value[keys])
            outputs.append(online.output)
        return np.concatenate(outputs)

    return collected(fields, one)


def never_causal(fields: Fields, wrong: bool) -> Arrays:
    return masked(fields, lambda head: band(*head.sizes, right=None if wrong else 0))


def always_causal(fields: Fields, wrong: bool) -> Arrays:
    return masked(fields, lambda head: band(*head.sizes, right=0 if wrong else None))


def as_many_keys_as_queries(fields: Fields, wrong: bool) -> Arrays:
    """The number of tiles of keys is computed from the length of the query."""

    def one(head: Head) -> np.ndarray:
        length = head.sizes[0 if wrong else 1]
        online = Online(head.sizes[0], head.value.shape[-1])
        for n in range(length // 64):
            keys = slice(64 * n, 64 * n + 64)
            online.add(head.scores(keys), head.value[keys])
        return online.output

    return collected(fields, one)


def offset_of_the_first_entry(fields: Fields, wrong: bool) -> Arrays:
    offsets, lengths = fields["query_offset"], fields["key_lengths"]

    def visible(head: Head) -> np.ndarray:
        q, k = head.sizes
        return causal(q, k, offsets[0 if wrong else head.b]) & (np.arange(k) < lengths[head.b])

    return masked(fields, visible)


def past_the_length(fields: Fields, wrong: bool) -> Arrays:
    """A causal decoding adds the rows of its tile to the number of keys."""

    def one(head: Head) -> np.ndarray:
        return flash(head.keys(slice(0, fields["key_lengths"][head.b] + (8 if wrong else 0)))).output

    return collected(fields, one)


def window_around_each_row(fields: Fields, wrong: bool) -> Arrays:
    def visible(head: Head) -> np.ndarray:
        q, k = head.sizes
        return band(q, k, k - q, left=100, right=100) if wrong else fields["mask"]

    return masked(fields, visible)


def _canvas(q: int, k: int, window: int) -> np.ndarray:
    """The last q tokens see each other, and as many keys before the first of them."""
    return np.broadcast_to(np.arange(k) >= k - q - window, (q, k)).copy()


_PAST = {"past_key": normal(1, 2, 224, 64), "past_value": normal(1, 2, 224, 64)}

BUGS: Final = (
    Bug(
        "gittensor-ai-lab/sparkinfer#3",
        "The last key of row i is key i, although the queries are the last tokens of the sequence.",
        asks(q=64, k=192, is_causal=True, query_offset=128),
        end_by_row,
        named("causal.top_left"),
    ),
    Bug(
        "tinygrad/tinygrad#15949",
        "The causal mask is the lower triangle of new queries and all keys, the past counted from its first key.",
        asks(q=32, is_causal=True, **_PAST),
        lower_triangle,
        named("causal.top_left"),
    ),
    Bug(
        "pytorch/executorch#22426",
        "The causal mask aligns the last query with the last key where the first ones are meant.",
        asks(q=16, k=128, is_causal=True, query_offset=0),
        last_with_last,
        named("causal.bottom_right"),
    ),
    Bug(
        "Dao-AILab/flash-attention#2528",
        "Rows are divided by the size of a group, as if heads were packed into rows: row i ends at key i // 4.",
        asks(h=8, q=128, d=128, dtype=BF16, is_causal=True),
        rows_as_if_packed,
        named("causal.packed_group"),
    ),
    Bug(
        "vllm-project/vllm#30974",
        "Tiles behind the diagonal are skipped, although tokens of an image see each other.",
        asks(q=256, dtype=BF16, mask=_image_and_text(256, 40, 180)),
        tiles_up_to_the_diagonal,
    ),
    Bug(
        "vllm-project/flash-attention#154",
        "A causal sequence of a layer with a window (w, w) is not causal: it sees w tokens of the future.",
        asks(q=256, dtype=BF16, is_causal=True, window={"left": 64}),
        symmetric_window,
        named("causal.other_offset"),
    ),
    Bug(
        "jax-ml/jax#32300",
        "The window is ignored where there is no mask.",
        asks(h=4, g=4, q=256, dtype=BF16, window={"left": 0, "right": 31}),
        no_window,
        named("window.absent"),
    ),
    Bug(
        "jax-ml/jax#39576",
        "A window (left, 0) without a causal mask passes only its left side on, so that all of the future is seen.",
        asks(h=4, g=4, q=256, dtype=BF16, window={"left": 40, "right": 0}),
        window_without_right_side,
        named("window.one_sided"),
    ),
    Bug(
        "huggingface/transformers#39408",
        "The number of tokens in the window is passed as the distance of the last key, which is one less.",
        asks(q=256, dtype=BF16, is_causal=True, window={"left": 63}),
        window_of_all_tokens,
        named("window.left_plus_one"),
    ),
    Bug(
        "NVIDIA/TransformerEngine#1197",
        "The left end of the window is exclusive where an inclusive one is meant.",
        asks(h=8, g=8, q=256, dtype=F16, is_causal=True, window={"left": 100}),
        window_exclusive,
        named("window.left_minus_one"),
    ),
    Bug(
        "microsoft/onnxruntime#25927",
        "The local window of a decoding does not count the current token, so that it has one key more.",
        asks(b=2, h=8, q=1, k=200, d=128, dtype=F16, is_causal=True, query_offset=199, window={"left": 127}),
        window_before_the_token,
        named("window.left_plus_one"),
    ),
    Bug(
        "ROCm/aiter#5741",
        "Tiles that no row needs a causal mask for are computed without the mask of the window, too.",
        asks(h=4, q=64, k=256, dtype=BF16, is_causal=True, query_offset=192, window={"left": 63}),
        tiles_safe_at_the_end_only,
    ),
    Bug(
        "EricLBuehler/mistral.rs#2094",
        "Decoding from pages is called without the window.",
        asks(b=2, h=8, q=1, k=320, d=128, dtype=BF16, is_causal=True, query_offset=319, window={"left": 127}),
        window_lost_in_decoding,
        named("window.absent"),
    ),
    Bug(
        "keras-team/keras#23038",
        "The causal mask is dropped where the fused path is not taken.",
        asks(h=4, g=4, q=128, is_causal=True),
        never_causal,
        named("causal.absent"),
    ),
    Bug(
        "openvinotoolkit/openvino#37653",
        "The attribute causal=0 is not read: encoders get a causal mask.",
        asks(h=4, q=128, dtype=F16),
        always_causal,
        named("causal.added"),
    ),
    Bug(
        "jax-ml/jax#24491",
        "The loop over tiles of keys ends at the length of the query.",
        asks(h=4, g=4, q=128, k=512, dtype=F16),
        as_many_keys_as_queries,
        named("keys.as_queries"),
    ),
    Bug(
        "EricLBuehler/candle-vllm#140",
        "All entries of a batch have the causal mask for the position of the first.",
        asks(b=3, q=16, k=256, dtype=BF16, is_causal=True, query_offset=[200, 64, 240], key_lengths=[216, 80, 256]),
        offset_of_the_first_entry,
        named("causal.first_offset"),
    ),
    Bug(
        "vllm-project/vllm-xpu-kernels#181",
        "A causal decoding reads the rows of its tile more keys than the sequence has.",
        asks(b=3, h=8, q=1, k=256, d=128, dtype=BF16, key_lengths=[200, 129, 77]),
        past_the_length,
    ),
    Bug(
        "vllm-project/vllm#49202",
        "Each row of a canvas has a window of its own, although all see the same keys before the canvas.",
        asks(q=64, k=320, dtype=BF16, mask=_canvas(64, 320, 100)),
        window_around_each_row,
    ),
)
