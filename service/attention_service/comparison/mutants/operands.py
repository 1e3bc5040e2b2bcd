"""Mistakes of rotary embedding and norms."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from attention_service.attention import rotary
from attention_service.attention.rotary import Rotation
from attention_service.attention.spec import Norm, Rotary
from attention_service.comparison.case import Case
from attention_service.comparison.mutants.table import mutant

# The base of an implementation that ignores that of the request.
USUAL_BASE = 10000.0
F64 = np.dtype(np.float64)
NORMS = ("query_norm", "key_norm", "value_norm")


def _rotations(case: Case, new: Rotary, past: int, key_length: int) -> tuple[Rotation | None, Rotation | None]:
    """The rotations of another request. past: the position of the first new token"""
    sizes = case.plan.sizes._replace(key_length=key_length)
    return rotary.rotations(new, sizes, past, F64)


def _both(
    case: Case, query: Rotation | None, key: Rotation | None, change: Mapping[str, Any] | None = None
) -> Iterator[Case]:
    if case.query_rotation is not None:
        yield case.changed(change, query_rotation=query, key_rotation=key)


@mutant("rotary.absent", "Query and key are not rotated.")
def rotary_absent(case: Case) -> Iterator[Case]:
    return _both(case, None, None, {"rotary": None})


@mutant("rotary.interleaving", "The rotation pairs neighbouring features where it should pair halves, or the reverse.")
def rotary_interleaving(case: Case) -> Iterator[Case]:
    query, key = case.query_rotation, case.key_rotation
    if query and key and query.cos.shape[-1] > 1:
        other = not query.interleaved
        change = {"rotary": {"interleaved": other}}
        yield from _both(case, replace(query, interleaved=other), replace(key, interleaved=other), change)


@mutant("rotary.sign", "The rotation turns the other way.")
def rotary_sign(case: Case) -> Iterator[Case]:
    query, key = case.query_rotation, case.key_rotation
    if query and key:
        yield from _both(case, replace(query, sin=-query.sin), replace(key, sin=-key.sin))


@mutant("rotary.base", "The base of the rotation is 10000, not that of the request.")
def rotary_base(case: Case) -> Iterator[Case]:
    given = case.spec.rotary
    if given and given.cos is None and given.base not in (None, USUAL_BASE):
        query, key = _rotations(case, replace(given, base=None), case.past_length, case.plan.sizes.key_length)
        yield from _both(case, query, key, {"rotary": {"base": USUAL_BASE}})


@mutant("rotary.no_offset", "New tokens are rotated as if they were the first, in spite of the cache.")
def rotary_no_offset(case: Case) -> Iterator[Case]:
    given = case.spec.rotary
    if given is None or not case.past_length or (given.cos is not None and given.cos.ndim == 3):
        return
    if given.query_positions is None and given.key_positions is None:
        query, key = _rotations(case, given, 0, case.plan.sizes.key_length - case.past_length)
        yield from _both(case, query, key)


@mutant("rotary.twice", "Query and key are rotated twice.")
def rotary_twice(case: Case) -> Iterator[Case]:
    if case.query_rotation and case.key_rotation:
        yield from _both(case, _twice(case.query_rotation), _twice(case.key_rotation))


def _twice(rotation: Rotation) -> Rotation:
    cos, sin = rotation.cos, rotation.sin
    return replace(rotation, cos=cos * cos - sin * sin, sin=2 * sin * cos)


@mutant("rotary.cache_again", "Keys of the cache, which were rotated before, are rotated again.")
def rotary_cache_again(case: Case) -> Iterator[Case]:
    given, past = case.spec.rotary, case.past_length
    if given is None or not past or (given.cos is not None and (given.cos.ndim == 3 or len(given.cos) < past)):
        return
    places = replace(given, key_positions=np.arange(past), query_positions=np.zeros(1, np.int64))
    sizes = case.plan.sizes._replace(key_length=past, query_length=1)
    yield case.changed(past_rotation=rotary.rotations(places, sizes, 0, F64)[1])


@mutant("rotary.query_only", "The query is rotated, the key is not.")
def rotary_query_only(case: Case) -> Iterator[Case]:
    return _both(case, case.query_rotation, None)


@mutant("norm.absent", "Query, key or value are not normalised.")
def norm_absent(case: Case) -> Iterator[Case]:
    fields = [name for name in NORMS if getattr(case, name)]
    if fields:
        absent: dict[str, Any] = dict.fromkeys(fields)
        yield case.changed(absent, **absent)
    if len(fields) > 1:
        for name in fields:
            yield case.changed({name: None}, detail=name, **{name: None})


def _norms(case: Case, names: Iterable[str], is_meant: Callable[[Norm], bool], **other: Any) -> Iterator[Case]:
    """The case with other options of the norms that are meant."""
    norms: dict[str, Norm] = {name: getattr(case, name) for name in names if getattr(case, name)}
    meant = {name: norm for name, norm in norms.items() if is_meant(norm)}
    if meant:
        changed: dict[str, Any] = {name: replace(norm, **other) for name, norm in meant.items()}
        yield case.changed(dict.fromkeys(meant, other), **changed)


@mutant("norm.after_rotary", "Query and key are normalised after the rotation, not before.")
def norm_after_rotary(case: Case) -> Iterator[Case]:
    if case.query_rotation:
        yield from _norms(case, NORMS[:2], lambda norm: norm.position == "before", position="after")


@mutant("norm.before_rotary", "Query and key are normalised before the rotation, not after.")
def norm_before_rotary(case: Case) -> Iterator[Case]:
    if case.query_rotation:
        yield from _norms(case, NORMS[:2], lambda norm: norm.position == "after", position="before")


@mutant("norm.no_mean", "The mean is not subtracted: the norm is an RMS norm, not a layer norm.")
def norm_no_mean(case: Case) -> Iterator[Case]:
    return _norms(case, NORMS, lambda norm: norm.kind == "layer", kind="rms")


@mutant("norm.per_head", "The norm is taken over each head by itself, not over all heads.")
def norm_per_head(case: Case) -> Iterator[Case]:
    for wrong in _norms(case, NORMS, lambda norm: norm.over == "all", over="head"):
        yield replace(wrong, change=None)  # whose weights differ from head to head
