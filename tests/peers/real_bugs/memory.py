"""Bugs of addresses: strides, layouts, pages, offsets that overflow, parts of a tile that are read elsewhere."""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from tests.peers.real_bugs.parts import (
    BF16,
    F16,
    F32,
    Arrays,
    Bug,
    Fields,
    Head,
    Online,
    asks,
    causal,
    collected,
    divided,
    flash,
    heads_of,
    named,
    normal,
    operands,
    read,
    returned,
    stale,
    tiles,
)


def _computed(fields: Fields, query: np.ndarray, key: np.ndarray, value: np.ndarray) -> np.ndarray:
    """The output of the usual kernel for operands (b, h, l, d) that it read somehow."""
    q, k = query.shape[2], key.shape[2]
    visible = causal(q, k, k - q) if fields.get("is_causal") else None
    outputs = [flash(head, visible).output for head in heads_of(query, key, value)]
    return returned(fields, np.stack(outputs).reshape(*query.shape[:3], -1))


def entries_apart_by_heads(fields: Fields, wrong: bool) -> Arrays:
    """(b, l, h, d) in memory. Head h of entry b starts at (b · heads + h) times the stride of heads."""
    if not wrong:
        return _computed(fields, *operands(fields))
    views = []
    for array in operands(fields):
        b, h, n, d = array.shape
        views.append(read(array.swapaxes(1, 2).copy(), (b, h, n, d), (h * d, d, h * d, 1)))
    return _computed(fields, *views)


def query_taken_as_contiguous(fields: Fields, wrong: bool) -> Arrays:
    """(b, l, h, d) in memory. The strides of key and value are passed on, that of the query is not."""
    query, key, value = operands(fields)
    if wrong:
        query = query.swapaxes(1, 2).reshape(query.shape)
    return _computed(fields, query, key, value)


def features_taken_as_contiguous(fields: Fields, wrong: bool) -> Arrays:
    """(b, h, d, l) in memory: the stride of tokens is 1, that of features is taken to be 1."""
    if not wrong:
        return _computed(fields, *operands(fields))
    views = []
    for array in operands(fields):
        b, h, n, d = array.shape
        views.append(read(array.swapaxes(2, 3).copy(), (b, h, n, d), (h * d * n, d * n, 1, 1)))
    return _computed(fields, *views)


def offsets_that_wrap(fields: Fields, wrong: bool) -> Arrays:
    """Query and key in a buffer (l, 3, h, d). Offsets have 18 bits here, in the place of 32, and wrap."""
    query, key, value = operands(fields)
    _, h, n, d = query.shape
    if wrong:
        buffer = np.stack([query[0], key[0], value[0]]).transpose(2, 0, 1, 3).copy()  # l 3 h d
        before = stale(2**17)
        memory = np.concatenate([before, buffer.ravel()])
        offsets = np.arange(n)[None, :, None] * 3 * h * d + np.arange(h)[:, None, None] * d + np.arange(d)
        wrapped = (offsets + 2**17) % 2**18 - 2**17
        query, key = (memory[len(before) + role * h * d + wrapped][None] for role in (0, 1))
    return _computed(fields, query, key, value)


def values_step_by_their_width(fields: Fields, wrong: bool) -> Arrays:
    """Keys are taken in blocks of as many as a key has features, values of as many as a value has."""

    def one(head: Head) -> np.ndarray:
        d, e = head.key.shape[-1], head.value.shape[-1]
        right = flash(head, tile=d)
        sums = np.zeros_like(right.sums)
        for n, keys in enumerate(tiles(len(head.key), d)):
            weights = np.exp(head.scores(keys) - right.top[:, None])
            if wrong:
                count = min(e, weights.shape[1])
                sums += weights[:, :count] @ head.value[n * e : n * e + count]
            else:
                sums += weights @ head.value[keys]
        return divided(sums, right.total)

    return collected(fields, one)


def first_128_features(fields: Fields, wrong: bool) -> Arrays:
    def one(head: Head) -> np.ndarray:
        used = slice(0, 128 if wrong else None)
        scores = head.query[:, used] @ head.key[:, used].T * F32(head.scale)
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        return divided(weights @ head.value, weights.sum(axis=-1))

    return collected(fields, one)


def second_half_of_keys_not_reached(fields: Fields, wrong: bool) -> Arrays:
    """The offset of the key does not move on behind 64 features."""
    cap = F32(fields["softcap"])

    def one(head: Head) -> np.ndarray:
        second = slice(0, 64) if wrong else slice(64, 128)
        products = head.query[:, :64] @ head.key[:, :64].T + head.query[:, 64:] @ head.key[:, second].T
        scores = cap * np.tanh(products * F32(head.scale) / cap)
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        return divided(weights @ head.value, weights.sum(axis=-1))

    return collected(fields, one)


def all_tiles_to_the_first(fields: Fields, wrong: bool) -> Arrays:
    """Programs of 64 features each store their result at feature 0; the last one remains."""

    def one(head: Head) -> np.ndarray:
        right = flash(head).output
        stored = np.zeros_like(right)
        for features in tiles(right.shape[1], 64):
            stored[:, 0:64] = right[:, features]
        return stored if wrong else right

    return collected(fields, one)


def half_of_each_step(fields: Fields, wrong: bool) -> Arrays:
    """A loop in steps of 32 keys computes scores of 16."""

    def one(head: Head) -> np.ndarray:
        online = Online(len(head.query), head.value.shape[-1])
        for step in tiles(len(head.key), 32):
            keys = slice(step.start, min(step.stop, step.start + (16 if wrong else 32)))
            online.add(head.scores(keys), head.value[keys])
        return online.output

    return collected(fields, one)


def upper_features_lost(fields: Fields, wrong: bool) -> Arrays:
    """Threads behind the width of a head race for its last four features, which end as 0."""

    def one(head: Head) -> np.ndarray:
        right = flash(head).output.copy()
        if wrong:
            right[:, -4:] = 0
        return right

    return collected(fields, one)


def group_of_thread(fields: Fields, wrong: bool) -> Arrays:
    """Values are summed by groups of threads, one for each 128 keys; a block has threads for the first only."""

    def one(head: Head) -> np.ndarray:
        right = flash(head)
        groups = list(tiles(len(head.key), 128))
        sums = np.zeros_like(right.sums)
        for keys in groups[: 1 if wrong else None]:
            sums += np.exp(head.scores(keys) - right.top[:, None]) @ head.value[keys]
        return divided(sums, right.total)

    return collected(fields, one)


def a_page_too_many(fields: Fields, wrong: bool) -> Arrays:
    """The table has one more page of 16 where a sequence fills its last one. The page holds zeros."""

    def one(head: Head) -> np.ndarray:
        length = fields["key_lengths"][head.b]
        more = 16 if wrong and length % 16 == 0 else 0
        zeros = (np.zeros((more, array.shape[-1]), F32) for array in (head.key, head.value))
        return flash(head.keys(slice(0, length)).longer(*zeros)).output

    return collected(fields, one)


def pages_taken_as_contiguous(fields: Fields, wrong: bool) -> Arrays:
    """Keys and values alternate by page of 16 in one buffer, (pages, 2, 16, h, d). A page is taken to follow a page."""
    query, key, value = operands(fields)
    _, g, k, d = key.shape
    table = np.random.default_rng(3).permutation(k // 16)  # logical page -> physical page
    buffer = np.zeros((k // 16, 2, 16, g, d), F32)
    for n, page in enumerate(table):
        rows = slice(16 * n, 16 * n + 16)
        buffer[page, 0], buffer[page, 1] = key[0, :, rows].swapaxes(0, 1), value[0, :, rows].swapaxes(0, 1)
    halves = buffer.reshape(-1, 16, g, d)
    step = 1 if wrong else 2
    key, value = (np.concatenate([halves[step * page + role] for page in table]) for role in (0, 1))
    return _computed(fields, query, key.swapaxes(0, 1)[None], value.swapaxes(0, 1)[None])


def table_not_passed(fields: Fields, wrong: bool) -> Arrays:
    """Keys and values are in pages of 16 that other sequences have, too. The pool is read from its start."""
    query, key, value = operands(fields)
    _, g, k, _ = key.shape
    table = np.random.default_rng(4).permutation(3 * k // 16)[: k // 16]
    views = []
    for role, array in enumerate((key, value)):
        pool = stale(3 * k // 16, 16, g, array.shape[-1], seed=role)
        pool[table] = array[0].swapaxes(0, 1).reshape(k // 16, 16, g, -1)
        pages = pool[: k // 16] if wrong else pool[table]
        views.append(pages.reshape(k, g, -1).swapaxes(0, 1)[None])
    return _computed(fields, query, *views)


def hole_in_the_cache(fields: Fields, wrong: bool) -> Arrays:
    """The first decoding step writes one slot too far. The slot before it was never written, and is read."""

    def one(head: Head) -> np.ndarray:
        new = head.keys(slice(len(head.key) - 1, None))
        if not wrong:
            return flash(head).output
        slot = stale(2, 1, head.key.shape[-1], seed=9)
        return flash(head.keys(slice(0, len(head.key) - 1)).longer(*slot).longer(new.key, new.value)).output

    return collected(fields, one)


def pages_of_another_order(fields: Fields, wrong: bool) -> Arrays:
    """Pages hold (16 tokens, heads, d), and are read as (heads, 16 tokens, d)."""
    query, key, value = operands(fields)
    views = []
    for array in (key, value):
        _, g, k, d = array.shape
        pages = array[0].swapaxes(0, 1).reshape(k // 16, 16, g, d)
        read_pages = pages.reshape(k // 16, g, 16, d) if wrong else pages.swapaxes(1, 2)
        views.append(read_pages.swapaxes(0, 1).reshape(1, g, k, d))
    return _computed(fields, query, *views)


def heads_beside_tokens(fields: Fields, wrong: bool) -> Arrays:
    """A function of (b, h, l, d) is called with (b, l, h, d): the heads of a token attend to each other."""
    query, key, value = operands(fields)
    if not wrong:
        return _computed(fields, query, key, value)
    moved = _computed({**fields, "layout": "bhld"}, *(array.swapaxes(1, 2) for array in (query, key, value)))
    return moved.astype(fields["query"].dtype)


def reshaped_without_moving(fields: Fields, wrong: bool) -> Arrays:
    """The output (b, h, l, d) is reshaped to (b, l, h · d) as it is in memory."""
    query, key, value = operands(fields)
    outputs = np.stack([flash(head).output for head in heads_of(query, key, value)])
    b, h, q, _ = query.shape
    outputs = outputs.reshape(b, h, q, -1)
    moved: Any = outputs.reshape(b, q, h, -1) if wrong else outputs.swapaxes(1, 2)
    return np.asarray(moved).astype(fields["query"].dtype)


_PAST = {"past_key": normal(1, 2, 127, 128), "past_value": normal(1, 2, 127, 128)}

BUGS: Final = (
    Bug(
        "pytorch/pytorch#181133",
        "The stride of batch entries is not passed: entries behind the first are read some tokens further only.",
        asks(b=4, h=4, g=4, q=64),
        entries_apart_by_heads,
    ),
    Bug(
        "pytorch/pytorch#163597",
        "The strides of the query are not passed, those of key and value are.",
        asks(b=2, h=8, g=8, q=8, k=256),
        query_taken_as_contiguous,
        named("query.layout"),
    ),
    Bug(
        "pytorch/pytorch#187506",
        "Features that are not contiguous are read as if they were.",
        asks(b=2, h=4, g=4, q=128),
        features_taken_as_contiguous,
    ),
    Bug(
        "thu-ml/SageAttention#386",
        "Offsets of query and key in a fused buffer overflow: later tokens are read from other memory.",
        asks(h=4, g=4, q=256),
        offsets_that_wrap,
    ),
    Bug(
        "ikawrakow/ik_llama.cpp#2031",
        "Values are read in blocks of the width of values, keys in blocks of the width of keys.",
        asks(h=4, g=1, q=1, k=576, d=192, e=128, dtype=F16),
        values_step_by_their_width,
    ),
    Bug(
        "gittensor-ai-lab/sparkinfer#330",
        "128 features are hard-coded: scores are those of the first half of 256.",
        asks(h=16, g=2, q=1, k=512, d=256, dtype=BF16),
        first_128_features,
        named("features.first_part"),
    ),
    Bug(
        "AMD-Ecosystem/flashinfer#83",
        "The offset of keys does not move on to the second 64 features.",
        asks(h=8, g=4, q=15, k=127, d=128, dtype=F16, softcap=8.0),
        second_half_of_keys_not_reached,
        named("features.read_again"),
    ),
    Bug(
        "fla-org/flash-linear-attention#1028",
        "All tiles of features are stored at the first one.",
        asks(b=2, h=4, g=2, q=1, k=256, e=320),
        all_tiles_to_the_first,
    ),
    Bug(
        "microsoft/onnxruntime#28520",
        "Keys 16 to 31 of each step of 32 are skipped.",
        asks(h=8, g=4, q=128, d=128, dtype=F16),
        half_of_each_step,
    ),
    Bug(
        "microsoft/onnxruntime#29593",
        "The last four features of a head are 0.",
        asks(b=2, h=8, g=2, q=1, k=256, d=8),
        upper_features_lost,
    ),
    Bug(
        "timtoole02/Camelid#714",
        "Only the first 128 keys add their values; the sum that divides is that of all.",
        asks(h=8, g=4, q=1, k=300, d=128),
        group_of_thread,
    ),
    Bug(
        "pegainfer-project/pegainfer#291",
        "A page of zeros counts where the length is a multiple of the page.",
        asks(b=3, h=8, q=1, k=256, d=128, dtype=BF16, key_lengths=[256, 250, 240]),
        a_page_too_many,
    ),
    Bug(
        "ROCm/aiter#3498",
        "The stride of pages is computed, not read: keys and values are taken from each other's pages.",
        asks(h=4, g=2, q=1, k=256, d=128, dtype=BF16),
        pages_taken_as_contiguous,
    ),
    Bug(
        "tanishqkumar/ssd#23",
        "The table of pages is not passed: pages of other sequences are read.",
        asks(h=4, g=2, q=64, k=256, d=128, dtype=BF16, is_causal=True, query_offset=192),
        table_not_passed,
    ),
    Bug(
        "microsoft/onnxruntime-genai#2354",
        "New keys are written one slot too far, and the slot before them is read.",
        asks(h=4, g=2, q=1, d=128, **_PAST),
        hole_in_the_cache,
    ),
    Bug(
        "NVIDIA/TensorRT-LLM#6507",
        "Pages have tokens before heads, and are read as if heads came first.",
        asks(h=8, g=4, q=64, k=256, dtype=BF16, is_causal=True, query_offset=192),
        pages_of_another_order,
    ),
    Bug(
        "facebookresearch/xformers#677",
        "Heads and tokens are confused: the heads of a token attend to each other.",
        asks(h=16, g=16, q=256, layout="blhd"),
        heads_beside_tokens,
        named("heads.as_tokens"),
    ),
    Bug(
        "jsbaan/transformer-from-scratch#4",
        "Heads are joined without moving them behind the tokens.",
        asks(b=2, h=4, g=4, q=128, layout="blhd"),
        reshaped_without_moving,
        named("output.unmoved"),
    ),
)
