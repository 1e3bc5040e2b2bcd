"""Prepare: validate the fields of a request, make its plan, and choose its execution strategy."""

from __future__ import annotations

import json
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final, Literal, NamedTuple

import numpy as np

from attention_service.attention.cost import arrays_of
from attention_service.attention.plan import Plan, dtype_of, make_plan
from attention_service.attention.spec import SOURCES, AttentionSpec
from attention_service.backends.base import Backend, Program
from attention_service.codecs.decoded import Decoded
from attention_service.layers.layer import Layer
from attention_service.pipeline.execution import Execution
from attention_service.pipeline.layers import Layers
from attention_service.schemas.request import AttentionRequest
from attention_service.schemas.validate import validate

# Plans that are kept. A service meets few kinds of requests, and without arrays a plan is small.
MAX_PLANS: Final = 256
# Characters of the fields, as JSON, of a request whose plan is kept.
MAX_TEXT: Final = 1024
# Longest string or list of such a request.
MAX_LENGTH: Final = 64
# Bytes of the arrays of such a plan, which hold tables and masks.
MAX_ARRAYS: Final = 2**16
# The same for requests with a stored layer, beside the arrays of the layer: cosines and sines of all tokens.
MAX_LAYER_ARRAYS: Final = 2**22
# Numbers in a layer that are cast to another type in a few milliseconds.
INLINE_ELEMENTS: Final = 2**20


class Strategy(NamedTuple):
    """How a prepared request is computed.

    program: computes the plan for the sources of a request
    memory: bytes that computing takes beyond the arrays of the request
    place: inline: in the event loop
           inline if idle: in the event loop if no other counted request (see Lease) is in progress, else in a thread
           thread: in a worker thread; batch: by the Batcher, with other requests if there are any
    """

    backend: Backend
    program: Program
    memory: int
    place: Literal["inline", "inline if idle", "thread", "batch"]


@dataclass(frozen=True)
class PreparedRequest:
    """A request that is validated and planned.

    sources: holds the arrays that query, key and value come from, and maybe other fields; `spec` may lack these arrays
    """

    spec: AttentionSpec
    plan: Plan
    sources: Mapping[str, np.ndarray]
    decoded: Decoded
    strategy: Strategy

    @cached_property
    def nbytes(self) -> int:
        """Memory that its arrays take."""
        return self.decoded.nbytes


class PlanCache:
    """Prepares requests, and keeps plans for later requests.

    If only the sources of a request are arrays, its plan follows from their shapes and types and from the other fields.
    The next request with the same ones shares the plan.

    choose_strategy(spec, plan, shared): called once for each new plan; `shared` is True if later requests may reuse it
    """

    def __init__(self, choose_strategy: Callable[[AttentionSpec, Plan, bool], Strategy]) -> None:
        self._choose_strategy = choose_strategy
        self._kept: dict[Hashable, tuple[AttentionSpec, Plan, Strategy]] = {}

    def prepare(self, decoded: Decoded, layer: Layer | None = None) -> PreparedRequest:
        """Validate and plan. Errors: InvalidRequest of every kind, with the pointer of the field at fault.

        layer: the stored layer that the request names. It keeps the plans of its requests, which are gone with it.
        """
        key = _key(decoded)
        kept = None if key is None else self._plans(layer).get(key)
        if kept is not None:
            spec, plan, strategy = kept
            return PreparedRequest(spec, plan, decoded.fields, decoded, strategy)
        spec, plan = make_spec_and_plan(decoded, layer=layer)
        size = 0 if key is None else _own_bytes(spec, plan, layer)
        shared = key is not None and size <= (MAX_ARRAYS if layer is None else MAX_LAYER_ARRAYS)
        strategy = self._choose_strategy(spec, plan, shared)
        if key is not None and shared:
            entry = spec.without_sources(), plan, strategy
            if layer is not None:
                layer.keep_plan(key, entry, size)
            else:
                if len(self._kept) >= MAX_PLANS:
                    self._kept.clear()
                self._kept[key] = entry
        return PreparedRequest(spec, plan, spec.sources, decoded, strategy)

    def knows(self, decoded: Decoded, layer: Layer) -> bool:
        """True if there is a plan for a request with a stored layer."""
        key = _key(decoded)
        return key is not None and key in layer.plans

    def _plans(self, layer: Layer | None) -> dict[Hashable, tuple[AttentionSpec, Plan, Strategy]]:
        return self._kept if layer is None else layer.plans


def _own_bytes(spec: AttentionSpec, plan: Plan, layer: Layer | None) -> int:
    """Bytes of the arrays of a plan, without those of its stored layer, which is in memory anyway."""
    known = [] if layer is None else list(arrays_of(spec.without_sources()))
    return sum(x.nbytes for x in arrays_of(plan) if not any(np.may_share_memory(x, other) for other in known))


async def prepare(plans: PlanCache, layers: Layers, decoded: Decoded, execution: Execution) -> PreparedRequest:
    """Validate and plan, in a worker thread if decoding has taken a slot for one, and release the slot.

    The first request with a large stored layer takes a slot, too: it may cast the layer to another type.

    Errors: InvalidRequest of every kind, with the pointer of the field at fault; LayerUnavailable; Cancelled.
    """
    layer = await layers.of(decoded, execution)
    if layer is not None and layer.elements > INLINE_ELEMENTS and not plans.knows(decoded, layer):
        async with execution.cancel_on_disconnect():
            await execution.grow(execution.lease.memory, slot=True)
    if execution.lease.has_slot:
        async with execution.cancel_on_disconnect():
            request = await execution.in_thread(plans.prepare, decoded, layer)
        execution.lease.release_slot()
    else:
        request = plans.prepare(decoded, layer)
    execution.timings.step("prepare")
    if execution.lease.counted:  # else the sum is not needed
        execution.lease.shrink(request.nbytes)
    return request


def make_spec_and_plan(
    decoded: Decoded, *, allow_non_finite: bool = False, layer: Layer | None = None
) -> tuple[AttentionSpec, Plan]:
    """The specification of a request and its plan. Errors: InvalidRequest of every kind.

    allow_non_finite: accept infinity and NaN in keys and values
    layer: the stored layer that the request names, whose fields the specification has, too
    """
    if layer is not None:
        with layer.blamed(decoded.fields):
            body = validate(AttentionRequest, layer.merged(decoded.fields))
            return _with_layer(body.attention_spec(decoded.untyped, allow_non_finite=allow_non_finite), layer)
    body = validate(AttentionRequest, decoded.fields)
    spec = body.attention_spec(decoded.untyped, allow_non_finite=allow_non_finite)
    return spec, make_plan(spec)


def _with_layer(spec: AttentionSpec, layer: Layer) -> tuple[AttentionSpec, Plan]:
    """A specification with the projection of its layer in the type of the request, and its plan."""
    if spec.projection is not None:
        projection = layer.projection_in(dtype_of(spec), spec.projection)
        if projection is not None:
            spec = spec._replace(projection=projection)
    return spec, make_plan(spec)


def _key(decoded: Decoded) -> Hashable | None:
    """All that specification and plan depend on, if that is shapes and a few numbers and names; else None."""
    parts: list[Hashable] = []
    options: dict[str, Any] = {}
    for name, value in decoded.fields.items():
        if name in SOURCES and type(value) is np.ndarray:
            parts.append((name, value.shape, value.dtype))
        elif isinstance(value, str | list) and len(value) > MAX_LENGTH:
            return None
        elif isinstance(value, str):
            parts.append((name, value))
        else:
            options[name] = value
    try:
        text = json.dumps(options) if options else ""  # unlike equality, it tells True from 1, and 0.0 from -0.0
    except (TypeError, ValueError):  # other arrays, or an integer of thousands of digits
        return None
    return (decoded.untyped, text, *parts) if len(text) <= MAX_TEXT else None
