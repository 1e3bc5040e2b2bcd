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
from attention_service.errors import InvalidRequest

Options = Mapping[str, Mapping[str, Any]]  # fields that differ from those of a plain request, by the option's name
Group = tuple[str, ...]
# Of the rows of a request with many options see a key: zeros would say nothing of most options.
HALF = 0.5


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


def with_options(plain: AttentionSpec, options: Options, names: Group, *, least: float = 0.0) -> AttentionSpec | None:
    """The plain request with all these options, and the outputs of all; None if they cannot stand together.

    They cannot if two set a field to different values, if planning refuses the request, or if less than this share of
    its rows see a key.
    """
    fields: dict[str, Any] = {}
    try:
        for name in names:
            for field, value in options[name].items():
                if field == "include" and value and fields.get(field, plain.include):
                    fields[field] = tuple(dict.fromkeys(fields.get(field, plain.include) + value))
                else:
                    fields[field] = joined(fields[field], value) if field in fields else value
    except ValueError:
        return None
    spec = plain._replace(**fields)
    try:
        plan = make_plan(spec)
    except InvalidRequest:
        return None
    seen = visible(plan.terms, whole(plan), np.asarray)
    return spec if seen is None or seen.any(axis=-1).mean() >= least else None


def covering(plain: AttentionSpec, options: Options, size: int = 1) -> list[Group]:
    """Groups of options that stand together, such that every `size` of them (1 or 2) that do are in some group.

    Greedy: a group starts with the first that are in none yet, and takes the option that adds most of them.
    """
    left = dict.fromkeys(map(frozenset, combinations(options, size)))
    refused: set[frozenset[str]] = set()
    groups: list[Group] = []
    while left:
        first = next(iter(left))
        group = tuple(name for name in options if name in first)
        if with_options(plain, options, group, least=HALF) is None:
            assert size > 1, f"{group[0]} is refused by itself"
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
            if not is_refused and with_options(plain, options, (*group, best), least=HALF) is not None:
                group = (*group, best)
        for combination in map(frozenset, combinations(group, size)):
            left.pop(combination, None)
        groups.append(group)
    return groups
