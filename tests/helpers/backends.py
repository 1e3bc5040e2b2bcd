"""The backends that tests run against: NumPy always, torch where it is installed (see `unavailable` in conftest.py)."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

HAS_TORCH = find_spec("torch") is not None

BACKENDS = ["numpy", pytest.param("torch", marks=pytest.mark.torch)]


def compute_like_large_ones(patch: pytest.MonkeyPatch, tile: int = 1) -> None:
    """Let small requests take the ways of large ones: in tiles and parts of this size.

    tile: scores of a tile
    """
    for module in ("numpy", "dense"):  # the first takes it from the second, when it is loaded
        patch.setattr(f"service.backends.{module}.SMALL", 0)
    for module in ("numpy", "torch") if HAS_TORCH else ("numpy",):
        patch.setattr(f"service.backends.{module}.TILE_BYTES", 8 * tile)
    if HAS_TORCH:
        patch.setattr("service.backends.torch.fused.UNMASKED_SCORES", tile)
    patch.setattr("service.attention.tiles.FAST_ROWS", 1)
    patch.setattr("service.attention.tiles.FAST_COLUMNS", 2)
