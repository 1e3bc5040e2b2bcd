"""JSON (RFC 8259)."""

from __future__ import annotations

from service.codecs.json.limits import MAX_DEPTH, MAX_KEYS, MAX_LENGTH, MAX_LISTS, has_too_many_lists
from service.codecs.json.memory import decode_bound, decode_bytes
from service.codecs.json.reader import decode, decode_quickly
from service.codecs.json.writer import AT_ONCE, MEDIA_TYPE, chunks, encode, flat, longest, unclosed

__all__ = [
    "AT_ONCE",
    "MAX_DEPTH",
    "MAX_KEYS",
    "MAX_LENGTH",
    "MAX_LISTS",
    "MEDIA_TYPE",
    "chunks",
    "decode",
    "decode_bound",
    "decode_bytes",
    "decode_quickly",
    "encode",
    "flat",
    "has_too_many_lists",
    "longest",
    "unclosed",
]
