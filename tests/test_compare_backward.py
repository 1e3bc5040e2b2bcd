"""Mistakes of one backward kernel beside the right gradients of another; views of masks, rows that see no key, terms of
sums, and right numbers in other places. What a kernel returns is made by formulas in float64 of the tests."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Final

import numpy as np
import pytest

from attention_service.attention.arrays import BFLOAT16
from attention_service.library import compare
from attention_service.schemas.compare import CompareReport
from tests.helpers.backward_mistakes import KEY, MISTAKES, QUERY, VALUE, Arrays, Pass, hidden_differently, pass_of, view
from tests.helpers.corrupted import draw_corrupted

GRADIENTS: Final = (QUERY, KEY, VALUE)
F32: Final = np.dtype(np.float32)


def request(dtype: np.dtype = F32, *, heads: int = 4, length: int = 37, **options: Any) -> dict[str, Any]:
    """A random request with a cotangent, in layout bhld, with two key/value heads."""
    random = np.random.default_rng(1)
    counts = {"query": heads, "key": 2, "value": 2, "grad_output": heads}
    arrays = {name: random.normal(size=(2, count, length, 8)).astype(dtype) for name, count in counts.items()}
    return {**arrays, "layout": "bhld", "query_offset": np.asarray(0), **options}


def right_pass(fields: dict[str, Any]) -> Pass:
    """The right backward pass of a request, in float64."""
    return pass_of(fields, fields["query"].shape[1] // fields["key"].shape[1], np.asarray)


def judged(fields: dict[str, Any], wrong: Arrays, names: tuple[str, ...] = GRADIENTS) -> CompareReport:
    """What is said of a kernel whose gradients of these names are wrong, and all others right."""
    with np.errstate(all="ignore"):
        right = right_pass(fields).gradients()
    made = {name: (wrong if name in names else right)[name] for name in GRADIENTS}
    return compare({name: array.astype(fields["query"].dtype) for name, array in made.items()}, **fields)


def planted(name: str, fields: dict[str, Any], seed: int = 0) -> Arrays:
    """The gradients of a mistake of tests/helpers/backward_mistakes.py."""
    with np.errstate(all="ignore"):
        made = MISTAKES[name].make(right_pass(fields), np.random.default_rng(seed))
    assert made is not None
    return made


def some_mask(*shape: int) -> np.ndarray:
    """A random mask in which every query sees the first key."""
    mask = np.random.default_rng(2).random(shape) < 0.6
    mask[..., 0] = True
    return mask


@pytest.mark.parametrize(
    ("mistake", "options", "names", "said"),
    [
        ("causal_left_out", {"is_causal": True}, (KEY, VALUE), ("grad.causal_absent", "dk and dv")),
        ("causal_by_one", {"is_causal": True}, (QUERY,), ("grad.causal_shifted", "dq")),
        ("mask_left_out_of_all", {"mask": some_mask(37, 37)}, (KEY, VALUE), ("mask.absent", "dk and dv")),
        ("delta_left_out", {}, (KEY,), ("grad.no_delta", "dk")),
    ],
)
def test_a_mistake_of_one_kernel_is_named_beside_what_is_right(
    mistake: str, options: dict[str, Any], names: tuple[str, ...], said: tuple[str, str]
) -> None:
    fields = request(**options)
    [best] = judged(fields, planted(mistake, fields), names).hypotheses
    assert said[0] in (best.name, *best.also)
    assert best.certainty == "proof"
    assert best.message.endswith(f"{said[1]} only)")
    assert best.change is None  # no request asks for the gradients of one kernel alone


def test_one_number_proves_no_mistake() -> None:
    """In half types its limit is wide: one of a hundred mistakes may fit it by chance."""
    fields = request(np.dtype(BFLOAT16), length=13, scale=0.3)
    right = right_pass(fields)
    products = right.scores / right.scale  # dscale = Σ dS ⊙ (Q Kᵀ), here without D
    weights = right.weights()
    sent = np.float32((weights * (right.do @ right.v.swapaxes(-1, -2)) * products).sum())
    report = compare({"grad_scale": sent}, **fields)
    assert report.verdict.status == "wrong"
    assert not any(one.certainty == "proof" for one in report.hypotheses)


@pytest.mark.parametrize(
    ("field", "shape", "which"),
    [
        ("mask", (1, 1, 37, 37), "transposed"),
        pytest.param("mask", (1, 1, 37, 37), "keys from the left", marks=pytest.mark.slow),
        ("mask", (2, 4, 37, 37), "next head"),
        pytest.param("mask", (2, 1, 37, 37), "first entry", marks=pytest.mark.slow),
        ("bias", (1, 1, 37, 37), "rows back"),
    ],
)
def test_another_view_of_a_mask_is_named(field: str, shape: tuple[int, ...], which: str) -> None:
    made: dict[str, Any] = {"mask": some_mask(*shape)}
    made["bias"] = np.random.default_rng(3).normal(size=shape).astype(np.float32)
    fields = request(**{field: made[field]})
    right = right_pass(fields)
    other = view(np.broadcast_to(fields[field], right.shape), which, 0)
    assert other is not None
    if field == "mask":
        wrong = hidden_differently(right, "mask", other)
    else:
        wrong = Pass(**{**vars(right), "added": other}).gradients()
    [best] = judged(fields, wrong, (KEY, VALUE)).hypotheses
    assert (best.name, best.certainty) == ("grad.mask_view", "proof")
    assert best.message.endswith(", dk and dv only)")


def test_a_causal_mask_of_transposed_scores_is_named() -> None:
    """A kernel of dk and dv has keys as rows."""
    fields = request(is_causal=True)
    right = right_pass(fields)
    wrong = hidden_differently(right, "is_causal", np.triu(np.ones((37, 37), bool))[None, None])
    [best] = judged(fields, wrong, (KEY, VALUE)).hypotheses
    assert best.name == "grad.mask_view"
    assert best.message.endswith("(is_causal: transposed, dk and dv only)")


def test_a_causal_mask_that_is_some_keys_off_is_named() -> None:
    fields = request(is_causal=True)
    wrong = hidden_differently(right_pass(fields), "is_causal", np.tri(37, 37, 3, bool)[None, None])
    [best] = judged(fields, wrong, (KEY, VALUE)).hypotheses
    assert best.name == "grad.causal_shifted"
    assert best.message.endswith("(3 keys more, dk and dv only)")


@pytest.mark.parametrize("names", [GRADIENTS, (KEY, VALUE)])
def test_a_mask_of_the_forward_table_that_the_backward_pass_alone_applies_is_named(names: tuple[str, ...]) -> None:
    """Weights that are computed again with a window of one key more, from the right logsumexp."""
    i, j = np.ogrid[:37, :37]
    right, wider = ((j >= i - 5) & (j <= i + most) for most in (0, 1))
    as_mask = right_pass(request(mask=right))
    wrong = hidden_differently(as_mask, "mask", wider[None, None])
    sent = {name: (wrong if name in names else as_mask.gradients())[name].astype(F32) for name in GRADIENTS}
    [best] = compare(sent, **request(window={"left": 5, "right": 0})).hypotheses
    assert (best.name, best.certainty, best.change) == ("window.right_plus_one", "proof", None)
    assert "in the backward pass only" in best.message


def with_empty_rows() -> dict[str, Any]:
    """A request in which two queries see no key."""
    mask = some_mask(37, 37)
    mask[[3, 10]] = False
    return request(mask=mask)


def test_rows_without_a_key_may_be_nan_in_the_gradient_of_the_query_alone() -> None:
    fields = with_empty_rows()
    wrong = planted("nan_in_empty_rows", fields)
    [best] = judged(fields, wrong, (QUERY,)).hypotheses
    assert (best.name, best.certainty) == ("grad.empty_nan", "proof")
    assert best.message.endswith("(dq only)")


@pytest.mark.parametrize("names", [GRADIENTS, (VALUE,)])
def test_finite_gradients_of_rows_without_a_key_are_no_nan(names: tuple[str, ...]) -> None:
    """By hand: all keys weigh 1/37; D is the mean of what the output would be, times its cotangent."""
    fields = with_empty_rows()
    exact, wrong = right_pass(fields), right_pass(fields).gradients()
    for b, h, i in np.ndindex(2, 4, 37):
        if i in (3, 10):
            of_weights = exact.v[b, h] @ exact.do[b, h, i]
            of_scores = (of_weights - of_weights.mean()) / 37 / math.sqrt(8)
            wrong[QUERY][b, h, i] = of_scores @ exact.k[b, h]
            wrong[KEY][b, h // 2] += of_scores[:, None] * exact.q[b, h, i]
            wrong[VALUE][b, h // 2] += exact.do[b, h, i] / 37
    report = judged(fields, wrong, names)
    [best] = report.hypotheses
    assert (best.name, best.certainty) == ("grad.empty_uniform", "proof")
    assert "NaN" not in report.verdict.message


def test_nan_does_not_explain_what_is_finite() -> None:
    """Rows that see no key have any finite numbers; where 0 is right, one error must not hide all others."""
    fields = with_empty_rows()
    wrong = right_pass(fields).gradients()
    wrong[QUERY][:, :, [3, 10]] = np.random.default_rng(0).normal(size=(2, 4, 2, 8))
    wrong[KEY] *= 1.5
    wrong[VALUE] *= 1.5
    assert not any(one.name == "grad.empty_nan" for one in judged(fields, wrong).hypotheses)


def counted(**counts: np.ndarray) -> tuple[dict[str, Any], Arrays]:
    """A request of six heads, and gradients whose terms count as often as an array says. counts: see Pass.gradients"""
    fields = request(heads=6)
    return fields, right_pass(fields).gradients(**counts)


TILES: Final = np.arange(37) // 16


@pytest.mark.parametrize(
    ("counts", "name", "said"),
    [
        (
            {"of_keys": np.arange(6)[:, None, None] % 3 != 1},
            KEY,
            "grad_key is a sum over other query heads than all of each group: "
            "those of key/value head 0: 0 and 2; 1: 3 and 5",
        ),
        (
            {"of_keys": np.where(TILES == 1, 2, 1)[:, None]},
            VALUE,
            "grad_value has the terms of queries 16 to 31 twice, and all others once",
        ),
        (
            {"of_query": TILES != 0},
            QUERY,
            "grad_query has the terms of keys 0 to 15 not at all, and all others once",
        ),
        (
            {"of_keys": (TILES[:, None] != 1) | (TILES != 1)},
            KEY,
            "grad_key has the terms of queries 16 to 31 for keys 16 to 31 not at all, and all others once",
        ),
    ],
)
def test_terms_that_are_left_out_or_counted_twice_are_told(counts: dict[str, np.ndarray], name: str, said: str) -> None:
    fields, wrong = counted(**counts)
    [fact] = judged(fields, wrong, (name,)).facts
    assert fact.name == "terms"
    assert fact.message.lower() == f"{said}."


def test_terms_of_other_query_heads_are_told() -> None:
    """Key/value head j of two gets the terms of query heads j, j + 2, ..."""
    fields = request()
    single = Pass(**{**vars(right_pass(fields)), "group": 1}).gradients()
    wrong = {name: single[name].reshape(2, 2, 2, 37, 8).sum(axis=1) for name in (KEY, VALUE)}
    facts = judged(fields, {**single, **wrong}, (KEY,)).facts
    assert [fact.name for fact in facts] == ["terms"]
    assert "0: 0 and 2; 1: 1 and 3" in facts[0].message


def test_terms_of_the_gradient_of_scores_are_told() -> None:
    fields = request()
    right = right_pass(fields)
    wrong = Pass(**{**vars(right), "delta": 2 * right.delta}).gradients()
    [fact, _] = judged(fields, wrong, (QUERY, KEY)).facts
    assert fact.name == "terms"
    assert "P ⊙ dP 1 times, - P ⊙ D 2 times" in fact.message


def moved(array: np.ndarray) -> np.ndarray:
    """Tokens one place later, the first 0."""
    found = np.zeros_like(array)
    found[:, :, 1:] = array[:, :, :-1]
    return found


@pytest.mark.parametrize(
    ("which", "dtype", "name"),
    [
        ("heads", F32, QUERY),
        pytest.param("heads", np.dtype(BFLOAT16), KEY, marks=pytest.mark.slow),
        ("added head", np.dtype(BFLOAT16), VALUE),
        pytest.param("added head", F32, QUERY, marks=pytest.mark.slow),
        ("added entry", F32, KEY),
        ("tokens", np.dtype(BFLOAT16), KEY),
        pytest.param("tokens", F32, QUERY, marks=pytest.mark.slow),
        ("added token", np.dtype(BFLOAT16), QUERY),
    ],
)
def test_right_numbers_in_other_places_are_told(which: str, dtype: np.dtype, name: str) -> None:
    fields = request(dtype)
    right = right_pass(fields).gradients()
    array = right[name]
    places: dict[str, Callable[[], np.ndarray]] = {
        "heads": lambda: array[:, ::-1],
        "added head": lambda: array + array[:, ::-1],
        "added entry": lambda: array + array[::-1],
        "tokens": lambda: moved(array),
        "added token": lambda: array + moved(array),
    }
    report = judged(fields, {**right, name: places[which]()}, (name,))
    assert report.hypotheses == [] or report.hypotheses[0].certainty != "proof"
    assert report.facts[0].name in ("places", "moved", "elsewhere")


def test_damaged_gradients_whose_errors_are_less_than_the_largest_limit_are_judged() -> None:
    """Each number has a limit of its own: all wrong ones may be within that of the array, and nothing is elsewhere."""
    sent, fields = draw_corrupted(3021)
    assert compare(sent, **fields).verdict.status == "wrong"


@pytest.mark.parametrize("dtype", [np.dtype(BFLOAT16), np.dtype(np.float16)])
@pytest.mark.parametrize("name", [KEY, VALUE])
def test_rows_that_see_one_key_alone_hide_no_wrong_gradient(dtype: np.dtype, name: str) -> None:
    """A weight of one has no error of its score; what is left of it by rounding is no number's root."""
    fields = request(dtype, length=17)
    fields["query"] = (fields["query"].astype(np.float32) * 20).astype(dtype)
    gradients = right_pass(fields).gradients()
    right = {one: gradients[one].astype(dtype) for one in GRADIENTS}
    assert compare(right, **fields).verdict.status == "correct"
    random = np.random.default_rng(0).normal(size=right[name].shape) * 50
    report = compare({**right, name: random.astype(dtype)}, **fields)
    assert report.verdict.status == "wrong"
    assert all(not baseline.non_finite for baseline in report.baseline.values())


def test_zeros_are_no_exchange_with_a_gradient_that_is_0() -> None:
    """Of equal values dk is 0 but for rounding. An exchange would return dv in its place."""
    fields = request()
    fields["value"] = np.ones_like(fields["value"])
    right = right_pass(fields).gradients()
    sent = {**{name: array.astype(F32) for name, array in right.items() if name in GRADIENTS}, VALUE: right[VALUE] * 0}
    [best] = compare(sent, **fields).hypotheses
    assert (best.name, best.certainty) == ("grad.zero", "proof")
    assert "grad.dk_dv_swapped" not in best.also
    exchanged = {**sent, KEY: right[VALUE].astype(F32), VALUE: right[KEY].astype(F32)}
    [best] = compare(exchanged, **fields).hypotheses
    assert (best.name, best.certainty) == ("grad.dk_dv_swapped", "proof")
