"""What a request of the Open Inference Protocol means as fields of POST /attention, and an answer as its outputs.

Inputs are the fields that are arrays, parameters all others, nested ones dotted. Requested outputs are `include`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import chain
from typing import Any, Final, get_args

import numpy as np

from attention_service.attention.arrays import MAX_TEXT
from attention_service.attention.gradients import gradient_names
from attention_service.attention.spec import Output
from attention_service.codecs.decoded import Decoded, RequestedOutputs
from attention_service.codecs.named_tensors import add_dotted, dotted_tensors, unread_names
from attention_service.codecs.oip.tensors import MAX_STRINGS, parameters_of
from attention_service.errors import FieldConflict, InvalidTensors, InvalidValue, MissingField, UnknownField, child
from attention_service.version import MODEL

BINARY_OUTPUT: Final = "binary_data_output"
ALWAYS: Final = "output"
WEIGHTS: Final = "attention_weights"
# What takes the place of the weights where top_k is asked for.
TOP: Final = ("top_weights.indices", "top_weights.values")
OUTPUTS: Final = (ALWAYS, *get_args(Output), *gradient_names(), *TOP)
NAMED: Final = [name for name in OUTPUTS if not name.startswith("grad_")]
# Parameters are scalars, so that lists of names come as one string.
LABELS: Final = ("query_tokens", "key_tokens")
NAME_LISTS: Final = ("include", *LABELS)
# Parameters for the schedulers of other servers and for gateways. They are accepted, and change nothing.
IGNORED: Final = frozenset(
    {"content_type", "headers", "priority", "sequence_end", "sequence_id", "sequence_start", "timeout"}
)


def assembled(
    request: Mapping[str, Any], tensors: Mapping[str, Any], *, binary: bool = False, model: str = MODEL
) -> Decoded:
    """The fields of a request from its tensors and all its other parts.

    binary: True if outputs come as bytes unless the request says otherwise
    model: any but MODEL is a stored layer
    Errors: InvalidTensors, InvalidValue, FieldConflict, UnknownField.
    """
    parameters = parameters_of(request, "")
    fields: dict[str, Any] = {}
    add_dotted(fields, _with_labels(tensors))
    add_dotted(fields, _options(parameters))
    if model != MODEL:
        if fields.get("layer") is not None:
            raise FieldConflict.at("/parameters/layer", f"no layer beside the model {model}", "both")
        fields["layer"] = model
    outputs = _requested_outputs(request, _flag(parameters, BINARY_OUTPUT, binary, ""))
    if outputs.binary:
        if "include" in fields:
            raise FieldConflict.at("/parameters/include", "include or outputs", "both")
        fields["include"] = _include(outputs.binary, top_k=fields.get("top_k") is not None)
    places = (
        (f"/{kind}/{i}", chain(entry, entry.get("parameters") or ()))
        for kind in ("inputs", "outputs")
        for i, entry in enumerate(request.get(kind) or ())
    )
    unread = unread_names(chain([("", request)], places), "the parameters of the request")
    return Decoded(fields, frozenset(), outputs, unread)


def _with_labels(tensors: Mapping[str, Any]) -> dict[str, Any]:
    """The tensors, with labels of shape (n, 1) as n labels if there is no batch: the strings of MLServer's codec."""
    is_batched = any(np.ndim(tensors.get(name, ())) > 2 for name in ("query", "key", "input", "context"))
    columns = {name: tensors[name] for name in LABELS if name in tensors and not is_batched}
    return {**tensors} | {
        name: [label for (label,) in rows]
        for name, rows in columns.items()
        if isinstance(rows, list) and all(isinstance(row, list) and len(row) == 1 for row in rows)
    }


def _options(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """The parameters that are fields of the request. Errors: UnknownField."""
    if "encoding" in parameters:
        raise UnknownField.at("/parameters/encoding", f"{BINARY_OUTPUT}, or binary_data of an output", "encoding")
    ignored = IGNORED | {BINARY_OUTPUT}
    found = {name: value for name, value in parameters.items() if value is not None and name not in ignored}
    for name in NAME_LISTS:
        if isinstance(found.get(name), str):
            if found[name].count(",") >= MAX_STRINGS:
                raise InvalidTensors.at(f"/parameters/{name}", f"at most {MAX_STRINGS} names", "more")
            found[name] = [item.strip() for item in found[name].split(",") if item.strip()]
    return found


def _requested_outputs(request: Mapping[str, Any], default: bool) -> RequestedOutputs:
    """The outputs that a request asks for. Errors: InvalidTensors, InvalidValue, FieldConflict."""
    given, outputs = request.get("id"), request.get("outputs")
    if not isinstance(given, str | None):
        raise InvalidTensors.of("/id", "a string", given)
    if given is not None and len(given) > MAX_TEXT:
        raise InvalidTensors.at("/id", f"at most {MAX_TEXT} characters", "more")
    if not isinstance(outputs, list | None):
        raise InvalidTensors.of("/outputs", "an array of outputs", outputs)
    binary: dict[str, bool] = {}
    for i, entry in enumerate(outputs or ()):
        pointer = f"/outputs/{i}"
        if not isinstance(entry, dict):
            raise InvalidTensors.of(pointer, "an object with the name of an output", entry)
        name = entry.get("name")
        if not isinstance(name, str) or name not in OUTPUTS:
            raise InvalidValue.of(
                f"{pointer}/name", f"one of {', '.join(NAMED)}, or grad_ before the name of an input", name
            )
        if name in binary:
            raise FieldConflict.at(f"{pointer}/name", "each output once", "the same name again")
        parameters = parameters_of(entry, pointer)
        for unknown in ("classification", "shared_memory_region"):
            if unknown in parameters:
                raise InvalidTensors.at(child(f"{pointer}/parameters", unknown), "an output as it is", unknown)
        binary[name] = _flag(parameters, "binary_data", default, pointer)
    return RequestedOutputs(given, binary, default)


def _flag(parameters: Mapping[str, Any], name: str, default: bool, pointer: str) -> bool:
    value = parameters.get(name, default)
    if not isinstance(value, bool):
        raise InvalidTensors.of(f"{pointer}/parameters/{name}", "true or false", value)
    return value


def _include(names: Iterable[str], *, top_k: bool) -> list[str]:
    """The `include` that returns the outputs of these names. Errors: FieldConflict."""
    if top_k and WEIGHTS in names:
        raise FieldConflict.at("/outputs", " and ".join(TOP), WEIGHTS, "with top_k they take its place")
    if not top_k and any(name in TOP for name in names):
        raise FieldConflict.at("/outputs", "the parameter top_k with top_weights", "none")
    included = (WEIGHTS if name in TOP else name.partition(".")[0] for name in names if name != ALWAYS)
    return list(dict.fromkeys(included))


def requested_outputs(answer: Mapping[str, Any], requested: RequestedOutputs) -> dict[str, tuple[np.ndarray, bool]]:
    """The tensors of an answer that were requested, each with True if it comes as bytes. Errors: MissingField."""
    tensors = dict(dotted_tensors(answer))
    binary = requested.binary or dict.fromkeys((ALWAYS, *tensors), requested.default)
    for name in sorted(binary.keys() - tensors.keys()):  # of an array that an object of the request does not have
        raise MissingField.at("/outputs", f"the input {name.removeprefix('grad_')} beside its gradient", "none")
    return {name: (tensors[name], is_binary) for name, is_binary in binary.items()}


def scalars(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """The metadata of an answer as parameters, which are scalars; nested ones dotted, lists with commas."""
    found: dict[str, Any] = {}
    for name, value in metadata.items():
        if isinstance(value, Mapping):
            found |= {f"{name}.{inner}": scalar for inner, scalar in value.items()}
        elif isinstance(value, list):
            found[name] = ",".join(map(str, value))
        elif name != "warnings":
            found[name] = value
    if metadata["warnings"]:
        found["warnings"] = "; ".join(f"{notice.code}: {notice.message}" for notice in metadata["warnings"])
    return found
