"""Calls of `attend` share plans of earlier calls with the same shapes, types and options, and never their numbers."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from attention_service import attend
from attention_service.errors import InvalidRequest
from attention_service.library import calls
from attention_service.pipeline import plan_key, prepare

RANDOM = np.random.default_rng(5)


def arrays(queries: int = 3, keys: int = 4, features: int = 2, dtype: Any = np.float64) -> dict[str, Any]:
    lengths = {"query": queries, "key": keys, "value": keys}
    return {name: RANDOM.normal(size=(length, features)).astype(dtype) for name, length in lengths.items()}


def by_hand(query: np.ndarray, key: np.ndarray, value: np.ndarray, scale: float = 2**-0.5) -> np.ndarray:
    scores = np.exp(query @ key.T * scale)
    output: np.ndarray = scores / scores.sum(axis=1, keepdims=True) @ value
    return output


@pytest.fixture
def planned(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What is planned from now on; no plan is kept."""
    made: list[Any] = []
    plan = prepare.make_spec_and_plan

    def noted(*arguments: Any, **options: Any) -> Any:
        made.append(plan(*arguments, **options))
        return made[-1]

    monkeypatch.setattr(calls, "_kept", {})
    monkeypatch.setattr(calls, "make_spec_and_plan", noted)
    return made


def test_calls_of_one_shape_share_a_plan_and_no_numbers(planned: list[Any]) -> None:
    for _ in range(3):
        given = arrays()
        result = attend(**given)
        np.testing.assert_allclose(result.output, by_hand(**given), rtol=1e-12)
        assert result.heatmap().svg.startswith("<svg")  # drawn from the numbers of this call
    assert len(planned) == 1


def test_other_shapes_types_and_options_have_plans_of_their_own(planned: list[Any]) -> None:
    given = arrays()
    single = {name: array.astype(np.float32) for name, array in given.items()}
    for fields in (given, arrays(keys=5), single):
        np.testing.assert_allclose(attend(**fields).output, by_hand(**fields), rtol=1e-5)
    assert attend(**single).output.dtype == np.float32
    for scale in (1, 1.5, 0.0, -0.0):
        np.testing.assert_allclose(attend(**given, scale=scale).output, by_hand(**given, scale=scale), rtol=1e-12)
    assert len(planned) == 7
    with pytest.raises(InvalidRequest):
        attend(**given, scale=True)


def test_arrays_beside_the_sources_count_by_their_numbers() -> None:
    given = arrays()
    for key in range(4):
        mask = np.arange(4) == key
        np.testing.assert_allclose(attend(**given, mask=mask).output, given["value"][[key] * 3])
        np.testing.assert_allclose(attend(**given, bias=np.where(mask, 0, -np.inf)).output, given["value"][[key] * 3])


def test_lists_count_by_their_numbers() -> None:
    for number in (1.0, 2.0):
        assert attend([[number]], [[1.0]], [[number]]).output.tolist() == [[number]]
        assert attend(input=[[number]]).output.tolist() == [[number]]


def test_what_is_not_finite_is_named_again(planned: list[Any]) -> None:
    given = arrays()
    attend(**given)
    given["query"][1, 0] = np.nan
    for _ in range(2):
        with pytest.raises(InvalidRequest, match=r"/query: expected finite numbers, got nan at \[1, 0\]"):
            attend(**given)
    given["query"][1, 0] = 1
    given["key"][3] = np.inf  # hidden, so that it may be anything
    hidden = attend(**given, key_lengths=3)
    given["key"][3] = 0
    np.testing.assert_allclose(hidden.output, attend(**given, key_lengths=3).output, rtol=1e-12)


def test_eight_threads_get_the_bits_of_one() -> None:
    requests = [arrays(8 * (n % 3 + 1), 16, 8, np.float32) for n in range(48)]
    alone = [attend(**fields).output.tobytes() for fields in requests]
    with ThreadPoolExecutor(8) as pool:
        together = list(pool.map(lambda fields: attend(**fields).output.tobytes(), requests * 4))
    assert together == alone * 4


def test_few_plans_are_kept(planned: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan_key, "MAX_PLANS", 3)
    for keys in (2, 3, 4, 5, 6):
        attend(**arrays(keys=keys))
        assert len(calls._kept) <= 3
