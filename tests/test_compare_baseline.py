"""Baselines: what right kernels return in another order of sums, and from the operands of a request, is not accused."""

from __future__ import annotations

from typing import Any, Final

import httpx
import ml_dtypes
import numpy as np
import pytest

from attention_service import attend
from attention_service.backends.numpy.backend import NumpyBackend
from attention_service.codecs.decoded import Decoded
from attention_service.comparison.question import make_question
from attention_service.comparison.truth import reference_and_baseline
from attention_service.errors import Overflow
from attention_service.library import compare
from attention_service.schemas.compare import CompareReport

SOURCES: Final = ("query", "key", "value")
RIGHT: Final = ("correct", "inconclusive")
# A map of the output for one feature.
JOINED: Final[dict[str, Any]] = {
    "input": np.array([[1.0], [2.0]]),
    "projection": {"output": {"weight": np.ones((1, 1))}},
}
# The scores sum to 0.02 / √2, from terms of up to 0.9.
NEARLY_ZERO: Final[dict[str, Any]] = {
    "query": np.array([[-0.7, -0.5]]),
    "key": np.array([[-1.1, 0.4], [-0.4, 0.9], [1.0, -0.5]]),
    "value": np.array([[1.5], [-1.1], [-1.5]]),
    "normalization": "sum",
}
# They sum to 0, or to what rounding leaves of it.
ZERO: Final[dict[str, Any]] = {
    **NEARLY_ZERO,
    "query": np.array([[0.1, -0.1]]),
    "key": np.array([[0.6, 0.1], [-0.5, 0.4], [1.3, 0.9]]),
}


@pytest.mark.parametrize("name", ["attention_weights", "logsumexp"])
def test_an_output_map_needs_no_output(name: str) -> None:
    arrays = attend(**JOINED, include=[name])
    assert compare({name: arrays[name]}, **JOINED, time_limit=0).verdict.status in RIGHT
    assert compare({name: arrays[name] + 1}, **JOINED, time_limit=0).verdict.status == "wrong"


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_lists_are_cast_to_the_type_of_the_request_first(client: httpx.Client, dtype: str) -> None:
    """As attention does, so that the rounding of operands is no error of its own answer."""
    random = np.random.default_rng(3)

    def lists(*shape: int) -> Any:
        return random.normal(size=shape).round(2).tolist()

    fields = {
        "input": lists(5, 4),
        "dtype": dtype,
        "layout": "ld",
        "num_heads": 2,
        "projection": {name: {"weight": lists(6, 4), "bias": lists(6)} for name in ("query", "key", "value")},
        "past_key": lists(2, 3, 3),
        "past_value": lists(2, 3, 3),
        "bias": lists(5, 8),
        "sinks": lists(2),
        "gate": lists(2, 5, 3),
        "query_norm": {"weight": lists(3)},
    }
    names = ["output", "logsumexp", "attention_weights", "scores", "key", "present_value"]
    answer = client.post("/attention", json={**fields, "include": names[1:]}).json()
    actual = {name: answer[name] for name in names}
    response = client.post("/attention/compare", json={**fields, "actual": actual, "time_limit": 0})
    report = CompareReport.model_validate(response.json())
    assert report.verdict.status in RIGHT, report.verdict
    largest = max(report.errors[name].max_abs or 0 for name in ("logsumexp", "scores"))
    assert largest < 1e-5  # they are returned in float32, in which rounded operands have no error


def test_the_logsumexp_of_half_operands_from_lists() -> None:
    """The service's own answer, whose operands are rounded to float16."""
    maps = {"query": [[1.3, 0.95, -0.7]], "key": [[-1.27, -0.62, 0.04]], "value": [[-2.33, -0.22, -1.25]]}
    report = compare(
        {"logsumexp": np.array([0.6618118, 0.6451744])},
        input=np.array([[0.13, -0.13, 0.64], [0.1, -0.54, 0.36]]),
        dtype="float16",
        projection={name: {"weight": np.array(weight)} for name, weight in maps.items()},
    )
    assert report.verdict.status == "correct"


def test_what_the_type_cannot_hold_is_refused() -> None:
    operands = np.full((3, 2, 2), 1e6)
    with pytest.raises(Overflow):
        compare(operands[0], query=operands[0], key=operands[1], value=operands[2], dtype="float16")


def test_scores_that_nearly_sum_to_zero() -> None:
    """By hand: the exact output is -34.34, with the error of the scores over their sum."""
    for error in (-7.4e-14, 0, 7.4e-14):
        assert compare(np.array([[-34.34 + error]]), **NEARLY_ZERO, time_limit=0).verdict.status in RIGHT
    assert compare(np.array([[-34.34 + 1e-9]]), **NEARLY_ZERO, time_limit=0).verdict.status == "wrong"
    exact = attend(**NEARLY_ZERO, include=["received", "head_outputs", "attention_weights"])
    arrays = {name: exact[name] * (1 + 4e-15) for name in ("received", "head_outputs", "attention_weights")}
    assert compare(arrays, **NEARLY_ZERO, time_limit=0).verdict.status in RIGHT


@pytest.mark.parametrize("output", [0.0, 3e15, -7e16])
def test_scores_that_sum_to_zero_may_have_any_output(output: float) -> None:
    assert compare(np.array([[output]]), **ZERO, time_limit=0).verdict.status in RIGHT


def in_reverse(one: np.ndarray, other: np.ndarray) -> np.ndarray:
    """The products of rows of two matrices (…, m, n) and (…, l, n), summed one after the other from the last."""
    terms = one[..., :, None, :] * other[..., None, :, :]
    found: np.ndarray = np.cumsum(terms[..., ::-1], axis=-1)[..., -1]
    return found


def in_another_order(fields: dict[str, Any]) -> dict[str, np.ndarray]:
    """Attention with maps and an RMS norm of query and key, with every sum in reverse."""
    made = {}
    for name, linear in fields["projection"].items():
        mapped = in_reverse(fields["input"], linear["weight"]) + linear["bias"]
        if name != "value":
            mapped = mapped / np.sqrt(np.cumsum(np.square(mapped)[:, ::-1], axis=1)[:, -1:] / mapped.shape[1] + 1e-6)
        made[name] = mapped
    scores = in_reverse(made["query"], made["key"])
    scaled = scores * made["query"].shape[1] ** -0.5
    exponentials = np.exp(scaled)
    total = np.cumsum(exponentials[:, ::-1], axis=1)[:, -1:]
    weights = exponentials / total
    return {
        **made,
        "scores": scores,
        "scaled_scores": scaled,
        "logsumexp": np.log(total[:, 0]),
        "attention_weights": weights,
        "entropy": -(weights * np.log(weights)).sum(axis=1),
        "received": np.cumsum(weights[::-1], axis=0)[-1],
        "output": in_reverse(weights, made["value"].T),
    }


@pytest.mark.slow
@pytest.mark.parametrize("tokens", [2, 7, 60])
def test_another_order_of_sums_is_right(tokens: int) -> None:
    """In float64, where the reference has errors of its own."""
    for seed in range(12):
        random = np.random.default_rng(seed)
        d = int(random.choice([1, 4, 32]))
        maps = {name: {"weight": random.normal(size=(d, 9)), "bias": random.normal(size=d)} for name in SOURCES}
        fields: dict[str, Any] = {
            "input": random.normal(size=(tokens, 9)),
            "projection": maps,
            "query_norm": {},
            "key_norm": {},
        }
        arrays = in_another_order(fields)
        report = compare(arrays, **fields, time_limit=0)
        assert report.verdict.status in RIGHT, (seed, report.verdict)
        wrong = compare({**arrays, "scores": arrays["scores"] * (1 + 1e-11)}, **fields, time_limit=0)
        assert wrong.verdict.status in ("wrong", "imprecise")


def test_errors_of_products_that_cancel_are_right() -> None:
    """A score of 0 from products of 1e12: their last bits are what right kernels differ by."""
    query, key = np.array([[1e6 / 3, 1e6 / 7]]), np.array([[1e6 / 7, -1e6 / 3], [0.0, 0.0]])
    fields: dict[str, Any] = {"query": query, "key": key, "value": np.array([[1.0], [2.0]])}
    weight = 1 / (1 + np.exp(4e-6))
    assert compare(np.array([[1 + weight]]), **fields, time_limit=0).verdict.status in RIGHT
    assert compare(np.array([[1.4]]), **fields, time_limit=0).verdict.status == "wrong"


def test_a_list_of_scales_that_is_ignored_is_named() -> None:
    query, key, value = np.random.default_rng(0).standard_normal((3, 2, 12, 8))
    output = attend(query, key, value, layout="hld").output
    report = compare(output, query=query, key=key, value=value, layout="hld", scale=[0.2, 0.6])
    best = report.hypotheses[0]
    assert (best.name, best.certainty) == ("scale.other", "proof")
    assert best.change == {"scale": pytest.approx(8**-0.5)}


@pytest.mark.parametrize(
    ("name", "used"), [("scale.first_head", [0.2, 0.2, 0.2]), ("scale.shifted", [0.6, 0.4, 0.2])], ids=str
)
def test_scales_of_other_heads_are_named(name: str, used: list[float]) -> None:
    query, key, value = np.random.default_rng(0).standard_normal((3, 3, 12, 8))
    output = attend(query, key, value, layout="hld", scale=used).output
    report = compare(output, query=query, key=key, value=value, layout="hld", scale=[0.2, 0.6, 0.4])
    assert (report.hypotheses[0].name, report.hypotheses[0].certainty) == (name, "proof")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_limits_do_not_depend_on_the_number_of_threads(dtype: str) -> None:
    """900 tokens are cut into several blocks; entropy is one of the arrays that the service computes itself."""
    random = np.random.default_rng(0)
    kind = np.dtype(getattr(ml_dtypes, dtype, dtype))
    fields: dict[str, Any] = {name: random.standard_normal((1, 1, 900, 64)).astype(kind) for name in SOURCES}
    result = attend(**fields, is_causal=True, include=["logsumexp", "entropy"])
    actual = {name: result[name] for name in ("output", "logsumexp", "entropy")}
    question = make_question(Decoded({**fields, "is_causal": True, "actual": actual}, frozenset()))

    def judged(threads: int) -> tuple[bytes, dict[str, tuple[float, float | None]]]:
        truth = reference_and_baseline(question, NumpyBackend(threads))
        return truth.reference["output"].tobytes(), {
            name: (one.limit, one.errors.max_abs) for name, one in truth.judged.items()
        }

    assert [judged(threads) == judged(1) for threads in (2, 3, 4, 8)] == [True] * 4
