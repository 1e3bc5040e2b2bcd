"""What elements arrays may have: numbers and booleans. Codes are none without their factors, in any field or format."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from typing import Any, Final

import httpx
import ml_dtypes
import numpy as np
import pytest

from attention_service import attend, call, compare, merge
from attention_service.codecs.element_types import JSON_TYPES
from attention_service.codecs.safetensors import file_chunks
from attention_service.errors import InvalidRequest
from tests.conftest import app, serving
from tests.helpers.options import as_fields, plain, unusual
from tests.helpers.wire import JSON, NPZ, SAFETENSORS, typed_array

SIZES: Final = (2, 2, 4, 6)
# All types of ml_dtypes but bfloat16, and those of NumPy but booleans, integers, and floats of two to eight bytes.
OTHERS: Final = [
    *(
        np.dtype(kind)
        for name in dir(ml_dtypes)
        if isinstance(kind := getattr(ml_dtypes, name), type) and issubclass(kind, np.generic) and name != "bfloat16"
    ),
    *(np.dtype(kind) for kind in ("longdouble", "complex64", "complex128", "datetime64[s]", "timedelta64[s]")),
    *(np.dtype(kind) for kind in ("S1", "V1", "V2")),
]
each_other = pytest.mark.parametrize("dtype", OTHERS, ids=lambda dtype: dtype.name)
FLOAT8: Final = [dtype for dtype in JSON_TYPES.values() if dtype.name.startswith("float8")]
# Options that `attend` has no argument for.
NO_FIELDS: Final = {"untyped", "allow_non_finite"}


def leaves(fields: dict[str, Any], path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """The arrays and floats of a request, with the way to each."""
    for name, value in fields.items():
        if isinstance(value, dict):
            yield from leaves(value, (*path, name))
        elif isinstance(value, np.ndarray | float) and not isinstance(value, bool):
            yield (*path, name), np.asarray(value)


def put(fields: dict[str, Any], path: tuple[str, ...], value: Any) -> dict[str, Any]:
    """The fields with another value at a place."""
    name, *inner = path
    return fields | {name: put(fields[name], tuple(inner), value) if inner else value}


def of_type(array: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """The array in a type, zeros where it has none of its numbers."""
    try:
        with np.errstate(all="ignore"):
            return array.astype(dtype)
    except (TypeError, ValueError):
        return np.zeros(array.shape, dtype)


@each_other
@pytest.mark.filterwarnings("ignore::numpy.exceptions.ComplexWarning")
def test_no_field_takes_other_elements(dtype: np.dtype) -> None:
    """Arrays and numbers in every field, those of few scores and those with options: each is refused by name."""
    seen = set()
    for name, option in {"none": {}, **unusual(*SIZES)}.items():
        if name in NO_FIELDS:
            continue
        fields = as_fields(plain(*SIZES)._replace(**option))
        attend(**fields)
        for path, array in leaves(fields):
            seen.add(path[0])
            with pytest.raises(InvalidRequest) as error:
                attend(**put(fields, path, of_type(array, dtype)))
            assert error.value.faults[0].pointer == "/" + "/".join(path)
            assert not error.value.faults[0].got.startswith("numbers")
    assert {"query", "key", "value", "mask", "bias", "sinks", "scale", "softcap", "key_lengths"} <= seen


def test_input_takes_no_codes() -> None:
    for dtype in OTHERS:
        with pytest.raises(InvalidRequest, match="/input"):
            attend(input=of_type(np.eye(3), dtype))


def test_outputs_of_kernels_take_no_codes() -> None:
    for dtype in OTHERS:
        with pytest.raises(InvalidRequest, match="/actual/output"):
            compare(of_type(np.zeros((2, 2)), dtype), input=np.eye(2))
        with pytest.raises(InvalidRequest, match="/parts/0/output"):
            merge([(of_type(np.zeros((2, 2)), dtype), np.zeros(2))])


@pytest.fixture(scope="module")
def client() -> Iterator[httpx.Client]:
    with serving(app()) as found:
        yield found


def answer(client: httpx.Client, media_type: str, content: bytes) -> dict[str, Any]:
    found = client.post("/attention", content=content, headers={"content-type": media_type})
    assert found.status_code in (400, 422), found.text
    fault: dict[str, Any] = found.json()["errors"][0]
    return fault


@pytest.mark.parametrize("dtype", FLOAT8, ids=str)
@pytest.mark.parametrize("field", ["query", "key", "value", "input", "bias", "softcap"])
def test_codes_of_a_request_are_refused_in_json_and_safetensors(
    client: httpx.Client, dtype: np.dtype, field: str
) -> None:
    codes = np.ones(() if field == "softcap" else (2, 2)).astype(dtype)
    arrays = (
        {field: codes} if field == "input" else dict.fromkeys(("query", "key", "value"), np.eye(2)) | {field: codes}
    )
    text = json.dumps({name: typed_array(array) for name, array in arrays.items()}).encode()
    for media_type, content in ((JSON, text), (SAFETENSORS, b"".join(file_chunks(arrays, {})[0]))):
        fault = answer(client, media_type, content)
        assert (fault["code"], fault["pointer"]) == ("invalid_array", f"/{field}")
        assert fault["got"] == f"codes of {dtype.name} of shape {codes.shape}"


@each_other
def test_other_elements_are_refused_in_npz(client: httpx.Client, dtype: np.dtype) -> None:
    stream = io.BytesIO()
    np.savez(stream, input=of_type(np.eye(2), dtype))
    fault = answer(client, NPZ, stream.getvalue())
    assert "'input' to be" in fault["expected"]
    # As NumPy writes them: one byte of no type, but float8_e5m2.
    assert ("no float8" in fault.get("hint", "")) is (dtype.str[1:] in ("V1", "f1"))


@pytest.mark.parametrize("dtype", FLOAT8, ids=str)
def test_calls_take_codes(dtype: np.dtype) -> None:
    """With factors they are numbers: keys of one code, so that all values weigh alike."""
    q, k = np.ones((1, 1, 1, 2), np.float32), np.ones((1, 2, 1, 2)).astype(dtype)
    v = np.array([1.0, 3.0], np.float32).repeat(2).reshape(1, 2, 1, 2).astype(dtype)
    factor = np.full((1, 1), 2.0)
    found = call("flash_attn.flash_attn_func", version=3, q=q, k=k, v=v, k_descale=factor, v_descale=factor)
    assert found.output.tolist() == [[[[4.0, 4.0]]]]
