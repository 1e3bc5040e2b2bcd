"""Rotary embeddings of checkpoints: their configuration as the field `rotary` of a request.

Sources of the scalings: modeling_rope_utils of Hugging Face transformers; YaRN: https://arxiv.org/abs/2309.00071.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, Final

import numpy as np

from attention_service.errors import quote
from attention_service.layers.tensors import BadFile

TYPE: Final = "rope_type"
# The largest number of a configuration: what is greater is none.
MAX_NUMBER: Final = 1e300
# Keys that all types have.
COMMON: Final = frozenset({TYPE, "type", "rope_theta", "partial_rotary_factor"})


def rotary_fields(rope: Mapping[str, Any], head_dim: int, positions: int) -> dict[str, Any]:
    """The fields `rotary.…` of a request for the configuration of a rotary embedding: a base, or tables.

    rope: with rope_theta, and rope_type unless it is the default one
    positions: rows of a table, where a base cannot say it

    Errors: BadFile for a type or a key that is not known here.
    """
    kind = rope.get(TYPE) or rope.get("type") or "default"
    base = positive(rope, "rope_theta")
    dim = head_dim if kind in WHOLE else int(head_dim * _share(rope))
    turned = {} if dim == head_dim else {"rotary.dim": dim}
    if not isinstance(kind, str) or kind not in KEYS:
        raise BadFile(f"rope type {quote(str(kind))} cannot be expressed; known are {', '.join(KEYS)}")
    strange = sorted(key for key, value in rope.items() if value is not None and key not in KEYS[kind] | COMMON)
    if strange:
        raise BadFile(f"the key {quote(strange[0])} of rope type {kind} is not known")
    if kind == "yarn" and dim % 2:  # transformers has a ramp of fewer pairs than frequencies for them
        raise BadFile(f"rope type yarn: expected an even number of features to turn, got number {dim}")
    if kind == "default":
        return {"rotary.base": base, **turned}
    try:
        with np.errstate(all="ignore"):
            frequencies, factor = SCALINGS[kind](rope, base ** (-np.arange(0, dim, 2) / dim), base)
    except ArithmeticError:
        frequencies, factor = np.zeros(0), math.nan
    if not (np.isfinite(frequencies).all() and math.isfinite(factor)):
        raise BadFile(f"the numbers of rope type {kind} do not fit each other: {quote(str(dict(rope)), 400)}")
    angles = np.arange(positions)[:, None] * frequencies
    tables = {"rotary.cos": factor * np.cos(angles), "rotary.sin": factor * np.sin(angles)}
    return {name: table.astype(np.float32) for name, table in tables.items()}


def positive(given: Mapping[str, Any], key: str) -> float:
    """A number of a configuration above 0. Errors: BadFile if it lacks the key, or has something else there."""
    value = number(given, key)
    if value <= 0:
        raise BadFile(f"config.json: expected {key}, a number above 0; got {value}")
    return value


def number(given: Mapping[str, Any], key: str) -> float:
    """A number of a configuration. Errors: BadFile if it lacks the key, or has something else there."""
    value = given.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= MAX_NUMBER:
        raise BadFile(f"config.json: expected {key}, a number; got {'nothing' if value is None else quote(str(value))}")
    return float(value)


def _linear(rope: Mapping[str, Any], frequencies: np.ndarray, base: float) -> tuple[np.ndarray, float]:
    return frequencies / positive(rope, "factor"), 1.0


def _llama3(rope: Mapping[str, Any], frequencies: np.ndarray, base: float) -> tuple[np.ndarray, float]:
    """Long waves are slowed down by the factor, short ones are not, those between by a share of it."""
    factor, low, high = (positive(rope, key) for key in ("factor", "low_freq_factor", "high_freq_factor"))
    turns = positive(rope, "original_max_position_embeddings") * frequencies / (2 * math.pi)
    share = np.clip((turns - low) / (high - low), 0, 1)
    return (1 - share) * frequencies / factor + share * frequencies, 1.0


def _yarn(rope: Mapping[str, Any], frequencies: np.ndarray, base: float) -> tuple[np.ndarray, float]:
    """As llama3, with a share that is linear in the index of the pair; and all numbers times a factor."""
    factor, length = positive(rope, "factor"), positive(rope, "original_max_position_embeddings")
    dim = 2 * len(frequencies)

    def index(turns: float) -> float:
        """Where a pair turns so often over the original length."""
        return dim * math.log(length / (turns * 2 * math.pi)) / (2 * math.log(base))

    first, last = index(_or(rope, "beta_fast", 32.0)), index(_or(rope, "beta_slow", 1.0))
    if rope.get("truncate", True):
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, dim - 1)
    last += 0.001 * (first == last)
    share = 1 - np.clip((np.arange(dim // 2) - first) / (last - first), 0, 1)
    return (1 - share) * frequencies / factor + share * frequencies, _yarn_factor(rope, factor)


def _yarn_factor(rope: Mapping[str, Any], factor: float) -> float:
    def grown(scale: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1

    if rope.get("attention_factor") is not None:
        return number(rope, "attention_factor")
    if rope.get("mscale") and rope.get("mscale_all_dim"):
        return grown(number(rope, "mscale")) / grown(number(rope, "mscale_all_dim"))
    return grown(1.0)


def _proportional(rope: Mapping[str, Any], frequencies: np.ndarray, base: float) -> tuple[np.ndarray, float]:
    """A share of the pairs turns, with the frequencies that they have among all; the others stand still."""
    turning = int(_share(rope) * len(frequencies))
    return np.where(np.arange(len(frequencies)) < turning, frequencies, 0) / _or(rope, "factor", 1.0), 1.0


def _share(rope: Mapping[str, Any]) -> float:
    """The share of the features of a head that turn."""
    share = 1.0 if rope.get("partial_rotary_factor") is None else positive(rope, "partial_rotary_factor")
    if share > 1:
        raise BadFile(f"config.json: expected partial_rotary_factor, a number of at most 1; got {share}")
    return share


def _or(rope: Mapping[str, Any], key: str, default: float) -> float:
    """A number above 0, a default where there is none."""
    return positive(rope, key) if rope.get(key) else default


SCALINGS: Final[dict[str, Callable[[Mapping[str, Any], np.ndarray, float], tuple[np.ndarray, float]]]] = {
    "linear": _linear,
    "llama3": _llama3,
    "yarn": _yarn,
    "proportional": _proportional,
}
# Their tables have a row for all features of a head, also where a share of them turns.
WHOLE: Final = ("proportional",)
# What the configuration of each type may have, beside COMMON. Others, longrope for example, depend on the length of a
# request; a table cannot.
KEYS: Final[dict[str, frozenset[str]]] = {
    "default": frozenset({"original_max_position_embeddings"}),
    "linear": frozenset({"factor", "original_max_position_embeddings"}),
    "llama3": frozenset({"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"}),
    "yarn": frozenset(
        {"factor", "original_max_position_embeddings", "attention_factor", "mscale", "mscale_all_dim"}
        | {"beta_fast", "beta_slow", "truncate"}
    ),
    "proportional": frozenset({"factor"}),
}
