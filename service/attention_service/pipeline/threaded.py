"""The path of requests that are answered whole by one function in a worker thread: comparisons and pictures."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Final, Generic, TypeVar

from pydantic import ByteSize

from attention_service.attention.result import Metadata
from attention_service.backends.base import Check
from attention_service.codecs import Codec
from attention_service.codecs.chunks import MAX_CHUNK, Encoded, encoded
from attention_service.codecs.decoded import Body, Decoded
from attention_service.errors import MemoryLimit
from attention_service.layers.layer import Layer
from attention_service.pipeline.decode import decode
from attention_service.pipeline.engine import Engine
from attention_service.pipeline.execution import Execution
from attention_service.runtime.machine import memory_left

P = TypeVar("P")

# Bytes for each number of a stored layer, which is cast to the type of the request.
LAYER_BYTES: Final = 8


class Operation(ABC, Generic[P]):
    """An operation on a request. P: a request that is validated and planned

    what: in errors, like "a comparison"
    """

    what: str

    @abstractmethod
    def prepare(self, decoded: Decoded) -> P:
        """Validate and plan. Errors: InvalidRequest of every kind."""

    @abstractmethod
    def memory(self, prepared: P, engine: Engine) -> int:
        """Upper bound of the memory for `answer`, beyond the arrays of the request, in bytes."""

    @abstractmethod
    def answer(self, prepared: P, engine: Engine, request_id: str, check: Check) -> tuple[bytes, Metadata]:
        """The body of the answer, and the metadata of what was computed.

        Errors: ServiceError of every kind, MemoryError, and what `check` raises.
        """


async def run_in_thread(
    operation: Operation[P],
    engine: Engine,
    body: Body,
    decoder: Codec,
    media_type: str,
    execution: Execution,
    request_id: str,
) -> Encoded:
    """The encoded answer to the request in a body, see attention_service.pipeline.run. media_type: of the answer

    Errors: ServiceError of every kind, Cancelled.
    """
    execution.begin(len(body))
    decoded = await decode(decoder, body, engine.settings.max_body_bytes, execution)
    del body
    async with execution.cancel_on_disconnect():
        layer = await engine.layers.of(decoded, execution)
        prepared = await execution.in_thread(_prepare, operation, decoded, layer)
        execution.lease.release_slot()
        execution.timings.step("prepare")
        needed = operation.memory(prepared, engine) + (0 if layer is None else LAYER_BYTES * layer.elements)
        await execution.grow(decoded.nbytes + needed, slot=True, last=True)
        execution.timings.step("queue")
        content, execution.metadata = await execution.in_thread(
            _answer, operation, prepared, engine, request_id, needed, execution
        )
        execution.timings.step("compute")
    execution.lease.release_slot()
    execution.lease.shrink(len(content))
    chunks = (content[start : start + MAX_CHUNK] for start in range(0, len(content), MAX_CHUNK))
    answer = encoded(media_type, chunks, len(content))
    execution.timings.step("encode")
    return answer


def _prepare(operation: Operation[P], decoded: Decoded, layer: Layer | None) -> P:
    """The prepared request, with the fields of the layer that it names. Errors: InvalidRequest of every kind."""
    if layer is None:
        return operation.prepare(decoded)
    with layer.blamed(decoded.fields):
        return operation.prepare(decoded._replace(fields=layer.merged(decoded.fields)))


def _answer(
    operation: Operation[P], prepared: P, engine: Engine, request_id: str, needed: int, execution: Execution
) -> tuple[bytes, Metadata]:
    try:
        return operation.answer(prepared, engine, request_id, execution.deadline.check)
    except MemoryError:
        pass
    available = memory_left()
    left = "" if available is None else f", of {ByteSize(available).human_readable()} that are free"
    about = f"one that needs about {ByteSize(needed).human_readable()}{left}"
    raise MemoryLimit.at("", f"{operation.what} whose memory can be had", about, "fewer queries or keys need less")
