"""`attention-service compare`: functions in the place of files, standard input, files of torch, exit statuses."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Final
from xml.etree import ElementTree

import numpy as np
import pytest
import safetensors.numpy

from attention_service.cli import main
from attention_service.codecs.table import CODECS
from attention_service.commands.files import write_request
from attention_service.comparison.calls.request import typed_arguments
from attention_service.comparison.inputs import make_input
from attention_service.comparison.recipes import recipe_for

pytestmark = pytest.mark.usefixtures("without_suggestions")
# Two queries, keys and values of one feature, so that all weights are known: query 1 sees keys 0 and 1 alike.
REQUEST: Final[dict[str, Any]] = {
    "query": [[[[0.0], [0.0]]]],
    "key": [[[[1.0], [5.0]]]],
    "value": [[[[2.0], [4.0]]]],
    "is_causal": True,
    "dtype": "float32",
}
RIGHT: Final = [[[[2.0], [3.0]]]]
# A call of two sequences: zeros see all of their keys alike, the second one causally.
CALL: Final[dict[str, Any]] = {
    "call": "flash_attn.flash_attn_varlen_func",
    "version": 2,
    "dtype": "float32",
    "arguments": {
        "q": [[[0.0]], [[0.0]], [[0.0]]],
        "k": [[[1.0]], [[5.0]], [[1.0]], [[5.0]]],
        "v": [[[2.0]], [[4.0]], [[6.0]], [[8.0]]],
        "cu_seqlens_q": [0, 1, 3],
        "cu_seqlens_k": [0, 2, 4],
        "causal": True,
        "window_size": [-1, 0],
    },
}
KERNELS: Final = """
import sys
import numpy as np
from attention_service import attend
print("imported")

def kernel(query, key, value, is_causal):
    print("called")
    assert (query.dtype, is_causal) == (np.float32, True)
    output = np.stack([value[:, :, 0], value.mean(axis=2)], axis=2)
    query[:], value[:] = np.nan, np.nan  # its own copies
    return output

def by_name(query, key, value, is_causal, dtype, layout="none"):
    assert (dtype, layout) == ("float32", "none")
    return {"output": kernel(query, key, value, is_causal), "logsumexp": None}

def pair(query, key, value, **options):
    assert options == {"is_causal": True}
    return kernel(query, key, value, True), np.log([[[1.0, 2.0]]])

def acausal(query, key, value, is_causal):
    return np.repeat(value.mean(axis=2, keepdims=True), 2, axis=2)

def flash(q, k, v, causal=False):
    return q

def tiled(query, key, value, is_causal, block_size):
    return query

def positional(query, key, value, is_causal, /):
    return query

def raises(query, **options):
    def inner():
        raise ValueError("two\\nlines")
    np.vectorize(lambda _: inner())(query)

def leaves(**options):
    sys.exit(0)

def refuses(**options):
    return NotImplemented

def nothing(**options):
    pass

def strange(query, **options):
    return {"out": query}

def ragged(**options):
    return [[1.0], [2.0, 3.0]]

def service(query, key, value, dtype=None, **options):
    assert dtype in (None, "bfloat16")
    assert {array.dtype.name for array in (query, key, value)} == {"bfloat16"}
    return attend(query, key, value, **options)

class Object:
    def __call__(self, query, key, value, is_causal):
        return kernel(query, key, value, is_causal)

inside = Object()
number = 3

def varlen(q, k, v, cu_seqlens_q, cu_seqlens_k, causal, window_size=None, softmax_scale=1.0):
    print("called")
    assert (q.dtype, v.shape, cu_seqlens_k.dtype) == (np.float32, (4, 1, 1), np.int32)
    assert (causal, window_size, softmax_scale) == (True, (-1, 0), 1.0)
    q[:], v[:] = np.nan, np.nan  # its own copies
    return np.float32([[[3]], [[6]], [[7]]]), np.log(np.float32([[2, 1, 2]])) + np.float32([[0, 0, 0]]), None

def top_left(q, cu_seqlens_q, causal):
    return np.float32([[[2]], [[6]], [[7]]])

def decode(q, paged_kv_cache):
    assert type(paged_kv_cache) is tuple and type(paged_kv_cache[0]) is type(q)
    return {"output": paged_kv_cache[1][0, :1]}
"""
TORCH: Final = """
import torch

def varlen(q, v, cu_seqlens_q, **arguments):
    assert (q.dtype, cu_seqlens_q.dtype) == (torch.float32, torch.int32)
    return torch.stack([v[:2].mean(0), v[2], v[2:].mean(0)])

def kernel(query, key, value, is_causal):
    assert query.dtype == torch.bfloat16 and query.device.type == "cpu" and is_causal
    attention = torch.nn.functional.scaled_dot_product_attention
    return attention(query.requires_grad_(), key, value, is_causal=True)

def plain(query, key, value):
    return torch.nn.functional.scaled_dot_product_attention(query, key, value)

def segments(query, key, value, segment_ids):
    assert segment_ids["query"].dtype == torch.int64
    seen = segment_ids["query"][:, None] == segment_ids["key"][None]
    return torch.nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=seen)
"""
Command = Callable[..., tuple[int, str, str]]


@pytest.fixture
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    """Runs a command in a folder with a request and kernels, and returns its exit status and what it prints."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "request.json").write_text(json.dumps(REQUEST))
    for name, text in (("own_kernels", KERNELS), ("torch_kernels", TORCH), ("broken_kernels", "import no_such_module")):
        (tmp_path / f"{name}.py").write_text(text)
        monkeypatch.delitem(sys.modules, name, raising=False)

    def run(*arguments: str, stdin: bytes = b"") -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin)))
        try:
            status = main(arguments)
        except SystemExit as error:  # of argparse
            status = int(str(error.code))
        printed = capsys.readouterr()
        return status, printed.out, printed.err

    return run


@pytest.mark.parametrize("name", ["kernel", "by_name", "pair", "inside"])
def test_a_function_is_called_with_the_fields(name: str, command: Command) -> None:
    status, printed, said = command("compare", "request.json", f"own_kernels:{name}", "--format", "json")
    report = json.loads(printed)
    assert report["verdict"]["ratio"] == 0
    assert list(report["errors"]) == (["output", "logsumexp"] if name == "pair" else ["output"])
    # What the function prints does not spoil the report.
    assert (status, said) == (0, "imported\ncalled\n")


def test_a_wrong_function_is_named_wrong(command: Command) -> None:
    status, printed, _ = command("compare", "request.json", "own_kernels:acausal")
    assert (status, printed.splitlines()[0][:5]) == (1, "wrong")


@pytest.mark.parametrize("suffix", [".json", ".safetensors"])
def test_every_field_reaches_the_function(suffix: str, command: Command) -> None:
    """Also from lists without a type, and within objects."""
    names = ["norm.absent", "rotary.absent", "mask.absent", "window.absent", "sinks.absent", "padding.ignored"]
    fields = make_input(replace(recipe_for(names), dtype="bfloat16"), 0)
    write_request(fields, Path(f"made{suffix}"))
    status, printed, said = command("compare", f"made{suffix}", "own_kernels:service", "--format", "json")
    report = json.loads(printed)
    assert (status, report["verdict"]["status"], said) == (0, "correct", "imported\n")
    assert {"query_norm", "rotary", "mask", "window", "sinks"} <= fields.keys()


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("flash", "expected a parameter for the field query, got (q, k, v, causal=False); give a function of your own"),
        ("positional", "expected a parameter for the field query, got (query, key, value, is_causal)"),
        ("tiled", "expected a field for each parameter without a default, got none for block_size"),
        ("raises", 'raised ValueError: two lines (own_kernels.py, line 36, in inner: raise ValueError("two'),
        ("leaves", "raised SystemExit: 0 (own_kernels.py, line 40, in leaves: sys.exit(0))"),
        ("refuses", "does not support this request: NotImplemented"),
        ("nothing", "expected the output or a dict of arrays, got nothing"),
        ("strange", "/actual/out: expected a known field, got 'out'"),
        ("ragged", "/actual/output/1: expected a row of 1"),
        ("number", "not callable"),
        ("absent", "own_kernels has no absent"),
    ],
)
def test_a_function_that_fails_is_an_error(name: str, said: str, command: Command) -> None:
    status, printed, error = command("compare", "request.json", f"own_kernels:{name}")
    assert (status, printed) == (3, "")
    assert said in error
    assert len(error.removeprefix("imported\n").splitlines()) == 1


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["request.json", "no_such_kernels:kernel"], "No module named 'no_such_kernels'"),
        (["request.json", "own_kernels.py:kernel"], "expected module:function, as in kernels:attention for kernels.py"),
        (["request.json", "broken_kernels:kernel"], "broken_kernels raised ModuleNotFoundError: No module named 'no_s"),
        (["request.json", "broken_kernels:kernel"], "(broken_kernels.py, line 1, in <module>: import no_such_module)"),
        (["request.json", "absent.npy"], "absent.npy: No such file"),
        (["absent.json", "own_kernels:kernel"], "absent.json: No such file"),
        (["request.json", "absent.npy", "--torch"], "--torch: expected ACTUAL to be module:function, got absent.npy"),
        (["request.json", "--device", "cuda"], "--device: expected ACTUAL to be module:function, got none"),
        (["-", "-"], "ACTUAL: expected a file, as REQUEST is standard input, got -"),
        (["-"], "InvalidJSON"),
        ([], "the following arguments are required: REQUEST"),
        (["request.json", "--json"], "unrecognized arguments: --json"),
    ],
)
def test_errors_have_an_exit_status_of_their_own(arguments: list[str], said: str, command: Command) -> None:
    """Usage, too: its usual 2 would be taken for a weak request."""
    status, printed, error = command("compare", *arguments)
    assert (status, printed) == (3, "")
    assert said in error
    assert "Traceback" not in error


def test_a_name_of_a_file_with_a_colon_is_a_file(command: Command) -> None:
    for name in ("own_kernels:kernel", "own:output.json"):
        Path(name).write_text(json.dumps(RIGHT))
    status, _, said = command("compare", "request.json", "own:output.json")
    assert (status, said) == (0, "")
    status, _, said = command("compare", "request.json", "own_kernels:kernel")
    assert (status, "expected a file .json" in said) == (3, True)


def test_conformance_has_errors_of_its_own_status(command: Command) -> None:
    assert command("conformance", "run", "own_kernels:refuses", "--foo")[0] == 3
    status, printed, said = command("conformance", "run", "broken_kernels:kernel")
    assert (status, printed) == (3, "")
    assert "line 1, in <module>" in said
    assert command("conformance", "run", "own_kernels:refuses", "--dir", "absent")[0] == 3


def wire(suffix: str) -> bytes:
    arrays = {name: np.array(REQUEST[name], np.float32) for name in ("query", "key", "value")}
    if suffix == ".safetensors":
        return safetensors.numpy.save(arrays, {"request": '{"is_causal": true}'})
    if suffix == ".json":
        return json.dumps(REQUEST).encode()
    found = io.BytesIO()
    np.savez(found, **arrays, request=np.array('{"is_causal": true}'))  # type: ignore[arg-type]
    return found.getvalue()


@pytest.mark.parametrize("suffix", [".json", ".npz", ".safetensors"])
def test_a_request_is_read_from_standard_input(suffix: str, command: Command) -> None:
    status, printed, _ = command("compare", "-", "own_kernels:kernel", "--format", "json", stdin=wire(suffix))
    assert (status, json.loads(printed)["verdict"]["ratio"]) == (0, 0)
    assert command("heatmap", "-", "-o", "-", stdin=wire(suffix))[0] == 0


def test_an_output_is_read_from_standard_input(command: Command) -> None:
    array, named = io.BytesIO(), io.BytesIO()
    np.save(array, np.array(RIGHT, np.float32))
    np.savez(named, output=np.array(RIGHT, np.float32))
    for content in (array.getvalue(), named.getvalue(), json.dumps(RIGHT).encode(), b'{"output": [[[[2], [3]]]]}'):
        status, printed, _ = command("compare", "request.json", "-", "--format", "json", stdin=content)
        assert (status, json.loads(printed)["verdict"]["ratio"]) == (0, 0)


def test_a_function_is_called_with_the_arguments_of_a_call(command: Command) -> None:
    Path("call.json").write_text(json.dumps(CALL))
    status, printed, said = command("compare", "call.json", "own_kernels:varlen", "--format", "json")
    report = json.loads(printed)
    assert (status, said, list(report["errors"])) == (0, "imported\ncalled\n", ["output", "logsumexp"])
    assert (report["verdict"]["status"], report["metadata"]["dtype"]) == ("correct", "float32")
    status, printed, _ = command("compare", "call.json", "own_kernels:top_left")
    assert (status, "ragged.top_left" in printed) == (1, True)


def test_a_cache_of_two_arrays_is_passed_as_a_pair(command: Command) -> None:
    """Also from a file of tensors, where its arrays have the names 0 and 1. There is one key, so its value is right."""
    pages = np.arange(8, dtype=np.float32).reshape(2, 1, 2, 1, 2)
    numbers = {"indptr": [0, 1], "indices": [0], "last_page_len": [1]}
    table = {name: np.array(array, np.int32) for name, array in numbers.items()}
    given = {"q": np.ones((1, 1, 2), np.float32), "paged_kv_cache": {"0": pages[0], "1": pages[1]}, **table}
    write_request({"call": "flashinfer.BatchDecodeWithPagedKVCacheWrapper.run", "arguments": given}, Path("call.npz"))
    assert command("compare", "call.npz", "own_kernels:decode")[0] == 0


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("raises", "own_kernels:raises raised TypeError: raises() missing 1 required positional argument: 'query'"),
        ("leaves", "own_kernels:leaves raised SystemExit: 0 (own_kernels.py, line 40, in leaves: sys.exit(0))"),
        ("refuses", "does not support this request: NotImplemented"),
        ("nothing", "expected the output or a dict of arrays, got nothing"),
        ("absent", "own_kernels has no absent"),
    ],
)
def test_a_function_that_fails_for_a_call_is_an_error(name: str, said: str, command: Command) -> None:
    Path("call.json").write_text(json.dumps(CALL))
    status, printed, error = command("compare", "call.json", f"own_kernels:{name}")
    assert (status, printed) == (3, "")
    assert said in error


def test_whole_numbers_in_lists_are_indices_only_where_a_function_takes_indices() -> None:
    """JavaScript writes 1.0 as 1."""
    arguments = {
        "q": [[[[1, 0]]]],
        "k_cache": [[[[1, 0]], [[0, 1]]]],
        "v_cache": [[[[1.5, 0.0]], [[0.0, 1.0]]]],
        "block_table": [[0]],
        "cache_seqlens": [2],
        "alibi_slopes": [1],
    }
    fields = {"call": "flash_attn.flash_attn_with_kvcache", "arguments": arguments, "dtype": "float32"}
    decoded = CODECS["application/json"].decode(json.dumps(fields).encode(), 2**20)
    found = {name: str(array.dtype) for name, array in typed_arguments(decoded).items()}
    floats = dict.fromkeys(("q", "k_cache", "v_cache", "alibi_slopes"), "float32")
    assert found == floats | {"block_table": "int32", "cache_seqlens": "int32"}


def test_arguments_are_refused_before_the_function_is_called(command: Command) -> None:
    for changed, said in (
        ({"causl": True}, "/arguments/causl: expected an argument of flash_attn.flash_attn_varlen_func, got 'causl'"),
        ({"cu_seqlens_k": [0, 2, 9]}, "/arguments/cu_seqlens_k/2"),
    ):
        Path("call.json").write_text(json.dumps(CALL | {"arguments": CALL["arguments"] | changed}))
        status, _, error = command("compare", "call.json", "own_kernels:varlen")
        assert (status, said in error, "called" in error) == (3, True, False), error


@pytest.mark.torch
def test_a_function_of_torch_gets_tensors(command: Command) -> None:
    Path("half.json").write_text(json.dumps(REQUEST | {"dtype": "bfloat16"}))
    for flags in (["--torch"], ["--device", "cpu"]):
        status, printed, said = command("compare", "half.json", "torch_kernels:kernel", "--format", "json", *flags)
        assert (status, json.loads(printed)["metadata"]["dtype"]) == (0, "bfloat16"), said
    ids = {"query": [0, 1], "key": [0, 1]}
    Path("ids.json").write_text(json.dumps(REQUEST | {"is_causal": False, "segment_ids": ids}))
    status, printed, said = command("compare", "ids.json", "torch_kernels:segments", "--format", "json", "--torch")
    assert json.loads(printed)["verdict"]["ratio"] < 1, said
    Path("call.json").write_text(json.dumps(CALL))
    assert command("compare", "call.json", "torch_kernels:varlen", "--torch")[0] == 0
    for device in ("no_such_device", "cuda:99"):
        status, _, said = command("compare", "half.json", "torch_kernels:kernel", "--device", device)
        assert (status, f"--device: expected a device that torch has, got {device}" in said) == (3, True)
    command("conformance", "write", "cases", "--cases", "5")
    judge = ("conformance", "run", "torch_kernels:plain", "--dir", "cases", "--torch", "--format", "json")
    status, printed, said = command(*judge)
    assert (status, json.loads(printed)["counts"]["correct"]) == (0, 3), said


@pytest.mark.torch
def test_a_file_of_torch_may_hold_the_request_beside_the_outputs(command: Command) -> None:
    import torch

    request = {name: torch.tensor(REQUEST[name]) for name in ("query", "key", "value")} | {"is_causal": True}
    logsumexp = torch.tensor([[[0.0, np.log(2)]]])
    torch.save({"request": request, "output": torch.tensor(RIGHT), "logsumexp": logsumexp, "seed": 3}, "case.pt")
    status, printed, _ = command("compare", "case.pt", "--format", "json")
    assert (status, list(json.loads(printed)["errors"])) == (0, ["output", "logsumexp"])
    Path("wrong.json").write_text(json.dumps([[[[2.0], [2.0]]]]))
    assert command("compare", "case.pt", "wrong.json")[0] == 1
    assert command("compare", "request.json", "case.pt")[0] == 0
    assert command("compare", "case.pt", "own_kernels:acausal")[0] == 1
    assert command("heatmap", "case.pt", "-o", "-")[0] == 0
    torch.save({"request": torch.zeros(2), "output": torch.zeros(2)}, "case.pt")
    status, _, said = command("compare", "case.pt")
    assert (status, "/request: expected a dict of the request's fields" in said) == (3, True)


@pytest.mark.parametrize("first", ["function", "file"])
def test_a_function_may_be_the_other_answer(first: str, command: Command, tmp_path: Path) -> None:
    """It is the mean of all values here. The first answer is kept, whether it is a file or a function."""
    actual = "own_kernels:kernel"
    if first == "file":
        np.save(tmp_path / "right.npy", np.array(RIGHT, np.float32))
        actual = "right.npy"
    status, printed, _ = command("compare", "request.json", actual, "--against", "own_kernels:acausal")
    assert status == 1
    assert "against:" in printed
    assert "The answer in against: Wrong: the output is the mean of all values" in printed
    status, printed, _ = command(
        "compare", "request.json", actual, "--against", "own_kernels:acausal", "--format", "junit"
    )
    suite = ElementTree.fromstring(printed).find("testsuite")
    assert (status, suite.get("tests"), suite.get("failures")) == (1, "2", "1")  # type: ignore[union-attr]
