"""Cases of one corner of conformance suites."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from attention_service.conformance.corners import COMBINED, CORNERS
from attention_service.conformance.gradient_corners import GRADIENT_CORNERS
from attention_service.conformance.requests import make_fields
from attention_service.conformance.suite import SuiteCase, finished

BY_NAME = {corner.name: corner for corner in (*CORNERS, COMBINED)}
GRADIENTS_BY_NAME = {corner.name: corner for corner in GRADIENT_CORNERS}


def make_corner_cases(name: str, count: int, seed: int, types: tuple[str, ...]) -> Iterator[SuiteCase]:
    """So many cases of a corner, by its name. types: left out where the corner has types of its own"""
    corner = (BY_NAME | GRADIENTS_BY_NAME)[name]
    own = [kind for kind in corner.types if kind in types] or list(corner.types)
    for number in range(count):
        random = np.random.default_rng([seed, number])
        yield finished(f"{number:04}-{name}", name, make_fields(corner, own[number % len(own)], random))
