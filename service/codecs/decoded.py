"""What a codec makes of a body."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, NamedTuple

import numpy as np

# Of a request, as it was read: only what all of these can do may be done with it, which is little beside slices.
Body = bytes | bytearray | memoryview

# Bytes of objects of Python: a pointer to one and a number, a list of one element, a string beside its characters.
ELEMENT: Final = 40
LIST: Final = 96
STRING: Final = 56


class RequestedOutputs(NamedTuple):
    """The outputs that a request of the Open Inference Protocol names.

    id: returned with the answer; names: all outputs that there are if none is named
    binary: True for each name whose output comes as bytes; for other outputs `default` holds
    """

    id: str | None
    names: tuple[str, ...]
    binary: Mapping[str, bool]
    default: bool

    def is_binary(self, name: str) -> bool:
        """True if an output comes as bytes after the JSON."""
        return self.binary.get(name, self.default)


class Decoded(NamedTuple):
    """A decoded body.

    fields: the request, arrays as ndarrays; untyped: top-level fields whose numbers came without a type
    outputs: None in formats that do not name them
    """

    fields: dict[str, Any]
    untyped: frozenset[str]
    outputs: RequestedOutputs | None = None

    @property
    def nbytes(self) -> int:
        """Memory that the fields keep alive, in bytes: the whole body if an array is a view of it."""
        owners: dict[int, int] = {}
        others = _other_bytes(self.fields, owners)
        return others + sum(owners.values())


def _other_bytes(value: Any, owners: dict[int, int]) -> int:
    """Memory of values that are not arrays. owners: collects the owners of array memory, with their sizes"""
    kind = type(value)
    if kind is np.ndarray:
        _note_owner(value, owners)
        return 0
    if kind is dict:
        return sum([_other_bytes(item, owners) for item in value.values()])
    if kind is list:
        return _list_bytes(value)
    return STRING + len(value) if kind is str else ELEMENT


def _note_owner(array: np.ndarray, owners: dict[int, int]) -> None:
    owner: Any = array
    size = 0
    while type(owner) is np.ndarray or type(owner) is memoryview:
        size = max(size, owner.nbytes)
        base: Any = owner.base if isinstance(owner, np.ndarray) else owner.obj
        if base is None:
            break
        owner = base
    owners[id(owner)] = max(size, len(owner)) if isinstance(owner, bytes | bytearray) else size


def _list_bytes(value: list[Any]) -> int:
    """Memory of nested lists of numbers or strings."""
    total = 0
    level = [value]
    while level:
        total += LIST * len(level) + ELEMENT * sum(map(len, level))
        inner: list[list[Any]] = []
        for items in level:
            if items and isinstance(items[0], str):
                total += sum(STRING + len(item) for item in items if isinstance(item, str))
            elif items and isinstance(items[0], list):
                inner += (item for item in items if isinstance(item, list))
        level = inner
    return total
