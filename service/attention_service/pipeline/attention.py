"""Attention as an operation: it keeps plans for later requests, chooses backends, and knows what plans cost."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Final, NamedTuple

import numpy as np

from attention_service.attention.cost import arrays_of, copied_bytes
from attention_service.attention.outputs import OUTPUTS
from attention_service.attention.plan import Plan
from attention_service.attention.result import Result
from attention_service.attention.spec import AttentionSpec
from attention_service.attention.tiles import Tiling, tile_count
from attention_service.backends.base import Backend, Check, Program, no_check
from attention_service.backends.registry import Backends
from attention_service.codecs.base import Codec
from attention_service.codecs.chunks import Encoded
from attention_service.codecs.decoded import Decoded, text_of
from attention_service.codecs.table import CODECS
from attention_service.layers.layer import Layer
from attention_service.pipeline.operation import Cost, Operation
from attention_service.pipeline.plan_key import keep, plan_key
from attention_service.pipeline.prepare import planned, validated
from attention_service.schemas.request import AttentionRequest
from attention_service.schemas.response import answer

# Operations that take as long as the Python of a tile; of a batch entry, which may have a tile for its numbers alone;
# and of gathering the keys of a head.
TILE_FLOPS, ENTRY_FLOPS, GATHER_FLOPS = 2**18, 2**16, 2**13
# About how backends cut plans.
TILING: Final = Tiling(scores=2**18)
# The same for requests with a stored layer, beside the arrays of the layer: cosines and sines of all tokens.
MAX_LAYER_ARRAYS: Final = 2**22


class SharedPlan(NamedTuple):
    """What requests share that differ in their numbers only.

    spec: without the arrays that query, key and value come from, and maybe others
    program: computes the plan for the sources of a request
    cost: without encoding
    """

    spec: AttentionSpec
    plan: Plan
    backend: Backend
    program: Program
    cost: Cost


class PreparedRequest(NamedTuple):
    """A request that is validated and planned. sources: the arrays that query, key and value come from, maybe others"""

    shared: SharedPlan
    sources: Mapping[str, np.ndarray]
    decoded: Decoded


class AttentionOperation(Operation[PreparedRequest, Codec, Result]):
    """POST /attention, and the same over the inference protocol, gRPC and the command line.

    If only the sources of a request are arrays, its plan follows from their shapes and types and from the other fields.
    The next request with the same ones shares the plan. A stored layer keeps the plans of its requests, which are gone
    with it.
    """

    encoders = CODECS

    def __init__(self, backends: Backends) -> None:
        self._backends = backends
        self._kept: dict[Hashable, SharedPlan] = {}

    def prepare(self, decoded: Decoded, layer: Layer | None = None, check: Check = no_check) -> PreparedRequest:
        """The request with a new plan, which is kept."""
        key = plan_key(decoded)
        spec, plan = planned(validated(AttentionRequest, decoded, layer)[1], layer)
        shared = self._share(spec, plan)
        if key is not None and not shared.backend.is_remote:
            size = _own_bytes(spec, plan, layer)
            if layer is None:
                keep(self._kept, key, shared, size)
            elif size <= MAX_LAYER_ARRAYS:
                layer.keep_plan(key, shared, size)
        return PreparedRequest(shared, spec.sources, decoded)

    def prepared(self, decoded: Decoded, layer: Layer | None) -> PreparedRequest | None:
        key = plan_key(decoded)
        plans = self._kept if layer is None else layer.plans
        kept = plans.get(key)  # there is none for None
        return None if kept is None else PreparedRequest(kept, decoded.fields, decoded)

    def may_wait(self, decoded: Decoded) -> bool:
        return may_wait(self._backends, decoded)

    def cost(self, request: PreparedRequest, encoder: Codec) -> Cost:
        flops, compute, results, waits_for_gpu, *_ = request.shared.cost
        encode = encoder.encode_bytes(results, request.decoded)
        return Cost(flops, compute, results, waits_for_gpu, encode, results < encoder.encode_inline)

    def compute(self, request: PreparedRequest, check: Check) -> Result:
        return request.shared.program(request.sources, check)

    def encode(self, request: PreparedRequest, result: Result, encoder: Codec, request_id: str) -> Encoded:
        return encoder.encode(answer(request.shared.spec, result, request_id), request.decoded)

    def advice(self, request: PreparedRequest) -> str:
        selection = request.shared.plan.selection
        returned = {name for name in selection.include if OUTPUTS[name].is_score_matrix}
        if not returned:
            return super().advice(request)
        if returned == {"attention_weights"} and selection.top_k is None:
            return "top_k, select_queries, select_heads, or include without attention_weights need less"
        return f"include without {', '.join(sorted(returned))} needs less"

    def _share(self, spec: AttentionSpec, plan: Plan) -> SharedPlan:
        """A plan with its backend, its program and its cost. Errors: UnknownBackend."""
        backend, device = self._backends.choose(spec.backend, spec.device), spec.device
        sizes = plan.sizes
        python = TILE_FLOPS * tile_count(plan, TILING) + ENTRY_FLOPS * sizes.batch_size
        python += GATHER_FLOPS * sizes.batch_size * sizes.num_heads * (plan.gathered is not None)
        cost = Cost(
            flops=plan.flops + python,
            compute=backend.peak_bytes(plan, device, copied_bytes(plan, spec)),
            results=plan.returned_bytes,
            waits_for_gpu=backend.is_gpu(device),
        )
        spec = spec.without_sources()
        return SharedPlan(spec, plan, backend, backend.program(plan, spec), cost)


def may_wait(backends: Backends, decoded: Decoded) -> bool:
    """True if a request asks for a backend that is not loaded, or asks other machines."""
    backend, device = (text_of(decoded.fields.get(field)) or "auto" for field in ("backend", "device"))
    return backends.may_wait(backend, device)


def _own_bytes(spec: AttentionSpec, plan: Plan, layer: Layer | None) -> int:
    """Bytes of the arrays of a plan, without those of its stored layer, which is in memory anyway."""
    known = [] if layer is None else list(arrays_of(spec.without_sources()))
    return sum(x.nbytes for x in arrays_of(plan) if not any(np.may_share_memory(x, other) for other in known))
