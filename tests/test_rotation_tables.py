"""Steps of query, key, value and head outputs: what they cost before a request is admitted."""

from __future__ import annotations

import numpy as np
import pytest

from attention_service.attention.planning import make_plan
from attention_service.attention.spec import AttentionSpec, LinearMap, Projection, Rotary
from attention_service.attention.steps import rotation
from attention_service.backends.numpy.backend import NumpyBackend
from tests.memory.test_options import peak_of


def small_body(rotary: Rotary, tokens: int = 1000) -> AttentionSpec:
    """A request of a few kilobytes, whose projection makes as many features as it has tokens."""
    weight = LinearMap(weight=np.ones((tokens, 1), np.float32))
    projection = Projection(query=weight, key=weight, value=LinearMap(weight=np.ones((1, 1), np.float32)))
    given = np.ones((tokens, 1), np.float32)
    return AttentionSpec(input=given, projection=projection, rotary=rotary, include=())


ROW = np.ones((1, 500), np.float32)
LARGE = {
    "computed": Rotary(base=100.0),
    "looked up": Rotary(cos=ROW, sin=ROW, query_positions=np.zeros(1000, int), key_positions=np.zeros(1000, int)),
}


@pytest.mark.parametrize("name", LARGE)
def test_large_tables_of_a_rotation_are_made_after_admission(name: str) -> None:
    """A plan is made before memory is granted. The tables of 1000 tokens have 500,000 numbers each."""
    spec = small_body(LARGE[name])
    assert peak_of(lambda: make_plan(spec)) < 2**17
    plan, backend = make_plan(spec), NumpyBackend(threads=1)
    estimate = backend.peak_bytes(plan, "cpu", 0)
    assert peak_of(lambda: backend.run(plan, spec, spec.sources)) <= estimate


@pytest.mark.parametrize("name", LARGE)
@pytest.mark.parametrize("positions", [None, np.arange(7)[::-1] * 3])
def test_tables_made_late_are_those_made_with_the_plan(
    name: str, positions: np.ndarray | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    tables = np.random.default_rng(0).normal(size=(2, 19, 2))
    given = LARGE[name]
    rotary = Rotary(base=given.base) if name == "computed" else Rotary(cos=tables[0], sin=tables[1])
    query = np.random.default_rng(1).normal(size=(7, 4))
    spec = AttentionSpec(query=query, key=query, value=query, include=("query", "key"))
    spec = spec._replace(rotary=Rotary(rotary.base, rotary.cos, rotary.sin, query_positions=positions))
    early = NumpyBackend(threads=1).run(make_plan(spec), spec, spec.sources)
    monkeypatch.setattr(rotation, "MADE_WITH_PLAN", 0)
    late = NumpyBackend(threads=1).run(make_plan(spec), spec, spec.sources)
    for role in ("query", "key"):
        np.testing.assert_array_equal(late[role], early[role])
