"""Requests and outputs in files, for the command line."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np

from service.attention.arrays import BFLOAT16, is_float
from service.codecs import CODECS
from service.codecs.decoded import Decoded
from service.codecs.safetensors import NAMES as NAMES_OF_TYPES
from service.comparison.actual import NAMES
from service.comparison.tensors import as_numpy
from service.errors import InvalidRequest, InvalidTensors, NotAcceptable, UnsupportedMediaType

# Media types by the suffix of a file.
TYPES: Final = {".json": "application/json"} | {
    suffix: name for suffix in (".npz", ".safetensors") for name in CODECS if name.endswith(suffix[1:])
}
MAX_BYTES: Final = 2**40


def read_request(path: Path) -> Decoded:
    """The fields of a request in a file, in a wire format by its suffix, or of a dict of tensors saved by torch.

    Errors: InvalidRequest of every kind, UnsupportedMediaType for another suffix, OSError.
    """
    if path.suffix == ".pt":
        fields = _read_torch(path)
        if not isinstance(fields, Mapping):
            raise InvalidRequest.at("", "a dict of the request's fields", f"a tensor in {path.name}")
        return Decoded(dict(fields), frozenset())
    return CODECS[_type(path)].decode(path.read_bytes(), MAX_BYTES)


def read_actual(path: Path) -> tuple[dict[str, Any], frozenset[str]]:
    """The arrays that a kernel returned, by name, from a file; and those that came as lists.

    A file with one array without a name (.npy, a list in .json, a tensor in .pt) holds the output. Names that no answer
    has, like `metadata` in a stored response, are left out.

    Errors: as of read_request.
    """
    if path.suffix == ".npy":
        try:
            array = np.load(path, allow_pickle=False)
        except OSError:
            raise
        except Exception as error:  # numpy.load raises what its parsers raise: EOFError, TokenError and others
            raise InvalidTensors.at("/actual", "an array in the format of npy", str(error)[:80]) from None
        # NumPy writes bfloat16 as two bytes of no type.
        return {"output": array.view(BFLOAT16) if array.dtype == np.dtype("V2") else array}, frozenset()
    if path.suffix == ".pt":
        found = _read_torch(path)
        return dict(found) if isinstance(found, Mapping) else {"output": found}, frozenset()
    content = path.read_bytes()
    if path.suffix == ".json" and content.lstrip()[:1] == b"[":
        content = b'{"output":' + content + b"}"
    decoded = CODECS[_type(path)].decode(content, MAX_BYTES)
    arrays = {name: value for name, value in decoded.fields.items() if name in NAMES}
    return arrays or decoded.fields, decoded.untyped


def write_request(fields: Mapping[str, Any], path: Path) -> None:
    """Write the fields of a request, arrays as ndarrays, in a wire format by the suffix of the file.

    Errors: UnsupportedMediaType for another suffix, OSError.
    """
    if path.suffix not in TYPES:
        raise UnsupportedMediaType.at("", f"a file {', '.join(TYPES)}", path.name)
    if path.suffix == ".json":
        path.write_text(as_json(fields) + "\n", encoding="utf-8")
        return
    tensors, rest = _split(fields)
    if TYPES[path.suffix] == TYPES[".npz"]:
        if any(tensor.dtype == BFLOAT16 for tensor in tensors.values()):
            raise NotAcceptable.at("", "another format than npz for bfloat16", path.name, "use .safetensors")
        members: dict[str, Any] = {"request": np.array(json.dumps(rest))} | tensors
        np.savez(path, **members)
    else:
        path.write_bytes(_safetensors(tensors, {"request": json.dumps(rest)}))


def _split(fields: Mapping[str, Any], prefix: str = "") -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """The arrays of a request by dotted names, and its other fields."""
    tensors: dict[str, np.ndarray] = {}
    rest: dict[str, Any] = {}
    for name, value in fields.items():
        if isinstance(value, np.ndarray):
            tensors[prefix + name] = np.ascontiguousarray(value)
        elif isinstance(value, Mapping):
            inner, others = _split(value, f"{prefix}{name}.")
            tensors |= inner
            if others or not inner:
                rest[name] = others
        else:
            rest[name] = value
    return tensors, rest


def _safetensors(tensors: Mapping[str, np.ndarray], metadata: Mapping[str, str]) -> bytes:
    """A file of safetensors (https://huggingface.co/docs/safetensors): length of the header, header, data."""
    header: dict[str, Any] = {"__metadata__": metadata}
    offset = 0
    for name, tensor in tensors.items():
        end = offset + tensor.nbytes
        header[name] = {"dtype": NAMES_OF_TYPES[tensor.dtype], "shape": tensor.shape, "data_offsets": (offset, end)}
        offset = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return b"".join([len(text).to_bytes(8, "little"), text, *(tensor.tobytes() for tensor in tensors.values())])


def as_json(fields: Mapping[str, Any]) -> str:
    """The fields of a request as JSON: nested lists, and the type that they had as `dtype`."""
    found = {name: plain(value) for name, value in fields.items()}
    dtype = next(value.dtype for value in fields.values() if isinstance(value, np.ndarray) and is_float(value.dtype))
    return json.dumps({"dtype": dtype.name, **found})


def plain(value: Any) -> Any:
    """A value of a request without ndarrays: as lists, numbers of halves as the numbers that they are."""
    if isinstance(value, Mapping):
        return {name: plain(inner) for name, inner in value.items()}
    if isinstance(value, np.ndarray):
        return (value if value.dtype.kind in "biu" else value.astype(np.float64)).tolist()
    return value


def _type(path: Path) -> str:
    """The media type of a file. Errors: UnsupportedMediaType."""
    if path.suffix not in TYPES:
        raise UnsupportedMediaType.at("", f"a file {', '.join([*TYPES, '.npy', '.pt'])}", path.name)
    return TYPES[path.suffix]


def _read_torch(path: Path) -> Any:
    """What torch saved in a file: a tensor, or a dict of tensors and numbers. Errors: InvalidRequest without torch."""
    try:
        import torch
    except ModuleNotFoundError:
        raise InvalidRequest.at("", "torch, to read a file .pt", "no torch", "pip install torch") from None
    try:
        return as_numpy(torch.load(path, map_location="cpu", weights_only=True))
    except Exception as error:  # pickle's and zipfile's errors, and torch's own
        raise InvalidTensors.at("", "a file that torch saved, with tensors only", str(error)[:80]) from None
