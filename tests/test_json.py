"""The JSON codec decodes the same values as Python's json module, or raises a ServiceError."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import orjson
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from attention_service.codecs.chunks import MAX_CHUNK
from attention_service.codecs.json import JSONCodec
from attention_service.codecs.json import reader as json_reader
from attention_service.codecs.json.limits import MAX_DEPTH, MAX_KEYS, MAX_LENGTH, MAX_LISTS, MAX_SEARCHED
from attention_service.codecs.json.long_numbers import may_have_many
from attention_service.codecs.json.reader import decode as decode_with_types
from attention_service.errors import InvalidArray, InvalidJSON, Overflow, ServiceError, TooLarge
from attention_service.pipeline.prepare import make_spec_and_plan
from tests.helpers.wire import NO_OPTIONS


def decode(body: bytes) -> dict[str, Any]:
    return decode_with_types(body).fields


def encode(answer: dict[str, Any]) -> bytes:
    return b"".join(JSONCodec().encode(answer, NO_OPTIONS).chunks)


numbers = st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False, allow_infinity=False)
texts = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=10)
scalars = numbers | st.booleans() | st.none() | texts
arrays = st.recursive(st.lists(scalars | numbers, max_size=4), lambda inner: st.lists(inner | scalars, max_size=4))
values = st.recursive(scalars | arrays, lambda inner: st.dictionaries(texts, inner, max_size=4))
documents = st.dictionaries(texts, values, max_size=6)


def plain(value: Any) -> Any:
    """Arrays converted to lists, for comparison with the result of json.loads."""
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    return value.tolist() if isinstance(value, np.ndarray) else value


def same(ours: Any, theirs: Any) -> bool:
    """True if both are equal; integers among other numbers may have become floats; true is not 1."""
    if isinstance(theirs, dict):
        return ours.keys() == theirs.keys() and all(same(ours[key], theirs[key]) for key in theirs)
    if isinstance(theirs, list):
        return len(ours) == len(theirs) and all(map(same, ours, theirs))
    if isinstance(theirs, bool) or isinstance(ours, bool):
        return ours is theirs
    return bool(ours == theirs or (isinstance(theirs, int) and ours == float(theirs)))


@given(documents)
@example({"a": [[1, 2], [3, 4.5]], "[": "]["})
@example({"labels": ["[CLS]", "\\["], "a": [[1, [2]], [3, 4]]})
@example({"a": [[True], [False]], "b": [[True], [1]], "c": [[1], [True]]})
@example({"a": [True, [False]], "b": [[True], [[True]]], "c": [True, "false"], "d": [[True, None]], "e": [[True], []]})
@example({"a": [1, 2**63 - 1], "b": [0.5, 2**64 - 1], "c": 2**64 - 1})
@example({"a": [[[1]], [[2, 3]]], "b": [[], []], "c": [[1], []], "d": [[1], {}]})
def test_documents_are_decoded_as_by_python(document: dict[str, Any]) -> None:
    body = json.dumps(document).encode()
    assert same(plain(decode(body)), json.loads(body))


@given(st.binary(max_size=60) | documents.map(lambda document: json.dumps(document).encode()[:-3]))
def test_garbage_decodes_or_raises_a_service_error(body: bytes) -> None:
    try:
        assert isinstance(decode(body), dict)
    except ServiceError as error:
        assert error.status in (400, 422)
        assert error.faults
        assert len(str(error)) < 2000


@pytest.mark.parametrize(
    ("text", "dtype", "shape"),
    [
        ("[1, 2]", np.int64, (2,)),
        ("[1, 2.5]", np.float64, (2,)),
        ("[2.5, 1]", np.float64, (2,)),
        ("[18446744073709551615]", np.float64, (1,)),
        ("[[true], [false]]", np.bool_, (2, 1)),
        ("[[ false, true ], [ true , false ]]", np.bool_, (2, 2)),
        ("[[[1, 2, 3]], [[4, 5, 6]]]", np.int64, (2, 1, 3)),
    ],
)
def test_arrays_have_the_dtype_of_their_numbers(text: str, dtype: type, shape: tuple[int, ...]) -> None:
    array: np.ndarray = decode(f'{{"a": {text}}}'.encode())["a"]
    assert isinstance(array, np.ndarray)
    assert (array.dtype, array.shape) == (np.dtype(dtype), shape)


@pytest.mark.slow
@pytest.mark.parametrize("opening", ["[", "[[", '["a",'])
def test_a_row_longer_than_simdjson_can_count_is_refused(opening: str) -> None:
    """simdjson would silently drop all elements after 2**24 - 1."""
    closing = "]" * opening.count("[")
    row = "1," * (2**24 - 1 - opening.count("a"))
    with pytest.raises(InvalidArray, match="at most 16777214 elements"):
        decode_with_types(f'{{"a":{opening}{row}2{closing}}}'.encode())
    assert len(decode_with_types(b'{"a":[' + b"1," * (MAX_LENGTH - 1) + b"2]}").fields["a"]) == MAX_LENGTH


def test_bodies_at_the_limits_are_accepted() -> None:
    nested = "[" * MAX_DEPTH + "]" * MAX_DEPTH
    assert decode(f'{{"a": {nested}}}'.encode())
    assert len(decode(json.dumps({str(i): i for i in range(MAX_KEYS)}).encode())) == MAX_KEYS


def test_nan_before_deep_nesting_raises_a_service_error() -> None:
    body = b'{"a": NaN, "b": ' + b"[" * 5000 + b"]" * 5000 + b"}"
    with pytest.raises(ServiceError):
        decode(body)


@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.int64, np.bool_])
def test_arrays_of_any_strides_are_encoded(dtype: type) -> None:
    array: np.ndarray = np.arange(6).astype(dtype).reshape(2, 3)
    for view in (array, array.T, array[:, ::2], array[0]):
        assert json.loads(encode({"a": view}))["a"] == view.tolist()


@pytest.mark.parametrize("shape", [(2**16 + 1,), (3, 2**15 + 1), (400, 200), (2, 3, 140, 90), (1, 2**17), (80000, 1)])
def test_large_arrays_are_encoded_in_chunks(shape: tuple[int, ...]) -> None:
    array = np.arange(np.prod(shape), dtype=np.float32).reshape(shape) / 7
    array.flat[-1] = -np.inf
    for view in (array, array.T):
        expected = view.astype(object)
        expected[~np.isfinite(view)] = None
        chunks = list(JSONCodec().encode({"a": 1, "b": view, "c": {"d": [2]}}, NO_OPTIONS).chunks)
        assert len(chunks) > 1
        assert max(map(len, chunks)) <= MAX_CHUNK
        assert json.loads(b"".join(chunks), parse_float=np.float32) == {"a": 1, "b": expected.tolist(), "c": {"d": [2]}}


def test_numbers_that_are_not_finite_are_encoded_as_null() -> None:
    assert orjson.loads(encode({"a": np.array([1.5, -np.inf])})) == {"a": [1.5, None]}


@given(st.lists(st.floats(allow_nan=False, allow_infinity=False), min_size=1))
def test_numbers_are_encoded_and_decoded_bit_for_bit(row: list[float]) -> None:
    back = decode(encode({"a": np.array(row)}))["a"]
    assert [math.copysign(1, x) for x in back] == [math.copysign(1, x) for x in row]
    assert back.tolist() == row


@pytest.mark.parametrize("body", [b"[" + b"[]," * MAX_LISTS + b"[1]]", b"[" + b"{}," * MAX_LISTS + b"1]"])
def test_too_many_lists_or_objects_are_refused(body: bytes) -> None:
    with pytest.raises(TooLarge, match="/bias: expected at most 524288 arrays"):
        decode(b'{"bias": ' + body + b"}")
    with pytest.raises(InvalidJSON, match="RFC 8259"):  # and it is not parsed a second time
        decode(b'{"bias": ' + body)


@pytest.mark.parametrize("item", [b"1", b"true"])
def test_the_limit_of_lists_does_not_apply_to_rows_of_numbers_or_booleans(item: bytes) -> None:
    body = b'{"query": [' + (b"[" + item + b"],") * MAX_LISTS + b"[" + item + b"]]}"
    assert decode(body)["query"].shape == (MAX_LISTS + 1, 1)


@pytest.mark.slow
@pytest.mark.parametrize("number", ["1", "1.5"])
def test_the_search_for_a_wrong_value_has_a_limit(number: str) -> None:
    """Up to a number of values, the error has the pointer of the wrong value; beyond, only its kind."""
    row = f"{number}," * (MAX_SEARCHED - 1)
    for wrong, error in (("NaN", InvalidJSON), ("null", InvalidArray), ("[1]", InvalidArray)):
        with pytest.raises(ServiceError) as found:
            make_spec_and_plan(decode_with_types(f'{{"query": [{row} {wrong}]}}'.encode()))
        assert found.value.faults[0].pointer == f"/query/{MAX_SEARCHED - 1}"
        with pytest.raises(error) as found:
            decode_with_types(f'{{"query": [{row} {number}, {wrong}]}}'.encode())
        assert found.value.faults[0].hint == f"the place is looked for in bodies of at most {MAX_SEARCHED} values"


def test_short_lists_are_decoded_beside_any_number_of_values() -> None:
    many = b"1," * MAX_SEARCHED
    fields = decode_with_types(b'{"query": [' + many + b'1], "include": [], "key_tokens": ["a", "b"]}').fields
    assert (fields["include"], fields["key_tokens"]) == ([], ["a", "b"])


@pytest.mark.slow
@pytest.mark.parametrize("bracket", ["[", "\\u005b", "[]"])
def test_a_bracket_in_a_string_costs_no_search(bracket: str) -> None:
    """Brackets in strings raise the number of brackets, so that a naive search would scan each array again."""
    row = b"[1,2.5]," * (MAX_SEARCHED // 2)
    end = f'"a": "{bracket}"}}'.encode()
    query = decode_with_types(b'{"query": [' + row + b"[1,2.5]], " + end).fields["query"]
    assert query.shape == (MAX_SEARCHED // 2 + 1, 2)
    for wrong in ("[[1, 2], [3, [4]]]", "[1, [2]]", "[[1], [[], [1, 2]]]", "[true, [false]]", "[[[1], [[2]]]]"):
        assert isinstance(decode(f'{{"query": {wrong}, '.encode() + end)["query"], list)


def test_a_body_is_not_searched_for_each_of_its_lists(monkeypatch: pytest.MonkeyPatch) -> None:
    """A body may be long and have very many lists."""
    looks: list[str] = []

    def counted(name: str, look: Callable[[bytes], bool]) -> Callable[[bytes], bool]:
        def counting(body: bytes) -> bool:
            looks.append(name)
            return look(body)

        return counting

    names = ["has_too_many_lists", "has_too_many_values"]
    for name in names:
        monkeypatch.setattr(json_reader, name, counted(name, getattr(json_reader, name)))
    lists = ",".join(f'"{i}": {json.dumps([None] * 65)}' for i in range(50))
    assert len(decode_with_types(f"{{{lists}}}".encode()).fields) == 50
    assert sorted(looks) == names


ROWS = ", ".join(["[1.5, -2000]"] * 2**13)
QUICK = {
    "rows of numbers": f'{{"query": [{ROWS}], "is_causal": true, "include": ["scores"]}}',
    "many exponents": json.dumps({"query": [1.5e-9] * 5000}),
    "base64 with many digits before an e": json.dumps({"query": "4e5E" * 2**14}),
    "booleans": f'{{"mask": [{", ".join(["true"] * 2**15)}]}}',
    "a typed array": '{"query": {"dtype": "float32", "shape": [1, 2], "data": "AACAPwAAAEA="}}',
    "a long string": json.dumps({"query": "a" * 2**17}),
}
SLOW = {
    "many rows": f'{{"query": [{ROWS}], "key": [{ROWS}]}}',
    "many rows of numbers with a list": f'{{"query": [{ROWS}, [1, [2]]]}}',
    "a long list of strings": json.dumps({"query_tokens": ["a"] * 65}),
    "many keys": json.dumps({f"k{i}": {f"a{j}": 1 for j in range(190)} for i in range(100)}),
    "many long numbers": f'{{"query": [{", ".join(["1.234567890123456789e-300"] * 5000)}]}}',
    "a fault": f'{{"query": [{ROWS}, nul]}}',
    "too long a body": json.dumps({"query": "a" * 2**21}),
}


@pytest.mark.parametrize("name", QUICK)
def test_a_body_that_takes_little_time_is_decoded_quickly(name: str) -> None:
    body = QUICK[name].encode()
    quick = JSONCodec().decode_quickly(body, len(body))
    assert quick is not None
    decoded = decode_with_types(body)
    assert quick.untyped == decoded.untyped
    assert same(plain(quick.fields), plain(decoded.fields))


@pytest.mark.parametrize("name", SLOW)
def test_a_body_that_may_take_longer_is_not_decoded_quickly(name: str) -> None:
    body = SLOW[name].encode()
    assert JSONCodec().decode_quickly(body, len(body)) is None


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
def test_long_numbers_give_the_same_values_as_in_python(kind: Callable[[bytes], Any]) -> None:
    chance = random.Random(0)
    numbers = [f"{chance.randrange(10**19, 10**25)}.5e{chance.randrange(-330, 270)}" for _ in range(500)]
    numbers += [
        f"-{chance.random() * 10.0 ** -chance.randrange(320):.{chance.randrange(18, 40)}e}" for _ in range(1000)
    ]
    strings = ["12345678901234567890e5", '12345678901234567890e5"', "\\"]
    body = f'{{"query": [{", ".join(numbers)}], "query_tokens": {json.dumps(strings)}}}'.encode()
    fields = decode_with_types(kind(body)).fields
    assert fields["query"].tolist() == json.loads(body)["query"]
    assert fields["query_tokens"] == strings


@pytest.mark.parametrize(
    "end", ["1" * 10**6 + "]", "1.2" * 10**6 + "e5]", '"' + '\\"' * 10**6, '1], "key": "' + '\\"' * 10**6]
)
def test_a_body_with_long_numbers_is_searched_once(end: str) -> None:
    """A search that started anew at each digit or quote would take hours."""
    numbers = ", ".join(["1.234567890123456789e-300"] * 5000)
    with pytest.raises(ServiceError):
        decode_with_types(f'{{"query": [{numbers}, {end}}}'.encode())


def test_a_long_number_beyond_float64_is_refused() -> None:
    numbers = ", ".join(["1.234567890123456789e-300"] * 5000)
    with pytest.raises(Overflow) as caught:
        decode_with_types(f'{{"query": [{numbers}, 12345678901234567890e300]}}'.encode())
    assert caught.value.faults[0].pointer == "/query/5000"


BUFFERS = {
    "arrays": b'{"query": [[1, 2], [3, 4.5]], "key": [[true]], "layout": "ld"}',
    "hidden bracket": b'{"query": [[1, 2], [3, [4]]], "a": "\\u005b"}',
    "byte-order mark": b"\xef\xbb\xbf{}",
    "nothing": b"   \n\t ",
    "bad UTF-8": b'{"a": "\xff"}',
    "bad JSON": b'{"a": [1, 2}',
    "a key twice": b'{"a": [1], "a": [2]}',
    "no object": b"[1, 2]",
    "long": b'{"query": [' + b"[1.5, -2e3], " * 4000 + b"[0, 0]]}",
    "long and wrong": b'{"query": [' + b"[1.5, -2e3], " * 4000 + b"[0, nul]]}",
}


@pytest.mark.parametrize("name", BUFFERS)
def test_bodies_in_any_buffer_are_decoded_the_same(name: str) -> None:
    """Long bodies are memoryviews, which lack the text methods of bytes."""

    def exact(value: Any) -> Any:
        return (value.dtype, value.shape, value.tobytes()) if isinstance(value, np.ndarray) else value

    def read(body: bytes | bytearray | memoryview) -> Any:
        try:
            decoded = decode_with_types(body)
        except ServiceError as error:
            return type(error), str(error)
        return decoded.untyped, {key: exact(value) for key, value in decoded.fields.items()}

    body = BUFFERS[name]
    assert read(body) == read(bytearray(body)) == read(np.frombuffer(body, np.uint8).data)


def test_a_body_has_many_long_numbers_from_1_025_on() -> None:
    number = b"1." + b"0" * 40 + b"e0"
    assert [may_have_many(b",".join([number] * count)) for count in (1024, 1025)] == [False, True]
