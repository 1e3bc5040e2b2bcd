"""Wire formats: bytes in, values out, and back. One table, looked up exactly; no codec sees a request or does I/O."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Protocol

from service.codecs import json, npz, safetensors
from service.codecs.chunks import Encoded
from service.codecs.decoded import Body, Decoded


class Decode(Protocol):
    """From bytes to values."""

    def __call__(self, body: Body, limit: int) -> Decoded:
        """The fields of a request, arrays of numbers or booleans as ndarrays, all else plain.

        limit: to how many bytes it may unpack
        Errors: BadRequest, InvalidRequest, TooLarge.
        """
        ...


class Encode(Protocol):
    """From values to bytes."""

    def __call__(self, answer: Mapping[str, Any], *, base64: bool = False) -> Encoded:
        """An answer, in chunks that are made when they are asked for.

        base64: whether a text format holds arrays so
        """
        ...


def never(body: Body) -> Decoded | None:
    """Nothing is quick."""
    return None


@dataclass(frozen=True, slots=True)
class Codec:
    """One media type.

    decode_bound: upper bound of the memory for decoding, from the length of a body and the limit that it may unpack to
    decode_bytes: a closer upper bound, from the complete body
    inline: bytes of a body that is read in well below a millisecond, and whose faults are found in a few
    quick: reads a longer one at once, if that takes as long as a thread would keep others waiting; else gives None
    packed: whether a body is unpacked, no further than a limit
    """

    decode: Decode
    encode: Encode
    decode_bound: Callable[[int, int], int]
    decode_bytes: Callable[[Body, int], int]
    inline: int
    packed: bool = False
    quick: Callable[[Body], Decoded | None] = never


CODECS: Final[dict[str, Codec]] = {
    "application/json": Codec(
        json.decode,
        json.encode,
        json.decode_bound,
        json.decode_bytes,
        inline=2**16,
        quick=json.decode_quickly,
    ),
    "application/x-npz": Codec(
        npz.decode,
        npz.encode,
        npz.decode_bound,
        npz.decode_bytes,
        inline=2**14,
        packed=True,
    ),
    "application/vnd.safetensors": Codec(
        safetensors.decode,
        safetensors.encode,
        safetensors.decode_bound,
        safetensors.decode_bytes,
        inline=2**22,
    ),
}
