"""Stored layers, as `GET /layers` describes them."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, Field


class StoredTensor(BaseModel):
    """A tensor of a stored layer."""

    name: str = Field(description="The field of a request that it is, nested ones dotted: projection.query.weight.")
    dtype: str = Field(
        description="Type of its elements, as safetensors names it: F64, F32, F16, BF16, I64, I32, BOOL."
    )
    shape: list[int] = Field(description="Length of each axis.")
    nbytes: int = Field(description="Its size in bytes.")


class StoredLayer(BaseModel):
    """A stored layer: fields of a request, which a request with its name as `layer` has, too."""

    name: str = Field(description="Its name.")
    hash: str = Field(description="sha256: and the hash of its file with the tensors. Empty if it cannot be read.")
    source: str = Field(description="What it was made from, in words.")
    options: dict[str, Any] = Field(description="Its fields that are no tensors.")
    tensors: list[StoredTensor] = Field(description="Its fields that are tensors.")
    nbytes: int = Field(description="Size of all tensors in bytes.")
    error: str | None = Field(None, description="Why it cannot be used. Absent if it can.")


class StoredLayers(BaseModel):
    """The stored layers of a service."""

    layers: list[StoredLayer] = Field(description="All layers, by name. Empty if the service has none.")
