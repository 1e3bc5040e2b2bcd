"""Few tests that meet every option or every two of them, and every case and every format, but not all of all."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from itertools import combinations, cycle
from typing import Any

import numpy as np
import pytest

from attention_service.attention.planning import make_plan
from attention_service.attention.spec import AttentionSpec
from attention_service.attention.tiles import whole
from attention_service.attention.visibility import visible
from attention_service.errors import ServiceError

Options = Mapping[str, Mapping[str, Any]]  # fields that differ from those of a plain request, by the option's name
Group = tuple[str, ...]


def in_turn(cases: Sequence[Any], forms: Sequence[Any]) -> list[Any]:
    """Parameters of a test: each case, which has a name, with the next of the forms."""
    pairs = zip(cases, cycle(forms), strict=False)
    return [pytest.param(case, form, id=f"{case.name}-{form}") for case, form in pairs]


def joined(one: Any, other: Any) -> Any:
    """A field with what each of two values sets. Errors: ValueError if both set the same to different values."""
    if dataclasses.is_dataclass(one) and not isinstance(one, type) and type(one) is type(other):
        changes = {}
        for field in dataclasses.fields(other):
            a, b = getattr(one, field.name), getattr(other, field.name)
            if b is not field.default:
                changes[field.name] = b if a is field.default else joined(a, b)
        return dataclasses.replace(one, **changes)
    if type(one) is not type(other) or not np.array_equal(one, other):
        raise ValueError
    return one


def merged(plain: AttentionSpec, options: Options, names: Group) -> AttentionSpec | None:
    """The plain request with all these options; None if they cannot stand together.

    They can if no two set the same field to different values (names of outputs add up), the service accepts the
    request, and at least half of its rows see a key, as nothing but zeros would say nothing of most options.
    """
    fields: dict[str, Any] = {}
    try:
        for name in names:
            for field, value in options[name].items():
                if field == "include" and fields.get(field) and value:
                    fields[field] = tuple(dict.fromkeys(fields[field] + value))
                else:
                    fields[field] = joined(fields[field], value) if field in fields else value
        if fields.get("include"):
            fields["include"] = tuple(dict.fromkeys(plain.include + fields["include"]))
        spec = plain._replace(**fields)
        plan = make_plan(spec)
    except (ValueError, ServiceError):
        return None
    seen = visible(plan.terms, whole(plan), np.asarray)
    return spec if seen is None or seen.any(axis=-1).mean() >= 1 / 2 else None


def covering(plain: AttentionSpec, options: Options, size: int) -> list[Group]:
    """Groups of options that stand together, such that every `size` of them (1 or 2) that do are in some group.

    Greedy: a group starts with the first that are in none yet, and takes the option that adds most of them.
    """
    left = dict.fromkeys(map(frozenset, combinations(options, size)))
    refused: set[frozenset[str]] = set()
    groups: list[Group] = []
    while left:
        first = next(iter(left))
        group = tuple(name for name in options if name in first)
        if merged(plain, options, group) is None:
            refused.add(first)
            del left[first]
            continue
        others = [name for name in options if name not in first]
        while others:
            gains = [sum(frozenset({name, *rest}) in left for rest in combinations(group, size - 1)) for name in others]
            best = others.pop(max(range(len(others)), key=gains.__getitem__))
            if max(gains) == 0:
                break
            is_refused = any(frozenset({best, one}) in refused for one in group)
            if not is_refused and merged(plain, options, (*group, best)) is not None:
                group = (*group, best)
        for combination in map(frozenset, combinations(group, size)):
            left.pop(combination, None)
        groups.append(group)
    return groups


def groups_of(plain: AttentionSpec, options: Options) -> list[Group]:
    """Groups of options that stand together, such that every option is in one of them."""
    groups = covering(plain, options, 1)
    assert {name for group in groups for name in group} == options.keys(), "an option is refused by itself"
    return groups
