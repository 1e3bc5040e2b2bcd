"""Hints of shape errors: which other layout, or number of key/value heads, would fit the shapes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final, get_args

from attention_service.attention.spec import ROLES, Given, Layout

LAYOUTS: Final[tuple[str, ...]] = get_args(Layout)
# The arrays that may have another layout than the rest, the most likely first.
SWAPPED: Final = (("key", "value"), ("key",), ("value",), ("query",))

Layouts = Mapping[str, str]
# num_heads and num_kv_heads, as in the request.
Heads = tuple[int | None, int | None]


def shape_hint(given: Given, layout: Layout, num_heads: int | None, num_kv_heads: int | None) -> str:
    """What would make query, key and value fit each other; empty if nothing does, or if they do.

    num_heads, num_kv_heads: as in the request
    """
    if any(array.ndim != len(layout) for _, array in given.values()):
        return ""
    same = dict.fromkeys(ROLES, layout)
    if _fitting_heads(same, given, (num_heads, num_kv_heads)):
        return ""
    if num_heads is not None and num_kv_heads is None and "h" not in layout:
        query, key = (given[role][1].shape[layout.index("d")] for role in ("query", "key"))
        g = key * num_heads // query
        if 0 < g < num_heads and _fitting_heads(same, given, (num_heads, g)):
            return f"num_kv_heads {g} would fit"
    return _layout_hint(given, layout, (num_heads, num_kv_heads))


def _layout_hint(given: Given, layout: Layout, asked: Heads) -> str:
    """Other layouts of all arrays, or of some of them, that would fit."""
    guesses = [dict.fromkeys(ROLES, other) for other in LAYOUTS if len(other) == len(layout)]
    found = [(x, fit) for x in [*guesses, *_mixtures(layout, given)] if (fit := _fitting_heads(x, given, asked))]
    # As many key heads as query heads are likelier than fewer.
    likely = [layouts for layouts, (h, g) in found if h == g] or [layouts for layouts, _ in found]
    if not likely:
        return ""
    if likely[0] in guesses:
        return f"the shapes would fit layout {' or '.join(x['query'] for x, _ in found if x in guesses)}"
    return _looks(likely[0], given)


def _mixtures(layout: str, given: Given) -> Iterator[Layouts]:
    """Layouts of query, key and value where some have another one than `layout`."""
    transposed = layout.translate(str.maketrans("ld", "dl"))
    others = [*(other for other in LAYOUTS if sorted(other) == sorted(layout)), transposed]
    for swapped in SWAPPED:
        fields = {given[role][0] for role in swapped}
        if fields.isdisjoint(given[role][0] for role in ROLES if role not in swapped):
            for other in others:
                yield dict.fromkeys(ROLES, layout) | dict.fromkeys(swapped, other)


def _fitting_heads(layouts: Layouts, given: Given, asked: Heads) -> tuple[int, int] | None:
    """The numbers of query heads and of key/value heads if arrays of these layouts fit each other, else None."""
    query, key, value = ({"b": 1, **dict(zip(layouts[role], given[role][1].shape, strict=True))} for role in ROLES)
    if "h" in query:
        h, g = query["h"], key["h"]
        features_fit = query["d"] == key["d"] and asked[0] in (None, h) and asked[1] in (None, g)
    else:
        h = asked[0] or 1
        g = asked[1] or h
        features_fit = query["d"] * g == key["d"] * h and query["d"] % h == 0 and value["d"] % g == 0
    same_batch = query["b"] == key["b"] == value["b"]
    same_tokens = key["l"] == value["l"] and key.get("h") == value.get("h")
    return (h, g) if features_fit and same_batch and same_tokens and h % g == 0 else None


def _looks(layouts: Layouts, given: Given) -> str:
    fields: dict[str, list[str]] = {}
    for role, layout in layouts.items():
        names = fields.setdefault(layout, [])
        if given[role][0] not in names:
            names.append(given[role][0])
    parts = (f"{' and '.join(names)} look{'s' * (len(names) == 1)} like {layout}" for layout, names in fields.items())
    return f"{', '.join(parts)}; all need the same layout"
