"""The Open Inference Protocol (v2), as the API document describes it, and the tensors of its model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Final, Literal, get_args

from pydantic import BaseModel, Field, RootModel
from typing_extensions import TypeAliasType

from attention_service.attention.gradients import PREFIX, gradient_names
from attention_service.attention.outputs import OUTPUTS
from attention_service.schemas.arrays import ProtocolTensor
from attention_service.schemas.closed import Part
from attention_service.schemas.layers import StoredLayer
from attention_service.schemas.request import AttentionRequest
from attention_service.version import MODEL, MODEL_VERSION, __version__

SERVER: Final = "attention-service"
EXTENSIONS: Final = ["binary_tensor_data"]

Datatype = Literal[
    "BOOL", "UINT8", "UINT16", "UINT32", "INT8", "INT16", "INT32", "INT64", "FP16", "BF16", "FP32", "FP64", "BYTES"
]


class ServerMetadata(BaseModel):
    """Metadata of the server."""

    name: str = Field(description="Name of the server: attention-service.")
    version: str = Field(description="Version of the service.")
    extensions: list[str] = Field(description="Supported extensions of the protocol: binary_tensor_data.")


class ServerLive(BaseModel):
    """Whether the server is alive."""

    live: bool = Field(description="Always true. If the server is not alive, there is no response.")


class ServerReady(BaseModel):
    """Whether the server accepts requests."""

    ready: bool = Field(description="true, or the status is not 200.")


class ModelReady(BaseModel):
    """Whether a model accepts requests."""

    name: str = Field(description="Name of the model.")
    ready: bool = Field(description="true, or the status is not 200.")


class TensorMetadata(BaseModel):
    """An input or output of a model."""

    name: str = Field(description="Name in requests and responses.")
    datatype: Datatype = Field(
        description="Usual datatype; any other floating-point type, or integer type for an integer, is accepted."
    )
    shape: list[int] = Field(description="-1 for each axis of the simplest layout; other layouts have more axes.")


class ModelMetadata(BaseModel):
    """Metadata of a model."""

    name: str = Field(description="Name of the model.")
    versions: list[str] = Field(description="Available versions.")
    platform: str = Field(description="Software that computes the model.")
    inputs: list[TensorMetadata] = Field(description="All inputs. POST /attention says which of them can be combined.")
    outputs: list[TensorMetadata] = Field(description="All outputs.")


InferenceParameter = TypeAliasType(
    "InferenceParameter", Annotated[bool | int | float | str, Field(description="A scalar.")]
)


class InferenceParameters(RootModel[dict[str, InferenceParameter]]):
    """Scalars by name. In a request: the fields of POST /attention that are not arrays, nested ones dotted."""


class InferenceInput(BaseModel):
    """A tensor of a request. Its name is that of an array of POST /attention, nested ones dotted."""

    name: str = Field(description="For example query, mask or projection.query.weight.")
    shape: list[int] = Field(description="Length of each axis.")
    datatype: Datatype = Field(description="Type of the elements.")
    parameters: InferenceParameters | None = Field(
        None,
        description="binary_data_size: number of bytes after the JSON that are its data. Default: none, it has `data`.",
    )
    data: list[Any] | None = Field(
        None, description="Elements in row-major order, flat or nested. Default: none, they follow the JSON as bytes."
    )


class InferenceRequestedOutput(BaseModel):
    """A requested output."""

    name: str = Field(description="output, or a name that `include` of POST /attention may contain.")
    parameters: InferenceParameters | None = Field(
        None, description="binary_data: whether it is returned as bytes. Default: the value of binary_data_output."
    )


class InferenceRequest(BaseModel):
    """An inference request."""

    id: str | None = Field(None, description="Id of the request, returned unchanged. Default: none.")
    parameters: InferenceParameters | None = Field(
        None,
        description="Fields of POST /attention that are not arrays, for example is_causal, num_heads or window.left; "
        "binary_data_output: whether outputs are returned as bytes. Default: none.",
    )
    inputs: list[InferenceInput] = Field(description="Tensors of the request.")
    outputs: list[InferenceRequestedOutput] | None = Field(
        None, description="Outputs to return. Default: output and attention_weights."
    )


class InferenceOutput(BaseModel):
    """A tensor of a response."""

    name: str = Field(description="Name of the output.")
    datatype: Datatype = Field(description="Type of the elements.")
    shape: list[int] = Field(description="Length of each axis.")
    parameters: InferenceParameters | None = Field(
        None, description="binary_data_size: number of bytes after the JSON that are its data. Absent if it has `data`."
    )
    data: list[Any] | None = Field(
        None, description="Elements in row-major order, flat; null is minus infinity. Absent if it is binary."
    )


class InferenceResponse(BaseModel):
    """An inference response."""

    model_name: str = Field(description="Name of the model: attention, or a stored layer.")
    model_version: str = Field(description="Version of the model: 1.")
    id: str | None = Field(None, description="Id of the request. Absent if the request has none.")
    parameters: InferenceParameters = Field(
        description="The metadata of POST /attention, nested ones dotted, lists with commas; warnings as one string."
    )
    outputs: list[InferenceOutput] = Field(description="Requested outputs.")


class InferenceError(BaseModel):
    """An error of the Open Inference Protocol."""

    error: str = Field(description="What is wrong: the place, what was expected, and what came instead.")


def _inputs(model: type[BaseModel], prefix: str = "") -> Iterator[TensorMetadata]:
    """The fields of a request that are arrays, and those of the objects in it under dotted names."""
    for name, field in model.model_fields.items():
        for kind in get_args(field.annotation):  # of `Matrix | None`, `Projection | None`
            if isinstance(kind, type) and issubclass(kind, Part):
                yield from _inputs(kind, f"{prefix}{name}.")
            for tensor in getattr(kind, "__metadata__", ()):
                if isinstance(tensor, ProtocolTensor):
                    yield _metadata(prefix + name, *tensor)


def _metadata(name: str, datatype: str, rank: int) -> TensorMetadata:
    return TensorMetadata.model_validate({"name": name, "datatype": datatype, "shape": [-1] * rank})


INPUTS: Final = list(_inputs(AttentionRequest))
RANKS: Final = {entry.name: len(entry.shape) for entry in INPUTS}
SERVER_METADATA: Final = ServerMetadata(name=SERVER, version=__version__, extensions=EXTENSIONS)
MODEL_METADATA: Final = ModelMetadata(
    name=MODEL,
    versions=[MODEL_VERSION],
    platform=SERVER,
    inputs=INPUTS,
    outputs=[
        _metadata("output", "FP32", 2),
        # The simplest layout has no batch, and its single head no axis.
        *(
            _metadata(name, "INT32" if row.is_integer else "FP32", len(row.axes) - 2 + row.keeps_heads)
            for name, row in OUTPUTS.items()
        ),
        *(_metadata(name, "FP32", RANKS.get(name.removeprefix(PREFIX), 0)) for name in gradient_names()),
        _metadata("top_weights.indices", "INT64", 2),
        _metadata("top_weights.values", "FP32", 2),
    ],
)


def layer_metadata(layer: StoredLayer) -> ModelMetadata:
    """The metadata of a stored layer: what it maps to what. Requests may have all other inputs of the model, too."""
    shapes = {tensor.name: tensor.shape for tensor in layer.tensors}
    layout = layer.options.get("layout") or "ld"
    inner, outer = _features(shapes, "query", -1), _features(shapes, "output", -2)
    return ModelMetadata(
        name=layer.name,
        versions=[MODEL_VERSION],
        platform=SERVER,
        inputs=[TensorMetadata(name="input", datatype="FP32", shape=_lengths(layout, inner))],
        outputs=[TensorMetadata(name="output", datatype="FP32", shape=_lengths(layout, outer))],
    )


def _features(shapes: Mapping[str, list[int]], role: str, axis: int) -> int:
    """The features into (axis -1) or out of (axis -2) a map of a layer, as its weight is (out, in); -1 without."""
    shape = shapes.get(f"projection.{role}.weight") or shapes.get(f"projection.{role}.kernel", [])[::-1]
    return shape[axis] if len(shape) >= 2 else -1


def _lengths(layout: str, features: int) -> list[int]:
    return [features if axis == "d" else -1 for axis in layout]
