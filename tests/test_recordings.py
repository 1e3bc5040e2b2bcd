"""Recordings of FlashInfer's flight recorder: which calls there are, and what their arguments are called."""

from __future__ import annotations

import json
from enum import Enum
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
import safetensors.numpy

from attention_service.cli import main
from attention_service.engines.table import decode as decode_call
from attention_service.errors import InvalidRequest, InvalidTensors, MissingField
from attention_service.library.recordings import is_recording, parameters, read_recording
from tests.helpers.flight_recorder import FlightRecorder

# As str(inspect.signature(...)) writes them.
SINGLE: Final = (
    "(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale_q: Optional[torch.Tensor] = None, "
    "o_dtype: Optional[torch.dtype] = None, custom_mask: Optional[torch.Tensor] = None, causal: bool = False, "
    "return_lse: bool = False) -> Union[torch.Tensor, Tuple[torch.Tensor, torch.Tensor]]"
)
INIT: Final = (
    "(self, float_workspace_buffer: torch.Tensor, kv_layout: str = 'NHD', use_cuda_graph: bool = False, "
    "jit_args: Optional[List[Any]] = None) -> None"
)
PLAN: Final = (
    "(self, indptr: torch.Tensor, indices: torch.Tensor, last_page_len: torch.Tensor, num_qo_heads: int, "
    "num_kv_heads: int, head_dim: int, page_size: int, pos_encoding_mode: str = 'NONE', window_left: int = -1, "
    "q_data_type: Union[str, torch.dtype, NoneType] = 'float16') -> None"
)
PLAN_0_7: Final = (
    "(self, indptr: torch.Tensor, indices: torch.Tensor, last_page_len: torch.Tensor, num_qo_heads: int, "
    "num_kv_heads: int, head_dim: int, page_size: int, *deprecated_positional_args: Any, **kwargs: Any) -> None"
)
RUN: Final = (
    "(self, q: torch.Tensor, paged_kv_cache: Union[torch.Tensor, Tuple[torch.Tensor, torch.Tensor]], *args, "
    "return_lse: bool = False, enable_pdl: Optional[bool] = None) -> torch.Tensor"
)
DECODE: Final = "BatchDecodeWithPagedKVCacheWrapper"


class Mode(Enum):
    NONE = 0


def tensor(*shape: int, dtype: Any = np.float16) -> np.ndarray:
    return np.arange(np.prod(shape), dtype=np.float64).reshape(shape).astype(dtype)


def integers(*numbers: int) -> np.ndarray:
    return np.array(numbers, np.int32)


def single(recorder: FlightRecorder, **options: Any) -> Path:
    arrays = tensor(2, 1, 4), tensor(3, 1, 4), tensor(3, 1, 4)
    return recorder.record("single_prefill_with_kv_cache", SINGLE, arrays, {}, tensor(2, 1, 4), **options)


def decode(recorder: FlightRecorder, part: str, object_id: int, page: int = 0, **options: Any) -> Path:
    """A constructor, a plan of one sequence with the keys of a page, or a run."""
    me = object()
    if part == "__init__":
        return recorder.record(f"{DECODE}.{part}", INIT, (me, tensor(8), "HND"), {}, self_id=object_id)
    if part == "plan":
        given = integers(0, 1), integers(page), integers(page + 1), 2, 1, 4, 4
        keywords = {"pos_encoding_mode": "NONE", "q_data_type": np.dtype(np.float16)}
        return recorder.record(f"{DECODE}.{part}", PLAN, (me, *given), keywords, self_id=object_id)
    pair = tensor(5, 1, 4, 4), tensor(5, 1, 4, 4) + 1
    result = tensor(1, 2, 4), tensor(1, 2, dtype=np.float32)
    return recorder.record(
        f"{DECODE}.{part}", RUN, (me, tensor(1, 2, 4), pair), {"return_lse": True}, result, self_id=object_id, **options
    )


def test_a_function_has_the_names_of_its_positions(tmp_path: Path) -> None:
    folder = single(FlightRecorder(tmp_path))
    (call,) = read_recording(tmp_path).calls
    assert (call.name, call.folder, call.function) == (folder.name, folder, "flashinfer.single_prefill_with_kv_cache")
    assert {name: array.shape for name, array in call.arguments().items()} == {
        "q": (2, 1, 4),
        "k": (3, 1, 4),
        "v": (3, 1, 4),
    }
    assert {name: array.dtype for name, array in call.results().items()} == {"output": np.float16}


def test_a_run_has_the_arguments_of_its_constructor_and_of_the_last_plan(tmp_path: Path) -> None:
    recorder = FlightRecorder(tmp_path)
    decode(recorder, "__init__", 1)
    decode(recorder, "plan", 1, page=2)
    decode(recorder, "run", 1)
    decode(recorder, "plan", 1, page=3)
    decode(recorder, "run", 1)
    first, second = read_recording(tmp_path).calls
    found = second.arguments()
    assert first.arguments()["indices"].tolist() == [2]
    assert found["indices"].tolist() == [3]
    assert found["last_page_len"].tolist() == [4]
    assert (found["kv_layout"], found["num_qo_heads"], found["pos_encoding_mode"]) == ("HND", 2, "NONE")
    keys, values = found["paged_kv_cache"]
    assert (values - keys == 1).all()
    assert found.keys().isdisjoint({"self", "float_workspace_buffer", "q_data_type", "return_lse"})  # change nothing
    assert {name: array.shape for name, array in second.results().items()} == {"output": (1, 2, 4), "logsumexp": (1, 2)}


def test_objects_and_processes_are_told_apart(tmp_path: Path) -> None:
    one, other = FlightRecorder(tmp_path, process=1), FlightRecorder(tmp_path, process=2)
    for recorder, object_id, page in ((one, 1, 1), (one, 2, 2), (other, 1, 3)):
        decode(recorder, "__init__", object_id)
        decode(recorder, "plan", object_id, page)
    for recorder, object_id in ((other, 1), (one, 1), (one, 2)):
        decode(recorder, "run", object_id)
    calls = read_recording(tmp_path).calls
    assert [call.arguments()["indices"].item() for call in calls] == [3, 1, 2]


def test_a_new_object_at_the_place_of_another_has_no_plan_of_it(tmp_path: Path) -> None:
    recorder = FlightRecorder(tmp_path)
    for part in ("__init__", "plan", "__init__", "run"):
        decode(recorder, part, 1)
    (call,) = read_recording(tmp_path).calls
    with pytest.raises(MissingField, match="no plan recorded"):
        call.arguments()


def test_a_run_without_its_constructor_is_unreadable(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With one key/value head and pages of as many tokens, NHD and HND fit the same cache: it was judged wrong."""
    recorder = FlightRecorder(tmp_path)
    decode(recorder, "plan", 1, page=2)
    decode(recorder, "run", 1)
    me, query, pair = object(), tensor(1, 4, 4), (tensor(5, 4, 4, 4), tensor(5, 4, 4, 4))
    recorder.record(f"{DECODE}.run", RUN, (me, query, pair), {}, tensor(1, 4, 4), self_id=1)
    for call in read_recording(tmp_path).calls:
        with pytest.raises(MissingField, match="no __init__ recorded, so that kv_layout is unknown"):
            call.arguments()
    status = main(["compare", str(tmp_path)])
    said = capsys.readouterr().out
    assert (status, said.count(" unreadable "), said.count("kv_layout is unknown")) == (2, 2, 2)


def test_graphs_use_subclasses(tmp_path: Path) -> None:
    FlightRecorder(tmp_path).record(f"CUDAGraph{DECODE}.run", RUN, (object(), tensor(1, 2, 4)), {}, self_id=1)
    assert [call.function for call in read_recording(tmp_path).calls] == [f"flashinfer.{DECODE}.run"]


def test_replays_stand_for_the_call_that_was_captured(tmp_path: Path) -> None:
    recorder = FlightRecorder(tmp_path)
    folder = single(recorder)
    line = json.loads((folder / "metadata.jsonl").read_text().splitlines()[-1])
    for number in (1, 2):
        replay = folder / "graph_flushes" / f"flush_{number:04d}"
        replay.mkdir(parents=True)
        for kind in ("inputs", "outputs"):
            (replay / f"{kind}.safetensors").write_bytes((folder / f"{kind}.safetensors").read_bytes())
        stale = {"dump_dir": f"dumps/{folder.name}/graph_flushes/{replay.name}"}
        recorder.append(replay, line | stale | {"graph_capture_base_dump_dir": f"dumps/{folder.name}"})
    names = [call.name for call in read_recording(tmp_path).calls]
    assert names == [f"{folder.name}/graph_flushes/flush_{number:04d}" for number in (1, 2)]
    assert read_recording(tmp_path).calls[1].arguments()["q"].shape == (2, 1, 4)


def test_the_folder_of_one_call_has_the_plan_beside_it(tmp_path: Path) -> None:
    recorder = FlightRecorder(tmp_path)
    for part in ("__init__", "plan", "run"):
        folder = decode(recorder, part, 1, 2)
    single(recorder)
    (call,) = read_recording(folder).calls
    assert call.arguments()["indices"].tolist() == [2]


def test_without_a_session_the_folders_are_read(tmp_path: Path) -> None:
    recorder = FlightRecorder(tmp_path)
    for part in ("__init__", "plan", "run"):
        decode(recorder, part, 1, 2)
    (tmp_path / "session.jsonl").unlink()
    assert is_recording(tmp_path)
    (call,) = read_recording(tmp_path).calls
    assert call.arguments()["indices"].tolist() == [2]


def test_a_recording_that_is_cut_off_is_read_as_far_as_it_goes(tmp_path: Path) -> None:
    recorder = FlightRecorder(tmp_path)
    first, second = single(recorder), single(recorder)
    session = tmp_path / "session.jsonl"
    session.write_bytes(session.read_bytes()[:-300])  # within the line that says that the second call ended
    (second / "outputs.safetensors").write_bytes((second / "outputs.safetensors").read_bytes()[:20])
    recording = read_recording(tmp_path)
    assert [call.folder for call in recording.calls] == [first, second]
    assert recording.lost == 1
    with pytest.raises(InvalidTensors):
        recording.calls[1].results()


def test_a_call_that_did_not_end_says_so(tmp_path: Path) -> None:
    single(FlightRecorder(tmp_path), completes=False)
    (call,) = read_recording(tmp_path).calls
    with pytest.raises(MissingField, match="inputs_saved"):
        call.results()


@pytest.mark.parametrize("place", ["..", "dumps/..", "/", ".", "../.."])
def test_a_call_in_another_folder_is_refused(place: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Also of a replay, and of a symbolic link; an absolute name is that of a folder in the recording."""
    folder = tmp_path / "recording"
    recorder = FlightRecorder(folder)
    call = single(recorder)
    line = json.loads((call / "metadata.jsonl").read_text().splitlines()[-1])
    for kind in ("inputs", "outputs"):  # which would be read
        (tmp_path / f"{kind}.safetensors").write_bytes((call / f"{kind}.safetensors").read_bytes())
    (folder / "link").symlink_to(tmp_path)
    kept = (folder / "session.jsonl").read_bytes()
    for stale in (
        {"dump_dir": place},
        {"dump_dir": f"{place}/../link"},
        {"dump_dir": f"dumps/a/{place}", "graph_capture_base_dump_dir": ".."},
    ):
        (folder / "session.jsonl").write_text(json.dumps(line | stale) + "\n")
        with pytest.raises(InvalidRequest, match=r"/dump_dir: expected a folder in .*recording, got"):
            read_recording(folder)
        for command in ("compare", "compute"):
            assert main([command, str(folder)]) != 0
            error = capsys.readouterr().err
            assert "dump_dir" in error
            assert stale["dump_dir"] in error
            assert error.count("\n") == 1
    (folder / "session.jsonl").write_bytes(kept)
    line["dump_dir"] = f"/elsewhere/{call.name}"
    (folder / "session.jsonl").write_text(json.dumps(line) + "\n")
    assert [one.folder for one in read_recording(folder).calls] == [call]


def test_a_folder_that_no_system_has_is_a_lost_line(tmp_path: Path) -> None:
    call = single(FlightRecorder(tmp_path))
    line = json.loads((call / "metadata.jsonl").read_text().splitlines()[-1])
    with (tmp_path / "session.jsonl").open("a") as session:
        session.write(json.dumps(line | {"dump_dir": "a\0b"}) + "\n")
    recording = read_recording(tmp_path)
    assert ([one.folder for one in recording.calls], recording.lost) == ([call], 1)


def test_a_tensor_that_is_missing_is_an_error(tmp_path: Path) -> None:
    folder = single(FlightRecorder(tmp_path))
    kept = {f"arg_{n}": tensor(2, 1, 4) for n in range(2)}
    safetensors.numpy.save_file(kept, folder / "inputs.safetensors")
    with pytest.raises(MissingField, match="arg_2"):
        read_recording(tmp_path).calls[0].arguments()


def test_other_functions_are_counted(tmp_path: Path) -> None:
    recorder = FlightRecorder(tmp_path)
    recorder.record("rmsnorm", "(input: torch.Tensor)", (tensor(2),), {}, tensor(2))
    single(recorder)
    recording = read_recording(tmp_path)
    assert (len(recording.calls), recording.others) == (1, 1)


def test_an_argument_without_a_name_is_refused(tmp_path: Path) -> None:
    FlightRecorder(tmp_path).record("single_decode_with_kv_cache", "(q)", (tensor(2, 4), tensor(1)), {}, tensor(2, 4))
    (call,) = read_recording(tmp_path).calls
    with pytest.raises(InvalidRequest, match="arg_1"):
        call.arguments()


def test_values_of_the_metadata(tmp_path: Path) -> None:
    keywords = {"o_data_type": np.dtype(np.float32), "mode": Mode.NONE, "sizes": [1, (2, 3)], "jit": object, "x": None}
    FlightRecorder(tmp_path).record("single_decode_with_kv_cache", "(q)", (tensor(2, 4),), keywords, tensor(2, 4))
    found = read_recording(tmp_path).calls[0].arguments()
    assert (found["o_data_type"], found["mode"], found["sizes"]) == ("float32", 0, [1, [2, 3]])
    assert "x" not in found  # None says nothing
    assert found["jit"].startswith("<class")


def answered(capsysbinary: pytest.CaptureFixture[bytes], *arguments: str) -> dict[str, Any]:
    assert main(["compute", *arguments]) == 0
    answer: dict[str, Any] = json.loads(capsysbinary.readouterr().out)
    return answer


def test_a_recorded_call_is_computed_with_its_weights(
    tmp_path: Path, capsysbinary: pytest.CaptureFixture[bytes]
) -> None:
    recorder = FlightRecorder(tmp_path)
    single(recorder)
    for part in ("__init__", "plan", "run"):
        folder = decode(recorder, part, 1, page=2)
    found = answered(capsysbinary, str(tmp_path), "--call", "1")
    # Three keys of page 2, of the layout (pages, hk, page, d), and values that are larger by 1.
    keys, query = tensor(5, 1, 4, 4)[2, 0, :3].astype(np.float64), tensor(2, 4).astype(np.float64)
    scores = query @ keys.T / 2
    weights = np.exp(scores - scores.max(axis=1, keepdims=True))
    weights /= weights.sum(axis=1, keepdims=True)
    np.testing.assert_allclose(found["attention_weights"][0], weights[:, None], atol=1e-15)
    np.testing.assert_allclose(found["output"][0], weights @ (keys + 1), rtol=1e-12)
    assert answered(capsysbinary, str(folder))["output"] == found["output"]  # the only call in its folder


def test_a_run_leaves_to_the_plan_what_it_says_none_of(
    tmp_path: Path, capsysbinary: pytest.CaptureFixture[bytes]
) -> None:
    """A window of the plan, by the signature that FlashInfer 0.7.2 has."""
    recorder, me = FlightRecorder(tmp_path), object()
    pair = tensor(5, 1, 4, 4), tensor(5, 1, 4, 4) + 1
    for window, seen in ((0, [0.0, 0.0, 1.0]), (1, [0.0, 0.5, 0.5])):
        recorder.record(f"{DECODE}.__init__", INIT, (me, tensor(8), "HND"), {}, self_id=1)
        given = integers(0, 1), integers(2), integers(3), 2, 1, 4, 4
        planned = {"window_left": window, "is_causal": None, "sm_scale": 1.0}
        recorder.record(f"{DECODE}.plan", PLAN_0_7, (me, *given), planned, self_id=1)
        result = tensor(1, 2, 4), tensor(1, 2, dtype=np.float32)
        query, keywords = np.zeros((1, 2, 4), np.float16), {"return_lse": True, "window_left": None}
        folder = recorder.record(f"{DECODE}.run", RUN, (me, query, pair), keywords, result, self_id=1)
        assert answered(capsysbinary, str(folder))["attention_weights"] == [[[seen]] * 2]


def test_a_positional_argument_behind_those_of_the_signature_is_refused(tmp_path: Path) -> None:
    """What a kernel of one's own would get by *args is none of the keywords behind it. In 0.7 the same of a plan."""
    recorder, me = FlightRecorder(tmp_path), object()
    pair = tensor(5, 1, 4, 4), tensor(5, 1, 4, 4) + 1
    recorder.record(f"{DECODE}.run", RUN, (me, tensor(1, 2, 4), pair, 0.5), {}, tensor(1, 2, 4), self_id=1)
    with pytest.raises(InvalidRequest, match="3 arguments, as the signature has them, got arg_3"):
        read_recording(tmp_path).calls[0].arguments()
    given = integers(0, 1), integers(2), integers(3), 2, 1, 4, 4
    recorder.record(f"{DECODE}.plan", PLAN_0_7, (me, *given, "NONE"), {}, self_id=2)
    recorder.record(f"{DECODE}.run", RUN, (me, tensor(1, 2, 4), pair), {}, tensor(1, 2, 4), self_id=2)
    with pytest.raises(InvalidRequest, match="8 arguments, as the signature has them, got arg_8"):
        read_recording(tmp_path).calls[1].arguments()


def test_a_plan_that_was_recorded_as_text_is_refused_by_name(tmp_path: Path) -> None:
    """Of an object the recorder keeps the text."""
    recorder, me, mla = FlightRecorder(tmp_path), object(), "BatchMLAPagedAttentionWrapper"
    recorder.record(f"{mla}.plan", "(self, *, metadata=None)", (me,), {"metadata": object()}, self_id=1)
    recorder.record(f"{mla}.run", "(self)", (me,), {"query": tensor(1, 1, 576)}, tensor(1, 1, 512), self_id=1)
    (recorded,) = read_recording(tmp_path).calls
    arguments = recorded.arguments()
    with pytest.raises(InvalidRequest, match="a recording has its text only"):
        decode_call(recorded.function, arguments)


def test_a_call_that_is_not_there_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recorder = FlightRecorder(tmp_path)
    single(recorder)
    single(recorder)
    for arguments, error in (
        ([], "--call: expected a number from 0 to 1, got None"),
        (["--call", "2"], "--call: expected a number from 0 to 1, got 2"),
    ):
        assert main(["compute", str(tmp_path), *arguments]) == 2
        assert error in capsys.readouterr().err


def test_a_request_has_no_calls(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "request.json").write_text("{}")
    assert main(["compute", str(tmp_path / "request.json"), "--call", "0"]) == 2
    assert "--call: expected the folder of a recording" in capsys.readouterr().err


def test_no_recording(tmp_path: Path) -> None:
    assert not is_recording(tmp_path)
    assert not is_recording(tmp_path / "absent")


@pytest.mark.parametrize(
    ("signature", "names"),
    [
        ("()", []),
        ("(self)", ["self"]),
        ("(a, b=(1, 2), c: Dict[str, int] = {'x': 1}, *, d=None)", ["a", "b", "c"]),
        ("(a=<function f at 0x7f, b>, b: Callable[[int], int] = None) -> Tuple[int, str]", ["a", "b"]),
        (RUN, ["self", "q", "paged_kv_cache"]),
        ("(a, /, b)", ["a", "b"]),
        ("<unavailable>", []),
        ("", []),
    ],
)
def test_names_of_parameters(signature: str, names: list[str]) -> None:
    assert parameters(signature) == names
