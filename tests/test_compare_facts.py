"""Facts about wrong arrays: planted ones are told, with their numbers; right outputs and other mistakes have none."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any, Final

import ml_dtypes
import numpy as np
import pytest

from attention_service import attend
from attention_service.codecs.decoded import Decoded
from attention_service.comparison.mutants import MUTANTS
from attention_service.comparison.outputs import facts_of
from attention_service.comparison.question import make_question
from attention_service.comparison.text import as_text
from attention_service.comparison.truth import reference_and_baseline
from attention_service.comparison.wrong import shown
from attention_service.library import compare
from attention_service.library.calls import backends
from attention_service.schemas.compare import Fact
from tests.helpers.planted import draw, returned

TYPES: Final = [np.float32, ml_dtypes.bfloat16]
KEYS: Final = 67
LOG2E: Final = float(np.log2(np.e))
Arrays = dict[str, np.ndarray]


class Attention:
    """Causal attention of 2 batch entries with 3 heads, by NumPy in float64, and its parts."""

    def __init__(self, dtype: type, *, is_causal: bool = True) -> None:
        random = np.random.default_rng(0)
        query, key, value = list[np.ndarray](random.standard_normal((3, 2, 3, KEYS, 16)).astype(dtype))
        self.dtype = dtype
        self.fields: dict[str, Any] = {
            "query": query,
            "key": key,
            "value": value,
            "layout": "bhld",
            "is_causal": is_causal,
        }
        self.hidden = np.triu(np.full((KEYS, KEYS), is_causal), 1)
        self.value = value.astype(np.float64)
        self.scores = query.astype(np.float64) @ key.astype(np.float64).swapaxes(-1, -2) / 4
        self.products = self.scores.copy()
        self.scores[..., self.hidden] = -np.inf
        self.top = self.scores.max(axis=-1)
        self.powers = np.exp(self.scores - self.top[..., None])
        self.total = self.powers.sum(axis=-1)
        self.output = self.with_sum(self.total)
        self.logsumexp = self.top + np.log(self.total)

    def with_sum(self, total: np.ndarray) -> np.ndarray:
        """The output with another sum of exponentials."""
        return np.asarray(self.powers @ self.value / total[..., None])

    def with_powers(self, powers: np.ndarray) -> np.ndarray:
        """The output with other exponentials."""
        return np.asarray(powers @ self.value / powers.sum(axis=-1, keepdims=True))

    def facts(self, **arrays: np.ndarray) -> list[Fact]:
        """The facts about an output in the type of the request, and a logsumexp in float32."""
        types = {"output": self.dtype}
        return facts(self.fields, {name: array.astype(types.get(name, np.float32)) for name, array in arrays.items()})


def per_head(*numbers: float) -> np.ndarray:
    return np.array(numbers)[:, None, None]


def facts(fields: dict[str, Any], actual: Arrays) -> list[Fact]:
    """All facts, also where a mistake would be proved."""
    question = make_question(Decoded({**fields, "actual": actual}, frozenset()))
    return list(facts_of(reference_and_baseline(question, backends().choose("numpy", "cpu"))))


def part(array: np.ndarray, rows: slice, change: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
    """An array whose rows are changed in part."""
    changed = array.copy()
    changed[:, :, rows] = change(changed[:, :, rows])
    return changed


# Outputs of a wrong kernel; the fact that is told first, its sentence, and its numbers.
OUTPUTS: Final[dict[str, tuple[Callable[[Attention], np.ndarray], str, str, dict[str, Any]]]] = {
    "a factor": (
        lambda a: a.output / 0.9,
        "factor", "In every row the output is 1.1111 times the right one.", {"factor": 1 / 0.9},
    ),
    "a factor with a name": (
        lambda a: a.output * LOG2E,
        "factor", "In every row the output is 1.4427 times the right one (log2(e)).", {"factor": LOG2E},
    ),
    "a factor of some rows": (
        lambda a: part(a.output, slice(32, None), lambda one: 1.5 * one),
        "factor", "In every wrong row the output is 1.5000 times the right one.", {"factor": 1.5},
    ),
    "a factor of each head": (
        lambda a: a.output * per_head(1, 2, 3),
        "head_factor",
        "In every row the output of heads 0 to 2 is 1.0000, 2.0000, 3.0000 times the right one.",
        {"numbers": [1, 2, 3]},
    ),
    "a factor of each row": (
        lambda a: a.output * np.linspace(0.5, 2, KEYS)[:, None],
        "row_factor", "In every wrong row the output is right up to a factor of the row, from 0.50000 to 2.0000.", {},
    ),
    "padded keys": (
        lambda a: a.with_sum(a.total + 61 * np.exp(-a.top)),
        "extra_sum",
        "In every row the output is right up to a factor: the sum of its softmax is too large by 61.00, where "
        "a key of score 0 adds 1 (padded keys?).", {"numbers": [61]},
    ),
    "a sum that starts at 1": (
        lambda a: a.with_sum(a.total + 1),
        "extra_sum",
        "In every row the output is right up to a factor: the sum of its softmax is too large by 1.0000 times its "
        "largest exponential.", {"numbers": [1]},
    ),
    "hidden keys in the sum": (
        lambda a: a.with_sum(a.total + a.hidden.sum(axis=-1) * np.exp(-a.top)),
        "extra_sum",
        "In every row the output is right up to a factor: the sum of its softmax is too large by 1.000 for each "
        "hidden key, where a key of score 0 adds 1.", {"numbers": [1]},
    ),
    "zeros": (
        lambda a: part(a.output, slice(5, 9), np.zeros_like),
        "constant", "All {} wrong elements of the output are exactly 0.", {},
    ),
    "NaN": (
        lambda a: part(a.output, slice(5, 9), lambda one: one * np.nan),
        "constant", "All 384 wrong elements of the output are NaN.", {"elements": 384},
    ),
    "infinities": (
        lambda a: part(a.output, slice(5, 9), lambda one: one * np.inf),
        "constant", "All 384 wrong elements of the output are infinite or NaN.", {"elements": 384},
    ),
    "one number": (
        lambda a: part(a.output, slice(5, 9), lambda one: np.full_like(one, 7)),
        "constant", "All 384 wrong elements of the output are exactly 7.", {"elements": 384},
    ),
    "rows of the neighbour": (
        lambda a: np.roll(a.output, 1, axis=2),
        "moved", "In every row the output is right for another place: row i is that of i-1.", {"steps": [0, 0, -1]},
    ),
    "rows of another head": (
        lambda a: np.roll(a.output, (1, 3), axis=(1, 2)),
        "moved", "In every row the output is right for another place: head i is that of i-1, row i is that of i-3.",
        {"steps": [0, -1, -3]},
    ),
    "features in reverse": (
        lambda a: a.output[..., ::-1],
        "permuted",
        f"In every row the output has its right numbers in another order: number i is {list(range(16))[::-1]}[i].",
        {"order": list(range(16))[::-1]},
    ),
    "features of which some are 0": (
        lambda a: np.where(np.arange(16) < 12, a.output[..., ::-1], 0),
        "permuted",
        f"In every row the output has its right numbers in another order: number i is "
        f"{[*range(15, 3, -1), *[-1] * 4]}[i], or is 0 where that is -1.", {"order": [*range(15, 3, -1), *[-1] * 4]},
    ),
    "axes in another order": (
        lambda a: a.output.swapaxes(0, 1).reshape(a.output.shape),
        "reordered",
        "In every row the output has its axes in another order: memory is written as "
        "(key/value head, batch entry, head of a group, row).", {"order": [1, 0, 2, 3]},
    ),
    "rows of many places, and zeros": (
        lambda a: (a.output.reshape(-1, 16)[(np.arange(402) * 5 + 2) % 402] * (np.arange(402) > 9)[:, None]).reshape(
            a.output.shape
        ),
        "elsewhere",
        "Every wrong row of the output is the right one of another row, or 0 (10 rows): [batch entry, head, row] "
        "[0, 0, 10] is [0, 0, 52], [0, 0, 11] is [0, 0, 57], [0, 0, 12] is [0, 0, 62], [0, 0, 13] is [0, 1, 0].",
        {"rows": 390, "zeros": 10},  # 5 n + 2 = n for two numbers modulo 402
    ),
    "a scale and a factor of each head": (
        lambda a: a.with_powers(np.exp(a.scores * per_head(2, 0.5, 1))) * per_head(3, 1, 0.5),
        "head_numbers",
        "In every row the output of heads 0 to 2 is right for the scale times 2.0000, 0.50000, 1.0000, and multiplied "
        "by 3.0000, 1.0000, 0.50000.", {"by": [2, 0.5, 1], "factors": [3, 1, 0.5]},
    ),
    "no mask in some rows": (
        lambda a: np.where(np.arange(KEYS)[:, None] < 40, a.output, a.with_powers(np.exp(a.products))),
        "known_in_part",
        "Every wrong row of the output is that of a known mistake, which other rows do not have: The causal mask is "
        "not applied.", {},
    ),
    "eight keys": (
        lambda a: a.with_powers(a.powers * (np.arange(KEYS) >= np.arange(KEYS)[:, None] - 7)),
        "other_keys",
        "In every row the output is right for other keys: those from i-7 in row i to i+0 in row i.", {},
    ),
    "keys that hidden ones follow": (
        lambda a: a.with_powers(np.exp(a.products) * (np.arange(KEYS) < np.arange(KEYS)[:, None] + 4)),
        "other_keys",
        "In every row the output is right for other keys: those from 0 to i+3 in row i.", {"start": 0, "stop": 4},
    ),
    "a tile of half the weight": (
        lambda a: a.powers * np.where(np.arange(KEYS) // 32 == 1, 0.5, 1) @ a.value / a.total[..., None],
        "part_factors",
        "In every wrong row the output is right up to a factor of the row for each 32 keys, from 0.500 to 1.000.",
        {},
    ),
    "a tile that is left out": (
        lambda a: a.powers * (np.arange(KEYS) // 16 != 2) @ a.value / a.total[..., None],
        "part_factors",
        "In every wrong row the output is right up to a factor of the row for each 16 keys; keys 32 to 47 add nothing.",
        {"keys": 16},
    ),
    "a shift": (
        lambda a: a.output + 0.5,
        "offset", "In every row the output is too large by 0.50000.", {"mean": 0.5},
    ),
    "late rows": (
        lambda a: part(a.output, slice(40, None), lambda one: one + np.sin(np.arange(one.size)).reshape(one.shape)),
        "rows_by_keys", "The output is wrong in just the rows that see more than 40 keys.", {"rows": 162},
    ),
    "tails": (
        lambda a: a.output
        + ((np.arange(KEYS) + 1) % 32 > 0)[:, None] * np.sign(np.sin(np.arange(16) + np.arange(KEYS)[:, None])),
        "rows_by_keys", "The output is wrong in just the rows that see a number of keys that is no multiple of 32.", {},
    ),
}  # fmt: skip


@pytest.mark.parametrize("dtype", TYPES, ids=["float32", "bfloat16"])
@pytest.mark.parametrize("name", OUTPUTS)
def test_a_planted_fact_is_told_and_no_other(name: str, dtype: type) -> None:
    plant, kind, message, numbers = OUTPUTS[name]
    found = Attention(dtype).facts(output=plant(Attention(dtype)))
    best = found[0]
    [elements] = best.numbers.get("elements", [0])
    assert (best.name, best.array) == (kind, "output")
    if dtype is np.float32:  # half types show fewer digits
        assert best.message == message.replace("{}", str(int(elements)))
    for key, number in numbers.items():
        np.testing.assert_allclose(best.numbers[key], number, rtol=2e-3)
    assert {one.name for one in found[1:]} <= {"rows_by_keys"}


LOGSUMEXPS: Final[dict[str, tuple[Callable[[Attention], np.ndarray], str, str]]] = {
    "a shift": (lambda a: a.logsumexp + 1, "offset", "In every row the logsumexp is too large by 1.0000."),
    "base 2": (lambda a: a.logsumexp * LOG2E, "factor", "In every row the logsumexp is 1.4427 times the right one"),
    "negative": (lambda a: -a.logsumexp, "factor", "In every row the logsumexp is -1.0000 times the right one (-1)."),
    "a shift with a name": (
        lambda a: a.logsumexp - np.log(KEYS),
        "offset", "In every row the logsumexp is too small by 4.2047 (ln 1/keys).",
    ),
    "no sum": (
        lambda a: a.top,
        "offset", "In every row the logsumexp is the largest score, without the logarithm of the sum.",
    ),
    "no score": (
        lambda a: a.logsumexp - a.top,
        "offset", "In every row the logsumexp is the logarithm of the sum, without the largest score.",
    ),
    "a mean": (
        lambda a: a.logsumexp - np.log(np.arange(KEYS) + 1),
        "offset", "In every row the logsumexp is that of the mean, not of the sum.",
    ),
    "keys without their mean": (
        lambda a: a.logsumexp - a.products.mean(axis=-1),
        "offset", "In every row the logsumexp is that of keys without their mean: scores are smaller by their mean.",
    ),
    "two bases": (
        lambda a: a.top + np.log2(a.total),
        "offset", "In every row the logsumexp is of base 2, but for the largest score.",
    ),
    "two bases, the other way": (
        lambda a: a.top * LOG2E + np.log(a.total),
        "offset", "In every row the logsumexp is of base e, but for the largest score, which is multiplied by log2(e).",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", LOGSUMEXPS)
def test_facts_about_the_logsumexp(name: str) -> None:
    plant, kind, message = LOGSUMEXPS[name]
    own = Attention(np.float32)
    found = own.facts(output=own.output, logsumexp=plant(own))
    assert (found[0].name, found[0].array) == (kind, "logsumexp")
    assert found[0].message.startswith(message)
    assert {one.name for one in found[1:]} <= {"rows_by_keys"}


@pytest.mark.parametrize("dtype", TYPES, ids=["float32", "bfloat16"])
@pytest.mark.parametrize("is_causal", [True, False])
def test_right_arrays_and_noise_have_no_facts(dtype: type, is_causal: bool) -> None:
    own = Attention(dtype, is_causal=is_causal)
    assert own.facts(output=own.output, logsumexp=own.logsumexp) == []
    noise = np.random.default_rng(1).normal(size=own.output.shape)
    for size in (0.1, 1.0, 1e6):
        assert own.facts(output=own.output + size * noise, logsumexp=own.logsumexp + size * noise[..., 0]) == []


def test_few_numbers_prove_nothing() -> None:
    """Any number is some factor of another: one says nothing, and neither does one of each row."""
    for count in (1, 5):
        query, key = np.ones((1, 4), np.float32), np.ones((count, 4), np.float32)
        value = np.arange(1, count + 1, dtype=np.float32)[:, None]
        assert facts({"query": query, "key": key, "value": value}, {"output": np.full((1, 1), 7.3, np.float32)}) == []


def test_a_number_of_each_row_explains_nothing() -> None:
    """Each head has one row: some number for each head explains any factors of rows."""
    random = np.random.default_rng(0)
    query, key, value = (random.standard_normal((5, length, 16)) for length in (1, 9, 9))
    fields: dict[str, Any] = {"query": query, "key": key, "value": value, "layout": "hld"}
    output = attend(**fields).output * random.uniform(1.1, 2, (5, 1, 1))
    assert [one.name for one in facts(fields, {"output": output})] == ["row_factor"]


def test_a_change_of_one_row_is_no_fact_about_all() -> None:
    own = Attention(np.float32)
    wrong = own.output * 1.5
    wrong[1, 2, 60] += np.sin(np.arange(16))
    assert [one.name for one in own.facts(output=wrong)] == []


def test_a_feature_in_the_place_of_two_is_no_other_order() -> None:
    own = Attention(np.float32)
    [found] = own.facts(output=own.output[..., [0, 0, *range(2, 16)]])
    assert found.message == (
        f"In every row the output has right numbers more than once: number i is {[0, 0, *range(2, 16)]}[i]."
    )


def test_weights_tell_the_function_that_scores_went_through() -> None:
    """x - 0.02 x³ in the place of x: weights of one row tell it up to a number, those of all rows together."""
    own = Attention(np.float32)
    scores = own.products - 0.02 * own.products**3
    powers = np.where(own.hidden, 0, np.exp(scores - scores.max(axis=-1, keepdims=True)))
    [found] = own.facts(attention_weights=powers / powers.sum(axis=-1, keepdims=True))
    assert found.message.startswith("In the rows that tell it the scores behind attention_weights are a function of")
    x, told = np.array(found.numbers["scores"]), np.array(found.numbers["told"])
    right = x - 0.02 * x**3
    assert told - told[2] == pytest.approx(right - right[2], abs=0.01)
    drawn = np.random.default_rng(0).uniform(0.9, 1.1, scores.shape)  # as no function of the scores
    powers = np.where(own.hidden, 0, own.powers * drawn)
    assert own.facts(attention_weights=powers / powers.sum(axis=-1, keepdims=True)) == []


@pytest.mark.parametrize("name", ["output", "logsumexp", "attention_weights"])
def test_a_softcap_by_another_function(name: str) -> None:
    """Cut off at the cap, in the place of cap · tanh(x / cap); and by another cap."""
    own, cap = Attention(np.float32), 1.5
    own.fields["softcap"] = cap

    def sent(scores: np.ndarray) -> dict[str, np.ndarray]:
        powers = np.where(own.hidden, 0, np.exp(scores))
        total = powers.sum(axis=-1, keepdims=True)
        arrays = {"output": powers @ own.value / total, "logsumexp": np.log(total[..., 0])}
        return {name: (arrays | {"attention_weights": powers / total})[name]}

    assert own.facts(**sent(cap * np.tanh(own.products / cap))) == []
    [found] = own.facts(**sent(np.clip(own.products, -cap, cap)))
    assert (found.name, "the softcap times min(max(x, -1), 1)" in found.message) == ("score_curve", True)
    [found] = own.facts(**sent(2 * np.tanh(own.products / 2)))
    assert "c · tanh(score / c), with c = 2.0000" in found.message


def test_the_neighbour_added_to_a_row() -> None:
    own = Attention(np.float32)
    [found] = own.facts(output=own.output + np.roll(own.output, 1, axis=2))
    assert found.message == (
        "In every row the output has the right one of another place added to it: row i is that of i-1."
    )


def test_float16_overflows() -> None:
    """The products of 256 and 1024 with 64 are 16384 and 65536, which float16 does not hold."""
    own = Attention(np.float16, is_causal=False)
    query, key = (np.zeros((2, 3, KEYS, 16), np.float16) for _ in range(2))
    query[..., 0], key[..., 0] = 256, 64
    query[:, 1, 7:20, 0] = 1024
    fields = {**own.fields, "query": query, "key": key, "scale": 2.0**-14}
    right = attend(**fields).output
    right[:, 1, 7:20, 3] = np.nan
    found = facts(fields, {"output": right})
    assert [one.name for one in found] == ["overflow", "constant"]
    assert found[0].message == (
        "The output is infinite or NaN in just the rows with q·k above 65504: float16 overflows."
    )
    assert found[0].numbers == {"rows": [26]}
    right[:, 0, 0, 0] = np.nan  # one row more
    assert [one.name for one in facts(fields, {"output": right})] == ["constant"]


def test_rows_without_keys() -> None:
    fields = Attention(np.float32).fields | {"key_mask": np.arange(2 * KEYS).reshape(2, KEYS) >= KEYS}
    result = attend(**fields, include=["logsumexp"])
    wrong = np.where(np.isneginf(result["logsumexp"]), np.float32(-1e30), result["logsumexp"])
    found = facts(fields, {"output": result.output, "logsumexp": wrong})
    assert [one.message for one in found] == [
        "All 201 wrong elements of the logsumexp are one number, -1e+30, where minus infinity is right.",
        "The logsumexp is wrong in just the rows that see no key.",
    ]


@pytest.mark.parametrize(
    ("number", "error", "text"),
    [
        (1.00003, 1e-6, "1.00003"),  # five digits would not tell it from 1
        (0.99997, 1e-6, "0.99997"),
        (1.000004, 4.5e-6, "1.0000"),  # which is 1, for all that is known
        (1.0000042, 4e-6, "1.000004 ± 4e-06"),
        (1.30104, 0.004, "1.30"),  # the next digit may be any
        (1.3, 0.03, "1.30 ± 0.03"),
        (61.4, 1.2, "61 ± 2"),
        (0.18, 0.0061, "0.180 ± 0.007"),
        (348.97, 30.0, "350 ± 30"),
        (1 / 3, 1e-7, "0.33333"),
        (0.0220971, 1e-6, "0.02210"),
        (-1.0, 1e-9, "-1.0000"),
        (math.inf, 1.0, "inf"),
        (1.2345, math.inf, "any number"),
        (1.0, 0.0, "1"),
        (0.0, 1.0, "0 ± 1"),
        (-0.01, 0.4, "0.0 ± 0.4"),
        (0.0, 0.0, "0"),
        (3e-6, 6e-6, "0.0000"),
    ],
)
def test_numbers_have_the_digits_that_are_known(number: float, error: float, text: str) -> None:
    assert shown(number, error) == text


def test_a_factor_near_1_is_not_said_to_be_1() -> None:
    own = Attention(np.float64)
    [found] = own.facts(output=own.output * 1.00003)
    assert found.message == "In every row the output is 1.00003 times the right one."


@pytest.mark.parametrize("dtype", TYPES, ids=["float32", "bfloat16"])
@pytest.mark.parametrize("by", [(1.3, 1.3, 1.3), (1.3, 1.3005, 1.3), (1.7, 0.8, 1.1)])
def test_the_scales_of_heads_are_told_as_they_are(dtype: type, by: tuple[float, ...]) -> None:
    """Each printed number is the planted one to the digits that are printed, or up to the error that is."""
    own = Attention(dtype)
    [found] = own.facts(output=own.with_powers(np.exp(own.scores * per_head(*by))))
    told = re.findall(r"(\d+\.(\d+))(?: ± ([\d.e-]*\d))?", found.message)
    if dtype is np.float32:
        assert len(told) == len({*by}) or len(told) == 3
    for (number, decimals, error), planted in zip(told, by, strict=False):
        assert abs(float(number) - planted) <= float(error or 0.51 * 10.0 ** -len(decimals)), found.message


def test_a_rounded_number_is_not_said_to_be_exact() -> None:
    own = Attention(np.float32)
    third = part(own.output, slice(5, 9), lambda one: np.full_like(one, 1 / 3))
    assert own.facts(output=third)[0].message.endswith(" wrong elements of the output are one number, 0.333333.")


def test_one_number_or_one_row_says_nothing() -> None:
    """One element that is 0, or NaN, or the last row, which sees most keys: any of them could be wrong."""
    own = Attention(np.float32)
    for number in (0.0, np.nan, np.inf):
        output = own.output.copy()
        output[1, 2, 30, 4] = number
        assert own.facts(output=output) == []
    output = own.output.copy()
    output[..., -1, :] += np.sin(np.arange(16))
    assert own.facts(output=output) == []
    output[..., -4:, :] += np.sin(np.arange(16))
    assert [one.name for one in own.facts(output=output)] == ["rows_by_keys"]


def test_other_arrays_have_facts() -> None:
    fields = Attention(np.float32).fields
    scores = attend(**fields, include=["scaled_scores"])["scaled_scores"]
    [found] = facts(fields, {"scaled_scores": scores * np.float32(4)})
    assert found.message == "In every row scaled_scores is 4.0000 times the right one (√d)."


def test_facts_about_arrays_of_keys_count_keys() -> None:
    """Keys are in the place of rows: of what they received, and of their own features."""
    own = Attention(np.float64)
    weights = own.powers / own.total[..., None]
    [found] = facts(own.fields, {"received": weights.sum(axis=2) * np.where(np.arange(KEYS) < 40, 1, 3)})
    assert found.message == "For every wrong key received is 3.0000 times the right one."
    [found] = facts(own.fields, {"key": np.roll(own.fields["key"], 2, axis=2)})
    assert found.message == "For every key key is right for another place: key i is that of i-2."
    entropy = np.log(own.total) - (weights * np.where(own.hidden, 0, own.scores - own.top[..., None])).sum(axis=-1)
    [found] = facts(own.fields, {"entropy": np.roll(entropy, 1, axis=1)})
    assert found.message == "Every wrong row of entropy is the right one of another row: head i is that of i-1."


def test_the_verdict_tells_the_best_fact_and_what_is_right() -> None:
    query, key, value = np.random.default_rng(0).standard_normal((3, 5, 4), np.float32)
    fields: dict[str, Any] = {"query": query, "key": key, "value": value}
    right = attend(**fields, include=["logsumexp"])
    report = compare({"output": right.output, "logsumexp": right["logsumexp"] + np.float32(1.7)}, **fields)
    assert report.verdict.message.startswith(
        "Wrong: the output is right; the logsumexp is wrong: in every row the logsumexp is too large by 1"
    )
    assert [one.name for one in report.facts] == ["offset"]
    assert "\nfacts:\n  In every row the logsumexp is too large by 1.7000.\n" in as_text(report)


def test_a_proof_needs_no_facts() -> None:
    own = Attention(np.float32)
    report = compare(np.zeros(own.output.shape, np.float32), **own.fields)
    assert report.hypotheses[0].certainty == "proof"
    assert report.facts == []


def test_the_key_heads_of_query_heads_are_found() -> None:
    """Query head n reads key/value head n // 3 of 3, where it should be n // 2."""
    random = np.random.default_rng(0)
    query, key, value = (random.standard_normal((2, heads, 9, 4)) for heads in (6, 3, 3))
    weights = np.exp(query @ key[:, np.arange(6) // 3].swapaxes(-1, -2) / 2)
    output = weights / weights.sum(axis=-1, keepdims=True) @ value[:, np.arange(6) // 3]
    best = compare(output, query, key, value, layout="bhld").hypotheses[0]
    assert (best.name, best.certainty) == ("heads.regrouped", "proof")
    assert best.message == "Query heads read other key/value heads. (head n reads [0, 0, 0, 1, 1, 1][n])"


# What random kernels do to a right output, with some rows, a number, and an order of features.
CHANGES: Final[list[Callable[[np.ndarray, int, float, np.ndarray], np.ndarray]]] = [
    lambda output, _row, number, _order: output * number,
    lambda output, _row, number, _order: output + number,
    lambda output, row, _number, _order: np.roll(output, row, axis=2),
    lambda output, row, _number, _order: part(output, slice(row, None), np.zeros_like),
    lambda output, row, _number, _order: part(output, slice(row, None), lambda one: np.full_like(one, np.nan)),
    lambda output, _row, number, _order: output * np.linspace(number, 2, output.shape[2])[:, None],
    lambda output, _row, _number, order: output[..., order],
]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.float16, ml_dtypes.bfloat16])
def test_facts_about_random_changes_are_true(dtype: type) -> None:
    """Each is held against the numbers that were sent, as its own sentence says it."""
    random = np.random.default_rng(0)
    for _ in range(40):
        b, h, queries, keys, d = (int(random.integers(1, most)) for most in (3, 4, 20, 20, 9))
        lengths = {"query": queries, "key": keys, "value": keys}
        fields: dict[str, Any] = {
            name: random.standard_normal((b, h, n, d)).astype(dtype) for name, n in lengths.items()
        }
        fields["layout"] = "bhld"
        sent = attend(**{**fields, "dtype": "float64"}).output
        for change in random.choice(len(CHANGES), random.integers(1, 3)):
            row, number = int(random.integers(queries)), float(random.choice([0.5, 1e-3, 3.0]))
            sent = CHANGES[change](sent, row, number, random.permutation(d))
        question = make_question(Decoded({**fields, "actual": {"output": sent.astype(dtype)}}, frozenset()))
        truth = reference_and_baseline(question, backends().choose("numpy", "cpu"))
        actual, right = truth.actual.canonical["output"], truth.right["output"]
        limit = 2 * truth.judged["output"].limit
        wrong = ~(np.abs(actual - right) <= limit)
        for fact in facts_of(truth):
            rows = np.ones(wrong.shape[:3], bool) if "every row" in fact.message else wrong.any(axis=-1)
            numbers = np.array(next(iter(fact.numbers.values())))
            says: dict[str, tuple[np.ndarray, float]] = {
                "factor": (right * numbers[0], max(1, abs(numbers[0]))),
                "offset": (right + numbers[0], 1),
                "moved": (np.roll(right, -numbers[:3].astype(int), axis=(0, 1, 2)[: len(numbers)]), 1),
                "permuted": (right[..., numbers[:d].astype(int) % d], 1),
            }
            if fact.name in says:
                predicted, slack = says[fact.name]
                assert (np.abs(actual - predicted)[rows] <= limit * slack * (1 + 1e-9)).all(), fact.message
            if fact.name == "constant":
                assert (len(np.unique(actual[wrong])), np.count_nonzero(wrong)) == (1, numbers[0])


# The facts, beside those about numbers of keys, that are true of known mistakes in some requests.
TRUE: Final[dict[str, set[str]]] = {
    "output.zeros": {"constant"},
    "softmax.no_max": {"constant"},  # NaN, or 0 where the sum is infinite
    "mask.finite": {"constant"},  # a logsumexp of rows that see no key
    "mask.in_max": {"constant"},  # NaN, or minus infinity
    "padding.in_sum": {"row_factor", "extra_sum"},
    "empty.hidden_keys": {"other_keys", "known_in_part"},  # all of them; that there is no mask
    # Scores that are all less than the cap, or within a part of the curve.
    "softcap.absent": {"score_curve"},
    "softcap.before_scale": {"score_curve"},
    "causal.last_row": {"known_in_part"},  # that there is no mask
    "output.packed": {"reordered"},
    "empty.nan": {"constant"},
    "causal.by_tile": {"constant"},  # of rows that see no key, whose tile is hidden
    "empty.last_key": {"constant", "offset", "moved", "other_keys"},  # of one row, or one feature; the last key alone
    "logsumexp.empty_finite": {"constant"},
    "logsumexp.empty_positive": {"constant"},
    "logsumexp.base2": {"factor"},
    "softmax.base2": {"offset", "head_numbers"},  # offset where all wrong rows see as many equal scores
    "softmax.unnormalized": {"row_factor"},
    "softmax.denominator_last_tile": {"row_factor"},
    "sinks.absent": {"extra_sum", "row_factor"},
    "sinks.shifted": {"extra_sum", "row_factor"},
    "sinks.repeated_per_tile": {"extra_sum", "row_factor"},
    "sinks.scaled": {"extra_sum", "row_factor"},
    "sinks.base2": {"extra_sum", "row_factor"},
    "sinks.first_query": {"row_factor"},
    "softmax.padded_lanes": {"extra_sum", "row_factor"},
    "merge.empty_part": {"extra_sum", "row_factor"},
    "output.scaled": {"factor", "head_factor"},
    "heads.reversed": {"moved", "elsewhere"},  # moved of two heads
    "heads.permuted": {"moved"},
    "heads.keys_only": {"other_values"},  # with two heads, those of the next one
    "heads.tiled": {"known_in_part"},  # that the heads are read in reverse order, where some are right by chance
    "output.unmoved": {"reordered"},
    "padding.ignored": {"other_keys"},  # all of them
    "keys.tail_dropped": {"part_factors"},
    "keys.half": {"part_factors"},
    "keys.second_half": {"part_factors"},
    "softmax.no_rescale": {"part_factors"},
    "softmax.accumulator_no_rescale": {"part_factors"},
    "softmax.last_tile": {"part_factors", "other_keys"},
    "window.left_minus_one": {"other_weights"},  # of which some are 0, as in the next ones
    "window.right_minus_one": {"other_weights"},
    "causal.strict": {"other_weights"},
    "causal.top_left": {"other_weights"},
    "window.missing_rows": {"known_in_part"},  # that there is no window
    "scale.absent": {"head_numbers"},
    "scale.twice": {"head_numbers"},
    "scale.inverse_dim": {"head_numbers"},
    "scale.value_dim": {"head_numbers"},
    "scale.log2e": {"head_numbers"},
    "scale.first_head": {"head_numbers", "known_in_part"},  # in part that of the next head, which is the first
    "scale.shifted": {"head_numbers", "known_in_part"},
    "softcap.not_divided": {"head_numbers"},
    "alibi.first_head": {"head_numbers"},
    "alibi.factor": {"head_numbers"},
    "alibi.log2e": {"head_numbers"},
    "query_lengths.absent": {"constant"},  # the logsumexp of rows that see no key
}


@pytest.mark.slow
@pytest.mark.parametrize("name", MUTANTS)
def test_facts_are_true_of_planted_mistakes(name: str) -> None:
    for seed in range(3):
        drawn = draw(seed, (name,))
        if drawn is None:
            continue
        sent = returned(drawn, ("output",) if "normalization" in drawn.fields else ("output", "logsumexp"))
        found = facts(drawn.fields, sent)
        assert {one.name for one in found} <= TRUE.get(name, set()) | {"rows_by_keys"}, [one.message for one in found]


def test_rows_that_are_nearly_nothing_are_reported() -> None:
    """No part of them is seen: there is no factor to tell, and a report all the same."""
    query, key, value = np.random.default_rng(0).standard_normal((3, 32, 16)).astype(np.float32)
    output = attend(query, key, value).output.copy()
    output[1::2] *= 1e-9
    assert compare(output, query, key, value).verdict.status == "wrong"


def test_a_fact_of_all_rows_holds_for_entries_that_are_right() -> None:
    """Batch entry 1 has another scale, entry 0 is right: not every row has it."""
    query, key, value = np.random.default_rng(0).standard_normal((3, 2, 2, 64, 32)).astype(np.float32)
    output = attend(query, key, value).output.copy()
    output[1] = attend(query, key, value, scale=1.37 / np.sqrt(32)).output[1]
    assert not [fact.message for fact in compare(output, query, key, value).facts if "In every row" in fact.message]


@pytest.mark.parametrize(("features", "names"), [(2, set()), (8, {"other_keys"})])
def test_two_numbers_of_float32_tell_no_run_of_keys(features: int, names: set[str]) -> None:
    """One of 5,000 runs of 100 keys is fitted to them: a run that is found in eight numbers is no chance."""
    random = np.random.default_rng(0)
    query, key, value = (random.normal(size=shape).astype(np.float32) for shape in ((5, 4), (100, 4), (100, features)))
    output = attend(query, key, value, include=[]).output.copy()
    output[2] = attend(query[2], key[3:50], value[3:50], include=[]).output
    assert {one.name for one in compare(output, query, key, value).facts} == names
