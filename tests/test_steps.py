"""What rotation and clipping say of the numbers that they make, by hand; norms have `test_norms.py`."""

from __future__ import annotations

from math import sqrt

import numpy as np
import pytest

from attention_service.attention.steps.clip import ClipStep
from attention_service.attention.steps.rotation import RotationStep
from attention_service.comparison.solve import NumpyFunctions
from tests.memory.test_options import SIZES, STEPS, steps

EPSILON = 2.0**-23  # of float32
# Two tokens, of which the second is lengthened by tables that are no cosine and sine.
TABLES = RotationStep(cos=np.array([[[0.5], [-2.0]]]), sin=np.array([[[0.5], [1.5]]]))
ARRAY = np.array([[[[3.0, -4.0], [1.0, 0.0]]]])


def test_rotation_turns_pairs() -> None:
    """(3, -4) by 1/2 and 1/2, (1, 0) by -2 and 3/2."""

    class Functions:
        xp, compute_dtype = np, np.dtype(np.float64)

        def load(self, array: np.ndarray, /) -> np.ndarray:
            return array

    assert TABLES.apply(ARRAY, Functions(), 0.0).tolist() == [[[[3.5, -0.5], [-2, 1.5]]]]


def test_the_bound_of_rotated_vectors() -> None:
    assert TABLES.bound(10.0, ARRAY.shape, np.dtype(np.float32)) == 10 * sqrt(2**2 + 1.5**2)
    short = RotationStep(cos=np.array([[[0.5]]]), sin=np.array([[[0.5]]]))
    assert short.bound(10.0, ARRAY.shape, np.dtype(np.float32)) == 10


@pytest.mark.parametrize(("cos", "sin", "turn"), [(-2, 1.5, 2), (1.5, -3, 3), (0.5, 0.5, 1)])
def test_the_error_of_rotated_numbers(cos: float, sin: float, turn: float) -> None:
    """Of two products, times the largest factor; an angle of position 2**20 has 2**21 of the last bits of float64."""
    step = RotationStep(cos=np.array([[[0.0], [cos]]]), sin=np.array([[[0.0], [sin]]]), reach=2**20)
    angles = 2.0**21 * 2.0**-52 / EPSILON
    found = step.error(ARRAY, np.array([[[1.0, 3.0]]]), EPSILON)
    expected = [turn * sqrt(2) * (1 + (1 + angles) * 4), turn * sqrt(2) * (3 + (1 + angles) * 1)]
    np.testing.assert_allclose(found, [[expected]], rtol=1e-15)


def test_clipped_numbers() -> None:
    step, shape = ClipStep(0.5), (2, 3, 5, 4)
    assert step.bound(3.0, shape, np.dtype(np.float32)) == 3
    assert step.bound(10.0, shape, np.dtype(np.float32)) == 0.5 * sqrt(60)


@pytest.mark.parametrize("size", [1e-3, 1.0, 1e3])
@pytest.mark.parametrize("name", STEPS)
def test_the_result_of_a_step_is_within_its_bound(name: str, size: float) -> None:
    """A bound that is too low lets scores overflow unseen, or accuses finite ones."""
    array = np.random.default_rng(0).normal(size=SIZES) * size
    before = np.linalg.norm(array.reshape(len(array), -1), axis=1)
    step = steps(STEPS[name])[name]
    result = step.apply(array, NumpyFunctions(array.dtype), before)
    norms = np.linalg.norm(result.reshape(len(result), -1), axis=1)
    assert np.all(norms <= step.bound(before, array.shape, array.dtype) * (1 + 1e-12))
