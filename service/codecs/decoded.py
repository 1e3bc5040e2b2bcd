"""What a codec makes of a body, and of an answer."""

from __future__ import annotations

from typing import Any, NamedTuple

# Of an encoded answer, which is sent part after part.
Part = bytes | memoryview


class Decoded(NamedTuple):
    """fields: the request, arrays as ndarrays; untyped: top-level fields whose numbers came without a type."""

    fields: dict[str, Any]
    untyped: frozenset[str]
