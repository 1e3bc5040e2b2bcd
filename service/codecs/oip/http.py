"""The Open Inference Protocol (v2) over HTTP: a JSON object, and after it the bytes of tensors that it leaves out.

Inputs are the fields that are arrays, parameters all others, nested ones dotted. Requested outputs are `include`. The
binary tensor data extension is that of Triton: sizes stand in the JSON, the bytes follow in the same order.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import chain
from typing import Any, Final

import numpy as np
import orjson

from service.codecs import Codec, json
from service.codecs.chunks import MAX_CHUNK, WORTH_SENDING, Chunk, Encoded, in_one, memory, streamed
from service.codecs.decoded import Body, Decoded, RequestedOutputs
from service.codecs.named_tensors import add_dotted, answer_tensors, check_count
from service.codecs.oip.outputs import ALWAYS, BINARY_OUTPUT, requested_outputs, set_include
from service.codecs.oip.tensors import DATATYPES, MAX_STRINGS, Input, head_of, parameters_of, tensors_of
from service.errors import InvalidTensors, UnknownField

OCTETS: Final = "application/octet-stream"
# The header that says how many bytes of a body are JSON.
HEADER: Final = b"inference-header-content-length"
# Bytes of JSON that are decoded in well below a millisecond, and of tensors after it, which are not copied.
INLINE_JSON: Final = 2**18
INLINE_BODY: Final = 2**22
# The parameter with the number of bytes after the JSON that a tensor takes.
BINARY_SIZE: Final = "binary_data_size"
# Parameters are scalars, so that lists of names come as one string.
NAME_LISTS: Final = ("include", "query_tokens", "key_tokens")
# What clients and gateways say to schedulers, batchers and decoders, of which there are none here.
IGNORED: Final = frozenset(
    {"content_type", "headers", "priority", "sequence_end", "sequence_id", "sequence_start", "timeout"}
)
# A tensor after the JSON is copied where its elements are not aligned.
COPIES: Final = 2
# Bytes for each byte of strings after the JSON, of which the shortest take five, and for each of these strings.
STRINGS: Final = 16
STRING: Final = 96
# JSON that is searched for strings, in bytes: longer ones take more than these anyway.
SEARCHED: Final = 2**16
# A datatype may be written with escapes.
HOLDS_STRINGS: Final = re.compile(rb"BYTES|\\\\")


def codec(head: int | None, model: str, version: str) -> Codec:
    """The codec of one request. head: bytes of its body that are JSON, all if None; model, version: for its answer"""

    def encode_answer(answer: Mapping[str, Any], request: Decoded) -> Encoded:
        assert request.outputs is not None
        return encode(answer, request.outputs, model, version)

    return Codec(
        media_type=json.MEDIA_TYPE if head is None else OCTETS,
        decode=lambda body, limit: decode(body, head),
        encode=encode_answer,
        decode_bound=lambda length, limit: decode_bound(length, head),
        decode_bytes=lambda body, limit: decode_bytes(body, head),
        decode_inline=INLINE_JSON if head is None or head > INLINE_JSON else INLINE_BODY,
    )


def decode(body: Body, head: int | None) -> Decoded:
    """The fields of a request whose JSON is the first `head` bytes, all of it if None.

    Errors: InvalidTensors, InvalidRequest, FieldConflict, and those of JSON.
    """
    if head is not None and head > len(body):
        raise InvalidTensors.at("", f"at most {len(body)} bytes of JSON, as long as the body is", str(head))
    request = json.decode(body if head is None else body[:head]).fields
    tail = memoryview(body)[len(body) if head is None else head :]
    return assembled(request, tensors_of(_inputs(request.get("inputs"), tail)))


def decode_bound(length: int, head: int | None) -> int:
    """Upper bound of the memory for decoding any body of this length, in bytes. head: as for `decode`"""
    text = length if head is None else min(head, length)
    tail = length - text
    return json.decode_bound(text) + COPIES * tail + min(STRINGS * tail, STRING * MAX_STRINGS)


def decode_bytes(body: Body, head: int | None) -> int:
    """Upper bound of the memory for decoding this body, in bytes."""
    text = memoryview(body)[:head]
    tail = len(body) - len(text)
    memory = json.decode_bytes(text) + COPIES * tail
    if tail and (len(text) > SEARCHED or HOLDS_STRINGS.search(text)):
        memory += min(STRINGS * tail, STRING * MAX_STRINGS)
    return memory


def _inputs(entries: Any, tail: memoryview) -> Iterator[Input]:
    """The inputs of a request. Those with a binary_data_size take the bytes after the JSON, one after the other."""
    if not isinstance(entries, list):
        raise InvalidTensors.of("/inputs", "an array of tensors", entries)
    check_count(len(entries))
    taken = 0
    for i, entry in enumerate(entries):
        pointer = f"/inputs/{i}"
        if not isinstance(entry, dict):
            raise InvalidTensors.of(pointer, "an object with name, shape, datatype and data", entry)
        parameters = parameters_of(entry, pointer)
        head = head_of(entry.get("name"), entry.get("datatype"), entry.get("shape"), parameters, pointer)
        data = entry.get("data")
        if BINARY_SIZE not in parameters:
            if data is None:
                expected = f"data, or {BINARY_SIZE} among the parameters"
                raise InvalidTensors.at(f"{pointer}/data", expected, "neither")
            yield Input(head, data, f"{pointer}/data")
            continue
        if "data" in entry:
            raise InvalidTensors.at(pointer, f"data or {BINARY_SIZE}", "both")
        pointer = f"{pointer}/parameters/{BINARY_SIZE}"
        size = _checked_size(parameters[BINARY_SIZE], len(tail), taken, pointer)
        yield Input(head, tail[taken : taken + size], pointer)
        taken += size
    if taken != len(tail):
        raise InvalidTensors.at("", f"{taken} bytes after the JSON, as its inputs say", str(len(tail)))


def _checked_size(size: Any, available: int, taken: int, pointer: str) -> int:
    """A binary_data_size. Errors: InvalidTensors for more bytes than are left."""
    if type(size) is not int or size < 0:
        raise InvalidTensors.of(pointer, "a number of bytes", size)
    left = available - taken
    if size > left:
        hint = "" if available else "the header Inference-Header-Content-Length says where the JSON ends"
        raise InvalidTensors.at(pointer, f"at most the {left} bytes that are left after the JSON", str(size), hint)
    return size


def assembled(request: Mapping[str, Any], tensors: Mapping[str, Any], *, binary: bool = False) -> Decoded:
    """The fields of a request from its tensors and all its other parts.

    binary: whether outputs come as bytes where the request does not say
    Errors: InvalidTensors, InvalidValue, FieldConflict, UnknownField.
    """
    parameters = parameters_of(request, "")
    fields: dict[str, Any] = {}
    add_dotted(fields, tensors)
    add_dotted(fields, _options(parameters))
    outputs = requested_outputs(request, parameters, binary)
    if outputs.names:
        set_include(fields, outputs.names)
    return Decoded(fields, frozenset(), outputs)


def _options(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """The parameters that are fields of the request."""
    if "encoding" in parameters:
        raise UnknownField.at("/parameters/encoding", f"{BINARY_OUTPUT}, or binary_data of an output", "encoding")
    found = {name: value for name, value in parameters.items() if value is not None and name not in IGNORED}
    found.pop(BINARY_OUTPUT, None)
    for name in NAME_LISTS:
        if isinstance(found.get(name), str):
            found[name] = [item.strip() for item in found[name].split(",") if item.strip()]
    return found


def encode(answer: Mapping[str, Any], outputs: RequestedOutputs, model: str, version: str) -> Encoded:
    """The answer with the outputs that were requested: JSON, and after it the bytes of binary outputs.

    The length of the JSON must be known before bytes follow. Long JSON is therefore padded to an upper bound.
    """
    chosen = outputs_of(answer, outputs)
    opening: dict[str, Any] = {"model_name": model, "model_version": version}
    if outputs.id is not None:
        opening["id"] = outputs.id
    opening["parameters"] = scalars(answer["metadata"])
    binary = [tensor for name, tensor in chosen.items() if outputs.is_binary(name)]
    listed = [tensor for name, tensor in chosen.items() if not outputs.is_binary(name)]
    text: Iterable[Chunk] = _json(opening, chosen, outputs, json.flat)
    if sum(tensor.size for tensor in listed) <= json.AT_ONCE and len(outputs.id or "") <= json.AT_ONCE:
        text = list(text)
        head = sum(map(len, text))
    elif binary:
        head = sum(map(len, _json(opening, chosen, outputs, lambda tensor: ()))) + sum(map(json.longest, listed))
        text = _padded(text, head)
    else:
        return streamed(json.MEDIA_TYPE, text)
    length = head + sum(tensor.nbytes for tensor in binary)
    chunks = chain(text, *map(memory, binary))
    media_type = OCTETS if binary else json.MEDIA_TYPE
    encoded = in_one(media_type, chunks) if length <= WORTH_SENDING else streamed(media_type, chunks, length)
    if binary:
        encoded.headers.append((HEADER, b"%d" % head))
    return encoded


def outputs_of(answer: Mapping[str, Any], outputs: RequestedOutputs) -> dict[str, np.ndarray]:
    """The tensors of an answer that were requested."""
    tensors = dict(answer_tensors(answer))
    return {name: tensors[name] for name in outputs.names or dict.fromkeys((ALWAYS, *tensors))}


def scalars(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """The metadata as parameters, which are scalars."""
    found = {name: value for name, value in metadata.items() if name != "warnings"}
    if metadata["warnings"]:
        found["warnings"] = "; ".join(f"{notice.code}: {notice.message}" for notice in metadata["warnings"])
    return found


def _json(
    opening: Mapping[str, Any],
    tensors: Mapping[str, np.ndarray],
    outputs: RequestedOutputs,
    data_of: Callable[[np.ndarray], Iterable[Chunk]],
) -> Iterator[Chunk]:
    """The JSON of an answer, in chunks. data_of: writes the data of a tensor that does not come as bytes"""
    yield from json.unclosed(opening)
    before = b',"outputs":['
    for name, tensor in tensors.items():
        entry: dict[str, Any] = {"name": name, "datatype": DATATYPES[tensor.dtype], "shape": tensor.shape}
        if outputs.is_binary(name):
            yield before + orjson.dumps(entry | {"parameters": {BINARY_SIZE: tensor.nbytes}})
        else:
            yield before + orjson.dumps(entry)[:-1] + b',"data":'
            yield from data_of(tensor)
            yield b"}"
        before = b","
    yield b"]}"


def _padded(chunks: Iterable[Chunk], length: int) -> Iterator[Chunk]:
    """JSON padded with spaces at its end to this length."""
    for chunk in chunks:
        length -= len(chunk)
        yield chunk
    while length:
        spaces = min(length, MAX_CHUNK)
        length -= spaces
        yield b" " * spaces
