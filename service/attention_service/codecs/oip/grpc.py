"""The Open Inference Protocol (v2) over gRPC: one message of protobuf, its tensors as raw bytes or in typed fields.

Fields, options and outputs are those of the protocol over HTTP. A message is split before protobuf parses it: raw
tensors become views of it, not copies, and the length of all other fields bounds the memory that parsing takes.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping
from typing import Any, Final

import numpy as np
from google.protobuf.message import DecodeError

from attention_service.codecs.base import Codec
from attention_service.codecs.chunks import ENCODE_BYTES, Chunk, Encoded, contiguous
from attention_service.codecs.decoded import Body, Decoded
from attention_service.codecs.element_types import PROTOCOL_TYPES
from attention_service.codecs.named_tensors import MAX_TENSORS
from attention_service.codecs.oip import check_model
from attention_service.codecs.oip.fields import assembled, requested_outputs, scalars
from attention_service.codecs.oip.http import STRING, STRINGS
from attention_service.codecs.oip.messages import MESSAGES
from attention_service.codecs.oip.tensors import (
    BYTES,
    DATATYPES,
    MAX_STRINGS,
    Head,
    Input,
    head_of,
    tensors_of,
    text,
)
from attention_service.codecs.shapes import MAX_RANK
from attention_service.errors import InvalidTensors, MemoryLimit
from attention_service.version import MODEL, MODEL_VERSION

# The numbers of the fields with raw tensors, of ModelInferRequest and of ModelInferResponse.
RAW_INPUTS: Final = 7
RAW_OUTPUTS: Final = 6
# Inputs and their bytes, outputs, parameters.
MAX_FIELDS: Final = 3 * MAX_TENSORS
# Messages of protobuf are smaller than 2 GiB, the rest of an answer is smaller than this.
MAX_ANSWER: Final = 2**31 - 2**20
# Where the elements of a datatype stand when they are not raw: a field, and its number in InferTensorContents.
CONTENTS: Final[dict[str, tuple[str, int]]] = {
    "BOOL": ("bool_contents", 1),
    **dict.fromkeys(("INT8", "INT16", "INT32"), ("int_contents", 2)),
    "INT64": ("int64_contents", 3),
    **dict.fromkeys(("UINT8", "UINT16", "UINT32"), ("uint_contents", 4)),
    "UINT64": ("uint64_contents", 5),
    "FP32": ("fp32_contents", 6),
    "FP64": ("fp64_contents", 7),
    BYTES: ("bytes_contents", 8),
}
# Where a scalar stands in InferParameter.
PARAMETERS: Final = {bool: "bool_param", int: "int64_param", float: "double_param", str: "string_param"}
# A message is kept, and of it what lies across words is copied; protobuf makes many times its length of the rest.
COPIES: Final = 2
EFFORT: Final = 32
# An answer is joined into one message, which gRPC copies; typed fields are made before.
RAW_COPIES: Final = 2
TYPED_COPIES: Final = 5
# Integers that are Python's at a time, each of which then takes up to 40 bytes.
AT_ONCE: Final = 2**14
# Bytes of a message without its raw tensors that are decoded in about a millisecond, and of one with them: raw tensors
# are copied once.
INLINE_HEAD: Final = 2**15
INLINE_BODY: Final = 2**22
# Bytes of an answer that are encoded in a worker thread.
LARGE_ANSWER: Final = 2**20
# Wire types of protobuf, the lowest bits of a field's key: what follows. FIXED: so many bytes
VARINT: Final = 0
DELIMITED: Final = 2
FIXED: Final = {1: 8, 5: 4}


class GRPCCodec(Codec):
    """The codec of one ModelInferRequest and its answer. layers: the stored layers, which are models too

    Errors: InvalidTensors if the body is no message.
    """

    media_type = "application/grpc"
    encode_inline = LARGE_ANSWER

    def __init__(self, body: bytes, layers: Container[str] = ()) -> None:
        self._layers = layers
        self._model = MODEL
        self._head, self._raw = split(body)
        self.decode_inline = INLINE_BODY if len(self._head) <= INLINE_HEAD else INLINE_HEAD

    def decode(self, body: Body, limit: int) -> Decoded:
        """The fields of the request. Errors: NotFound, InvalidTensors, InvalidRequest, FieldConflict, Overflow."""
        request = parse("ModelInferRequest", self._head)
        check_model(request.model_name, request.model_version or MODEL_VERSION, self._layers)
        self._model = request.model_name
        raw, inputs = self._raw, request.inputs
        if raw and len(raw) != len(inputs):
            raise InvalidTensors.at("/raw_input_contents", f"{len(inputs)}, one for each input", str(len(raw)))
        tensors = tensors_of(_inputs(inputs, raw))
        outputs = [{"name": output.name, "parameters": _scalars(output.parameters)} for output in request.outputs]
        plain = {"id": request.id or None, "outputs": outputs, "parameters": _scalars(request.parameters)}
        plain["inputs"] = [{"parameters": tensor.parameters} for tensor in inputs]
        return assembled(plain, tensors, binary=bool(raw), model=self._model)

    def decode_bound(self, length: int, limit: int) -> int:
        """Upper bound of the memory for decoding any message of `length` bytes."""
        return (COPIES + EFFORT) * length

    def decode_bytes(self, body: Body, limit: int) -> int:
        """A closer upper bound, by the length of its head."""
        memory = COPIES * len(body) + EFFORT * len(self._head)
        if BYTES.encode() in self._head:
            memory += min(STRINGS * len(body), STRING * MAX_STRINGS)
        return min(memory, self.decode_bound(len(body), limit))

    def encode(self, answer: Mapping[str, Any], request: Decoded) -> Encoded:
        """One ModelInferResponse with the requested outputs: all tensors raw, or all in typed fields.

        Errors: MemoryLimit.
        """
        requested = request.outputs
        assert requested is not None
        outputs = requested_outputs(answer, requested)
        size = sum(array.nbytes for array, _ in outputs.values())
        if size > MAX_ANSWER:
            raise MemoryLimit.at("", f"at most {MAX_ANSWER} bytes in an answer, as gRPC has no larger ones", str(size))
        raw = any(binary or DATATYPES[array.dtype] not in CONTENTS for array, binary in outputs.values())
        names = {"model_name": self._model, "model_version": MODEL_VERSION, "id": requested.id or ""}
        response = MESSAGES["ModelInferResponse"](**names)
        for name, scalar in scalars(answer["metadata"]).items():
            setattr(response.parameters[name], PARAMETERS[type(scalar)], scalar)
        content: list[Chunk] = []
        for name, (array, _) in outputs.items():
            tensor = response.outputs.add(name=name, datatype=DATATYPES[array.dtype], shape=array.shape)
            if raw:
                content += _field(RAW_OUTPUTS, array)
            else:
                _fill(tensor.contents, array)
        # Raw tensors are the last field of a message, which may be written in pieces.
        message = b"".join([response.SerializeToString(), *content])
        return Encoded(self.media_type, [], [message])

    def encode_bytes(self, answer: int, request: Decoded) -> int:
        """Memory for encoding arrays of `answer` bytes as one message, the message included."""
        raw = request.outputs is not None and request.outputs.default
        return ENCODE_BYTES + (RAW_COPIES if raw else TYPED_COPIES) * answer


def split(body: bytes) -> tuple[bytes, list[memoryview]]:
    """The head of a ModelInferRequest, all fields but the raw tensors, and views of these. Errors: InvalidTensors."""
    view = memoryview(body)
    head: list[memoryview] = []
    raw: list[memoryview] = []
    at = 0
    while at < len(body):
        start = at
        key, at = _varint(body, at)
        kind = key & 7
        if kind == VARINT:
            _, at = _varint(body, at)
        elif kind == DELIMITED:
            size, at = _varint(body, at)
            value, at = at, at + size
        else:
            at += FIXED.get(kind, len(body))  # a group is no part of any message here
        if at > len(body):
            raise _no_message()
        if key == RAW_INPUTS << 3 | DELIMITED:
            raw.append(view[value:at])
        else:
            head.append(view[start:at])
        if len(head) + len(raw) > MAX_FIELDS:
            raise InvalidTensors.at("", f"a message of at most {MAX_FIELDS} fields", "more")
    return b"".join(head), raw


def _varint(body: bytes, at: int) -> tuple[int, int]:
    """The number at an offset, seven bits in each byte, the lowest first, and the offset after it."""
    number = 0
    for shift, byte in enumerate(body[at : at + 10]):
        number |= (byte & 0x7F) << 7 * shift
        if byte < 0x80:
            return number, at + shift + 1
    raise _no_message()


def _no_message() -> InvalidTensors:
    return InvalidTensors.at("", "a message of inference.proto", "other bytes")


def parse(name: str, data: bytes) -> Any:
    """The message of this name that the bytes hold. Errors: InvalidTensors."""
    try:
        return MESSAGES[name].FromString(data)
    except DecodeError:
        raise _no_message() from None


def _scalars(parameters: Any) -> dict[str, Any]:
    """Parameters as the scalars that they hold; None for a parameter that holds nothing."""
    chosen = {name: parameter.WhichOneof("parameter_choice") for name, parameter in parameters.items()}
    return {name: choice and getattr(parameters[name], choice) for name, choice in chosen.items()}


def _inputs(tensors: Any, raw: list[memoryview]) -> Iterator[Input]:
    """The inputs of a request, all with raw data or all with data in typed fields."""
    for i, tensor in enumerate(tensors):
        pointer = f"/inputs/{i}"
        lengths = list(tensor.shape[: MAX_RANK + 1])
        head = head_of(tensor.name, tensor.datatype, lengths, tensor.parameters, pointer)
        filled = [field.name for field, _ in tensor.contents.ListFields()]
        if not raw:
            yield _typed(tensor.contents, filled, head)
        elif filled:
            raise InvalidTensors.at(f"{pointer}/contents", "contents or raw_input_contents", "both")
        else:
            yield head, raw[i], f"/raw_input_contents/{i}"


def _typed(contents: Any, filled: list[str], head: Head) -> Input:
    """An input from the field for its datatype. filled: the fields with elements"""
    pointer = f"{head.pointer}/contents"
    if head.datatype not in CONTENTS:
        expected = f"raw_input_contents for {head.datatype}, which has no field of its own"
        raise InvalidTensors.at(pointer, expected, "none")
    field, _ = CONTENTS[head.datatype]
    others = [name for name in filled if name != field]
    if others:
        raise InvalidTensors.at(pointer, f"{field} for {head.datatype}", others[0])
    elements = getattr(contents, field)
    pointer = f"{pointer}/{field}"
    if head.datatype == BYTES:
        return head, [text(element, pointer) for element in elements], pointer
    dtype = PROTOCOL_TYPES[head.datatype]
    plain = np.dtype(dtype.kind + "8") if dtype.kind in "iu" else dtype  # whose overflow is found later
    return head, np.fromiter(elements, plain, len(elements)), pointer


def _fill(contents: Any, array: np.ndarray) -> None:
    """Put an array into the field for its type."""
    field, number = CONTENTS[DATATYPES[array.dtype]]
    if array.dtype.kind == "f":  # on the wire as in memory, so that no number becomes an object
        contents.MergeFromString(b"".join(_field(number, array)))
    else:
        elements = getattr(contents, field)
        for part in contiguous(array, AT_ONCE):
            elements.extend(part.tolist())


def _field(number: int, array: np.ndarray) -> tuple[bytes, memoryview]:
    """A delimited field: its key and its length, and what it holds."""
    opening = [number << 3 | DELIMITED]
    array = np.asarray(array, order="C")
    length = array.nbytes
    while length > 0x7F:
        opening.append(length & 0x7F | 0x80)
        length >>= 7
    return bytes([*opening, length]), array.reshape(-1).view(np.uint8).data
