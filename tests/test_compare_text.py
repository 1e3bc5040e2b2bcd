"""The text of failing tests and of the command line: what is wrong in at most twelve lines, and a command that runs."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any, Final

import ml_dtypes
import numpy as np
import pytest

from attention_service import assert_attention, assert_call, attend
from attention_service.cli import main
from attention_service.codecs.decoded import Decoded
from attention_service.commands.files import write_request
from attention_service.comparison.next_command import next_command
from attention_service.comparison.question import make_question
from attention_service.comparison.text import in_short
from attention_service.library import WrongOutput, compare
from attention_service.schemas.compare import CompareReport, Fact, ReportedHypothesis
from tests.helpers.planted_calls import plant
from tests.test_docs import one

# A function in the place of one whose name no report knows; it tiles heads, and knows no gradients.
KERNEL: Final = """
import numpy as np

def kernel(query, key, value):
    key, value = (np.tile(x, (1, query.shape[1] // x.shape[1], 1, 1)) for x in (key, value))
    scores = query @ key.swapaxes(-1, -2) / np.sqrt(query.shape[-1])
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return weights / weights.sum(axis=-1, keepdims=True) @ value
"""
# What the block of the page begins with that has the kernel.
START: Final = """import numpy as np
from attention_service import attend, compare

random = np.random.default_rng(0)
query = random.standard_normal((8, 64, 32)"""
RANDOM: Final = np.random.default_rng(0)
ARRAYS: Final[dict[str, Any]] = {
    name: RANDOM.normal(size=(2, heads, 40, 16)).astype(np.float32)
    for name, heads in (("query", 4), ("key", 2), ("value", 2))
}
CAUSAL: Final = ARRAYS | {"is_causal": True}


def tiled_heads() -> tuple[Any, dict[str, Any]]:
    """Its mistake is named."""
    repeated = {name: np.tile(ARRAYS[name], (1, 2, 1, 1)) for name in ("key", "value")}
    return attend(**CAUSAL | repeated).output, CAUSAL


def noise() -> tuple[Any, dict[str, Any]]:
    """Some rows of one head have errors that no mistake explains: no search would find one."""
    output = attend(**CAUSAL).output.copy()
    output[1, 3, 17:29] += np.sin(np.arange(12 * 16)).reshape(12, 16) / 100
    return output, CAUSAL | {"time_limit": 0}


def not_a_number() -> tuple[Any, dict[str, Any]]:
    output = attend(**CAUSAL).output.copy()
    output[0, :, 5] = np.nan
    return output, CAUSAL | {"time_limit": 0}


def gradients() -> tuple[Any, dict[str, Any]]:
    """Two of three gradients are wrong by a factor."""
    fields = CAUSAL | {"grad_output": RANDOM.normal(size=(2, 4, 40, 16)).astype(np.float32)}
    right = attend(**fields, include=["grad_query", "grad_key", "grad_value"])
    factors = {"grad_query": 1.5, "grad_key": 0.5, "grad_value": 1.0}
    return {name: np.float32(by) * right[name] for name, by in factors.items()}, fields


def coarse() -> tuple[Any, dict[str, Any]]:
    """Imprecise: values with eight bits, those of bfloat16 in float16."""
    fields = {name: array.astype(np.float16) for name, array in ARRAYS.items()}
    coarser = fields | {"value": fields["value"].astype(ml_dtypes.bfloat16).astype(np.float16)}
    return attend(**coarser).output, fields


WRONG: Final[dict[str, tuple[Callable[[], tuple[Any, dict[str, Any]]], list[str]]]] = {
    "a named mistake": (tiled_heads, ["proof", "where", "worst", "error", "next"]),
    "no known mistake": (noise, ["where", "worst", "error", "next"]),
    "NaN": (not_a_number, ["where", "worst", "error", "next"]),
    "gradients": (gradients, ["resembles", "fact", "where", "worst", "error", "next"]),
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current directory, with a module of a kernel."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "kernels_of_text.py").write_text(KERNEL)
    return tmp_path


def parts(text: str) -> list[str]:
    """What the lines after the first begin with."""
    return [line.strip().partition(":")[0] for line in text.splitlines()[1:]]


def run_next(text: str) -> int:
    """The exit status of the command that a text ends with."""
    words = shlex.split(text.splitlines()[-1].removeprefix("  next: "), comments=True)
    assert words.pop(0) == "attention-service"
    return main([word.replace("MODULE:FUNCTION", "kernels_of_text:kernel") for word in words if word != "--torch"])


@pytest.mark.parametrize("name", WRONG)
def test_a_failing_test_says_what_is_wrong_in_a_few_lines(name: str) -> None:
    make, expected = WRONG[name]
    answer, fields = make()
    with pytest.raises(WrongOutput) as error:
        assert_attention(answer, **fields)
    text = str(error.value)
    assert text.startswith("wrong: ")
    assert parts(text) == expected
    assert error.value.report.verdict.status == "wrong"
    assert len(text.splitlines()) <= 12 < len(str(error.value.report).splitlines())  # the rest is in the report


@pytest.mark.slow
@pytest.mark.parametrize("make", [*(make for make, _ in WRONG.values()), coarse])
def test_the_next_command_runs(make: Callable[[], tuple[Any, dict[str, Any]]], folder: Path) -> None:
    """From a test, whose request is in no file, and with a file."""
    answer, fields = make()
    report = compare(answer, **fields)
    question = make_question(Decoded({"layout": "bhld"} | fields, frozenset()))
    assert run_next(in_short(report, next_command(report, question))) in (0, 1, 2)
    write_request({name: value for name, value in fields.items() if name != "time_limit"}, Path("request.npz"))
    text = in_short(report, next_command(report, question, "request.npz"))
    assert run_next(text) in (0, 1)
    assert "--like request.npz" not in text or Path("made.npz").exists()


def test_a_failing_call_says_what_is_wrong_in_a_few_lines() -> None:
    made = plant("pages.last_full", 1)
    with pytest.raises(WrongOutput) as error:
        assert_call(lambda **_: (made.output, made.sums), call=made.function, **made.arguments)
    lines = str(error.value).splitlines()
    assert lines[0].startswith("wrong: every slot of the last page counts as a key.")
    assert parts(str(error.value)) == ["proof", "where", "worst", "error"]  # no command makes inputs of calls


def test_the_page_shows_what_is_printed() -> None:
    """Of the kernel that the page has before it; numbers may differ in their digits."""
    names: dict[str, Any] = {}
    exec(one("docs/compare.md", "python", START).text, names)
    with pytest.raises(WrongOutput) as error:
        assert_attention(names["my_kernel"](*(names[name] for name in ("query", "key", "value"))), **names["request"])
    shown = one("docs/compare.md", "text", "wrong: the scale is applied twice.").text
    digits = re.compile(r"\d[\d.e+-]*")
    assert digits.sub("1", str(error.value)) == digits.sub("1", shown.strip())


def printed(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """What a command prints."""
    main(arguments)
    return capsys.readouterr().out.rstrip("\n")


def test_the_command_line_goes_on_from_a_named_mistake(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The made input shows the mistake of the same function."""
    write_request(ARRAYS, Path("request.npz"))
    text = printed(capsys, "compare", "request.npz", "kernels_of_text:kernel")
    assert parts(text) == ["proof", "where", "worst", "error", "next"]
    assert "attention-service inputs --like request.npz --kills heads.tiled --output made.npz" in text
    assert run_next(text) == 0
    again = printed(capsys, "compare", "made.npz", "kernels_of_text:kernel")
    assert again.splitlines()[1] == "  proof: heads.tiled"


def test_the_command_line_goes_on_from_a_right_output(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The made input shows mistakes that the request does not."""
    write_request(ARRAYS, Path("request.npz"))
    np.save("right.npy", attend(**ARRAYS).output)
    text = printed(capsys, "compare", "request.npz", "right.npy")
    assert text.startswith("correct: the largest error is ")
    assert len(text.splitlines()) == 3
    assert run_next(text) == 0
    survivors = [survivors_of(capsys, name) for name in ("request.npz", "made.npz")]
    assert survivors[1] < survivors[0]


def survivors_of(capsys: pytest.CaptureFixture[str], name: str) -> set[str]:
    report = CompareReport.model_validate_json(printed(capsys, "compare", name, "--format", "json"))
    return {*report.power.survivors}


def test_a_made_input_leads_to_no_other_of_the_same_options() -> None:
    """Small inputs come once; what comes after them is a suite."""
    answer, fields = noise()
    report, question = compare(answer, **fields), make_question(Decoded({"layout": "bhld"} | fields, frozenset()))
    said = [next_command(report, question, name) or "" for name in ("request.npz", "folder/made.npz")]
    assert said[0].startswith("attention-service inputs --like request.npz --output made.npz")
    assert said[1].startswith("attention-service conformance run")


def test_inputs_that_cannot_be_made_are_not_offered() -> None:
    """A kernel that ignores the option is as right, and no made input shows it."""
    fields = ARRAYS | {"softcap": 1e9}
    right = attend(**fields).output
    report = compare(right, **fields)
    assert report.power.options == ["softcap"]
    question = make_question(Decoded({"layout": "bhld"} | fields, frozenset()))
    assert next_command(report.model_copy(update={"next_input": None}), question) is None


def test_a_report_of_all_parts_has_twelve_lines_at_most() -> None:
    """Five hypotheses, sixteen facts, four places, what another kernel returned, a long change."""
    answer, fields = noise()
    report = compare(answer, **fields, against=answer)
    change = {"query_offset": [*range(200)]}
    named = ReportedHypothesis(
        name="causal.absent", also=[], message="So.", change=change, explained=0.6, ratio=9, certainty="resembles"
    )
    report.hypotheses, report.facts = [named] * 5, [Fact(array="output", name="moved", message="So.", numbers={})] * 16
    report.power.weak = ["grad_output is 1 everywhere"]
    question = make_question(Decoded(CAUSAL | {"layout": "bhld"}, frozenset()))
    lines = in_short(report, next_command(report, question)).splitlines()
    assert len(lines) == 12
    assert max(map(len, lines)) < 400


# Kernels that need the options that their requests have, and know no others; each has a mistake.
STRICT: Final = """
import numpy as np
from attention_service import attend

def with_sinks(query, key, value, sinks):
    return attend(query, key, value, sinks=sinks, scale=1 / query.shape[-1]).output

def unmasked(query, key, value):
    return attend(query, key, value, scale=1 / query.shape[-1]).output

def half_of(key):
    return slice(key.shape[2] // 2), slice(key.shape[2] // 2, None)

def merged(query, key, value):  # two halves of the keys by equal weights
    halves = [attend(query, key[:, :, part], value[:, :, part]).output for part in half_of(key)]
    return (halves[0] + halves[1]) / 2

def causal(query, key, value, is_causal, window):
    left = window["left"] - 1
    return attend(query, key, value, is_causal=is_causal, window={"left": left}).output

def capped(query, key, value, softcap, scale):
    return attend(query, key, value, softcap=softcap, scale=scale * 2).output

def sigmoid(query, key, value, normalization):
    return attend(query, key, value, normalization=normalization, scale=1 / query.shape[-1]).output

def unknown(query, key, value, sinks):
    output = attend(query, key, value, sinks=sinks).output
    return output + np.sin(np.arange(output.size)).reshape(output.shape) / 50

def backward(query, key, value, is_causal, grad_output):
    found = attend(query, key, value, is_causal=is_causal, grad_output=grad_output, gradients="all")
    return {"grad_query": 2 * found.grad_query, "grad_key": found.grad_key, "grad_value": found.grad_value}

def unknown_backward(query, key, value, grad_output):
    found = attend(query, key, value, grad_output=grad_output, gradients="all")
    grad = found.grad_key + np.sin(np.arange(found.grad_key.size)).reshape(found.grad_key.shape) / 50
    return {"grad_query": found.grad_query, "grad_key": grad, "grad_value": found.grad_value}
"""
SINKS: Final = {"sinks": np.array([0.5, -1, 2, 0], np.float32)}
COTANGENT: Final = {"grad_output": RANDOM.normal(size=(2, 4, 40, 16)).astype(np.float32)}
OPTIONS: Final[dict[str, dict[str, Any]]] = {
    "with_sinks": SINKS,
    "unmasked": {},
    "merged": {},
    "causal": {"is_causal": True, "window": {"left": 9}},
    "capped": {"softcap": 5.0, "scale": 0.3},
    "sigmoid": {"normalization": "sigmoid"},
    "unknown": SINKS,
    "backward": {"is_causal": True} | COTANGENT,
    "unknown_backward": COTANGENT,
}


def run_words(text: str, name: str) -> tuple[int, list[str]]:
    """The exit status and the words of the command that a text ends with."""
    words = shlex.split(text.splitlines()[-1].removeprefix("  next: "), comments=True)
    assert words[0] == "attention-service"
    return main([word.replace("MODULE:FUNCTION", f"strict_kernels:{name}") for word in words[1:]]), words


@pytest.mark.slow
@pytest.mark.parametrize("has_file", [True, False], ids=["a file", "a test"])
@pytest.mark.parametrize("name", OPTIONS)
def test_each_next_command_leads_on(
    name: str, has_file: bool, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each command runs, from a file or a test, until none is printed, and the kernel takes what it made."""
    (folder / "strict_kernels.py").write_text(STRICT)
    fields = ARRAYS | OPTIONS[name]
    write_request(fields, Path("request.npz"))
    text = printed(capsys, "compare", "request.npz", f"strict_kernels:{name}")
    if not has_file:
        kernel = getattr(import_module("strict_kernels"), name)
        with pytest.raises(WrongOutput) as error:
            assert_attention(kernel(**fields), **fields)
        text = str(error.value)
    seen: list[list[str]] = []
    while parts(text)[-1:] == ["next"]:
        status, words = run_words(text, name)
        assert status in (0, 1), text
        assert words not in seen
        seen.append(words)
        if words[1] != "inputs":
            break  # a suite, or laws: the function was judged by them
        assert status == 0, text
        text = printed(capsys, "compare", "made.npz", f"strict_kernels:{name}")
        assert text.startswith(("wrong: ", "imprecise: ")), text
    assert seen


def test_the_next_command_for_bfloat16_writes_a_file_that_holds_it(folder: Path) -> None:
    fields = {name: array.astype(ml_dtypes.bfloat16) for name, array in ARRAYS.items()}
    with pytest.raises(WrongOutput) as error:
        assert_attention(attend(**fields).output, **fields, is_causal=True)
    status, _ = run_words(str(error.value), "unmasked")
    assert (status, [path.name for path in folder.glob("made.*")]) == (0, ["made.safetensors"])
