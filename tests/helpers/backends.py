"""The backends that tests run against: NumPy always, torch where it is installed (see `unavailable` in conftest.py)."""

from __future__ import annotations

from dataclasses import replace
from importlib.util import find_spec
from math import inf
from typing import Any

import pytest

from attention_service.backends.numpy.backend import NumpyBackend
from attention_service.library import backends, calls

HAS_TORCH = find_spec("torch") is not None

BACKENDS = ["numpy", pytest.param("torch", marks=pytest.mark.torch)]


def compute_as_if_large(patch: pytest.MonkeyPatch, tile: int = 1) -> None:
    """Let `attend` compute small requests on the path of large ones, in tiles and blocks of this size.

    tile: number of scores in a tile
    """
    numpy = backends().choose("numpy", "cpu")
    assert isinstance(numpy, NumpyBackend)
    small: dict[str, Any] = {"scores": 2 * tile, "fast_rows": 1, "fast_columns": 2, "divide_last_above": 0}
    patch.setattr(calls, "BLAS_ALONE", inf)  # all requests are computed by this backend
    patch.setattr(calls, "_kept", {})
    patch.setattr(numpy, "small_scores", 0)
    patch.setattr(numpy, "tiling", replace(numpy.tiling, **small))
    if HAS_TORCH:
        from attention_service.backends.torch.backend import TorchBackend

        torch = backends().choose("torch", "cpu")
        assert isinstance(torch, TorchBackend)
        patch.setattr(torch, "tiling", replace(torch.tiling, **small))
        patch.setattr(torch.kernels, "unmasked_scores", tile)
