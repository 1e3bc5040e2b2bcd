"""Prepare: from the fields of a request to a plan and how it is computed, or those of an earlier request."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from typing import Any, Final, Literal, NamedTuple

import numpy as np

from service.attention.plan import Plan, make_plan
from service.attention.spec import SOURCES, AttentionSpec
from service.backends.base import Backend
from service.codecs.decoded import Decoded
from service.pipeline.execution import Execution
from service.schemas.request import AttentionRequest
from service.schemas.validate import validate

# Plans that are kept. A service meets few kinds of requests, and without arrays a plan is small.
MAX_PLANS: Final = 256
# Longest string, and longest list of names, of a request whose plan is kept.
MAX_TEXT: Final = 64
MAX_NAMES: Final = 16
SCALARS: Final = (bool, int, float, type(None))


class Strategy(NamedTuple):
    """How a prepared request is computed.

    memory: bytes that computing takes beyond the arrays of the request
    place: in the event loop, there if no other request is at work and else in a worker thread, always in a worker
           thread, or in a batch with other requests
    """

    backend: Backend
    memory: int
    place: Literal["inline", "inline if idle", "thread", "batch"]


class PreparedRequest(NamedTuple):
    """A request that is validated and planned. sources: the arrays that query, key and value come from"""

    spec: AttentionSpec
    plan: Plan
    sources: Mapping[str, np.ndarray]
    decoded: Decoded
    strategy: Strategy

    @property
    def nbytes(self) -> int:
        """Memory that its arrays take."""
        return self.decoded.nbytes


class PlanCache:
    """Prepares requests. Keeps the plans of those of which only the sources are arrays.

    Such a plan follows from the shapes and types of the sources and a few options, so that the next request with the
    same ones shares it.

    choose_strategy: called for a new plan, and whether requests share it
    """

    def __init__(self, choose_strategy: Callable[[AttentionSpec, Plan, bool], Strategy]) -> None:
        self._choose_strategy = choose_strategy
        self._kept: dict[Hashable, tuple[AttentionSpec, Plan, Strategy]] = {}

    def prepare(self, decoded: Decoded) -> PreparedRequest:
        """Validate and plan. Errors: InvalidRequest of every kind, with the pointer of the field at fault."""
        key = _key(decoded)
        kept = None if key is None else self._kept.get(key)
        if kept is not None:
            spec, plan, strategy = kept
            return PreparedRequest(spec, plan, decoded.fields, decoded, strategy)
        spec, plan = make_spec_and_plan(decoded)
        shared = key is not None and spec.scale != 0  # 0 would be found for -0
        strategy = self._choose_strategy(spec, plan, shared)
        if shared:
            if len(self._kept) >= MAX_PLANS:
                self._kept.clear()
            self._kept[key] = spec.without_sources(), plan, strategy
        return PreparedRequest(spec, plan, spec.sources, decoded, strategy)


async def prepare(plans: PlanCache, decoded: Decoded, execution: Execution) -> PreparedRequest:
    """Validate and plan, in a worker thread if decoding has taken a slot for one, and release the slot.

    Errors: InvalidRequest of every kind, with the pointer of the field at fault; Cancelled.
    """
    if execution.lease.has_slot:
        async with execution.cancel_on_disconnect():
            request = await execution.in_thread(plans.prepare, decoded)
        execution.lease.release_slot()
    else:
        request = plans.prepare(decoded)
    execution.timings.step("plan")
    if execution.lease.counted:  # else nobody needs the sum
        execution.lease.shrink(request.nbytes)
    return request


def make_spec_and_plan(decoded: Decoded, *, allow_non_finite: bool = False) -> tuple[AttentionSpec, Plan]:
    """The specification of a request and its plan. Errors: InvalidRequest of every kind.

    allow_non_finite: accept infinity and NaN in keys and values
    """
    body = validate(AttentionRequest, decoded.fields)
    spec = body.attention_spec(decoded.untyped, allow_non_finite=allow_non_finite)
    return spec, make_plan(spec)


def _key(decoded: Decoded) -> Hashable | None:
    """All that specification and plan depend on; None where that is more than shapes, scalars and short names."""
    parts: list[Hashable] = [decoded.untyped]
    for name, value in decoded.fields.items():
        kind = type(value)
        if kind is np.ndarray:
            if name not in SOURCES:
                return None
            parts.append((name, value.shape, value.dtype))
        elif kind in SCALARS or (kind is str and len(value) <= MAX_TEXT):
            parts.append((name, kind, value))  # True is 1, but not where a number is asked for
        elif kind is list and len(value) <= MAX_NAMES and all(map(_is_short, value)):
            parts.append((name, *value))  # as in include
        else:
            return None
    return tuple(parts)


def _is_short(value: Any) -> bool:
    return isinstance(value, str) and len(value) <= MAX_TEXT
