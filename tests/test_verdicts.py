"""Verdicts on recorded calls: each call has a line, those that are wrong the name of their mistake."""

from __future__ import annotations

import json
import os
import re
import shlex
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final
from xml.etree import ElementTree

import numpy as np
import pytest
import safetensors.numpy

from attention_service import compare_call, judge_recording
from attention_service.cli import main
from attention_service.commands.terminal import CommandError, Progress
from attention_service.commands.verdicts import judged, judged_in_parallel
from attention_service.errors import InvalidRequest
from attention_service.library.recordings import RecordedCall, read_recording
from tests.helpers.documents import BLOCKS
from tests.helpers.engine_calls import Draw
from tests.helpers.engine_draws import DRAWS
from tests.helpers.flight_recorder import FlightRecorder
from tests.helpers.recorded_engine import WRAPPER, record_decoding
from tests.test_compare_calls import in_axes

SMALL: Final[dict[str, Any]] = {"sequences": 3, "heads": (4, 2), "features": 16, "tokens": (20, 60)}


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    """The exit status of a command, and what it printed."""
    try:
        status = main([*map(str, arguments)])
    except SystemExit as error:  # of usage
        status = int(error.code or 0)
    return status, *capsys.readouterr()


def runs(root: Path) -> list[Path]:
    """The folders of the runs of a recording."""
    return sorted(root.glob(f"*{WRAPPER}.run_*"))


def cut(file: Path, kept: int) -> None:
    file.write_bytes(file.read_bytes()[:kept])


@pytest.mark.slow
def test_each_call_has_a_line_and_the_wrong_one_its_mistake(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In parallel processes, in the order of the calls."""
    record_decoding(tmp_path, 30, {17}, **SMALL)
    status, printed, said = run(capsys, "compare", tmp_path)
    *lines, summary = printed.splitlines()
    function = f"flashinfer.{WRAPPER}.run"
    assert (status, said, summary) == (1, "", "30 calls of attention: 29 correct, 1 wrong")
    for number, (line, folder) in enumerate(zip(lines, runs(tmp_path), strict=True)):
        verdict = "wrong" if number == 17 else "correct"
        assert line.startswith(f"{number:>4} {verdict:12} {folder.name}: {function}, 3 sequences")
        assert line.endswith("3 sequences") == (number != 17)
    assert re.search(r"; pages\.batch_shifted; \d+ of 192 elements of the output \(.*\) are wrong, worst in", lines[17])


def test_a_process_that_ends_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(CommandError, match="a process that judges calls was ended") as raised:
        list(judged_in_parallel([(n, Ending("", tmp_path, "", {})) for n in range(2)]))
    assert raised.value.status == 3


def test_the_command_after_a_wrong_call_without_a_proof_says_all_of_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not that of a proved mistake, which has its name; of several recordings, too."""
    folders = [tmp_path / "one", tmp_path / "two calls"]
    for folder in folders:
        record_decoding(folder, 2, {0}, sequences=2, heads=(2, 1), features=8, tokens=(20, 30))
    file = runs(folders[1])[1] / "outputs.safetensors"
    tensors = safetensors.numpy.load_file(file)
    output = tensors[min(tensors)]
    output[1] += np.sin(np.arange(output[1].size)).reshape(output[1].shape).astype(output.dtype)
    safetensors.numpy.save_file(tensors, file)
    status, printed = in_one_process(capsys, monkeypatch, folders[0])
    assert (status, printed[-1]) == (1, "2 calls of attention: 1 wrong, 1 correct")
    for paths in (folders[1:], folders):
        status, printed = in_one_process(capsys, monkeypatch, *paths)
        words = shlex.split(printed[-1].removeprefix("next: "), comments=True)
        assert words == ["attention-service", "compare", str(runs(folders[1])[1])]
    status, text, _ = run(capsys, *words[1:])
    assert (status, text.splitlines()[-1].partition(";")[0]) == (1, "  next: none: no command makes calls")


class Ending(RecordedCall):
    """A call that ends the process that reads it, as the system does where memory runs out."""

    def arguments(self) -> dict[str, Any]:
        os._exit(1)


def test_what_cannot_be_read_says_why_and_the_rest_is_judged(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder = record_decoding(tmp_path, 6, **SMALL)
    recorder.record("rmsnorm", "(input: torch.Tensor)", (np.ones(2),), {}, np.ones(2))
    folders = runs(tmp_path)
    cut(folders[1] / "outputs.safetensors", 20)
    cut(folders[2] / "inputs.safetensors", 500)
    (folders[3] / "outputs.safetensors").unlink()
    session = tmp_path / "session.jsonl"
    cut(session, len(session.read_bytes()) - 40)  # within the line of rmsnorm
    status, lines = in_one_process(capsys, monkeypatch, tmp_path)
    assert status == 2
    assert [line.split()[1] for line in lines[:6]] == ["correct", *["unreadable"] * 3, "correct", "correct"]
    assert "a truncated file" in lines[1]
    assert "truncated data" in lines[2] or "truncated file" in lines[2]
    assert "expected results of the call, got execution_status completed" in lines[3]
    assert lines[6] == (
        "6 calls of attention: 3 correct, 3 unreadable; 1 call of other functions; "
        "1 line of the recording cut off or unreadable"
    )


def in_one_process(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *arguments: object
) -> tuple[int, list[str]]:
    """The exit status of `compare` on a machine with one processor, and the lines that it printed."""
    monkeypatch.setattr("attention_service.commands.verdicts.cpu_count", lambda: 1)
    status, printed, _ = run(capsys, "compare", *arguments)
    return status, printed.splitlines()


def test_calls_whose_lines_are_lost_are_found_by_their_folders(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    record_decoding(tmp_path, 3, {2}, **SMALL)
    session = tmp_path / "session.jsonl"
    lines = session.read_bytes().splitlines(keepends=True)
    session.write_bytes(b"".join(lines[:7]) + lines[7][:100])  # all of the first call, half a line of the second
    status, printed = in_one_process(capsys, monkeypatch, tmp_path)
    assert [line.split()[1] for line in printed[:3]] == ["correct", "correct", "wrong"]
    assert "pages.batch_shifted" in printed[2]
    assert (status, "1 line of the recording" in printed[3]) == (1, True)


def test_a_line_that_is_cut_off_alone_is_inconclusive(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    record_decoding(tmp_path, 1, **SMALL)
    session = tmp_path / "session.jsonl"
    session.write_bytes(session.read_bytes() + b'{"function_name": "single')
    status, printed = in_one_process(capsys, monkeypatch, tmp_path)
    assert (status, printed[0].split()[1]) == (2, "correct")


@pytest.mark.skipif(find_spec("ray") is not None, reason="Ray is installed")
def test_ray_is_an_extra(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record_decoding(tmp_path, 1, **SMALL)
    for arguments in (("compare", tmp_path), ("conformance", "run", "numpy:add")):
        status, printed, said = run(capsys, *arguments, "--ray")
        assert (status, printed) == (3, "")
        assert "expected a backend that is installed, got ray without ray (install attention-service[ray]" in said


def test_tasks_are_for_many_calls(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record_decoding(tmp_path, 2, **SMALL)
    (tmp_path / "request.json").write_text("{}")
    for arguments, got in (
        ((tmp_path, "--call", 1), f"all calls of recordings, got one call of {tmp_path}"),
        ((tmp_path / "request.json",), f"the folder of a recording, got {tmp_path}/request.json"),
    ):
        status, _, said = run(capsys, "compare", *arguments, "--ray")
        assert (status, f"--ray: expected {got}" in said) == (3, True)


def test_a_recording_without_calls_is_inconclusive(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record_decoding(tmp_path, 0, **SMALL)
    assert run(capsys, "compare", tmp_path)[:2] == (2, "0 calls of attention\n")


@pytest.mark.parametrize("format_name", ["json", "junit", "github"])
def test_formats(
    format_name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    record_decoding(tmp_path, 3, {1}, **SMALL)
    cut(runs(tmp_path)[2] / "outputs.safetensors", 20)
    status, lines = in_one_process(capsys, monkeypatch, tmp_path, "--format", format_name)
    printed = "\n".join(lines)
    assert status == 1
    if format_name == "json":
        found = json.loads(printed)
        assert found["counts"] == {"correct": 1, "wrong": 1, "unreadable": 1}
        assert [call["mistake"] for call in found["calls"]] == [None, "pages.batch_shifted", None]
        assert [call["sequences"] for call in found["calls"]] == [3, 3, None]
        assert found["calls"][0]["name"] == runs(tmp_path)[0].name
    elif format_name == "junit":
        cases = ElementTree.fromstring(printed).findall("testsuite/testcase")
        assert [[one.tag for one in case] for case in cases] == [[], ["failure"], ["skipped"]]
    else:
        assert "pages.batch_shifted" in lines[0]
        assert lines[-1].endswith("1 passed, 1 failed, 1 skipped")


def test_one_call_has_its_whole_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record_decoding(tmp_path, 3, {1}, **SMALL)
    status, printed, _ = run(capsys, "compare", tmp_path, "--call", 1)
    assert (status, "proof: pages.batch_shifted" in printed) == (1, True)
    assert run(capsys, "compare", runs(tmp_path)[1])[1] == printed
    status, printed, _ = run(capsys, "compare", tmp_path, "--call", 0, "--format", "json")
    assert (status, json.loads(printed)["verdict"]["status"]) == (0, "correct")


def test_calls_of_several_recordings_have_the_names_of_their_folders(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    roots = [tmp_path / "one", tmp_path / "other"]
    for root in roots:
        record_decoding(root, 1, **SMALL)
    status, lines = in_one_process(capsys, monkeypatch, *roots)
    assert status == 0
    for line, root in zip(lines, roots, strict=False):
        assert line.startswith(f"   0 {'correct':12} {runs(root)[0]}: ")


def test_errors_name_what_was_expected(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record_decoding(root := tmp_path / "calls", 2, **SMALL)
    (empty := tmp_path / "empty").mkdir()
    (request := tmp_path / "request.json").write_text("{}")
    for arguments, expected in (
        ([empty], f"{empty}: expected the folder of a recording"),
        ([root, request], f"{request}: expected the folder of a recording"),
        ([root, root, root, "--call=0"], "--call: expected one recording, got 3"),
        ([root, "--call=2"], "--call: expected a number from 0 to 1, got 2"),
        ([root, "--against", request], "--against: expected a request, got the recording"),
        ([root, "--torch"], "--torch: expected a request, got the recording"),
        ([request, "--call=0"], f"--call: expected the folder of a recording, got {request}"),
        ([request, request, request], f"RECORDING: expected the folder of a recording, got {request}"),
    ):
        status, printed, said = run(capsys, "compare", *arguments)
        assert (status, printed) == (3, "")
        assert said.startswith(expected)


def test_what_a_library_refuses_is_unreadable(tmp_path: Path) -> None:
    record_decoding(tmp_path, 1, **SMALL)
    session = tmp_path / "session.jsonl"
    session.write_text(session.read_text().replace('"NHD"', '"DHN"'))
    (call,) = read_recording(tmp_path).calls
    verdict = judged((0, call))
    assert (verdict.status, verdict.sequences) == ("unreadable", None)
    assert "/kv_layout: expected" in verdict.message


def test_hostile_metadata_is_unreadable(tmp_path: Path) -> None:
    """Keys of tensors that are no text, tensors that are not there."""
    record_decoding(tmp_path, 1, **SMALL)
    session = tmp_path / "session.jsonl"
    text = session.read_text()
    for changed in (
        text.replace('"input_tensor_keys": ["arg_1", "arg_2"]', '"input_tensor_keys": [["arg_1"], 2]'),
        text.replace('"kwarg_return_lse": true', '"arg_7": {"tensor_key": []}'),
        text.replace('"kwarg_return_lse": true', '"kwarg_sinks": {"tensor_key": "arg_9"}'),
        text.replace('"kwarg_return_lse": true', '"kwarg_sinks": {"items": [{"tensor_key": 3}]}'),
    ):
        assert changed != text
        session.write_text(changed)
        (call,) = read_recording(tmp_path).calls
        assert judged((0, call)).message.startswith("expected the tensor")


def test_the_library_gives_the_report_of_each_call(tmp_path: Path) -> None:
    """As compare_call does, one by one: what is judged later is read later."""
    record_decoding(tmp_path, 4, {1}, **SMALL)
    files = [folder / "outputs.safetensors" for folder in runs(tmp_path)]
    cut(files[2], 20)
    verdicts = judge_recording(tmp_path, reference=True)
    found = [next(verdicts) for _ in range(3)]
    files[3].unlink()
    found += verdicts
    assert [one.status for one in found] == ["correct", "wrong", "unreadable", "unreadable"]
    assert [one.number for one in found] == [0, 1, 2, 3]
    assert [one.name for one in found] == [folder.name for folder in runs(tmp_path)]
    assert [one.mistake for one in found] == [None, "pages.batch_shifted", None, None]
    assert ["truncated file" in found[2].message, "expected results" in found[3].message] == [True, True]
    for verdict, call in zip(found[:2], read_recording(tmp_path).calls, strict=False):
        expected = compare_call(call.function, actual=call.results(), reference=True, **call.arguments())
        assert type(verdict.report) is type(expected)
        assert repr(verdict.report) == repr(expected)
        assert verdict.report is not None
        assert verdict.report.model_dump_json() == expected.model_dump_json()
    (alone,) = judge_recording(str(runs(tmp_path)[0]), tolerance={"rtol": 1e3, "atol": 1e3})
    assert alone.report is not None
    assert "yours" in [test.name for test in alone.report.tests]


def test_the_library_warns_of_lost_lines(tmp_path: Path) -> None:
    record_decoding(tmp_path, 1, **SMALL)
    session = tmp_path / "session.jsonl"
    session.write_bytes(session.read_bytes() + b'{"function_name": "single')
    with pytest.warns(UserWarning, match="1 line of the recording cut off or unreadable") as warned:
        verdicts = judge_recording(tmp_path)
    assert [one.status for one in verdicts] == ["correct"]
    assert warned[0].filename == __file__


def test_the_library_refuses_what_is_no_recording(tmp_path: Path) -> None:
    """When it is called, not with the first verdict."""
    with pytest.raises(InvalidRequest, match=f"/path: expected the folder of a recording, got {tmp_path}"):
        judge_recording(tmp_path)
    with pytest.raises(InvalidRequest, match="/time_limit: expected"):
        judge_recording(tmp_path, time_limit=-1)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in DRAWS if name.startswith("flashinfer")])
def test_random_calls_are_judged_as_recorded(name: str, tmp_path: Path) -> None:
    """What loops over tokens return is right; with one number that is half as large again, wrong."""
    recorder, expected = FlightRecorder(tmp_path), []
    for seed in range(4):
        drawn = DRAWS[name](Draw(seed))
        output, sums = in_axes(drawn, np.dtype(np.float32))
        numbers = np.argwhere(np.isfinite(output) & (output != 0))
        if not len(numbers):  # no sequence has queries and keys
            continue
        spoiled = output.copy()
        spoiled[tuple(numbers[0])] *= 1.5
        for returned, status in ((output, "correct"), (spoiled, "wrong")):
            function = drawn.function.removeprefix("flashinfer.")
            if function.endswith(".run"):
                constructor = function.replace(".run", ".__init__")
                recorder.record(constructor, "(self)", (object(),), {}, self_id=seed)
            recorder.record(function, "(self)", (object(),), drawn.arguments, (returned, sums), self_id=seed)
            expected.append(status)
    verdicts = [judged((n, call)).status for n, call in enumerate(read_recording(tmp_path).calls)]
    assert verdicts == expected


@pytest.mark.torch
def test_tensors_of_torch_are_mapped(tmp_path: Path) -> None:
    from safetensors.torch import load_file
    from torch import save

    record_decoding(tmp_path, 2, {1}, **SMALL)
    for file in tmp_path.glob("*/*.safetensors"):
        save(load_file(file), file.with_suffix(".pt"))
        file.unlink()
    verdicts = [judged((n, call)) for n, call in enumerate(read_recording(tmp_path).calls)]
    assert [one.mistake for one in verdicts] == [None, "pages.batch_shifted"]


def test_a_line_stands_above_the_progress(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    with Progress() as progress:
        progress.print_above("first")
        progress.show("1 judged")
        progress.print_above("second")
    printed, said = capsys.readouterr()
    assert printed == "first\nsecond\n"
    assert said == "\r\033[K1 judged, 0 s\r\033[K\r\033[K1 judged, 0 s\r\033[K"


def test_a_picture_of_a_sequence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record_decoding(tmp_path, 2, **SMALL)
    plan = sorted(tmp_path.glob(f"*{WRAPPER}.plan_*"))[1]
    status, printed, _ = run(capsys, "heatmap", tmp_path, "--call", 1, "--sequence", 2, "-o", tmp_path / "weights.svg")
    assert (status, printed) == (0, "")
    keys = key_count(plan, 2)
    assert f"1 query by {keys} keys, 4 heads" in (tmp_path / "weights.svg").read_text()
    for arguments, expected in (
        ([tmp_path, "--call=1", "--sequence=3"], "--sequence: expected one of 3 sequences from 0"),
        ([tmp_path], "--call: expected a number from 0 to 1, got None"),
        ([tmp_path / "request.json", "--sequence=0"], "--sequence: expected the folder of a recording"),
    ):
        status, _, said = run(capsys, "heatmap", *arguments, "-o", tmp_path / "weights.svg")
        assert (status, said.startswith(expected)) == (2, True)


def key_count(plan: Path, sequence: int) -> int:
    """The keys of a sequence by the tensors of its plan: full pages of 16, and the last one."""
    found = safetensors.numpy.load_file(plan / "inputs.safetensors")
    return int((np.diff(found["arg_1"])[sequence] - 1) * 16 + found["arg_3"][sequence])


def test_merges_have_no_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recorder = record_decoding(tmp_path, 0, **SMALL)
    v, s = np.ones((2, 1, 4), np.float32), np.zeros((2, 1), np.float32)
    recorder.record("merge_state", "(v_a, s_a, v_b, s_b)", (v, s, v, s), {}, (v, s + 1))
    status, _, said = run(capsys, "heatmap", tmp_path, "-o", tmp_path / "weights.svg")
    assert status == 2
    assert said == "--call: expected a call with queries and keys, got flashinfer.merge_state\n"
    # Two equal parts of logsumexp 0: the logsumexp of base 2 is 1.
    assert run(capsys, "compare", tmp_path, "--call", 0)[0] == 0


def test_the_page_shows_lines_and_commands_as_they_are(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The commands of docs/engine-answers.md, on a recording with a wrong call."""
    blocks = {block.language: block.text for block in BLOCKS if block.page == "docs/engine-answers.md"}
    record_decoding(tmp_path / "calls", 2, {1}, **SMALL)
    monkeypatch.chdir(tmp_path)
    printed = in_one_process(capsys, monkeypatch, *blocks["sh"].split()[2:])[1]
    assert [form(line) for line in printed] == [form(line) for line in blocks["text"].splitlines()]
    exec(blocks["python"], {})
    line, said = capsys.readouterr().out.split("\n", 1)
    assert (line, "a sequence reads the pages of its neighbour" in said) == (printed[1], True)
    (command,) = re.findall(r"run: attention-service (compare .*)", blocks["yaml"])
    status, lines = in_one_process(capsys, monkeypatch, *command.split()[1:])
    assert (status, lines[-1]) == (1, "compare calls: 1 passed, 1 failed, 0 skipped")


def form(line: str) -> list[str]:
    """The words of a line, with 0 for all numbers."""
    return re.sub(r"\d+", "0", line).split()
