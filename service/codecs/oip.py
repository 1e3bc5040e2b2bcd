"""The Open Inference Protocol (v2) over HTTP: a JSON object, and after it the bytes of tensors that it leaves out.

Inputs are the fields that are arrays, parameters all others, nested ones dotted. Requested outputs are `include`. The
binary tensor data extension is that of Triton: sizes stand in the JSON, the bytes follow in the same order.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final, NamedTuple

import numpy as np
import orjson

from service.codecs import json
from service.codecs.decoded import Body, Decoded, Part
from service.codecs.members import MAX_MEMBERS, flattened, place, too_many
from service.codecs.oip_outputs import ALWAYS, BINARY_OUTPUT, Wish, set_include, wish_of
from service.codecs.oip_tensors import BINARY_SIZE, DATATYPES, Tail, parameters_of, read
from service.errors import FieldConflict, InvalidTensors, UnknownField

# Parameters are scalars, so that lists of names come as one string.
NAME_LISTS: Final = ("include", "query_tokens", "key_tokens")
# What clients and gateways say to schedulers, batchers and decoders, of which there are none here.
IGNORED: Final = frozenset(
    {"content_type", "headers", "priority", "sequence_end", "sequence_id", "sequence_start", "timeout"}
)


class Written(NamedTuple):
    """An answer in parts; head: where the JSON ends and bytes follow, None where there are none."""

    parts: Iterable[Part]
    head: int | None


def decode(body: Body, head: int | None) -> tuple[Decoded, Wish]:
    """The fields of a request whose JSON is the first `head` bytes, all of it if None.

    Errors: InvalidTensors, InvalidRequest, FieldConflict, and those of JSON.
    """
    if head is not None and head > len(body):
        raise InvalidTensors.at("", f"at most {len(body)} bytes of JSON, as long as the body is", str(head))
    request = json.decode(body if head is None else body[:head]).fields
    tail = Tail(memoryview(body)[len(body) if head is None else head :])
    tensors = _tensors(request.get("inputs"), tail)
    tail.end()
    return assembled(request, tensors)


def assembled(request: Mapping[str, Any], tensors: Mapping[str, Any], *, binary: bool = False) -> tuple[Decoded, Wish]:
    """The fields of a request from its tensors and all else.

    binary: whether outputs come as bytes where the request does not say
    Errors: InvalidTensors, InvalidValue, FieldConflict, UnknownField.
    """
    parameters = parameters_of(request, "")
    fields: dict[str, Any] = {}
    place(fields, tensors)
    place(fields, _options(parameters))
    wish = wish_of(request, parameters, binary)
    if wish.names:
        set_include(fields, wish.names)
    return Decoded(fields, frozenset()), wish


def encode(answer: Mapping[str, Any], wish: Wish, model: str, version: str) -> Written:
    """The answer that a request wants."""
    chosen = outputs_of(answer, wish)
    opening: dict[str, Any] = {"model_name": model, "model_version": version}
    if wish.id is not None:
        opening["id"] = wish.id
    opening["parameters"] = scalars(answer["metadata"])
    text = _json(opening, chosen, wish)
    binary = [np.asarray(chosen[name], order="C").reshape(-1) for name in chosen if wish.is_binary(name)]
    if not binary:
        large = any(tensor.size > json.AT_ONCE for tensor in chosen.values())
        return Written(json.gathered(text) if large else [b"".join(text)], None)
    start = b"".join(text)
    return Written([start, *(flat.view(np.uint8).data for flat in binary)], len(start))


def outputs_of(answer: Mapping[str, Any], wish: Wish) -> dict[str, np.ndarray]:
    """The tensors that a request wants."""
    tensors = dict(flattened(answer))
    return {name: tensors[name] for name in wish.names or dict.fromkeys((ALWAYS, *tensors))}


def scalars(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """The metadata as parameters, which are scalars."""
    found = {name: value for name, value in metadata.items() if name != "warnings"}
    if metadata["warnings"]:
        found["warnings"] = "; ".join(f"{notice.code}: {notice.message}" for notice in metadata["warnings"])
    return found


def once(found: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """Inputs by their names. Errors: FieldConflict for one given twice."""
    tensors: dict[str, Any] = {}
    for i, (name, value) in enumerate(found):
        if name in tensors:
            raise FieldConflict.at(f"/inputs/{i}/name", "each input once", "the same name again")
        tensors[name] = value
    return tensors


def _tensors(inputs: Any, tail: Tail) -> dict[str, Any]:
    """All inputs by their names."""
    if not isinstance(inputs, list):
        raise InvalidTensors.of("/inputs", "an array of tensors", inputs)
    if len(inputs) > MAX_MEMBERS:
        raise too_many(len(inputs))
    return once(read(entry, f"/inputs/{i}", tail) for i, entry in enumerate(inputs))


def _options(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """The parameters that are fields."""
    if "encoding" in parameters:
        raise UnknownField.at("/parameters/encoding", f"{BINARY_OUTPUT}, or binary_data of an output", "encoding")
    found = {name: value for name, value in parameters.items() if value is not None and name not in IGNORED}
    found.pop(BINARY_OUTPUT, None)
    for name in NAME_LISTS:
        if isinstance(found.get(name), str):
            found[name] = [item.strip() for item in found[name].split(",") if item.strip()]
    return found


def _json(opening: Mapping[str, Any], tensors: Mapping[str, np.ndarray], wish: Wish) -> Iterator[Part]:
    """The JSON in pieces: what begins it, and the outputs, those that are not binary with their data in one list."""
    yield orjson.dumps(opening)[:-1] + b',"outputs":['
    for position, (name, tensor) in enumerate(tensors.items()):
        entry: dict[str, Any] = {"name": name, "datatype": DATATYPES[tensor.dtype], "shape": list(tensor.shape)}
        comma = b"," * (position > 0)
        if wish.is_binary(name):
            yield comma + orjson.dumps(entry | {"parameters": {BINARY_SIZE: tensor.nbytes}})
        else:
            yield comma + orjson.dumps(entry)[:-1] + b',"data":'
            yield from json.pieces(tensor.reshape(-1))
            yield b"}"
    yield b"]}"
