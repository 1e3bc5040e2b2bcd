"""The memory of each option, counted by tracemalloc: no allocator, no other threads, so that bounds can be close.

`test_estimates.py` measures whole processes, whose C library keeps as much as a step takes.
"""

from __future__ import annotations

import dataclasses
import gc
import tracemalloc
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import pytest

from attention_service.attention.cost import copied_bytes
from attention_service.attention.planning import make_plan
from attention_service.attention.spec import AttentionSpec
from attention_service.attention.steps.step import OperandStep
from attention_service.backends.numpy.backend import NumpyBackend
from attention_service.comparison.solve import NumpyFunctions
from tests.helpers.options import plain, unusual
from tests.memory.cases import OF_WEIGHTS, OPTIONS

# Operands of 3 MiB each, and matrices of 2 MiB.
SIZES = (2, 4, 254, 384)
TINY = (2, 4, 6, 12)
changes_of = cache(unusual)
# What Python's own objects take.
OBJECTS = 2**17


def request(name: str, sizes: tuple[int, int, int, int] = SIZES) -> AttentionSpec:
    """The request with one option, its numbers in float32; weights only where the option selects them."""
    changes = {"include": ("attention_weights",) if name in OF_WEIGHTS else ()} | changes_of(*sizes)[name]
    return AttentionSpec(*map(in_float32, plain(*sizes)._replace(**changes)))


def in_float32(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {field.name: in_float32(getattr(value, field.name)) for field in dataclasses.fields(value)}
        return dataclasses.replace(value, **fields)
    return value.astype(np.float32) if isinstance(value, np.ndarray) and value.dtype == np.float64 else value


def peak_of(function: Callable[[], object]) -> int:
    """The most bytes that the arrays made by a function take at once, its result included."""
    gc.collect()
    tracemalloc.start()
    try:
        kept = function()
        peak = tracemalloc.get_traced_memory()[1]
        del kept
        return peak
    finally:
        tracemalloc.stop()


@pytest.fixture(scope="module")
def backend() -> NumpyBackend:
    made = NumpyBackend(threads=1)  # of several, tiles seldom have their peaks at the same time
    spec = request("softcap")
    made.run(make_plan(spec), spec, spec.sources)  # the first request starts threads
    return made


@pytest.mark.slow
@pytest.mark.parametrize("name", OPTIONS)
def test_a_request_takes_at_most_its_estimate_and_at_least_half_of_it(name: str, backend: NumpyBackend) -> None:
    spec = request(name)
    plan = make_plan(spec)
    estimate = backend.peak_bytes(plan, "cpu", copied_bytes(plan, spec))
    peak = peak_of(lambda: backend.run(plan, spec, spec.sources))
    assert peak <= estimate + OBJECTS
    assert estimate <= 2 * peak


def steps(option: str, sizes: tuple[int, int, int, int] = SIZES) -> dict[str, OperandStep]:
    """The steps of the plan of a request with an option, by the name of the option, the class and the role."""
    made: dict[str, OperandStep] = {}
    plan = make_plan(request(option, sizes))
    for role, of_role in zip(("query", "key", "value", "output"), (*plan.steps, plan.output_steps), strict=True):
        made |= {f"{option}: {type(step).__name__} of {role}": step for step in of_role}
    return made


STEPS = {name: option for option in OPTIONS for name in steps(option, TINY)}


@pytest.mark.parametrize("name", STEPS)
def test_a_step_takes_at_most_the_bytes_that_it_says_and_at_least_half_of_them(name: str) -> None:
    batch, heads, length, features = SIZES
    array = np.random.default_rng(0).normal(size=(batch, heads, length, features)).astype(np.float32)
    functions, step = NumpyFunctions(array.dtype), steps(STEPS[name])[name]
    with np.errstate(all="ignore"):
        peak = peak_of(lambda: step.apply(array, functions, 1e3))
    said = step.bytes(array.nbytes, length)
    assert peak <= said + OBJECTS
    assert said <= 2 * peak + OBJECTS


def test_every_class_of_steps_is_measured() -> None:
    from attention_service.attention.steps import STEPS as CLASSES

    assert {type(step) for option in OPTIONS for step in steps(option, TINY).values()} == set(CLASSES)
