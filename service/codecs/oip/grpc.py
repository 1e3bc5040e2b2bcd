"""The Open Inference Protocol (v2) over gRPC: one message of protobuf, its tensors as raw bytes or in typed fields.

Fields, options and outputs are those of the protocol over HTTP. A message is split before protobuf parses it: raw
tensors become views of it, not copies, and the length of all other fields bounds the memory that parsing takes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final, NamedTuple

import numpy as np
from google.protobuf.message import DecodeError

from service.codecs import Codec
from service.codecs.chunks import ENCODE_BYTES, Chunk, Encoded
from service.codecs.decoded import Body, Decoded, RequestedOutputs
from service.codecs.named_tensors import MAX_TENSORS
from service.codecs.oip.http import STRING, STRINGS, assembled, outputs_of, scalars
from service.codecs.oip.messages import MESSAGES
from service.codecs.oip.tensors import (
    BYTES,
    DATATYPES,
    DTYPES,
    MAX_STRINGS,
    Head,
    Input,
    head_of,
    tensors_of,
    text,
)
from service.codecs.shapes import MAX_RANK
from service.errors import InvalidTensors, MemoryLimit

MEDIA_TYPE: Final = "application/grpc"
# Of ModelInferRequest and of ModelInferResponse.
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


class Message(NamedTuple):
    """A ModelInferRequest. head: all fields but the raw tensors; raw: views of these, not copied"""

    head: bytes
    raw: list[memoryview]


def codec(body: bytes, model: str, version: str, check_model: Callable[[str, str], None]) -> Codec:
    """The codec of one ModelInferRequest. model, version: for its answer; check_model: raises NotFound for any other

    Errors: InvalidTensors if the body is no message.
    """
    message = split(body)

    def decode_message(body: Body, limit: int) -> Decoded:
        request = parse("ModelInferRequest", message.head)
        check_model(request.model_name, request.model_version or version)
        return decode(request, message.raw)

    def encode_answer(answer: Mapping[str, Any], request: Decoded) -> Encoded:
        assert request.outputs is not None
        return Encoded([(b"content-type", MEDIA_TYPE.encode())], [encode(answer, request.outputs, model, version)])

    def encode_memory(answer: int, request: Decoded) -> int:
        return encode_bytes(answer, raw=request.outputs is not None and request.outputs.default)

    return Codec(
        media_type=MEDIA_TYPE,
        decode=decode_message,
        encode=encode_answer,
        decode_bound=lambda length, limit: decode_bound(length),
        decode_bytes=lambda body, limit: decode_bytes(message, len(body)),
        decode_inline=INLINE_BODY if len(message.head) <= INLINE_HEAD else INLINE_HEAD,
        encode_bytes=encode_memory,
        encode_inline=LARGE_ANSWER,
    )


def decode_bound(length: int) -> int:
    """Upper bound of the memory for decoding any message of this length, in bytes."""
    return (COPIES + EFFORT) * length


def decode_bytes(message: Message, length: int) -> int:
    """Upper bound of the memory for decoding this message, in bytes."""
    memory = COPIES * length + EFFORT * len(message.head)
    if BYTES.encode() in message.head:
        memory += min(STRINGS * length, STRING * MAX_STRINGS)
    return min(memory, decode_bound(length))


def encode_bytes(answer: int, *, raw: bool) -> int:
    """Memory for encoding arrays of `answer` bytes as one message, the message included. raw: as raw tensors"""
    return ENCODE_BYTES + (RAW_COPIES if raw else TYPED_COPIES) * answer


def split(body: bytes) -> Message:
    """The fields of a message, raw tensors apart from all others. Errors: InvalidTensors."""
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
    return Message(b"".join(head), raw)


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


def decode(request: Any, raw: list[memoryview]) -> Decoded:
    """The fields of a ModelInferRequest beside its raw tensors.

    Errors: InvalidTensors, InvalidRequest, FieldConflict, Overflow.
    """
    inputs = request.inputs
    if raw and len(raw) != len(inputs):
        raise InvalidTensors.at("/raw_input_contents", f"{len(inputs)}, one for each input", str(len(raw)))
    tensors = tensors_of(_inputs(inputs, raw))
    outputs = [{"name": output.name, "parameters": _scalars(output.parameters)} for output in request.outputs]
    plain = {"id": request.id or None, "outputs": outputs, "parameters": _scalars(request.parameters)}
    return assembled(plain, tensors, binary=bool(raw))


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
            yield Input(head, raw[i], f"/raw_input_contents/{i}")


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
        return Input(head, [text(element, pointer) for element in elements], pointer)
    dtype = DTYPES[head.datatype]
    plain = np.dtype(np.int64) if dtype.kind in "iu" else dtype  # whose overflow is found later
    return Input(head, np.fromiter(elements, plain, len(elements)), pointer)


def encode(answer: Mapping[str, Any], requested: RequestedOutputs, model: str, version: str) -> bytes:
    """The ModelInferResponse with the outputs that were requested: all tensors raw, or all in typed fields.

    Errors: MemoryLimit.
    """
    outputs = {name: np.asarray(array, order="C") for name, array in outputs_of(answer, requested).items()}
    size = sum(array.nbytes for array in outputs.values())
    if size > MAX_ANSWER:
        raise MemoryLimit.at("", f"at most {MAX_ANSWER} bytes in an answer, as gRPC has no larger ones", str(size))
    raw = any(requested.is_binary(name) or DATATYPES[array.dtype] not in CONTENTS for name, array in outputs.items())
    response = MESSAGES["ModelInferResponse"](model_name=model, model_version=version, id=requested.id or "")
    for name, scalar in scalars(answer["metadata"]).items():
        setattr(response.parameters[name], PARAMETERS[type(scalar)], scalar)
    for name, array in outputs.items():
        tensor = response.outputs.add(name=name, datatype=DATATYPES[array.dtype], shape=array.shape)
        if not raw:
            _fill(tensor.contents, array)
    parts: list[Chunk] = [response.SerializeToString()]
    if raw:  # these are the last field, and a message may be written in pieces
        for array in outputs.values():
            parts += _field(RAW_OUTPUTS, array)
    return b"".join(parts)


def _fill(contents: Any, array: np.ndarray) -> None:
    """Put an array into the field for its type."""
    field, number = CONTENTS[DATATYPES[array.dtype]]
    if array.dtype.kind == "f":  # on the wire as in memory, so that no number becomes an object
        contents.MergeFromString(b"".join(_field(number, array)))
    else:
        getattr(contents, field).extend(array.reshape(-1).tolist())


def _field(number: int, array: np.ndarray) -> tuple[bytes, memoryview]:
    """A delimited field: its key and its length, and what it holds."""
    opening = [number << 3 | DELIMITED]
    length = array.nbytes
    while length > 0x7F:
        opening.append(length & 0x7F | 0x80)
        length >>= 7
    return bytes([*opening, length]), array.reshape(-1).view(np.uint8).data
