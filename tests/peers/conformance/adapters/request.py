"""The fields of a request in the axes of most libraries, and the output in those of the request."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any, Final

import numpy as np

from attention_service.codecs.array_objects import as_numpy
from attention_service.conformance.target import Unsupported

# What each adapter deals with: axes, and the heads that are packed in features.
SHAPING: Final = frozenset({"query", "key", "value", "layout", "num_heads", "num_kv_heads"})
# Errors by which libraries refuse a request.
REFUSALS: Final = (TypeError, ValueError, RuntimeError, AssertionError, IndexError, NotImplementedError)

Compute = Callable[["Request"], Any]


class Request:
    """A request. query: (b, h, q, d), key: (b, g, k, d), value: (b, g, k, e); fields: all others, by name"""

    def __init__(self, fields: Mapping[str, Any]) -> None:
        query = fields["query"]
        defaults = {2: "ld", 3: "bld", 4: "bhld"}
        self.layout: str = fields.get("layout") or defaults[query.ndim]
        heads = fields.get("num_heads", 1)
        kv_heads = fields.get("num_kv_heads", heads)
        self.query = self._canonical(query, heads)
        self.key = self._canonical(fields["key"], kv_heads)
        self.value = self._canonical(fields["value"], kv_heads)
        self.fields = {name: value for name, value in fields.items() if name not in SHAPING}

    def __contains__(self, name: str) -> bool:
        return name in self.fields

    def __getitem__(self, name: str) -> Any:
        return self.fields[name]

    @property
    def heads(self) -> int:
        """The number of query heads."""
        return int(self.query.shape[1])

    @property
    def groups(self) -> int:
        """How many query heads read one key/value head."""
        return int(self.query.shape[1] // self.key.shape[1])

    @property
    def lengths(self) -> tuple[int, int]:
        """The numbers of queries and new keys."""
        return int(self.query.shape[2]), int(self.key.shape[2])

    @property
    def scale(self) -> float | None:
        """The scale, None for the default. Errors: Unsupported for one of each head."""
        if np.ndim(self.fields.get("scale", 0)):
            raise Unsupported("one number for the scale only")
        return self.fields.get("scale")

    @property
    def wants_logsumexp(self) -> bool:
        """True if the logsumexp is asked for."""
        return "logsumexp" in self.fields.get("include", ())

    @property
    def offset(self) -> np.ndarray | None:
        """(b,), the position of the first query among the keys; None if the request leaves it open."""
        if "query_offset" not in self.fields:
            return None
        return np.broadcast_to(self["query_offset"], self.query.shape[:1])

    def check_offset(self, *known: int) -> None:
        """Errors: Unsupported for an offset that is none of these, where causal masks or windows need it."""
        needed = {"is_causal", "window", "chunk_size", "alibi_slopes"} & self.fields.keys()
        if needed and self.offset is not None and not any((self.offset == one).all() for one in known):
            raise Unsupported("no argument for query_offset")

    def seen(self) -> np.ndarray | None:
        """`mask` and `key_mask` as booleans that broadcast to (b, h, q, k), True = visible; None for neither."""
        mask = self.fields.get("mask")
        if "key_mask" in self:
            keys = np.atleast_2d(self["key_mask"])[:, None, None, :]
            mask = keys if mask is None else mask & keys
        return mask

    def restored(self, output: Any) -> np.ndarray:
        """An output (b, h, q, e) in the layout of the request."""
        array = np.asarray(as_numpy(output))
        if "h" not in self.layout:
            b, h, length, e = array.shape
            array = array.transpose(0, 2, 1, 3).reshape(b, length, h * e)
        if "b" not in self.layout:
            array = array[0]
        axes = ("b" if "b" in self.layout else "") + ("hld" if "h" in self.layout else "ld")
        return array.transpose([axes.index(letter) for letter in self.layout])

    def restored_rows(self, numbers: Any) -> np.ndarray:
        """Numbers of rows (b, h, q) with the axes that a response has."""
        array = np.asarray(as_numpy(numbers))
        if "h" not in self.layout and self.heads == 1:
            array = array[:, 0]
        return array if "b" in self.layout else array[0]

    def _canonical(self, array: np.ndarray, heads: int) -> np.ndarray:
        axes = ("b" if "b" in self.layout else "") + ("hld" if "h" in self.layout else "ld")
        array = array.transpose([self.layout.index(letter) for letter in axes])
        if "b" not in self.layout:
            array = array[None]
        if "h" not in self.layout:
            b, length, features = array.shape
            array = array.reshape(b, length, heads, features // heads).transpose(0, 2, 1, 3)
        return np.ascontiguousarray(array)


def adapter(*known: str) -> Callable[[Compute], Callable[..., Any]]:
    """A decorator: from a function of a Request to one of the fields of a request, by name.

    known: fields that the library has arguments for; the function raises Unsupported for any other, and where the
    library refuses a request.
    """

    def decorate(compute: Compute) -> Callable[..., Any]:
        @wraps(compute)
        def target(**fields: Any) -> Any:
            for name in sorted(fields.keys() - SHAPING - set(known)):
                raise Unsupported(f"no argument for {name}")
            try:
                return compute(Request(fields))
            except REFUSALS as error:
                raise Unsupported(f"refused: {type(error).__name__}: {error}") from error

        del target.__wrapped__  # so that its signature is its own
        return target

    return decorate
