"""Requests and responses of the Open Inference Protocol, written and read by its specification and Triton's extension
for binary tensor data."""

from __future__ import annotations

import json
from typing import Any

import httpx
import ml_dtypes
import numpy as np

from tests.helpers.wire import split

INFER = "/v2/models/attention/infer"
HEADER = "Inference-Header-Content-Length"
TYPES: dict[str, Any] = {
    "BOOL": "?", "UINT8": "u1", "UINT16": "<u2", "UINT32": "<u4", "INT8": "i1", "INT16": "<i2", "INT32": "<i4",
    "INT64": "<i8", "FP16": "<f2", "BF16": ml_dtypes.bfloat16, "FP32": "<f4", "FP64": "<f8",
}  # fmt: skip
NAMES = {np.dtype(kind): name for name, kind in TYPES.items()}


def tensor(name: str, array: np.ndarray, binary: bool, nested: bool = False) -> tuple[dict[str, Any], bytes]:
    """The JSON entry of an input, and its bytes after the JSON ("" if not binary)."""
    entry: dict[str, Any] = {"name": name, "shape": list(array.shape), "datatype": NAMES[array.dtype]}
    if binary:
        return entry | {"parameters": {"binary_data_size": array.nbytes}}, array.tobytes()
    filled = np.where(np.isneginf(array), None, array) if array.dtype == np.float64 else array  # type: ignore[call-overload]  # NumPy's stubs know no None here
    return entry | {"data": filled.tolist() if nested else filled.ravel().tolist()}, b""


def body(entries: list[tuple[dict[str, Any], bytes]], **more: Any) -> tuple[bytes, dict[str, str]]:
    """Body and headers of a request."""
    text = json.dumps({"inputs": [entry for entry, _ in entries]} | more).encode()
    tail = b"".join(data for _, data in entries)
    binary = any("binary_data_size" in entry.get("parameters", {}) for entry, _ in entries)
    return text + tail, {HEADER: str(len(text))} if binary else {}


def parameters_of(fields: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """The fields that are not tensors as parameters of the protocol: dotted names, lists of names joined by commas."""
    found: dict[str, Any] = {}
    for name, value in fields.items():
        if isinstance(value, dict):
            found |= parameters_of(value, f"{prefix}{name}.")
        else:
            found[prefix + name] = ",".join(value) if isinstance(value, list) else value
    return found


def arrays_of(fields: dict[str, Any]) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """Tensors and parameters for the fields of a request for POST /attention. Null in a bias becomes minus infinity."""
    if "bias" in fields:
        filled = [[-np.inf if item is None else item for item in row] for row in fields["bias"]]
        fields = fields | {"bias": np.array(filled, dtype=float)}
    arrays, rest = split(fields)
    # Whole numbers in lists may stand for numbers of any type, integers in arrays are integers.
    floats = {
        name: array.astype(float) if array.dtype == np.int64 and not _is_array(fields, name) else array
        for name, array in arrays.items()
    }
    return floats, parameters_of(rest)


def _is_array(fields: dict[str, Any], name: str) -> bool:
    found: Any = fields
    for part in name.split("."):
        found = found[part]
    return isinstance(found, np.ndarray)


def request_of(fields: dict[str, Any], binary: bool, nested: bool = False) -> tuple[bytes, dict[str, str]]:
    """Body and headers of the request of this protocol that equals a request for POST /attention."""
    arrays, parameters = arrays_of(fields)
    entries = [tensor(name, array, binary, nested) for name, array in arrays.items()]
    return body(entries, id="17", parameters=parameters | {"binary_data_output": binary})


def read(response: httpx.Response) -> dict[str, Any]:
    """The outputs of a response as arrays by name, and the other fields as `rest`."""
    content = response.content
    at = int(response.headers.get(HEADER, len(content)))
    answer: dict[str, Any] = json.loads(content[:at])
    found: dict[str, Any] = {"rest": answer}
    for output in answer.pop("outputs"):
        kind = np.dtype(TYPES[output["datatype"]])
        size = output.get("parameters", {}).get("binary_data_size")
        if size is None:
            data = [-np.inf if item is None else item for item in output["data"]]
            array = np.array(data, kind)
        else:
            array = np.frombuffer(content[at : at + size], kind)
            at += size
        found[output["name"]] = array.reshape(output["shape"])
    assert at == len(content)
    return found
