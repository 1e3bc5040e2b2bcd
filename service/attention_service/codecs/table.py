"""The table of wire formats."""

from __future__ import annotations

from typing import Final

from attention_service.codecs.base import Codec
from attention_service.codecs.json import JSONCodec
from attention_service.codecs.npz import NPZCodec
from attention_service.codecs.safetensors import SafetensorsCodec

_CODECS: Final[tuple[Codec, ...]] = JSONCodec(), NPZCodec(), SafetensorsCodec()
CODECS: Final = {codec.media_type: codec for codec in _CODECS}
