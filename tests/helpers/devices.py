"""The devices of torch that tests run on: the CPU where torch is installed, a GPU where torch sees one."""

from __future__ import annotations

from functools import cache

from tests.helpers.backends import HAS_TORCH


@cache
def missing_gpu() -> str:
    """Why there is no GPU to test on; empty if there is one."""
    if not HAS_TORCH:
        return "torch is not installed; run make test-gpu on a machine with a GPU"
    import torch

    if not torch.cuda.is_available():
        return f"torch {torch.__version__} sees no GPU; run make test-gpu on a machine with one"
    return ""
