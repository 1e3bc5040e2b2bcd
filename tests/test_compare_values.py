"""Right weights with values of other keys or heads: which keys, and which values, is told as it was planted."""

from __future__ import annotations

import re
import tracemalloc
from collections.abc import Callable, Iterable
from typing import Any, Final

import ml_dtypes
import numpy as np
import pytest

from attention_service import compare
from attention_service.codecs.decoded import Decoded
from attention_service.comparison.compare import compare_question
from attention_service.comparison.memory import comparison_bytes
from attention_service.comparison.outputs import facts_of
from attention_service.comparison.question import make_question
from attention_service.comparison.truth import reference_and_baseline
from attention_service.library.calls import backends
from attention_service.schemas.compare import Fact

KEYS: Final = 150
NOW: Final = np.arange(KEYS)
MOD_32: Final = NOW % 32
SAID: Final = "In every row of the output "
OTHER: Final = "the weights are right, the values are not: key j is multiplied by "


class Kernel:
    """Attention of 2 batch entries, 4 query heads on 2 key/value heads and 150 tokens, by NumPy in float64."""

    def __init__(self, dtype: type = np.float32, *, is_causal: bool = False, group: int = 2, queries: int = KEYS):
        random = np.random.default_rng(3)
        shapes = (2, 2 * group, queries, 24), (2, 2, KEYS, 24), (2, 2, KEYS, 24)
        query, key, value = list[np.ndarray](random.standard_normal(shape).astype(dtype) for shape in shapes)
        self.dtype = dtype
        self.fields: dict[str, Any] = {"query": query, "key": key, "value": value, "is_causal": is_causal}
        self.group, self.value = group, value.astype(np.float64)
        wide = key.astype(np.float64).repeat(group, axis=1)
        scores = query.astype(np.float64) @ wide.swapaxes(-1, -2) / np.sqrt(24)
        if is_causal:
            scores[..., np.triu(np.ones((queries, KEYS), bool), 1)] = -np.inf
        powers = np.exp(scores - scores.max(axis=-1, keepdims=True))
        self.weights = powers / powers.sum(axis=-1, keepdims=True)

    def output(self, value: np.ndarray) -> np.ndarray:
        """The output with other values (b, g, k, e)."""
        return np.asarray(self.weights @ value.repeat(self.group, axis=1))

    def facts(self, output: np.ndarray) -> list[Fact]:
        fields = {**self.fields, "layout": "bhld", "actual": {"output": output.astype(self.dtype)}}
        question = make_question(Decoded(fields, frozenset()))
        return list(facts_of(reference_and_baseline(question, backends().choose("numpy", "cpu"))))


def of_keys(value: np.ndarray, keys: np.ndarray) -> np.ndarray:
    """The values of other keys, 0 for those outside."""
    inside = (keys >= 0) & (keys < KEYS)
    return value[:, :, np.where(inside, keys, 0)] * inside[:, None]


def causal_and_not(names: Iterable[str]) -> list[Any]:
    """Names, and whether the kernel is causal: the quick suite has one form of each."""
    forms = [(name, is_causal, n % 2 != is_causal) for n, name in enumerate(names) for is_causal in (False, True)]
    return [pytest.param(*form, marks=[pytest.mark.slow] * is_slow) for *form, is_slow in forms]


# Values of a wrong kernel, and what is said of them.
PLANTED: Final[dict[str, tuple[Callable[[np.ndarray], np.ndarray], str]]] = {
    "xor of the last eight of 32": (
        lambda value: of_keys(value, np.where(MOD_32 >= 24, NOW ^ 2, NOW)),
        OTHER + "the value of key j XOR 2, where j mod 32 is 24 to 31.",
    ),
    "xor of all": (
        # 150 XOR 8 to 149 XOR 8 lie outside for 144 to 149: 152 to 157
        lambda value: of_keys(value, NOW ^ 8),
        OTHER + "the value of key j XOR 8; keys that this leaves without one have 0.",
    ),
    "halves of even tiles of 16 exchanged": (
        # the last tile, 144 to 149, is that of index 9
        lambda value: of_keys(value, np.where(NOW // 16 % 2 == 0, NOW ^ 8, NOW)),
        OTHER + "the value of key j XOR 8, where j mod 32 is 0 to 15.",
    ),
    "tiles of 16 reversed": (
        lambda value: of_keys(value, np.where(NOW < 144, NOW ^ 15, NOW)),
        OTHER + "the value of key j XOR 15; keys that this leaves without one keep their own.",
    ),
    "the next": (
        lambda value: np.roll(value, -1, axis=2),
        OTHER + "the value of key j+1; what passes the end begins at the start.",
    ),
    "the next, and 0 at the end": (
        lambda value: of_keys(value, NOW + 1),
        OTHER + "the value of key j+1; keys that this leaves without one have 0.",
    ),
    "the one before, from 64 to 95": (
        lambda value: of_keys(value, np.where(NOW // 32 == 2, NOW - 1, NOW)),
        OTHER + "the value of key j-1, for keys j = 64 to 95.",
    ),
    "the other head": (
        lambda value: np.where((MOD_32 >= 16)[:, None], value[:, ::-1], value),
        OTHER + "its value of key/value head (n+1) mod 2 in the place of n, where j mod 32 is 16 to 31.",
    ),
    "the other batch entry": (
        lambda value: np.where((NOW % 4 == 3)[:, None], value[::-1], value),
        OTHER + "its value of batch entry (b+1) mod 2 in the place of b, where j mod 4 is 3.",
    ),
    "zeros in the last quarter": (
        lambda value: value * (MOD_32 < 24)[:, None],
        "key j adds nothing, but its weight is in the sum of all, where j mod 32 is 24 to 31.",
    ),
    "half of the odd ones": (
        lambda value: value * np.where(NOW % 2, 0.5, 1)[:, None],
        "key j adds 0.5 times what is right, where j mod 2 is 1.",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("name", "is_causal"), causal_and_not(PLANTED))
def test_values_of_other_keys_are_told(name: str, is_causal: bool) -> None:
    plant, message = PLANTED[name]
    own = Kernel(is_causal=is_causal)
    found = own.facts(own.output(plant(own.value)))
    messages = [re.sub("0.50+ ", "0.5 ", one.message) for one in found if one.name != "rows_by_keys"]
    assert messages[:1] == [SAID + message]


@pytest.mark.parametrize(("group", "queries"), [(1, KEYS), (4, 3)])
def test_few_rows_are_enough(group: int, queries: int) -> None:
    """Least squares could not tell 150 values from so few rows."""
    plant, message = PLANTED["xor of the last eight of 32"]
    own = Kernel(group=group, queries=queries)
    assert [one.message for one in own.facts(own.output(plant(own.value)))] == [SAID + message]


def test_bfloat16() -> None:
    plant, message = PLANTED["xor of the last eight of 32"]
    own = Kernel(ml_dtypes.bfloat16)
    assert [one.message for one in own.facts(own.output(plant(own.value)))] == [SAID + message]


def test_a_head_that_is_right_is_left_out() -> None:
    own = Kernel()
    output = own.output(of_keys(own.value, np.where(MOD_32 >= 24, NOW ^ 2, NOW)))
    output[:, 1] = own.output(own.value)[:, 1]
    assert [one.message for one in own.facts(output)] == [
        SAID.replace("every row", "every wrong row") + OTHER + "the value of key j XOR 2, where j mod 32 is 24 to 31."
    ]


@pytest.mark.slow
def test_memory_is_within_the_estimate() -> None:
    query, key, value = list[np.ndarray](np.random.default_rng(0).standard_normal((3, 1, 2, 512, 16), np.float32))
    scores = query @ key.swapaxes(-1, -2) / 4
    powers = np.exp(scores - scores.max(axis=-1, keepdims=True))
    output = powers / powers.sum(axis=-1, keepdims=True) @ value[:, :, np.arange(512) ^ 2]
    fields = {"query": query, "key": key, "value": value, "layout": "bhld", "actual": {"output": output}}
    question = make_question(Decoded(fields, frozenset()))
    backend = backends().choose("numpy", "cpu")
    tracemalloc.start()
    try:
        found = compare_question(question, backend)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert [fact.name for fact in found.facts] == ["other_values"]
    assert peak <= comparison_bytes(question)


# Other mistakes: from a kernel to its output.
OTHERS: Final[dict[str, Callable[[Kernel], np.ndarray]]] = {
    "nothing": lambda own: own.output(own.value),
    "noise": lambda own: own.output(own.value) + np.random.default_rng(0).standard_normal((2, 4, KEYS, 24)),
    "other weights": lambda own: np.square(own.weights) @ own.value.repeat(2, axis=1),
    "weights of the next key": lambda own: (own.weights * (0.5 + own.weights)) @ own.value.repeat(2, axis=1),
    "other weights and values": lambda own: np.square(own.weights) @ np.roll(own.value, 1, axis=2).repeat(2, axis=1),
    "values of some rows only": lambda own: np.where(
        (NOW != 40)[:, None], own.output(of_keys(own.value, NOW ^ 2)), 3 * own.output(own.value)
    ),
    "values without order": lambda own: own.output(own.value[:, :, np.random.default_rng(0).permutation(KEYS)]),
    "values with noise": lambda own: own.output(own.value + np.random.default_rng(0).standard_normal(own.value.shape)),
    "values with little noise": lambda own: own.output(
        of_keys(own.value, np.where(MOD_32 >= 24, NOW ^ 2, NOW))
        + 0.01 * np.random.default_rng(0).standard_normal(own.value.shape)
    ),
}  # fmt: skip


@pytest.mark.parametrize(("name", "is_causal"), causal_and_not(OTHERS))
def test_other_mistakes_are_no_other_values(name: str, is_causal: bool) -> None:
    own = Kernel(is_causal=is_causal)
    assert "other_values" not in [one.name for one in own.facts(OTHERS[name](own))]


@pytest.mark.parametrize("keys", [40, 48])
def test_keys_that_read_their_own_value_are_not_named(keys: int) -> None:
    """Keys from 32 on read others; those of the first tile have none so far before them."""
    random = np.random.default_rng(1)
    query = random.normal(size=(4, 16, 64)).astype(np.float32)
    key, value = random.normal(size=(2, 4, keys, 64)).astype(np.float32)
    weights = np.exp(query.astype(float) @ key.swapaxes(1, 2) / 8)
    weights /= weights.sum(axis=-1, keepdims=True)
    apart = keys - 32
    read = np.concatenate([value[:, :32], value[:, 32 - apart : 32]], axis=1)
    report = compare((weights @ read).astype(np.float32), query, key, value, layout="hld", query_offset=0)
    assert report.facts[0].message.endswith(f"the value of key j-{apart}, for keys j = 32 to {keys - 1}.")
