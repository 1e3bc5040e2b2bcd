"""The Open Inference Protocol (v2) over HTTP: a JSON object, and after it the bytes of tensors that it leaves out.

Inputs are the fields that are arrays, parameters all others, nested ones dotted. Requested outputs are `include`. The
binary tensor data extension is that of Triton: sizes stand in the JSON, the bytes follow in the same order.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from itertools import chain
from typing import Any, Final

import numpy as np
import orjson

from service.codecs import Codec, json
from service.codecs.chunks import MAX_CHUNK, WORTH_SENDING, Chunk, Encoded, in_one, memory, streamed
from service.codecs.decoded import Body, Decoded, RequestedOutputs
from service.codecs.named_tensors import MAX_MEMBERS, flattened, place, too_many
from service.codecs.oip.outputs import ALWAYS, BINARY_OUTPUT, requested_outputs, set_include
from service.codecs.oip.tensors import BINARY_SIZE, DATATYPES, MAX_STRINGS, Strings, Tail, parameters_of, read
from service.errors import FieldConflict, InvalidTensors, UnknownField

OCTETS: Final = "application/octet-stream"
# The header that says how many bytes of a body are JSON.
HEADER: Final = b"inference-header-content-length"
# Bytes of JSON that are decoded in well below a millisecond, and of tensors after it, which are not copied.
INLINE_JSON: Final = 2**18
INLINE_BODY: Final = 2**22
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
    tail = Tail(memoryview(body)[len(body) if head is None else head :])
    tensors = _tensors(request.get("inputs"), tail)
    tail.end()
    return assembled(request, tensors)


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


def assembled(request: Mapping[str, Any], tensors: Mapping[str, Any], *, binary: bool = False) -> Decoded:
    """The fields of a request from its tensors and all else.

    binary: whether outputs come as bytes where the request does not say
    Errors: InvalidTensors, InvalidValue, FieldConflict, UnknownField.
    """
    parameters = parameters_of(request, "")
    fields: dict[str, Any] = {}
    place(fields, tensors)
    place(fields, _options(parameters))
    outputs = requested_outputs(request, parameters, binary)
    if outputs.names:
        set_include(fields, outputs.names)
    return Decoded(fields, frozenset(), outputs)


def encode(answer: Mapping[str, Any], outputs: RequestedOutputs, model: str, version: str) -> Encoded:
    """The answer with the outputs that were requested: JSON, and after it the bytes of binary outputs."""
    tensors = outputs_of(answer, outputs)
    opening: dict[str, Any] = {"model_name": model, "model_version": version}
    if outputs.id is not None:
        opening["id"] = outputs.id
    opening["parameters"] = scalars(answer["metadata"])
    pieces = partial(_json, opening, tensors, outputs)
    binary = [tensor for name, tensor in tensors.items() if outputs.is_binary(name)]
    listed = sum(tensor.size for name, tensor in tensors.items() if not outputs.is_binary(name))
    text: Iterable[Chunk] = _text(pieces())
    if listed > json.AT_ONCE or len(outputs.id or "") > json.AT_ONCE:
        if not binary:
            return streamed(json.MEDIA_TYPE, text)
        # The length of the JSON is announced before it is made.
        head = sum(json.longest(piece) if isinstance(piece, np.ndarray) else len(piece) for piece in pieces())
        text = _padded(text, head)
    else:
        text = list(text)
        head = sum(map(len, text))
    length = head + sum(tensor.nbytes for tensor in binary)
    chunks = chain(text, *map(memory, binary))
    media_type = OCTETS if binary else json.MEDIA_TYPE
    encoded = in_one(media_type, chunks) if length <= WORTH_SENDING else streamed(media_type, chunks, length)
    if binary:
        encoded.headers.append((HEADER, b"%d" % head))
    return encoded


def outputs_of(answer: Mapping[str, Any], outputs: RequestedOutputs) -> dict[str, np.ndarray]:
    """The tensors of an answer that were requested."""
    tensors = dict(flattened(answer))
    return {name: tensors[name] for name in outputs.names or dict.fromkeys((ALWAYS, *tensors))}


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
    strings = Strings()
    return once(read(entry, f"/inputs/{i}", tail, strings) for i, entry in enumerate(inputs))


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


def _json(
    opening: Mapping[str, Any], tensors: Mapping[str, np.ndarray], outputs: RequestedOutputs
) -> Iterator[Chunk | np.ndarray]:
    """The JSON in pieces. A tensor among them stands for its data in one list; binary ones are only described."""
    yield from json.members(opening)
    before = b',"outputs":['
    for name, tensor in tensors.items():
        entry: dict[str, Any] = {"name": name, "datatype": DATATYPES[tensor.dtype], "shape": list(tensor.shape)}
        if outputs.is_binary(name):
            yield before + orjson.dumps(entry | {"parameters": {BINARY_SIZE: tensor.nbytes}})
        else:
            yield before + orjson.dumps(entry)[:-1] + b',"data":'
            yield tensor
            yield b"}"
        before = b","
    yield b"]}"


def _text(pieces: Iterable[Chunk | np.ndarray]) -> Iterator[Chunk]:
    """The JSON in chunks."""
    for piece in pieces:
        if isinstance(piece, np.ndarray):
            yield from json.flat(piece)
        else:
            yield piece


def _padded(chunks: Iterable[Chunk], length: int) -> Iterator[Chunk]:
    """Pad JSON text with trailing spaces to a length that was announced before the text was made."""
    for chunk in chunks:
        length -= len(chunk)
        yield chunk
    while length:
        spaces = min(length, MAX_CHUNK)
        length -= spaces
        yield b" " * spaces
