"""What the pipeline runs: operations, what their requests cost, and the execution strategy that follows from that.

Each operation is defined where its code lives: attention in `pipeline/attention.py`, comparisons and heatmaps in the
`operation.py` of `comparison/` and `render/`. The pipeline knows them by this interface only.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Final, Generic, Literal, NamedTuple, Protocol, TypeVar

import numpy as np
from pydantic import BaseModel

from attention_service.attention.arrays import FLOATS, compute_dtype, widest
from attention_service.attention.cost import Memory
from attention_service.attention.result import Metadata
from attention_service.attention.spec import SOURCES
from attention_service.backends.base import Check, no_check
from attention_service.codecs.base import Codec
from attention_service.codecs.chunks import Encoded
from attention_service.codecs.decoded import Decoded, arrays_in, text_of
from attention_service.codecs.table import CODECS
from attention_service.layers.layer import Layer
from attention_service.schemas.request import AttentionRequest

# Bytes that a computation in the event loop may take: the system clears fresh memory in some milliseconds.
INLINE_MEMORY: Final = 2**23
# Array elements that are read, or cast to another type, in a few milliseconds; reading so many takes as long as the
# checks of one array or part by pydantic.
INLINE_ELEMENTS: Final = 2**20
ELEMENTS_PER_CHECK: Final = 2**13
# Fields whose arrays are neither read nor cast before a request is computed.
UNREAD: Final = frozenset({*SOURCES, "projection", "past_key", "past_value", "grad_output", "grad_logsumexp", "actual"})
# Bytes for each element of an array that is read: of a mask, of integers, of floats in the type that is computed in, of
# other floats, which are cast.
MASK_BYTES, INTEGER_BYTES, FLOAT_BYTES, CAST_BYTES = 1, 12, 1, 9
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


class PrepareCost(NamedTuple):
    """What preparing a request costs, by the shapes and types of its arrays alone.

    elements: array elements that are read; memory: bytes beside the decoded fields
    """

    elements: int
    memory: int

    @property
    def is_large(self) -> bool:
        """True if preparing takes more than a few milliseconds, or 8 MiB."""
        return self.elements > INLINE_ELEMENTS or self.memory > INLINE_MEMORY


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
    schemas: of the fields of a request; a field in the query of the address is refused
    """

    decoders: Mapping[str, Codec] = CODECS
    schemas: tuple[type[BaseModel], ...] = (AttentionRequest,)
    encoders: Mapping[str, E]

    def prepare_cost(self, decoded: Decoded) -> PrepareCost:
        """What `prepare` costs."""
        elements = memory = 0
        computed: np.dtype | None = None
        for name, value in decoded.fields.items():
            for array in () if name in UNREAD else arrays_in(value):
                computed = _computed_dtype(decoded) if computed is None else computed
                elements += ELEMENTS_PER_CHECK + array.size
                memory += array.size * bytes_of(array.dtype, computed)
        return PrepareCost(elements, memory)

    @abstractmethod
    def prepare(self, decoded: Decoded, layer: Layer | None = None, check: Check = no_check) -> P:
        """Validate and plan.

        layer: the stored layer that the request names; check: raises once the request has ended

        Errors: InvalidRequest of every kind, and what `check` raises.
        """

    def prepared(self, decoded: Decoded, layer: Layer | None) -> P | None:
        """The prepared request, if that takes microseconds: no array is looked at, and none of the layer cast."""
        return None

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


def bytes_of(dtype: np.dtype, computed: np.dtype) -> int:
    """Bytes for each element of an array that is read. computed: the type of floats that is computed in"""
    if dtype.kind in "iu":
        return INTEGER_BYTES
    return MASK_BYTES if dtype == np.bool_ else FLOAT_BYTES if dtype == computed else CAST_BYTES


def _computed_dtype(decoded: Decoded) -> np.dtype:
    """The type that a request is computed in, as far as its fields show it."""
    asked = text_of(decoded.fields.get("dtype"))
    if asked is not None and asked in FLOATS:
        return compute_dtype(FLOATS[asked])
    given = [decoded.fields.get(name) for name in SOURCES]
    return compute_dtype(widest([array.dtype for array in given if isinstance(array, np.ndarray)]))
