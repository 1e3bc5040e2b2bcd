"""Random requests with damaged answers, which no formula planted: comparisons must judge any of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import numpy as np

from attention_service.comparison.inputs import make_input
from attention_service.library import attend
from tests.helpers.planted import EVERY, random_recipe

# What else is sent beside an output.
INCLUDED: Final[tuple[list[str], ...]] = (
    ["logsumexp"],
    ["attention_weights"],
    ["scaled_scores"],
    [],
    ["logsumexp", "attention_weights"],
)


def _with_nan(random: np.random.Generator, array: np.ndarray) -> np.ndarray:
    found = array.copy()
    found.flat[random.integers(found.size)] = np.nan
    return found


def _in_half(_: np.random.Generator, array: np.ndarray) -> np.ndarray:
    found = array.copy()
    found[..., : max(1, array.shape[-2] // 2), :] += 0.1
    return found


def _rolled(random: np.random.Generator, array: np.ndarray) -> np.ndarray:
    return np.roll(array, 1, random.integers(array.ndim))


DAMAGES: Final[tuple[Callable[[np.random.Generator, np.ndarray], np.ndarray], ...]] = (
    lambda random, array: array + 0.3 * random.normal(size=array.shape),
    lambda _, array: np.zeros_like(array),
    lambda _, array: array[..., ::-1],
    _rolled,
    lambda _, array: 2 * array,
    _with_nan,
    lambda _, array: array + np.roll(array, 1, array.ndim - 2),
    _in_half,
    lambda _, array: np.full_like(array, array.mean()),
    lambda random, array: array.take(random.permutation(array.shape[-2]), array.ndim - 2),
)


def draw_corrupted(seed: int) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """Arrays of which about six in ten are damaged, and the fields of their request: with gradients in one of three."""
    random = np.random.default_rng(seed)
    fields = make_input(random_recipe(random, (), EVERY), seed)
    asked: dict[str, Any] = {"include": INCLUDED[seed % len(INCLUDED)]}
    if seed % 3 == 0:
        output = attend(**fields, include=[]).output
        fields["grad_output"] = random.normal(size=output.shape).astype(output.dtype)
        asked = {"gradients": "all"}
    sent = {}
    for name, array in attend(**fields, **asked).arrays.items():
        if isinstance(array, np.ndarray):
            is_damaged = random.random() < 0.6 and array.ndim >= 2
            damage = DAMAGES[random.integers(len(DAMAGES))]
            sent[name] = damage(random, array.astype(np.float64)).astype(array.dtype) if is_damaged else array
    return sent, fields
