"""What every wire format can do."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from attention_service.codecs.chunks import ENCODE_BYTES, Encoded
from attention_service.codecs.decoded import Body, Decoded, NotQuick


class Codec(ABC):
    """One wire format, as the pipeline uses it.

    media_type: of the bodies that it decodes
    decode_inline: bytes of a body that may be decoded in the event loop, as it takes a few milliseconds
    may_be_compressed: True if a body may unpack to more bytes than it has
    encode_inline: bytes of an answer that is encoded in the event loop; unlimited if chunks are made one by one
    """

    media_type: str
    decode_inline: float
    may_be_compressed = False
    encode_inline = math.inf

    @abstractmethod
    def decode(self, body: Body, limit: int) -> Decoded:
        """The fields of a body that unpacks to at most `limit` bytes: arrays as ndarrays, all else plain.

        Errors: BadRequest, InvalidRequest, TooLarge.
        """

    def decode_quickly(self, body: Body, limit: int) -> Decoded | None:
        """Like `decode`, if that takes a few milliseconds; None if it might take longer."""
        with suppress(NotQuick):
            if len(body) <= self.decode_inline:
                return self._decode_or_stop(body, limit)
        return None

    def _decode_or_stop(self, body: Body, limit: int) -> Decoded:
        """Like `decode`. Errors: also NotQuick, in formats whose length does not tell how long decoding takes."""
        return self.decode(body, limit)

    @abstractmethod
    def encode(self, answer: Mapping[str, Any], request: Decoded) -> Encoded:
        """The headers and chunks of an answer to a request. Errors: NotAcceptable, MemoryLimit."""

    @abstractmethod
    def decode_bound(self, length: int, limit: int) -> int:
        """Upper bound of the memory for decoding any body of `length` bytes that unpacks to at most `limit`."""

    @abstractmethod
    def decode_bytes(self, body: Body, limit: int) -> int:
        """A closer upper bound of the memory for decoding this body."""

    def encode_bytes(self, answer: int, request: Decoded) -> int:
        """Upper bound of the memory for encoding an answer of `answer` bytes, beside the answer."""
        return ENCODE_BYTES
