"""What a codec makes of a body."""

from __future__ import annotations

from typing import Any, NamedTuple


class Decoded(NamedTuple):
    """fields: the request, arrays as ndarrays; untyped: top-level fields whose numbers came without a type."""

    fields: dict[str, Any]
    untyped: frozenset[str]
