"""The comparison's own mathematics agrees with the general path, for every option and each pair of options."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest

from attention_service.attention.outputs import OUTPUT
from attention_service.attention.planning import make_plan
from attention_service.attention.spec import AttentionSpec
from attention_service.backends.registry import Backends
from attention_service.comparison import case as case_module
from attention_service.comparison.actual import NAMES as NAMES_OF_ARRAYS
from attention_service.comparison.actual import canonical
from attention_service.comparison.baseline import arrays_of
from attention_service.comparison.case import make_case
from attention_service.comparison.compare import compare_question
from attention_service.comparison.report import make_report
from attention_service.comparison.sample import Sample, everything
from attention_service.comparison.solve import solve
from attention_service.comparison.truth import Question
from attention_service.errors import FieldConflict
from attention_service.schemas.compare import ActualArrays
from tests.helpers.covering import with_options
from tests.test_options import PLAIN, UNUSUAL, general

# Which outputs a request asks for, where they are computed, and in which type. A case has none of these.
OF_ANSWER = {"dtype", "device", "backend", "untyped", "average_heads", "top_k", "select_heads", "select_queries"}
# Comparisons refuse gradients.
REFUSED = {"grad_output", "grad_logsumexp", "gradients"}
NAMES = [name for name in UNUSUAL if name not in OF_ANSWER | REFUSED and not name.endswith("_tokens")]
OPTIONS = {name: {field: value for field, value in UNUSUAL[name].items() if field != "include"} for name in NAMES}
FLOAT64 = np.dtype(np.float64)


def joined(names: tuple[str, ...]) -> AttentionSpec | None:
    """The request with all of these options; None if they cannot stand together."""
    spec = with_options(PLAIN, OPTIONS, names)
    has_logsumexp = spec is not None and spec.normalization == "softmax"
    return spec._replace(include=("attention_weights", "logsumexp")) if spec and has_logsumexp else spec


def assert_agrees(spec: AttentionSpec) -> None:
    """Hold the answer of the request's case against the general path."""
    plan, result = make_plan(spec), general(spec)
    case = make_case(spec, FLOAT64)
    wanted = {name: canonical(result[name], name, plan) for name in (OUTPUT, *spec.include)}
    solved = arrays_of(solve(case, everything(case)), wanted)
    for name, array in wanted.items():
        np.testing.assert_allclose(solved[name], array, rtol=1e-10, atol=1e-10, err_msg=name)


@pytest.mark.parametrize("name", NAMES)
def test_a_case_with_one_option_is_solved_as_the_general_path_computes_it(name: str) -> None:
    spec = joined((name,))
    assert spec is not None
    assert_agrees(spec)


@pytest.mark.parametrize("name", NAMES)
def test_a_part_of_a_case_is_solved_as_in_the_whole(name: str) -> None:
    """A comparison computes some batch entries, heads and queries; steps and terms have numbers for each of them."""
    spec = joined((name,))
    assert spec is not None
    case = make_case(spec, FLOAT64)
    sizes = case.plan.sizes
    heads = np.arange(sizes.num_heads) if case.needs_all_heads else np.array([sizes.num_heads - 1])
    part = Sample(np.array([sizes.batch_size - 1]), heads, np.array([0, sizes.query_length - 1]))
    whole = solve(case, everything(case)).output
    np.testing.assert_allclose(solve(case, part).output, part.of(whole), rtol=1e-10, atol=1e-10)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_a_case_with_two_options_is_solved_as_the_general_path_computes_it(name: str) -> None:
    """With each later option that can stand beside this one."""
    pairs = [pair for pair in combinations(NAMES, 2) if pair[0] == name]
    specs = [(pair, spec) for pair in pairs if (spec := joined(pair)) is not None]
    different = []
    for pair, spec in specs:
        try:
            assert_agrees(spec)
        except AssertionError as error:
            different.append(f"{pair}: {str(error).strip().splitlines()[0:4]}")
    assert different == []


@pytest.mark.parametrize("unknown", ["softcap", "head_scales", "query_steps.NormStep", "roles.gate_map.weight"])
def test_a_request_with_an_option_that_no_case_computes_is_inconclusive(
    unknown: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a new option is, until cases compute it: an output of zeros is not called correct."""
    options = {"softcap": "softcap", "head_scales": "scale of each head", "query_steps.NormStep": "query_norm.eps",
               "roles.gate_map.weight": "projection.gate"}  # fmt: skip
    known = frozenset(name for name in case_module.KNOWN if not name.startswith(unknown))
    monkeypatch.setattr(case_module, "KNOWN", known)
    spec = joined((options[unknown],))
    assert spec is not None
    plan = make_plan(spec)
    zeros = {OUTPUT: np.zeros((2, 4, 12))}
    report = make_report(compare_question(Question(spec, plan, actual=zeros), Backends().choose("numpy", "cpu")))
    assert report.verdict.status == "inconclusive"
    assert unknown in report.verdict.message
    with pytest.raises(FieldConflict, match=unknown):
        make_case(spec, FLOAT64)


def test_all_outputs_can_be_compared() -> None:
    """One that `ActualArrays` lacks would be left out of comparisons without a word."""
    assert set(ActualArrays.model_fields) == set(NAMES_OF_ARRAYS)
