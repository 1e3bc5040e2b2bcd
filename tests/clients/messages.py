"""Compares the service's protobuf messages with those that clients ship."""

from __future__ import annotations

from typing import Any

from attention_service.codecs.oip.messages import MESSAGES

# Fields that KServe's older messages lack.
TRITON_ONLY = {"double_param", "uint64_param"}
METHODS = {"ServerLive", "ServerReady", "ModelReady", "ServerMetadata", "ModelMetadata", "ModelInfer"}


def compare(theirs: Any) -> None:
    """Assert that our messages, fields and methods equal those of the same names in a client's file descriptor."""
    service = theirs.services_by_name["GRPCInferenceService"]
    assert set(service.methods_by_name.keys()) >= METHODS
    for method in METHODS:
        found = service.methods_by_name[method]
        assert (found.input_type.name, found.output_type.name) == (f"{method}Request", f"{method}Response")
        assert (found.client_streaming, found.server_streaming) == (False, False)
    for name, message in MESSAGES.items():
        if message.DESCRIPTOR.file.name == "inference.proto":
            _compare(message.DESCRIPTOR, theirs.message_types_by_name[name])


def _compare(ours: Any, theirs: Any) -> None:
    assert ours.full_name == theirs.full_name
    fields = {field.name for field in theirs.fields} | TRITON_ONLY
    assert {field.name for field in ours.fields} - fields == set(), ours.full_name
    for field in theirs.fields:
        own = ours.fields_by_name[field.name]
        assert (own.number, own.type, own.is_repeated) == (field.number, field.type, field.is_repeated), own.full_name
        if own.message_type is not None:
            _compare(own.message_type, field.message_type)
