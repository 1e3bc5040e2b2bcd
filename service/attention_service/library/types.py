"""The types of arguments of the library."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, TypeAlias


class HasArray(Protocol):
    """An array that NumPy can read: an ndarray, a tensor of torch, an array of JAX, and many more."""

    def __array__(self) -> Any: ...


class HasDLPack(Protocol):
    """An array of a library that exchanges its memory by DLPack."""

    def __dlpack__(self) -> Any: ...


# An array: of any library, or as nested lists or tuples.
Array: TypeAlias = HasArray | HasDLPack | Sequence[Any]
# One string for each token, or a list of strings for each batch entry.
Labels: TypeAlias = Sequence[str] | Sequence[Sequence[str]] | HasArray
