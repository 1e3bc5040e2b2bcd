"""What the pipeline runs: operations, what their requests cost, and the execution strategy that follows from that.

Each operation is defined where its code lives: attention in `pipeline/attention.py`, comparisons and heatmaps in the
`operation.py` of `comparison/` and `render/`. The pipeline knows them by this interface only.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Final, Generic, Literal, NamedTuple, Protocol, TypeVar

import numpy as np

from attention_service.attention.cost import Memory
from attention_service.attention.result import Metadata
from attention_service.attention.spec import SOURCES
from attention_service.backends.base import Check, no_check
from attention_service.codecs.base import Codec
from attention_service.codecs.chunks import Encoded
from attention_service.codecs.decoded import Decoded
from attention_service.codecs.table import CODECS
from attention_service.layers.layer import Layer

# Bytes that a computation in the event loop may take: the system clears fresh memory in some milliseconds.
INLINE_MEMORY: Final = 2**23
# Numbers that are looked at in a few milliseconds, and as how many each array counts: checks that pydantic makes.
INLINE_NUMBERS: Final = 2**20
ARRAY_NUMBERS: Final = 2**13
# How many times as much is computed in the event loop while no other counted request is in progress: milliseconds.
IDLE_FACTOR: Final = 20

# Where a prepared request is computed: in the event loop, or in a worker thread.
Strategy = Literal["inline", "thread"]


class Cost(NamedTuple):
    """What a prepared request costs.

    flops: floating-point operations; inf if it is never computed in the event loop
    compute: bytes while it is computed, beyond the decoded fields, results included
    results: bytes that are kept until its results are encoded
    waits_for_gpu: True if a GPU computes it
    encode: bytes beside the results while they are encoded
    encodes_inline: True if the results are encoded in the event loop, as that takes milliseconds or is done by chunks
    """

    flops: float
    compute: int
    results: int
    waits_for_gpu: bool = False
    encode: int = 0
    encodes_inline: bool = True

    def peak(self, decoded: int) -> int:
        """The most memory from now on. decoded: bytes of the decoded fields"""
        return Memory(0, decoded, self.compute, self.results, self.encode).peak


def choose_strategy(cost: Cost, inline_flops: int, *, is_idle: bool) -> Strategy:
    """The execution strategy for what a request costs.

    inline_flops: most operations of a small request; is_idle: True if no other counted request is in progress: then
    more is computed in the event loop, as waking a thread takes longer
    """
    most = inline_flops * IDLE_FACTOR if is_idle else inline_flops
    if cost.waits_for_gpu or cost.compute > INLINE_MEMORY or cost.flops > most:
        return "thread"
    return "inline"


class Preparing(NamedTuple):
    """What preparing a request costs, by the shapes of its arrays alone.

    numbers: that are looked at; memory: bytes beside the decoded fields
    """

    numbers: int
    memory: int

    @property
    def is_large(self) -> bool:
        """True if it takes more than a few milliseconds, or 8 MiB."""
        return self.numbers > INLINE_NUMBERS or self.memory > INLINE_MEMORY


class HasMetadata(Protocol):
    """A result of an operation."""

    @property
    def metadata(self) -> Metadata | None:
        """What metrics and log tell of it; None for what no request asks for."""


P = TypeVar("P")
E = TypeVar("E")
R = TypeVar("R", bound=HasMetadata)


class Operation(ABC, Generic[P, E, R]):
    """What requests of one kind decode, cost, compute and produce.

    P: a prepared request, validated and planned; E: what encodes a result; R: a result

    decoders: of the bodies, by their media types
    encoders: of the results, by their media types; the first is the default, unless the type of the request is there
    cast_bytes: of a number that no query, key or value comes from, while a request is prepared
    """

    decoders: Mapping[str, Codec] = CODECS
    encoders: Mapping[str, E]
    cast_bytes = 8

    def preparing(self, decoded: Decoded) -> Preparing:
        """What `prepare` costs: it looks at all numbers, and may cast those that no query, key or value comes from."""
        numbers = memory = 0
        for name, array in decoded.arrays():
            numbers += ARRAY_NUMBERS + array.size
            if name not in SOURCES:
                memory += array.size * (1 if array.dtype == np.bool_ else self.cast_bytes)
        return Preparing(numbers, memory)

    @abstractmethod
    def prepare(self, decoded: Decoded, layer: Layer | None = None, check: Check = no_check) -> P:
        """Validate and plan.

        layer: the stored layer that the request names; check: raises once the request has ended

        Errors: InvalidRequest of every kind, and what `check` raises.
        """

    def is_planned(self, decoded: Decoded, layer: Layer | None) -> bool:
        """True if `prepare` takes microseconds: it need not look at arrays, nor cast those of the layer."""
        return False

    def may_wait(self, decoded: Decoded) -> bool:
        """True if `prepare` may wait for a module that is imported, or for another machine."""
        return False

    @abstractmethod
    def cost(self, request: P, encoder: E) -> Cost:
        """What a request costs from now on."""

    @abstractmethod
    def compute(self, request: P, check: Check) -> R:
        """The result. Errors: InvalidRequest of every kind, MemoryError, and what `check` raises."""

    @abstractmethod
    def encode(self, request: P, result: R, encoder: E, request_id: str) -> Encoded:
        """The headers and chunks of an answer. Errors: NotAcceptable, MemoryLimit."""

    def advice(self, request: P) -> str:
        """A hint how a request would need less memory."""
        return "fewer queries or keys at a time need less"
