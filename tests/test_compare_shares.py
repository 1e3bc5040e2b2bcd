"""How much a mistake explains is said of each wrong array: one that explains the logsumexp alone says so."""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from attention_service import attend
from attention_service.library import compare

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
