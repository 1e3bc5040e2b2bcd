"""A stored layer in memory, and what a request that names it means."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from threading import Lock
from typing import Any, Final

import numpy as np

from attention_service.attention.arrays import cast
from attention_service.attention.spec import Projection
from attention_service.codecs.named_tensors import nested
from attention_service.errors import Fault, FieldConflict, InvalidRequest, child
from attention_service.layers.tensors import BadFile

# The field of a request that names a layer.
LAYER: Final = "layer"
# Plans that are kept of requests with one layer.
MAX_PLANS: Final = 32


@dataclass(eq=False)
class Layer:
    """One version of a stored layer, all in memory. Its arrays cannot be written to.

    hash: of the file with its arrays, as `sha256:…`; source: what it was made from, in words
    options: its fields without arrays; arrays: its other fields, by dotted names
    reserve: True if so many more bytes may be kept as long as the layer is; a negative number gives them back
    plans: what the pipeline keeps of requests with this layer: it is gone when the layer is
    """

    name: str
    hash: str
    source: str
    options: Mapping[str, Any]
    arrays: Mapping[str, np.ndarray]
    reserve: Callable[[Layer, int], bool] = lambda layer, size: True
    plans: dict[Hashable, Any] = field(default_factory=dict)
    _plan_bytes: int = 0
    _casts: dict[np.dtype, Projection] = field(default_factory=dict)
    _lock: Lock = field(default_factory=Lock)

    @property
    def nbytes(self) -> int:
        """Memory of its arrays."""
        return sum(array.nbytes for array in self.arrays.values())

    @property
    def elements(self) -> int:
        """The numbers in its arrays."""
        return sum(array.size for array in self.arrays.values())

    @cached_property
    def fields(self) -> dict[str, Any]:
        """Its options and arrays as fields of a request.

        Errors: BadFile for a field in both; as of `add_dotted`.
        """
        return merged_options(self.options, nested(self.arrays))

    def merged(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """The fields of a request beside those of the layer that the request does not have, or has as null.

        Errors: FieldConflict for a projection beside the layer.
        """
        if given.get("projection") is not None:
            hint = "leave out projection, or layer; all other fields replace those of the layer"
            raise FieldConflict.at("/projection", "no projection beside layer", "both", hint)
        sent = {name: value for name, value in given.items() if value is not None and name != LAYER}
        return self.fields | sent

    @contextmanager
    def blamed(self, given: Mapping[str, Any]) -> Iterator[None]:
        """Inside, an error at a field that the layer has and the request has not points at `/layer`."""
        try:
            yield
        except InvalidRequest as error:
            moved = [self._moved(fault, given) for fault in error.faults]
            kind = type(error)
        else:
            return
        raise kind(*moved)

    def _moved(self, fault: Fault, given: Mapping[str, Any]) -> Fault:
        _, _, path = fault.pointer.partition("/")
        name = path.partition("/")[0]
        if name not in self.fields or given.get(name) is not None:
            return fault
        hint = f"{fault.hint}; " if fault.hint else ""
        place = path.replace("/", ".")
        return replace(
            fault, pointer=f"/{LAYER}", expected=f"{place} of {fault.expected}", hint=f"{hint}in layer {self.name}"
        )

    def projection_in(self, dtype: np.dtype, projection: Projection) -> Projection | None:
        """Its projection in another type; made once. None if there is no memory to keep it.

        projection: that of a request with this layer. Errors: InvalidArray, Overflow.
        """
        with self._lock:
            if dtype not in self._casts:
                size = sum(x.size * dtype.itemsize for x in _arrays_of(projection) if x.dtype != dtype)
                if not self.reserve(self, size):
                    return None
                try:
                    self._casts[dtype] = _cast(projection, dtype)
                except InvalidRequest:
                    self.reserve(self, -size)
                    raise
            return self._casts[dtype]

    def keep_plan(self, key: Hashable, plan: Any, size: int) -> None:
        """Keep a plan for later requests, if there is memory for it. size: bytes of its own arrays"""
        with self._lock:
            if len(self.plans) >= MAX_PLANS:
                self.plans.clear()
                self.reserve(self, -self._plan_bytes)
                self._plan_bytes = 0
            if key not in self.plans and self.reserve(self, size):
                self._plan_bytes += size
                self.plans[key] = plan


def _arrays_of(projection: Projection) -> Iterator[np.ndarray]:
    maps = [getattr(projection, role.name) for role in fields(projection)]
    for linear in maps:
        if linear is not None:
            yield from (x for x in (getattr(linear, part.name) for part in fields(linear)) if isinstance(x, np.ndarray))


def _cast(projection: Projection, dtype: np.dtype) -> Projection:
    """A projection whose arrays have this type. Errors: InvalidArray, Overflow."""
    changed: dict[str, Any] = {}
    for role in fields(projection):
        linear = getattr(projection, role.name)
        if linear is None:
            continue
        arrays = {part.name: getattr(linear, part.name) for part in fields(linear)}
        pointer = child("/projection", role.name)
        cast_arrays = {
            part: cast(x, dtype, child(pointer, part)) for part, x in arrays.items() if isinstance(x, np.ndarray)
        }
        changed[role.name] = replace(linear, **cast_arrays)
    return replace(projection, **changed)


def merged_options(options: Mapping[str, Any], arrays: Mapping[str, Any], place: str = "") -> dict[str, Any]:
    """Options and arrays as fields of a request, both nested. Errors: BadFile for a field in both."""
    found = dict(options)
    for name, value in arrays.items():
        mine = found.get(name)
        if mine is None:
            found[name] = value
        elif isinstance(mine, Mapping) and isinstance(value, Mapping):
            found[name] = merged_options(mine, value, f"{place}{name}.")
        else:
            raise BadFile(f"has {place}{name} in both of its files")
    return found
