"""Options that single models introduced, beside the attention modules of these models, with random weights."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.peers import options
from tests.peers.layers_of_models import Both
from tests.peers.options import COMPARISONS, run_option

pytestmark = pytest.mark.filterwarnings("ignore")

# `make test-deep` runs as many as tests/peers/deep.py says.
CONFIGURATIONS = 40
# What makes no option of a model: what is attended to, and how it is laid out.
SOURCES = {"input", "query", "key", "value", "num_heads", "num_kv_heads", "projection", "query_offset"}


@pytest.mark.parametrize("name", COMPARISONS)
def test_an_option_is_what_its_model_computes(name: str) -> None:
    run_option(name, CONFIGURATIONS, first_seed=0)


@pytest.mark.parametrize("name", COMPARISONS)
def test_a_deviation_is_noticed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a part in a hundred billion, so that arithmetic in float32 would not pass for that in float64."""
    compute = COMPARISONS[name]

    def other(random: np.random.Generator) -> Both:
        both = compute(random)
        array, numbers = next(iter(both.theirs.items()))
        return both._replace(theirs=both.theirs | {array: numbers * (1 + 1e-11)})

    monkeypatch.setitem(options.COMPARISONS, name, other)
    with pytest.raises(AssertionError, match="times what is allowed"):
        run_option(name, CONFIGURATIONS, first_seed=0)


def options_of(name: str) -> list[str]:
    """The fields of a request that its model needs, and `gate` for that of the projection."""
    request = COMPARISONS[name](np.random.default_rng(0)).request
    found = [field for field, value in request.items() if field not in SOURCES and value is not False]
    return found + (["projection.gate"] if "gate" in request.get("projection", {}) else [])


def without(request: dict[str, Any], field: str) -> dict[str, Any]:
    """A request without one of its options."""
    if field == "projection.gate":
        maps = {role: each for role, each in request["projection"].items() if role != "gate"}
        return request | {"projection": maps}
    return {each: value for each, value in request.items() if each != field}


@pytest.mark.parametrize("name", COMPARISONS)
def test_each_option_of_a_request_counts(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without it, some configuration deviates, so that the service could not ignore it."""
    compute = COMPARISONS[name]
    fields = options_of(name)
    assert fields
    for field in fields:

        def other(random: np.random.Generator, field: str = field) -> Both:
            both = compute(random)
            return both._replace(request=without(both.request, field))

        monkeypatch.setitem(options.COMPARISONS, name, other)
        with pytest.raises(AssertionError, match="times what is allowed"):
            run_option(name, CONFIGURATIONS, first_seed=0)
