"""Fast paths are safe: each of them refuses an option, or gives the same results as the general path."""

from __future__ import annotations

import ast
import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import attention_service
from attention_service.attention.operands import make_operands
from attention_service.attention.options import ALWAYS
from attention_service.attention.outputs import FORWARD
from attention_service.attention.plan import Plan
from attention_service.attention.planning import make_plan
from attention_service.attention.result import Result
from attention_service.attention.score_term import ScoreTerm
from attention_service.attention.spec import (
    SOURCES,
    AttentionSpec,
    Norm,
    Projection,
    Rotary,
    SegmentIds,
    Window,
)
from attention_service.backends.numpy.backend import NumpyBackend
from attention_service.backends.numpy.small import fits
from attention_service.comparison import case
from attention_service.library import attend
from tests.helpers.backends import HAS_TORCH
from tests.helpers.covering import Group, with_options
from tests.helpers.options import numbers, plain, unusual

PACKAGE = Path(attention_service.__file__).parent
B, H, L, D = 2, 2, 4, 6
PLAIN = plain(B, H, L, D)
ARRAYS: dict[str, Any] = PLAIN.sources
UNUSUAL = unusual(B, H, L, D)
OUTPUTS: dict[str, dict[str, Any]] = {
    f"include {name}": {"include": ("attention_weights", name)} for name in FORWARD if name != "attention_weights"
}
ONE_VECTOR = {"query": numbers(12), "key": numbers(L, 12), "value": numbers(L, 12, seed=1)}
CHANGES = UNUSUAL | OUTPUTS | {"include nothing": {"include": ()}, "one vector": ONE_VECTOR}
# Gradients are asked for, and no weights, which groups of several options have.
GRADIENTS = PLAIN._replace(**UNUSUAL["grad_output"] | UNUSUAL["grad_logsumexp"])


def specs(groups: list[Group]) -> list[Any]:
    """Parameters of a test: the request with the options of each group, and GRADIENTS."""
    found = [pytest.param(with_options(PLAIN, CHANGES, group), id=group[0]) for group in groups]
    return [*found, pytest.param(GRADIENTS, id="gradients without weights")]


def changed(name: str) -> AttentionSpec:
    return PLAIN._replace(**CHANGES[name])


def without_weights(name: str) -> AttentionSpec:
    """The changed request, without outputs that a fused kernel cannot return."""
    spec = changed(name)
    kept = tuple(output for output in spec.include if output != "attention_weights")
    return spec._replace(include=spec.include if spec.top_k else kept)


def general(spec: AttentionSpec) -> Result:
    """The result of the general path, with tiles of one score."""
    backend = NumpyBackend()
    backend.small_scores = 0
    backend.tiling = replace(backend.tiling, scores=1, fast_rows=1, fast_columns=2, divide_last_above=0)
    return backend.run(make_plan(spec), spec, spec.sources)


def arrays(result: Result) -> Iterator[tuple[str, np.ndarray]]:
    for name, value in result.arrays.items():
        if isinstance(value, dict):
            yield from value.items()
        else:
            yield name, value


def assert_same(found: Result, expected: Result, *, dtype: str = "float64") -> None:
    tolerance = 1e-12 if dtype == "float64" else 1e-2
    theirs = dict(arrays(expected))
    for name, array in arrays(found):
        other = theirs.pop(name)
        assert (array.shape, array.dtype) == (other.shape, other.dtype), name
        np.testing.assert_allclose(array.astype(np.float64), other.astype(np.float64), rtol=tolerance, atol=tolerance)
    assert not theirs
    assert found.metadata.fully_masked_rows == expected.metadata.fully_masked_rows


def names(kind: Any, prefix: str = "") -> Iterator[str]:
    """The names of all fields of a request, with dots for nested fields."""
    nested = {"projection": Projection, "rotary": Rotary, "query_norm": Norm, "key_norm": Norm, "value_norm": Norm,
              "window": Window, "segment_ids": SegmentIds}  # fmt: skip
    for name in kind._fields if hasattr(kind, "_fields") else [field.name for field in dataclasses.fields(kind)]:
        yield prefix + name
        if name in nested:
            yield from names(nested[name], f"{prefix}{name}.")


def test_every_field_of_a_request_has_an_unusual_value() -> None:
    missing = [
        name
        for name in names(AttentionSpec)
        if name not in SOURCES and name != "include" and not any(given.startswith(name) for given in UNUSUAL)
    ]
    # Norms and projections of other sources have the same fields as those tested.
    fields = ("kind", "over", "position", "weight", "bias", "eps")
    assert missing == [f"{role}_norm.{name}" for role in ("key", "value") for name in fields]


# Fields that change no number: where and in which type it is computed, and what is shown beside the numbers.
BESIDE = {"device", "backend", "untyped", "allow_non_finite", "query_tokens", "key_tokens", "dtype", "layout", "scale"}
# They change the sizes of a plan, which are options of each.
OF_SIZES = {"num_heads", "num_kv_heads"}


@pytest.mark.parametrize("name", [name for name in UNUSUAL if name not in BESIDE | OF_SIZES])
def test_an_option_of_a_request_is_one_of_its_plan(name: str) -> None:
    """A field that planning turns into nothing would be ignored by all paths alike."""
    assert make_plan(changed(name)).options - make_plan(PLAIN).options


def test_a_plain_plan_has_no_other_options() -> None:
    plan = make_plan(PLAIN._replace(include=()))
    assert plan.options == ALWAYS


@pytest.mark.parametrize("name", CHANGES)
def test_the_small_path_refuses_or_agrees_with_the_general_path(name: str) -> None:
    spec = changed(name)
    assert_same(NumpyBackend().run(make_plan(spec), spec, spec.sources), general(spec), dtype=spec.dtype or "float64")


@pytest.mark.torch
@pytest.mark.parametrize("name", CHANGES)
def test_fused_kernels_refuse_or_agree_with_the_general_path(name: str) -> None:
    from attention_service.backends.torch.backend import TorchBackend

    spec = without_weights(name)._replace(backend="torch")
    found = TorchBackend().run(make_plan(spec), spec, spec.sources)
    assert_same(found, general(spec), dtype=spec.dtype or "float64")


@dataclass(frozen=True, eq=False, kw_only=True)
class PlanWithAnOption(Plan):
    """A plan with an option that no fast path knows."""

    future: int = 0


@dataclass(frozen=True, slots=True)
class UnknownTerm(ScoreTerm):
    """A score term that no fast path knows."""


def unknown_options() -> dict[str, Plan]:
    plan = make_plan(PLAIN._replace(include=()))
    fields = {field.name: getattr(plan, field.name) for field in dataclasses.fields(Plan)}
    output = frozenset({"made_up"})
    return {
        "an option": PlanWithAnOption(**fields, future=1),
        "a term": replace(plan, terms=(UnknownTerm(),)),
        "an output": replace(plan, selection=replace(plan.selection, include=output)),  # type: ignore[arg-type]
    }


@pytest.mark.parametrize("name", ["an option", "a term", "an output"])
def test_all_fast_paths_refuse_an_unknown_option(name: str) -> None:
    plan = unknown_options()[name]
    assert len(plan.options - ALWAYS) == 1
    assert not fits(plan)
    if HAS_TORCH:
        from attention_service.backends.dense.operands import load_operands
        from attention_service.backends.torch import devices, sdpa
        from attention_service.backends.torch.backend import TorchBackend

        lib = TorchBackend().library(plan, devices.CPU)
        loaded = load_operands(plan, make_operands(PLAIN, plan, PLAIN.sources), lib)
        assert not sdpa.fitting(plan, lib, loaded).any()


@dataclass(frozen=True, slots=True)
class TermOfItsOwn(ScoreTerm):
    """A score term with a method that no case calls."""

    def multiplied(self) -> None:
        """Change weights, for example."""


def test_the_comparison_knows_what_it_does_not_compute(monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan with one of these is inconclusive (`tests/test_compare_options.py`)."""
    plans = unknown_options()
    assert case.unknown_options(plans["an option"]) == ("future",)
    assert case.unknown_options(plans["an output"]) == ("selection.include.made_up",)
    assert case.unknown_options(plans["a term"]) == ()  # it does nothing
    monkeypatch.setattr(ScoreTerm, "multiplied", lambda self: None, raising=False)
    plan = replace(plans["a term"], terms=(TermOfItsOwn(),))
    assert case.unknown_options(plan) == ("terms.TermOfItsOwn",)


def test_an_option_with_its_neutral_value_does_not_count() -> None:
    plan = unknown_options()["an option"]
    assert replace(plan, future=0).options == ALWAYS  # type: ignore[call-arg]  # a made-up field


def test_buffers_of_results_hold_nan_in_tests() -> None:
    """An output that was not computed is NaN, or -1 if it has integers, and cannot pass."""
    from attention_service.backends.dense.library import ArrayLibrary
    from attention_service.backends.numpy.backend import NumpyLibrary

    plan = make_plan(PLAIN)
    backend = NumpyBackend()
    assert ArrayLibrary.fill is not None
    assert math.isnan(ArrayLibrary.fill)
    lib = NumpyLibrary(plan, backend.tiling, None)
    assert np.isnan(lib.empty((2, 3), plan.dtype)).all()
    assert (lib.empty((2, 3), np.dtype(np.int32)) == -1).all()


def test_small_requests_take_the_small_path() -> None:
    assert attend(**ARRAYS).metadata.kernel == "small"
    assert attend(**ARRAYS, is_causal=True).metadata.kernel == "dense"


# Modules that read an option of a plan, and what makes an option that they do not know safe.
GENERAL = "computes all options: every path is held against it above"
READERS = {
    "attention/cost.py": "tests/memory measures each option of the table",
    "attention/result.py": GENERAL,
    "attention/tiles.py": GENERAL,
    "backends/dense/backward.py": "tests/test_gradients.py holds every option against torch",
    "backends/dense/binning.py": "bins weights that the general path computed, and what its masks hide",
    "backends/dense/compute.py": GENERAL,
    "backends/dense/gates.py": GENERAL,
    "backends/dense/gradients.py": "tests/test_gradients.py holds every option against torch",
    "backends/dense/numerics.py": GENERAL,
    "backends/dense/operands.py": GENERAL,
    "backends/dense/scores.py": GENERAL,
    "backends/ray/memory.py": "tests/ray measures what workers read of each option",
    "backends/torch/backend.py": "KNOWN of sdpa; its estimates are measured by tests/memory",
    "backends/torch/sdpa.py": "KNOWN",
    "comparison/case.py": "KNOWN: a request with others is inconclusive",
    "comparison/facts.py": "what the case computes; a request with others is inconclusive",
    "comparison/floors.py": "of a case; a request with others is inconclusive",
    "comparison/gradients/case.py": "of a case; a request with others is inconclusive",
    "comparison/gradients/estimates.py": "of a case; a request with others is inconclusive",
    "comparison/gradients/mutants/scores.py": "of a case",
    "comparison/gradients/mutants/sums.py": "of a case",
    "comparison/gradients/mutants/table.py": "of a case",
    "comparison/gradients/mutants/views.py": "of a case; a request with others is inconclusive",
    "comparison/gradients/rounding.py": "of a case; a request with others is inconclusive",
    "comparison/gradients/suggestion.py": "of a case",
    "comparison/gradients/terms.py": "of a case; a request with others is inconclusive",
    "comparison/memory.py": "tests/memory measures comparisons",
    "comparison/mutants/heads.py": "of a case",
    "comparison/mutants/masks.py": "of a case; a request with others is inconclusive",
    "comparison/mutants/precision.py": "of a case; a request with others is inconclusive",
    "comparison/mutants/softmax.py": "of a case",
    "comparison/question.py": "names of gradients, which the plan has itself",
    "comparison/row_errors.py": "of a case; a request with others is inconclusive",
    "comparison/rows.py": "of a case; a request with others is inconclusive",
    "comparison/score_curve.py": "of a case; a request with others is inconclusive",
    "comparison/solve.py": "of a case",
    "comparison/wrong.py": "of a case",
    "conformance/suite.py": "of a case",
    "render/picture.py": "draws what the general path computes",
}
OF_PLANS = {field.name for field in dataclasses.fields(Plan)} - {
    "roles", "dtype", "layout", "selection", "notices", "single_query", "scale",
} | {"steps", "scales", "all_sinks"}  # fmt: skip


def test_every_reader_of_the_options_of_a_plan_is_safe_from_those_that_it_does_not_know() -> None:
    """A new reader is given its row, and with it a set of known options, or a test against the general path."""
    readers = set()
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Attribute) or node.attr not in OF_PLANS:
                continue
            if ast.unparse(node.value).rpartition(".")[2] in ("plan", "_plan"):
                readers.add(str(path.relative_to(PACKAGE)))
    assert readers == READERS.keys()
