"""POST /attention/call: every function in every wire format gives what call() gives, within all limits."""

from __future__ import annotations

import json
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from pydantic import BaseModel

from attention_service import call
from attention_service.backends.numpy.backend import NumpyBackend
from attention_service.cli import main
from attention_service.codecs.decoded import Decoded
from attention_service.codecs.table import CODECS
from attention_service.engines.call import MOST
from attention_service.errors import InvalidRequest
from attention_service.pipeline.engine import Engine
from attention_service.schemas.call import CallRequest
from attention_service.schemas.compare import CompareCallRequest, CompareRequest
from attention_service.schemas.heatmap import HeatmapRequest
from attention_service.schemas.request import AttentionRequest
from attention_service.settings import Settings
from tests.conftest import app, serving, serving_freed
from tests.helpers.engine_calls import Draw
from tests.helpers.engine_draws import DRAWS
from tests.helpers.waiting import pass_deadlines
from tests.helpers.wire import JSON, MEDIA_TYPES, NPZ, SAFETENSORS, typed_array, write
from tests.test_engines_hostile import damaged
from tests.test_operations import problem
from tests.test_requests_freed import assert_freed

VARLEN = "flash_attn.flash_attn_varlen_func"


@pytest.fixture(scope="module")
def client() -> Iterator[httpx.Client]:
    with serving_freed() as client:
        yield client


def arguments(seed: int = 0, **more: Any) -> dict[str, Any]:
    """Sequences of 3, 0 and 4 queries, 2, 4 and 3 keys."""
    random = np.random.default_rng(seed)
    q, k, v = random.normal(size=(7, 4, 8)), random.normal(size=(9, 2, 8)), random.normal(size=(9, 2, 5))
    bounds = {"cu_seqlens_q": np.array([0, 3, 3, 7], np.int32), "cu_seqlens_k": np.array([0, 2, 6, 9], np.int32)}
    return {"q": q, "k": k, "v": v, "causal": True, **bounds, **more}


def as_json(value: Any) -> Any:
    """Arguments with typed arrays, and a pair of arrays as two of them."""
    if isinstance(value, np.ndarray | np.generic):
        return typed_array(np.asarray(value)) if np.ndim(value) else value.item()
    if isinstance(value, tuple | list):
        return [as_json(item) for item in value]
    return {name: as_json(item) for name, item in value.items()} if isinstance(value, dict) else value


def written(fields: dict[str, Any], media_type: str) -> bytes:
    """A body; a pair of arrays has the names 0 and 1 in formats of tensors."""
    if media_type == JSON:
        return json.dumps(as_json(fields)).encode()
    pairs = {
        name: dict(zip("01", value, strict=True))
        for name, value in fields["arguments"].items()
        if isinstance(value, tuple) and isinstance(value[0], np.ndarray)
    }
    return write({**fields, "arguments": {**fields["arguments"], **pairs}}, media_type)


def post(client: httpx.Client, media_type: str = JSON, accept: str = SAFETENSORS, **fields: Any) -> httpx.Response:
    headers = {"content-type": media_type, "accept": accept}
    return client.post("/attention/call", content=written(fields, media_type), headers=headers)


def tensors(answer: httpx.Response) -> dict[str, np.ndarray]:
    from safetensors.numpy import load

    assert answer.status_code == 200, answer.text
    return load(answer.content)


@pytest.mark.parametrize("media_type", MEDIA_TYPES)
@pytest.mark.parametrize("name", DRAWS)
def test_every_function_in_every_format_gives_what_call_gives(client: httpx.Client, name: str, media_type: str) -> None:
    for seed in range(5):
        drawn = DRAWS[name](Draw(seed))
        if media_type == NPZ and any(one.query.dtype.isbuiltin != 1 for one in drawn.sequences):
            continue  # which has neither bfloat16 nor float8
        version = {} if drawn.version is None else {"version": drawn.version}
        include = ["attention_weights"]
        fields: dict[str, Any] = {"call": drawn.function, "arguments": drawn.arguments, "include": include, **version}
        found = tensors(post(client, media_type, **fields))
        wanted = call(drawn.function, version=drawn.version, include=include, **drawn.arguments)
        assert wanted.attention_weights is not None
        assert np.array_equal(found["output"], wanted.output, equal_nan=True), (name, seed)
        assert np.array_equal(found["logsumexp"], wanted.logsumexp, equal_nan=True), (name, seed)
        for n, weights in enumerate(wanted.attention_weights):
            assert np.array_equal(found[f"attention_weights.{n}"], weights), (name, seed, n)


def test_json_has_a_list_of_weights_and_null_for_what_is_not_finite(client: httpx.Client) -> None:
    answer = post(client, accept=JSON, call=VARLEN, arguments=arguments(), include=["attention_weights"]).json()
    assert [np.array(weights).shape for weights in answer["attention_weights"]] == [(4, 3, 2), (4, 0), (4, 4, 3)]
    assert answer["logsumexp"][0][0] is None
    assert answer["output"][0] == [[0.0] * 5] * 4
    about = answer["metadata"]
    assert (about["batch_size"], about["num_heads"], about["num_kv_heads"], about["head_dim"]) == (3, 4, 2, 8)
    assert (about["query_length"], about["key_length"], about["fully_masked_rows"]) == (4, 4, 8)
    fields: dict[str, Any] = {"call": VARLEN, "arguments": arguments(), "include": ["attention_weights"]}
    fields["encoding"] = "base64"
    typed = post(client, accept=JSON, **fields, dtype="float32").json()
    assert {one["dtype"] for one in [typed["output"], typed["logsumexp"], *typed["attention_weights"]]} == {"float32"}


def test_rows_without_a_key_are_counted_beside_sinks(client: httpx.Client) -> None:
    """Of 4 heads: the first query of 3 that see 2 keys, and both of the sequence without keys."""
    given = arguments(cu_seqlens_q=[0, 3, 5], cu_seqlens_k=[0, 2, 2], learnable_sink=np.zeros(4))
    answer = post(client, accept=JSON, call=VARLEN, arguments=given).json()
    assert answer["metadata"]["fully_masked_rows"] == 4 * 3


def test_parts_are_merged(client: httpx.Client) -> None:
    given = {"v_a": [[[4.0]]], "s_a": [[0.0]], "v_b": [[[0.0]]], "s_b": [[np.log2(3)]]}
    answer = post(client, accept=JSON, call="flashinfer.merge_state", arguments=given).json()
    assert answer["output"] == [[[pytest.approx(1.0)]]]
    assert answer["logsumexp"] == [[pytest.approx(2.0)]]


def test_parts_are_merged_within_memory_and_deadline() -> None:
    """As POST /attention/merge: a lease before they are merged, the deadline before each, and as many at most."""
    operation = Engine(Settings.model_construct()).call

    def prepared(parts: int) -> Any:
        arrays = {"v": np.ones((1000, parts, 2, 4)), "s": np.zeros((1000, parts, 2))}
        return operation.prepare(Decoded({"call": "flashinfer.merge_states", "arguments": arrays}, frozenset()))

    request = prepared(50)
    cost = operation.cost(request, CODECS[SAFETENSORS])
    checks: list[int] = []
    tracemalloc.start()
    operation.compute(request, lambda: checks.append(1))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak <= cost.compute <= 4 * peak
    assert cost.flops >= 1000 * 50 * 2 * 4
    assert len(checks) >= 50
    with pytest.raises(InvalidRequest, match="1 to 1024 parts") as caught:
        prepared(1025)
    assert caught.value.faults[0].pointer == "/arguments/v"


@pytest.mark.parametrize(
    ("fields", "pointer", "text"),
    [
        ({"call": VARLEN}, "/arguments", "this field"),
        ({"arguments": arguments()}, "/call", "this field"),
        ({"call": "flash_attn.flash_attn_fun", "arguments": {}}, "/call", "did you mean"),
        ({"call": VARLEN, "arguments": arguments(), "scale": 1}, "/scale", "stands in arguments"),
        ({"call": VARLEN, "arguments": arguments(), "layer": "x"}, "/layer", "stored layers"),
        ({"call": VARLEN, "arguments": None}, "/arguments", "a dictionary, got null"),
        ({"call": VARLEN, "arguments": arguments(), "version": 5}, "/version", "at most 4"),
        ({"call": "vllm.attention", "arguments": {}, "version": 2}, "/version", "none"),
        ({"call": VARLEN, "arguments": arguments(scale=1)}, "/arguments/scale", "an argument of"),
        ({"call": VARLEN, "arguments": arguments(softmax_scale="1")}, "/arguments/softmax_scale", "numbers"),
        ({"call": VARLEN, "arguments": arguments(cu_seqlens_q=[0, 9])}, "/arguments/cu_seqlens_q/1", "at most 7"),
        ({"call": VARLEN, "arguments": arguments(), "include": ["scores"]}, "/include/0", "logsumexp"),
        ({"call": VARLEN, "arguments": 3}, "/arguments", "dictionary"),
        ({"call": 3, "arguments": {}}, "/call", "string"),
    ],
)
def test_faults_point_into_the_arguments(client: httpx.Client, fields: Any, pointer: str, text: str) -> None:
    content = json.dumps(as_json(fields))
    answer = client.post("/attention/call", content=content, headers={"content-type": JSON})
    assert answer.status_code == 422, answer.text
    (fault,) = answer.json()["errors"]
    assert fault["pointer"] == pointer
    assert text in answer.json()["detail"]


def test_what_generated_clients_send_unasked_says_nothing(client: httpx.Client) -> None:
    """Clients in Java and C# send null for absent fields, an empty list for some, and each default."""

    def unasked(model: type[BaseModel]) -> dict[str, Any]:
        fields = {name: field.default for name, field in model.model_fields.items() if not field.is_required()}
        return {name: list(value) if isinstance(value, tuple) else value for name, value in fields.items()}

    direct = {"query": [[1.0]], "key": [[1.0]], "value": [[2.0]]}
    assert client.post("/attention", json=unasked(AttentionRequest) | direct).json()["output"] == [[2.0]]
    right = direct | {"actual": {"output": [[2.0]], "logsumexp": None}, "legal": []}
    assert client.post("/attention/compare", json=unasked(CompareRequest) | right).status_code == 200
    assert client.post("/attention/heatmap", json=unasked(HeatmapRequest) | direct).status_code == 200
    parts = {"v_a": [[[4.0]]], "s_a": [[0.0]], "v_b": [[[0.0]]], "s_b": [[0.0]]}
    call = {"call": "flashinfer.merge_state", "arguments": parts}
    assert client.post("/attention/call", json=unasked(CallRequest) | call).json()["output"] == [[[2.0]]]
    judged = call | {"actual": {"output": [[[2.0]]], "logsumexp": None}, "legal": []}
    report = client.post("/attention/call/compare", json=unasked(CompareCallRequest) | judged).json()
    assert report["verdict"]["status"] == "correct"


@pytest.mark.parametrize("beside", ["", "/compare"])
def test_a_request_on_the_path_of_another_is_told_where_it_belongs(client: httpx.Client, beside: str) -> None:
    """A call at the path of requests, and a request at the path of calls."""
    call = {"call": VARLEN, "arguments": {"q": [[[1.0]]]}}
    answer = client.post(f"/attention{beside}", json=call)
    assert (answer.status_code, f"POST /attention/call{beside})" in answer.json()["detail"]) == (422, True)
    assert [fault["pointer"] for fault in answer.json()["errors"]] == ["/call", "/arguments"]
    answer = client.post(f"/attention/call{beside}", json={"input": [[1.0]], "is_causal": True})
    assert (answer.status_code, f"POST /attention{beside})" in answer.json()["detail"]) == (422, True)
    assert [fault["pointer"] for fault in answer.json()["errors"]] == ["/call", "/arguments", "/input", "/is_causal"]


def test_a_cache_in_lists_is_refused_where_it_may_be_a_pair(client: httpx.Client) -> None:
    """Keys of 0, and values of 1 and 3 in two pages of one token: 2, as one cache and as a pair, in arrays.

    As a pair the array would be keys of 0 and 1, values of 0 and 3.
    """
    function = "flashinfer.BatchDecodeWithPagedKVCacheWrapper.run"
    pair = (np.zeros((2, 1, 1, 1)), np.array([1.0, 3.0]).reshape(2, 1, 1, 1))
    cache = np.stack(pair, axis=1)
    where: dict[str, Any] = {"q": [[[1.0]]], "indptr": [0, 2], "indices": [0, 1], "last_page_len": [1]}
    fields: dict[str, Any] = {"call": function, "arguments": where}
    for right in (cache, pair):
        fields["arguments"] = where | {"paged_kv_cache": right}
        assert tensors(post(client, **fields))["output"].ravel().tolist() == [2.0]
    for wrong in (cache, np.stack(pair)):
        fields["arguments"] = where | {"paged_kv_cache": wrong.tolist()}
        answer = client.post("/attention/call", json=fields)
        assert answer.status_code == 422, answer.text
        (fault,) = answer.json()["errors"]
        assert (fault["pointer"], fault["hint"]) == (
            "/arguments/paged_kv_cache",
            "a pair is two arrays, in JSON typed ones",
        )
    three = np.zeros((3, 2, 1, 1, 1))
    three[:, 1] = 2
    fields["arguments"] = where | {"paged_kv_cache": three.tolist()}
    assert tensors(post(client, **fields))["output"].ravel().tolist() == [2.0]


def test_null_is_the_default_of_every_field(client: httpx.Client) -> None:
    absent: dict[str, Any] = dict.fromkeys(CallRequest.model_fields.keys() - {"call", "arguments"})
    found = tensors(post(client, **absent, call=VARLEN, arguments=arguments()))
    assert np.array_equal(found["output"], call(VARLEN, **arguments()).output, equal_nan=True)


@pytest.mark.parametrize(("masks", "entry"), [(2, 0), (2, 1), (1, 0)])
def test_a_number_of_a_mask_is_named_with_its_place(client: httpx.Client, masks: int, entry: int) -> None:
    mask = np.zeros((masks, 1, 3, 3))
    mask[entry, 0, 1, 2] = np.nan
    given: dict[str, Any] = dict.fromkeys(("query", "key", "value"), np.ones((2, 1, 3, 4)))
    answer = post(client, call="torch.scaled_dot_product_attention", arguments=given | {"attn_mask": mask})
    assert answer.status_code == 422, answer.text
    (fault,) = answer.json()["errors"]
    assert fault["pointer"] == f"/arguments/attn_mask/{entry}/0/1/2"


def test_other_operations_take_no_calls(client: httpx.Client) -> None:
    content = json.dumps({"call": VARLEN, "arguments": {}, "query": [[1.0]], "key": [[1.0]], "value": [[1.0]]})
    answer = client.post("/attention/heatmap", content=content, headers={"content-type": JSON})
    assert problem(answer) == (422, "unknown_field")
    for name in CallRequest.model_fields.keys() - AttentionRequest.model_fields.keys():
        assert name not in json.dumps(client.get("/v2/models/attention").json()["inputs"])


def test_the_command_line_computes_calls(tmp_path: Path, capsysbinary: pytest.CaptureFixture[bytes]) -> None:
    (tmp_path / "call.json").write_text(json.dumps(as_json({"call": VARLEN, "arguments": arguments()})))
    assert main(["compute", str(tmp_path / "call.json")]) == 0
    printed = json.loads(capsysbinary.readouterr().out)
    np.testing.assert_array_equal(printed["output"], call(VARLEN, **arguments()).output)


def test_damaged_calls_never_fail(client: httpx.Client) -> None:
    statuses = set()
    for name in DRAWS:
        for seed in range(12):
            drawn, random = DRAWS[name](Draw(seed)), np.random.default_rng(seed)
            changed = str(random.choice(sorted(drawn.arguments)))
            drawn.arguments[changed] = damaged(drawn.arguments[changed], random)
            try:
                content = written({"call": drawn.function, "arguments": drawn.arguments}, JSON)
            except (TypeError, ValueError, AttributeError):
                continue  # JSON has no such value
            answer = client.post("/attention/call", content=content, headers={"content-type": JSON})
            statuses.add(answer.status_code)
            assert answer.status_code in (200, 400, 422), (name, seed, answer.text)
    assert {200, 422} <= statuses


def test_a_table_that_names_one_page_a_million_times_is_refused_by_its_estimate() -> None:
    """A body of 4 MB, whose sequence would have 2**28 tokens."""
    made = app(memory_limit=2**28)
    cache = np.ones((1, 256, 1, 8), np.float16)
    given = {
        "q": np.ones((1, 1, 1, 8)),
        "k_cache": cache,
        "v_cache": cache,
        "page_table": np.zeros((1, 2**20), np.int32),
    }
    with serving(made) as client:
        answer = post(client, SAFETENSORS, call="flash_attn.flash_attn_with_kvcache", arguments=given)
        assert problem(answer) == (413, "memory_limit")
        given["page_table"] = np.zeros((64, 8), np.int32)  # one after the other they need little
        given["q"] = np.ones((64, 1, 1, 8))
        answer = post(client, SAFETENSORS, call="flash_attn.flash_attn_with_kvcache", arguments=given)
        assert tensors(answer)["output"].shape == (64, 1, 1, 8)
        assert made.state.engine.admission.free == made.state.engine.admission.memory


def large(name: str) -> dict[str, Any]:
    """A call that takes more than 8 MiB."""
    random = np.random.default_rng(0)
    q, k = (random.normal(size=(1024, heads, 64)).astype(np.float16) for heads in (8, 2))
    if name == "pages":
        table = random.integers(0, 64, (16, 64)).astype(np.int32)
        caches = {n: random.normal(size=(64, 16, 2, 64)).astype(np.float16) for n in ("key_cache", "value_cache")}
        where = {"query_start_loc": np.arange(17) * 64, "seq_lens": np.full(16, 1024), "block_table": table}
        return {"call": "vllm.attention", "arguments": {"query": q, **caches, **where}}
    if name == "entries":
        mask = random.random((4, 1, 1024, 1024)) < 0.5
        arrays = dict.fromkeys(("query", "key", "value"), random.normal(size=(4, 1, 1024, 256)))
        return {"call": "torch.scaled_dot_product_attention", "arguments": {**arrays, "attn_mask": mask}}
    if name == "mask":
        where = {"qo_indptr": np.array([0, 1024]), "kv_indptr": np.array([0, 1024])}
        mask = np.full(1024 * 128, 255, np.uint8)
        function = "flashinfer.BatchPrefillWithRaggedKVCacheWrapper.run"
        return {"call": function, "arguments": {"q": q, "k": k, "v": k, "packed_custom_mask": mask, **where}}
    if name == "empty":
        bounds = np.zeros(2**17, np.int32)
        given = {"q": q[:0], "k": k[:0], "v": k[:0], "cu_seqlens_q": bounds, "cu_seqlens_k": bounds}
        return {"call": VARLEN, "arguments": given}
    cuts = {"one": [1024], "two": [600, 424], "many": [16] * 64, "weights": [600, 424]}[name]
    bounds = np.concatenate([[0], np.cumsum(cuts)])
    given = {"q": q, "k": k, "v": k, "cu_seqlens_q": bounds, "cu_seqlens_k": bounds, "causal": True}
    return {"call": VARLEN, "arguments": given, "include": ["attention_weights"] if name == "weights" else []}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["pages", "entries", "mask", "one", "two", "many", "weights", "empty"])
def test_a_call_takes_no_more_memory_than_its_estimate(name: str) -> None:
    operation = Engine(Settings.model_construct()).call
    request = operation.prepare(Decoded(large(name), frozenset()))
    cost = operation.cost(request, CODECS[SAFETENSORS])
    tracemalloc.start()
    checks: list[int] = []
    result = operation.compute(request, lambda: checks.append(1))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.reset_peak()
    operation.encode(request, result, CODECS[SAFETENSORS], "")
    _, encoding = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak <= cost.compute <= 4 * peak
    assert encoding <= cost.results + cost.encode
    if name == "empty":
        assert len(checks) >= 2**17 / MOST


def test_a_call_ends_at_its_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sequences of many lengths: between them the deadline is checked."""
    execute, computed = NumpyBackend.execute, []

    def last(self: NumpyBackend, *given: Any) -> Any:
        computed.append(execute(self, *given))
        pass_deadlines(monkeypatch)
        return computed[-1]

    monkeypatch.setattr(NumpyBackend, "execute", last)
    lengths = np.arange(1, 200)
    bounds = np.concatenate([[0], np.cumsum(lengths)])
    tokens = np.ones((bounds[-1], 1, 1))
    given = {"q": tokens, "k": tokens, "v": tokens, "cu_seqlens_q": bounds, "cu_seqlens_k": bounds}
    with serving(app()) as client:
        assert problem(post(client, SAFETENSORS, call=VARLEN, arguments=given)) == (504, "time_limit")
    assert len(computed) == 1


def test_a_call_is_freed(client: httpx.Client) -> None:
    for _ in range(2):  # the first fills caches
        with assert_freed():
            assert post(client, call=VARLEN, arguments=arguments()).status_code == 200
