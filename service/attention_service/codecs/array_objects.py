"""Array objects of other libraries as ndarrays: tensors of torch, arrays of JAX, and whatever else NumPy can read."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any, Final

import numpy as np

from attention_service.errors import InvalidArray, child

# Errors by which libraries refuse to give an array away: of a type that NumPy has not, or on a device.
REFUSALS: Final = (AttributeError, BufferError, NotImplementedError, RuntimeError, TypeError, ValueError)
# Values that are no arrays. A list may have a million of them.
PLAIN: Final = frozenset({bool, int, float, str, type(None)})


def as_numpy(value: Any, pointer: str = "") -> Any:
    """A value whose array objects are ndarrays, also those within dicts, lists and tuples.

    Tensors on another device are copied from it, bfloat16 stays bfloat16. A list of arrays of one shape becomes one
    array, any other tuple a list. Names in arrays become lists of strings.

    pointer: the JSON pointer of the value

    Errors: InvalidArray for an array that NumPy cannot hold, and for complex numbers.
    """
    if type(value) in PLAIN:
        return value
    if isinstance(value, np.ndarray | np.generic):
        return _plain(np.asarray(value), pointer)
    if isinstance(value, complex):
        raise InvalidArray.of(pointer, "a real number", value)
    if isinstance(value, Mapping):
        return {name: as_numpy(inner, child(pointer, name)) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        rows = enumerate(value)
        return _joined([row if type(row) in PLAIN else as_numpy(row, child(pointer, i)) for i, row in rows])
    return _read(value, pointer)


def _joined(rows: list[Any]) -> Any:
    """One array of these rows if all are arrays of one shape, else the rows as lists."""
    arrays = [row for row in rows if isinstance(row, np.ndarray)]
    if rows and len(arrays) == len(rows) and len({array.shape for array in arrays}) == 1:
        return np.stack(arrays)
    return [row.tolist() if isinstance(row, np.ndarray) else row for row in rows] if arrays else rows


def _read(value: Any, pointer: str) -> Any:
    """An object of another library as an ndarray; the object itself if it is no array."""
    torch = sys.modules.get("torch")  # whoever has a tensor has imported it
    try:
        if torch is not None and isinstance(value, torch.Tensor):
            return _plain(_from_torch(value), pointer)
        if hasattr(value, "__array__"):
            return _plain(_by_array(value), pointer)
        if hasattr(value, "__dlpack__"):
            return _plain(np.from_dlpack(value, device="cpu"), pointer)
    except REFUSALS as error:
        kind, reason = type(value), str(error).partition("\n")[0][:120]
        raise InvalidArray.at(
            pointer, "an array that NumPy can read", f"{kind.__module__}.{kind.__qualname__}", reason
        ) from error
    return value


def _from_torch(tensor: Any) -> np.ndarray:
    """A tensor of torch, from any device."""
    import torch

    from attention_service.torch_arrays import as_array

    return as_array(tensor.detach() if tensor.layout == torch.strided else tensor.detach().to_dense())


def _by_array(value: Any) -> np.ndarray:
    """What `__array__` returns; if it refuses, as that of CuPy does, a copy by DLPack."""
    try:
        return np.asarray(value)
    except REFUSALS:
        if not hasattr(value, "__dlpack__"):
            raise
        return np.asarray(np.from_dlpack(value, device="cpu"))


def _plain(array: np.ndarray, pointer: str) -> Any:
    """An array in the byte order of this machine; one of strings or objects as lists.

    Errors: InvalidArray for complex numbers.
    """
    if array.dtype.kind in "OU":
        return array.tolist()
    if array.dtype.kind == "c":
        raise InvalidArray.of(pointer, "real numbers", array)
    return array if array.dtype.isnative else array.astype(array.dtype.newbyteorder("="))
