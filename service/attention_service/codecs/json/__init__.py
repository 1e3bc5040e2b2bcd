"""JSON (RFC 8259)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from attention_service.codecs.base import Codec
from attention_service.codecs.chunks import Encoded, encoded, one_chunk
from attention_service.codecs.decoded import Body, Decoded, text_of
from attention_service.codecs.json import memory, reader, writer
from attention_service.codecs.json.parser import HAS_SIMDJSON


class JSONCodec(Codec):
    """Arrays are nested lists, or typed arrays {dtype, shape, data}."""

    media_type = "application/json"
    decode_inline = 2**21 if HAS_SIMDJSON else 2**18

    def decode(self, body: Body, limit: int) -> Decoded:
        """The fields of the JSON object in a body, as `reader.decode` says."""
        return reader.decode(body)

    def _decode_or_stop(self, body: Body, limit: int) -> Decoded:
        """Like `decode`. Errors: also NotQuick, for many lists, keys or long numbers, and for faults."""
        return reader.decode(body, quickly=True)

    def decode_bound(self, length: int, limit: int) -> int:
        """Upper bound of the memory for decoding any body of `length` bytes."""
        return memory.decode_bound(length)

    def decode_bytes(self, body: Body, limit: int) -> int:
        """A closer upper bound, from the counts of its values."""
        return memory.decode_bytes(body)

    def encode(self, answer: Mapping[str, Any], request: Decoded) -> Encoded:
        """The answer with typed arrays if the `encoding` of the request is base64, else with nested lists."""
        base64 = text_of(request.fields.get("encoding")) == "base64"
        if not base64 and writer.is_small(answer):
            return one_chunk(self.media_type, writer.dumps(answer))
        return encoded(self.media_type, writer.chunks(answer, base64=base64))
