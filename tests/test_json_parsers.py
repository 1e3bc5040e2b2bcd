"""JSON is read the same by simdjson, and by the standard library, which takes its place where it has no wheel."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from attention_service.codecs.json import reader, standard_library
from attention_service.codecs.json.parser import HAS_SIMDJSON
from attention_service.codecs.json.standard_library import KEY, LIST, MAX_CONTAINER_BYTES, OBJECT
from attention_service.errors import ServiceError, TooLarge
from tests.helpers.documents import ROOT
from tests.memory.hostile import BODIES
from tests.memory.test_estimates import SLACK

WITHOUT_SIMDJSON = "tests.helpers.without_simdjson"
needs_simdjson = pytest.mark.skipif(not HAS_SIMDJSON, reason="compares with simdjson")

NUMBERS = """0 -0 -0.0 1 -6 1.5 1e2 1E-400 4.9e-324 1.7976931348623157e308 1e309 -1e999 01 1. .5 - +1 NaN Infinity
9223372036854775807 9223372036854775808 18446744073709551615 18446744073709551616 -9223372036854775808
-9223372036854775809"""
numbers = st.sampled_from([*NUMBERS.split(), "9" * 400])
STRINGS = r"""a [ \u005b \ud83d\ude00 \ud800 \udc00 \\ud800 \\\ud800x \ud800\ud800 \uD83D\u0041 \n \x \u12"""
quoted = st.sampled_from(["", "\n", "\u0100", "\U0001f600", "\x7f", *STRINGS.split()]).map(lambda text: f'"{text}"')
keys = st.sampled_from(['"a"', '"b"', '"a\\u0000"', '"\\u0061"', '"dtype"', '"shape"', '"data"', '""', "a"])
scalars = st.sampled_from(["1", "2.5", "-3", "true", "false", "null", '"a"']) | numbers | quoted


def lists(items: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    return st.lists(items, max_size=4).map(lambda texts: f"[{', '.join(texts)}]")


def objects(items: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    pairs = st.lists(st.tuples(keys, items), max_size=4)
    return pairs.map(lambda fields: f"{{{','.join(f'{key}: {item}' for key, item in fields)}}}")


rows = lists(st.sampled_from(["1", "2", "-3", "2.5"])) | lists(st.sampled_from(["true", "false"]))
values = st.recursive(scalars | rows, lambda inner: lists(inner) | objects(inner) | lists(rows), max_leaves=20)
documents = objects(values).map(str.encode)
PIECES = [
    b'"',
    b"[",
    b"]",
    b"{",
    b"}",
    b",",
    b":",
    b"1",
    b"e9",
    b".",
    b"-",
    b"\\",
    b"\\ud800",
    b"\0",
    b"\xff",
    b" ",
    b"null",
]


@st.composite
def mutated(draw: st.DrawFn) -> bytes:
    """A document with some bytes replaced."""
    body = bytearray(draw(documents))
    for _ in range(draw(st.integers(1, 3))):
        start = draw(st.integers(0, len(body)))
        body[start : start + draw(st.integers(0, 3))] = draw(st.sampled_from(PIECES) | st.binary(max_size=2))
    return bytes(body)


def exact(value: Any) -> Any:
    """A value whose equality tells 1 from 1.0 and true, and 0.0 from -0.0."""
    if isinstance(value, dict):
        return [(key, exact(item)) for key, item in value.items()]
    return (value.dtype, value.shape, value.tobytes()) if isinstance(value, np.ndarray) else repr(value)


def read(body: bytes, parser: Any) -> Any:
    """The fields and their types, or the class of the error with the codes and pointers of its faults."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reader, "simdjson", parser)
        patch.setattr(reader, "_spare", [])  # parsers that are kept for later bodies
        try:
            decoded = reader.decode(body)
        except ServiceError as error:
            return type(error), [(fault.code, fault.pointer, fault.expected) for fault in error.faults]
    return exact(decoded.fields), decoded.untyped


@needs_simdjson
@given(documents | mutated())
@example(b'{"a": 1, "a\\u0000": 2}')
@example(b'{"a": [[true, false], [true, {}]], "b": [true, []], "c": [[true], [[]]]}')
@example(b'{"a": [{"a": 1}, {"a": [{"b": 1, "b": 2}, 1]}], "b": [[1, [2]], [3, 4]], "c": [1, {"a": 1, "a": 2}]}')
@example(b'{"a": [1, 18446744073709551615], "b": [0.5, 18446744073709551615], "c": [[1], [2, 3]], "d": [[1], ""]}')
@example(b'{"a": [[1, 1, 1], {"a": 1, "b": 1, "a": []}], "b": [[[1, 2]], {"aa": 1}], "c": [[[1], [2]], {"d": [3]}]}')
@example(b'{"a": ' + b"[" * 500 + b"]" * 500 + b"}")
@example(b'{"a": [1, ' + b"[" * 500 + b"]" * 500 + b"]}")
@example(b'{"a": [true, ' + b'{"b": [' * 200 + b"1" + b"]}" * 200 + b"]}")
@example(b'{"a": ' + b"[" * 100_000)
@example(b'{"a": "\xed\xa0\x80"}')
def test_both_parsers_give_the_same_fields_or_the_same_error(body: bytes) -> None:
    import simdjson

    assert read(body, standard_library) == read(body, simdjson)


@pytest.mark.parametrize(
    "text", ["\\n" * 2**20, "\\ud83d\\ude00" * 2**18, "\\\\" * 2**20 + "\\ud83d\\ude00", "x" * 2**20]
)
def test_escapes_are_looked_at_once(text: str) -> None:
    assert read(f'{{"a": "{text}"}}'.encode(), standard_library) == (
        [("a", repr(json.loads(f'"{text}"')))],
        frozenset(),
    )


@pytest.mark.parametrize(("item", "each"), [("[]", LIST), ("{}", OBJECT), ('"":0', KEY)])
def test_more_lists_objects_or_keys_than_memory_allows_are_refused_before_they_are_made(item: str, each: int) -> None:
    parser = standard_library.Parser()
    with pytest.raises(TooLarge, match="fewer arrays, objects and keys"):
        parser.parse(f"{item},".encode() * (MAX_CONTAINER_BYTES // each + 1))
    with pytest.raises(json.JSONDecodeError):
        parser.parse(f"{item},".encode() * 1000)


@pytest.mark.parametrize("items", [b"[1, true]", b"[1, null]", b'[1, "2"]', b"[1, {}]", b"[1, [2]]", b'[[1], ""]'])
def test_what_is_no_number_has_no_buffer(items: bytes) -> None:
    array = standard_library.Parser().parse(items)
    for of_type in ("i", "d"):
        with pytest.raises((TypeError, ValueError)):
            array.as_buffer(of_type=of_type)


@pytest.mark.slow
def test_the_service_starts_and_answers_without_simdjson() -> None:
    """The tests of JSON and of bad requests pass in a process that cannot import simdjson."""
    which = f"import {WITHOUT_SIMDJSON}; from attention_service.codecs.json.parser import HAS_SIMDJSON as it; print(it)"
    assert subprocess.check_output([sys.executable, "-c", which], text=True, cwd=ROOT) == "False\n"
    command = [sys.executable, "-m", "pytest", "-q", "-p", WITHOUT_SIMDJSON, "-p", "no:cacheprovider", "-m", "not slow"]
    tests = ["tests/test_json.py", "tests/test_bad_requests.py", "tests/test_schemas.py"]
    done = subprocess.run([*command, *tests], capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stdout[-4000:]


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_decoding_without_simdjson_stays_within_its_estimate_and_bound() -> None:
    command = [sys.executable, "-m", WITHOUT_SIMDJSON, "tests.memory.hostile"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT)
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert [row["name"] for row in rows] == list(BODIES)
    for row in rows:
        phases = row["phases"]
        assert row["peak"] <= 1.25 * phases["decode"] + SLACK, row
        assert phases["decode"] <= phases["results"], row
