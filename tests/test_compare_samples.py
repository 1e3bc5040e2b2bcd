"""Which rows of a request a comparison computes: numbers by hand, from the limits of `samples.py`."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from attention_service import attend, compare
from attention_service.attention.shapes import Sizes
from attention_service.codecs.decoded import Decoded
from attention_service.comparison.case import make_case
from attention_service.comparison.samples import MAX_OUTPUTS, MAX_SCORES, choose_sample, sample_counts
from attention_service.pipeline.prepare import make_spec_and_plan

# h, g, b, q, k, d, e of a request; batch entries, heads and queries of its sample, and of one whose output map joins
# heads.
COUNTS = {
    "few scores": ((2, 1, 2, 8, 8, 4, 4), (2, 2, 8), (2, 2, 8)),
    "all of 2**15 scores": ((1, 1, 1, 128, 256, 1, 1), (1, 1, 128), (1, 1, 128)),
    "64 rows of more": ((1, 1, 1, 129, 256, 1, 1), (1, 1, 64), (1, 1, 64)),
    # 65 pairs of rows of 1,000 scores have 2**23 operands; 2**18 scores are 32 rows of 8 heads.
    "many heads": ((8, 8, 4, 1000, 1000, 64, 64), (2, 4, 32), (2, 8, 16)),
    "two rows of long keys": ((4, 4, 2, 10, 200_000, 8, 8), (1, 1, 2), (1, 4, 2)),
    "the only query of long keys": ((1, 1, 1, 1, 200_000, 8, 8), (1, 1, 1), (1, 1, 1)),
    # 2**28 products are 5,368 scores, of 26 rows, but 2**17 numbers of output are two rows.
    "wide values": ((1, 1, 1, 200, 200, 4, 50_000), (1, 1, 2), (1, 1, 2)),
    "wide keys": ((1, 1, 1, 200, 200, 50_000, 4), (1, 1, 26), (1, 1, 26)),
}


@pytest.mark.parametrize("name", COUNTS)
def test_the_sample_is_as_large_as_its_limits_allow(name: str) -> None:
    sizes, *expected = COUNTS[name]
    for joins_heads, counts in zip((False, True), expected, strict=True):
        assert sample_counts(Sizes(*sizes), MAX_SCORES, MAX_OUTPUTS, needs_all_heads=joins_heads) == counts


def test_a_row_outside_the_sample_shows_a_mistake() -> None:
    """A mask that hides one key from one row, which no sample of the request has unless something is wrong there."""
    query, key, value = np.random.default_rng(0).standard_normal((3, 600, 8))
    mask = np.ones((600, 600), bool)
    request: dict[str, Any] = {"query": query, "key": key, "value": value, "mask": mask}
    spec, plan = make_spec_and_plan(Decoded(request, frozenset()))
    sampled = choose_sample(make_case(spec, plan.dtype), None).rows
    row = np.setdiff1d(np.arange(600), sampled)[100]
    mask[row, 5] = False
    report = compare(attend(**request, include=[]).output, **request)
    assert (report.verdict.status, "mask.absent" in report.power.survivors) == ("correct", False)
