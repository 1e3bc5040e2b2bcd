"""Arrays of torch, JAX and others are taken as they are, in every field."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from attention_service import attend, compare
from attention_service.attention.arrays import BFLOAT16
from attention_service.codecs.array_objects import as_numpy
from attention_service.errors import InvalidArray, InvalidRequest

# Two tokens of four features, which bfloat16 holds exactly.
TOKENS = np.array([[1.0, 0.5, -2.0, 3.0], [0.25, -1.0, 4.0, 1.5]], np.float32)
# All kinds of fields that hold arrays, in two heads of two features.
FIELDS: dict[str, Any] = {
    "input": TOKENS,
    "num_heads": 2,
    "projection": {"query": {"weight": np.eye(4, dtype=np.float32)[::-1], "bias": np.ones(4, np.float32)}},
    "rotary": {"cos": np.array([[0.5], [0.25]], np.float32), "sin": np.array([[0.75], [-0.5]], np.float32)},
    "segment_ids": {"query": np.array([0, 1]), "key": np.array([0, 1])},
    "mask": np.array([[True, True], [False, True]]),
    "bias": np.array([[0.5, -0.5], [1.5, 0.0]], np.float32),
    "sinks": np.array([0.5, 1.0], np.float32),
    "key_lengths": np.array(2),
    "window": {"left": 1},
    "include": ["attention_weights", "query"],
}


class ByArray:
    """An array that only says `__array__`."""

    def __init__(self, array: np.ndarray) -> None:
        self.array = array

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.array(self.array, dtype=dtype, copy=copy)


class OnDevice:
    """An array that refuses `__array__`, as CuPy's do, and is copied to the CPU by DLPack."""

    def __init__(self, array: np.ndarray) -> None:
        self.array = np.ascontiguousarray(array)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        raise TypeError("Implicit conversion to a NumPy array is not allowed.")

    def __dlpack__(self, *, dl_device: Any = None, **options: Any) -> Any:
        assert dl_device == (1, 0), "asked for the CPU"
        return self.array.__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        return 2, 0


class ByDLPack:
    """An array that only says `__dlpack__`."""

    def __init__(self, array: np.ndarray) -> None:
        self.array = np.ascontiguousarray(array)

    def __dlpack__(self, **options: Any) -> Any:
        return self.array.__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        return 1, 0


def torch_tensor(array: np.ndarray) -> Any:
    import torch

    if array.dtype == BFLOAT16:
        return torch.from_numpy(np.ascontiguousarray(array.view(np.int16))).view(torch.bfloat16)
    return torch.from_numpy(np.ascontiguousarray(array))


def torch_parameter(array: np.ndarray) -> Any:
    import torch

    tensor = torch_tensor(array)
    return torch.nn.Parameter(tensor) if tensor.is_floating_point() else tensor


def jax_array(array: np.ndarray) -> Any:
    import jax.numpy as jnp

    return jnp.asarray(array)


MAKERS = [
    ByArray,
    ByDLPack,
    OnDevice,
    *(pytest.param(maker, marks=pytest.mark.torch) for maker in (torch_tensor, torch_parameter, jax_array)),
]


def converted(value: Any, make: Callable[[np.ndarray], Any]) -> Any:
    if isinstance(value, dict):
        return {name: converted(inner, make) for name, inner in value.items()}
    return make(value) if isinstance(value, np.ndarray) else value


@pytest.mark.parametrize("make", MAKERS)
def test_array_objects_give_what_ndarrays_give(make: Callable[[np.ndarray], Any]) -> None:
    expected, found = attend(**FIELDS), attend(**converted(FIELDS, make))
    assert found.metadata == expected.metadata
    assert found.output.dtype == np.float32
    for name in expected:
        np.testing.assert_array_equal(found[name], expected[name])
    fields = {name: value for name, value in FIELDS.items() if name != "include"} | {"time_limit": 0}
    report = compare(make(expected.output), **converted(fields, make))
    assert report.verdict == compare(expected.output, **fields).verdict


@pytest.mark.parametrize(
    "make",
    [
        lambda array: array,
        ByArray,
        *(pytest.param(maker, marks=pytest.mark.torch) for maker in (torch_tensor, torch_parameter, jax_array)),
    ],
    ids=["ndarray", "ByArray", "torch_tensor", "torch_parameter", "jax_array"],
)
def test_bfloat16_stays_bfloat16(make: Callable[[np.ndarray], Any]) -> None:
    halves = TOKENS.astype(BFLOAT16)
    result = attend(input=make(halves))
    assert result.output.dtype == BFLOAT16
    np.testing.assert_array_equal(result.output, attend(input=halves).output)
    np.testing.assert_array_equal(as_numpy(make(halves)).view(np.int16), halves.view(np.int16))


def test_lists_of_arrays_are_one_array() -> None:
    """As a loop over tokens leaves them; tuples are lists."""
    rows = [TOKENS[0], TOKENS[1]]
    expected = attend(input=TOKENS)
    for found in (attend(input=rows), attend(input=tuple(map(ByArray, rows)))):
        np.testing.assert_array_equal(found.output, expected.output)
        assert found.output.dtype == np.float32
    plain = attend(input=((1, 0), (0, 1)), include=("attention_weights",), query_tokens=("a", "b"))
    assert plain.output.dtype == np.float64
    named = attend(input=TOKENS, query_tokens=np.array(["a", "b"]))
    assert named._spec.query_tokens == ("a", "b")
    with pytest.raises(InvalidRequest, match="/input/1: expected a row of 4, as the first, got a row of 3"):
        attend(input=[TOKENS[0], TOKENS[1, :3]])


def test_numbers_of_numpy_are_numbers() -> None:
    numbers: dict[str, Any] = {"scale": np.float32(0.25), "num_heads": np.int64(2), "is_causal": np.True_}
    result = attend(input=TOKENS, **numbers)
    assert (result.metadata.scale, result.metadata.num_heads) == (0.25, 2)
    np.testing.assert_array_equal(result.attention_weights[:, 0], [[1, 0]] * 2)
    numbers = {"scale": np.array(0.25, ml_dtypes.bfloat16), "window": {"left": np.array(0), "right": 0}}
    result = attend(input=TOKENS, **numbers)
    assert result.metadata.scale == 0.25
    assert result.attention_weights.tolist() == [[1, 0], [0, 1]]


def test_arrays_of_the_other_byte_order_and_views_are_read() -> None:
    expected = attend(input=TOKENS).output
    np.testing.assert_array_equal(attend(input=TOKENS.astype(">f4")).output, expected)
    np.testing.assert_array_equal(attend(input=np.asfortranarray(TOKENS)).output, expected)
    np.testing.assert_array_equal(attend(input=TOKENS.view(np.recarray)).output, expected)


def test_what_is_no_array_is_left_to_the_schema() -> None:
    with pytest.raises(InvalidRequest, match="/input: expected an array"):
        attend(input=object())  # type: ignore[arg-type]  # what the types refuse, too


def test_an_array_that_cannot_be_read_is_named_with_its_place() -> None:
    class Refusing:
        def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
            raise TypeError(f"no array today{'!' * 200}\nnor tomorrow")

    reason = f"no array today{'!' * (120 - 14)}"
    with pytest.raises(InvalidArray, match=rf"/rotary/cos: expected an array that NumPy can read, .*\({reason}\)"):
        attend(input=TOKENS, rotary={"cos": Refusing()})
    with pytest.raises(InvalidArray, match="/actual/logsumexp: "):
        compare((TOKENS, Refusing()), input=TOKENS)


COMPLEX = np.array([[1, 2j]])


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"input": COMPLEX}, "/input: expected real numbers, got complex numbers of shape (1, 2)"),
        ({"input": COMPLEX.astype(">c8")}, "/input: expected real numbers, got complex numbers of shape (1, 2)"),
        ({"input": ByArray(COMPLEX)}, "/input: expected real numbers, got complex numbers of shape (1, 2)"),
        ({"input": ByDLPack(COMPLEX)}, "/input: expected real numbers, got complex numbers of shape (1, 2)"),
        ({"input": [COMPLEX[0]]}, "/input/0: expected real numbers, got complex numbers of shape (2,)"),
        ({"input": [[1, 2j]]}, "/input/0/1: expected a real number, got complex number 2j"),
        ({"input": COMPLEX.astype(object)}, "/input/0/0: expected a number, got complex number (1+0j)"),
        ({"scale": 2j}, "/scale: expected a real number, got complex number 2j"),
        ({"scale": np.complex128(2j)}, "/scale: expected real numbers, got complex numbers of shape ()"),
        ({"rotary": {"cos": COMPLEX}}, "/rotary/cos: expected real numbers, got complex numbers of shape (1, 2)"),
        ({"freqs_cis": COMPLEX}, "/freqs_cis: expected a known field"),
    ],
)
def test_complex_numbers_are_refused_by_that_name(fields: dict[str, Any], said: str) -> None:
    for call in (attend, compare):
        with pytest.raises(InvalidRequest, match=re.escape(said)):
            call(**{"input": TOKENS, **fields})


def test_complex_outputs_are_refused_by_that_name() -> None:
    with pytest.raises(InvalidArray, match="/actual/output: expected real numbers, got complex numbers"):
        compare(COMPLEX, input=[[1.0, 2.0]])


@pytest.mark.torch
def test_complex_tensors_are_refused_by_that_name() -> None:
    for tensor in (torch_tensor(COMPLEX), torch_tensor(COMPLEX).conj()):
        with pytest.raises(InvalidArray, match="/input: expected real numbers, got complex numbers"):
            attend(input=tensor)


@pytest.mark.torch
def test_tensors_of_torch_in_other_forms() -> None:
    import torch

    tensor = torch_tensor(TOKENS)
    expected = attend(input=TOKENS).output
    np.testing.assert_array_equal(attend(input=tensor.to_sparse()).output, expected)
    np.testing.assert_array_equal(attend(input=tensor.T.contiguous().T).output, expected)
    np.testing.assert_array_equal(attend(input=list(tensor)).output, expected)
    linear = torch.nn.Linear(4, 4, dtype=torch.bfloat16)
    result = attend(input=tensor, projection={"query": {"weight": linear.weight, "bias": linear.bias}})
    assert result.output.dtype == np.float32
    with pytest.raises(InvalidArray, match=r"/input: expected numbers, got codes of float8_e4m3fn of shape \(2, 4\)"):
        attend(input=tensor.to(torch.float8_e4m3fn))
    with pytest.raises(InvalidArray, match=r"/input: .* got torch\.Tensor"):
        attend(input=tensor.to("meta"))


@pytest.mark.torch
@pytest.mark.slow
def test_torch_is_not_imported_for_other_arrays() -> None:
    code = """
import sys
import jax.numpy as jnp
from attention_service import attend
attend(input=jnp.ones((2, 2)))
sys.exit("torch" in sys.modules)
"""
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
