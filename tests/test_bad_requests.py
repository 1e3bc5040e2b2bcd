"""Every bad request gets a 4xx with pointer, expected and got; and the server continues."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import httpx
import pytest

from tests.helpers import wire
from tests.helpers.wire import JSON, NPZ, SAFETENSORS

GOOD: dict[str, Any] = {"query": [[1, 0], [0, 1]], "key": [[1, 0], [0, 1]], "value": [[1, 2], [3, 4]]}
TWO_HEADS = {"query": [[[1.0]], [[2.0]]], "key": [[[1.0]], [[2.0]]], "value": [[[1.0]], [[2.0]]]}


@dataclass(frozen=True)
class Bad:
    """A body (fields, or raw bytes), and the status and fault of the expected problem."""

    name: str
    body: dict[str, Any] | bytes
    status: int
    code: str
    pointer: str
    expected: str
    got: str
    content_type: str = "application/json"


def good(**fields: Any) -> dict[str, Any]:
    """The fields of a valid request with some replaced; None removes a field."""
    return {name: value for name, value in (GOOD | fields).items() if value is not None}


def raw(text: str) -> bytes:
    """A valid request as JSON text, with `text` as its query."""
    return json.dumps(good(query="QUERY")).replace('"QUERY"', text).encode()


def projected(**maps: Any) -> dict[str, Any]:
    return {"input": [[1, 2], [3, 4]], "projection": maps}


BAD = [
    # no valid JSON
    Bad("empty body", b"", 400, "invalid_json", "", "an object", "an empty body"),
    Bad("blank body", b" \n", 400, "invalid_json", "", "an object", "an empty body"),
    Bad("malformed JSON", b'{"query": [[1, 2}', 400, "invalid_json", "", "JSON", "line 1 column 17"),
    Bad("cut off", b'{"query": [[1, 2], [3', 400, "invalid_json", "", "JSON", "delimiter"),
    Bad("trailing text", b"{} {}", 400, "invalid_json", "", "JSON", "Extra data"),
    Bad("an array", b"[[1, 2]]", 400, "invalid_json", "", "an object", "an array"),
    Bad("a long string", b'"' + b"x" * 100_000 + b'"', 400, "invalid_json", "", "an object", "string 'xxx"),
    Bad("a number", b"3", 400, "invalid_json", "", "an object", "number 3"),
    Bad("NaN", raw("[[1, NaN], [0, 1]]"), 400, "invalid_json", "/query/0/1", "a finite number", "NaN"),
    Bad("Infinity", raw("[[1, 0], [Infinity, 1]]"), 400, "invalid_json", "/query/1/0", "a finite", "Infinity"),
    Bad("-Infinity", raw("[[1, 0], [0, -Infinity]]"), 400, "invalid_json", "/query/1/1", "a finite", "-Infinity"),
    Bad("not UTF-8", b'{"query": "\xff"}', 400, "invalid_json", "", "UTF-8", "0xff at offset 11"),
    Bad("UTF-16", '{"a": 1}'.encode("utf-16"), 400, "invalid_json", "", "byte-order mark", "byte-order mark"),
    Bad("byte-order mark", b"\xef\xbb\xbf{}", 400, "invalid_json", "", "byte-order mark", "byte-order mark"),
    Bad("half a surrogate", b'{"query": ["\\ud800"]}', 400, "invalid_json", "/query/0", "Unicode text", "surrogate"),
    Bad("half a surrogate in a key", b'{"a": {"\\udfff": 1e400}}', 400, "invalid_json", "/a", "keys of Unicode text",
        "half a surrogate pair"),
    Bad("a NUL in a key", b'{"a\\u0000": 1}', 400, "invalid_json", "/a\0", "keys without NUL", r"'a\x00'"),
    Bad("duplicate key", b'{"query": [[1]], "query": [[2]]}', 400, "duplicate_key", "/query", "once", "again"),
    Bad("duplicate inner key", b'{"projection": {"key": {}, "key": {}}}', 400, "duplicate_key", "/projection/key",
        "once", "again"),
    Bad("100,000 brackets", b'{"query": ' + b"[" * 100_000, 400, "too_deep", "", "32 levels", "more"),
    Bad("500 nested arrays", raw("[" * 500 + "]" * 500), 400, "too_deep", "/query", "32 levels", "more"),
    Bad("500 nested arrays later", raw(f"[1, {'[' * 500 + ']' * 500}]"), 400, "too_deep", "/query", "32", "more"),
    Bad("500 nested objects", b'{"a":' * 500 + b"1" + b"}" * 500, 400, "too_deep", "/a" * 32, "32 levels", "more"),
    # numbers out of range
    Bad("1e400", raw("[[1, 1e400], [0, 1]]"), 422, "overflow", "/query/0/1", "float64", "'1e400'"),
    Bad("beyond 64 bits", raw("[[1, 18446744073709551616]]"), 422, "overflow", "/query/0/1", "64 bits", "'1844674"),
    Bad("beyond 64 bits, negative", raw("[[-9223372036854775809]]"), 422, "overflow", "/query/0/0", "64 bits", "'-92"),
    Bad("beside the largest of 64 bits", raw("[[18446744073709551615, 18446744073709551616]]"), 422, "overflow",
        "/query/0/1", "64 bits", "'1844674"),
    Bad("5,000 digits", raw(f"[[{'9' * 5000}]]"), 422, "overflow", "/query/0/0", "64 bits", "'9999"),
    Bad("softcap beyond float32", good(softcap=1e39, dtype="float32"), 422, "overflow", "/softcap",
        "a number that float32 can hold", "1e+39"),
    Bad("scale beyond float32", good(scale=-1e39, dtype="float32"), 422, "overflow", "/scale",
        "a number that float32 can hold", "-1e+39"),
    Bad("beyond float32", good(query=[[1, 0], [1e39, 0]], dtype="float32"), 422, "overflow", "/query/1/0",
        "a number that float32 can hold", "number 1e+39"),
    Bad("scores overflow", good(query=[[1e200, 0]], key=[[1e200, 0]], value=[[1]]), 422, "overflow", "",
        "finite scores in float64", "too large"),
    Bad("float32 scores overflow", good(query=[[1e20, 0]], key=[[-1e20, 0]], value=[[1]], dtype="float32"), 422,
        "overflow", "", "finite scores in float32", "too large"),
    Bad("sum overflows", good(query=[[1e154, 0]], key=[[1e154, 0], [1e154, 0]], scale=1.1, normalization="sum"), 422,
        "overflow", "", "finite sums of scores", "too large"),
    Bad("output overflows", projected(output={"kernel": [[1e308], [1e308]]}), 422, "overflow", "",
        "finite output in float64", "too large"),
    # arrays
    Bad("ragged rows", good(key=[[1, 0], [0]]), 422, "invalid_array", "/key/1", "a row of 2", "a row of 1"),
    Bad("ragged, same count", good(key=[[1, 0, 1], [0]]), 422, "invalid_array", "/key/1", "a row of 3", "a row of 1"),
    Bad("ragged depth", good(key=[[1, 0], 1]), 422, "invalid_array", "/key/1", "a row of 2", "number 1"),
    Bad("hidden array", good(key=[[1, [0]], [0, 1]]), 422, "invalid_array", "/key/0/1", "a number", "array of 1"),
    Bad("empty array", good(query=[]), 422, "invalid_array", "/query", "at least one element", "none"),
    Bad("empty rows", good(query=[[], []]), 422, "invalid_array", "/query/0", "at least one element", "none"),
    Bad("a string in it", good(query=[[1, "2"], [0, 1]]), 422, "invalid_array", "/query/0/1", "a number", "'2'"),
    Bad("a boolean in it", good(query=[[1, 2], [0, True]]), 422, "invalid_array", "/query/1/1", "a number", "true"),
    Bad("all booleans", good(query=[[True, False]]), 422, "invalid_array", "/query", "numbers", "booleans of shape"),
    Bad("null in it", good(query=[[1, None], [0, 1]]), 422, "invalid_array", "/query/0/1", "a number", "null"),
    Bad("an object in it", good(query=[[1, {}], [0, 1]]), 422, "invalid_array", "/query/0/1", "a number", "object"),
    Bad("an object", good(query={"a": 1}), 422, "invalid_array", "/query", "an array", "object with 1 key"),
    Bad("a string", good(query="x" * 1000), 422, "invalid_array", "/query", "an array", "…"),
    Bad("a number", good(query=3), 422, "invalid_array", "/query", "an array", "number 3"),
    Bad("9 axes", good(query=[[[[[[[[["x"]]]]]]]]]), 422, "invalid_array", "/query", "at most 8 axes", "more"),
    # shapes
    Bad("rank 5", good(query=[[[[[1]]]]]), 422, "shape_mismatch", "/query", "2 to 4 axes", "(1, 1, 1, 1, 1)"),
    Bad("all rank 1", {"query": [1], "key": [1], "value": [1]}, 422, "shape_mismatch", "/query", "2 to 4 axes", "(1,)"),
    Bad("rank 1 input", {"input": [1, 2]}, 422, "shape_mismatch", "/input", "2 to 4 axes", "(2,)"),
    Bad("rank 1 key", good(key=[1, 0]), 422, "shape_mismatch", "/key", "2 axes, as layout ld", "(2,)"),
    Bad("rank 1 query in bld", good(query=[1, 0], key=[GOOD["key"]], value=[GOOD["value"]]), 422, "shape_mismatch",
        "/query", "3 axes, as layout bld", "(2,)"),
    Bad("mixed ranks", good(key=[GOOD["key"]]), 422, "shape_mismatch", "/query", "3 axes", "(2, 2)"),
    Bad("inner size", good(key=[[1, 0, 0], [0, 1, 0]]), 422, "shape_mismatch", "/key", "(·, 2)", "(2, 3)"),
    Bad("inner size in columns", good(key=[[1, 0]], layout="dl"), 422, "shape_mismatch", "/key", "(2, ·)", "(1, 2)"),
    Bad("value length", good(value=[[1, 2]]), 422, "shape_mismatch", "/value", "(2, ·)", "(1, 2)"),
    Bad("batch", good(query=[[[1]]], key=[[[1]], [[1]]], value=[[[1]], [[1]]]), 422, "shape_mismatch", "/key",
        "(1, ·, ·)", "(2, 1, 1)"),
    Bad("heads do not divide", good(num_heads=3), 422, "shape_mismatch", "/query",
        "a multiple of num_heads = 3", "2 features"),
    Bad("kv heads do not divide", good(num_heads=2, num_kv_heads=3), 422, "shape_mismatch", "/num_kv_heads",
        "a divisor of num_heads = 2", "3"),
    Bad("heads beside an h axis", TWO_HEADS | {"layout": "hld", "num_heads": 3}, 422, "shape_mismatch", "/num_heads",
        "2, as /query shows", "3"),
    Bad("heads of key and value", TWO_HEADS | {"layout": "hld", "value": [[[1.0]]]}, 422, "shape_mismatch", "/value",
        "2 heads, as /key has", "1"),
    Bad("heads of key", TWO_HEADS | {"layout": "hld", "query": [[[1.0]]] * 3}, 422, "shape_mismatch", "/key",
        "a divisor of num_heads = 3", "2"),
    # projections
    Bad("weight and kernel", projected(key={"weight": [[1, 2]], "kernel": [[1], [2]]}), 422, "field_conflict",
        "/projection/key", "weight (out, in) or kernel (in, out)", "both"),
    Bad("neither", projected(key={"bias": [1]}), 422, "missing_field", "/projection/key", "weight", "neither"),
    Bad("map's inner size", projected(query={"weight": [[1, 2, 3]]}), 422, "shape_mismatch", "/projection/query/weight",
        "(·, 2)", "(1, 3)"),
    Bad("kernel's inner size", projected(query={"kernel": [[1, 2]]}), 422, "shape_mismatch", "/projection/query/kernel",
        "(2, ·)", "(1, 2)"),
    Bad("per-head inner size", projected(query={"weight": [[[1]]]}), 422, "shape_mismatch", "/projection/query/weight",
        "(·, ·, 2)", "(1, 1, 1)"),
    Bad("map's rank", projected(query={"weight": [1, 2]}), 422, "shape_mismatch", "/projection/query/weight",
        "(out, in), or (heads, out, in)", "(2,)"),
    Bad("output map's rank", projected(output={"kernel": [[[1]]]}), 422, "shape_mismatch", "/projection/output/kernel",
        "(in, out)", "(1, 1, 1)"),
    Bad("output map's inner size", projected(output={"weight": [[1]]}), 422, "shape_mismatch",
        "/projection/output/weight", "(·, 2)", "(1, 1)"),
    Bad("map's bias", projected(query={"weight": [[1, 2], [3, 4]], "bias": [1]}), 422, "shape_mismatch",
        "/projection/query/bias", "(2,) or (2, 1) or (1, 2) or (1, 2, 1)", "(1,)"),
    Bad("maps disagree", projected(query={"weight": [[1, 2]]}, key={"weight": [[1, 2], [3, 4]]}), 422, "shape_mismatch",
        "/projection/key/weight", "1 features out", "2"),
    Bad("map's heads", projected(query={"weight": [[[1, 2]], [[3, 4]]]}) | {"num_heads": 3}, 422, "shape_mismatch",
        "/num_heads", "2, as /projection/query/weight shows", "3"),
    Bad("projection with h", TWO_HEADS | {"layout": "hld", "projection": {}}, 422, "field_conflict", "/projection",
        "a layout whose heads are packed", "hld"),
    # sources
    Bad("no source", {}, 422, "missing_field", "", "query, key and value", "none"),
    Bad("options only", {"scale": 1}, 422, "missing_field", "", "query, key and value", "none"),
    Bad("two sources", good(input=[[1]]), 422, "field_conflict", "/query", "no other source", "query"),
    Bad("half a source", good(value=None), 422, "missing_field", "/value", "query, key and value", "only query, key"),
    Bad("context alone", {"context": [[1]]}, 422, "missing_field", "/input", "input beside context", "context"),
    # masks and positions
    Bad("mask's shape", good(mask=[[True, True, True]]), 422, "shape_mismatch", "/mask", "(2, 2)", "(1, 3)"),
    Bad("mask's rank", good(mask=[[[True]]]), 422, "shape_mismatch", "/mask", "broadcasts to (2, 2)", "(1, 1, 1)"),
    Bad("numeric mask", good(mask=[[0, 1], [1, 1]]), 422, "invalid_array", "/mask", "booleans", "integers of shape"),
    Bad("mixed mask", good(mask=[[True, 1]]), 422, "invalid_array", "/mask/0/1", "true or false", "number 1"),
    Bad("ambiguous mask", {"input": [[[1, 2]], [[3, 4]]], "num_heads": 2, "mask": [[[True]], [[False]]]}, 422,
        "shape_mismatch", "/mask", "(2, 1, 1, 1) for one per batch entry or (1, 2, 1, 1)", "(2, 1, 1)"),
    Bad("bias's shape", good(bias=[1, 2, 3]), 422, "shape_mismatch", "/bias", "(2,)", "(3,)"),
    Bad("bias of strings", good(bias=[["a", None]]), 422, "invalid_array", "/bias/0/0", "a number", "'a'"),
    Bad("causal, lengths differ", good(query=[[1, 0]], is_causal=True), 422, "missing_field", "/query_offset",
        "as query and key differ in length", "none"),
    Bad("offset per batch", good(is_causal=True, query_offset=[1, 2]), 422, "shape_mismatch", "/query_offset",
        "one integer or (1,)", "(2,)"),
    Bad("offset not whole", good(is_causal=True, query_offset=0.5), 422, "invalid_array", "/query_offset", "an integer",
        "number 0.5"),
    Bad("offset beyond 64 bits", good(is_causal=True, query_offset=2**64 - 1), 422, "invalid_array", "/query_offset",
        "integers up to 9223372036854775807", "18446744073709551615"),
    Bad("length beyond 64 bits", good(key_lengths=2**63), 422, "invalid_array", "/key_lengths",
        "integers up to 9223372036854775807", "9223372036854775808"),
    Bad("offsets not whole", good(is_causal=True, query_offset=[0.5]), 422, "invalid_array", "/query_offset",
        "integers", "numbers of shape (1,)"),
    # the past, positions and lengths
    Bad("past without value", good(past_key=[[[1, 2]]]), 422, "missing_field", "/past_value", "both", "one of them"),
    Bad("past's shape", good(past_key=[[1, 2]], past_value=[[[1, 2]]]), 422, "shape_mismatch", "/past_key",
        "(1, ·, 2)", "(1, 2)"),
    Bad("past's lengths", good(past_key=[[[1, 2]]], past_value=[[[1, 2], [3, 4]]]), 422, "shape_mismatch",
        "/past_value", "(1, 1, 2)", "(1, 2, 2)"),
    Bad("past of ragged nothing", good(past_key=[[], [[]]], past_value=[[]]), 422, "invalid_array", "/past_key/0",
        "at least one element", "none"),
    Bad("numeric key_mask", good(key_mask=[1, 0]), 422, "invalid_array", "/key_mask", "booleans", "integers"),
    Bad("key_mask's shape", good(key_mask=[True]), 422, "shape_mismatch", "/key_mask", "(2,) or (1, 2)", "(1,)"),
    Bad("length too large", good(key_lengths=3), 422, "invalid_array", "/key_lengths", "from 0 to 2", "number 3"),
    Bad("length below 0", good(query_lengths=[-1]), 422, "invalid_array", "/query_lengths/0", "from 0 to 2", "-1"),
    Bad("lengths' shape", good(key_lengths=[1, 2]), 422, "shape_mismatch", "/key_lengths", "(1,)", "(2,)"),
    Bad("half of the segments", good(segment_ids={"key": [1, 2]}), 422, "missing_field", "/segment_ids/query", "both",
        "none"),
    Bad("segments' shape", good(segment_ids={"query": [1, 2], "key": [1]}), 422, "shape_mismatch", "/segment_ids/key",
        "(2,) or (1, 2)", "(1,)"),
    Bad("window -1", good(window={"left": -1}), 422, "invalid_value", "/window/left", "at least 0", "-1"),
    Bad("window, lengths differ", good(query=[[1, 0]], window={"left": 1}), 422, "missing_field", "/query_offset",
        "an offset", "none"),
    Bad("alibi, lengths differ", good(query=[[1, 0]], alibi_slopes=[1]), 422, "missing_field", "/query_offset",
        "an offset", "none"),
    Bad("alibi's shape", good(alibi_slopes=[1, 2]), 422, "shape_mismatch", "/alibi_slopes", "(1,)", "(2,)"),
    Bad("sinks' shape", good(sinks=[[1]]), 422, "shape_mismatch", "/sinks", "(1,)", "(1, 1)"),
    Bad("sinks beside sums", good(sinks=[1], normalization="sum"), 422, "field_conflict", "/sinks", "no sinks", "both"),
    Bad("softcap 0", good(softcap=0), 422, "invalid_value", "/softcap", "above 0", "number 0"),
    # norms and rotation
    Bad("norm's weight", good(query_norm={"weight": [1]}), 422, "shape_mismatch", "/query_norm/weight", "(2,)", "(1,)"),
    Bad("norm's eps", good(key_norm={"eps": -1}), 422, "invalid_value", "/key_norm/eps", "at least 0", "-1"),
    Bad("odd rotation", good(rotary={"dim": 1}), 422, "invalid_value", "/rotary/dim", "even", "number 1"),
    Bad("rotation too wide", good(rotary={"dim": 4}), 422, "invalid_value", "/rotary/dim", "head_dim = 2", "number 4"),
    Bad("rotation of an odd head", {"input": [[1, 2, 3]], "rotary": {}}, 422, "invalid_value", "/rotary", "even", "3"),
    Bad("base 0", good(rotary={"base": 0}), 422, "invalid_value", "/rotary/base", "above 0", "number 0"),
    Bad("base too small", {"input": [[0] * 40] * 2, "rotary": {"base": 1e-308, "query_positions": [10**18, 1]}}, 422,
        "invalid_value", "/rotary/base", "angles are finite", "1e-308"),
    Bad("cos without sin", good(rotary={"cos": [[1], [1]]}), 422, "missing_field", "/rotary/sin", "both", "one"),
    Bad("base and cos", good(rotary={"base": 2, "cos": [[1], [1]], "sin": [[1], [1]]}), 422, "field_conflict",
        "/rotary/base", "base, or cos and sin", "both"),
    Bad("cos too wide", good(rotary={"cos": [[1, 1]], "sin": [[1, 1]]}), 422, "shape_mismatch", "/rotary/cos",
        "dim/2 at most 1", "(1, 2)"),
    Bad("sin's shape", good(rotary={"cos": [[1], [1]], "sin": [[1]]}), 422, "shape_mismatch", "/rotary/sin", "(2, 1)",
        "(1, 1)"),
    Bad("too few positions", good(rotary={"cos": [[1]], "sin": [[1]]}), 422, "invalid_array", "/rotary/cos",
        "at least 2 positions", "(1, 1)"),
    Bad("position beyond the table", good(rotary={"cos": [[1], [1]], "sin": [[1], [1]], "query_positions": [0, 2]}),
        422, "invalid_array", "/rotary/query_positions/0/1", "from 0 to 1", "number 2"),
    Bad("positions beside cos for each token", good(rotary={"cos": [[[1], [1]]], "sin": [[[1], [1]]],
        "key_positions": [0, 1]}), 422, "field_conflict", "/rotary/key_positions", "no positions", "both"),
    Bad("cos for other tokens", good(rotary={"cos": [[[1]]], "sin": [[[1]]]}), 422, "shape_mismatch", "/rotary/cos",
        "(1, 2, 1)", "(1, 1, 1)"),
    # outputs
    Bad("top_k 0", good(top_k=0), 422, "invalid_value", "/top_k", "at least 1", "number 0"),
    Bad("top_k of nothing", good(top_k=1, include=[]), 422, "field_conflict", "/top_k", "attention_weights", "without"),
    Bad("head out of range", good(select_heads=[1]), 422, "invalid_array", "/select_heads/0", "from 0 to 0", "1"),
    Bad("query twice", good(select_queries=[1, 1]), 422, "invalid_array", "/select_queries", "each index once",
        "1 again"),
    Bad("no query", good(select_queries=[]), 422, "invalid_array", "/select_queries", "at least one", "none"),
    Bad("queries, rank 2", good(select_queries=[[1]]), 422, "shape_mismatch", "/select_queries", "a list", "(1, 1)"),
    Bad("queries not whole", good(select_queries=[0.5]), 422, "invalid_array", "/select_queries", "integers",
        "numbers"),
    Bad("entropy of sums", good(normalization="sum", include=["entropy"]), 422, "field_conflict", "/include",
        "no entropy", "entropy"),
    Bad("device that is none", good(device="gpu"), 422, "invalid_value", "/device", "cuda:N", "'gpu'"),
    Bad("device of NumPy", good(device="cuda", backend="numpy"), 422, "unknown_backend", "/device", "cpu", "'cuda'"),
    # typed arrays
    Bad("typed, unknown type", good(query={"dtype": "int128", "shape": [1], "data": ""}), 422, "invalid_value",
        "/query/dtype", "one of bool, uint8", "'int128'"),
    Bad("typed, too few bytes", good(query={"dtype": "float32", "shape": [2, 2], "data": "AAAAAA=="}), 422,
        "invalid_array", "/query/data", "16 bytes of float32 (2, 2)", "4 bytes"),
    Bad("typed, nothing times huge", good(query={"dtype": "float32", "shape": [0, 2**63 - 1], "data": ""}), 422,
        "invalid_value", "/query/shape", "lengths of axes", "[0, 9223372036854775807]"),
    Bad("typed, no base64", good(query={"dtype": "float32", "shape": [1], "data": "A?"}), 422, "invalid_array",
        "/query/data", "base64", ""),
    Bad("typed, data no string", good(query={"dtype": "float32", "shape": [1], "data": [1]}), 422, "invalid_value",
        "/query/data", "a base64 string", "integers"),
    Bad("typed, shape below 0", good(query={"dtype": "float32", "shape": [-1], "data": ""}), 422, "invalid_value",
        "/query/shape", "none negative", "[-1]"),
    Bad("typed, shape not whole", good(query={"dtype": "float32", "shape": [1.5], "data": ""}), 422, "invalid_value",
        "/query/shape", "lengths of axes", "[1.5]"),
    Bad("typed, 9 axes", good(query={"dtype": "float32", "shape": [1] * 9, "data": "AAAAAA=="}), 422, "invalid_value",
        "/query/shape", "at most 8", "[1, 1, 1"),
    Bad("typed, huge", good(query={"dtype": "float32", "shape": [2**40, 2**40], "data": ""}), 422, "invalid_array",
        "/query/data", "bytes of float32", "0 bytes"),
    Bad("typed, half", good(query={"dtype": "float32", "shape": [1]}), 422, "invalid_array", "/query",
        "dtype, shape and data", "object with 2 keys"),
    Bad("typed, bool of 2", good(mask={"dtype": "bool", "shape": [2], "data": "AAI="}), 422, "invalid_array",
        "/mask/data", "bytes of 0 and 1", "byte 2"),
    Bad("typed, empty", good(query={"dtype": "float32", "shape": [0, 2], "data": ""}), 422, "invalid_array", "/query",
        "at least one element on every axis", "(0, 2)"),
    Bad("typed, not finite", good(query={"dtype": "float32", "shape": [1, 2], "data": "AACAfwAAwH8="}), 422,
        "invalid_array", "/query/0/0", "a finite number", "inf"),
    Bad("beyond float16", good(query=[[1, 0], [0, 70000]], dtype="float16"), 422, "overflow", "/query/1/1",
        "a number that float16 can hold", "70000"),
    Bad("weights beyond float16", {"query": [[1]], "key": [[1], [-1], [1e-5]], "value": [[1], [1], [1]],
        "dtype": "float16", "normalization": "sum"}, 422, "overflow", "", "finite attention_weights in", "large"),
    # options
    Bad("unknown field", good(num_head=2), 422, "unknown_field", "/num_head", "a known field", "'num_head'"),
    Bad("unknown inner field", projected(query={"weigth": [[1]]}), 422, "unknown_field", "/projection/query/weigth",
        "a known field", "'weigth'"),
    Bad("unknown layout", good(layout="lb"), 422, "invalid_value", "/layout", "one of 'ld', 'dl'", "'lb'"),
    Bad("unknown stage", good(include=["output"]), 422, "invalid_value", "/include/0", "one of", "'output'"),
    Bad("unknown backend", good(backend="cuda"), 422, "invalid_value", "/backend", "one of 'auto'", "'cuda'"),
    Bad("include not a list", good(include="scores"), 422, "invalid_value", "/include", "a list", "'scores'"),
    Bad("zero heads", good(num_heads=0), 422, "invalid_value", "/num_heads", "at least 1", "number 0"),
    Bad("heads as text", good(num_heads="2"), 422, "invalid_value", "/num_heads", "an integer", "'2'"),
    Bad("scale as boolean", good(scale=True), 422, "invalid_value", "/scale", "a number, or an array", "true"),
    Bad("causal as number", good(is_causal=1), 422, "invalid_value", "/is_causal", "true or false", "number 1"),
    Bad("projection not an object", good(projection=[1]), 422, "invalid_value", "/projection", "an object", "integers"),
    Bad("logsumexp of sums", good(normalization="sum", include=["logsumexp"]), 422, "field_conflict", "/include",
        "no logsumexp", "logsumexp"),
    Bad("an average of causes", good(average_heads=True, include=["hidden_by"]), 422, "field_conflict", "/include",
        "no hidden_by", "hidden_by"),
    Bad("too few labels", good(key_tokens=["a"]), 422, "shape_mismatch", "/key_tokens", "2 labels", "1"),
    Bad("too few labels in a row", good(query_tokens=[["a"]]), 422, "shape_mismatch", "/query_tokens/0", "2", "1"),
    Bad("too many rows of labels", good(query_tokens=[["a", "b"]] * 2), 422, "shape_mismatch", "/query_tokens",
        "1 lists", "2"),
    Bad("a label that is a number", good(key_tokens=["a", 1]), 422, "invalid_array", "/key_tokens/1", "a string", "1"),
    Bad("labels of numbers", good(key_tokens=[1, 2]), 422, "invalid_array", "/key_tokens", "strings", "integers"),
    Bad("labels, mixed depth", good(key_tokens=[["a"], "b"]), 422, "invalid_array", "/key_tokens/1", "strings", "'b'"),
    Bad("labels, nested number", good(key_tokens=[["a", 1]]), 422, "invalid_array", "/key_tokens/0/1", "string", "1"),
    Bad("200 keys", json.dumps({str(i): 1 for i in range(300)}).encode(), 422, "invalid_value", "", "200 keys", "300"),
    # media types
    Bad("no media type", b"{}", 415, "unsupported_media_type", "", "application/json", "no Content-Type", ""),
    Bad("form", b"a=1", 415, "unsupported_media_type", "", "json", "form", "application/x-www-form-urlencoded"),
    Bad("suffix", b"{}", 415, "unsupported_media_type", "", "json", "+json", "application/vnd.api+json"),
]  # fmt: skip


def test_the_table_is_long_enough_and_its_names_are_unique() -> None:
    assert len(BAD) >= 40
    assert len({(bad.name, bad.pointer) for bad in BAD}) == len(BAD)


# Small and large bodies are parsed on different paths.
PADDED = f"{JSON} with 5000 spaces"
FORMS = (JSON, PADDED, NPZ, SAFETENSORS)


def forms_of(number: int) -> tuple[str, ...]:
    """The forms in which a row of the table is sent: one of JSON and one that is binary, in turn.

    What JSON alone can say is sent in both forms of it, and the first fault of each code in all forms.
    """
    bad = BAD[number]
    if not isinstance(bad.body, dict) or bad.name.startswith("typed"):
        return FORMS[:2]
    is_first = all(bad.code != other.code or not isinstance(other.body, dict) for other in BAD[:number])
    return FORMS if is_first else (FORMS[number % 2], FORMS[2 + number // 2 % 2])


def test_every_code_is_met_in_every_form_that_can_have_it() -> None:
    met = {(bad.code, form) for number, bad in enumerate(BAD) for form in forms_of(number)}
    assert met >= {(bad.code, form) for bad in BAD for form in (FORMS if isinstance(bad.body, dict) else FORMS[:2])}


@pytest.mark.parametrize("number", range(len(BAD)), ids=[bad.name for bad in BAD])
def test_a_bad_request_gets_its_problem(number: int, client: httpx.Client) -> None:
    for form in forms_of(number):
        check_problem(BAD[number], client, form)


def check_problem(bad: Bad, client: httpx.Client, form: str = JSON) -> None:
    is_json = form in (JSON, PADDED)
    body = bad.body if isinstance(bad.body, bytes) else wire.write(bad.body, JSON if is_json else form)
    media_type = bad.content_type if is_json else form
    headers = {"Content-Type": media_type} if media_type else {}
    response = client.post("/attention", content=body + b" " * 5000 * (form == PADDED), headers=headers)
    assert response.status_code == bad.status, (form, response.text)
    assert response.headers["content-type"] == "application/problem+json"
    problem = response.json()
    assert (problem["status"], problem["code"], problem["type"]) == (bad.status, bad.code, f"/problems/{bad.code}")
    fault = problem["errors"][0]
    assert (form, fault["code"], fault["pointer"]) == (form, bad.code, bad.pointer)
    assert bad.expected in fault["expected"], form
    if is_json:  # lists of a request are arrays in other formats
        assert bad.got in fault["got"]
    assert len(response.content) < 2000, "an answer must not grow with the body"
    assert client.post("/attention", json=GOOD).status_code == 200, "the server must go on answering"


def errors(client: httpx.Client, request: dict[str, Any]) -> list[dict[str, str]]:
    found: list[dict[str, str]] = client.post("/attention", json=request).json()["errors"]
    return found


def zeros(*shape: int) -> Any:
    """Nested lists of this shape."""
    return [zeros(*shape[1:]) for _ in range(shape[0])] if shape else 0.0


def qkv(query: tuple[int, ...], key: tuple[int, ...], value: tuple[int, ...] = (), **options: Any) -> dict[str, Any]:
    """A request of zeros with these shapes; the value has the shape of the key by default."""
    return {"query": zeros(*query), "key": zeros(*key), "value": zeros(*(value or key))} | options


IF_ONE = "if 1 means takes part, send {0} != 0; else {0} == 0"
HINTS: dict[str, tuple[dict[str, Any], str]] = {
    # What a tokenizer returns as attention_mask, and what other libraries add to scores.
    "key mask of integers": (good(key_mask=[1, 0]), IF_ONE.format("key_mask")),
    "key mask of floats": (good(key_mask=[1.0, 0.0]), IF_ONE.format("key_mask")),
    "mask of integers": (good(mask=[[1, 0], [1, 1]]), IF_ONE.format("mask")),
    "mask to be added": (good(mask=[[0, -1e9], [0, 0]]), "for numbers to be added to the scores use bias"),
    "bias of booleans": (good(bias=[[True, False]] * 2), "send booleans as mask"),
    "mask of padding": (qkv((2, 3, 4), (2, 5, 4), mask=[[True] * 5] * 2),
                        "axes q, k; for one row per batch entry send key_mask"),
    "bias of padding": (qkv((2, 3, 4), (2, 5, 4), bias=zeros(2, 5)),
                        "axes q, k; for one row per batch entry send (2, 1, 1, 5)"),
    "bias of padding, columns": (qkv((2, 4, 3), (2, 4, 5), bias=zeros(2, 5), layout="bdl"),
                                 "axes k, q; for one row per batch entry send (2, 1, 5, 1)"),
    "mask of a batch": (qkv((2, 4, 3, 8), (2, 4, 5, 8), mask=[[[True] * 5] * 3] * 2),
                        "axes h, q, k; for one matrix per batch entry send (2, 1, 3, 5)"),
    # Layouts
    "bhld and blhd": (qkv((2, 8, 16, 4), (2, 16, 8, 4)),
                      "query looks like bhld, key and value look like blhd; all need the same layout"),
    "bhld and blhd, other lengths": (qkv((2, 8, 6, 4), (2, 16, 8, 4)),
                                     "query looks like bhld, key and value look like blhd; all need the same layout"),
    "all blhd": (qkv((2, 6, 8, 4), (2, 16, 8, 4)), "the shapes would fit layout blhd"),
    "all lbd": (qkv((5, 2, 4), (7, 2, 4)), "a batch of 5, as query has; the shapes would fit layout lbd"),
    "grouped heads": (qkv((8, 5, 4), (2, 5, 4)), "a batch of 8, as query has; the shapes would fit layout lbd or hld"),
    "key in columns": (qkv((2, 3), (3, 4), (4, 5)), "3 tokens, as key has; query and value look like ld, key looks "
                       "like dl; all need the same layout"),
    "context in columns": ({"input": zeros(2, 3), "context": zeros(3, 4)}, "head_dim 3, as the query has; input looks "
                           "like ld, context looks like dl; all need the same layout"),
    "packed groups": (qkv((2, 8), (2, 4), num_heads=4), "head_dim 2, as the query has; num_kv_heads 2 would fit"),
    "packed groups, a billion heads": (qkv((2, 8), (2, 4), num_heads=10**9), ""),
    "heads do not divide": (qkv((4, 3), (4, 3), num_heads=2), "the shapes would fit layout dl"),
    "heads do not divide, and no layout has as many": (qkv((3, 2, 2), (3, 2, 2), num_heads=4), ""),
    "no layout has as many heads": (qkv((3, 8, 8, 1), (3, 8, 8, 1), (3, 8, 1, 8), layout="bhld", num_heads=2),
                                     "8 tokens, as key has"),
    "nothing fits": (qkv((2, 3), (5, 4)), "head_dim 3, as the query has"),
    "a cache": (qkv((1, 2, 3, 4), (1, 2, 3, 4), past_key=zeros(1, 5, 2, 4), past_value=zeros(1, 5, 2, 4)),
                "axes b, h, l, d in every layout"),
    # As Hugging Face has them.
    "doubled cosines": (good(rotary={"cos": zeros(2, 2), "sin": zeros(2, 2)}),
                        "of doubled ones, as in Hugging Face, send one of each pair: [..., :d/2], or [..., ::2]"),
    "doubled cosines of a part": (qkv((2, 4), (2, 4), rotary={"cos": zeros(2, 2), "sin": zeros(2, 2), "dim": 2}),
                                  "of doubled ones, as in Hugging Face, send one of each pair: [..., :d/2], or "
                                  "[..., ::2]"),
}  # fmt: skip


@pytest.mark.parametrize("name", HINTS)
def test_a_likely_mistake_gets_its_hint(name: str, client: httpx.Client) -> None:
    request, hint = HINTS[name]
    (fault,) = errors(client, request)
    assert fault.get("hint", "") == hint


def test_all_missing_fields_are_named(client: httpx.Client) -> None:
    assert [fault["pointer"] for fault in errors(client, {"query": [[1]]})] == ["/key", "/value"]


def test_an_overflow_names_the_wider_type(client: httpx.Client) -> None:
    (fault,) = errors(client, good(query=[[1e39, 0]], key=[[1, 0]], value=[[1]], dtype="float32"))
    assert fault["hint"] == "ask for dtype float64"


@pytest.mark.slow
@pytest.mark.parametrize("first", [True, "", 1, None, []], ids=repr)
def test_a_long_string_in_a_long_list_needs_little_memory(first: Any, client: httpx.Client) -> None:
    """A NumPy array would give all elements the length of the longest: 700 GB."""
    array = [first, "a" * 1_000_000, *[""] * 200_000]
    for name in ("mask", "past_key", "bias", "query", "key_lengths", "query_tokens"):
        answer = client.post("/attention", json={"input": [[1.0]], name: array})
        assert answer.status_code == 422, (name, answer.text)
    for name, datatype in (("query", "FP32"), ("mask", "BOOL"), ("bias", "FP64"), ("key_tokens", "BYTES")):
        tensor = {"name": name, "shape": [len(array)], "datatype": datatype, "data": array}
        status = client.post("/v2/models/attention/infer", json={"inputs": [tensor]}).status_code
        assert status in (400, 422), name
