"""The first example of the page is what a trained model computes."""

from __future__ import annotations

import json

import numpy as np
import pytest

from tests.peers.trained_head import CASE, HEADS, capture_head, weights_of

pytestmark = pytest.mark.filterwarnings("ignore")


def test_the_first_example_is_what_the_model_computes() -> None:
    """To its three digits; the weights are those of the model to 0.005."""
    request = json.loads(CASE.read_text(encoding="utf-8"))["request"]
    tokens, captured, weights = capture_head()
    assert request["query_tokens"] == request["key_tokens"] == tokens
    assert request["num_heads"] == len(HEADS)
    for name, array in captured.items():
        np.testing.assert_allclose(request[name], array, rtol=6e-3, atol=1e-6)
    found = weights_of(np.array(request["query"]), np.array(request["key"]))
    np.testing.assert_allclose(found, weights, rtol=0, atol=0.005)
