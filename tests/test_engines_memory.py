"""What calls of engines take before they are computed, and what is estimated for them: hostile sizes cost nothing."""

from __future__ import annotations

from typing import Any

import numpy as np

from attention_service.engines.call import Call
from attention_service.engines.table import decode

ONES: Any = np.ones


def decoded(function: str, **arguments: Any) -> Call:
    found = decode(function, arguments)
    assert isinstance(found, Call)
    return found


def test_the_most_scores_are_of_one_long_sequence_beside_many_short_ones() -> None:
    """4,000 · 8,000 scores, and 4,096 times 1 · 2, which have more queries and keys together."""
    queries, keys = (np.cumsum([0, size, *[each] * 4096]) for size, each in ((4000, 1), (8000, 2)))
    arrays = {"q": ONES((queries[-1], 1, 1)), "k": ONES((keys[-1], 1, 1)), "v": ONES((keys[-1], 1, 1))}
    call = decoded("flash_attn.flash_attn_varlen_func", **arrays, cu_seqlens_q=queries, cu_seqlens_k=keys)
    assert [0] in call.largest()
