"""Conformance of gradients without torch: functions that return them by name, exported files, and who is not asked."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
import safetensors.numpy

from attention_service import attend
from attention_service.cli import main
from attention_service.conformance import read, run, write
from attention_service.conformance.gradient_corners import GRADIENT_CORNERS
from attention_service.conformance.report import as_text
from attention_service.conformance.requests import Choice
from attention_service.conformance.runner import CornerResult, run_cases
from attention_service.conformance.suite import make_cases
from tests.helpers.corners import GRADIENTS_BY_NAME, make_corner_cases
from tests.helpers.documents import ROOT
from tests.helpers.right_backward import BackwardKernel, backward
from tests.test_conformance_requests import requests

TYPES: Final = ("float32", "bfloat16", "float64", "float16")
# Corners with options that the kernel of these tests has no parameter for, or gradients that it does not return.
OTHERS: Final = {
    *("gradients.mask", "gradients.empty_row", "gradients.key_lengths", "gradients.window", "gradients.layouts"),
    *("gradients.bias", "gradients.sinks", "gradients.sinks_large", "gradients.logsumexp_alone"),
}
Arrays = dict[str, np.ndarray]


def kernel(
    query: np.ndarray,
    key: np.ndarray,
    value: np.ndarray,
    grad_output: np.ndarray,
    grad_logsumexp: np.ndarray | None = None,
    key_mask: np.ndarray | None = None,
    *,
    is_causal: bool = False,
    query_offset: int = 0,
    softcap: float | None = None,
    bias: np.ndarray | None = None,
    sinks: np.ndarray | None = None,
) -> Arrays:
    """A right backward pass of tiles, which rounds as tensor cores do."""
    tiles = BackwardKernel(rows=16, keys=16, rounds=query.dtype.itemsize == 2, splits=2)
    options = {"is_causal": is_causal, "query_offset": query_offset, "softcap": softcap, "bias": bias, "sinks": sinks}
    options |= {"grad_logsumexp": grad_logsumexp, "key_mask": key_mask}
    given = {name: option for name, option in options.items() if option is not None}
    with np.errstate(all="ignore"):
        return backward(query, key, value, grad_output, tiles, **given)


def service(**fields: Any) -> Arrays:
    result = attend(**fields)
    return {name: result[name] for name in result if name.startswith("grad_")}


def judged(name: str, target: Callable[..., Any], types: tuple[str, ...] = TYPES) -> CornerResult:
    return run_cases(make_corner_cases(name, 2 * len(types), 5, types), target, explain=False).corners[0]


@pytest.mark.parametrize("name", GRADIENTS_BY_NAME)
def test_a_function_that_returns_gradients_by_name_is_right_where_it_is_supported(name: str) -> None:
    found = judged(name, kernel)
    assert {outcome.status for outcome in found.outcomes} == {"unsupported" if name in OTHERS else "correct"}


def test_what_a_function_does_not_return_is_not_supported() -> None:
    assert judged("gradients.bias", kernel).reason == "returns no grad_bias"
    assert judged("gradients.logsumexp_alone", kernel).reason == "missing a required argument: 'grad_output'"


def edited(edit: Callable[[Arrays, Any], Arrays]) -> Callable[..., Arrays]:
    """The kernel with other gradients."""

    def changed(query: Any, key: Any, value: Any, grad_output: Any, is_causal: bool = False) -> Arrays:
        return edit(kernel(query, key, value, grad_output, is_causal=is_causal), query)

    return changed


def of_first_heads(query: Any, key: Any, value: Any, grad_output: Any) -> Arrays:
    """dK and dV of the first head of each group."""
    group = query.shape[1] // key.shape[1]
    first = kernel(query[:, ::group], key, value, grad_output[:, ::group])
    return {**first, "grad_query": kernel(query, key, value, grad_output)["grad_query"]}


@pytest.mark.parametrize(
    ("target", "corner", "named", "where"),
    [
        (of_first_heads, "gradients.grouped_heads", "grad.not_grouped", " in grad_"),
        (
            edited(lambda found, query: {**found, "grad_query": found["grad_query"] * query.shape[-1] ** -0.5}),
            "gradients",
            "grad.scale_twice",
            " in grad_query",
        ),
        (
            edited(lambda found, _: {**found, "grad_key": -found["grad_key"]}),
            "gradients",
            "grad.negated",
            " in grad_key",
        ),
        (
            edited(lambda found, _: {**found, "grad_value": 0 * found["grad_value"]}),
            "gradients",
            "grad.zero",
            " in grad_v",
        ),
    ],
)
def test_a_mistake_is_named(target: Callable[..., Arrays], corner: str, named: str, where: str) -> None:
    (found,) = run_cases(make_corner_cases(corner, 2, 0, ("float32",)), target).corners
    assert found.first_failure is not None
    assert found.diagnosis is not None
    assert (found.status, found.diagnosis.hypothesis, found.diagnosis.certainty) == ("wrong", named, "proof")
    assert where in found.first_failure.message


def test_each_number_has_a_tolerance_of_its_own() -> None:
    """An error that is small beside the largest gradient is wrong where keys are hidden."""
    (case,) = make_corner_cases("gradients.key_lengths", 1, 0, ("float32",))
    right = {name: array.astype(np.float32) for name, array in case.expected.items()}

    def status(key: int) -> str:
        moved = right["grad_key"].copy()
        moved[0, 0, key] += np.float32(1e-6)
        answer = {**right, "grad_key": moved}
        return run_cases([case], lambda grad_output, **_: answer, explain=False).corners[0].status

    largest, hidden = int(np.abs(right["grad_key"][0, 0]).sum(axis=-1).argmax()), int(case.fields["key_lengths"][0])
    assert (status(largest), status(hidden)) == ("correct", "wrong")


def test_gradients_that_are_not_finite_or_of_another_shape_are_wrong() -> None:
    def said(edit: Callable[[Arrays, Any], Arrays]) -> str:
        (found,) = run_cases(make_corner_cases("gradients", 1, 0, ("float32",)), edited(edit), explain=False).corners
        assert found.status == "wrong"
        return found.outcomes[0].message

    assert said(lambda found, _: {**found, "grad_key": found["grad_key"] * np.nan}).startswith(
        "grad_key[0, 0, 0, 0] is"
    )
    assert said(lambda found, _: {**found, "grad_key": found["grad_key"][:1]}).startswith("grad_key of shape (1, 3, ")


def test_a_function_that_nobody_can_differentiate_is_not_asked() -> None:
    def forward(query: np.ndarray, key: np.ndarray, value: np.ndarray) -> np.ndarray:
        return attend(query, key, value, include=[]).output

    result = run_cases(make_corner_cases("gradients", 2, 0, ("float32",)), forward)
    assert (result.exit_status, result.corners[0].status) == (2, "unsupported")
    reason = "not asked for gradients: it has no parameter grad_output, and returns neither a tensor (--torch) nor an "
    assert (result.corners[0].reason or "").startswith(reason)
    assert f"1 of 1 corners not supported: {reason}" in as_text(result)
    (found,) = run_cases(make_corner_cases("gradients.mask", 1, 0, ("float32",)), forward).corners
    assert found.reason == "got an unexpected keyword argument 'mask'"


def test_the_field_that_asks_for_all_gradients_is_passed_to_who_has_a_parameter() -> None:
    seen = []

    def asked(query: Any, key: Any, value: Any, grad_output: Any, gradients: Any = None) -> Arrays:
        seen.append(gradients)
        return kernel(query, key, value, grad_output)

    assert run_cases(make_corner_cases("gradients", 1, 0, ("float32",)), asked).exit_status == 0
    assert seen == ["all"]


OPTIONS: Final = ("bias", "is_causal", "key_lengths", "key_mask", "mask", "query_offset", "sinks", "softcap", "window")
GRADIENTS: Final = ("grad_output", "grad_logsumexp", *OPTIONS)
COUNT: Final = 250  # has each corner of gradients


def test_a_choice_names_the_gradients_of_outputs() -> None:
    suite = requests(COUNT, 2, Choice.of(GRADIENTS, (), ()))
    own = {case.corner for case in suite} & {*GRADIENTS_BY_NAME}
    assert own == {*GRADIENTS_BY_NAME} - {"gradients.layouts"}
    names = {name for case in suite for name in case.options}
    assert {"grad_output", "grad_logsumexp"} <= names
    assert "gradients" not in names
    assert not {case.corner for case in requests(300, 2, Choice.of(OPTIONS, (), ()))} & {*GRADIENTS_BY_NAME}
    plain = {case.corner for case in requests(400, 2, Choice.of(["grad_output"], (), ("float32",)))}
    assert {"gradients", "gradients.cancellation", "gradients.zero"} <= plain
    assert "gradients.causal" not in plain


def test_files_are_read_back_with_the_tolerance_of_each_number(tmp_path: Path) -> None:
    suite = make_cases(COUNT, 2, Choice.of(GRADIENTS, (), ()))
    write(tmp_path, COUNT, 2, only=GRADIENTS)
    entries = {entry["file"]: entry for entry in json.loads((tmp_path / "index.json").read_text())["cases"]}
    count = 0
    for case, made in zip(read(tmp_path), suite, strict=True):
        if case.corner not in GRADIENTS_BY_NAME:
            continue
        count += 1
        assert (case.fields.keys(), case.tolerance.keys()) == (made.fields.keys(), made.tolerance.keys())
        assert run_cases([case], service, explain=False).count("correct") == 1, case.name
        entry = entries[f"{case.name}.safetensors"]
        assert (entry["tolerance"], entry["request"]["gradients"]) == ({}, "all")
        if case.dtype != "bfloat16":  # which the library does not read
            arrays = safetensors.numpy.load_file(tmp_path / entry["file"])
            for name, expected in made.expected.items():
                np.testing.assert_array_equal(arrays[f"expected.{name}"], expected)
                np.testing.assert_array_equal(arrays[f"tolerance.{name}"], made.tolerance[name])
    assert count == len(GRADIENT_CORNERS) - 1  # all but that of layouts


def test_the_command_judges_gradients(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = str(tmp_path / "cases")
    assert main(["conformance", "write", folder, "--cases", "220", "--only", "grad_output", "is_causal"]) == 0
    capsys.readouterr()
    assert main(["conformance", "run", f"{__name__}:kernel", "--dir", folder, "--format", "json"]) == 0
    found = {corner["corner"]: corner for corner in json.loads(capsys.readouterr().out)["corners"]}
    assert found["gradients"]["correct"] > 0
    assert found["plain"]["reason"] == "missing a required argument: 'grad_output'"


def test_the_page_has_every_corner() -> None:
    page = (ROOT / "docs" / "suites.md").read_text(encoding="utf-8")
    assert all(f"| `{corner.name}` | {corner.text} |\n" in page for corner in GRADIENT_CORNERS)
    assert f"{len(GRADIENT_CORNERS)} corners are of gradients" in page


@pytest.mark.slow
def test_long_cases_have_gradients() -> None:
    result = run(None, kernel, only=["grad_output"], head_dims=[32], dtypes=["bfloat16"])
    found = {corner.name: corner.status for corner in result.corners}
    assert (found["gradients"], found["gradients.grouped_heads"], result.exit_status) == ("correct", "correct", 0)
