"""Wire formats: bytes in, values out, and back. One table, looked up exactly; no codec sees a request or does I/O."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Protocol

from service.codecs import json, npz, safetensors
from service.codecs.decoded import Body, Decoded, Part


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

    def __call__(self, answer: Mapping[str, Any], *, base64: bool = False) -> Iterable[Part]:
        """An answer, in parts to be sent one after the other, made when they are asked for.

        base64: whether a text format holds arrays so
        """
        ...


def never(body: Body) -> Decoded | None:
    """Nothing is quick."""
    return None


@dataclass(frozen=True, slots=True)
class Codec:
    """One media type.

    growth: how many times the memory of a body its arrays need at most
    effort: how many times the memory of a body is used while it is read, at most
    inline: bytes of a body that is read in well below a millisecond, and whose faults are found in a few
    quick: reads a longer one at once, if that takes as long as a thread would keep others waiting; else gives None
    packed: whether a body is unpacked, no further than a limit
    """

    decode: Decode
    encode: Encode
    growth: int
    effort: int
    inline: int
    packed: bool = False
    quick: Callable[[Body], Decoded | None] = never

    def memory(self, length: int, limit: int) -> int:
        """Bytes for a body of this length and its arrays, which are unpacked up to a limit."""
        unpacked = self.growth * length
        return length + (min(limit, unpacked) if self.packed else unpacked)


# Two bytes, `1,`, make a number of eight.
JSON_GROWTH: Final = 4

CODECS: Final[dict[str, Codec]] = {
    # The parser needs two words for each number.
    "application/json": Codec(
        json.decode, json.encode, growth=JSON_GROWTH, effort=16, inline=2**16, quick=json.decode_quickly
    ),
    # Deflate packs at most 1032 bytes into one.
    "application/x-npz": Codec(npz.decode, npz.encode, growth=1032, effort=1, inline=2**14, packed=True),
    "application/vnd.safetensors": Codec(safetensors.decode, safetensors.encode, growth=1, effort=1, inline=2**22),
}
