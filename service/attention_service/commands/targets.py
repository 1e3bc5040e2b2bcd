"""Functions of the user, as commands call them."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Collection, Mapping
from contextlib import redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from attention_service.commands.terminal import FAILED, CommandError

if TYPE_CHECKING:  # commands import what they need when they run
    from attention_service.codecs.decoded import Decoded
    from attention_service.conformance.target import Target

SUFFIXES: Final = (".json", ".npz", ".safetensors", ".pt", ".npy")
# Fields that say how arrays are returned, or are said by the arrays themselves: for functions that have a parameter.
RETURNED: Final = {
    *("dtype", "backend", "device", "include", "select_heads", "select_queries", "average_heads", "top_k"),
    *("query_tokens", "key_tokens", "encoding", "logsumexp_base", "gradients"),
}
# Fields whose arrays have the type of the request; all others keep the type that they came with.
OPERANDS: Final = frozenset({"query", "key", "value", "input", "context", "past_key", "past_value", "projection"})
# Arguments of functions of other libraries that are two integers.
SIDES: Final = ("window_size",)
ADAPTER: Final = (
    "give a function of your own that takes the fields and calls it: docs/compare.md, A function in the place of a file"
)


def add_options(command: argparse.ArgumentParser) -> None:
    """Add the options that say how a function is called."""
    command.add_argument(
        "--torch", action="store_true", help="call the function with tensors of torch in the place of ndarrays"
    )
    command.add_argument("--device", help="the device of these tensors, such as cuda; implies --torch (default: cpu)")


def is_target(text: str) -> bool:
    """True for `module:function`, unless there is such a file."""
    return ":" in text and Path(text).suffix not in SUFFIXES and not Path(text).exists()


def load(name: str, options: argparse.Namespace) -> Target:
    """The function `module:function`, also of a module in this directory. Errors: CommandError."""
    from attention_service.conformance.target import TargetFailed, WithTensors, load_target

    sys.path.insert(0, os.getcwd())  # as `python -m` does
    try:
        with redirect_stdout(sys.stderr):  # standard output is for the report
            target = load_target(name)
    except (ImportError, ValueError, TargetFailed) as error:
        raise CommandError(str(error), FAILED) from None
    if not options.torch and options.device is None:
        return target
    device = options.device or "cpu"
    try:
        return WithTensors(target, device)
    except ModuleNotFoundError:
        raise CommandError("--torch: expected torch, got no such module (pip install torch)", FAILED) from None
    except Exception as error:  # torch has many for a device that it does not know, or cannot use
        reason = str(error).partition("\n")[0]
        raise CommandError(f"--device: expected a device that torch has, got {device} ({reason})", FAILED) from None


def answer_of(name: str, options: argparse.Namespace, decoded: Decoded, field: str) -> Any:
    """What a function returns for a request or a call, by name, arrays as ndarrays.

    decoded: arguments of a call that came as lists become those that the function is called with
    field: that the answer stands for, actual or against

    Errors: CommandError, InvalidRequest.
    """
    from attention_service.codecs.array_objects import as_numpy
    from attention_service.commands.files import holds_call
    from attention_service.conformance.target import present
    from attention_service.library.engine_calls import returned

    target = load(name, options)
    if holds_call(decoded):
        return _checked(name, returned(_run(name, target, _of_call(target, decoded))))
    found = present(_run(name, target, _of_request(name, target, decoded)))
    return as_numpy(_checked(name, found), f"/{field}")


def _run(name: str, target: Target, arguments: Mapping[str, Any]) -> Any:
    """What a function returns. Errors: CommandError for whatever it raises."""
    from attention_service.conformance.target import TargetFailed, Unsupported, run

    try:
        with redirect_stdout(sys.stderr):
            return run(target, arguments)
    except Unsupported as error:
        raise CommandError(f"{name} does not support this request: {error}", FAILED) from None
    except (Exception, SystemExit) as error:  # of somebody else's code: anything, but no exit status of its choice
        raise CommandError(str(TargetFailed(name, error, target)), FAILED) from None


def _checked(name: str, found: dict[str, Any]) -> dict[str, Any]:
    """The arrays that a function returned, as they are. Errors: CommandError if there is none."""
    if not found:
        raise CommandError(f"{name}: expected the output or a dict of arrays, got nothing", FAILED)
    return found


def _of_call(target: Target, decoded: Decoded) -> dict[str, Any]:
    """The arguments of a call that a function has parameters for. Errors: InvalidRequest of every kind."""
    from attention_service.comparison.calls.request import call_question, typed_arguments
    from attention_service.comparison.question import ANSWERS
    from attention_service.library.engine_calls import taken

    asked = decoded._replace(fields={key: value for key, value in decoded.fields.items() if key not in ANSWERS})
    call_question(asked)  # arguments are refused before it runs
    decoded.fields["arguments"] = typed_arguments(asked)
    return {key: _as_parameter(key, value) for key, value in taken(target, decoded.fields["arguments"]).items()}


def _as_parameter(name: str, value: Any) -> Any:
    """An argument as functions take it: pairs, of which the sides of a window are no array, as tuples."""
    value = value.tolist() if name in SIDES and hasattr(value, "tolist") else value
    return tuple(value) if isinstance(value, list) else value


def _of_request(name: str, target: Target, decoded: Decoded) -> dict[str, Any]:
    """The fields of a request as arguments. Errors: CommandError for parameters of other names, InvalidRequest."""
    from attention_service.comparison.question import ANSWERS
    from attention_service.conformance.target import parameters

    fields = {key: value for key, value in decoded.fields.items() if key not in ANSWERS}
    known = parameters(target)
    arguments = _arguments(decoded._replace(fields=fields), frozenset(known or ()))
    if known is not None:
        _check(name, known, arguments)
    return arguments


def _arguments(decoded: Decoded, asked: Collection[str]) -> dict[str, Any]:
    """The fields of a request as arguments: those that say what to compute, and are not at their defaults.

    asked: names of parameters, which are given whatever the request says. Errors: InvalidRequest of every kind.
    """
    from attention_service.attention.operands import as_cast
    from attention_service.attention.roles import DEFAULT_LAYOUTS
    from attention_service.comparison.question import make_question
    from attention_service.schemas.compare import CompareRequest
    from attention_service.schemas.request import AttentionRequest

    question = make_question(decoded)
    spec = as_cast(question.spec, question.plan.dtype)
    defaults = {name: field.default for name, field in CompareRequest.model_fields.items()}
    defaults["layout"] = DEFAULT_LAYOUTS.get(max(array.ndim for array in spec.sources.values()))
    of_judge = CompareRequest.model_fields.keys() - AttentionRequest.model_fields.keys() - RETURNED
    found = {}
    for name in (name for name in defaults if name in decoded.fields):
        value = decoded.fields[name]
        is_default = value is None or (isinstance(value, str | bool) and value == defaults[name])
        if name not in of_judge and (name in asked or not (is_default or name in RETURNED)):
            keeps_type = name not in decoded.untyped | OPERANDS
            found[name] = _typed(value, getattr(spec, name, None), keeps_type=keeps_type)
    return found


def _typed(value: Any, cast: Any, *, keeps_type: bool) -> Any:
    """A field, or a part of one, with its arrays as the kernel is judged by them. cast: the same of the request"""
    if isinstance(value, Mapping):
        parts = {name: inner for name, inner in value.items() if inner is not None}
        return {name: _typed(inner, getattr(cast, name, None), keeps_type=keeps_type) for name, inner in parts.items()}
    has_type = isinstance(value, bool | int | float) or (keeps_type and hasattr(value, "dtype"))
    return cast if hasattr(cast, "dtype") and not has_type else value


def _check(name: str, known: Mapping[str, Any], fields: Mapping[str, Any]) -> None:
    """Errors: CommandError for a field without a parameter, and for a parameter without a field."""
    kinds = {parameter.kind.name for parameter in known.values()}
    named = {key: one for key, one in known.items() if one.kind.name in ("POSITIONAL_OR_KEYWORD", "KEYWORD_ONLY")}
    shown = ", ".join(map(str, known.values()))
    for field in fields:
        if field not in named and "VAR_KEYWORD" not in kinds:
            text = f"{name}: expected a parameter for the field {field}, got ({shown}); {ADAPTER}"
            raise CommandError(text, FAILED)
    for key, one in known.items():
        is_needed = one.default is one.empty and not one.kind.name.startswith("VAR_")
        if is_needed and (key not in named or key not in fields):
            text = f"{name}: expected a field for each parameter without a default, got none for {key}; {ADAPTER}"
            raise CommandError(f"{text}; the request has {', '.join(fields)}", FAILED)
