"""All functions whose calls are understood, by the name that a call gives."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Set as AbstractSet
from importlib.resources import files
from typing import Any, Final, NamedTuple

import numpy as np

from attention_service.engines import flash_attention, flashinfer, pytorch, vllm
from attention_service.engines.arguments import Arguments, read_functions
from attention_service.engines.call import Call, Merge
from attention_service.errors import InvalidValue
from attention_service.schemas.names import near

FUNCTIONS: Final = read_functions(files("attention_service.engines").joinpath("arguments.txt").read_text("utf-8"))


class Reader(NamedTuple):
    """What reads the arguments of a function; and those whose first axis has its sequences, unless they have 3 axes."""

    read: Callable[[Arguments], Call | Merge]
    sequences: tuple[str, ...] = ()


# By the short names of functions.
READERS: Final[Mapping[str, Reader]] = {
    "func": Reader(flash_attention.func, ("q",)),
    "varlen": Reader(flash_attention.varlen, ("cu_seqlens_q", "q")),
    "kvcache": Reader(flash_attention.kvcache, ("cu_seqlens_q", "q")),
    "single_prefill": Reader(flashinfer.single_prefill),
    "single_decode": Reader(flashinfer.single_decode),
    "decode": Reader(flashinfer.decode, ("indptr",)),
    "paged": Reader(flashinfer.paged_prefill, ("qo_indptr",)),
    "ragged": Reader(flashinfer.ragged_prefill, ("qo_indptr",)),
    "mla": Reader(flashinfer.mla, ("cum_seq_lens_q", "qo_indptr")),
    "trt_decode": Reader(flashinfer.trtllm_decode, ("seq_lens",)),
    "trt_context": Reader(flashinfer.trtllm_context, ("seq_lens",)),
    "merge_state": Reader(flashinfer.merge_state),
    "merge_states": Reader(flashinfer.merge_states),
    "sdpa": Reader(pytorch.sdpa, pytorch.ARRAYS),
    "varlen_attn": Reader(pytorch.varlen, ("cu_seq_q",)),
    "attention": Reader(vllm.attention, ("query_start_loc",)),
}


def sequence_count(name: Any, given: Mapping[str, Any]) -> int:
    """At least the number of sequences of a call, by the shapes of its arguments; 0 for an unknown function."""
    reader = READERS[FUNCTIONS[name].name] if isinstance(name, str) and name in FUNCTIONS else None
    if reader is None:
        return 0
    if reader.read is pytorch.sdpa:
        return pytorch.sequence_count([given.get(one) for one in reader.sequences])
    arrays = [given.get(one) for one in reader.sequences]
    return max([1, *(len(one) for one in arrays if isinstance(one, np.ndarray) and one.ndim not in (0, 3))])


def decode(
    name: str, given: Mapping[str, Any], version: int | None = None, untyped: AbstractSet[str] = frozenset()
) -> Call | Merge:
    """A call by the name of its function, with the arguments of the library.

    untyped: names of arrays that came as lists

    Errors: InvalidRequest of every kind, with a pointer to each argument at fault.
    """
    if not isinstance(name, str) or name not in FUNCTIONS:
        raise InvalidValue.of("/call", "a function of docs/coming-from.md", name, near(str(name), FUNCTIONS))
    function = FUNCTIONS[name]
    call = READERS[function.name].read(Arguments.of(name, function, given, version, untyped))
    if isinstance(call, Call):
        call.check()
    return call
