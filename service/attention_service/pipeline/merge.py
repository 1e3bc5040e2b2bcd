"""Merging what attention over parts of the keys returned, as an operation: POST /attention/merge."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

from attention_service.attention.result import Result
from attention_service.backends.base import Check, no_check
from attention_service.codecs.base import Codec
from attention_service.codecs.chunks import Encoded
from attention_service.codecs.decoded import Decoded
from attention_service.codecs.table import CODECS
from attention_service.engines.partial import State
from attention_service.layers.layer import Layer
from attention_service.pipeline.operation import ELEMENTS_PER_CHECK, Cost, Operation, PrepareCost
from attention_service.pipeline.parts import Parts, make_parts
from attention_service.schemas.merge import MergeRequest

# Copies of an output and of all logsumexps in float64 while parts are added, and operations for each number.
OUTPUTS: Final = 5
SUMS: Final = 4
STEPS: Final = 8
# Operations that take as long as the steps of a part of few numbers: tens of microseconds.
PART: Final = 2**18


def merge_cost(states: Sequence[State], encoder: Codec, decoded: Decoded) -> Cost:
    """What merging of parts costs."""
    output, count = states[0].output, len(states)
    rows = math.prod(output.shape[:-1])
    results = 8 * (output.size + rows)
    memory = 8 * (OUTPUTS * output.size + SUMS * rows * (count + 1))
    encode = encoder.encode_bytes(results, decoded)
    inline = results < encoder.encode_inline
    flops = (STEPS * output.size + PART) * count
    return Cost(flops, memory, results, encode=encode, encodes_inline=inline)


class MergeOperation(Operation[Parts, Codec, Result]):
    """POST /attention/merge."""

    encoders = CODECS
    schemas = (MergeRequest,)

    def prepare_cost(self, decoded: Decoded) -> PrepareCost:
        """The checks of each part. Their numbers are read when they are merged."""
        parts = decoded.fields.get("parts")
        count = len(parts) if isinstance(parts, list | dict) else 0
        return PrepareCost(2 * ELEMENTS_PER_CHECK * count, 0)

    def prepare(self, decoded: Decoded, layer: Layer | None = None, check: Check = no_check) -> Parts:
        return make_parts(decoded)

    def cost(self, request: Parts, encoder: Codec) -> Cost:
        """A few passes over each part."""
        return merge_cost(request.states, encoder, request.decoded)

    def compute(self, request: Parts, check: Check) -> Result:
        return request.merged(check)

    def encode(self, request: Parts, result: Result, encoder: Codec, request_id: str) -> Encoded:
        return encoder.encode(result.arrays, request.decoded)
