"""The path of every request, whatever its operation and transport: decode, prepare, admit, compute, encode."""

from __future__ import annotations

from typing import Final

from attention_service.backends.base import Check, OutOfMemory, no_check
from attention_service.codecs.base import Codec
from attention_service.codecs.chunks import Encoded
from attention_service.codecs.decoded import Body, Decoded
from attention_service.errors import drop_tracebacks
from attention_service.layers.layer import LAYER, Layer
from attention_service.pipeline.admission import UNCOUNTED, memory_limit_error
from attention_service.pipeline.decode import decode
from attention_service.pipeline.engine import Engine
from attention_service.pipeline.execution import Execution
from attention_service.pipeline.layers import Layers
from attention_service.pipeline.operation import INLINE_ELEMENTS, Cost, E, Operation, P, R, Strategy, choose_strategy
from attention_service.runtime.machine import memory_left

# The hint for a request that cannot be prepared.
SHORTER: Final = "fewer sequences, or smaller masks, biases and tables at a time need less"
# Copies of an encoded answer while it is sent: its own bytes, and those of the transport.
SENT_COPIES: Final = 2


async def run(
    engine: Engine,
    operation: Operation[P, E, R],
    body: Body,
    decoder: Codec,
    encoder: E,
    execution: Execution,
    request_id: str,
) -> Encoded:
    """The encoded answer to the request in a body. The time limit starts now.

    The caller should not keep the body: its memory counts as free after decoding, unless arrays are views of it.

    Errors: ServiceError of every kind, Cancelled.
    """
    execution.begin(len(body))
    decoded = await decode(decoder, body, engine.settings.max_body_bytes, execution)
    del body
    request = await prepare(operation, engine.layers, decoded, execution)
    cost = operation.cost(request, encoder)
    strategy = await admit(operation, request, cost, decoded, engine.settings.inline_flops, execution)
    result = await compute(operation, request, cost, strategy, execution)
    return await encode(operation, request, result, cost, encoder, request_id, execution)


async def prepare(operation: Operation[P, E, R], layers: Layers, decoded: Decoded, execution: Execution) -> P:
    """Validate and plan: in a worker thread, with a slot, if that may take long, or decoding has a slot already.

    In the event loop if the plan was kept. The first request with a large stored layer may cast the layer to another
    type.

    Errors: InvalidRequest of every kind, with the pointer of the field at fault; LayerUnavailable; Cancelled.
    """
    layer = await layers.of(decoded, execution) if LAYER in decoded.fields else None
    request = operation.prepared(decoded, layer)
    if request is None:
        request = await _prepare_anew(operation, layer, decoded, execution)
    execution.lease.release_slot()
    execution.timings.step("prepare")
    return request


async def _prepare_anew(
    operation: Operation[P, E, R], layer: Layer | None, decoded: Decoded, execution: Execution
) -> P:
    cost = operation.prepare_cost(decoded)
    is_large = cost.is_large or (layer is not None and layer.elements > INLINE_ELEMENTS)
    if is_large or operation.may_wait(decoded) or execution.lease.has_slot:
        memory = (execution.decoded_bytes or decoded.nbytes) + cost.memory
        if memory > execution.admission.memory:
            raise memory_limit_error(memory, execution.admission.memory, SHORTER, "allowed")
        if memory > execution.lease.memory:  # a request that waits for memory holds no slot
            execution.lease.release_slot()
        async with execution.cancel_on_disconnect():
            await execution.grow(max(execution.lease.memory, memory), slot=True)
            execution.timings.step("queue")
            return await execution.in_thread(_prepare, operation, decoded, layer, execution.deadline.check)
    return _prepare(operation, decoded, layer, no_check)


def _prepare(operation: Operation[P, E, R], decoded: Decoded, layer: Layer | None, check: Check) -> P:
    if layer is None:
        return operation.prepare(decoded, check=check)
    with layer.blamed(decoded.fields):
        return operation.prepare(decoded, layer, check)


async def admit(
    operation: Operation[P, E, R], request: P, cost: Cost, decoded: Decoded, inline_flops: int, execution: Execution
) -> Strategy:
    """Wait until a request may compute, and return its execution strategy.

    Afterwards the lease holds the most memory that the request takes from now on (none if that is little, and the lease
    not counted), and a slot for a worker thread.

    inline_flops: see `choose_strategy`. Errors: MemoryLimit if the request can never have so much, Busy, Cancelled.
    """
    lease, limit = execution.lease, execution.admission.memory
    others = execution.admission.counted_requests - lease.counted  # without this request itself
    strategy = choose_strategy(cost, inline_flops, is_idle=not others)
    memory = 0
    if lease.counted or cost.compute > UNCOUNTED:
        execution.decoded_bytes = execution.decoded_bytes or decoded.nbytes
        lease.shrink(execution.decoded_bytes)
        memory = cost.peak(execution.decoded_bytes)
        if memory > limit:
            raise memory_limit_error(memory, limit, operation.advice(request), "allowed")
    if strategy == "thread" or memory:
        async with execution.cancel_on_disconnect():
            await execution.grow(memory, slot=strategy == "thread")
        execution.timings.step("queue")
    return strategy


async def compute(operation: Operation[P, E, R], request: P, cost: Cost, strategy: Strategy, execution: Execution) -> R:
    """The result of a request, without blocking the event loop for long.

    Errors: InvalidRequest, MemoryLimit, Busy, TimeLimit, Cancelled.
    """
    try:
        if strategy == "inline":
            result = operation.compute(request, no_check)
        else:
            async with execution.cancel_on_disconnect():
                result = await execution.in_thread(operation.compute, request, execution.deadline.check)
    except MemoryError as error:
        needed, available = cost.compute, None
        if isinstance(error, OutOfMemory):
            needed, available = error.needed, error.available
        drop_tracebacks(error)
    else:
        execution.timings.step("compute")
        execution.metadata = result.metadata
        return result
    raise memory_limit_error(needed, memory_left() if available is None else available, operation.advice(request))


async def encode(
    operation: Operation[P, E, R],
    request: P,
    result: R,
    cost: Cost,
    encoder: E,
    request_id: str,
    execution: Execution,
) -> Encoded:
    """The encoded answer. Chunks that are made one by one cost nothing yet. Errors: NotAcceptable, MemoryLimit."""
    lease = execution.lease
    if lease.counted:
        lease.shrink(execution.decoded_bytes + cost.results + cost.encode)
    if cost.encodes_inline:
        lease.release_slot()
        encoded = operation.encode(request, result, encoder, request_id)
    else:
        encoded = await execution.in_thread(operation.encode, request, result, encoder, request_id)
        lease.release_slot()
    if isinstance(encoded.chunks, list):
        execution.timings.step("encode")
        if lease.counted:  # nothing else is needed any longer
            lease.shrink(SENT_COPIES * sum(map(len, encoded.chunks)))
    return encoded
