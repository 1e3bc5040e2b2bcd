"""Which options a plan uses. A fast path accepts a plan only if it knows each of them: `plan.options <= KNOWN`.

Options are the fields of `Plan`, and of what it holds, that differ from their defaults. They are read off the
dataclasses, never listed by hand. So a new field is refused by every fast path, and computed by the general path, until
its name is added to the `KNOWN` of that fast path. A field of `AttentionSpec` that `make_plan` turns into none of
`Plan` would be ignored by every path; tests/test_options.py sets each of them.
"""

from __future__ import annotations

from dataclasses import MISSING, fields, is_dataclass
from functools import cache
from typing import Any, Final

# Values that may be compared with a default by ==.
_PLAIN: Final = (bool, int, float, str, tuple, frozenset)


def options_of(value: object) -> frozenset[str]:
    """The names of `leaves`: of the fields, nested ones too, that differ from their defaults.

    Like `softcap`, `terms.Causal.high`, `selection.include.entropy`.
    """
    return frozenset([name for name, _ in leaves(value)])


def leaves(value: object) -> list[tuple[str, object]]:
    """Pairs of dotted name and value for all fields that differ from their defaults, of a dataclass or named tuple.

    - A dataclass or named tuple in a field is not listed itself, but its fields are: `("selection.top_k", 4)`.
    - A tuple of them gives the fields of each, after the name of its class: `("terms.Causal.high", array)`. So a name
      may come more than once.
    - One whose fields all have their defaults is listed itself if it is an item of a tuple, or in a field with the
      default None. Elsewhere it gives nothing.
    - A frozenset gives one pair for each item, in any order: `("selection.include.entropy", "entropy")`.
    - A field without a default counts as one that differs from it, and so does an array, or another type.
    """
    found: list[tuple[str, object]] = []
    _add_leaves(value, "", found)
    return found


def _add_leaves(value: object, name: str, found: list[tuple[str, object]], *, is_option: bool = False) -> None:
    """Append the names and values of a field and of those nested in it.

    is_option: True if the presence of a dataclass counts even if all of its fields have their defaults
    """
    known = _fields_of(value)
    if known is not None:
        before = len(found)
        for field, default in known:
            item = getattr(value, field)
            if not _is_default(item, default):
                _add_leaves(item, f"{name}.{field}" if name else field, found, is_option=default is None)
        if len(found) == before and is_option:
            found.append((name, value))
    elif isinstance(value, frozenset):
        found += [(f"{name}.{item}", item) for item in value]
    elif isinstance(value, tuple) and value and all(_fields_of(item) is not None for item in value):
        for item in value:
            _add_leaves(item, f"{name}.{type(item).__name__}", found, is_option=True)
    else:
        found.append((name, value))


def _fields_of(value: object) -> tuple[tuple[str, object], ...] | None:
    kind: Any = type(value)  # mypy does not take a type for hashable
    return _fields(kind)


@cache
def _fields(kind: type) -> tuple[tuple[str, object], ...] | None:
    """Names and defaults of the fields of a dataclass or named tuple; None for any other class."""
    if is_dataclass(kind):
        return tuple((field.name, field.default) for field in fields(kind))
    names: tuple[str, ...] | None = getattr(kind, "_fields", None)
    if names is None:
        return None
    defaults: dict[str, object] = getattr(kind, "_field_defaults", {})
    return tuple((name, defaults.get(name, MISSING)) for name in names)


def _is_default(item: object, default: object) -> bool:
    if item is default:
        return True
    return type(item) is type(default) and isinstance(item, _PLAIN) and item == default


def _always() -> frozenset[str]:
    roles = {f"roles.{role}.field" for role in ("query", "key", "value")}
    sizes = ("batch_size", "num_heads", "num_kv_heads", "query_length", "key_length", "head_dim", "value_dim")
    return frozenset({"dtype", "scale", "layout"} | roles | {f"roles.sizes.{name}" for name in sizes})


# Options of every plan: types, shapes, axes, the scale.
ALWAYS: Final = _always()
