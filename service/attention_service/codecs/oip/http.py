"""The Open Inference Protocol (v2) over HTTP: a JSON object, and after it the bytes of tensors that it leaves out.

The binary tensor data extension is that of Triton: sizes stand in the JSON, the bytes follow in the same order.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from typing import Any, Final

import numpy as np

from attention_service.codecs.base import Codec
from attention_service.codecs.chunks import MAX_CHUNK, Chunk, Encoded, array_chunks, encoded
from attention_service.codecs.decoded import Body, Decoded, NotQuick
from attention_service.codecs.json import JSONCodec, reader
from attention_service.codecs.json import memory as json_memory
from attention_service.codecs.json.writer import Flat, chunks, longest
from attention_service.codecs.named_tensors import check_count
from attention_service.codecs.oip.fields import assembled, requested_outputs, scalars
from attention_service.codecs.oip.tensors import (
    BYTES,
    DATATYPES,
    MAX_STRINGS,
    Input,
    head_of,
    parameters_of,
    tensors_of,
)
from attention_service.errors import InvalidJSON, InvalidTensors
from attention_service.version import MODEL, MODEL_VERSION

OCTETS: Final = "application/octet-stream"
# The header that says how many bytes of a body are JSON.
HEADER: Final = b"inference-header-content-length"
# Bytes of a body, and of its JSON, that are decoded in a few milliseconds: tensors after the JSON are not copied.
INLINE_BODY: Final = 2**22
INLINE_JSON: Final = JSONCodec.decode_inline
# The parameter with the number of bytes after the JSON that a tensor takes.
BINARY_SIZE: Final = "binary_data_size"
# A tensor after the JSON is copied where its elements are not aligned.
COPIES: Final = 2
# Bytes for each byte of strings after the JSON, of which the shortest take five, and for each of these strings.
STRINGS: Final = 16
STRING: Final = 96
# Strings that are decoded within a few milliseconds.
QUICK_STRINGS: Final = 2**14
HOLDS_SIZES: Final = re.compile(BINARY_SIZE.encode())
# A datatype may be written with escapes.
HOLDS_STRINGS: Final = re.compile(rb"BYTES|\\")


class HTTPCodec(Codec):
    """The codec of one request and its answer.

    head: bytes of the body that are JSON, all if None; model: that the request names
    """

    def __init__(self, head: int | None, model: str = MODEL) -> None:
        self._head = head
        self._model = model
        self.media_type = JSONCodec.media_type if head is None else OCTETS
        self.decode_inline = INLINE_JSON if head is None or head > INLINE_JSON else INLINE_BODY

    def decode(self, body: Body, limit: int) -> Decoded:
        """The fields of a request. Errors: InvalidTensors, InvalidRequest, FieldConflict, and those of JSON."""
        return self._decode(body)

    def _decode_or_stop(self, body: Body, limit: int) -> Decoded:
        """Like `decode`. Errors: also NotQuick, for many lists, keys or long numbers, and for faults."""
        return self._decode(body, quickly=True)

    def _decode(self, body: Body, *, quickly: bool = False) -> Decoded:
        if self._head is not None and self._head > len(body):
            expected = f"at most {len(body)} bytes of JSON, as long as the body is"
            raise InvalidTensors.at("", expected, str(self._head))
        whole = memoryview(body)
        text, tail = whole[: self._head], whole[len(body) if self._head is None else self._head :]
        try:
            request = reader.decode(text, quickly=quickly).fields
        except InvalidJSON:
            if self._head is None and HOLDS_SIZES.search(whole):
                raise InvalidTensors.at(
                    "", "the length of the JSON in Inference-Header-Content-Length", "none"
                ) from None
            raise
        inputs = _inputs(request.get("inputs"), tail)
        return assembled(request, tensors_of(_few_strings(inputs) if quickly else inputs), model=self._model)

    def decode_bound(self, length: int, limit: int) -> int:
        """Upper bound of the memory for decoding any body of `length` bytes."""
        text = length if self._head is None else min(self._head, length)
        return json_memory.decode_bound(text) + _tail_bytes(length - text, strings=True)

    def decode_bytes(self, body: Body, limit: int) -> int:
        """A closer upper bound, by what the JSON holds."""
        text = memoryview(body)[: self._head]
        tail = len(body) - len(text)
        return json_memory.decode_bytes(text) + _tail_bytes(tail, strings=tail > 0 and bool(HOLDS_STRINGS.search(text)))

    def encode(self, answer: Mapping[str, Any], request: Decoded) -> Encoded:
        """The requested outputs: JSON, and after it the bytes of binary outputs.

        The length of the JSON must be known before bytes follow. So it is padded to an upper bound.
        """
        assert request.outputs is not None
        document: dict[str, Any] = {"model_name": self._model, "model_version": MODEL_VERSION}
        if request.outputs.id is not None:
            document["id"] = request.outputs.id
        document["parameters"] = scalars(answer["metadata"])
        tensors = requested_outputs(answer, request.outputs)
        document["outputs"] = [_entry(name, *tensor) for name, tensor in tensors.items()]
        binary = [tensor for tensor, is_binary in tensors.values() if is_binary]
        if not binary:
            return encoded(JSONCodec.media_type, chunks(document))
        without_data = [entry | {"data": []} if "data" in entry else entry for entry in document["outputs"]]
        head = sum(map(len, chunks(document | {"outputs": without_data})))
        head += sum(longest(tensor) for tensor, is_binary in tensors.values() if not is_binary)
        content = chain(_padded(chunks(document), head), *map(array_chunks, binary))
        result = encoded(OCTETS, content, head + sum(tensor.nbytes for tensor in binary))
        result.headers.append((HEADER, b"%d" % head))
        return result


def _few_strings(inputs: Iterable[Input]) -> Iterator[Input]:
    """The same inputs. Errors: NotQuick once they have more strings than a few milliseconds are enough for."""
    count = 0
    for given in inputs:
        count += given[0].size if given[0].datatype == BYTES else 0
        if count > QUICK_STRINGS:
            raise NotQuick
        yield given


def _tail_bytes(length: int, *, strings: bool) -> int:
    """Upper bound of the memory for tensors in so many bytes after the JSON. strings: True if they may be strings"""
    return COPIES * length + (min(STRINGS * length, STRING * MAX_STRINGS) if strings else 0)


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
            yield head, data, f"{pointer}/data"
            continue
        if "data" in entry:
            raise InvalidTensors.at(pointer, f"data or {BINARY_SIZE}", "both")
        pointer = f"{pointer}/parameters/{BINARY_SIZE}"
        size = _checked_size(parameters[BINARY_SIZE], len(tail), taken, pointer)
        yield head, tail[taken : taken + size], pointer
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


def _entry(name: str, tensor: np.ndarray, is_binary: bool) -> dict[str, Any]:
    """An output in the JSON of an answer."""
    data = {"parameters": {BINARY_SIZE: tensor.nbytes}} if is_binary else {"data": Flat(tensor)}
    return {"name": name, "datatype": DATATYPES[tensor.dtype], "shape": tensor.shape} | data


def _padded(text: Iterable[Chunk], length: int) -> Iterator[Chunk]:
    """JSON padded with spaces at its end to this length."""
    for chunk in text:
        length -= len(chunk)
        yield chunk
    while length:
        spaces = min(length, MAX_CHUNK)
        length -= spaces
        yield b" " * spaces
