"""Attention over parts of the keys, merged: what split, cascade, ring and context-parallel kernels do at their end."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

import numpy as np

from attention_service.attention.arrays import is_number, wider
from attention_service.errors import InvalidArray, MissingField, Overflow, ShapeMismatch, shape

# The factor of natural logarithms that makes them logarithms of this base.
BASES: Final = {"e": 1.0, "2": 1 / math.log(2)}


class State(NamedTuple):
    """What attention over a part of the keys returned: output (…, e), logsumexp (…)."""

    output: np.ndarray
    logsumexp: np.ndarray


def merge(
    parts: Sequence[State],
    base: str = "e",
    sinks: np.ndarray | None = None,
    names: Sequence[tuple[str, str]] | None = None,
    check: Callable[[], None] = lambda: None,
) -> State:
    """The output and the logsumexp over the keys of all parts, in float64.

    base: of all logarithms, "e" or "2"; sinks: one natural logit for each row, broadcast to (…), that no part has yet
    names: of output and logsumexp of each part, for errors; check: called before each part

    A part whose logsumexp is infinite of either sign saw no key and weighs nothing, whatever its output holds. A row
    that no part has a key for has output 0 and logsumexp minus infinity. Errors: as of `checked_sums`.
    """
    sums = checked_sums(
        parts, names or [(f"parts/{n}/output", f"parts/{n}/logsumexp") for n in range(len(parts))], check
    )
    logits = np.where(np.isinf(sums), -np.inf, sums / BASES[base])
    if sinks is not None:  # a part whose output is 0
        logits = np.concatenate([logits, np.broadcast_to(sinks, logits.shape[1:])[None]])
    most = logits.max(axis=0)
    weights = np.exp(logits - np.where(most > -np.inf, most, 0.0))
    total = weights.sum(axis=0)
    output = np.zeros(parts[0].output.shape)
    with np.errstate(invalid="ignore", divide="ignore"):  # NaN that weighs nothing, and the logarithm of 0
        for weight, part in zip(weights, parts, strict=False):
            check()
            # Divided first: a part alone keeps its numbers, and none of them overflows.
            share = weight / np.where(total > 0, total, 1.0)
            output += np.where((weight > 0)[..., None], share[..., None] * part.output.astype(np.float64), 0.0)
        return State(output, in_base(most + np.log(total), base))


def in_base(sums: np.ndarray, base: str) -> np.ndarray:
    """Natural logarithms in a base. Errors: Overflow for finite ones that float64 cannot hold then."""
    with np.errstate(over="ignore"):
        scaled: np.ndarray = sums * BASES[base]
    if (np.isinf(scaled) & np.isfinite(sums)).any():
        raise Overflow.at("", f"a logsumexp that float64 can hold in base {base}", "a larger one")
    return scaled


def rounded(name: str, array: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """The result of this name in a type. Errors: Overflow for finite numbers that the type cannot hold."""
    with np.errstate(over="ignore"):
        typed = array.astype(dtype)
    if (np.isinf(typed) & np.isfinite(array)).any():
        raise Overflow.at("/dtype", f"a type that can hold the {name}", dtype.name, wider(dtype))
    return typed


def checked_sums(
    parts: Sequence[State], names: Sequence[tuple[str, str]], check: Callable[[], None] = lambda: None
) -> np.ndarray:
    """The logsumexps of all parts as one array in float64.

    Errors: MissingField, ShapeMismatch; InvalidArray for NaN in a logsumexp, or in the output of a part with keys.
    """
    if not parts:
        raise MissingField.at("/parts", "at least one part", "none")
    expected = parts[0].output.shape
    for (output, sums), (first, second) in zip(parts, names, strict=True):
        check()
        for name, array in ((first, output), (second, sums)):
            if not is_number(array.dtype):
                raise InvalidArray.of(f"/{name}", "numbers", array)
        if output.shape != expected:
            raise ShapeMismatch.of(f"/{first}", f"{shape(expected)}, as of the first part", output)
        if sums.shape != expected[:-1]:
            raise ShapeMismatch.of(f"/{second}", f"{shape(expected[:-1])}, a number a row", sums)
        if np.isnan(sums).any():
            raise InvalidArray.at(f"/{second}", "numbers, or an infinity for no keys", "NaN")
        if not np.isfinite(output[np.isfinite(sums)]).all():
            raise InvalidArray.at(f"/{first}", "finite numbers where the part has keys", "NaN or an infinity")
    return np.stack([part.logsumexp.astype(np.float64) for part in parts])
