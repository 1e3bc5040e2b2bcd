"""Requests and responses in every wire format, written and read by the formats' own libraries."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np
import safetensors
import safetensors.numpy

from attention_service.codecs.decoded import Decoded

JSON, NPZ, SAFETENSORS = "application/json", "application/x-npz", "application/vnd.safetensors"
# A decoded request without fields: it sets no option of the response.
NO_OPTIONS = Decoded({}, frozenset())
MEDIA_TYPES = (JSON, NPZ, SAFETENSORS)
TYPES = {
    "F64": "<f8",
    "F32": "<f4",
    "F16": "<f2",
    "I64": "<i8",
    "I32": "<i4",
    "I8": "i1",
    "U8": "u1",
    "BOOL": "?",
    "BF16": ml_dtypes.bfloat16,
}


def typed_array(array: np.ndarray) -> dict[str, Any]:
    """An array as a typed array in JSON."""
    content = array.astype(array.dtype.newbyteorder("<")).tobytes()
    return {"dtype": array.dtype.name, "shape": list(array.shape), "data": base64.b64encode(content).decode()}


def split(fields: dict[str, Any], prefix: str = "") -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """The fields of a request that can be tensors, by dotted names, and the other fields."""
    tensors: dict[str, np.ndarray] = {}
    rest: dict[str, Any] = {}
    for name, value in fields.items():
        array = _tensor(value)
        if array is not None:
            tensors[prefix + name] = array
        elif isinstance(value, dict):
            inner, others = split(value, f"{prefix}{name}.")
            tensors |= inner
            if others or not inner:
                rest[name] = others
        else:
            rest[name] = value
    return tensors, rest


def _tensor(value: Any) -> np.ndarray | None:
    """A value as an array; None if it is not numeric, ragged, mixed, or empty (which stays JSON)."""
    if isinstance(value, np.ndarray):
        return value
    if not isinstance(value, list):
        return None
    try:
        array = np.array(value)
    except (ValueError, OverflowError):
        return None
    plain = array.dtype.kind in "bif" and array.size and array.ndim <= 8 and not _mixed(value)
    return array if plain else None


def _mixed(value: Any) -> bool:
    """True if a list has booleans and numbers, which NumPy would convert to numbers."""

    def leaves(x: Any) -> Iterator[Any]:
        if isinstance(x, list):
            for item in x:
                yield from leaves(item)
        else:
            yield x

    return len({isinstance(leaf, bool) for leaf in leaves(value)}) > 1


def write(fields: dict[str, Any], media_type: str) -> bytes:
    """The body of a request in a wire format."""
    if media_type == JSON:
        return json.dumps(fields, default=np.ndarray.tolist).encode()
    tensors, rest = split(fields)
    if media_type == NPZ:
        stream = io.BytesIO()
        members: dict[str, Any] = {"request": np.array(json.dumps(rest))} | tensors
        np.savez(stream, **members)
        return stream.getvalue()
    contiguous = {name: np.ascontiguousarray(tensor) for name, tensor in tensors.items()}
    return bytes(safetensors.numpy.save(contiguous, {"request": json.dumps(rest)}))


def read(content: bytes, media_type: str) -> dict[str, Any]:
    """The fields of a response in a wire format, with arrays as ndarrays (in JSON: as lists)."""
    if media_type == JSON:
        plain: dict[str, Any] = json.loads(content)
        return plain
    if media_type == NPZ:
        with np.load(io.BytesIO(content), allow_pickle=False) as archive:
            answer = json.loads(bytes(archive["response"]))
            tensors = {name: archive[name] for name in archive.files if name != "response"}
    else:
        length = int.from_bytes(content[:8], "little")
        answer = json.loads(json.loads(content[8 : 8 + length])["__metadata__"]["response"])
        tensors = {
            name: np.frombuffer(bytes(entry["data"]), np.dtype(TYPES[entry["dtype"]])).reshape(entry["shape"])
            for name, entry in safetensors.deserialize(content)  # type: ignore[no-untyped-call]
        }
    for name, tensor in tensors.items():
        *path, last = name.split(".")
        inner = answer
        for step in path:
            inner = inner.setdefault(step, {})
        inner[last] = tensor
    return dict(answer)
