"""Mistakes of rotary embedding, clipping, norms, and of the features that scores are made of."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from attention_service.attention.array_functions import Array, ArrayFunctions
from attention_service.attention.score_term import Bound, Frame
from attention_service.attention.spec import ROLES, Rotary
from attention_service.attention.steps import STEPPED, Steps, in_order
from attention_service.attention.steps.clip import ClipStep
from attention_service.attention.steps.norm import NormStep
from attention_service.attention.steps.rotation import RotationStep
from attention_service.attention.steps.step import OperandStep
from attention_service.comparison.case import Case, Step
from attention_service.comparison.mutants.table import mutant

# Features that kernels are made for, besides half of those that there are.
WIDTHS = (64, 128)
# The base of an implementation that ignores that of the request.
USUAL_BASE = 10000.0
F64 = np.dtype(np.float64)


def _with(case: Case, kind: type[OperandStep], steps: Mapping[str, OperandStep | None]) -> dict[str, Steps]:
    """The steps of a case with others of one class, by role; None for none."""
    changed = dict(case.steps)
    for role, step in steps.items():
        others = [other for other in case.steps[role] if not isinstance(other, kind)]
        changed[role] = in_order([*others, step] if step is not None else others)
    return changed


def _rotations(case: Case, new: Rotary, past: int, **lengths: int) -> dict[str, RotationStep]:
    """The rotations of another request, by role. past: the position of the first new token; lengths: other sizes"""
    frame = Frame(case.plan.score_axes, case.plan.sizes._replace(**lengths), past, F64)
    return RotationStep.of(case.spec._replace(rotary=new), frame, most=0)  # a hundred mutants would keep their tables


def _rotated(
    case: Case, steps: Mapping[str, RotationStep | None], change: Mapping[str, Any] | None = None
) -> Iterator[Case]:
    """The case with other rotations, if it has any."""
    if _of(case, RotationStep):
        yield case.changed(change, steps=_with(case, RotationStep, steps))


def _of(case: Case, kind: type[Step]) -> dict[str, Step]:
    """The steps of one class, by role, or "output"."""
    return {role: step for role in STEPPED if (step := case.step(role, kind)) is not None}


@mutant("rotary.absent", "Query and key are not rotated.")
def rotary_absent(case: Case) -> Iterator[Case]:
    return _rotated(case, {"query": None, "key": None}, {"rotary": None})


@mutant("rotary.interleaving", "The rotation pairs neighbouring features where it should pair halves, or the reverse.")
def rotary_interleaving(case: Case) -> Iterator[Case]:
    steps = _of(case, RotationStep)
    if steps and steps["query"].half > 1:
        other = not steps["query"].interleaved
        changed = {role: replace(step, interleaved=other) for role, step in steps.items()}
        yield from _rotated(case, changed, {"rotary": {"interleaved": other}})


@mutant("rotary.sign", "The rotation turns the other way.")
def rotary_sign(case: Case) -> Iterator[Case]:
    return _rotated(case, {role: _turned(step, -1) for role, step in _of(case, RotationStep).items()})


@mutant("rotary.base", "The base of the rotation is 10000, not that of the request.")
def rotary_base(case: Case) -> Iterator[Case]:
    given = case.spec.rotary
    if given and given.cos is None and given.base not in (None, USUAL_BASE):
        steps = _rotations(case, replace(given, base=None), case.past_length)
        yield from _rotated(case, steps, {"rotary": {"base": USUAL_BASE}})


@mutant("rotary.other_dim", "The frequencies are those of a rotation of all features, though fewer of them turn.")
def rotary_other_dim(case: Case) -> Iterator[Case]:
    given, dim = case.spec.rotary, case.plan.sizes.head_dim
    if given and given.cos is None and given.dim is not None and given.dim < dim:
        base = (given.base or USUAL_BASE) ** (given.dim / dim)
        steps = _rotations(case, replace(given, base=base), case.past_length)
        yield from _rotated(case, steps, {"rotary": {"base": base}})
        if dim % 2 == 0:
            steps = _rotations(case, replace(given, dim=dim), case.past_length)
            yield from _rotated(case.changed({}, detail="all turn"), steps, {"rotary": {"dim": dim}})


@mutant("rotary.positions_shifted", "The positions of the rotation are off by one.")
def rotary_positions_shifted(case: Case) -> Iterator[Case]:
    given, past = case.spec.rotary, case.past_length
    if given is None or given.cos is not None:
        return
    lengths = {"query_positions": case.plan.sizes.query_length, "key_positions": case.plan.sizes.key_length - past}
    # Where no keys are those of a cache, the distances are right if all tokens are shifted.
    shifted = {"of the query": ["query_positions"]} | ({"of new tokens": [*lengths]} if past else {})
    for (detail, names), by in itertools.product(shifted.items(), (1, -1)):
        moved: dict[str, Any] = {}
        for name in names:
            own = getattr(given, name)
            moved[name] = (past + np.arange(lengths[name]) if own is None else own) + by
        change = {"rotary": {name: places.tolist() for name, places in moved.items()}}
        other = case.changed({}, detail=f"{detail}, {by:+d}")
        yield from _rotated(other, _rotations(case, replace(given, **moved), past), change)


@mutant("rotary.no_offset", "New tokens are rotated as if they were the first, in spite of the cache.")
def rotary_no_offset(case: Case) -> Iterator[Case]:
    given = case.spec.rotary
    if given is None or not case.past_length or (given.cos is not None and given.cos.ndim == 3):
        return
    if given.query_positions is None and given.key_positions is None:
        steps = _rotations(case, given, 0, key_length=case.plan.sizes.key_length - case.past_length)
        yield from _rotated(case, steps)


@mutant("rotary.twice", "Query and key are rotated twice.")
def rotary_twice(case: Case) -> Iterator[Case]:
    return _rotated(case, {role: _turned(step, 2) for role, step in _of(case, RotationStep).items()})


def _turned(step: RotationStep, times: int) -> RotationStep:
    """The rotation by -1 or 2 times the angles."""
    if step.frequencies is not None:
        return replace(step, frequencies=times * step.frequencies)
    cos, sin = np.asarray(step.cos), np.asarray(step.sin)
    return replace(step, sin=-sin) if times < 0 else replace(step, cos=cos * cos - sin * sin, sin=2 * sin * cos)


@mutant("rotary.cache_again", "Keys of the cache, which were rotated before, are rotated again.")
def rotary_cache_again(case: Case) -> Iterator[Case]:
    given, past = case.spec.rotary, case.past_length
    if given is None or not past or (given.cos is not None and (given.cos.ndim == 3 or len(given.cos) < past)):
        return
    places = replace(given, key_positions=np.arange(past), query_positions=np.zeros(1, np.int64))
    yield case.changed(past_steps=(_rotations(case, places, 0, key_length=past, query_length=1)["key"],))


@mutant("rotary.query_only", "The query is rotated, the key is not.")
def rotary_query_only(case: Case) -> Iterator[Case]:
    return _rotated(case, {"key": None})


@mutant("clip.absent", "Query, key and value are not clipped.")
def clip_absent(case: Case) -> Iterator[Case]:
    if case.step("query", ClipStep):
        yield case.changed({"clip_qkv": None}, steps=_with(case, ClipStep, dict.fromkeys(ROLES)))


@mutant("norm.absent", "Query, key, value or head outputs are not normalised.")
def norm_absent(case: Case) -> Iterator[Case]:
    roles = list(_of(case, NormStep))
    if roles:
        absent: dict[str, Any] = {f"{role}_norm": None for role in roles}
        yield case.changed(absent, steps=_with(case, NormStep, dict.fromkeys(roles)))
    if len(roles) > 1:
        for role in roles:
            name = f"{role}_norm"
            yield case.changed({name: None}, detail=name, steps=_with(case, NormStep, {role: None}))


def _norms(case: Case, roles: Iterable[str], is_meant: Callable[[NormStep], bool], **other: Any) -> Iterator[Case]:
    """The case with other options of the norms that are meant."""
    meant = {role: step for role, step in _of(case, NormStep).items() if role in roles and is_meant(step)}
    if meant:
        changed: dict[str, OperandStep] = {role: replace(step, **other) for role, step in meant.items()}
        change = {f"{role}_norm": other for role in meant}
        yield case.changed(change, steps=_with(case, NormStep, changed))


@mutant("norm.after_rotary", "Query and key are normalised after the rotation, not before.")
def norm_after_rotary(case: Case) -> Iterator[Case]:
    if case.step("query", RotationStep):
        yield from _norms(case, ROLES[:2], lambda norm: norm.position == "before", position="after")


@mutant("norm.before_rotary", "Query and key are normalised before the rotation, not after.")
def norm_before_rotary(case: Case) -> Iterator[Case]:
    if case.step("query", RotationStep):
        yield from _norms(case, ROLES[:2], lambda norm: norm.position == "after", position="before")


@mutant("norm.no_mean", "The mean is not subtracted: the norm is an RMS norm, not a layer norm.")
def norm_no_mean(case: Case) -> Iterator[Case]:
    return _norms(case, STEPPED, lambda norm: norm.kind == "layer", kind="rms")


@mutant("norm.per_head", "The norm is taken over each head by itself, not over all heads.")
def norm_per_head(case: Case) -> Iterator[Case]:
    for wrong in _norms(case, STEPPED, lambda norm: norm.over == "all", over="head"):
        yield replace(wrong, change=None)  # whose weights differ from head to head


@dataclass(frozen=True, slots=True, eq=False)
class _Read(OperandStep):
    """The features that are read after all steps, (d,); those of -1 are 0."""

    places: np.ndarray

    def apply(self, array: Array, functions: ArrayFunctions, bound: Bound) -> Array:
        read: Array = array[..., self.places] * (self.places >= 0)
        return read

    def error(self, array: np.ndarray, errors: np.ndarray, epsilon: float) -> np.ndarray:
        return errors


def _widths(case: Case) -> Iterator[tuple[int, np.ndarray]]:
    """Widths of a part of the features, and all features."""
    features = case.plan.sizes.head_dim
    if not any(term.reads_query for term in case.terms):
        for width in dict.fromkeys((features // 2, *(one for one in WIDTHS if one < features))):
            if width:
                yield width, np.arange(features)


@mutant("features.first_part", "Scores are the products of the first features only.")
def features_first_part(case: Case) -> Iterator[Case]:
    for width, places in _widths(case):
        read = _Read(np.where(places < width, places, -1))
        yield case.changed(steps={**case.steps, "query": (*case.steps["query"], read)}, detail=f"of {width} features")


@mutant("features.read_again", "All parts of the features of a query meet the first features of a key.")
def features_read_again(case: Case) -> Iterator[Case]:
    for width, places in _widths(case):
        read = _Read(places % width)
        steps, past = {**case.steps, "key": (*case.steps["key"], read)}, (*case.past_steps, read)
        yield case.changed(steps=steps, past_steps=past, detail=f"of {width} features")
