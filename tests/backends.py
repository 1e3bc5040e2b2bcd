"""The backends that tests run against: NumPy always, torch where it is installed."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

HAS_TORCH = find_spec("torch") is not None

BACKENDS = [
    "numpy",
    pytest.param(
        "torch", marks=pytest.mark.skipif(not HAS_TORCH, reason="torch is not installed; run make test-torch")
    ),
]
