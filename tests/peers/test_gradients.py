"""Gradients of random requests are those by which torch and JAX differentiate compositions of their functions."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from tests.peers import gradients
from tests.peers.gradients import run_gradients

pytestmark = pytest.mark.filterwarnings("ignore")
# `make test-deep` runs as many as tests/peers/deep.py says.
CONFIGURATIONS = {"gradients": 150, "gradients of JAX": 6}


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_gradients_of_random_requests(name: str) -> None:
    run_gradients(name, CONFIGURATIONS[name], first_seed=0)


@pytest.mark.parametrize("change", [lambda array: array * (1 + 1e-8), lambda array: array + 1e-13])
def test_a_deviation_is_noticed(change: Callable[[np.ndarray], np.ndarray], monkeypatch: pytest.MonkeyPatch) -> None:
    """Also a tiny one, in the place of an exact 0."""
    leaves = gradients.leaves

    def changed(name: str, value: Any) -> Iterator[tuple[str, np.ndarray]]:
        yield from ((place, change(array)) for place, array in leaves(name, value))

    monkeypatch.setattr(gradients, "leaves", changed)
    with pytest.raises(AssertionError, match="times what is allowed"):
        run_gradients("gradients", CONFIGURATIONS["gradients"], first_seed=0)
