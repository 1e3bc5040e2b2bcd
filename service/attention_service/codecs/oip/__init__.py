"""The Open Inference Protocol (v2), for clients of Triton and KServe, over HTTP and over gRPC."""

from __future__ import annotations

from collections.abc import Container

from attention_service.errors import NotFound, quote
from attention_service.version import MODEL, MODEL_VERSION


def check_model(name: str = MODEL, version: str = MODEL_VERSION, layers: Container[str] = ()) -> None:
    """Refuse a request for any other model or version. layers: the stored layers, which are models too

    Errors: NotFound.
    """
    if name != MODEL and name not in layers:
        raise NotFound.at("", f"the model {MODEL}{', or a stored layer' if layers else ''}", quote(name))
    if version != MODEL_VERSION:
        raise NotFound.at("", f"version {MODEL_VERSION} of the model {name}", quote(version))
