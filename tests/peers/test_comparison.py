"""Comparisons of what torch and JAX return, as arrays of their own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import torch

from attention_service.commands.files import read_arrays, read_request
from attention_service.comparison.actual import NAMES
from attention_service.comparison.inputs import make_input
from attention_service.comparison.recipes import recipe_for
from attention_service.library import compare
from tests.deep_compare import right


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_tensors_of_torch(dtype: torch.dtype) -> None:
    """SDPA aligns its causal mask with the first key, whatever the lengths."""
    torch.manual_seed(0)
    query, key, value = (torch.randn(1, 4, length, 16).to(dtype) for length in (13, 37, 37))
    output = torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
    fields: dict[str, Any] = {"query": query, "key": key, "value": value, "is_causal": True}
    assert compare(output, **fields, query_offset=0).verdict.status in ("correct", "inconclusive")
    report = compare(output, **fields, query_offset=24)
    assert report.hypotheses[0].name == "causal.top_left"
    assert report.metadata["dtype"] == str(dtype).removeprefix("torch.")


def test_arrays_of_jax() -> None:
    query, key, value = jax.random.normal(jax.random.key(0), (3, 2, 11, 4, 8), dtype=np.float32)
    output = jax.nn.dot_product_attention(query, key, value, is_causal=True)
    report = compare(output, query=query, key=key, value=value, layout="blhd", is_causal=True)
    assert report.verdict.status == "correct"
    assert compare(output, query=query, key=key, value=value, layout="blhd").hypotheses[0].name == "causal.added"


def test_files_of_torch(tmp_path: Path) -> None:
    fields = make_input(recipe_for(["causal.absent"]), 1)
    tensors = {
        name: torch.from_numpy(value) if isinstance(value, np.ndarray) else value for name, value in fields.items()
    }
    torch.save(tensors, tmp_path / "request.pt")
    torch.save(torch.ones(2, 3, dtype=torch.bfloat16), tmp_path / "actual.pt")
    read = read_request(tmp_path / "request.pt").fields
    np.testing.assert_array_equal(read["query"], fields["query"])
    assert read["is_causal"] is True
    arrays = read_arrays(tmp_path / "actual.pt", NAMES)
    assert arrays["output"].dtype.name == "bfloat16"


def test_right_outputs_of_other_libraries_are_not_accused() -> None:
    """A small sample; `make test-deep` takes thousands."""
    assert right(24, 1)
