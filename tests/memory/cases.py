"""Requests in all formats, each with some ten megabytes, one for each option of the table, and their responses."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import orjson
import safetensors.numpy

from tests.helpers.oip import body as inference
from tests.helpers.oip import tensor
from tests.helpers.options import as_fields, plain, unusual
from tests.helpers.wire import JSON, NPZ, SAFETENSORS, split, typed_array, write

INFERENCE = "inference"
F2, F4, F8, BF = np.float16, np.float32, np.float64, ml_dtypes.bfloat16


class Case(NamedTuple):
    """A request. media_type: of the request; answer: of the response; fields: makes the fields, with ndarrays"""

    name: str
    media_type: str
    answer: str
    fields: Callable[[], dict[str, Any]]
    form: str = ""  # base64, deflated, binary


def normal(*shape: int, dtype: Any = F4) -> np.ndarray:
    return np.random.default_rng(0).standard_normal(shape, np.float32).astype(dtype)


def digits(*shape: int, dtype: Any = np.int64) -> np.ndarray:
    return np.random.default_rng(0).integers(1, 9, shape).astype(dtype)


def qkv(q: int, k: int, d: int, dtype: Any = F4, make: Callable[..., np.ndarray] = normal) -> dict[str, Any]:
    return {"query": make(q, d, dtype=dtype), "key": make(k, d, dtype=dtype), "value": make(k, d, dtype=dtype)}


def heads(h: int, g: int, q: int, k: int, d: int, dtype: Any = F4) -> dict[str, Any]:
    return {name: normal(1, n, x, d, dtype=dtype) for name, n, x in (("query", h, q), ("key", g, k), ("value", g, k))}


def maps(features: int, out: int) -> dict[str, Any]:
    return {
        name: {"weight": normal(out, features) / 100, "bias": normal(out)} for name in ("query", "key", "value")
    } | {"output": {"kernel": normal(out, out) / 100, "bias": normal(out)}}


def with_null(q: int, k: int) -> list[list[float | None]]:
    rows = normal(q, k, dtype=F8).round(3).tolist()
    return [[None if j > i else x for j, x in enumerate(row)] for i, row in enumerate(rows)]


def infinite(*shape: int) -> np.ndarray:
    return np.where(digits(*shape) > 4, 0, -np.inf)


STAGES = ["scores", "scaled_scores", "capped_scores", "masked_scores", "attention_weights"]
NONE: dict[str, Any] = {"include": []}

CASES = [
    Case("short numbers", JSON, JSON, lambda: qkv(4, 300_000, 8, np.int64, digits) | NONE),
    Case("long numbers", JSON, JSON, lambda: qkv(16, 10_000, 64, F8) | NONE),
    Case(
        "numbers of three digits",
        JSON,
        JSON,
        lambda: {k: v.round(2) for k, v in qkv(16, 20_000, 64, F8).items()} | NONE,
    ),
    Case("lists of weights", SAFETENSORS, JSON, lambda: qkv(2500, 2500, 64)),
    Case("base64", JSON, JSON, lambda: qkv(2200, 2200, 64, F8) | {"encoding": "base64"}, "base64"),
    Case("base64 of long keys", JSON, JSON, lambda: qkv(64, 100_000, 64) | NONE | {"encoding": "base64"}, "base64"),
    Case("npz", NPZ, NPZ, lambda: qkv(3300, 3300, 64)),
    Case("npz of long keys", NPZ, NPZ, lambda: qkv(1000, 100_000, 32) | NONE),
    Case("deflated", NPZ, SAFETENSORS, lambda: qkv(64, 150_000, 32, make=digits, dtype=F4) | NONE, "deflated"),
    Case("safetensors", SAFETENSORS, SAFETENSORS, lambda: qkv(3300, 3300, 64)),
    Case("long, without weights", SAFETENSORS, SAFETENSORS, lambda: heads(16, 16, 2000, 2000, 64) | NONE),
    Case("one long query", SAFETENSORS, NPZ, lambda: qkv(200_000, 64, 64) | NONE),
    Case("inference in JSON", INFERENCE, INFERENCE, lambda: qkv(1500, 1500, 64)),
    Case("inference in binary", INFERENCE, INFERENCE, lambda: qkv(3300, 3300, 64), "binary"),
    Case("inference of long keys", INFERENCE, INFERENCE, lambda: qkv(64, 100_000, 64) | NONE, "binary"),
    Case("many heads", SAFETENSORS, SAFETENSORS, lambda: {"input": normal(1, 600, 2048), "num_heads": 32}),
    Case("grouped heads", SAFETENSORS, NPZ, lambda: heads(16, 4, 850, 850, 64)),
    Case("halves", SAFETENSORS, SAFETENSORS, lambda: qkv(4500, 4500, 32, F2)),
    Case("halves without weights", SAFETENSORS, JSON, lambda: heads(8, 8, 20_000, 100, 64, F2) | NONE),
    Case(
        "bfloat16 with stages",
        SAFETENSORS,
        SAFETENSORS,
        lambda: qkv(2200, 2200, 64, BF) | {"include": ["masked_scores", "attention_weights"]},
    ),
    Case(
        "a full mask", SAFETENSORS, SAFETENSORS, lambda: qkv(5000, 5000, 16) | NONE | {"mask": digits(5000, 5000) > 4}
    ),
    Case("a mask in lists", JSON, JSON, lambda: qkv(1700, 1700, 8) | NONE | {"mask": digits(1700, 1700) > 4}),
    Case("a mask of one row", SAFETENSORS, SAFETENSORS, lambda: qkv(3300, 3300, 16) | {"mask": digits(1, 3300) > 4}),
    Case(
        "a bias for each head",
        SAFETENSORS,
        SAFETENSORS,
        lambda: heads(8, 8, 1000, 1000, 32) | NONE | {"bias": normal(8, 1000, 1000)},
    ),
    Case("a bias that is cast", NPZ, NPZ, lambda: qkv(2500, 2500, 16, F8) | {"bias": normal(2500, 2500)}),
    Case("a bias with null", JSON, JSON, lambda: qkv(900, 900, 8) | NONE | {"bias": with_null(900, 900)}),
    Case(
        "past",
        SAFETENSORS,
        SAFETENSORS,
        lambda: (
            heads(8, 8, 16, 16, 64)
            | {
                "past_key": normal(1, 8, 15_000, 64),
                "past_value": normal(1, 8, 15_000, 64),
                "include": ["present_key", "present_value"],
                "rotary": {"base": 1e4},
                "is_causal": True,
            }
        ),
    ),
    Case(
        "norms and rotary",
        SAFETENSORS,
        SAFETENSORS,
        lambda: (
            heads(8, 8, 20_000, 200, 64)
            | NONE
            | {
                "query_norm": {"weight": normal(64)},
                "key_norm": {"weight": normal(64)},
                "rotary": {"interleaved": True},
            }
        ),
    ),
    Case(
        "projections",
        SAFETENSORS,
        SAFETENSORS,
        lambda: {
            "input": normal(2, 2000, 512),
            "projection": maps(512, 1024),
            "num_heads": 16,
            "key_lengths": np.array(100),
            "include": ["query", "key", "value", "head_outputs"],
        },
    ),
    Case(
        "projections that are cast",
        NPZ,
        NPZ,
        lambda: {"input": normal(1000, 1500, dtype=F8), "projection": maps(1500, 1500), "num_heads": 4} | NONE,
    ),
    Case("top_k", SAFETENSORS, JSON, lambda: heads(4, 4, 5000, 1200, 16) | {"top_k": 32}),
    Case(
        "average_heads",
        SAFETENSORS,
        SAFETENSORS,
        lambda: heads(8, 8, 2400, 2400, 8, F8) | {"average_heads": True, "query_lengths": np.array(1)},
    ),
    Case(
        "selected heads and queries",
        SAFETENSORS,
        SAFETENSORS,
        lambda: (
            heads(8, 8, 3000, 3000, 8)
            | {
                "select_heads": np.array([1, 5]),
                "select_queries": np.arange(0, 3000, 2),
                "include": ["masked_scores", "attention_weights"],
            }
        ),
    ),
    Case("all stages", NPZ, NPZ, lambda: qkv(1500, 1500, 64, F8) | {"softcap": 5.0, "include": STAGES}),
    Case(
        "why keys are hidden",
        SAFETENSORS,
        SAFETENSORS,
        lambda: (
            heads(8, 8, 1300, 1300, 16)
            | {"include": ["hidden_by"], "is_causal": True, "mask": digits(8, 1300, 1300) > 4}
            | {"key_lengths": np.array(1200)}
        ),
    ),
    Case(
        "why keys are hidden from a few queries",
        SAFETENSORS,
        JSON,
        lambda: (
            qkv(40, 100_000, 16, F8)
            | {"include": ["hidden_by"], "mask": digits(40, 100_000) > 4, "bias": infinite(40, 100_000)}
            | {"select_queries": np.arange(30)[::-1].copy()}
        ),
    ),
    Case(
        "selected keys",
        SAFETENSORS,
        SAFETENSORS,
        lambda: (
            heads(8, 8, 2000, 2000, 16)
            | {"selected_keys": 200 * digits(8, 2000, 200), "include": ["hidden_by"]}
            | {"select_heads": np.array([1])}
        ),
    ),
    Case(
        "gathered keys",
        SAFETENSORS,
        SAFETENSORS,
        lambda: (
            heads(8, 2, 200, 20_000, 128)
            | {"selected_keys": 2000 * digits(8, 200, 2000), "bias": normal(200, 20_000), "include": ["entropy"]}
        ),
    ),
    Case(
        "gathered keys of all heads",
        SAFETENSORS,
        SAFETENSORS,
        lambda: (
            heads(32, 1, 2000, 20_000, 128)
            | {"selected_keys": 2000 * digits(2000, 64), "query_offset": np.array(0), "chunk_size": 999}
            | {"alibi_slopes": normal(32), "include": ["logsumexp"]}
        ),
    ),
    Case(
        "weights without sinks",
        SAFETENSORS,
        SAFETENSORS,
        lambda: (
            heads(8, 8, 1200, 1200, 32)
            | {"sinks": normal(1, 8, 1200), "include": ["attention_weights", "weights_without_sinks", "logsumexp"]}
        ),
    ),
    Case(
        "gates and norms",
        SAFETENSORS,
        SAFETENSORS,
        lambda: {
            "input": normal(2, 1000, 256, dtype=F2),
            "projection": {"gate": {"weight": normal(2048, 256), "activation": "silu"}} | maps(256, 2048),
            "value_norm": {"kind": "layer", "over": "all", "weight": normal(2048)},
            "num_heads": 16,
            "key_lengths": np.array(100),
            "include": ["head_outputs"],
        },
    ),
    Case(
        "the sigmoid of scores",
        SAFETENSORS,
        SAFETENSORS,
        lambda: (
            heads(8, 8, 1500, 1500, 32)
            | {"normalization": "sigmoid", "scale": normal(8), "is_causal": True}
            | {"include": ["attention_weights", "received"]}
        ),
    ),
    Case(
        "columns",
        SAFETENSORS,
        SAFETENSORS,
        lambda: {k: v.T.copy() for k, v in qkv(3300, 3300, 64).items()} | {"layout": "dl"},
    ),
    Case(
        "columns in lists",
        SAFETENSORS,
        JSON,
        lambda: {k: v.T.copy() for k, v in qkv(2500, 2500, 32).items()} | {"layout": "dl"},
    ),
    Case(
        "statistics of rows",
        SAFETENSORS,
        SAFETENSORS,
        lambda: heads(8, 8, 1500, 1500, 32) | {"include": ["entropy", "logsumexp", "received", "attention_weights"]},
    ),
    Case(
        "alibi, causal, segments",
        SAFETENSORS,
        SAFETENSORS,
        lambda: (
            heads(16, 16, 1000, 1000, 64)
            | {
                "alibi_slopes": normal(16) ** 2,
                "is_causal": True,
                "sinks": normal(16),
                "segment_ids": {"query": digits(1000), "key": digits(1000)},
            }
        ),
    ),
    Case("entropy of long keys", SAFETENSORS, SAFETENSORS, lambda: qkv(1000, 60_000, 16) | {"include": ["entropy"]}),
    Case(
        "large numbers", SAFETENSORS, SAFETENSORS, lambda: {k: v * 100 for k, v in qkv(500, 60_000, 64).items()} | NONE
    ),
    Case("a batch", SAFETENSORS, SAFETENSORS, lambda: {"input": normal(48, 8, 200, 64)}),
    Case(
        "one query",
        SAFETENSORS,
        JSON,
        lambda: {"query": normal(16), "key": normal(400_000, 16), "value": normal(400_000, 16)},
    ),
    Case(
        "halves with a past",
        SAFETENSORS,
        SAFETENSORS,
        lambda: (
            heads(8, 8, 2000, 100, 64, F2)
            | {
                "rotary": {"base": 1e4},
                "past_key": normal(1, 8, 8000, 64, dtype=F2),
                "past_value": normal(1, 8, 8000, 64, dtype=F2),
                "include": ["present_key"],
            }
        ),
    ),
]


# Sizes of the requests with one option: operands of 12 MiB each, and matrices of 260,000 numbers.
SIZES = (2, 4, 510, 768)
# Options of types and places, which have cases above, and of weights, which the others do not return.
ELSEWHERE = {"dtype", "device", "backend", "untyped", "allow_non_finite", "query_tokens", "key_tokens"}
OF_WEIGHTS = {"average_heads", "top_k", "select_heads", "select_queries"}


def with_option(name: str) -> dict[str, Any]:
    """The fields of a request with one option of the table, in float32."""
    spec = plain(*SIZES)._replace(**(({} if name in OF_WEIGHTS else NONE) | unusual(*SIZES)[name]))
    return {name: in_float32(value) for name, value in as_fields(spec).items()}


def in_float32(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: in_float32(item) for name, item in value.items()}
    return value.astype(F4) if isinstance(value, np.ndarray) and value.dtype == F8 else value


OPTIONS = [name for name in unusual(2, 1, 6, 6) if name not in ELSEWHERE]
CASES += [Case(f"option {name}", SAFETENSORS, SAFETENSORS, partial(with_option, name)) for name in OPTIONS]


def write_case(case: Case) -> tuple[np.ndarray, int | None]:
    """The body of a request as an array that owns its memory, and the length of its JSON if tensors follow."""
    fields = case.fields()
    head = None
    if case.media_type == INFERENCE:
        arrays, rest = split(fields)
        text, headers = inference(
            [tensor(name, array, case.form == "binary") for name, array in arrays.items()],
            parameters={"binary_data_output": case.form == "binary"},
            outputs=[{"name": name} for name in ("output", *rest.get("include", ["attention_weights"]))],
        )
        head = int(next(iter(headers.values()))) if headers else None
    elif case.form == "base64":
        typed = {name: typed_array(x) if isinstance(x, np.ndarray) else x for name, x in fields.items()}
        text = json.dumps(typed).encode()
    elif case.media_type == JSON:
        text = orjson.dumps(fields, option=orjson.OPT_SERIALIZE_NUMPY)
    elif case.form == "deflated":
        arrays, rest = split(fields)
        stream = io.BytesIO()
        members: dict[str, Any] = {"request": np.array(json.dumps(rest))} | arrays
        np.savez_compressed(stream, **members)
        text = stream.getvalue()
    elif case.media_type == SAFETENSORS:
        arrays, rest = split(fields)
        text = bytes(safetensors.numpy.save(arrays, {"request": json.dumps(rest)}))
    else:
        text = write(fields, case.media_type)
    body = np.empty(len(text), np.uint8)
    body[:] = np.frombuffer(text, np.uint8)
    return body, head
