"""The parts of a memory estimate, checked without measuring."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import pytest

from attention_service.attention.cost import Memory, copied_bytes
from attention_service.attention.spec import DType
from attention_service.backends.base import no_check
from attention_service.backends.registry import Backends
from attention_service.codecs.chunks import ENCODE_BYTES
from attention_service.codecs.decoded import Decoded
from attention_service.codecs.json import memory
from attention_service.codecs.table import CODECS
from attention_service.pipeline.engine import Engine
from attention_service.pipeline.prepare import make_spec_and_plan
from attention_service.settings import Settings
from tests.cases import CASES, Case
from tests.helpers.covering import in_turn
from tests.helpers.wire import JSON, NPZ, SAFETENSORS, write

LIMIT = 2**20


def nbytes(value: Any) -> int:
    return sum(map(nbytes, value.values())) if isinstance(value, dict) else value.nbytes


@pytest.mark.parametrize(("case", "dtype"), in_turn(CASES, ["float64", "float32", "float16"]))
def test_the_size_of_the_results_is_estimated_exactly(case: Case, dtype: DType) -> None:
    fields = CODECS[JSON].decode(write({**case.request, "dtype": dtype}, JSON), LIMIT)
    attention = Engine(Settings.model_construct()).attention
    request = attention.prepare(fields)
    assert nbytes(attention.compute(request, no_check).arrays) == request.shared.plan.returned_bytes


BODY: dict[str, Any] = {"query": np.ones((50, 4)), "key": np.ones((60, 4)), "value": np.ones((60, 4))}
ARRAYS = 170 * 4 * 8


def test_decoded_views_count_the_whole_body_once() -> None:
    body = write(BODY | {"query_tokens": ["a" * 1000] * 50}, SAFETENSORS)
    kept = CODECS[SAFETENSORS].decode(body, LIMIT).nbytes
    assert len(body) + 50 * 1000 <= kept <= len(body) + 50 * 1200
    for view in (bytearray(body), np.frombuffer(bytearray(body), np.uint8).data):
        assert CODECS[SAFETENSORS].decode(view, LIMIT).nbytes == kept


def test_decoded_copies_count_only_their_own_size() -> None:
    stream = io.BytesIO()
    np.savez_compressed(stream, **BODY)
    for media_type, body in ((JSON, write(BODY, JSON)), (NPZ, stream.getvalue())):
        assert ARRAYS <= CODECS[media_type].decode(body, LIMIT).nbytes <= ARRAYS + 3 * 200


def test_json_is_estimated_by_what_it_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    """By hand, of 2 commas, 2 containers, 5 values at most, and a string of one byte, whose quotes are 2 bytes apart.

    simdjson has the body twice (26), 11 marks (44), 5 values and their elements (120), a key that becomes a string (88)
    and its text three times (6); Python 3 numbers of 4 bytes (96) and 2 lists (208). Allocators add a 32nd.
    """
    monkeypatch.setattr(memory, "HAS_SIMDJSON", True)
    body = b'{"a":[1,2,3]}'
    assert memory.decode_bytes(body) == 588 + 588 // 32
    # A backslash hides which quotes end a string: two strings, and all 53 bytes are text of 4 bytes a character.
    total = 2 * 53 + 13 * 4 + 120 + 2 * 88 + 53 * 6 + 5 * 32 + 208
    assert memory.decode_bytes(b'{"\\":[1,2,3]' + b" " * 40 + b"}") == total + total // 32
    assert memory.decode_bytes(b"7" * 3200) == 3200 * 4 + 3200 * 4 // 32  # no JSON, for all that is known


def test_json_is_estimated_by_what_it_holds_without_simdjson(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python has the body and its text in characters of one byte (26, 4), 5 values and their elements (17 bytes each).

    4 numbers of at least 3 bytes (128), a string (80), a list, an object and its key (121, 161, 250).
    """
    monkeypatch.setattr(memory, "HAS_SIMDJSON", False)
    total = 26 + 4 + 5 * 17 + 128 + 80 + 121 + 161 + 250
    assert memory.decode_bytes(b'{"a":[1,2,3]}') == total + total // 32


@pytest.mark.parametrize(("has_simdjson", "factors"), [(True, (19, 6, 31)), (False, (20, 6, 61))])
def test_any_json_of_a_length_has_a_bound(
    has_simdjson: bool, factors: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By its worst bodies: numbers; at most 2**22 strings; at most 2**19 lists, or 2**29 bytes of containers."""
    monkeypatch.setattr(memory, "HAS_SIMDJSON", has_simdjson)
    assert memory.decode_bound(1000) == 1000 * sum(factors)
    lists = 112 * 2**19 if has_simdjson else 2**29
    assert memory.decode_bound(10**9) == factors[0] * 10**9 + 27 * 2**22 + lists


def test_decoded_lists_count_the_memory_of_python_objects() -> None:
    rows = Decoded({"bias": [[0.5, None]] * 1000}, frozenset()).nbytes
    assert 1000 * (56 + 2 * 8) <= rows <= 1000 * (56 + 2 * 8 + 2 * 32 + 100)
    assert Decoded({"include": [], "layout": "ld"}, frozenset()).nbytes < 500


def test_the_estimated_peak_is_that_of_the_largest_phase() -> None:
    body = write(BODY, SAFETENSORS)
    decoded = CODECS[SAFETENSORS].decode(body, LIMIT)
    spec, plan = make_spec_and_plan(decoded)
    backend = Backends().choose("numpy", "cpu")
    compute = backend.peak_bytes(plan, "cpu", copied_bytes(plan, spec))
    found = Memory(10**9, decoded.nbytes, compute, plan.returned_bytes, ENCODE_BYTES)
    assert found.results == (50 * 4 + 50 * 60) * 8
    assert found.decoded == len(body)
    assert found.peak >= 10**9
    assert 10**8 <= found._replace(decode=0, compute=10**8).peak < 10**9
    assert found._replace(results=10**9).peak >= 10**9 + found.decoded + found.encode
