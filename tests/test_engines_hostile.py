"""Calls of engines with arguments that are damaged at random: an answer or InvalidRequest, never another exception."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from attention_service import call
from attention_service.errors import InvalidRequest
from tests.helpers.engine_calls import Draw
from tests.helpers.engine_draws import DRAWS

EXAMPLES = 60
ODD: list[Any] = [
    0, -1, 1, 2**31, 2**63 - 1, 2**64, -(2**63) - 1, 10**400, 0.5, -0.0, 1e308, float("inf"), float("nan"), True, False,
    "", "NHD", "x" * 1000, [], [[]], [1, [2]], [None], {}, {"a": 1}, (1, 2), [0, 2**40], ["a"], [1.5, 2.5],
    np.array(3), np.array([]), np.zeros((0, 3)), np.zeros((2, 0, 3, 1)), np.array([2**62]), np.array([1, 2], np.uint64),
    np.zeros(3, bool), np.zeros((1,) * 9), np.array(["a"]), np.array([object()]), np.zeros(2, "M8[s]"),
    np.full((2, 2), 1j), np.array([np.nan]), object(), lambda: 0, b"bytes", range(3), float,
]  # fmt: skip


def damaged(value: Any, random: np.random.Generator) -> Any:
    """An argument that is changed: another value, another shape or type, or other numbers."""
    kind = int(random.integers(6))
    if kind < 2 or not isinstance(value, np.ndarray) or not value.size or value.dtype.kind in "OUM":
        return ODD[random.integers(len(ODD))]
    if kind == 2:
        return value[:-1] if random.random() < 0.5 else np.concatenate([value, value])
    if kind == 3:
        return value[..., None] if random.random() < 0.5 else value[0]
    if kind == 4:
        dtype = str(random.choice(["uint8", "int32", "uint64", "bool", "complex64", "float16", "float64", "O"]))
        with np.errstate(all="ignore"):
            return value.real.astype(np.float64).astype(dtype) if dtype != "O" else value.astype(object)
    changed = value.copy()
    odd = [-1, 0, 1, 2**31 - 1] if value.dtype.kind in "iu" and value.itemsize > 1 else [0, 1, np.nan, -100]
    with np.errstate(invalid="ignore"):
        changed[tuple(random.integers(size) for size in value.shape)] = np.array(random.choice(odd)).astype(value.dtype)
    return changed


@pytest.mark.parametrize("name", DRAWS)
def test_damaged_arguments_are_answered_or_refused(name: str) -> None:
    refused = 0
    for seed in range(EXAMPLES):
        drawn = DRAWS[name](Draw(seed))
        random = np.random.default_rng(seed)
        for _ in range(int(random.integers(1, 3))):
            changed = str(random.choice(sorted(drawn.arguments)))
            drawn.arguments[changed] = damaged(drawn.arguments[changed], random)
        try:
            call(drawn.function, version=drawn.version, **drawn.arguments)
        except InvalidRequest as error:
            refused += 1
            assert all(len(fault.sentence()) < 600 for fault in error.faults)
        except Exception as error:
            raise AssertionError(f"{name} {seed}") from error
    assert refused > EXAMPLES / 4
