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

from attention_service import assert_attention, assert_call, attend, compare_call
from attention_service.cli import main
from attention_service.codecs.decoded import Decoded
from attention_service.commands.files import write_request
from attention_service.comparison.inputs import make_input
from attention_service.comparison.next_command import next_command
from attention_service.comparison.question import make_question
from attention_service.comparison.recipes import as_long, recipe_for, recipe_of_request
from attention_service.comparison.text import in_short
from attention_service.library import WrongOutput, compare
from attention_service.pipeline.prepare import make_spec_and_plan
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
    "a named mistake": (tiled_heads, ["proof", "where", "worst", "error"]),
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
@pytest.mark.parametrize("make", [noise, not_a_number, gradients, coarse])
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
    assert parts(str(error.value)) == ["proof", "where", "worst", "error"]
    assert "next:" not in str(error.value.report)


@pytest.mark.parametrize("name", ["ragged.top_left", "merge.equal_weights"])
def test_a_proof_of_a_call_stands_alone(name: str) -> None:
    """The same mistake of a part of the call, in other words, is no other hypothesis."""
    made = plant(name, 0)
    report = compare_call(made.function, actual=(made.output, made.sums), version=made.version, **made.arguments)
    assert [(one.name, one.certainty) for one in report.hypotheses] == [(name, "proof")]


def test_a_call_without_a_proof_says_why_no_command_follows() -> None:
    """In the text of a failing test, in that of a whole report, and on the command line."""
    made = plant("pages.last_full", 1)
    noisy = made.output + np.sin(np.arange(made.output.size)).reshape(made.output.shape).astype(made.output.dtype)
    report = compare_call(made.function, actual=noisy, **made.arguments, time_limit=0)
    assert report.verdict.status == "wrong"
    for text in (str(report), in_short(report, next_command(report))):
        assert text.splitlines()[-1].strip().startswith("next: none: no command makes calls; ")
    report = compare_call(made.function, **made.arguments)
    assert (report.verdict.status, "next: none: no command makes calls; more" in str(report)) == ("inconclusive", True)


def test_another_answer_that_is_wrong_without_a_proof_says_what_is_next() -> None:
    answer, fields = noise()
    report = compare(attend(**CAUSAL).output, **fields, against=answer)
    assert str(report).splitlines()[-1].startswith("next: none: compare the answer in against alone")


@pytest.mark.parametrize(
    ("actual", "fields", "said"),
    [
        ("output", {"time_limit": 0}, "next: none: the search ended early; compare without a time limit"),
        ("scores", {}, "next: none: send the output as well"),
        (None, {}, "next: attention-service inputs --recipe "),
    ],
)
def test_an_inconclusive_report_says_what_is_next(actual: str | None, fields: dict[str, Any], said: str) -> None:
    right = attend(**ARRAYS, include=["scores"])
    report = compare(None if actual is None else {actual: right[actual]}, **ARRAYS, **fields)
    assert report.verdict.status == "inconclusive"
    assert str(report).splitlines()[-1].startswith(said)


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


def test_no_command_follows_a_proof(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The mistake is named: of a request, and of one that a command made."""
    write_request(ARRAYS, Path("request.npz"))
    main(["inputs", "--like", "request.npz", "--output", "made.npz"])
    for name in ("request.npz", "made.npz"):
        text = printed(capsys, "compare", name, "kernels_of_text:kernel")
        assert text.splitlines()[1] == "  proof: heads.tiled"
        assert parts(text) == ["proof", "where", "worst", "error"]


@pytest.mark.slow
@pytest.mark.parametrize(("kernel", "name"), [("without_last", "keys.last_dropped"), ("tiles", "keys.tail_dropped")])
def test_mistakes_with_the_same_output_are_told_apart(
    kernel: str, name: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The last key of 17 is also what is left over after a tile of 16: a request that is made tells which it is."""
    (folder / "strict_kernels.py").write_text(STRICT)
    write_request(ARRAYS | {role: ARRAYS[role][:, :, :17] for role in ("key", "value")}, Path("request.npz"))
    text = printed(capsys, "compare", "request.npz", f"strict_kernels:{kernel}")
    assert "keys.last_dropped keys.tail_dropped" in text.splitlines()[-1]
    assert run_words(text, kernel)[0] == 0
    again = printed(capsys, "compare", "made.npz", f"strict_kernels:{kernel}")
    assert again.splitlines()[1].startswith(f"  proof: {name}")
    assert "the same" not in again.lower()
    assert "next" not in parts(again)


@pytest.mark.slow
def test_the_command_line_goes_on_from_a_right_output(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The made input shows mistakes that the request does not."""
    write_request(ARRAYS, Path("request.npz"))
    np.save("right.npy", attend(**ARRAYS).output)
    text = printed(capsys, "compare", "request.npz", "right.npy")
    assert text.startswith("correct: the largest error is ")
    assert "it is too short for mistakes between tiles of 64 queries or more, or of 64 keys or more" in text
    assert len(text.splitlines()) == 4
    assert run_next(text) == 0
    assert "next" not in parts(printed(capsys, "compare", "made.npz", "attention_service:attend"))
    survivors = [survivors_of(capsys, name) for name in ("request.npz", "made.npz")]
    assert survivors[1] < survivors[0]


def survivors_of(capsys: pytest.CaptureFixture[str], name: str) -> set[str]:
    report = CompareReport.model_validate_json(printed(capsys, "compare", name, "--format", "json"))
    return {*report.power.survivors}


@pytest.mark.parametrize(
    "options", [{}, {"is_causal": True}, {"is_causal": True, "query_offset": 5}, {"window": {"left": 9}}]
)
@pytest.mark.parametrize("lengths", [(1, 40), (5, 7), (40, 40), (75, 107), (128, 256), (300, 200), (4096, 8192)])
def test_made_inputs_are_as_long_as_the_request_and_end_within_tiles(
    lengths: tuple[int, int], options: dict[str, Any]
) -> None:
    """Up to two tiles of 128 queries and 256 keys. Those that are made from made ones have their lengths, so that no
    commands go in a circle."""
    queries, keys = lengths if "query_offset" in options or not options else lengths[:1] * 2
    spec, plan = make_spec_and_plan(Decoded(zeros(queries, keys) | options, frozenset()))
    made = as_long(recipe_of_request(spec, plan), queries, keys)
    assert made.queries >= min(queries, 257, keys)
    assert made.keys >= min(keys, 515)
    assert (made.keys % 2, max(made.queries, made.keys) <= 519) == (1, True)
    assert made.queries in (1, made.keys) or (made.queries % 2, (made.keys - made.queries) % 16 > 0) == (1, True)
    again = zeros(made.queries, made.keys) | options
    spec, plan = make_spec_and_plan(Decoded(again, frozenset()))
    assert as_long(recipe_of_request(spec, plan), made.queries, made.keys).sizes[3:5] == made.sizes[3:5]


def zeros(queries: int, keys: int) -> dict[str, Any]:
    return {"query": np.zeros((1, 1, queries, 1))} | dict.fromkeys(("key", "value"), np.zeros((1, 1, keys, 1)))


def test_a_longer_input_can_be_asked_for(folder: Path) -> None:
    write_request(ARRAYS | {"is_causal": True, "query_offset": 0}, Path("request.npz"))
    for sizes, expected in ((["--queries", "45"], (45, 67)), (["--queries", "45", "--keys", "77"], (45, 77))):
        assert main(["inputs", "--like", "request.npz", *sizes, "--output", "made.npz"]) == 0
        made = np.load("made.npz")
        assert (made["query"].shape[2], made["key"].shape[2]) == expected
    assert main(["inputs", "--like", "request.npz", "--queries", "68", "--output", "made.npz"]) == 2


def test_made_sinks_stand_below_and_above_all_scores_of_a_row() -> None:
    """Above them, a kernel must rescale what it has summed."""
    for seed in range(3):
        fields = make_input(recipe_for(["sinks.absent"]), seed)
        scores = attend(**fields, include=["scaled_scores"]).scaled_scores.max(axis=-1)
        above = fields["sinks"][:, None] > scores
        assert (above.any(), above.all()) == (True, False)


def test_inputs_that_cannot_be_made_are_not_offered() -> None:
    """A kernel that ignores the option is as right, and no made input shows it."""
    fields = ARRAYS | {"softcap": 1e9}
    right = attend(**fields).output
    report = compare(right, **fields)
    assert report.power.options == ["softcap"]
    question = make_question(Decoded({"layout": "bhld"} | fields, frozenset()))
    said = next_command(report.model_copy(update={"next_input": None}), question)
    assert said is not None
    assert "--kills" not in said


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

def without_last(query, key, value):
    return attend(query, key[:, :, :-1], value[:, :, :-1]).output

def tiles(query, key, value):  # what is left over after tiles of 16 is not read
    kept = key.shape[2] // 16 * 16
    return attend(query, key[:, :, :kept], value[:, :, :kept]).output

def whole_tiles(query, key, value, is_causal, query_offset):  # the end of the keys is rounded down
    parts = []
    for start in range(0, query.shape[2], 32):
        end = [max(32, (start + 32 + offset) // 32 * 32) for offset in np.broadcast_to(query_offset, len(query))]
        part = slice(start, start + 32)
        parts.append(np.concatenate([
            attend(query[b:b+1, :, part], key[b:b+1, :, :n], value[b:b+1, :, :n], is_causal=True,
                   query_offset=int(np.broadcast_to(query_offset, len(query))[b]) + start).output
            for b, n in enumerate(end)]))
    return np.concatenate(parts, axis=2)

def with_groups(query, *others):
    return [np.repeat(x, query.shape[1] // x.shape[1], axis=1) for x in others]

def large_sinks(query, key, value, sinks):  # what was summed before the sink is not rescaled
    keys, _ = with_groups(query, key, value)
    largest = (query @ keys.swapaxes(-1, -2)).max(-1, keepdims=True) / np.sqrt(query.shape[-1])
    factor = np.exp(np.maximum(sinks[:, None, None] - largest, 0))
    return attend(query, key, value, sinks=sinks).output * factor

def stale_tile(query, key, value, grad_output):  # the gradient of keys reads queries of the tile before
    keys, values = with_groups(query, key, value)
    scale = np.float32(query.shape[-1] ** -0.5)
    scores = query @ keys.swapaxes(-1, -2) * scale
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    delta = (grad_output * (weights @ values)).sum(-1, keepdims=True)
    grad = weights * (grad_output @ values.swapaxes(-1, -2) - delta)
    stale = np.concatenate([query[:, :, :32], query[:, :, :-32]], axis=2)
    each = [grad.swapaxes(-1, -2) @ stale * scale, weights.swapaxes(-1, -2) @ grad_output]
    b, g = key.shape[:2]
    sums = [x.reshape(b, g, -1, *x.shape[2:]).sum(2) for x in each]
    return {"grad_query": grad @ keys * scale, "grad_key": sums[0], "grad_value": sums[1]}

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
TILED: Final = ("whole_tiles", "stale_tile")
OPTIONS: Final[dict[str, dict[str, Any]]] = {
    "with_sinks": SINKS,
    "unmasked": {},
    "merged": {},
    "causal": {"is_causal": True, "window": {"left": 9}},
    "capped": {"softcap": 5.0, "scale": 0.3},
    "sigmoid": {"normalization": "sigmoid"},
    "unknown": SINKS,
    "whole_tiles": {"is_causal": True, "query_offset": 5},
    "large_sinks": SINKS,
    "stale_tile": COTANGENT,
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
    """Each command runs, from a file or a test, until none is printed, and the kernel takes what it made.

    It stays wrong, until a mistake is proved or a suite or laws judge it.
    """
    (folder / "strict_kernels.py").write_text(STRICT)
    fields = ARRAYS | OPTIONS[name]
    if name not in TILED:  # so that suites have short cases, which take less time
        fields = {field: value[:, :, :30] if np.ndim(value) == 4 else value for field, value in fields.items()}
    write_request(fields, Path("request.npz"))
    text = printed(capsys, "compare", "request.npz", f"strict_kernels:{name}")
    if not has_file:
        kernel = getattr(import_module("strict_kernels"), name)
        with pytest.raises(WrongOutput) as error:
            assert_attention(kernel(**fields), **fields)
        text = str(error.value)
    seen: list[list[str]] = []
    while parts(text)[-1:] == ["next"]:
        if "inputs" not in text.splitlines()[-1] and not has_file:
            break  # the same suite, or laws, as from a file
        status, words = run_words(text, name)
        assert status in (0, 1), text
        assert words not in seen
        seen.append(words)
        if words[1] != "inputs":
            break  # a suite, or laws: the function was judged by them
        assert status == 0, text
        text = printed(capsys, "compare", "made.npz", f"strict_kernels:{name}")
        assert text.startswith(("wrong: ", "imprecise: ")), text
    assert len(seen) <= 3
    assert ("proof" in parts(text)) == (parts(text)[-1] != "next")


@pytest.mark.slow
@pytest.mark.parametrize("name", TILED)
def test_the_commands_after_a_right_output_lead_to_a_mistake_of_tiles(
    name: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """An input that is made by hand has too few queries for it."""
    (folder / "strict_kernels.py").write_text(STRICT)
    write_request(ARRAYS | OPTIONS[name], Path("request.npz"))
    assert main(["inputs", "--like", "request.npz", "--output", "made.npz"]) == 0
    text = printed(capsys, "compare", "made.npz", f"strict_kernels:{name}")
    assert text.startswith("correct: ")
    assert "it is too short for mistakes between tiles of 16 queries or more, or of 128 keys or more" in text
    assert run_words(text, name)[0] == 0
    assert printed(capsys, "compare", "made.npz", f"strict_kernels:{name}").startswith("wrong: ")


def test_the_next_command_for_bfloat16_writes_a_file_that_holds_it(folder: Path) -> None:
    fields = {name: array.astype(ml_dtypes.bfloat16) for name, array in ARRAYS.items()}
    answer = attend(**fields).output + ml_dtypes.bfloat16(np.sin(1))
    with pytest.raises(WrongOutput) as error:
        assert_attention(
            answer * np.linspace(0, 1, 16, dtype=ml_dtypes.bfloat16), **fields, is_causal=True, time_limit=0
        )
    status, _ = run_words(str(error.value), "unmasked")
    assert (status, [path.name for path in folder.glob("made.*")]) == (0, ["made.safetensors"])
