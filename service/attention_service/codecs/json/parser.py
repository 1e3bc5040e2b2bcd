"""The parser of JSON: simdjson, or where it is not installed, Python's own."""

from __future__ import annotations

from typing import Any, Final

from attention_service.codecs.json import standard_library

simdjson: Any
try:
    import simdjson
except ModuleNotFoundError:  # on Python 3.14, as pyproject.toml says
    simdjson = standard_library

HAS_SIMDJSON: Final = simdjson is not standard_library
