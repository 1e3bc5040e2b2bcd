"""Which outputs a request of the Open Inference Protocol wants, and in which form."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final, get_args

from service.attention.spec import Output
from service.codecs.decoded import RequestedOutputs
from service.codecs.oip.tensors import parameters_of
from service.errors import FieldConflict, InvalidTensors, InvalidValue, child

BINARY_OUTPUT: Final = "binary_data_output"
ALWAYS: Final = "output"
WEIGHTS: Final = "attention_weights"
# What takes the place of the weights where top_k is asked for.
TOP: Final = ("top_weights.indices", "top_weights.values")
OUTPUTS: Final = (ALWAYS, *get_args(Output), *TOP)


def requested_outputs(
    request: Mapping[str, Any], parameters: Mapping[str, Any], default_binary: bool
) -> RequestedOutputs:
    """The outputs that a request asks for. default_binary: True if they come as bytes unless the request says otherwise

    Errors: InvalidTensors, InvalidValue, FieldConflict.
    """
    given, outputs = request.get("id"), request.get("outputs")
    if not isinstance(given, str | None):
        raise InvalidTensors.of("/id", "a string", given)
    if not isinstance(outputs, list | None):
        raise InvalidTensors.of("/outputs", "an array of outputs", outputs)
    binary: dict[str, bool] = {}
    names = []
    default = _flag(parameters, BINARY_OUTPUT, default_binary, "")
    for i, entry in enumerate(outputs or ()):
        pointer = f"/outputs/{i}"
        name = _name(entry, pointer)
        if name in binary:
            raise FieldConflict.at(f"{pointer}/name", "each output once", "the same name again")
        wanted = parameters_of(entry, pointer)
        for unknown in ("classification", "shared_memory_region"):
            if unknown in wanted:
                raise InvalidTensors.at(child(f"{pointer}/parameters", unknown), "an output as it is", unknown)
        binary[name] = _flag(wanted, "binary_data", default, pointer)
        names.append(name)
    return RequestedOutputs(given, tuple(names), binary, default)


def _name(entry: Any, pointer: str) -> str:
    """Errors: InvalidTensors, InvalidValue."""
    if not isinstance(entry, dict):
        raise InvalidTensors.of(pointer, "an object with the name of an output", entry)
    name = entry.get("name")
    if not isinstance(name, str) or name not in OUTPUTS:
        raise InvalidValue.of(f"{pointer}/name", f"one of {', '.join(OUTPUTS)}", name)
    return name


def _flag(parameters: Mapping[str, Any], name: str, default: bool, pointer: str) -> bool:
    value = parameters.get(name, default)
    if not isinstance(value, bool):
        raise InvalidTensors.of(f"{pointer}/parameters/{name}", "true or false", value)
    return value


def set_include(fields: dict[str, Any], names: Iterable[str]) -> None:
    """The outputs asked for, as the field that asks for them elsewhere. Errors: FieldConflict."""
    if "include" in fields:
        raise FieldConflict.at("/parameters/include", "include or outputs", "both")
    top = fields.get("top_k") is not None
    include = list(dict.fromkeys(WEIGHTS if name in TOP else name for name in names if name != ALWAYS))
    if top and WEIGHTS in names:
        raise FieldConflict.at("/outputs", " and ".join(TOP), WEIGHTS, "with top_k they take its place")
    if not top and any(name in TOP for name in names):
        raise FieldConflict.at("/outputs", "the parameter top_k with top_weights", "none")
    fields["include"] = include
