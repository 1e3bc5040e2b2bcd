"""The fields of a request as a codec decodes them, and the memory that they take."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any, Final, NamedTuple

import numpy as np

# The body of a request. Codecs do with it only what all three can do, which is little beside slices.
Body = bytes | bytearray | memoryview

# Bytes of Python objects: a number and the pointer to it, a list beside its elements, a string beside its characters.
ELEMENT: Final = 40
LIST: Final = 96
STRING: Final = 56


class NotQuick(Exception):
    """Raised if a body may take longer than a few milliseconds to decode."""


class RequestedOutputs(NamedTuple):
    """The outputs that a request of the Open Inference Protocol names.

    id: returned with the answer; binary: the requested outputs, each with True if it is returned as bytes. If there is
    none, all outputs are returned, as bytes if `default` is True.
    """

    id: str | None
    binary: Mapping[str, bool]
    default: bool


class Decoded(NamedTuple):
    """A decoded body.

    fields: the request, arrays as ndarrays; untyped: top-level fields whose numbers came without a type,
    and pointers of such arguments of a call
    outputs: None in formats that do not name them
    unread: names that stand where no fields are read, each with its pointer and the place where fields are. That of a
    field is refused, any other belongs to others.
    """

    fields: dict[str, Any]
    untyped: frozenset[str]
    outputs: RequestedOutputs | None = None
    unread: Mapping[str, tuple[str, str]] = MappingProxyType({})

    @property
    def nbytes(self) -> int:
        """Memory that the fields keep alive, in bytes: the whole body if an array is a view of it."""
        owners: dict[int, int] = {}
        return _nbytes(self.fields, owners) + sum(owners.values())


def text_of(value: Any) -> str | None:
    """A text, alone or as the one item of a list, as R writes it; None for anything else."""
    one = value[0] if isinstance(value, list) and len(value) == 1 else value
    return one if isinstance(one, str) else None


def arrays_in(value: Any) -> Iterator[np.ndarray]:
    """All arrays in a decoded value, also those in objects, and in lists of arrays or objects."""
    if isinstance(value, np.ndarray):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from arrays_in(item)
    elif isinstance(value, list) and value and isinstance(value[0], dict | np.ndarray):
        for item in value:
            yield from arrays_in(item)


def _nbytes(value: Any, owners: dict[int, int]) -> int:
    """Memory of a value, without that of arrays, whose owners are added to `owners` with their sizes."""
    if isinstance(value, np.ndarray):
        _add_owner(value, owners)
        return 0
    if isinstance(value, dict):
        return sum([_nbytes(item, owners) for item in value.values()])
    if isinstance(value, list):
        inside = value if value and isinstance(value[0], list | str | dict) else ()  # else numbers, counted as elements
        return LIST + ELEMENT * len(value) + sum([_nbytes(item, owners) for item in inside])
    return STRING + len(value) if isinstance(value, str) else ELEMENT


def _add_owner(array: np.ndarray, owners: dict[int, int]) -> None:
    """Note the object whose memory an array is a view of, once for all its views."""
    owner: Any = array
    size = 0
    while isinstance(owner, np.ndarray | memoryview):
        size = max(size, owner.nbytes)
        base = owner.base if isinstance(owner, np.ndarray) else owner.obj
        if base is None:
            break
        owner = base
    owners[id(owner)] = max(size, len(owner)) if isinstance(owner, bytes | bytearray) else size
