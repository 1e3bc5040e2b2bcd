"""Roles: which field query, key and value come from, with shapes checked, heads counted and maps resolved.

Only shapes are read here, never numbers.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from attention_service.attention.projections import DenseMap, dense, with_bias
from attention_service.attention.shape_hints import shape_hint
from attention_service.attention.shapes import Sizes
from attention_service.attention.spec import ROLES, SOURCES, Activation, AttentionSpec, Given, Layout
from attention_service.errors import Fault, FieldConflict, InvalidArray, MissingField, ShapeMismatch, shape

DEFAULT_LAYOUTS: Final[dict[int, Layout]] = {2: "ld", 3: "bld", 4: "bhld"}
ALLOWED_SOURCES: Final = "query, key and value; or input alone; or input and context"


@dataclass(frozen=True, slots=True)
class Role:
    """The source of query, key or value: a field of the request, and a map that is applied to it."""

    field: str
    map: DenseMap | None = None


@dataclass(frozen=True, slots=True)
class Roles:
    """The sources of query, key and value, and the map of the output.

    gate_map, gate_activation: from the source of the query to gates (b, q, h·e or h)
    past_length: keys and values of the cache, which stand before the new ones; key_length counts them
    """

    query: Role
    key: Role
    value: Role
    sizes: Sizes
    output_map: DenseMap | None = None
    gate_map: DenseMap | None = None
    gate_activation: Activation = "sigmoid"
    past_length: int = 0

    @property
    def inputs(self) -> tuple[Role, Role, Role]:
        """Query, key and value."""
        return self.query, self.key, self.value


def sources(spec: AttentionSpec) -> Given:
    """The field and array that query, key and value each come from.

    Errors: MissingField for none or half a source, FieldConflict for two.
    """
    given = [name for name in SOURCES if getattr(spec, name) is not None]
    if not given:
        raise MissingField(Fault("", ALLOWED_SOURCES, "none of them"))
    if spec.input is not None:
        extra = [name for name in given if name in ROLES]
        if extra:
            raise FieldConflict(*(Fault(f"/{name}", "no other source beside input", name) for name in extra))
        other = "input" if spec.context is None else "context"
        chosen = {"query": "input", "key": other, "value": other}
    elif spec.context is not None:
        raise MissingField(Fault("/input", "input beside context", ", ".join(given), "queries come from input"))
    else:
        missing = [name for name in ROLES if name not in given]
        if missing:
            raise MissingField(*(Fault(f"/{name}", ALLOWED_SOURCES, f"only {', '.join(given)}") for name in missing))
        chosen = {name: name for name in given}
    return {role: (field, getattr(spec, field)) for role, field in chosen.items()}


def resolve_layout(asked: Layout | None, given: Given) -> Layout:
    """The layout of a request: the one asked for, else that of the highest rank. Every array must have its rank.

    A query of rank 1 is one token of `ld` or `dl`. Errors: ShapeMismatch, InvalidArray for an axis of length 0.
    """
    field, array = max(given.values(), key=lambda source: source[1].ndim)
    if asked is None and array.ndim not in DEFAULT_LAYOUTS:
        raise ShapeMismatch.of(f"/{field}", "2 to 4 axes (or 1 for a single query)", array)
    layout = asked or DEFAULT_LAYOUTS[array.ndim]
    single_allowed = len(layout) == 2 and given["query"][0] != given["key"][0]
    for role, (field, array) in given.items():
        if array.ndim != len(layout) and not (array.ndim == 1 and role == "query" and single_allowed):
            raise ShapeMismatch.of(f"/{field}", f"{len(layout)} axes, as layout {layout} has", array)
        if 0 in array.shape:
            raise InvalidArray.of(f"/{field}", "at least one element on every axis", array)
    return layout


@dataclass(frozen=True, slots=True)
class _Source:
    """A role while it is being resolved: its field, array as given, and map."""

    field: str
    layout: Layout
    array: np.ndarray
    map: DenseMap | None = None

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

    def per_head(self, heads: int, name: str) -> int:
        """Features of one head. name: of the number of heads. Errors: ShapeMismatch if the heads do not divide them."""
        features = self.map.features if self.map else self.size("d")
        if "h" in self.layout:
            return features
        if features % heads:
            raise ShapeMismatch.at(self.pointer, f"a multiple of {name} = {heads}", f"{features} features")
        return features // heads

    def mismatch(self, reason: str, **sizes: int) -> ShapeMismatch:
        """The error for this role if axes should have had the given sizes."""
        if self.map and "d" in sizes:
            return ShapeMismatch.at(self.pointer, f"{sizes['d']} features out", str(self.map.features), reason)
        wanted = shape(tuple(sizes.get(letter, "·") for letter in self.layout))
        return ShapeMismatch.of(f"/{self.field}", wanted, self.array, reason)

    def resolved(self, heads: int, dtype: np.dtype) -> Role:
        """The role, for this number of heads. Errors: those of the map's bias."""
        return Role(self.field, with_bias(self.map, heads, dtype) if self.map else None)


def resolve_roles(spec: AttentionSpec, given: Given, layout: Layout, dtype: np.dtype) -> Roles:
    """The roles of a request. Errors: ShapeMismatch, with a hint to another layout; FieldConflict, MissingField."""
    if spec.projection is not None and "h" in layout:
        raise FieldConflict.at("/projection", "a layout whose heads are packed in d", f"layout {layout}")
    try:
        return _resolved(spec, given, layout, dtype)
    except ShapeMismatch as error:
        hint = "" if spec.projection else shape_hint(given, layout, spec.num_heads, spec.num_kv_heads)
        if not hint:
            raise
        faults = [replace(fault, hint=f"{fault.hint}; {hint}" if fault.hint else hint) for fault in error.faults]
    raise ShapeMismatch(*faults)


def _resolved(spec: AttentionSpec, given: Given, layout: Layout, dtype: np.dtype) -> Roles:
    """The roles of a request whose layout may have a projection."""
    query, key, value = (_source(spec, name, *given[name], layout, dtype) for name in ROLES)
    b, k = query.size("b"), key.size("l")
    for role in (key, value):
        if role.size("b") != b:
            raise role.mismatch(f"a batch of {b}, as {query.field} has", b=b)
    if value.size("l") != k:
        raise value.mismatch(f"{k} tokens, as {key.field} has", l=k)
    h, g = _heads(spec, query, key, value)
    d = query.per_head(h, "num_heads")
    if key.per_head(g, "num_kv_heads") != d:
        per_head = d if "h" in layout else d * g
        raise key.mismatch(f"head_dim {d}, as the query has", d=per_head)
    e = value.per_head(g, "num_kv_heads")
    past = _past_length(spec, layout, (b, g, d, e))
    output = spec.projection and spec.projection.output
    gate = spec.projection and spec.projection.gate
    return Roles(
        query=query.resolved(h, dtype),
        key=key.resolved(g, dtype),
        value=value.resolved(g, dtype),
        output_map=with_bias(dense(output, "output", h * e, dtype), None, dtype) if output else None,
        gate_map=_gate_map(spec, query, h, e, dtype),
        gate_activation=gate.activation if gate else "sigmoid",
        past_length=past,
        sizes=Sizes(h, g, b, query.size("l"), past + k, d, e),
    )


def _gate_map(spec: AttentionSpec, query: _Source, heads: int, value_dim: int, dtype: np.dtype) -> DenseMap | None:
    """The map of the gates. Errors: FieldConflict, MissingField, ShapeMismatch."""
    gate = spec.projection.gate if spec.projection else None
    if gate is None:
        return None
    if spec.gate is not None:
        raise FieldConflict.at("/gate", "gate or projection.gate", "both")
    found = dense(gate, "gate", query.size("d"), dtype)
    if found.features not in (heads * value_dim, heads):
        expected = f"{heads * value_dim} features out, or {heads}, one a head"
        raise ShapeMismatch.at(found.pointer, expected, str(found.features))
    if found.heads not in (None, heads):
        raise ShapeMismatch.at(found.pointer, f"{heads} heads, as the query has", str(found.heads))
    return with_bias(found, heads, dtype)


def _source(spec: AttentionSpec, name: str, field: str, array: np.ndarray, layout: Layout, dtype: np.dtype) -> _Source:
    """A role with its map checked against the features that go in."""
    source = _Source(field, layout, array)
    linear = getattr(spec.projection, name) if spec.projection else None
    return _Source(field, layout, array, dense(linear, name, source.size("d"), dtype)) if linear else source


def _past_length(spec: AttentionSpec, layout: Layout, sizes: tuple[int, int, int, int]) -> int:
    """The length of the cache, checked against (b, g, d, e). Errors: MissingField, ShapeMismatch."""
    if spec.past_key is None and spec.past_value is None:
        return 0
    if spec.past_key is None or spec.past_value is None:
        missing = "past_key" if spec.past_key is None else "past_value"
        raise MissingField.at(f"/{missing}", "both past_key and past_value", "one of them")
    b, g, d, e = sizes
    leading = ((b,) if "b" in layout else ()) + (g,)
    axes = "bhld" if "b" in layout else "hld"
    length: int | str = "·"
    for name, array, features in (("past_key", spec.past_key, d), ("past_value", spec.past_value, e)):
        # Nested lists cannot say how wide nothing is.
        have = (*leading, 0, features) if array.shape == (*leading, 0) else array.shape
        wanted = (*leading, length, features)
        if len(have) != len(wanted) or any(w not in ("·", x) for w, x in zip(wanted, have, strict=True)):
            raise ShapeMismatch.of(f"/{name}", shape(wanted), array, f"axes {', '.join(axes)} in every layout")
        length = have[-2]
    return int(length)


def _heads(spec: AttentionSpec, query: _Source, key: _Source, value: _Source) -> tuple[int, int]:
    """num_heads and num_kv_heads: as asked for, else of the arrays and maps, else 1 and num_heads. All must agree."""
    h = _agree("num_heads", spec.num_heads, query) or 1
    g = _agree("num_kv_heads", spec.num_kv_heads, key)
    g_value = _agree("num_kv_heads", spec.num_kv_heads, value)
    if g and g_value and g != g_value:
        raise ShapeMismatch.at(value.pointer, f"{g} heads, as {key.pointer} has", str(g_value))
    g = g or g_value or h
    if h % g:
        pointer = "/num_kv_heads" if spec.num_kv_heads else key.pointer
        raise ShapeMismatch.at(pointer, f"a divisor of num_heads = {h}", str(g))
    return h, g


def _agree(field: str, asked: int | None, role: _Source) -> int | None:
    shown = role.heads
    if asked is not None and shown is not None and asked != shown:
        raise ShapeMismatch.at(f"/{field}", f"{shown}, as {role.pointer} shows", str(asked))
    return asked or shown
