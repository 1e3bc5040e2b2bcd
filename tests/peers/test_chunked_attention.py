"""Chunked attention as Hugging Face's Llama 4 masks it, and as segments say it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from transformers.masking_utils import chunked_causal_mask_function

from attention_service import attend
from tests.helpers.backends import BACKENDS

pytestmark = pytest.mark.filterwarnings("ignore")


def arrays(q: int, k: int) -> dict[str, Any]:
    random = np.random.default_rng(q * k)
    return {name: random.normal(size=(2, 3, length, 8)) for name, length in (("query", q), ("key", k), ("value", k))}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("chunk", [1, 2, 3, 5, 8, 100])
@pytest.mark.parametrize(("q", "k", "offset"), [(9, 9, 0), (4, 9, 5), (1, 7, 6)])
def test_hugging_face_and_segments(q: int, k: int, offset: int, chunk: int, backend: str) -> None:
    """A cache: queries stand behind the keys that are there already."""
    function = chunked_causal_mask_function(chunk, torch.zeros(2, dtype=torch.long))
    positions = torch.arange(k)
    visible = torch.stack([function(torch.tensor(0), 0, torch.tensor(i + offset), positions) for i in range(q)])
    given = arrays(q, k)
    theirs = torch.nn.functional.scaled_dot_product_attention(*map(torch.from_numpy, given.values()), attn_mask=visible)
    for include in (["attention_weights"], []):
        common = {**given, "layout": "bhld", "is_causal": True, "query_offset": offset, "backend": backend}
        ours = attend(**common, chunk_size=chunk, include=include)
        np.testing.assert_allclose(ours.output, theirs.numpy(), rtol=1e-12, atol=1e-13)
        ids = {"query": (np.arange(q) + offset) // chunk, "key": np.arange(k) // chunk}
        segments = attend(**common, segment_ids=ids, include=include)
        np.testing.assert_allclose(ours.output, segments.output, rtol=1e-13, atol=1e-14)
        if include:
            np.testing.assert_array_equal(ours["attention_weights"] > 0, np.broadcast_to(visible, (2, 3, q, k)))
