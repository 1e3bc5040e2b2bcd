"""The service returns every number that the notebooks print as a result of attention, digit for digit."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import httpx
import numpy as np
import pytest

from tests.cases import CASES, Case, as_array

BY_NAME = {case.name: case for case in CASES}


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_golden_case_gives_the_printed_numbers(
    case: Case, client: httpx.Client, record_property: Callable[[str, object], None]
) -> None:
    response = client.post("/attention", json=case.request)
    assert response.status_code == 200, response.text
    answer = response.json()
    assert case.expected
    for expected in case.expected:
        deviation = expected.compare(answer)
        record_property("deviation", f"{case.name:32} {expected.name:20} {expected.printed:7} {deviation:.3f}")
    assert answer["metadata"]["warnings"] == []
    for field in ("query_tokens", "key_tokens"):
        assert answer.get(field) == case.request.get(field)


def post(client: httpx.Client, **request: Any) -> dict[str, Any]:
    response = client.post("/attention", json=request)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


@pytest.mark.parametrize("name", ["self_attention_unscaled", "self_attention_scaled", "multihead"])
def test_in_column_layout_the_columns_of_the_weights_sum_to_one(client: httpx.Client, name: str) -> None:
    weights = as_array(post(client, **BY_NAME[name].request)["attention_weights"])
    np.testing.assert_allclose(weights.sum(axis=-2), 1, rtol=1e-15)


def test_permuting_the_columns_permutes_the_outputs(client: httpx.Client) -> None:
    """As in the notebook, the closest columns of any two outputs differ by less than 3e-16."""
    outputs = [as_array(post(client, **BY_NAME[f"self_attention_permutation_{n}"].request)["output"]) for n in range(6)]
    for n, permutation in enumerate(itertools.permutations(range(3))):
        np.testing.assert_allclose(outputs[n], outputs[0][:, list(permutation)], rtol=0, atol=2e-15)


def test_the_weight_form_equals_the_kernel_form(client: httpx.Client) -> None:
    weight, kernel = (post(client, **BY_NAME[f"six_tokens_linear_{form}"].request) for form in ("weight", "kernel"))
    np.testing.assert_allclose(as_array(weight["output"]), as_array(kernel["output"]), rtol=0, atol=1e-16)


def test_the_three_forms_of_causal_masking_agree(client: httpx.Client) -> None:
    by_bias, by_flag, by_mask = (
        post(client, **BY_NAME[name].request) for name in ("causal_additive_mask", "causal", "causal_boolean_mask")
    )
    for field in ("output", "attention_weights", "masked_scores"):
        assert by_bias[field] == by_flag[field] == by_mask[field]


def normal(seed: int, *shapes: tuple[int, ...]) -> list[np.ndarray]:
    random = np.random.RandomState(seed)
    return [random.normal(size=shape) for shape in shapes]


def test_the_seeds_of_the_notebooks_give_the_inputs_of_the_cases() -> None:
    """NumPy's generators with the notebooks' seeds draw the same numbers."""
    columns = np.hstack(normal(3, *[(4, 1)] * 3))
    q, k, v, bias_q, bias_k, bias_v = normal(0, *[(4, 4)] * 3, *[(4, 1)] * 3)
    request = BY_NAME["self_attention_scaled"].request
    np.testing.assert_array_equal(request["input"], columns)
    for name, weight, bias in (("query", q, bias_q), ("key", k, bias_k), ("value", v, bias_v)):
        np.testing.assert_array_equal(request["projection"][name]["weight"], weight)
        np.testing.assert_array_equal(request["projection"][name]["bias"], bias)

    request = BY_NAME["multihead"].request
    np.testing.assert_array_equal(request["input"], normal(3, (8, 6))[0])
    drawn = normal(0, *([(4, 8)] * 3 + [(4, 1)] * 3) * 2, (8, 8))
    for i, name in enumerate(("query", "key", "value")):
        np.testing.assert_array_equal(request["projection"][name]["weight"], [drawn[i], drawn[i + 6]])
        np.testing.assert_array_equal(request["projection"][name]["bias"], [drawn[i + 3], drawn[i + 9]])
    np.testing.assert_array_equal(request["projection"]["output"]["weight"], drawn[12])

    random = np.random.RandomState(775)
    request = BY_NAME["animals_projected"].request
    for name in ("query", "key", "value"):
        np.testing.assert_array_equal(request["projection"][name]["kernel"], random.rand(3, 2))
