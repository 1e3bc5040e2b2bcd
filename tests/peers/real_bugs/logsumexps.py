"""Bugs of the logsumexp alone: its base, its shift, its empty rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import numpy as np

from tests.peers.real_bugs.parts import (
    BF16,
    F32,
    LOG2E,
    Arrays,
    Bug,
    Fields,
    Head,
    Online,
    asks,
    causal,
    flash,
    heads_of,
    named,
    operands,
    returned,
)


def _both(fields: Fields, logsumexp: Callable[[Head, Online], np.ndarray]) -> dict[str, np.ndarray]:
    """The right output, and a logsumexp of each head."""
    query, key, value = operands(fields)
    outputs, found = [], []
    for head in heads_of(query, key, value):
        q, k = head.sizes
        visible = causal(q, k, k - q) if fields.get("is_causal") else np.ones((q, k), bool)
        if "key_lengths" in fields:
            visible &= np.arange(k) < fields["key_lengths"][head.b]
        online = flash(head, visible)
        outputs.append(online.output)
        found.append(logsumexp(head, online))
    shape = query.shape[:3]
    return {
        "output": returned(fields, np.stack(outputs).reshape(*shape, -1)),
        "logsumexp": np.stack(found).reshape(shape).astype(F32),
    }


def base_two(fields: Fields, wrong: bool) -> Arrays:
    return _both(fields, lambda _, online: online.logsumexp * F32(LOG2E if wrong else 1))


def converted_again(fields: Fields, wrong: bool) -> Arrays:
    """It is natural already, and multiplied by ln 2."""
    return _both(fields, lambda _, online: online.logsumexp / F32(LOG2E if wrong else 1))


def of_smoothed_keys(fields: Fields, wrong: bool) -> Arrays:
    """The mean of all keys is subtracted from each, which shifts all scores of a row."""

    def found(head: Head, online: Online) -> np.ndarray:
        shift = head.query @ head.key.mean(axis=0) * F32(head.scale)
        return online.logsumexp - (shift if wrong else 0)

    return _both(fields, found)


def never_written(fields: Fields, wrong: bool) -> Arrays:
    return _both(fields, lambda _, online: np.zeros_like(online.top) if wrong else online.logsumexp)


def infinite_if_empty(fields: Fields, wrong: bool) -> Arrays:
    def found(_: Head, online: Online) -> np.ndarray:
        return np.where(online.total == 0, np.inf if wrong else -np.inf, online.logsumexp)

    return _both(fields, found)


BUGS: Final = (
    Bug(
        "lightseekorg/tokenspeed#571",
        "The logsumexp is stored to base 2, as the softmax is computed.",
        asks(h=8, q=128, d=128, dtype=BF16, is_causal=True),
        base_two,
        named("logsumexp.base2"),
    ),
    Bug(
        "pytorch/pytorch#181645",
        "A natural logsumexp is converted from base 2.",
        asks(h=4, q=128, dtype=BF16),
        converted_again,
        named("logsumexp.base2"),
    ),
    Bug(
        "ROCm/aiter#3334",
        "The logsumexp is that of keys whose mean was subtracted.",
        asks(h=4, g=2, q=128, d=128, dtype=BF16),
        of_smoothed_keys,
    ),
    Bug(
        "meta-pytorch/attention-gym#37",
        "The logsumexp is 0 everywhere.",
        asks(b=2, h=8, g=8, q=128, dtype=BF16),
        never_written,
    ),
    Bug(
        "flashinfer-ai/flashinfer#3943",
        "The logsumexp of a sequence without keys is +∞.",
        asks(b=3, h=8, g=1, q=2, k=256, d=128, dtype=BF16, key_lengths=[256, 0, 99]),
        infinite_if_empty,
        named("logsumexp.empty_positive"),
    ),
)
