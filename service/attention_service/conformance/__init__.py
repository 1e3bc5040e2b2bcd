"""Conformance: cases of attention with exact answers, and a judge of implementations that compute them.

- corners, gradient_corners: the tables of what implementations get wrong; changes: what edits a request
- requests: which corners a suite has, and the request of each
- suite: cases, each a request with its exact answer and its tolerances
- files: a suite as safetensors files with an index, for programs that do not have this service
- target: the implementation, a callable; arguments: what it is called with; gradients: how it is asked for them;
  judge: is its answer to a case right; runner: its answers to a whole suite
- law_checks: what holds for every right function, checked without a reference
- addressing_laws: what holds for every right function of another library, with ragged batches and paged caches
- call_arguments: how the arguments of such functions hold sequences, and parts of them
- report: what is printed of a result; cli: the commands
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from attention_service.conformance.addressing_laws import call_laws
    from attention_service.conformance.files import read, write
    from attention_service.conformance.law_checks import laws
    from attention_service.conformance.runner import run
    from attention_service.conformance.target import Unsupported

__all__ = ["Unsupported", "call_laws", "laws", "read", "run", "write"]
MODULES = {
    "Unsupported": "target",
    "call_laws": "addressing_laws",
    "laws": "law_checks",
    "read": "files",
    "run": "runner",
    "write": "files",
}


def __getattr__(name: str) -> Any:
    """Import a function when it is asked for: the command line imports this package for every command."""
    if name not in MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{MODULES[name]}"), name)
