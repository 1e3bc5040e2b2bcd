"""Wire formats: bytes in, values out, and back. One table, looked up exactly; no codec sees a request or does I/O."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Protocol

from service.codecs import json, npz, safetensors
from service.codecs.decoded import Decoded, Part


class Decode(Protocol):
    """From bytes to values."""

    def __call__(self, body: bytes, limit: int) -> Decoded:
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


@dataclass(frozen=True, slots=True)
class Codec:
    """One media type."""

    decode: Decode
    encode: Encode


CODECS: Final[dict[str, Codec]] = {
    "application/json": Codec(json.decode, json.encode),
    "application/x-npz": Codec(npz.decode, npz.encode),
    "application/vnd.safetensors": Codec(safetensors.decode, safetensors.encode),
}
