"""The arguments that an implementation is called with, for a request or for a call of another library."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, Final

from attention_service.attention.operands import as_cast
from attention_service.attention.roles import DEFAULT_LAYOUTS
from attention_service.codecs.decoded import Decoded
from attention_service.comparison.calls.request import call_question, typed_arguments
from attention_service.comparison.question import ANSWERS, make_question
from attention_service.conformance.target import Target, Unsupported, parameters
from attention_service.library.engine_calls import taken
from attention_service.schemas.compare import CompareRequest
from attention_service.schemas.request import AttentionRequest

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


def arguments_of_call(target: Target, decoded: Decoded) -> dict[str, Any]:
    """The arguments of a call that an implementation has parameters for.

    decoded: its arguments that came as lists become those that the implementation is called with

    Errors: InvalidRequest of every kind.
    """
    asked = decoded._replace(fields={key: value for key, value in decoded.fields.items() if key not in ANSWERS})
    call_question(asked)  # arguments are refused before it runs
    decoded.fields["arguments"] = typed_arguments(asked)
    return {key: _as_parameter(key, value) for key, value in taken(target, decoded.fields["arguments"]).items()}


def _as_parameter(name: str, value: Any) -> Any:
    """An argument as functions take it: pairs, of which the sides of a window are no array, as tuples."""
    value = value.tolist() if name in SIDES and hasattr(value, "tolist") else value
    return tuple(value) if isinstance(value, list) else value


def arguments_of_request(target: Target, decoded: Decoded) -> dict[str, Any]:
    """The fields of a request as arguments. Errors: Unsupported for parameters of other names, InvalidRequest."""
    fields = {key: value for key, value in decoded.fields.items() if key not in ANSWERS}
    known = parameters(target)
    arguments = _arguments(decoded._replace(fields=fields), frozenset(known or ()))
    if known is not None:
        _check(known, arguments)
    return arguments


def _arguments(decoded: Decoded, asked: Collection[str]) -> dict[str, Any]:
    """The fields of a request as arguments: those that say what to compute, and are not at their defaults.

    asked: names of parameters, which are given whatever the request says. Errors: InvalidRequest of every kind.
    """
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


def _check(known: Mapping[str, Any], fields: Mapping[str, Any]) -> None:
    """Errors: Unsupported for a field without a parameter, and for a parameter without a field."""
    kinds = {parameter.kind.name for parameter in known.values()}
    named = {key: one for key, one in known.items() if one.kind.name in ("POSITIONAL_OR_KEYWORD", "KEYWORD_ONLY")}
    shown = ", ".join(map(str, known.values()))
    for field in fields:
        if field not in named and "VAR_KEYWORD" not in kinds:
            raise Unsupported(f"expected a parameter for the field {field}, got ({shown}); {ADAPTER}")
    for key, one in known.items():
        is_needed = one.default is one.empty and not one.kind.name.startswith("VAR_")
        if is_needed and (key not in named or key not in fields):
            text = f"expected a field for each parameter without a default, got none for {key}; {ADAPTER}"
            raise Unsupported(f"{text}; the request has {', '.join(fields)}")
