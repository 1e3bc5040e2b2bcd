"""The devices of torch that tests run on: the CPU where torch is installed, a GPU where torch sees one."""

from __future__ import annotations

from typing import Any

import pytest

from tests.helpers.backends import HAS_TORCH


def missing() -> str:
    """Why there is no GPU to test on; empty if there is one."""
    if not HAS_TORCH:
        return "torch is not installed, and so no GPU can be tested; run make test-gpu on a machine with one"
    import torch

    if not torch.cuda.is_available():
        return f"torch {torch.__version__} sees no GPU; run make test-gpu on a machine with one"
    return ""


needs_torch = pytest.mark.skipif(not HAS_TORCH, reason="torch is not installed; run make test-torch")


def needs_gpu() -> list[Any]:
    """Marks of what runs on a GPU alone."""
    reason = missing()
    return [pytest.mark.gpu, pytest.mark.skipif(bool(reason), reason=reason)]
