"""Conformance suites: cases whose answers are right to the last digits, files that NumPy reads, and a fair judge."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy

from attention_service import attend
from attention_service.cli import main
from attention_service.codecs.named_tensors import plain_fields
from attention_service.commands.formats import checks_of_suite
from attention_service.comparison.inputs import power_of
from attention_service.comparison.mutants import MUTANTS
from attention_service.conformance import Unsupported, read, run, write
from attention_service.conformance.corners import CORNERS
from attention_service.conformance.report import as_json, as_text
from attention_service.conformance.requests import Choice
from attention_service.conformance.runner import CASES, run_cases
from attention_service.conformance.suite import SuiteCase, make_cases
from attention_service.conformance.target import load_target
from tests.helpers.by_decimal import MINUS_INFINITY, Exact, canonical
from tests.helpers.corners import BY_NAME, GRADIENTS_BY_NAME, make_corner_cases
from tests.helpers.documents import anchors
from tests.helpers.waiting import TIMEOUT
from tests.peers.conformance.deviations import BY_CELL, DEVIATIONS
from tests.peers.conformance.matrix import BEGIN, END, PAGE, programs, replaced
from tests.test_conformance_requests import requests

EPSILON = 2.0**-52
ROWS = 3
# So many cases have each corner at least once: of five in a row, three are of single corners.
EVERY = {*BY_NAME, *GRADIENTS_BY_NAME}
COUNT = 5 * -(-(len(EVERY) - 1) // 3)
KERNELS = """
import numpy as np

def right(query, key, value, **options):
    if options.keys() - {"scale"}:
        return NotImplemented
    key, value = (np.repeat(array, query.shape[1] // array.shape[1], axis=1) for array in (key, value))
    scale = np.reshape(options.get("scale", query.shape[-1] ** -0.5), (-1, 1, 1))
    scores = query.astype("f8") @ key.astype("f8").swapaxes(-1, -2) * scale
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True) @ value.astype("f8")

def unscaled(query, key, value):
    weights = np.exp(query.astype("f8") @ key.astype("f8").swapaxes(-1, -2))
    return {"output": weights / weights.sum(-1, keepdims=True) @ value.astype("f8")}

def nothing(**options):
    return NotImplemented
"""


def service(**fields: Any) -> dict[str, np.ndarray]:
    result = attend(**fields)
    gradients = [name for name in result if name.startswith("grad_")]
    return {name: result[name] for name in ("output", *fields.get("include", ()), *gradients)}


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("kernels")
    (folder / "kernels.py").write_text(KERNELS)
    sys.path.insert(0, str(folder))
    yield folder
    sys.path.remove(str(folder))


@pytest.mark.parametrize("name", BY_NAME)
def test_expected_outputs_agree_with_fifty_digits(name: str) -> None:
    for case in make_corner_cases(name, 12 if name == "combined" else 2, 5, ("float64", "bfloat16")):
        check_rows(case)


def check_rows(case: SuiteCase) -> None:
    """A few rows: the first and last, and those between that see no key."""
    exact = Exact(case.fields)
    layout, heads = case.fields.get("layout", "bhld"), case.fields.get("num_heads", 0)
    output = canonical(case.expected["output"], layout, heads)
    logsumexp, alone = (case.expected.get(name) for name in ("logsumexp", "weights_without_sinks"))
    if logsumexp is not None:
        logsumexp = logsumexp.reshape(output.shape[:3])
    b, h, q, _ = output.shape
    random = np.random.default_rng(0)
    places = [(0, 0, 0), (b - 1, h - 1, q - 1), (0, 0, min(1, q - 1))]
    places += [(int(n), int(m), int(i)) for n, m, i in random.integers(0, (b, h, q), (ROWS, 3))]
    for place in dict.fromkeys(places):
        row = exact.row(*place)
        limit = 16 * EPSILON * (1 + row.reach)
        assert [float(x) for x in row.output] == pytest.approx(output[place].tolist(), rel=0, abs=limit * row.size)
        if logsumexp is not None:
            assert row.logsumexp is not None
            is_empty = row.logsumexp == MINUS_INFINITY
            near = 0.0 if is_empty else limit + 4 * EPSILON * abs(float(row.logsumexp))
            assert logsumexp[place] == pytest.approx(float(row.logsumexp), rel=0, abs=near)
        if alone is not None:
            expected_weights = [float(x) for x in row.weights_without_sinks]
            assert expected_weights == pytest.approx(alone[place].tolist(), rel=0, abs=limit)


def test_a_suite_has_every_corner_and_every_type() -> None:
    suite = requests(COUNT, 7, Choice())
    assert {case.corner for case in suite} == EVERY
    assert {case.dtype for case in suite} == {"float64", "float32", "float16", "bfloat16"}
    assert sum(case.corner == "combined" for case in suite) == 2 * COUNT // 5
    empty = next(make_corner_cases("mask.empty_row", 1, 0, ("float32",)))
    assert np.isneginf(empty.expected["logsumexp"]).any()
    assert empty.tolerance["output"] > 0


@pytest.mark.slow
def test_a_suite_shows_every_known_mistake() -> None:
    # As large an error as a legal rounding makes: log2(e) folded into the query in the same type. Sums in half types
    # show in corners of many keys, such as float16.equal_scores.
    unseen = {*MUTANTS} - {"precision.scores", "precision.accumulate"}
    for case in make_cases(CASES, 0):
        unseen.difference_update(power_of(case.fields, tuple(case.expected), lambda: None, wanted=unseen).killed)
        if not unseen:
            return
    assert unseen == set()


def test_a_kernel_may_write_to_its_arguments() -> None:
    def careless(**fields: Any) -> np.ndarray:
        output = service(**fields)["output"]
        fields["query"][:] = 0
        fields["window"]["left"] = 0
        return output

    (case,) = make_corner_cases("window", 1, 0, ("float32",))
    assert [run_cases([case], careless).count("correct") for _ in range(2)] == [1, 1]


def test_files_are_read_back_and_the_same_seed_makes_the_same(tmp_path: Path) -> None:
    assert write(tmp_path, cases=COUNT, seed=7) == COUNT
    for case, made in zip(read(tmp_path), make_cases(COUNT, 7), strict=True):
        assert (case.name, case.corner, case.dtype, case.options) == (made.name, made.corner, made.dtype, made.options)
        assert case.tolerance.keys() == made.tolerance.keys()
        assert plain_fields(case.tolerance) == plain_fields(made.tolerance)
        assert arrays_in(case) == arrays_in(made)
        assert run_cases([case], service, explain=False).count("correct") == 1
    folders = [tmp_path / "one", tmp_path / "two"]
    assert [write(folder, cases=5, seed=7) for folder in folders] == [5, 5]
    first, second = ({file.name: file.read_bytes() for file in folder.iterdir()} for folder in folders)
    assert first == second


def arrays_in(case: SuiteCase) -> dict[str, tuple[str, bytes]]:
    """The arrays of a case, those within fields, too, by their types and bytes."""

    def flat(name: str, value: Any) -> Iterator[tuple[str, np.ndarray]]:
        if isinstance(value, dict):
            for inner, item in value.items():
                yield from flat(f"{name}.{inner}", item)
        elif isinstance(value, np.ndarray):
            yield name, value

    everything = flat("", {"fields": case.fields, "expected": case.expected, "tolerance": case.tolerance})
    return {name: (f"{array.dtype} {array.shape}", array.tobytes()) for name, array in everything}


def test_another_reader_of_safetensors_reads_the_same(tmp_path: Path) -> None:
    write(tmp_path, cases=5)
    index = json.loads((tmp_path / "index.json").read_text())
    assert index["format"] == 1
    for entry, case in zip(index["cases"], read(tmp_path), strict=True):
        if entry["dtype"] == "bfloat16":  # which the library does not read
            continue
        arrays = safetensors.numpy.load_file(tmp_path / entry["file"])
        np.testing.assert_array_equal(arrays["expected.output"], case.expected["output"])
        np.testing.assert_array_equal(arrays["query"], case.fields["query"])
        assert set(entry["tolerance"]) == {name.partition(".")[2] for name in arrays if name.startswith("expected.")}


def test_a_directory_of_another_format_is_refused(tmp_path: Path) -> None:
    (tmp_path / "index.json").write_text('{"format": 2}')
    with pytest.raises(ValueError, match="not a suite of format 1"):
        list(read(tmp_path))


def test_right_answers_pass_and_what_is_not_supported_is_counted(kernels: Path) -> None:
    result = run(None, "kernels:right")
    found = {corner.name: corner.status for corner in result.corners}
    assert {found[name] for name in ("plain", "one_query", "scale.zero", "large_scores")} == {"correct"}
    assert found["mask"] == found["logsumexp"] == "unsupported"
    assert (result.count("wrong"), result.exit_status) == (0, 0)
    assert result.count("correct") + result.count("unsupported") == CASES
    assert run_cases(make_cases(5, 0), load_target("kernels:nothing")).exit_status == 2


def test_a_causal_mask_needs_no_offset_where_there_are_as_many_keys_as_queries() -> None:
    def causal(query: np.ndarray, key: np.ndarray, value: np.ndarray, is_causal: bool = False) -> np.ndarray:
        return service(query=query, key=key, value=value, is_causal=is_causal)["output"]

    (corner,) = run_cases(make_corner_cases("causal", 1, 0, ("float32",)), causal).corners
    assert (corner.status, corner.outcomes[0].case.options) == ("correct", ["is_causal"])


def test_a_mistake_is_named(kernels: Path) -> None:
    result = run_cases(make_corner_cases("plain", 2, 0, ("float32",)), load_target("kernels:unscaled"))
    (corner,) = result.corners
    assert corner.diagnosis is not None
    assert (corner.diagnosis.hypothesis, corner.diagnosis.certainty) == ("scale.absent", "proof")
    assert "proof: scale.absent" in as_text(result)
    assert as_json(result)["corners"][0]["first_failure"]["hypothesis"] == "scale.absent"


def test_what_has_another_shape_or_is_not_finite_is_wrong() -> None:
    def unsupported(**fields: Any) -> None:
        raise Unsupported("not today")

    def smaller(**fields: Any) -> np.ndarray:
        return np.zeros((1, 2))

    def not_finite(**fields: Any) -> np.ndarray:
        return np.full(fields["query"].shape, np.nan)

    said = {}
    for target in (unsupported, smaller, not_finite, service):
        (corner,) = run_cases(make_corner_cases("plain", 1, 0, ("float32",)), target).corners
        said[target.__name__] = corner.status, corner.outcomes[0].message
    assert said["unsupported"] == ("unsupported", "not today")
    assert said["smaller"][0] == "wrong"
    assert "of shape (1, 2), expected" in said["smaller"][1]
    assert said["not_finite"][1].startswith("output[0, 0, 0, 0] is nan, expected")
    assert said["service"] == ("correct", "")


def test_what_is_raised_is_an_error_with_its_place() -> None:
    """And no mistake is searched for, for which the function would be called again."""
    calls = []

    def raises(**fields: Any) -> np.ndarray:
        calls.append(fields["query"].dtype.name)
        if len(calls) == 1:
            raise KeyError("no tile\nof 7")
        if len(calls) == 2:
            return service(**fields)["output"]
        raise SystemExit(0)

    line = raises.__code__.co_firstlineno + 3
    place = f'(tests/test_conformance.py, line {line}, in raises: raise KeyError("no tile\\nof 7"))'
    result = run_cases(make_corner_cases("plain", 3, 0, ("float32",)), raises)
    (corner,) = result.corners
    assert [outcome.status for outcome in corner.outcomes] == ["error", "correct", "error"]
    assert corner.outcomes[0].message == f"KeyError: 'no tile\\nof 7' {place}"
    assert corner.outcomes[2].message.startswith("SystemExit: 0 (")
    assert (corner.status, corner.diagnosis, len(calls)) == ("error", None, 3)
    assert (result.exit_status, result.count("error"), result.count("wrong")) == (1, 2, 0)
    assert f"0000-plain (float32) raised {corner.outcomes[0].message}" in as_text(result).splitlines()
    found = as_json(result)
    assert found["counts"] == {"correct": 1, "imprecise": 0, "wrong": 0, "error": 2, "unsupported": 0}
    assert found["corners"][0]["first_failure"]["status"] == "error"
    assert found["corners"][0]["first_failure"]["message"] == corner.outcomes[0].message
    (check,) = checks_of_suite(result)
    assert (check.outcome, check.message) == ("error", f"0000-plain (float32) raised {corner.outcomes[0].message}")


def test_a_wrong_answer_is_worse_than_an_error() -> None:
    answers = iter(("raise", "zeros"))

    def kernel(**fields: Any) -> np.ndarray:
        if next(answers) == "raise":
            raise RuntimeError
        return np.zeros(fields["query"].shape)

    result = run_cases(make_corner_cases("plain", 2, 0, ("float32",)), kernel, explain=False)
    (corner,) = result.corners
    assert (corner.status, corner.first_failure) == ("wrong", corner.outcomes[1])
    assert [check.outcome for check in checks_of_suite(result)] == ["failure"]


def test_the_command_line_writes_and_judges(kernels: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def command(*arguments: str) -> tuple[int, str, str]:
        status = main(["conformance", *arguments])
        printed = capsys.readouterr()
        return status, printed.out, printed.err

    assert command("write", str(tmp_path), "--cases", "5", "--seed", "1") == (0, f"5 cases in {tmp_path}\n", "")
    status, printed, _ = command("run", "kernels:unscaled", "--dir", str(tmp_path), "--format", "json")
    assert status == 1
    assert json.loads(printed)["counts"]["wrong"] >= 1
    status, printed, _ = command("run", "kernels:right", "--dir", str(tmp_path))
    assert (status, printed.splitlines()[0].split()[:2]) == (0, ["corner", "correct"])
    for target in ("kernels", "kernels:absent", "kernels:KERNELS", "no_such_module:kernel"):
        status, printed, said = command("run", target)
        assert (status, printed) == (3, "")
        assert said
    (tmp_path / "file").touch()
    assert command("write", str(tmp_path / "file"), "--cases", "1")[0] == 2


def test_a_function_in_this_directory_is_found(kernels: Path) -> None:
    """In a process of its own, as users start it."""
    write(kernels / "suite", cases=5)
    line = [sys.executable, "-m", "attention_service", "conformance", "run", "kernels:nothing", "--dir", "suite"]
    done = subprocess.run(line, capture_output=True, text=True, cwd=kernels, timeout=TIMEOUT, check=False)
    assert done.returncode == 2, done.stderr
    _, counts, reason = done.stdout.splitlines()
    assert counts.split() == ["all", "0", "0", "0", "0", "5"]
    assert reason == "4 of 4 corners not supported: NotImplemented"


def test_corners_that_are_not_supported_are_told_by_reason() -> None:
    def plain(query: np.ndarray, key: np.ndarray, value: np.ndarray, scale: float | None = None) -> np.ndarray:
        if scale is not None:
            raise Unsupported("it doesn't scale, and isn't about to")
        return service(query=query, key=key, value=value)["output"]

    names = ("plain", "mask", "mask.empty_row", "key_mask", "scale.own")
    result = run_cases([case for name in names for case in make_corner_cases(name, 1, 0, ("float32",))], plain)
    assert [line.split()[0] for line in as_text(result).splitlines()[:3]] == ["corner", "plain", "all"]
    assert as_text(result).splitlines()[3:] == [
        "3 of 5 corners not supported: got an unexpected keyword argument key_mask, mask",
        "1 of 5 corners not supported: it doesn't scale, and isn't about to",
    ]
    reasons = {corner["corner"]: corner["reason"] for corner in as_json(result)["corners"]}
    assert reasons["plain"] is None
    assert reasons["mask"] == "got an unexpected keyword argument 'mask'"


def test_the_page_has_every_deviation_as_the_table_has_it() -> None:
    page = PAGE.read_text(encoding="utf-8")
    generated = page.partition(BEGIN)[2].partition(END)[0]
    assert "\n".join(programs()) in generated
    assert {deviation.anchor for deviation in DEVIATIONS} <= anchors(PAGE)
    missing = [row for corner in CORNERS if (row := f"| `{corner.name}` | {corner.text} |") not in generated]
    assert missing == [], "rows that `make conformance` writes, or you do: · for each library that lacks the option"
    assert {corner for _, corner in BY_CELL} <= set(BY_NAME)
    assert replaced(page, generated.strip("\n")) == page


def test_every_mark_of_a_failure_leads_to_a_deviation() -> None:
    rows = [line for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("| `")]
    unexplained = [row for row in rows for cell in row.split(" | ") if cell.strip("| ") in ("✗", "≠", "?")]
    assert unexplained == [], "the table of the marks apart"
