"""How much a mistake explains is said of each wrong array: one that explains the logsumexp alone says so."""

from __future__ import annotations

import re
from inspect import stack
from typing import Any, Final

import numpy as np
import pytest

from attention_service import attend
from attention_service.comparison.calls.merge_facts import merge_fact
from attention_service.comparison.calls.question import make_call_question
from attention_service.comparison.text import in_short
from attention_service.engines.table import decode
from attention_service.library import compare
from attention_service.library.calls import all_processors

RANDOM: Final = np.random.default_rng(0)
QUERY: Final = RANDOM.normal(size=(2, 4, 20, 32)).astype(np.float32)
KEY, VALUE = RANDOM.normal(size=(2, 2, 4, 64, 32)).astype(np.float32)
REQUEST: Final[dict[str, Any]] = {"query": QUERY, "key": KEY, "value": VALUE}


def scores(scale: float) -> np.ndarray:
    found: np.ndarray = QUERY.astype(np.float64) @ KEY.astype(np.float64).swapaxes(-1, -2) * scale
    return found


def softmax(of: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The weights and the logsumexp."""
    exponentials = np.exp(of)
    total = exponentials.sum(axis=-1, keepdims=True)
    return exponentials / total, np.log(total[..., 0])


def split_kernel() -> dict[str, np.ndarray]:
    """A split kernel: the logsumexp is that of a scale applied twice, the output has errors of some rows."""
    output = softmax(scores(32**-0.5))[0] @ VALUE
    output[:, :, 3::7] += np.sin(np.arange(32)) / 10
    return {"output": output.astype(np.float32), "logsumexp": softmax(scores(1 / 32))[1].astype(np.float32)}


def test_a_mistake_of_the_logsumexp_is_not_one_of_the_output() -> None:
    """Its errors, in baselines, are far larger than those of the output, and would hide these."""
    report = compare(split_kernel(), **REQUEST)
    first = report.hypotheses[0]
    assert (first.name, first.certainty, first.change) == ("scale.twice", "resembles", None)
    assert first.message == "The scale is applied twice. (logsumexp only)"
    assert first.explained > 0.999
    assert "% of the error of the logsumexp: the scale is applied twice." in report.verdict.message
    assert all(one.message.endswith("logsumexp only)") for one in report.hypotheses)


def test_a_mistake_of_the_output_is_named_beside_another_logsumexp() -> None:
    """It stands before what explains the logsumexp: a kernel may fill that with numbers of its own."""
    weights, sums = softmax(scores(1 / 32))
    sent = {"output": (weights @ VALUE).astype(np.float32), "logsumexp": np.sin(sums).astype(np.float32)}
    first = compare(sent, **REQUEST).hypotheses[0]
    assert (first.name, first.certainty, first.message[-14:]) == ("scale.twice", "resembles", " (output only)")


def test_gradients_with_two_mistakes_have_two_names() -> None:
    """The kernel of dq leaves the causal mask out; that of dk and dv sees one key too many."""
    request = REQUEST | {
        "is_causal": True,
        "query_offset": 44,
        "grad_output": RANDOM.normal(size=QUERY.shape).astype(np.float32),
    }
    names = ["grad_query", "grad_key", "grad_value"]
    changes: list[dict[str, Any]] = [{"is_causal": False}, {"query_offset": 45}]
    absent, moved = (attend(**request | change, include=names) for change in changes)
    sent = {"grad_query": absent.grad_query, "grad_key": moved.grad_key, "grad_value": moved.grad_value}
    found = {one.name: one.message for one in compare(sent, **request).hypotheses}
    assert found["causal.absent"] == "The causal mask is not applied. (dq only)"
    assert found["causal.offset_plus_one"] == "A query sees the key after its own position. (dk and dv only)"


def test_twice_the_right_numbers_are_not_those_of_another_place() -> None:
    """A factor of 2 says it; that the right numbers of the same place are added says nothing more."""
    request = REQUEST | {"grad_output": RANDOM.normal(size=QUERY.shape).astype(np.float32)}
    right = attend(**request, include=["grad_query", "grad_key", "grad_value"])
    sent = {"grad_query": 2 * right.grad_query, "grad_key": right.grad_key, "grad_value": right.grad_value}
    assert [fact.name for fact in compare(sent, **request).facts] == ["factor"]


@pytest.mark.parametrize("is_added", [False, True], ids=["in its place", "added to it"])
def test_rows_of_a_gradient_elsewhere_have_limits_of_their_own(is_added: bool) -> None:
    """A key that little weight falls on has small gradients, whose errors no limit of the largest one would show."""
    small = KEY.copy()
    small[:, :, ::2] -= 12 * QUERY.mean(axis=2, keepdims=True)
    request = REQUEST | {"key": small, "grad_output": RANDOM.normal(size=QUERY.shape).astype(np.float32)}
    right = attend(**request, include=["grad_query", "grad_key", "grad_value"])
    order = np.random.default_rng(1).permutation(64)
    moved = right.grad_value[:, :, order] + (right.grad_value if is_added else 0)
    sent = {"grad_query": right.grad_query, "grad_key": right.grad_key, "grad_value": moved}
    assert [fact.name for fact in compare(sent, **request).facts] == ["elsewhere"]


def test_parts_of_the_keys_need_not_be_tiles() -> None:
    """Three parts of 22, 22 and 20 keys, which a split kernel adds up by wrong weights of each row."""
    powers = np.exp(scores(32**-0.5))
    factors = RANDOM.uniform(0.5, 1.5, size=(2, 4, 20, 3)).repeat([22, 22, 20], axis=-1)
    output = (powers * factors / powers.sum(axis=-1, keepdims=True)) @ VALUE
    first = compare(output.astype(np.float32), **REQUEST).facts[0]
    assert (first.name, first.numbers["keys"]) == ("part_factors", [22])
    assert all(0.5 < one < 1.5 for name in ("least", "most") for one in first.numbers[name])


def test_each_row_that_is_fitted_looks_at_the_deadline() -> None:
    """Parts that are merged by weights of their own in each row."""
    value = RANDOM.normal(size=(40, 3, 2, 16)).astype(np.float32)
    sums = RANDOM.normal(size=(40, 3, 2)).astype(np.float32)
    shares = RANDOM.dirichlet(np.ones(3), size=(40, 2)).transpose(0, 2, 1)[..., None]
    call = decode("flashinfer.merge_states", {"v": value, "s": sums}, None)
    asked = make_call_question("flashinfer.merge_states", call, {"output": (shares * value).sum(axis=1)})
    looked: list[str] = []
    with all_processors() as backend:
        fact = merge_fact(asked, [*range(40)], {"output": 1e-6}, backend, lambda: looked.append(stack()[1].function))
    assert fact is not None
    assert fact.name == "part_weights"
    assert looked.count("_fitted") == 80  # rows and heads


def test_the_text_says_what_hides_mistakes_and_what_tests_accept() -> None:
    """Two lines that had to be read twice."""
    request = REQUEST | {"grad_output": np.ones(QUERY.shape, np.float32)}
    right = attend(**request, include=["grad_query", "grad_key", "grad_value"])
    sent = {"grad_query": 2 * right.grad_query, "grad_key": right.grad_key, "grad_value": right.grad_value}
    assert (
        "  these inputs hide mistakes: grad_output is 1 everywhere" in in_short(compare(sent, **request)).splitlines()
    )
    texts = str(compare(split_kernel()["output"], **REQUEST)).splitlines()
    passing = [line for line in texts if "would pass it" in line]
    assert passing
    assert all(re.search(r"; with these inputs, (1 known mistake|\d+ known mistakes) would", one) for one in passing)
