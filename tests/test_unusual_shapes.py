"""Arrays with unusual axes: bounds on counts, what preparing costs by shapes alone, and what is written of them.

tests/attack/test_hostile_shapes.py sends such requests to a whole service.
"""

from __future__ import annotations

import asyncio
import json
import tracemalloc
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from attention_service import attend, call, merge
from attention_service.attention.arrays import MAX_COUNT, norm, norms
from attention_service.backends.base import Check, no_check
from attention_service.backends.registry import Backends
from attention_service.codecs.chunks import MAX_CHUNK
from attention_service.codecs.decoded import Decoded, arrays_in
from attention_service.codecs.json import writer
from attention_service.codecs.table import CODECS
from attention_service.comparison.calls.compare import compare_call
from attention_service.comparison.calls.parts import call_bytes
from attention_service.comparison.calls.question import make_call_question
from attention_service.comparison.calls.report import make_call_report
from attention_service.comparison.operation import CompareCallOperation
from attention_service.engines.call import Call
from attention_service.engines.table import decode
from attention_service.errors import InvalidRequest, ServiceError, TimeLimit
from attention_service.layers.layer import Layer
from attention_service.pipeline.admission import AdmissionController
from attention_service.pipeline.attention import AttentionOperation
from attention_service.pipeline.calls import CallOperation, sequence_bound
from attention_service.pipeline.execution import Execution
from attention_service.pipeline.layers import Layers
from attention_service.pipeline.merge import MergeOperation
from attention_service.pipeline.operation import PrepareCost, choose_strategy
from attention_service.pipeline.run import prepare
from tests.conftest import app, serving
from tests.helpers.engine_calls import Draw
from tests.helpers.engine_draws import DRAWS
from tests.helpers.hostile import written
from tests.helpers.oip import INFER
from tests.helpers.wire import JSON, NPZ, SAFETENSORS

FUNC = "flash_attn.flash_attn_func"
NUMPY = Backends(threads=1).choose("numpy", "cpu")
HALVES = (np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16))


def stretched(*shape: int) -> np.ndarray:
    """Zeros of any shape that take no memory."""
    return np.broadcast_to(np.float32(0), shape)


def dense(*shape: int, **more: Any) -> dict[str, Any]:
    return {"call": FUNC, "arguments": dict.fromkeys("qkv", stretched(*shape)), **more}


@pytest.mark.parametrize("media_type", [JSON, NPZ, SAFETENSORS])
@pytest.mark.parametrize(
    ("shape", "is_taken"), [((2**24, 0), True), ((2**24 + 1, 0), False), ((0, 2**29, 2**29), False)]
)
def test_axes_beside_one_of_length_0_are_bounded(media_type: str, shape: tuple[int, ...], is_taken: bool) -> None:
    body = written({"input": np.zeros(shape)}, media_type)
    if is_taken:
        assert CODECS[media_type].decode(body, 2**20).fields["input"].shape == shape
    else:
        with pytest.raises(ServiceError, match="a product of at most 16777216 beside a 0"):
            CODECS[media_type].decode(body, 2**20)


def test_lists_without_numbers_are_written_in_chunks() -> None:
    array = np.zeros((3, 2**19, 0))
    chunks = list(writer.chunks({"output": array}))
    assert max(map(len, chunks)) <= MAX_CHUNK
    assert b"".join(chunks) == json.dumps({"output": array.tolist()}, separators=(",", ":")).encode()


@pytest.mark.parametrize("field", ["input", "query"])
def test_batch_entries_and_heads_are_bounded(field: str) -> None:
    heads = dict.fromkeys(("query", "key", "value"), stretched(1, MAX_COUNT + 1, 1, 1))
    fields: dict[str, Any] = {"input": stretched(MAX_COUNT + 1, 1, 1)} if field == "input" else heads
    with pytest.raises(InvalidRequest, match=f"/{field}: expected at most {MAX_COUNT}"):
        attend(**fields)


@pytest.mark.parametrize("function", ["flash_attn.flash_attn_func", "torch.scaled_dot_product_attention"])
def test_sequences_and_heads_of_a_call_are_bounded(function: str) -> None:
    names = ("q", "k", "v") if function == FUNC else ("query", "key", "value")
    heads = (1, 1, MAX_COUNT + 1, 1) if function == FUNC else (1, MAX_COUNT + 1, 1, 1)
    for shape, what in ((MAX_COUNT + 1, 1, 1, 1), "sequences"), (heads, "heads"):
        given: dict[str, Any] = dict.fromkeys(names, stretched(*shape))
        with pytest.raises(InvalidRequest, match=f"/{names[0]}: expected at most {MAX_COUNT} {what}"):
            call(function, **given)


@pytest.mark.parametrize("name", DRAWS)
def test_the_shapes_of_arguments_say_how_many_sequences_there_are(name: str) -> None:
    for seed in range(20):
        drawn = DRAWS[name](Draw(seed))
        decoded = decode(drawn.function, drawn.arguments, drawn.version)
        if isinstance(decoded, Call):
            assert sequence_bound([*arrays_in(drawn.arguments)]) >= len(decoded.query.lengths)


def test_sequences_that_axes_are_broadcast_to_are_counted() -> None:
    one, other = stretched(300, 1, 1, 1, 1), stretched(1, 200, 1, 1, 1)
    arguments = {"query": one, "key": other, "value": other}
    decoded = decode("torch.scaled_dot_product_attention", arguments)
    assert isinstance(decoded, Call)
    assert sequence_bound([*arguments.values()]) >= len(decoded.query.lengths) == 60_000


@pytest.mark.parametrize("dtype", [*HALVES, np.float32, np.float64])
@pytest.mark.parametrize("batch_axis", [0, 1])
def test_norms_of_batch_entries_are_those_of_each_alone(dtype: Any, batch_axis: int) -> None:
    array = np.random.default_rng(0).normal(size=(40, 30, 5)).astype(dtype)
    array[3, 4, 1], array[5, 6, 2] = np.inf, np.nan
    for entries in (array, array[:, :, ::2], array[:0] if batch_axis else array[:, :0]):
        found = norms(entries, batch_axis)
        alone = [norm(np.ascontiguousarray(entry)) for entry in np.moveaxis(entries, batch_axis, 0)]
        np.testing.assert_allclose(found, alone, rtol=1e-12 if np.dtype(dtype) in HALVES else 1e-5)


def operation(path: str) -> Any:
    backends = Backends(threads=1)
    made = {
        "/attention": lambda: AttentionOperation(backends),
        "/attention/call": lambda: CallOperation(backends),
        "/attention/call/compare": lambda: CompareCallOperation(NUMPY),
        "/attention/merge": MergeOperation,
    }
    return made[path]()


@pytest.mark.parametrize("path", ["/attention/call", "/attention/call/compare"])
def test_many_short_sequences_are_prepared_in_a_worker_thread(path: str) -> None:
    for shape, is_large in ((2, 0, 1, 1), False), ((10_000, 0, 1, 1), True):
        assert operation(path).prepare_cost(Decoded(dense(*shape), frozenset())).is_large == is_large


def test_many_parts_are_prepared_and_merged_in_a_worker_thread() -> None:
    for count, is_small in (8, True), (1024, False):
        parts = [{"output": [[0.5]], "logsumexp": [0.0]}] * count
        decoded, merging = Decoded({"parts": parts}, frozenset()), operation("/attention/merge")
        assert merging.prepare_cost(decoded).is_large != is_small
        cost = merging.cost(merging.prepare(decoded), CODECS[JSON])
        assert (choose_strategy(cost, 5_000_000, is_idle=True) == "inline") == is_small


@pytest.mark.parametrize("path", ["/attention/call", "/attention/call/compare"])
def test_preparing_ends_with_its_request(path: str) -> None:
    def check() -> None:
        raise TimeLimit.at("", "less", "more")

    with pytest.raises(TimeLimit):
        operation(path).prepare(Decoded(dense(2, 1, 1, 1), frozenset()), None, check)


def test_what_cannot_be_prepared_in_the_memory_is_refused_before() -> None:
    with serving(app(memory_limit=2**26)) as client:
        answer = client.post(
            "/attention/call", content=written(dense(2**19, 0, 1, 1), JSON), headers={"content-type": JSON}
        )
    assert answer.status_code == 413
    assert "fewer sequences" in answer.json()["detail"]


def test_weights_of_very_many_sequences_are_refused() -> None:
    with serving(app()) as client:
        for count, status in (4096, 200), (4097, 422):
            body = written(dense(count, 1, 1, 1, include=["attention_weights"]), JSON)
            answer = client.post("/attention/call", content=body, headers={"content-type": JSON})
            assert answer.status_code == status
    assert answer.json()["errors"][0]["pointer"] == "/include"


def one_token(page: int) -> tuple[str, dict[str, Any]]:
    """One query, and one key at the start of a page of so many tokens."""
    cache = np.zeros((2, 1, page, 1, 1), np.float16)
    whole = np.array([1], np.int32)
    given = {
        "query": np.ones((1, 1, 1)),
        "kv_cache": cache,
        "query_start_loc": np.array([0, 1], np.int32),
        "seq_lens": whole,
    }
    return "vllm.attention", given | {"block_table": np.zeros((1, 1), np.int32)}


def test_a_mistake_that_reads_very_many_keys_is_counted_or_not_computed() -> None:
    reports, sizes = {}, {}
    for page in (2, 2**16, 2**22):
        name, arguments = one_token(page)
        asked = make_call_question(name, decode(name, arguments), {"output": np.ones((1, 1, 1))})
        sizes[page] = call_bytes(asked, 1)
        reports[page] = make_call_report(compare_call(asked, NUMPY))
    assert sizes[2**16] - sizes[2] > 2**16 * 2 * 8, "keys and values of the page in float64"
    assert sizes[2**22] <= sizes[2**16]
    sentence = "a sequence would have too many keys to compute: pages.last_full cannot be seen"
    assert [sentence in str(report) for report in reports.values()] == [False, False, True]


def zeros(*shape: int, dtype: Any = np.float32) -> np.ndarray:
    return np.zeros(shape, dtype)


def sources(dtype: Any, tokens: int = 1500, **more: Any) -> dict[str, Any]:
    return dict.fromkeys(("query", "key", "value"), zeros(1, 2, tokens, 8, dtype=dtype)) | more


def entries(dtype: Any, **more: Any) -> dict[str, Any]:
    return dict.fromkeys(("query", "key", "value"), zeros(MANY, 2, 1, 4, dtype=dtype)) | more


def sdpa(dtype: Any, **more: Any) -> dict[str, Any]:
    tokens = dict.fromkeys(("query", "key", "value"), zeros(1, 2, 2000, 8, dtype=dtype))
    return {"call": "torch.scaled_dot_product_attention", "arguments": tokens | more}


MANY = 200_000
PAST = zeros(1, 2, 40_000, 8, dtype=np.float16)
KERNELS = {role: {"kernel": zeros(2000, 2000, dtype=np.float16)} for role in ("query", "key", "value")}
# Requests with large arrays beside query, key and value, by what is large.
LARGE: dict[str, dict[str, Any]] = {
    "bias in halves": sources(np.float16, bias=zeros(1500, 1500, dtype=np.float16)),
    "bias": sources(np.float32, bias=zeros(1500, 1500)),
    "bias of integers": sources(np.float64, bias=zeros(1500, 1500, dtype=np.int8)),
    "mask": sources(np.float32, 4000, mask=np.ones((4000, 4000), bool)),
    "lengths": entries(np.float32, key_lengths=np.ones(MANY, np.int32)),
    "gate in halves": entries(np.float16, gate=zeros(MANY, 2, 1, 4, dtype=np.float16)),
    "selected keys": sources(np.float32, selected_keys=np.zeros((1, 2, 1500, 300), np.int32)),
    "rotation in halves": sources(np.float16, rotary=dict.fromkeys(("cos", "sin"), zeros(10**6, 4, dtype=np.float16))),
    "past in halves": sources(
        np.float16, query_offset=40_000, past_key=PAST, past_value=PAST
    ),
    "kernels in halves": {"input": zeros(1, 4, 2000, dtype=np.float16), "num_heads": 2, "projection": KERNELS},
    "gradients": entries(np.float32, grad_output=zeros(MANY, 2, 1, 4), gradients="all"),
    "labels": sources(np.float32, 1500, query_tokens=["token"] * 1500),
    "mask of a call": sdpa(np.float32, attn_mask=np.ones((2000, 2000), bool)),
    "mask of a call by heads": sdpa(np.float32, attn_mask=np.ones((1, 2, 2000, 2000), bool)),
    "bias of a call in halves": sdpa(np.float16, attn_mask=zeros(1, 1, 2000, 2000, dtype=np.float16)),
    "sequences of a call": {"call": FUNC, "arguments": dict.fromkeys("qkv", zeros(MANY, 1, 1, 1))},
    "slopes of sequences": {
        "call": FUNC, "arguments": dict.fromkeys("qkv", zeros(MANY, 1, 1, 1)) | {"alibi_slopes": zeros(MANY, 1)}
    },
    "pages": {
        "call": "flash_attn.flash_attn_with_kvcache",
        "arguments": {"q": zeros(1000, 1, 1, 1), "page_table": np.zeros((1000, 2000), np.int32)}
        | dict.fromkeys(("k_cache", "v_cache"), zeros(10, 1, 1, 1))
        | {"cache_seqlens": np.full(1000, 2000, np.int32)},
    },
}  # fmt: skip


@pytest.mark.parametrize("name", LARGE)
def test_the_memory_for_preparing_is_close_to_what_is_taken(name: str) -> None:
    """It is no less than the peak, so that no limit is broken, and not far above it, so that honest requests fit."""
    decoded = Decoded(LARGE[name], frozenset())
    operating = operation("/attention/call" if "call" in LARGE[name] else "/attention")
    estimated = operating.prepare_cost(decoded).memory
    tracemalloc.start()
    try:
        operating.prepare(decoded)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak <= estimated + 2**22
    assert estimated <= 2.5 * peak + 2**24


class Preparing(MergeOperation):
    """An operation whose requests need memory before they are prepared."""

    def prepare_cost(self, decoded: Decoded) -> PrepareCost:
        return PrepareCost(0, 2**24)

    def prepare(self, decoded: Decoded, layer: Layer | None = None, check: Check = no_check) -> Any:
        return decoded


def test_a_request_that_waits_for_memory_to_be_prepared_holds_no_slot() -> None:
    """Otherwise it would wait for a request that waits for its slot."""

    async def main() -> None:
        admission = AdmissionController(slots=1, memory=2**25, queue=4)
        first, second = Execution(admission, 60), Execution(admission, 60)
        await first.grow(2**20, slot=True)
        await second.grow(2**24 + 1)
        decoded: Any = Decoded({}, frozenset())
        waiting = asyncio.create_task(prepare(Preparing(), Layers(None), decoded, first))
        await asyncio.sleep(0)
        await second.grow(2**24 + 1, slot=True)
        second.lease.release()
        assert await waiting == decoded
        first.lease.release()

    asyncio.run(main())


@pytest.mark.parametrize("name", ["custom_mask", "packed_custom_mask"])
def test_masks_of_more_scores_than_integers_count_are_refused(name: str) -> None:
    """2^22 queries times 2^42 keys are 0 in 64 bits."""
    pages = 2**19
    given = {
        "q": np.zeros((2**22, 1, 1), np.int8),
        "qo_indptr": np.array([0, 2**22]),
        "paged_kv_cache": np.broadcast_to(np.int8(0), (1, 2, 2**23, 1, 1)),
        "paged_kv_indptr": np.array([0, pages]),
        "paged_kv_indices": np.zeros(pages, np.int32),
        "paged_kv_last_page_len": np.array([2**23]),
        name: np.zeros(0, bool if name == "custom_mask" else np.uint8),
    }
    with pytest.raises(InvalidRequest, match=f"/{name}: expected a mask of all scores, which are too many"):
        decode("flashinfer.BatchPrefillWithPagedKVCacheWrapper.run", given)


def test_a_logsumexp_that_its_base_makes_infinite_is_an_error() -> None:
    """1.6e308 / ln 2 is beyond float64, whose infinity stands for a row without keys."""
    one = np.ones((1, 1, 1))
    with pytest.raises(InvalidRequest, match="a logsumexp that float64 can hold in base 2"):
        call("flashinfer.single_prefill_with_kv_cache", q=1.6e308 * one, k=one, v=one, sm_scale=1.0)
    with pytest.raises(InvalidRequest, match="a logsumexp that float64 can hold in base 2"):
        merge([{"output": [[1.0]], "logsumexp": [1.0]}], logsumexp_base="2", sinks=[1.5e308])


def test_strings_of_the_inference_protocol_have_one_axis_or_two() -> None:
    with serving(app()) as client:
        for shape, status in ([2, 1, 1], 400), ([1, 2], 422):  # 422: without the arrays that they label
            labels = {"name": "query_tokens", "shape": shape, "datatype": "BYTES", "data": ["a", "b"]}
            assert client.post(INFER, json={"inputs": [labels]}).status_code == status
        many = {"inputs": [], "parameters": {"query_tokens": "," * 2**19}}
        answer = client.post(INFER, json=many)
    assert (answer.status_code, "at most 524288 names" in answer.text) == (400, True)
