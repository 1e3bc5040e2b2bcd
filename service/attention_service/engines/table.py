"""All functions whose calls are understood, by the name that a call gives."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from attention_service.engines import flash_attention, flashinfer, pytorch, vllm
from attention_service.engines.arguments import Arguments, Function
from attention_service.engines.call import Answer, Call
from attention_service.errors import InvalidValue
from attention_service.schemas.names import near

FUNCTIONS: Final[Mapping[str, Function]] = {
    **flash_attention.FUNCTIONS,
    **flashinfer.FUNCTIONS,
    **pytorch.FUNCTIONS,
    **vllm.FUNCTIONS,
}


def decode(name: str, given: Mapping[str, Any], version: int | None = None) -> Call | Answer:
    """A call by the name of its function, with the arguments of the library; the answer itself of one that merges.

    Errors: InvalidRequest of every kind, with a pointer to each argument at fault.
    """
    if name not in FUNCTIONS:
        raise InvalidValue.of("/call", "a function of docs/coming-from.md", name, near(str(name), FUNCTIONS))
    function = FUNCTIONS[name]
    call = function.make(Arguments.of(name, function, given, version))
    if isinstance(call, Call):
        call.check()
    return call
