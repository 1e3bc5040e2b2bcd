"""The Open Inference Protocol (v2), as the API document describes it, and what its model takes and gives."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Final, Literal, get_args

from pydantic import BaseModel, Field, RootModel
from typing_extensions import TypeAliasType

from service.attention.spec import ROW_STATISTICS, Output
from service.errors import NotFound, quote
from service.schemas.arrays import Tensor
from service.schemas.request import AttentionRequest, Part
from service.version import __version__

MODEL: Final = "attention"
VERSION: Final = "1"
SERVER: Final = "attention-service"
EXTENSIONS: Final = ["binary_tensor_data"]

Datatype = Literal[
    "BOOL", "UINT8", "UINT16", "UINT32", "INT8", "INT16", "INT32", "INT64", "FP16", "BF16", "FP32", "FP64", "BYTES"
]


class ServerMetadata(BaseModel):
    """What this server is."""

    name: str = Field(description="attention-service.")
    version: str = Field(description="Of the service.")
    extensions: list[str] = Field(description="Of the protocol: binary_tensor_data.")


class ServerLive(BaseModel):
    """Whether the process lives."""

    live: bool = Field(description="true, or there is no answer.")


class ServerReady(BaseModel):
    """Whether the server takes requests."""

    ready: bool = Field(description="true, or the status is not 200.")


class ModelReady(BaseModel):
    """Whether a model takes requests."""

    name: str = Field(description="Of the model.")
    ready: bool = Field(description="true, or the status is not 200.")


class TensorMetadata(BaseModel):
    """A tensor that a model takes or gives."""

    name: str = Field(description="As in requests and answers.")
    datatype: Datatype = Field(description="The usual one; any other floating type, or integer type, will do.")
    shape: list[int] = Field(description="-1 for each axis, as they are in the simplest layout; there may be more.")


class ModelMetadata(BaseModel):
    """What a model takes and gives."""

    name: str = Field(description="Of the model.")
    versions: list[str] = Field(description="That can be asked for.")
    platform: str = Field(description="What computes.")
    inputs: list[TensorMetadata] = Field(description="All that it can take; which go together, see POST /attention.")
    outputs: list[TensorMetadata] = Field(description="All that it can give.")


InferenceParameter = TypeAliasType(
    "InferenceParameter", Annotated[bool | int | float | str, Field(description="A scalar.")]
)


class InferenceParameters(RootModel[dict[str, InferenceParameter]]):
    """Scalars by name. In a request: any field of POST /attention that is no array, nested ones dotted."""


class InferenceInput(BaseModel):
    """A tensor of a request. Its name is that of an array of POST /attention, dotted where it is nested."""

    name: str = Field(description="Like query, mask or projection.query.weight.")
    shape: list[int] = Field(description="Length of each axis.")
    datatype: Datatype = Field(description="Of the elements.")
    parameters: InferenceParameters | None = Field(
        None, description="binary_data_size: how many bytes after the JSON are its data. Default: none, it has `data`."
    )
    data: list[Any] | None = Field(
        None, description="The elements, row-major, flat or nested as the shape. Default: they follow the JSON."
    )


class InferenceRequestedOutput(BaseModel):
    """An output asked for."""

    name: str = Field(description="output, or what can stand in `include` of POST /attention.")
    parameters: InferenceParameters | None = Field(
        None, description="binary_data: whether it comes as bytes. Default: as binary_data_output says."
    )


class InferenceRequest(BaseModel):
    """What to compute."""

    id: str | None = Field(None, description="Returned as it is. Default: none.")
    parameters: InferenceParameters | None = Field(
        None,
        description="Options by the names of POST /attention, like is_causal, num_heads or window.left; "
        "binary_data_output: whether outputs come as bytes. Default: none.",
    )
    inputs: list[InferenceInput] = Field(description="The tensors.")
    outputs: list[InferenceRequestedOutput] | None = Field(
        None, description="What to return. Default: output and attention_weights."
    )


class InferenceOutput(BaseModel):
    """A tensor of an answer."""

    name: str = Field(description="As asked for.")
    datatype: Datatype = Field(description="Of the elements.")
    shape: list[int] = Field(description="Length of each axis.")
    parameters: InferenceParameters | None = Field(
        None, description="binary_data_size: how many bytes after the JSON are its data. Absent where it has `data`."
    )
    data: list[Any] | None = Field(
        None, description="The elements, row-major and flat, null for minus infinity. Absent where it is binary."
    )


class InferenceResponse(BaseModel):
    """What was computed."""

    model_name: str = Field(description="attention.")
    model_version: str = Field(description="1.")
    id: str | None = Field(None, description="As in the request. Absent where that had none.")
    parameters: InferenceParameters = Field(
        description="What was done: the metadata of POST /attention; warnings in one string."
    )
    outputs: list[InferenceOutput] = Field(description="The tensors asked for.")


class InferenceError(BaseModel):
    """An error of the Open Inference Protocol."""

    error: str = Field(description="What is wrong: where, what was expected, what came.")


# The axes of outputs that are no matrices.
_RANKS: Final = dict.fromkeys(ROW_STATISTICS, 1) | {"received": 1, "present_key": 3, "present_value": 3}


def _inputs(model: type[BaseModel], prefix: str = "") -> Iterator[TensorMetadata]:
    """The fields of a request that are arrays, and those of the objects in it under dotted names."""
    for name, field in model.model_fields.items():
        for kind in get_args(field.annotation):  # of `Matrix | None`, `Projection | None`
            if isinstance(kind, type) and issubclass(kind, Part):
                yield from _inputs(kind, f"{prefix}{name}.")
            for tensor in getattr(kind, "__metadata__", ()):
                if isinstance(tensor, Tensor):
                    yield _metadata(prefix + name, *tensor)


def _metadata(name: str, datatype: str, rank: int) -> TensorMetadata:
    return TensorMetadata.model_validate({"name": name, "datatype": datatype, "shape": [-1] * rank})


SERVER_METADATA: Final = ServerMetadata(name=SERVER, version=__version__, extensions=EXTENSIONS)
MODEL_METADATA: Final = ModelMetadata(
    name=MODEL,
    versions=[VERSION],
    platform=SERVER,
    inputs=list(_inputs(AttentionRequest)),
    outputs=[
        *(_metadata(name, "FP32", _RANKS.get(name, 2)) for name in ("output", *get_args(Output))),
        _metadata("top_weights.indices", "INT64", 2),
        _metadata("top_weights.values", "FP32", 2),
    ],
)


def check_model(model_name: str = MODEL, model_version: str = VERSION) -> None:
    """Refuse a request for any other model or version. Errors: NotFound."""
    if model_name != MODEL:
        raise NotFound.at("", f"the model {MODEL}", quote(model_name))
    if model_version != VERSION:
        raise NotFound.at("", f"version {VERSION} of the model {MODEL}", quote(model_version))
