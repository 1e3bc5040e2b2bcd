"""Query, key and value as a plan holds them: checked against each other, heads counted, maps resolved."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from service.attention import shapes
from service.attention.arrays import cast
from service.attention.projections import DenseMap, dense, with_bias
from service.attention.spec import AttentionSpec, Layout
from service.errors import FieldConflict, MissingField, ShapeMismatch, shape


@dataclass(frozen=True, slots=True)
class Sizes:
    """The lengths of all axes, under the names that the metadata gives them."""

    batch_size: int
    num_heads: int
    num_kv_heads: int
    query_length: int
    key_length: int
    head_dim: int
    value_dim: int


@dataclass(frozen=True, slots=True)
class Operand:
    """One of query, key and value.

    array: heads (b, h, l, d); or, where `map` is to be applied first, tokens (b, l, in). Of the plan's dtype.
    """

    array: np.ndarray
    map: DenseMap | None


@dataclass(frozen=True, slots=True)
class Operands:
    """All that goes into attention, with the map of what comes out.

    past_key, past_value: (b, g, past, d or e), to stand before the new ones; key_length counts them
    """

    query: Operand
    key: Operand
    value: Operand
    past_key: np.ndarray | None
    past_value: np.ndarray | None
    output_map: DenseMap | None
    sizes: Sizes

    @property
    def past_length(self) -> int:
        """How many keys and values stand before the new ones."""
        return 0 if self.past_key is None else int(self.past_key.shape[2])


@dataclass(frozen=True, slots=True)
class _Role:
    """A role (query, key or value) while it is being resolved: its field, array b, [h,] l, features, and map."""

    name: str
    field: str
    layout: Layout
    array: np.ndarray
    map: DenseMap | None

    @property
    def heads(self) -> int | None:
        """The number of heads that the array or the map shows by itself."""
        if "h" in self.layout:
            return int(self.array.shape[1])
        return self.map.heads if self.map else None

    @property
    def pointer(self) -> str:
        """Where the number of features or heads was decided."""
        return self.map.pointer if self.map else f"/{self.field}"

    def per_head(self, heads: int) -> int:
        """Features of one head. Errors: ShapeMismatch where the heads do not divide them."""
        features = self.map.features if self.map else int(self.array.shape[-1])
        if "h" in self.layout:
            return features
        if features % heads:
            raise ShapeMismatch.at(self.pointer, f"a number of features that {heads} heads divide", f"{features}")
        return features // heads

    def mismatch(self, reason: str, **sizes: int) -> ShapeMismatch:
        """The error for this role where axes should have had the given sizes."""
        if self.map and "d" in sizes:
            fault = ShapeMismatch.at(self.pointer, f"{sizes['d']} features out", str(self.map.features), reason)
        else:
            wanted = shapes.expected(self.layout, sizes)
            fault = ShapeMismatch.of(f"/{self.field}", wanted, shapes.from_canonical(self.array, self.layout), reason)
        return fault


def resolve_operands(
    spec: AttentionSpec, given: Mapping[str, tuple[str, np.ndarray]], layout: Layout, dtype: np.dtype
) -> Operands:
    """Check and orient the sources and maps of a request. Errors: ShapeMismatch, FieldConflict, MissingField."""
    roles = _roles(spec, given, layout, dtype)
    query, key, value = roles["query"], roles["key"], roles["value"]
    b, k = query.array.shape[0], key.array.shape[-2]
    for role in (key, value):
        if role.array.shape[0] != b:
            raise role.mismatch(f"a batch of {b}, as {query.field} has", b=b)
    if value.array.shape[-2] != k:
        raise value.mismatch(f"{k} tokens, as {key.field} has", l=k)
    h, g = _heads(spec, query, key, value)
    d = query.per_head(h)
    if key.per_head(g) != d:
        per_head = d if "h" in layout else d * g
        raise key.mismatch(f"head_dim {d}, as the query has", d=per_head)
    e = value.per_head(g)
    past_key, past_value = _past(spec, layout, dtype, (b, g, d, e))
    past = 0 if past_key is None else past_key.shape[2]
    sizes = Sizes(b, h, g, query.array.shape[-2], past + k, d, e)
    output = spec.projection and spec.projection.output
    return Operands(
        query=_operand(query, h, dtype),
        key=_operand(key, g, dtype),
        value=_operand(value, g, dtype),
        past_key=past_key,
        past_value=past_value,
        output_map=with_bias(dense(output, "output", h * e, dtype), None, dtype) if output else None,
        sizes=sizes,
    )


def _past(
    spec: AttentionSpec, layout: Layout, dtype: np.dtype, sizes: tuple[int, int, int, int]
) -> tuple[np.ndarray | None, np.ndarray | None]:
    """The cached keys and values as (b, g, past, d) and (b, g, past, e). Errors: MissingField, ShapeMismatch."""
    if spec.past_key is None and spec.past_value is None:
        return None, None
    if spec.past_key is None or spec.past_value is None:
        missing = "past_key" if spec.past_key is None else "past_value"
        raise MissingField.at(f"/{missing}", "both past_key and past_value", "one of them")
    b, g, d, e = sizes
    leading = ((b,) if "b" in layout else ()) + (g,)
    cached = []
    length: int | str = "·"
    for name, features in (("past_key", d), ("past_value", e)):
        array: np.ndarray = getattr(spec, name)
        if array.size == 0 and array.shape == (*leading, 0):
            array = array.reshape(*leading, 0, features)  # nested lists cannot say how wide nothing is
        wanted = (*leading, length, features)
        if array.ndim != len(wanted) or any(w not in ("·", have) for w, have in zip(wanted, array.shape, strict=True)):
            raise ShapeMismatch.of(f"/{name}", shape(wanted), array)
        length = array.shape[-2]
        typed = cast(array, dtype, f"/{name}", non_finite=spec.allow_non_finite)
        cached.append(typed if "b" in layout else typed[None])
    return cached[0], cached[1]


def _roles(
    spec: AttentionSpec, given: Mapping[str, tuple[str, np.ndarray]], layout: Layout, dtype: np.dtype
) -> dict[str, _Role]:
    projection = spec.projection
    if projection is not None and "h" in layout:
        raise FieldConflict.at("/projection", "a layout whose heads are packed in d", f"layout {layout}")
    arrays: dict[str, np.ndarray] = {}
    for field, array in given.values():
        if field not in arrays:  # the same input may play several roles
            typed = cast(array, dtype, f"/{field}", non_finite=spec.allow_non_finite)
            arrays[field] = typed[None, None] if array.ndim == 1 else shapes.to_canonical(typed, layout)
    roles = {}
    for name, (field, _) in given.items():
        linear = getattr(projection, name) if projection else None
        found = dense(linear, name, arrays[field].shape[-1], dtype) if linear else None
        roles[name] = _Role(name, field, layout, arrays[field], found)
    return roles


def _heads(spec: AttentionSpec, query: _Role, key: _Role, value: _Role) -> tuple[int, int]:
    """num_heads and num_kv_heads: as asked, as the arrays and maps show, else 1 and num_heads. All must agree."""
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


def _agree(field: str, asked: int | None, role: _Role) -> int | None:
    shown = role.heads
    if asked is not None and shown is not None and asked != shown:
        raise ShapeMismatch.at(f"/{field}", f"{shown}, as {role.pointer} shows", str(asked))
    return asked or shown


def _operand(role: _Role, heads: int, dtype: np.dtype) -> Operand:
    if role.map:
        return Operand(role.array, with_bias(role.map, heads, dtype))
    return Operand(role.array if "h" in role.layout else shapes.split_heads(role.array, heads), None)
