"""Requests of all operations whose arrays have one or two axes of unusual length beside short ones."""

from __future__ import annotations

import io
import json
import zipfile
from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple

import numpy as np

from tests.helpers.oip import INFER
from tests.helpers.wire import JSON, NPZ, SAFETENSORS, split, typed_array

# Lengths of an unusual axis.
LENGTHS: Final = (0, 1, 2**16, 100_003, 2**20, 2**20 + 1, 10_000_000)
# Bytes of the largest array, and of all arrays as text: decoding text is bounded by its length.
MOST: Final = 2**24
MOST_TEXT: Final = 2**19
TYPES: Final = (np.float16, np.float32, np.float64)
Axes = Mapping[str, int]
Fields = dict[str, Any]


class Drawn(NamedTuple):
    """A request. what: for messages"""

    path: str
    media_type: str
    body: bytes
    what: str


class Draw:
    """Draws arrays of zeros with the axes of one request.

    Letters: b sequences, h heads, g key/value heads, q queries, k keys, d and e features, p pages, s tokens of a page,
    m pages of a sequence, n parts, t positions
    """

    def __init__(self, seed: int) -> None:
        self.random = np.random.default_rng(seed)
        self.dtype = np.dtype(TYPES[self.random.integers(len(TYPES))])
        self.axes = dict.fromkeys("bhgqkdepsmnt", 1)
        for letter in self.axes:
            self.axes[letter] = int(self.random.integers(1, 4))
        self.axes["g"] = 1
        for letter in self.random.choice(list(self.axes), int(self.random.integers(1, 4)), replace=False):
            self.axes[str(letter)] = int(self.random.choice(LENGTHS))

    def maybe(self, chance: float = 0.3) -> bool:
        return bool(self.random.random() < chance)

    def size(self, axes: str) -> int:
        return int(np.prod([self.axes[letter] for letter in axes], dtype=object))

    def shrink(self, *all_axes: str) -> None:
        """Shorten the longest axes until an array with each of these axes has at most MOST bytes."""
        for axes in all_axes:
            while self.size(axes) * self.dtype.itemsize > MOST:
                longest = max(axes, key=lambda letter: self.axes[letter])
                self.axes[longest] //= 2

    def zeros(self, axes: str, dtype: Any = None) -> np.ndarray:
        return np.zeros([self.axes[letter] for letter in axes], dtype or self.dtype)

    def cut(self, total: int, count: int) -> np.ndarray:
        """(count + 1,): where so many sequences begin among `total` tokens, of one length or of others."""
        if self.maybe():
            inner = np.sort(self.random.integers(0, total + 1, max(count - 1, 0)))
            return np.concatenate([[0], inner, [total]])[: count + 1].astype(np.int32)
        return (np.arange(count + 1) * (total // max(count, 1))).astype(np.int32)


def attention(draw: Draw) -> Fields:
    if draw.maybe(0.2):
        draw.shrink("bqd")
        return {"input": draw.zeros("bqd"), **({"num_heads": draw.axes["h"]} if draw.maybe() else {})}
    if draw.maybe(0.6):
        draw.axes["g"] = draw.axes["h"]
    draw.shrink("bhqd", "bgkd", "bgke", "bhqe")
    fields: Fields = {"query": draw.zeros("bhqd"), "key": draw.zeros("bgkd"), "value": draw.zeros("bgke")}
    b, k = draw.axes["b"], draw.axes["k"]
    options: dict[str, Callable[[], Any]] = {
        "key_lengths": lambda: np.full(b, k, np.int64),
        "query_offset": lambda: np.zeros(b, np.int64),
        "sinks": lambda: draw.zeros("h"),
        "alibi_slopes": lambda: draw.zeros("h"),
        "scale": lambda: draw.zeros("h"),
        "key_mask": lambda: np.ones((b, k), bool),
        "mask": lambda: np.ones((b, 1, 1, k), bool),
        "bias": lambda: np.zeros((1, draw.axes["h"], 1, k), draw.dtype),
        "relative_keys": lambda: {"key": draw.zeros("d")[None]},
        "relative_keys of each head": lambda: {"key": draw.zeros("hd")[:, None]},
        "selected_keys": lambda: np.zeros((1, 1, 1, 1), np.int32),
        "rotary": lambda: {"interleaved": True},
        "grad_output": lambda: draw.zeros("bhqe"),
        "is_causal": lambda: True,
        "window": lambda: {"left": 3},
        "chunk_size": lambda: 2,
        "softcap": lambda: 2.0,
        "layout": lambda: str(draw.random.choice(["bhld", "blhd"])),
        "dtype": lambda: str(draw.random.choice(["float64", "bfloat16"])),
    }
    if draw.maybe():  # numbers of two sizes, whose entries are computed in different ways
        for name in ("query", "key"):
            fields[name][::2] = 100
    for name in draw.random.choice(list(options), int(draw.random.integers(4)), replace=False):
        fields[str(name).partition(" ")[0]] = options[str(name)]()
    if "grad_output" in fields:
        fields["gradients"] = "all"
    if fields.get("layout") == "blhd":
        fields |= {name: fields[name].swapaxes(1, 2) for name in ("query", "key", "value")}
    return fields


def _include(draw: Draw) -> Fields:
    names = ["attention_weights", "logsumexp", "scores", "entropy"]
    return {"include": [name for name in names if draw.maybe()]} if draw.maybe(0.8) else {}


def flash_func(draw: Draw) -> Fields:
    draw.shrink("bqhd", "bkgd", "bkge")
    given: Fields = {"q": draw.zeros("bqhd"), "k": draw.zeros("bkgd"), "v": draw.zeros("bkge")}
    if draw.maybe():
        given["alibi_slopes"] = draw.zeros("bh", np.float32)
    elif draw.maybe():
        given["q_descale"] = np.ones((draw.axes["b"], draw.axes["g"]), np.float32)
    return given | ({"causal": True} if draw.maybe() else {})


def flash_varlen(draw: Draw) -> Fields:
    draw.shrink("qhd", "kgd", "kge")
    q, k, b = draw.axes["q"], draw.axes["k"], draw.axes["b"]
    given: Fields = {"q": draw.zeros("qhd"), "cu_seqlens_q": draw.cut(q, b)}
    if draw.maybe():
        draw.shrink("psgd", "psge", "bm")
        given |= {"k": draw.zeros("psgd"), "v": draw.zeros("psge"), "page_table": draw.zeros("bm", np.int32)}
        return given | {"seqused_k": np.full(b, draw.axes["m"] * draw.axes["s"], np.int64)}
    given |= {"k": draw.zeros("kgd"), "v": draw.zeros("kge"), "cu_seqlens_k": draw.cut(k, b)}
    return given | ({"alibi_slopes": draw.zeros("bh", np.float32)} if draw.maybe(0.2) else {})


def flash_kvcache(draw: Draw) -> Fields:
    draw.shrink("bqhd")
    b = draw.axes["b"]
    given: Fields = {"q": draw.zeros("bqhd")}
    if draw.maybe():
        draw.shrink("psgd", "psge", "bm")
        given |= {
            "k_cache": draw.zeros("psgd"),
            "v_cache": draw.zeros("psge"),
            "page_table": draw.zeros("bm", np.int32),
        }
        used = draw.random.integers(0, draw.axes["m"] * draw.axes["s"] + 1, b)
    else:
        draw.shrink("bkgd", "bkge")
        given |= {"q": draw.zeros("bqhd"), "k_cache": draw.zeros("bkgd"), "v_cache": draw.zeros("bkge")}
        used = draw.random.integers(0, draw.axes["k"] + 1, draw.axes["b"])
    given["cache_seqlens"] = used.astype(np.int32) if draw.maybe(0.7) else 1
    return given


def _paged(draw: Draw) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    draw.shrink("psgd", "bm")
    b, m, p = draw.axes["b"], draw.axes["m"], draw.axes["p"]
    cache = np.zeros((p, 2, draw.axes["s"], draw.axes["g"], draw.axes["d"]), draw.dtype)
    bounds = draw.cut(b * m, b)
    last = np.full(b, int(draw.random.integers(1, draw.axes["s"] + 2)), np.int32)
    return cache, bounds, np.zeros(b * m, np.int32), last


def flashinfer_decode(draw: Draw) -> Fields:
    draw.shrink("bhd")
    cache, bounds, indices, last = _paged(draw)
    given = {"q": draw.zeros("bhd"), "paged_kv_cache": cache, "indptr": bounds, "indices": indices}
    return given | {"last_page_len": last}


def flashinfer_paged(draw: Draw) -> Fields:
    draw.shrink("qhd")
    cache, bounds, indices, last = _paged(draw)
    given: Fields = {"q": draw.zeros("qhd"), "qo_indptr": draw.cut(draw.axes["q"], draw.axes["b"])}
    given |= {"paged_kv_cache": cache, "paged_kv_indptr": bounds, "paged_kv_indices": indices}
    given |= {"paged_kv_last_page_len": last}
    if draw.maybe(0.2):
        given["custom_mask"] = np.ones(min(2**20, draw.axes["q"] * draw.axes["s"]), bool)
    return given | ({"causal": True} if draw.maybe() else {})


def flashinfer_ragged(draw: Draw) -> Fields:
    draw.shrink("qhd", "kgd", "kge")
    q, k, b = draw.axes["q"], draw.axes["k"], draw.axes["b"]
    given: Fields = {"q": draw.zeros("qhd"), "k": draw.zeros("kgd"), "v": draw.zeros("kge")}
    return given | {"qo_indptr": draw.cut(q, b), "kv_indptr": draw.cut(k, b)}


def flashinfer_mla(draw: Draw) -> Fields:
    draw.shrink("qhd", "qhe", "psd", "pse", "bm")
    b, m = draw.axes["b"], draw.axes["m"]
    given: Fields = {"q_nope": draw.zeros("qhd"), "q_pe": draw.zeros("qhe"), "qo_indptr": draw.cut(draw.axes["q"], b)}
    given |= {"ckv_cache": draw.zeros("psd"), "kpe_cache": draw.zeros("pse"), "kv_indptr": draw.cut(b * m, b)}
    given |= {"kv_indices": np.zeros(b * m, np.int32), "kv_len_arr": np.zeros(b, np.int32)}
    return given | {"sm_scale": 1.0, "causal": False}


def single_prefill(draw: Draw) -> Fields:
    draw.shrink("qhd", "kgd", "kge")
    return {"q": draw.zeros("qhd"), "k": draw.zeros("kgd"), "v": draw.zeros("kge")}


def single_decode(draw: Draw) -> Fields:
    draw.shrink("hd", "kgd", "kge")
    return {"q": draw.zeros("hd"), "k": draw.zeros("kgd"), "v": draw.zeros("kge")}


def trtllm(draw: Draw) -> Fields:
    draw.shrink("bhd", "psgd", "bm")
    cache = np.zeros((draw.axes["p"], 2, draw.axes["g"], draw.axes["s"], draw.axes["d"]), draw.dtype)
    given: Fields = {"query": draw.zeros("bhd"), "kv_cache": cache, "block_tables": draw.zeros("bm", np.int32)}
    return given | {"seq_lens": np.full(draw.axes["b"], min(draw.axes["m"] * draw.axes["s"], 2**31 - 1), np.int32)}


def trtllm_context(draw: Draw) -> Fields:
    given = trtllm(draw)
    bounds = np.arange(draw.axes["b"] + 1, dtype=np.int32)
    return given | {"cum_seq_lens_q": bounds, "bmm1_scale": 1.0, "bmm2_scale": 1.0}


def merge_state(draw: Draw) -> Fields:
    draw.shrink("khd")
    v, s = draw.zeros("khd"), draw.zeros("kh", np.float32)
    return {"v_a": v, "s_a": s, "v_b": v, "s_b": s}


def merge_states(draw: Draw) -> Fields:
    draw.shrink("knhd")
    return {"v": draw.zeros("knhd"), "s": draw.zeros("knh", np.float32)}


def sdpa(draw: Draw) -> Fields:
    if draw.maybe():
        draw.axes["g"] = draw.axes["h"]
    draw.shrink("bhqd", "bgkd", "bgke")
    given: Fields = {"query": draw.zeros("bhqd"), "key": draw.zeros("bgkd"), "value": draw.zeros("bgke")}
    if draw.maybe():
        given = {"query": draw.zeros("hqd"), "key": draw.zeros("bgkd"), "value": draw.zeros("bgke")}
    if draw.maybe():
        given["attn_mask"] = np.ones((draw.axes["b"], 1, 1, draw.axes["k"]), bool)
    return given | ({"enable_gqa": True} if draw.maybe() else {})


def torch_varlen(draw: Draw) -> Fields:
    given = flashinfer_ragged(draw)
    renamed = {"q": "query", "k": "key", "v": "value", "qo_indptr": "cu_seq_q", "kv_indptr": "cu_seq_k"}
    given = {renamed[name]: value for name, value in given.items()}
    return given | {"enable_gqa": True}


def vllm(draw: Draw) -> Fields:
    draw.shrink("qhd", "psgd", "bm")
    cache = np.zeros((2, draw.axes["p"] + 3, draw.axes["s"], draw.axes["g"], draw.axes["d"]), draw.dtype)
    given: Fields = {"query": draw.zeros("qhd"), "kv_cache": cache, "block_table": draw.zeros("bm", np.int32)}
    given |= {"query_start_loc": draw.cut(draw.axes["q"], draw.axes["b"])}
    used = draw.random.integers(0, draw.axes["m"] * draw.axes["s"] + 1, draw.axes["b"])
    return given | {"seq_lens": used.astype(np.int32)}


# Arguments of each function that the service understands.
CALLS: Final[Mapping[str, Callable[[Draw], Fields]]] = {
    "flash_attn.flash_attn_func": flash_func,
    "flash_attn.flash_attn_varlen_func": flash_varlen,
    "flash_attn.flash_attn_with_kvcache": flash_kvcache,
    "flashinfer.single_prefill_with_kv_cache": single_prefill,
    "flashinfer.single_decode_with_kv_cache": single_decode,
    "flashinfer.BatchDecodeWithPagedKVCacheWrapper.run": flashinfer_decode,
    "flashinfer.BatchPrefillWithPagedKVCacheWrapper.run": flashinfer_paged,
    "flashinfer.BatchPrefillWithRaggedKVCacheWrapper.run": flashinfer_ragged,
    "flashinfer.BatchMLAPagedAttentionWrapper.run": flashinfer_mla,
    "flashinfer.trtllm_batch_decode_with_kv_cache": trtllm,
    "flashinfer.trtllm_batch_context_with_kv_cache": trtllm_context,
    "flashinfer.merge_state": merge_state,
    "flashinfer.merge_states": merge_states,
    "torch.scaled_dot_product_attention": sdpa,
    "torch.varlen_attn": torch_varlen,
    "vllm.attention": vllm,
}


def call(draw: Draw) -> Fields:
    name = str(draw.random.choice(list(CALLS)))
    return {"call": name, "arguments": CALLS[name](draw)}


def attend(draw: Draw) -> Fields:
    return attention(draw) | _include(draw)


def call_with_weights(draw: Draw) -> Fields:
    return call(draw) | ({"include": ["attention_weights"]} if draw.maybe() else {})


def compare(draw: Draw) -> Fields:
    return _answered(draw, attention(draw))


def compare_call(draw: Draw) -> Fields:
    return _answered(draw, call(draw))


def _answered(draw: Draw, fields: Fields) -> Fields:
    """The fields with what a kernel returned, in most draws."""
    if draw.maybe(0.8):
        source = fields.get("arguments", fields)
        likely = next((source[name] for name in ("q", "query", "v", "input", "v_a", "q_nope") if name in source), None)
        shape = [] if likely is None else list(np.shape(likely))
        if shape and draw.maybe(0.9):  # as the output of most functions has it
            shape[-1] = draw.axes["e"] if draw.maybe() else shape[-1]
        if np.prod(shape, dtype=object) * draw.dtype.itemsize <= MOST:
            fields["actual"] = {"output": np.full(shape, draw.random.integers(2), draw.dtype)}
    return fields


def merge(draw: Draw) -> Fields:
    draw.axes["n"] = max(1, min(draw.axes["n"], 64 if draw.maybe(0.8) else 1024))
    draw.shrink("bhqd", "nbhqd")
    part = {"output": draw.zeros("bhqd"), "logsumexp": draw.zeros("bhq", np.float32)}
    return {"parts": [part] * draw.axes["n"], **({"sinks": draw.zeros("h")} if draw.maybe() else {})}


# What each operation on tensors is sent, by its path.
OPERATIONS: Final[Mapping[str, Callable[[Draw], Fields]]] = {
    "/attention": attend,
    "/attention/call": call_with_weights,
    "/attention/compare": compare,
    "/attention/call/compare": compare_call,
    "/attention/heatmap": attention,
    "/attention/merge": merge,
    INFER: attention,
}


def draw_request(path: str, seed: int) -> Drawn:
    """A request of an operation, in one of its formats. Arrays that a format cannot hold go into another."""
    draw = Draw(seed)
    fields = OPERATIONS[path](draw)
    text = f"{path} {seed}: {describe(fields)}"
    if path == INFER:
        return Drawn(path, JSON, inference(fields), text)
    tensors, _ = split(named(fields))
    size = sum(array.nbytes for array in tensors.values())
    media_type = str(draw.random.choice([JSON, NPZ, NPZ, SAFETENSORS])) if size <= MOST_TEXT else NPZ
    return Drawn(path, media_type, written(fields, media_type), f"{text} in {media_type}")


def describe(value: Any) -> Any:
    """Fields with shapes in the place of arrays; of a list its first element."""
    if isinstance(value, np.ndarray):
        return f"{value.dtype.name}{value.shape}"
    if isinstance(value, dict):
        return {name: describe(inner) for name, inner in value.items()}
    if isinstance(value, list) and value and isinstance(value[0], dict):
        return f"{len(value)} x {describe(value[0])}"
    return value


def named(fields: Fields) -> Fields:
    """The fields with lists of objects as objects: parts.0.output."""
    return {
        name: {str(n): part for n, part in enumerate(value)}
        if isinstance(value, list) and value and isinstance(value[0], dict)
        else value
        for name, value in fields.items()
    }


def written(fields: Fields, media_type: str) -> bytes:
    """The body of a request: typed arrays in JSON, deflated arrays in npz."""
    if media_type == JSON:
        return json.dumps(fields, default=typed_array).encode()
    tensors, rest = split(named(fields))
    if media_type == NPZ:
        stream = io.BytesIO()
        with zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
            for name, array in {"request": np.array(json.dumps(rest)), **tensors}.items():
                with archive.open(f"{name}.npy", "w") as file:
                    np.lib.format.write_array(file, np.asarray(array))
        return stream.getvalue()
    import safetensors.numpy

    arrays = {name: np.ascontiguousarray(array) for name, array in tensors.items()}
    return bytes(safetensors.numpy.save(arrays, {"request": json.dumps(rest)}))


def inference(fields: Fields) -> bytes:
    """The body of the inference protocol, with the numbers of small arrays; others are left out."""
    codes = {
        "float16": "FP32",
        "float32": "FP32",
        "float64": "FP64",
        "int32": "INT32",
        "int64": "INT64",
        "bool": "BOOL",
    }
    tensors, parameters = split(fields)
    inputs = [
        {
            "name": name,
            "shape": list(array.shape),
            "datatype": codes[array.dtype.name],
            "data": array.ravel().tolist(),
        }
        for name, array in tensors.items()
        if array.nbytes <= MOST_TEXT
    ]
    parameters = {name: json.dumps(value) if isinstance(value, dict) else value for name, value in parameters.items()}
    return json.dumps({"inputs": inputs, "parameters": parameters}).encode()


def zeros(*shape: int, dtype: Any = np.float32) -> np.ndarray:
    return np.zeros(shape, dtype)


def alternating(count: int) -> np.ndarray:
    """(count, 1, 1, 1): 100 and 0 by turns."""
    found = zeros(count, 1, 1, 1)
    found[::2] = 100
    return found


def call_of(function: str, *arrays: np.ndarray, **more: Any) -> Fields:
    """A call with query, key and value in the names of its library."""
    names = ("q", "k", "v") if function.startswith("flash") else ("query", "key", "value")
    return {"call": function, "arguments": dict(zip(names, arrays, strict=True)) | more}


FUNC: Final = "flash_attn.flash_attn_func"
SDPA: Final = "torch.scaled_dot_product_attention"


def one_page(lengths: np.ndarray, page: int, **more: Any) -> Fields:
    """A query for each sequence, whose keys are the first of one page."""
    b = len(lengths)
    given = {"query": zeros(b, 1, 1), "kv_cache": zeros(2, 1, page, 1, 1, dtype=np.float16)}
    given |= {"query_start_loc": np.arange(b + 1, dtype=np.int32), "seq_lens": lengths.astype(np.int32)}
    return {"call": "vllm.attention", "arguments": given | {"block_table": zeros(b, 1, dtype=np.int32)}, **more}


def other_lengths(count: int) -> Fields:
    """Sequences of other numbers of queries and keys."""
    random = np.random.default_rng(0)
    bounds = np.concatenate([[0], np.cumsum(random.integers(0, 40, count))]).astype(np.int32)
    page = zeros(1, 1024, 1, 1, dtype=np.float16)
    given = {"q": zeros(int(bounds[-1]), 1, 1, dtype=np.float16), "k": page, "v": page, "cu_seqlens_q": bounds}
    given |= {"page_table": zeros(count, 1, dtype=np.int32), "seqused_k": random.integers(0, 900, count)}
    return {"call": "flash_attn.flash_attn_varlen_func", "arguments": given}


# The paths of calls, by those of other requests.
OF_CALLS: Final = {"/attention": "/attention/call", "/attention/compare": "/attention/call/compare"}


def _case(path: str, media_type: str, make: Callable[[], Fields]) -> Callable[[], Drawn]:
    def drawn() -> Drawn:
        fields = make()
        where = OF_CALLS[path] if "call" in fields else path
        return Drawn(where, media_type, written(fields, media_type), str(describe(fields)))

    return drawn


def _attend(make: Callable[[], Fields], media_type: str = JSON) -> Callable[[], Drawn]:
    return _case("/attention", media_type, make)


def _compare(make: Callable[[], Fields], media_type: str = NPZ) -> Callable[[], Drawn]:
    return _case("/attention/compare", media_type, make)


def _text(path: str, make: Callable[[], Fields]) -> Callable[[], Drawn]:
    """JSON with long texts, each letter of two bytes."""

    def drawn() -> Drawn:
        fields = make()
        body = json.dumps(fields, ensure_ascii=False).encode()
        return Drawn(path, JSON, body, f"texts of {len(body)} bytes in {', '.join(fields)}")

    return drawn


def _numbers(*shape: int) -> Any:
    return np.random.default_rng(0).normal(size=shape).astype(np.float32)


def _compared(length: int, features: int, width: int) -> Fields:
    """A wrong output of so many tokens, of whose mistake nothing is known."""
    query, key = _numbers(2, length, features)
    return {"query": query, "key": key, "value": _numbers(length, width), "actual": {"output": _numbers(length, width)}}


def _returned(*shape: int) -> Fields:
    return {"actual": {"output": np.ones(shape, np.float32)}}


LONG: Final = "é" * 25_000_000
# Requests that once ended the process, took gigabytes, or stopped the event loop for seconds.
KNOWN: Final[Mapping[str, Callable[[], Drawn]]] = {
    "2^29 heads without tokens": _attend(
        lambda: call_of(FUNC, zeros(1, 0, 2**29, 1), zeros(1, 0, 1, 1), zeros(1, 0, 1, 1))
    ),
    "2^20 heads without tokens": _attend(
        lambda: call_of(FUNC, zeros(1, 0, 2**20, 1), zeros(1, 0, 1, 1), zeros(1, 0, 1, 1))
    ),
    "lists of lists without tokens": _attend(
        lambda: call_of(FUNC, zeros(2**10, 0, 2**14, 1), zeros(2**10, 0, 1, 1), zeros(2**10, 0, 1, 1))
    ),
    "weights without queries": _attend(
        lambda: (
            call_of(FUNC, zeros(2**10, 0, 2**14, 1), zeros(2**10, 1, 1, 1), zeros(2**10, 1, 1, 1))
            | {"include": ["attention_weights"]}
        )
    ),
    "a reference without queries": _compare(
        lambda: (
            call_of(FUNC, zeros(2**10, 0, 2**14, 1), zeros(2**10, 1, 1, 1), zeros(2**10, 1, 1, 1)) | {"reference": True}
        ),
        JSON,
    ),
    "merged parts without queries": _case(
        "/attention/merge",
        JSON,
        lambda: {"parts": [{"output": zeros(2**10, 2**14, 0, 1), "logsumexp": zeros(2**10, 2**14, 0)}] * 2},
    ),
    "heads without tokens in torch": _attend(
        lambda: call_of(SDPA, zeros(2**4, 2**20, 0, 1), zeros(1, 2**20, 0, 1), zeros(1, 2**20, 0, 1))
    ),
    "10^7 sequences without tokens": _attend(lambda: call_of(FUNC, *[zeros(10**7, 0, 1, 1)] * 3)),
    "500,000 sequences without tokens": _attend(lambda: call_of(FUNC, *[zeros(500_000, 0, 1, 1)] * 3)),
    "10^7 sequences without tokens in torch": _attend(lambda: call_of(SDPA, *[zeros(10**7, 1, 0, 1)] * 3)),
    "500,000 sequences without heads in torch": _attend(lambda: call_of(SDPA, *[zeros(500_000, 0, 1, 1)] * 3)),
    "15 million batch entries": _attend(lambda: {"input": zeros(15 * 10**6, 1, 1)}, NPZ),
    "a million batch entries": _attend(lambda: {"input": zeros(10**6, 1, 1)}, NPZ),
    "half a million short halves": _attend(
        lambda: {name: zeros(2**19, 2, 1, 3, dtype=np.float16) for name in ("query", "key", "value")}, NPZ
    ),
    "5 million sequences": _attend(lambda: call_of(FUNC, *[zeros(5 * 10**6, 1, 1, 1)] * 3), NPZ),
    "500,000 sequences": _attend(lambda: call_of(FUNC, *[zeros(500_000, 1, 1, 1)] * 3), NPZ),
    "slopes of 10^7 sequences": _compare(
        lambda: call_of(FUNC, *[zeros(10**7, 0, 1, 1)] * 3, alibi_slopes=zeros(10**7, 1)) | _returned(10**7, 0, 1, 1)
    ),
    "slopes of 10^5 sequences": _compare(
        lambda: call_of(FUNC, *[zeros(10**5, 1, 1, 1)] * 3, alibi_slopes=zeros(10**5, 1)) | _returned(10**5, 1, 1, 1)
    ),
    "merge_states of many rows": _attend(
        lambda: {
            "call": "flashinfer.merge_states",
            "arguments": {"v": zeros(10**7, 1, 1, 1, dtype=np.float16), "s": zeros(10**7, 1, 1, dtype=np.float16)},
        },
        NPZ,
    ),
    "10^5 lengths on one page": _attend(lambda: one_page(np.arange(10**5) % 1000 + 1, 1024)),
    "10^5 pairs of lengths": _attend(lambda: other_lengths(10**5), NPZ),
    "10^5 pairs of lengths compared": _compare(lambda: other_lengths(10**5)),
    "one key of a page of 8 million": _compare(lambda: one_page(np.array([1]), 8 * 10**6) | _returned(1, 1, 1)),
    "axes whose product no integer holds": _attend(
        lambda: call_of(FUNC, zeros(0, 2**29, 1, 2**29), zeros(0, 1, 1, 2**29), zeros(0, 1, 1, 2**58))
    ),
    "batch entries with relative keys": _attend(
        lambda: (
            {name: zeros(60_000, 1, 1) for name in ("query", "key", "value")}
            | {"relative_keys": {"key": zeros(1, 1)}, "include": []}
        ),
        NPZ,
    ),
    "entries of two sizes": _attend(
        lambda: {
            "query": alternating(55_000),
            "key": alternating(55_000),
            "value": zeros(55_000, 1, 1, 1),
            "include": [],
        },
        NPZ,
    ),
    "heads with selected keys": _attend(
        lambda: (
            {"query": zeros(1, 250_000, 1, 1), "key": zeros(1, 250_000, 16, 1), "value": zeros(1, 250_000, 16, 1)}
            | {"selected_keys": np.zeros((1, 1, 1, 1), np.int32), "include": []}
        ),
        NPZ,
    ),
    "rotated queries compared": _compare(
        lambda: (
            {"query": zeros(1, 1, 200_000, 2), "key": zeros(1, 1, 2, 2), "value": zeros(1, 1, 2, 1)}
            | {
                "rotary": {
                    "interleaved": True,
                    "query_positions": np.zeros(200_000, np.int64),
                    "key_positions": np.zeros(2, np.int64),
                }
            }
            | _returned(1, 1, 200_000, 1)
        )
    ),
    "heads with relative keys": _attend(
        lambda: (
            {"query": zeros(2**18, 1, 1), "key": zeros(1, 1, 1), "value": zeros(1, 1, 1), "layout": "hld"}
            | {"relative_keys": {"key": zeros(2**18, 1, 1)}, "include": []}
        ),
        NPZ,
    ),
    "many heads compared": _compare(
        lambda: {"query": zeros(2**20, 1, 1), "key": zeros(1, 1, 1), "value": zeros(1, 1, 1), "layout": "hld"}
    ),
    "heads with a scale each": _attend(
        lambda: (
            {"query": zeros(2**20, 1, 1), "key": zeros(1, 1, 1), "value": zeros(1, 1, 1), "layout": "hld"}
            | {"scale": np.full(2**20, 0.1), "include": []}
        ),
        NPZ,
    ),
    "wide values compared": _compare(lambda: _compared(8, 4, 16_000)),
    "a bias compared": _compare(lambda: _compared(1_500, 4, 4) | {"bias": _numbers(1_500, 1_500)}),
    "a mask compared": _compare(lambda: _compared(1_800, 4, 4) | {"mask": _numbers(1_800, 1_800) > 0}),
    "a long name of the request": _text("/attention", lambda: {"input": [[1]], LONG: 1}),
    "a long name of a parameter": _text(
        "/v2/models/attention/infer",
        lambda: {
            "inputs": [{"name": "input", "shape": [1, 1], "datatype": "FP32", "data": [1]}],
            "parameters": {LONG: 1},
        },
    ),
    "a long name among names": _text("/attention", lambda: {"input": [[1]], "include": [LONG]}),
    "a long text in an object": _text("/attention", lambda: {"input": [[1]], "window": {"left": LONG}}),
    "a long name of a field": _text("/attention", lambda: {"input": [[1]], "window": {LONG: 1}}),
    "a long option": _text("/attention", lambda: {"input": [[1]], "encoding": LONG}),
    "a long option of a comparison": _text(
        "/attention/compare", lambda: {"input": [[1]], "actual": {"output": [[1]]}, "encoding": LONG}
    ),
    "a long argument of a call": _text("/attention/call", lambda: {"call": "vllm.attention", "arguments": {LONG: 1}}),
    "a long label": _text("/attention", lambda: {"input": [[1]], "query_tokens": [LONG]}),
    "long labels": _text(
        "/attention", lambda: {"input": [[1]] * 2**14, "query_tokens": ["é" * 1600] * 2**14, "include": []}
    ),
    "a long label of a picture": _text("/attention/heatmap", lambda: {"input": [[1]], "query_tokens": [LONG]}),
    "1,024 parts of one number": _case(
        "/attention/merge", JSON, lambda: {"parts": [{"output": [[0.5]], "logsumexp": [0.0]}] * 1024}
    ),
    "a million heads of one feature": _compare(
        lambda: {"input": zeros(1, 10**6), "num_heads": 10**6} | _returned(1, 10**6)
    ),
}
