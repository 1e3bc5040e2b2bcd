"""Roles: which field query, key and value come from, with shapes checked, heads counted and maps resolved.

Only shapes are read here, never numbers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from service.attention import shapes
from service.attention.projections import DenseMap, dense, with_bias
from service.attention.shapes import View
from service.attention.spec import AttentionSpec, Layout, Projection
from service.errors import FieldConflict, MissingField, ShapeMismatch, shape


@dataclass(frozen=True, slots=True)
class Sizes:
    """The lengths of all axes, named as in the metadata."""

    batch_size: int
    num_heads: int
    num_kv_heads: int
    query_length: int
    key_length: int
    head_dim: int
    value_dim: int


@dataclass(frozen=True, slots=True)
class Role:
    """The source of query, key or value: a field of the request, and a map that is applied to it.

    view: from the field to heads (b, h, l, d), or to tokens (b, l, in) if there is a map
    """

    field: str
    view: View
    map: DenseMap | None = None


@dataclass(frozen=True, slots=True)
class Roles:
    """The sources of query, key and value, and the map of the output.

    past_length: keys and values of the cache, which stand before the new ones; key_length counts them
    """

    query: Role
    key: Role
    value: Role
    sizes: Sizes
    output_map: DenseMap | None = None
    past_length: int = 0


@dataclass(frozen=True, slots=True)
class _Given:
    """A role while it is being resolved: its field, array as given, and map."""

    field: str
    layout: Layout
    array: np.ndarray
    map: DenseMap | None

    def size(self, axis: str) -> int:
        """The length of an axis; 1 if the array does not have it."""
        if self.array.ndim == 1:
            return len(self.array) if axis == "d" else 1
        return int(self.array.shape[self.layout.index(axis)]) if axis in self.layout else 1

    @property
    def heads(self) -> int | None:
        """The number of heads of the array or the map; None if neither shows it."""
        if "h" in self.layout:
            return self.size("h")
        return self.map.heads if self.map else None

    @property
    def pointer(self) -> str:
        """The place in the request that decides the number of features or heads."""
        return self.map.pointer if self.map else f"/{self.field}"

    def per_head(self, heads: int) -> int:
        """Features of one head. Errors: ShapeMismatch if the heads do not divide them."""
        features = self.map.features if self.map else self.size("d")
        if "h" in self.layout:
            return features
        if features % heads:
            raise ShapeMismatch.at(self.pointer, f"a number of features that {heads} heads divide", f"{features}")
        return features // heads

    def mismatch(self, reason: str, **sizes: int) -> ShapeMismatch:
        """The error for this role if axes should have had the given sizes."""
        if self.map and "d" in sizes:
            return ShapeMismatch.at(self.pointer, f"{sizes['d']} features out", str(self.map.features), reason)
        return ShapeMismatch.of(f"/{self.field}", shapes.expected(self.layout, sizes), self.array, reason)


def resolve_roles(
    spec: AttentionSpec, given: Mapping[str, tuple[str, np.ndarray]], layout: Layout, dtype: np.dtype
) -> Roles:
    """The roles of a request. Errors: ShapeMismatch, FieldConflict, MissingField."""
    projection = spec.projection
    if projection is not None and "h" in layout:
        raise FieldConflict.at("/projection", "a layout whose heads are packed in d", f"layout {layout}")
    found = {name: _given(name, *source, layout, projection, dtype) for name, source in given.items()}
    query, key, value = found["query"], found["key"], found["value"]
    b, k = query.size("b"), key.size("l")
    for role in (key, value):
        if role.size("b") != b:
            raise role.mismatch(f"a batch of {b}, as {query.field} has", b=b)
    if value.size("l") != k:
        raise value.mismatch(f"{k} tokens, as {key.field} has", l=k)
    h, g = _heads(spec, query, key, value)
    d = query.per_head(h)
    if key.per_head(g) != d:
        per_head = d if "h" in layout else d * g
        raise key.mismatch(f"head_dim {d}, as the query has", d=per_head)
    e = value.per_head(g)
    past = _past_length(spec, layout, (b, g, d, e))
    output = projection and projection.output
    return Roles(
        query=_role(query, h, dtype),
        key=_role(key, g, dtype),
        value=_role(value, g, dtype),
        output_map=with_bias(dense(output, "output", h * e, dtype), None, dtype) if output else None,
        past_length=past,
        sizes=Sizes(b, h, g, query.size("l"), past + k, d, e),
    )


def past_shape(roles: Roles, layout: Layout, features: int) -> tuple[int, ...]:
    """The shape that past_key and past_value come in: [b,] h, l, d."""
    leading = (roles.sizes.batch_size,) if "b" in layout else ()
    return (*leading, roles.sizes.num_kv_heads, roles.past_length, features)


def _given(
    name: str, field: str, array: np.ndarray, layout: Layout, projection: Projection | None, dtype: np.dtype
) -> _Given:
    """A role with its map checked against the features that go in."""
    plain = _Given(field, layout, array, None)
    linear = getattr(projection, name) if projection else None
    return _Given(field, layout, array, dense(linear, name, plain.size("d"), dtype)) if linear else plain


def _role(role: _Given, heads: int, dtype: np.dtype) -> Role:
    lengths = {"b": role.size("b"), "h": heads, "l": role.size("l")}
    if role.map is not None:
        view = shapes.to_canonical(role.layout, "bld", lengths | {"d": role.size("d")})
        return Role(role.field, view, with_bias(role.map, heads, dtype))
    view = shapes.to_canonical(role.layout, "bhld", lengths | {"d": role.per_head(heads)})
    return Role(role.field, view)


def _past_length(spec: AttentionSpec, layout: Layout, sizes: tuple[int, int, int, int]) -> int:
    """The length of the cache, checked against (b, g, d, e). Errors: MissingField, ShapeMismatch."""
    if spec.past_key is None and spec.past_value is None:
        return 0
    if spec.past_key is None or spec.past_value is None:
        missing = "past_key" if spec.past_key is None else "past_value"
        raise MissingField.at(f"/{missing}", "both past_key and past_value", "one of them")
    b, g, d, e = sizes
    leading = ((b,) if "b" in layout else ()) + (g,)
    length: int | str = "·"
    for name, features in (("past_key", d), ("past_value", e)):
        array: np.ndarray = getattr(spec, name)
        # Nested lists cannot say how wide nothing is.
        have = (*leading, 0, features) if array.size == 0 and array.shape == (*leading, 0) else array.shape
        wanted = (*leading, length, features)
        if len(have) != len(wanted) or any(w not in ("·", x) for w, x in zip(wanted, have, strict=True)):
            raise ShapeMismatch.of(f"/{name}", shape(wanted), array)
        length = have[-2]
    return int(length)


def _heads(spec: AttentionSpec, query: _Given, key: _Given, value: _Given) -> tuple[int, int]:
    """num_heads and num_kv_heads: as asked for, else of the arrays and maps, else 1 and num_heads. All must agree."""
    h = _agree("num_heads", spec.num_heads, query) or 1
    g = _agree("num_kv_heads", spec.num_kv_heads, key)
    g_value = _agree("num_kv_heads", spec.num_kv_heads, value)
    if g and g_value and g != g_value:
        raise ShapeMismatch.at(value.pointer, f"{g} heads, as {key.pointer} has", str(g_value))
    g = g or g_value or h
    if h % g:
        pointer = "/num_kv_heads" if spec.num_kv_heads else key.pointer
        raise ShapeMismatch.at(pointer, f"a number of key/value heads that divides num_heads = {h}", str(g))
    return h, g


def _agree(field: str, asked: int | None, role: _Given) -> int | None:
    shown = role.heads
    if asked is not None and shown is not None and asked != shown:
        raise ShapeMismatch.at(f"/{field}", f"{shown}, as {role.pointer} shows", str(asked))
    return asked or shown
