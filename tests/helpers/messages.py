"""Messages of the Open Inference Protocol over gRPC, as its clients fill and read them."""

from __future__ import annotations

from typing import Any

import numpy as np

from attention_service.codecs.oip.messages import MESSAGES
from tests.helpers.oip import NAMES, TYPES

FIELDS: dict[str, str] = {
    "BOOL": "bool_contents", "INT8": "int_contents", "INT16": "int_contents", "INT32": "int_contents",
    "INT64": "int64_contents", "UINT8": "uint_contents", "UINT16": "uint_contents", "UINT32": "uint_contents",
    "FP32": "fp32_contents", "FP64": "fp64_contents", "BYTES": "bytes_contents",
}  # fmt: skip
SCALARS = {bool: "bool_param", int: "int64_param", float: "double_param", str: "string_param"}


def request(
    arrays: dict[str, Any], options: dict[str, Any] | None = None, *, raw: bool = True, outputs: tuple[str, ...] = ()
) -> Any:
    """A ModelInferRequest with raw or typed tensors."""
    message = MESSAGES["ModelInferRequest"](model_name="attention", id="17")
    for field, array in arrays.items():
        datatype = NAMES.get(array.dtype, "BYTES")
        tensor = message.inputs.add(name=field, datatype=datatype, shape=array.shape)
        if not raw:
            getattr(tensor.contents, FIELDS[datatype]).extend(array.ravel().tolist())
        elif datatype == "BYTES":
            texts = array.ravel().tolist()
            message.raw_input_contents.append(b"".join(len(text).to_bytes(4, "little") + text for text in texts))
        else:
            message.raw_input_contents.append(array.tobytes())
    for output in outputs:
        message.outputs.add(name=output)
    for option, value in (options or {}).items():
        setattr(message.parameters[option], SCALARS[type(value)], value)
    return message


def read(message: Any) -> dict[str, Any]:
    """The outputs of a ModelInferResponse as arrays by name, and the message itself as `rest`."""
    found: dict[str, Any] = {"rest": message}
    assert len(message.raw_output_contents) in (0, len(message.outputs))
    for i, output in enumerate(message.outputs):
        kind = np.dtype(TYPES[output.datatype])
        if message.raw_output_contents:
            assert not output.HasField("contents")
            array = np.frombuffer(message.raw_output_contents[i], kind)
        else:
            assert [field.name for field, _ in output.contents.ListFields()] == [FIELDS[output.datatype]]
            array = np.array(getattr(output.contents, FIELDS[output.datatype]), kind)
        found[output.name] = array.reshape(output.shape)
    return found
