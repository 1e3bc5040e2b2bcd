"""POST /attention/call/compare, and `attention-service compare`: reports, errors by name, bounded memory."""

from __future__ import annotations

import json
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from attention_service.cli import main
from attention_service.codecs.decoded import Decoded
from attention_service.comparison.calls.compare import compare_call
from attention_service.comparison.calls.parts import call_bytes, parts
from attention_service.comparison.calls.question import CallQuestion, make_call_question
from attention_service.comparison.operation import CompareCallOperation
from attention_service.engines.table import decode
from attention_service.errors import InvalidRequest
from attention_service.schemas.compare import CompareCallRequest, CompareRequest, Judging
from tests.conftest import serving_freed
from tests.helpers.engine_calls import Draw
from tests.helpers.engine_draws import DRAWS
from tests.helpers.wire import JSON, MEDIA_TYPES, SAFETENSORS, write
from tests.test_compare_calls import BACKEND, RAGGED, VARLEN, bottom_right, in_axes, varlen
from tests.test_engines_hostile import damaged
from tests.test_engines_wire import as_json
from tests.test_operations import problem

OUTPUT, SUMS = varlen(bottom_right)


@pytest.fixture(scope="module")
def client() -> Iterator[httpx.Client]:
    with serving_freed() as client:
        yield client


def post(client: httpx.Client, media_type: str = JSON, **fields: Any) -> httpx.Response:
    fields = {"call": VARLEN, "arguments": RAGGED, **fields}
    content = json.dumps(as_json(fields)).encode() if media_type == JSON else write(fields, media_type)
    return client.post("/attention/call/compare", content=content, headers={"content-type": media_type})


@pytest.mark.parametrize("media_type", MEDIA_TYPES)
def test_reports_in_every_format(client: httpx.Client, media_type: str) -> None:
    right = post(client, media_type, actual={"output": OUTPUT, "logsumexp": SUMS}).json()
    assert right["verdict"]["status"] == "correct"
    about = {name: right["metadata"][name] for name in ("call", "batch_size", "ignored_rows", "dtype", "num_heads")}
    assert about == {"call": VARLEN, "batch_size": 4, "ignored_rows": 0, "dtype": "float32", "num_heads": 4}
    wrong = post(client, media_type, actual={"output": varlen(lambda n: 0)[0]}).json()
    assert wrong["hypotheses"][0]["name"] == "ragged.top_left"
    assert wrong["where"][0]["axes"] == ["sequence", "head", "query", "feature"]
    power = post(client, media_type).json()
    assert "ragged.top_left" not in power["power"]["survivors"]
    assert power["verdict"]["status"] == "inconclusive"


def test_numbers_in_lists_are_float64(client: httpx.Client) -> None:
    """A null in the logsumexp is minus infinity, which FlashAttention returns as plus infinity."""
    arguments = {
        "q": [[[1.0]], [[2.0]]],
        "k": [[[0.5]]],
        "v": [[[3.0]]],
        "cu_seqlens_q": [0, 2],
        "cu_seqlens_k": [0, 1],
    }
    content = {"call": VARLEN, "arguments": {**arguments, "causal": True}}
    actual = {"output": [[[0.0]], [[3.0]]], "logsumexp": [[None, 1.0]]}
    answer = client.post("/attention/call/compare", json=content | {"actual": actual}).json()
    assert (answer["verdict"]["status"], answer["metadata"]["dtype"]) == ("correct", "float64")
    assert answer["reference"] is None
    assert (
        client.post("/attention/call/compare", json=content | {"actual": actual, "reference": True}).json()["reference"]
        == actual
    )
    spare = content | {"arguments": arguments | {"q": [[[1.0]], [[2.0]], [[9.0]]], "causal": True}, "reference": True}
    reference = client.post("/attention/call/compare", json=spare).json()["reference"]
    assert reference == {"output": [[[0.0]], [[3.0]], [[None]]]}  # the last row belongs to no sequence
    actual = {"output": np.array([[[0.0]], [[3.0]]]), "logsumexp": np.array([[np.inf, 1.0]])}
    assert post(client, SAFETENSORS, **content, actual=actual).json()["verdict"]["status"] == "correct"


@pytest.mark.parametrize(
    ("fields", "pointer", "text"),
    [
        ({"is_causal": True}, "/is_causal", "stands in arguments"),
        ({"logsumexp_base": "2"}, "/logsumexp_base", "stands in arguments"),
        ({"against": {"output": OUTPUT}}, "/against", "stands in arguments"),
        ({"query": OUTPUT}, "/query", "stands in arguments"),
        ({"layer": "x"}, "/layer", "stored layers"),
        ({"arguments": None}, "/arguments", "a dictionary null"),
        ({"call": None}, "/call", "a string null"),
        ({"actual": {}}, "/actual", "output or logsumexp"),
        ({"actual": {"attention_weights": OUTPUT}}, "/actual/attention_weights", "a known field"),
        ({"actual": {"output": OUTPUT[1:]}}, "/actual/output", "(14, 4, 8), as the function returns it"),
        ({"actual": {"logsumexp": SUMS.T}}, "/actual/logsumexp", "(4, 14)"),
        ({"arguments": {**RAGGED, "causal": 3}}, "/arguments/causal", "true or false"),
        ({"arguments": {**RAGGED, "cu_seqlens_k": np.array([0, 9, 14, 26, 99])}}, "/arguments/cu_seqlens_k/4", "33"),
        (
            {"arguments": {**RAGGED, "k": np.full((33, 2, 8), np.nan)}, "actual": {"output": OUTPUT}},
            "/arguments/k",
            "nan",
        ),
        ({"time_limit": -1}, "/time_limit", "at least 0"),
        ({"dtype": "float8"}, "/dtype", "bfloat16"),
    ],
)
def test_what_does_not_apply_is_refused_by_name(
    client: httpx.Client, fields: dict[str, Any], pointer: str, text: str
) -> None:
    answer = post(client, SAFETENSORS, **fields)
    assert answer.status_code == 422, answer.text
    (fault,) = answer.json()["errors"]
    assert fault["pointer"] == pointer
    assert text in f"{fault['expected']} {fault['got']} {fault.get('hint')}"


def test_every_other_field_is_refused() -> None:
    for name in CompareRequest.model_fields.keys() - CompareCallRequest.model_fields.keys():
        decoded = Decoded({"call": VARLEN, "arguments": RAGGED, name: _any_value(name)}, frozenset())
        with pytest.raises(InvalidRequest) as caught:
            CompareCallOperation(BACKEND).prepare(decoded)
        assert caught.value.faults[0].pointer.startswith(f"/{name}")


def _any_value(name: str) -> Any:
    return {"against": {"output": OUTPUT}, "logsumexp_base": "2"}.get(name, True)


def test_a_time_limit_ends_the_search_not_the_verdict(client: httpx.Client) -> None:
    report = post(client, actual={"output": varlen(lambda n: 0)[0]}, time_limit=0).json()
    assert (report["verdict"]["status"], report["ended_early"], report["hypotheses"]) == ("wrong", True, [])
    right = post(client, actual={"output": OUTPUT}, time_limit=0).json()
    assert (right["verdict"]["status"], right["ended_early"]) == ("correct", False)


def test_own_tolerances_and_types(client: httpx.Client) -> None:
    rounded = OUTPUT.astype(np.float16).astype(np.float32)
    report = post(client, actual={"output": rounded}, tolerance={"atol": 1e-2}).json()
    assert report["verdict"]["status"] != "correct"
    assert {test["name"]: test["passes"] for test in report["tests"]}["yours"] is True
    assert post(client, actual={"output": rounded}, dtype="float16").json()["verdict"]["status"] == "correct"


def test_the_command_line_judges_calls(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fields = {"call": VARLEN, "arguments": RAGGED}
    for name, answer in (("right", OUTPUT), ("wrong", varlen(lambda n: 0)[0])):
        np.save(tmp_path / f"{name}.npy", answer)
    (tmp_path / "call.safetensors").write_bytes(write(fields, SAFETENSORS))
    assert main(["compare", str(tmp_path / "call.safetensors"), str(tmp_path / "right.npy")]) == 0
    assert capsys.readouterr().err == ""
    assert main(["compare", str(tmp_path / "call.safetensors"), str(tmp_path / "wrong.npy")]) == 1
    assert "proof: ragged.top_left" in capsys.readouterr().out


def asked(queries: list[int], keys: list[int], heads: int = 2, features: int = 8) -> CallQuestion:
    """The question about a right answer of zeros: all values are 0."""
    total_q, total_k = sum(queries), sum(keys)
    arguments = {
        "q": np.ones((total_q, heads, features), np.float32),
        "k": np.ones((total_k, heads, features), np.float32),
        "v": np.zeros((total_k, heads, features), np.float32),
        "cu_seqlens_q": np.cumsum([0, *queries]),
        "cu_seqlens_k": np.cumsum([0, *keys]),
    }
    returned = {"output": np.zeros((total_q, heads, features), np.float32)}
    return make_call_question(VARLEN, decode(VARLEN, arguments), returned)


@pytest.mark.parametrize(
    ("queries", "keys"),
    [([1] * 4097, [8000] + [1] * 4096), ([700] + [1] * 3000, [700] + [1] * 3000), ([3] * 50, [0] * 25 + [900] * 25)],
)
def test_padding_takes_no_more_memory_than_was_estimated(queries: list[int], keys: list[int]) -> None:
    """A long sequence beside many short ones is a part of its own; padded to one length they would take gigabytes."""
    question = asked(queries, keys)
    found = [part.tolist() for part in parts(question.addressed)]
    assert sorted(n for part in found for n in part) == list(range(len(queries)))
    assert len(found) <= 3
    estimate = call_bytes(question, 1)
    tracemalloc.start()
    report = compare_call(question, BACKEND)
    assert report.worst is not None
    assert report.worst.status == "correct"
    assert tracemalloc.get_traced_memory()[1] < estimate < 2**30
    tracemalloc.stop()


@pytest.mark.parametrize("name", DRAWS)
def test_damaged_calls_are_judged_or_refused(name: str) -> None:
    for seed in range(12):
        drawn = DRAWS[name](Draw(seed))
        output, sums = in_axes(drawn, np.dtype(np.float32))
        random = np.random.default_rng(seed)
        changed = str(random.choice(sorted(drawn.arguments)))
        drawn.arguments[changed] = damaged(drawn.arguments[changed], random)
        try:
            call = decode(drawn.function, drawn.arguments, drawn.version)
            returned = {"output": output, "logsumexp": sums}
            question = make_call_question(drawn.function, call, returned, judging=Judging(time_limit=0))
            assert call_bytes(question, 1) > 0
            compare_call(question, BACKEND)
        except InvalidRequest:
            pass
        except Exception as error:
            raise AssertionError(f"{name} {seed}") from error


def test_stored_layers_are_refused(client: httpx.Client) -> None:
    assert problem(post(client, layer="x"))[0] == 422


@pytest.mark.slow
def test_the_search_takes_no_more_memory_than_was_estimated() -> None:
    """Sequences of some thousand keys, whose answer is that of no known mistake."""
    question = asked([2] * 6, [3000, 2000, 10, 4000, 3500, 1])
    random = np.random.default_rng(0)
    returned = {"output": random.normal(size=(12, 2, 8)).astype(np.float32)}
    question = make_call_question(VARLEN, question.call, returned)
    estimate = call_bytes(question, 1)
    tracemalloc.start()
    found = compare_call(question, BACKEND)
    assert found.worst is not None
    assert found.worst.status == "wrong"
    assert tracemalloc.get_traced_memory()[1] < estimate < 2**30
    tracemalloc.stop()


def test_parts_hold_every_sequence_once_and_little_padding() -> None:
    random = np.random.default_rng(0)
    for most in (3, 50, 3000):
        queries, keys = (random.integers(0, most, size=9000 if most < 9 else 60).tolist() for _ in "qk")
        call = asked(queries, keys).addressed
        found = [part.tolist() for part in parts(call)]
        assert sorted(n for part in found for n in part) == [n for n, q in enumerate(queries) if q]
        for part in found:
            shapes = [(queries[n], max(keys[n], 1)) for n in part]
            q, k = (max(column) for column in zip(*shapes, strict=True))
            each = [q * 2 * (16 + k) + k * 32 for q, k in shapes]  # queries, scores, keys and values of 2 heads
            padded = len(part) * (q * 2 * (16 + k) + k * 32)
            assert len(part) == 1 or padded <= max(2**18, 2 * sum(each))
            assert len(part) == 1 or padded <= 2**22
            assert len(part) <= 4096
