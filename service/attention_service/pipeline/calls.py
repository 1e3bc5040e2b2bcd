"""Calls of other libraries as an operation: their arguments become requests, whose results become one answer."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Final, NamedTuple

import numpy as np

from attention_service.attention.arrays import FLOATS
from attention_service.attention.cost import copied_bytes
from attention_service.attention.result import Metadata, Result
from attention_service.attention.shapes import Sizes
from attention_service.backends.base import Backend, Check, no_check
from attention_service.backends.registry import Backends
from attention_service.codecs import typed_arrays
from attention_service.codecs.base import Codec
from attention_service.codecs.chunks import Encoded
from attention_service.codecs.decoded import Decoded, arrays_in
from attention_service.codecs.table import CODECS
from attention_service.codecs.typed_arrays import KEYS
from attention_service.engines.call import MOST, Answer, Call, Fields, Merge
from attention_service.engines.pytorch import MOST as MOST_BROADCAST
from attention_service.engines.table import decode
from attention_service.errors import InvalidRequest, ShapeMismatch, child
from attention_service.layers.layer import Layer
from attention_service.pipeline.attention import may_wait
from attention_service.pipeline.merge import merge_cost
from attention_service.pipeline.operation import CAST_BYTES, ELEMENTS_PER_CHECK, Cost, Operation, PrepareCost, bytes_of
from attention_service.pipeline.prepare import plan_of_fields, run_fields
from attention_service.schemas.call import CallRequest
from attention_service.schemas.validate import validate
from attention_service.version import __version__

# Copies of gathered tokens in float64: as they are stored, as numbers, and stacked.
COPIES: Final = 3
# Bytes of an array of weights beside its numbers, and of its name and place while it is encoded.
ARRAY: Final = 200
NAMED: Final = 1200
# Bytes of a sequence: its lengths, and where its tokens are. Preparing one takes as long as reading so many elements.
BYTES_PER_SEQUENCE: Final = 256
ELEMENTS_PER_SEQUENCE: Final = 2**8
# Bytes of an element of a table of pages, or of boundaries, while it is checked.
TABLE_BYTES: Final = 24
# The axes that tokens have at least, and those of tokens with an axis of sequences.
TOKEN_AXES, BATCH_AXES = 3, 4
JSON: Final = "application/json"


class PreparedCall(NamedTuple):
    """A call that is decoded. weights: True if they are asked for; largest: bytes for computing its largest request"""

    decoded: Decoded
    call: Call | Merge
    dtype: np.dtype
    weights: bool
    backend: Backend
    device: str
    largest: int


class CallOperation(Operation[PreparedCall, Codec, Result]):
    """POST /attention/call, and the same on the command line."""

    encoders = CODECS
    schemas = (CallRequest,)

    def __init__(self, backends: Backends) -> None:
        self._backends = backends

    def prepare_cost(self, decoded: Decoded) -> PrepareCost:
        return call_prepare_cost(decoded)

    def prepare(self, decoded: Decoded, layer: Layer | None = None, check: Check = no_check) -> PreparedCall:
        """The call of a request. Errors: InvalidRequest, with pointers into /arguments, and what `check` raises."""
        body = validate(CallRequest, decoded.fields, decoded.unread)
        device, weights = body.device or "auto", "attention_weights" in (body.include or ())
        backend = self._backends.choose(body.backend or "auto", device)
        with in_arguments():
            call = decoded_call(body, decoded)
            largest = largest_bytes(call, backend, device, weights=weights) if isinstance(call, Call) else 0
        if weights and isinstance(call, Call) and len(call.query.lengths) > MOST:
            expected = f"at most {MOST} sequences beside attention_weights, an array each"
            raise ShapeMismatch.at("/include", expected, str(len(call.query.lengths)))
        check()
        return PreparedCall(decoded, call, FLOATS[body.dtype or "float64"], weights, backend, device, largest)

    def may_wait(self, decoded: Decoded) -> bool:
        return may_wait(self._backends, decoded)

    def cost(self, request: PreparedCall, encoder: Codec) -> Cost:
        """The largest request, the answer in float64 and in its own type, and the weights of all sequences."""
        call = request.call
        if isinstance(call, Merge):
            return merge_cost(call.parts, encoder, request.decoded)
        arrays = len(call.query.lengths) if request.weights else 0
        results = _answer_bytes(call, arrays)
        return Cost(
            flops=math.inf,
            compute=request.largest + 2 * results + BYTES_PER_SEQUENCE // 2 * len(call.query.lengths),
            results=2 * results,
            waits_for_gpu=request.backend.is_gpu(request.device),
            encode=encoder.encode_bytes(results, request.decoded) + NAMED * arrays,
            encodes_inline=results < encoder.encode_inline,
        )

    def compute(self, request: PreparedCall, check: Check) -> Result:
        """The result. Errors: InvalidRequest of every kind, and what `check` raises."""
        computed = {"backend": request.backend.name, "device": request.device}
        last: Metadata | None = None
        masked = 0

        def run(fields: Fields) -> Mapping[str, Any]:
            nonlocal last, masked
            result = run_fields(fields | computed, request.backend, check)
            last, masked = result.metadata, masked + result.metadata.fully_masked_rows
            return result.arrays

        with in_arguments():
            answer = request.call.answer(run, weights=request.weights, check=check)
        typed = answer.rounded(request.dtype)
        arrays: dict[str, Any] = {"output": typed.output, "logsumexp": typed.logsumexp}
        if typed.weights is not None:
            arrays["attention_weights"] = typed.weights
        return Result(arrays, _metadata(request, answer, last, masked))

    def encode(self, request: PreparedCall, result: Result, encoder: Codec, request_id: str) -> Encoded:
        """The answer: weights as a list, in formats of tensors by their numbers."""
        fields = dict(result.arrays)
        if "attention_weights" in fields and encoder.media_type != JSON:
            fields["attention_weights"] = {str(n): array for n, array in enumerate(fields["attention_weights"])}
        metadata = {**result.metadata.present, "request_id": request_id, "version": __version__}
        return encoder.encode(fields | {"metadata": metadata}, request.decoded)

    def advice(self, request: PreparedCall) -> str:
        return "include without attention_weights, and fewer sequences at a time, need less"


def _answer_bytes(call: Call, arrays: int) -> int:
    """Bytes of the answer of a call in float64. arrays: of weights"""
    query, rows = call.query, call.query.rows
    assert rows is not None
    numbers = rows.slots * rows.length * query.heads * (call.value.features + 1)
    scores = int((query.lengths * call.keys).sum()) if arrays else 0
    return 8 * (numbers + query.heads * scores) + ARRAY * arrays


def _metadata(request: PreparedCall, answer: Answer, last: Metadata | None, masked: int) -> Metadata:
    """The sizes of the whole call; how it was computed, as of its last request. masked: rows of all its requests"""
    call = request.call
    kernel, device, scale = ("none", "cpu", 1.0) if last is None else (last.kernel, last.device, last.scale)
    if isinstance(call, Call):
        sizes, masked = sizes_of(call), masked + keyless_rows(call)
    else:
        sizes = Sizes(1, 1, 1, 0, 0, 0, answer.output.shape[-1])
        masked = int(np.isneginf(answer.logsumexp).sum())
    return Metadata(request.backend.name, device, request.dtype.name, kernel, *sizes, scale, masked, ())


def decoded_call(body: CallRequest, decoded: Decoded) -> Call | Merge:
    """The call that a validated request makes. Errors: InvalidRequest of every kind, with pointers to arguments."""
    return decode(body.call, arguments_of(body), body.version, untyped_arguments(decoded))


def arguments_of(body: CallRequest) -> dict[str, Any]:
    """The arguments of a call by name, pairs of arrays as lists. Errors: InvalidArray."""
    return {name: _listed(name, value) for name, value in body.arguments.items()}


def untyped_arguments(decoded: Decoded) -> set[str]:
    """The names of the arguments whose arrays came as lists."""
    return {name for name in decoded.fields["arguments"] if child("/arguments", name) in decoded.untyped}


def exact_answer(call: Call, backend: Backend, check: Check) -> Answer:
    """The answer of a call, in float64, in the axes and the base of its function. Errors: as of Call.answer."""
    return call.answer(lambda fields: run_fields(fields, backend, check).arrays, check=check)


def call_prepare_cost(decoded: Decoded, *, parts: bool = False) -> PrepareCost:
    """What decoding a call costs: each sequence, all arguments but tokens, and a copy of what a function returned.

    parts: True if the sequences are cut into parts, too, as comparisons do
    """
    arguments = decoded.fields.get("arguments")
    given = arguments if isinstance(arguments, dict) else {}
    count = sequence_bound([array for value in given.values() for array in arrays_in(value)])
    elements, memory = ELEMENTS_PER_SEQUENCE * count, (1 + parts) * BYTES_PER_SEQUENCE * count
    for name, value in given.items():
        for array in arrays_in(value):
            elements += ELEMENTS_PER_CHECK
            is_read = array.ndim < TOKEN_AXES or is_table(array) or "mask" in name or "scale" in name
            element_bytes = TABLE_BYTES if is_table(array) else bytes_of(array.dtype, FLOATS["float64"])
            elements, memory = elements + is_read * array.size, memory + is_read * array.size * element_bytes
    for array in arrays_in(decoded.fields.get("actual")):
        elements, memory = elements + array.size, memory + array.nbytes + CAST_BYTES * array.size
    return PrepareCost(elements, memory)


def is_table(array: np.ndarray) -> bool:
    """True for integers that are no codes of 8 bits: lengths, boundaries, indices, pages."""
    return array.dtype.kind in "iu" and array.itemsize > 1


def sequence_bound(arrays: list[np.ndarray]) -> int:
    """At least the number of sequences of a call with these arguments, by shapes alone.

    Sequences are on the first axis of integers and of arrays with four axes; torch broadcasts all leading axes.
    """
    counts = [len(array) for array in arrays if array.ndim and is_table(array)]
    leading = [math.prod(array.shape[:-3]) for array in arrays if array.ndim >= BATCH_AXES]
    return max([1, *counts, *leading, min(math.prod(leading), MOST_BROADCAST)])


@contextmanager
def in_arguments() -> Iterator[None]:
    """Points the faults of arguments into /arguments. Errors: InvalidRequest of every kind."""
    try:
        yield
    except InvalidRequest as error:
        own = ("/call", "/version", "")
        faults = [
            fault if fault.pointer in own else replace(fault, pointer=f"/arguments{fault.pointer}")
            for fault in error.faults
        ]
        raise type(error)(*faults) from None


def largest_bytes(call: Call, backend: Backend, device: str, *, weights: bool) -> int:
    """Bytes for computing the request of a call that takes most, from arrays that have its shapes only.

    Errors: InvalidRequest of every kind, for the options of the call.
    """
    most = 0
    for group in call.largest():
        try:
            fields = call.request(group, shapes_only=True)
            fields["include"] = ["logsumexp", *["attention_weights"] * weights]
            spec, plan = plan_of_fields(fields)
        except InvalidRequest as error:
            raise call.renamed(error) from None
        arrays = sum(array.nbytes for array in spec.sources.values())
        arrays += sum(array.nbytes for array in (spec.past_key, spec.past_value) if array is not None)
        most = max(most, COPIES * arrays + backend.peak_bytes(plan, device, copied_bytes(plan, spec)))
    return most


def sizes_of(call: Call) -> Sizes:
    """The sizes of a call: of all its sequences, the most queries and keys that one has."""
    query, key = call.query, call.key
    longest = int(query.lengths.max(initial=0)), int(call.keys.max(initial=0))
    heads = query.heads, key.heads
    return Sizes(*heads, len(query.lengths), *longest, query.features, call.value.features)


def keyless_rows(call: Call) -> int:
    """The rows of all heads of sequences without keys."""
    return call.query.heads * int(call.query.lengths[call.keys == 0].sum())


def _listed(name: str, value: Any) -> Any:
    """A pair of arrays as a list of them: tensors with the names 0 and 1, or typed arrays in a list of JSON."""
    if isinstance(value, dict) and value.keys() == {"0", "1"}:
        return [value["0"], value["1"]]
    if isinstance(value, list) and value and all(isinstance(item, dict) and item.keys() == KEYS for item in value):
        return [typed_arrays.decode(item, f"/{name}/{n}") for n, item in enumerate(value)]
    return value
