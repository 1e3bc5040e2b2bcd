"""float64 results agree with a computation in fifty digits by mpmath."""

from __future__ import annotations

import mpmath
import numpy as np
import pytest

from attention_service import attend
from tests.helpers.backends import compute_as_if_large

EPSILON = 2.0**-52


def by_mpmath(
    query: np.ndarray, key: np.ndarray, value: np.ndarray, scale: float
) -> tuple[list[list[mpmath.mpf]], ...]:
    """Weights and output of one head, from the definition, and the scaled scores."""
    q, k, v = (mpmath.matrix(x.tolist()) for x in (query, key, value))
    scores = q * k.T * mpmath.mpf(scale)
    weights, output = [], []
    for i in range(scores.rows):
        exponentials = [mpmath.exp(scores[i, j]) for j in range(scores.cols)]
        total = mpmath.fsum(exponentials)
        row = [x / total for x in exponentials]
        weights.append(row)
        output.append([mpmath.fsum(row[j] * v[j, e] for j in range(v.rows)) for e in range(v.cols)])
    return weights, output, scores.tolist()


@pytest.mark.parametrize("large", [False, True])
@pytest.mark.parametrize("seed", range(100))
def test_weights_have_as_many_digits_as_their_scores_allow(
    seed: int, large: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if large:
        compute_as_if_large(monkeypatch)
    random = np.random.default_rng(seed)
    q, k, d, e = random.integers(1, (5, 7, 9, 5))
    reach = 10.0 ** random.uniform(-1, 4)  # of the scaled scores
    query, key, value = random.normal(size=(q, d)), random.normal(size=(k, d)), random.normal(size=(k, e))
    scale = reach / float(np.max(np.abs(query @ key.T)))
    result = attend(query, key, value, scale=scale)
    with mpmath.workdps(50):
        weights, output, scores = by_mpmath(query, key, value, scale)
        largest = float(max(abs(x) for row in scores for x in row))
        allowed = 16 * EPSILON * max(10.0, largest)
        for ours, exact in zip(result["attention_weights"].flat, (x for row in weights for x in row), strict=True):
            if exact > mpmath.mpf("1e-300"):
                assert abs(mpmath.mpf(float(ours)) / exact - 1) <= allowed
        for ours, exact in zip(result.output.flat, (x for row in output for x in row), strict=True):
            assert abs(mpmath.mpf(float(ours)) - exact) <= allowed * float(np.max(np.abs(value))) * k
