"""Bugs of heads: which key/value head, which slope of ALiBi, which factor belongs to a query head."""

from __future__ import annotations

from typing import Final

import numpy as np

from tests.peers.real_bugs.parts import (
    BF16,
    F16,
    F32,
    Arrays,
    Bug,
    Fields,
    Head,
    asks,
    causal,
    collected,
    flash,
    heads_of,
    named,
    operands,
    read,
    returned,
)


def _by_heads(fields: Fields, of_head: np.ndarray) -> np.ndarray:
    """The output of the usual kernel where query head n reads key/value head of_head[n]."""
    query, key, value = operands(fields)
    q, k = query.shape[2], key.shape[2]
    visible = causal(q, k, k - q) if fields.get("is_causal") else None
    outputs = [flash(head, visible).output for head in heads_of(query, key[:, of_head], value[:, of_head])]
    return returned(fields, np.stack(outputs).reshape(*query.shape[:3], -1))


def all_are_head_0(fields: Fields, wrong: bool) -> Arrays:
    """Row offsets are divided by the stride of tokens, which floors to 0 for each head: all read and write head 0."""
    query, key, value = operands(fields)
    outputs = np.zeros((*query.shape[:3], value.shape[-1]), F32)
    for head in heads_of(query, key, value):
        n = 0 if wrong else head.h
        rows = (array[head.b, n] for array in (query, key, value))
        outputs[head.b, n] = flash(Head(head.b, n, 1, *rows, head.scale)).output
    return returned(fields, outputs)


def divided_by_kv_heads(fields: Fields, wrong: bool) -> Arrays:
    h, g = fields["query"].shape[1], fields["key"].shape[1]
    return _by_heads(fields, np.arange(h) // (g if wrong else h // g))


def colliding_blocks(fields: Fields, wrong: bool) -> Arrays:
    """Blocks are mapped to heads by % and // of the group size: some heads have two blocks, others none."""
    h, g = fields["query"].shape[1], fields["key"].shape[1]
    group, blocks = h // g, np.arange(h)
    written = blocks % group * group + blocks // group if wrong else blocks % g * group + blocks // g
    right = _by_heads(fields, np.arange(h) // group)
    outputs = np.zeros_like(right)
    outputs[:, written] = right[:, written]
    return outputs


def tiled(fields: Fields, wrong: bool) -> Arrays:
    h, g = fields["query"].shape[1], fields["key"].shape[1]
    return _by_heads(fields, np.tile(np.arange(g), h // g) if wrong else np.repeat(np.arange(g), h // g))


def query_head_as_kv_head(fields: Fields, wrong: bool) -> Arrays:
    """Memory is (l, kv heads, d). Query head n reads at n · d, which is a later token from the last kv head on."""
    query, key, value = operands(fields)
    if not wrong:
        return _by_heads(fields, np.arange(query.shape[1]) // (query.shape[1] // key.shape[1]))
    views = []
    for array in (key, value):
        _, g, k, d = array.shape
        views.append(read(array[0].swapaxes(0, 1).copy(), (query.shape[1], k, d), (d, g * d, 1))[None])
    q, k = query.shape[2], key.shape[2]
    outputs = [flash(head, causal(q, k, k - q)).output for head in heads_of(query, *views)]
    return returned(fields, np.stack(outputs)[None])


def split_queries_of_all_kv_heads(fields: Fields, wrong: bool) -> Arrays:
    """Each of two devices has half of the query heads, and all key/value heads, which it divides among its own."""
    h, g = fields["query"].shape[1], fields["key"].shape[1]
    own = np.arange(h) % (h // 2)
    return _by_heads(fields, own // (h // 2 // g) if wrong else np.arange(h) // (h // g))


def slopes(heads: int) -> np.ndarray:
    """The slopes of ALiBi: of so many heads if they are a power of 2, else of the next lower one and between them."""
    power = 2 ** int(np.log2(heads))
    first = 2.0 ** (-8 * np.arange(1, power + 1) / power)
    between = 2.0 ** (-8 * np.arange(1, 2 * power, 2) / (2 * power))
    return np.concatenate([first, between[: heads - power]])


def _with_slopes(fields: Fields, numbers: np.ndarray) -> np.ndarray:
    def one(head: Head) -> np.ndarray:
        q, k = head.sizes
        offset = k - q
        distance = np.abs(np.arange(q)[:, None] + offset - np.arange(k))
        visible = causal(q, k, offset) if fields.get("is_causal") else None
        return flash(head, visible, -F32(numbers[head.h]) * distance).output

    return collected(fields, one)


def slopes_of_any_number(fields: Fields, wrong: bool) -> Arrays:
    h = fields["query"].shape[1]
    return _with_slopes(fields, 2.0 ** (-8 * np.arange(1, h + 1) / h) if wrong else slopes(h))


def slopes_of_a_device(fields: Fields, wrong: bool) -> Arrays:
    """8 of 32 heads, the second of four devices; the slopes are those of 8 heads."""
    return _with_slopes(fields, slopes(8) if wrong else slopes(32)[8:16])


def slopes_added(fields: Fields, wrong: bool) -> Arrays:
    numbers = fields["alibi_slopes"]
    return _with_slopes(fields, -numbers if wrong else numbers)


BUGS: Final = (
    Bug(
        "BobMcDear/attorch#14",
        "The offset of a head is divided to 0: all heads read and write head 0.",
        asks(h=4, g=4, q=128),
        all_are_head_0,
    ),
    Bug(
        "PSAL-POSTECH/ONNXim#33",
        "Query head n reads key/value head n // number of key/value heads.",
        asks(h=16, g=8, q=64, d=128, dtype=F16, is_causal=True),
        divided_by_kv_heads,
        named("heads.regrouped"),
    ),
    Bug(
        "HazyResearch/HipKittens#22",
        "Blocks collide: some heads are computed twice, others never.",
        asks(h=16, g=8, q=64, d=128, dtype=BF16),
        colliding_blocks,
    ),
    Bug(
        "ekzhang/jax-js#180",
        "Key/value heads are tiled where they should be repeated.",
        asks(h=8, g=2, q=128),
        tiled,
        named("heads.tiled"),
    ),
    Bug(
        "LMCache/LMCache#3092",
        "The number of a query head is taken for that of a key/value head: later tokens are read.",
        asks(h=12, g=2, q=64, d=128, dtype=BF16, is_causal=True),
        query_head_as_kv_head,
    ),
    Bug(
        "GenerelSchwerz/llama.cpp#66",
        "Devices with half of the query heads divide all key/value heads among these.",
        asks(h=16, g=4, q=64, d=128, dtype=F16),
        split_queries_of_all_kv_heads,
        named("heads.regrouped"),
    ),
    Bug(
        "ml-explore/mlx#343",
        "Slopes of ALiBi for 12 heads are one geometric sequence, not those of 8 and 4 more.",
        asks(h=12, g=12, q=64, is_causal=True, alibi_slopes=slopes(12)),
        slopes_of_any_number,
    ),
    Bug(
        "flashinfer-ai/flashinfer#1606",
        "Each device has the slopes of ALiBi of as many heads as it has.",
        asks(h=8, g=8, q=1, k=256, d=128, dtype=F16, query_offset=255, alibi_slopes=slopes(32)[8:16]),
        slopes_of_a_device,
    ),
    Bug(
        "meta-pytorch/attention-gym#86",
        "The linear biases grow with the distance.",
        asks(h=8, g=8, q=128, dtype=BF16, is_causal=True, alibi_slopes=slopes(8)),
        slopes_added,
        named("alibi.sign"),
    ),
)
