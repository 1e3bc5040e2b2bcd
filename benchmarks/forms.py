"""Request formats: how to encode a workload, and decode its answer, in JSON, OIP (v2 protocol) and safetensors."""

from __future__ import annotations

import base64
import http.client
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import orjson
from safetensors.numpy import load, save

from attention_service.settings.keys import new_key
from benchmarks.workloads import Workload

JSON, OCTETS, SAFETENSORS = "application/json", "application/octet-stream", "application/vnd.safetensors"
# In the v2 protocol with binary tensors: the length of the JSON before them.
HEADER_LENGTH = "Inference-Header-Content-Length"
# This service checks the key. All servers get the header, so that all requests have the same length.
KEY, KEY_HASH = new_key()
AUTHORIZATION = {"Authorization": f"Bearer {KEY}"}


@dataclass(frozen=True)
class Request:
    """A POST request."""

    path: str
    headers: Mapping[str, str]
    body: bytes

    def message(self) -> bytes:
        """Return the request line, headers and body as bytes."""
        fields = {"Host": "localhost", **AUTHORIZATION, **self.headers, "Content-Length": str(len(self.body))}
        head = "".join(f"{name}: {value}\r\n" for name, value in fields.items())
        return f"POST {self.path} HTTP/1.1\r\n{head}\r\n".encode() + self.body


@dataclass(frozen=True)
class Reply:
    """An answer with status 200."""

    headers: Mapping[str, str]
    body: bytes


@dataclass(frozen=True)
class Form:
    """A request format: encodes a workload, decodes its answer."""

    encode: Callable[[Workload], Request]
    decode: Callable[[Reply], dict[str, np.ndarray]]


def fetch(port: int, request: Request, timeout: float = 60) -> Reply:
    """Send a request with http.client, and return the answer. Errors: ConnectionError for any status but 200."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=timeout)
    connection.request("POST", request.path, request.body, AUTHORIZATION | dict(request.headers))
    answer = connection.getresponse()
    body = answer.read()
    connection.close()
    if answer.status != 200:
        raise ConnectionError(f"{answer.status}: {body[:500].decode(errors='replace')}")
    return Reply({name.lower(): value for name, value in answer.getheaders()}, body)


def float32_digits(array: np.ndarray) -> Any:
    """Return nested lists of numbers with as many digits as float32 needs, up to 9; `tolist()` gives 17."""
    return orjson.loads(orjson.dumps(array, option=orjson.OPT_SERIALIZE_NUMPY))


def typed_array(array: np.ndarray) -> dict[str, Any]:
    """Return an array as an object with its bytes in base64, as this service reads it."""
    data = base64.b64encode(array.tobytes()).decode()
    return {"dtype": array.dtype.name, "shape": list(array.shape), "data": data}


def lists(path: str, write: Callable[[np.ndarray], Any] = np.ndarray.tolist, **extra: Any) -> Form:
    """Return the format with matrices as nested lists in JSON, or as `write` gives them."""

    def encode(load: Workload) -> Request:
        fields = {name: write(array) for name, array in load.arrays.items()}
        return Request(path, {"Content-Type": JSON}, json.dumps(fields | extra).encode())

    def decode(reply: Reply) -> dict[str, np.ndarray]:
        body = json.loads(reply.body)
        return {name: _read(body[name]) for name in ("output", "attention_weights") if name in body}

    return Form(encode, decode)


def _read(value: Any) -> np.ndarray:
    """Return nested lists, or an array in base64, as an array."""
    if isinstance(value, list):
        return np.array(value)
    return np.frombuffer(base64.b64decode(value["data"]), value["dtype"]).reshape(value["shape"])


def tensors(path: str, media_type: str = OCTETS) -> Form:
    """Return the safetensors format of the peers, where a tensor `no_weights` leaves the weights out."""

    def encode(load: Workload) -> Request:
        option = {} if load.weights else {"no_weights": np.ones(1, np.uint8)}
        return Request(path, {"Content-Type": media_type}, save(load.arrays | option))

    return Form(encode, lambda reply: load(reply.body))


def our_tensors() -> Form:
    """Return the safetensors format of this service."""

    def encode(load: Workload) -> Request:
        heads = {"layout": "hld"} if load.query.ndim == 3 else {}
        request = json.dumps(heads if load.weights else heads | {"include": []})
        return Request("/attention", {"Content-Type": SAFETENSORS}, save(load.arrays, {"request": request}))

    return Form(encode, lambda reply: load(reply.body))


V2 = "/v2/models/attention/infer"


def _v2(load: Workload, tensor: Callable[[np.ndarray], dict[str, Any]], **option: Any) -> bytes:
    """Return the JSON of a v2 request. All arrays have three axes, since models declare a fixed number of them."""
    inputs = []
    for name, array in load.arrays.items():
        shape = [1] * (3 - array.ndim) + list(array.shape)
        inputs.append({"name": name, "shape": shape, "datatype": "FP32"} | tensor(array))
    return json.dumps({"inputs": inputs, "outputs": [{"name": name} | option for name in load.answers]}).encode()


def v2_json() -> Form:
    """Return the v2 format with arrays as flat lists in JSON."""

    def encode(load: Workload) -> Request:
        return Request(V2, {"Content-Type": JSON}, _v2(load, lambda array: {"data": array.ravel().tolist()}))

    def decode(reply: Reply) -> dict[str, np.ndarray]:
        return {out["name"]: np.array(out["data"]) for out in json.loads(reply.body)["outputs"]}

    return Form(encode, decode)


def v2_binary() -> Form:
    """Return the v2 format with the binary tensor data extension: arrays as bytes after the JSON."""

    def encode(load: Workload) -> Request:
        def sized(array: np.ndarray) -> dict[str, Any]:
            return {"parameters": {"binary_data_size": array.nbytes}}

        head = _v2(load, sized, parameters={"binary_data": True})
        body = head + b"".join(array.tobytes() for array in load.arrays.values())
        return Request(V2, {"Content-Type": OCTETS, HEADER_LENGTH: str(len(head))}, body)

    def decode(reply: Reply) -> dict[str, np.ndarray]:
        at = int(reply.headers[HEADER_LENGTH.lower()])
        found = {}
        for out in json.loads(reply.body[:at])["outputs"]:
            size = out["parameters"]["binary_data_size"]
            found[out["name"]] = np.frombuffer(reply.body[at : at + size], np.float32)
            at += size
        return found

    return Form(encode, decode)


def v2_base64() -> Form:
    """Return the v2 format for servers without that extension: each array as a base64 string."""

    def encode(load: Workload) -> Request:
        def text(array: np.ndarray) -> dict[str, Any]:
            parameters = {"content_type": "base64", "shape": list(array.shape)}
            data = [base64.b64encode(array.tobytes()).decode()]
            return {"datatype": "BYTES", "shape": [1, 1], "parameters": parameters, "data": data}

        return Request(V2, {"Content-Type": JSON}, _v2(load, text))

    def decode(reply: Reply) -> dict[str, np.ndarray]:
        outputs = json.loads(reply.body)["outputs"]
        return {out["name"]: np.frombuffer(base64.b64decode(out["data"][0]), np.float32) for out in outputs}

    return Form(encode, decode)
