"""Wire formats: bytes in, values out, and back. One table, looked up exactly; no codec sees a request or does I/O."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from service.codecs import json, npz, safetensors
from service.codecs.chunks import ENCODE_BYTES, Encoded
from service.codecs.decoded import Body, Decoded


def _decode_nothing_quickly(body: Body) -> Decoded | None:
    return None


def _encode_bytes(answer: int, request: Decoded) -> int:
    return ENCODE_BYTES


@dataclass(frozen=True, slots=True)
class Codec:
    """One wire format, as the pipeline uses it.

    media_type: of the bodies that it decodes
    decode: returns the fields of a body that unpacks to at most so many bytes: arrays of numbers or booleans as
            ndarrays, all else plain. Errors: BadRequest, InvalidRequest, TooLarge
    encode: returns the headers and chunks of an answer to a request. Errors: NotAcceptable, MemoryLimit
    decode_bound: upper bound of the memory for decoding, from the length of a body and the limit that it may unpack to
    decode_bytes: a closer upper bound, from the complete body
    decode_inline: bytes of a body that is decoded in well below a millisecond, and whose faults are found in a few
    decode_quickly: decodes a longer body if that takes no longer than handing it to a thread; else returns None
    may_be_compressed: True if a body may unpack to more bytes than it has
    encode_bytes: memory for encoding an answer of so many bytes, beside the answer
    encode_inline: bytes of an answer that is encoded in the event loop; unlimited if chunks are made one by one
    """

    media_type: str
    decode: Callable[[Body, int], Decoded]
    encode: Callable[[Mapping[str, Any], Decoded], Encoded]
    decode_bound: Callable[[int, int], int]
    decode_bytes: Callable[[Body, int], int]
    decode_inline: int
    decode_quickly: Callable[[Body], Decoded | None] = _decode_nothing_quickly
    may_be_compressed: bool = False
    encode_bytes: Callable[[int, Decoded], int] = _encode_bytes
    encode_inline: float = math.inf


_TABLE = (
    Codec(
        json.MEDIA_TYPE,
        json.decode,
        json.encode,
        json.decode_bound,
        json.decode_bytes,
        decode_inline=2**16,
        decode_quickly=json.decode_quickly,
    ),
    Codec(
        npz.MEDIA_TYPE,
        npz.decode,
        npz.encode,
        npz.decode_bound,
        npz.decode_bytes,
        decode_inline=2**14,
        may_be_compressed=True,
    ),
    Codec(
        safetensors.MEDIA_TYPE,
        safetensors.decode,
        safetensors.encode,
        safetensors.decode_bound,
        safetensors.decode_bytes,
        decode_inline=2**22,
    ),
)
CODECS: Final[dict[str, Codec]] = {codec.media_type: codec for codec in _TABLE}
