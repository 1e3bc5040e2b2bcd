"""How a workload is sent, and how its answer is read: JSON, the v2 protocol of Triton and KServe, safetensors."""

from __future__ import annotations

import base64
import http.client
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from safetensors.numpy import load, save

from benchmarks.workloads import Workload
from service.http.auth import new_key

JSON, OCTETS, SAFETENSORS = "application/json", "application/octet-stream", "application/vnd.safetensors"
# Of the v2 protocol with binary tensors: where the JSON ends and they begin.
HEADER_LENGTH = "Inference-Header-Content-Length"
# Sent to all servers, so that all read as much; this service asks for it, as it would where strangers can reach it.
KEY, KEY_HASH = new_key()
AUTHORIZATION = {"Authorization": f"Bearer {KEY}"}


@dataclass(frozen=True)
class Request:
    """What to send."""

    path: str
    headers: Mapping[str, str]
    body: bytes

    def message(self) -> bytes:
        """All bytes of it."""
        fields = {"Host": "localhost", **AUTHORIZATION, **self.headers, "Content-Length": str(len(self.body))}
        head = "".join(f"{name}: {value}\r\n" for name, value in fields.items())
        return f"POST {self.path} HTTP/1.1\r\n{head}\r\n".encode() + self.body


@dataclass(frozen=True)
class Reply:
    """What came back."""

    headers: Mapping[str, str]
    body: bytes


@dataclass(frozen=True)
class Form:
    """A way to write a request and to read its answer."""

    encode: Callable[[Workload], Request]
    decode: Callable[[Reply], dict[str, np.ndarray]]


def fetch(port: int, request: Request) -> Reply:
    """Ask once, by a client that understands all of HTTP. Errors: ConnectionError for any status but 200."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    connection.request("POST", request.path, request.body, AUTHORIZATION | dict(request.headers))
    answer = connection.getresponse()
    body = answer.read()
    connection.close()
    if answer.status != 200:
        raise ConnectionError(f"{answer.status}: {body[:500].decode(errors='replace')}")
    return Reply({name.lower(): value for name, value in answer.getheaders()}, body)


def lists(path: str, **extra: Any) -> Form:
    """JSON: matrices as lists of lists."""

    def encode(load: Workload) -> Request:
        fields = {name: array.tolist() for name, array in load.arrays.items()}
        return Request(path, {"Content-Type": JSON}, json.dumps(fields | extra).encode())

    def decode(reply: Reply) -> dict[str, np.ndarray]:
        body = json.loads(reply.body)
        return {name: np.array(body[name]) for name in ("output", "attention_weights") if name in body}

    return Form(encode, decode)


def tensors(path: str, media_type: str = OCTETS) -> Form:
    """safetensors, for peers that take any bytes: a tensor more says that no weights are wanted."""

    def encode(load: Workload) -> Request:
        wish = {} if load.weights else {"no_weights": np.ones(1, np.uint8)}
        return Request(path, {"Content-Type": media_type}, save(load.arrays | wish))

    return Form(encode, lambda reply: load(reply.body))


def our_tensors() -> Form:
    """safetensors as this service reads them."""

    def encode(load: Workload) -> Request:
        heads = {"layout": "hld"} if load.query.ndim == 3 else {}
        request = json.dumps(heads if load.weights else heads | {"include": []})
        return Request("/attention", {"Content-Type": SAFETENSORS}, save(load.arrays, {"request": request}))

    return Form(encode, lambda reply: load(reply.body))


V2 = "/v2/models/attention/infer"


def _v2(load: Workload, tensor: Callable[[np.ndarray], dict[str, Any]], **wish: Any) -> bytes:
    """The JSON of a v2 request. Arrays have three axes, as a model is declared with a number of them."""
    inputs = []
    for name, array in load.arrays.items():
        shape = [1] * (3 - array.ndim) + list(array.shape)
        inputs.append({"name": name, "shape": shape, "datatype": "FP32"} | tensor(array))
    return json.dumps({"inputs": inputs, "outputs": [{"name": name} | wish for name in load.answers]}).encode()


def v2_json() -> Form:
    """v2: arrays as flat lists."""

    def encode(load: Workload) -> Request:
        return Request(V2, {"Content-Type": JSON}, _v2(load, lambda array: {"data": array.ravel().tolist()}))

    def decode(reply: Reply) -> dict[str, np.ndarray]:
        return {out["name"]: np.array(out["data"]) for out in json.loads(reply.body)["outputs"]}

    return Form(encode, decode)


def v2_binary() -> Form:
    """v2 with its binary extension: arrays as bytes after the JSON."""

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
    """v2 where it has no binary extension: one string of base64 for each array."""

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
