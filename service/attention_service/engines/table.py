"""All functions whose calls are understood, by the name that a call gives."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Set as AbstractSet
from importlib.resources import files
from typing import Any, Final

from attention_service.engines import flash_attention, flashinfer, pytorch, vllm
from attention_service.engines.arguments import Arguments, read_functions
from attention_service.engines.call import Call, Merge
from attention_service.errors import InvalidValue
from attention_service.schemas.names import near

FUNCTIONS: Final = read_functions(files("attention_service.engines").joinpath("arguments.txt").read_text("utf-8"))
# What reads the arguments of each, by its short name.
READERS: Final[Mapping[str, Callable[[Arguments], Call | Merge]]] = {
    "func": flash_attention.func,
    "varlen": flash_attention.varlen,
    "kvcache": flash_attention.kvcache,
    "single_prefill": flashinfer.single_prefill,
    "single_decode": flashinfer.single_decode,
    "decode": flashinfer.decode,
    "paged": flashinfer.paged_prefill,
    "ragged": flashinfer.ragged_prefill,
    "mla": flashinfer.mla,
    "trt_decode": flashinfer.trtllm_decode,
    "trt_context": flashinfer.trtllm_context,
    "merge_state": flashinfer.merge_state,
    "merge_states": flashinfer.merge_states,
    "sdpa": pytorch.sdpa,
    "varlen_attn": pytorch.varlen,
    "attention": vllm.attention,
}


def decode(
    name: str, given: Mapping[str, Any], version: int | None = None, untyped: AbstractSet[str] = frozenset()
) -> Call | Merge:
    """A call by the name of its function, with the arguments of the library.

    untyped: names of arrays that came as lists

    Errors: InvalidRequest of every kind, with a pointer to each argument at fault.
    """
    if not isinstance(name, str) or name not in FUNCTIONS:
        raise InvalidValue.of("/call", f"one of {', '.join(FUNCTIONS)}", name, near(str(name), FUNCTIONS))
    function = FUNCTIONS[name]
    call = READERS[function.name](Arguments.of(name, function, given, version, untyped))
    if isinstance(call, Call):
        call.check()
    return call
