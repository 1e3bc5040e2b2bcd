"""Leading axes of torch's scaled_dot_product_attention, which are broadcast; tests/peers asks torch itself."""

from __future__ import annotations

import math
from typing import Any, Final

import numpy as np
import pytest

from attention_service import call, compare_call
from tests.test_engines_call import fault

SDPA: Final = "torch.scaled_dot_product_attention"


@pytest.mark.parametrize(
    ("query", "key", "value", "more"),
    [
        ((2, 4), (1, 4), (1, 4), {}),
        ((2, 4), (2, 1), (2, 1), {}),
        ((1, 1), (2, 4), (1, 4), {}),
        ((2, 1), (1, 4), (4,), {}),
        ((), (2, 4), (2, 4), {}),
        ((3, 1, 2), (1, 5, 2), (5, 1), {}),
        ((1, 1), (1, 1), (2, 4), {"attn_mask": np.arange(15.0).reshape(3, 5)}),
        ((2, 4), (1, 4), (1, 4), {"attn_mask": np.arange(30.0).reshape(2, 1, 3, 5)}),
    ],
)
def test_leading_axes_of_torch_are_broadcast(query: Any, key: Any, value: Any, more: dict[str, np.ndarray]) -> None:
    """As those of the products of matrices that the function is defined by."""
    random = np.random.default_rng(0)
    q, k, v = (random.normal(size=shape) for shape in ((*query, 3, 2), (*key, 5, 2), (*value, 5, 4)))
    scores = q @ k.swapaxes(-1, -2) / math.sqrt(2) + more.get("attn_mask", 0)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    expected = weights / weights.sum(axis=-1, keepdims=True) @ v
    given: dict[str, Any] = {"query": q, "key": k, "value": v, **more}
    found = call(SDPA, **given)
    np.testing.assert_allclose(found.output, expected, atol=1e-12)
    assert found.logsumexp.shape == expected.shape[:-1]
    ratio = compare_call(SDPA, actual=expected, **given).verdict.ratio
    assert ratio is not None
    assert ratio < 2


def test_what_torch_does_not_broadcast_is_refused() -> None:
    q, k, two = np.ones((2, 4, 3, 2)), np.ones((2, 2, 5, 2)), np.ones((3, 2))
    said = "/key: expected leading axes that broadcast with (2, 4), or enable_gqa for groups of heads, got (2, 2)"
    assert fault(SDPA, query=q, key=k, value=k) == ("/key", said)
    assert fault(SDPA, query=q, key=q, value=q[:, :, :2])[0] == "/value"
    assert "divisor of 2, the heads of query" in fault(SDPA, query=k, key=q, value=q, enable_gqa=True)[1]
    assert fault(SDPA, query=two, key=two, value=two, enable_gqa=True)[0] == "/query"
    assert fault(SDPA, query=q[:1], key=q[:1], value=q, attn_mask=np.ones((2, 4, 3, 3)))[0] == "/attn_mask"
    many = np.ones((300, 1, 1, 1, 1))
    assert fault(SDPA, query=many, key=many.swapaxes(0, 1), value=many)[0] == "/query"  # 90,000 sequences from 900
