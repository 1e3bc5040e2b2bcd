"""What a codec makes of a body, and of an answer."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

# Of a request, as it was read: only what all of these can do may be done with it, which is little beside slices.
Body = bytes | bytearray | memoryview
# Of an encoded answer, which is sent part after part.
Part = bytes | memoryview


class Decoded(NamedTuple):
    """fields: the request, arrays as ndarrays; untyped: top-level fields whose numbers came without a type."""

    fields: dict[str, Any]
    untyped: frozenset[str]

    @property
    def nbytes(self) -> int:
        """Of all arrays together."""
        return _nbytes(self.fields)


def _nbytes(value: Any) -> int:
    if isinstance(value, dict):
        return sum(map(_nbytes, value.values()))
    return value.nbytes if isinstance(value, np.ndarray) else 0
