"""The Open Inference Protocol (v2), for clients of Triton and KServe, over HTTP and over gRPC."""

from __future__ import annotations

from service.errors import NotFound, quote
from service.version import MODEL, MODEL_VERSION


def check_model(name: str = MODEL, version: str = MODEL_VERSION) -> None:
    """Refuse a request for any other model or version. Errors: NotFound."""
    if name != MODEL:
        raise NotFound.at("", f"the model {MODEL}", quote(name))
    if version != MODEL_VERSION:
        raise NotFound.at("", f"version {MODEL_VERSION} of the model {MODEL}", quote(version))
