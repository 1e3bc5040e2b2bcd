"""The messages of inference.proto and health.proto, as protobuf's library makes them from their compiled form.

They live in a pool of their own: other packages in the process, such as tritonclient and kserve, have messages of the
same names, and the pool that all share takes each name once.
"""

from __future__ import annotations

from importlib.resources import files
from typing import Any, Final

from google.protobuf.descriptor_pb2 import FileDescriptorSet
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message_factory import GetMessageClassesForFiles

COMPILED: Final = "inference.binpb"
SERVICE: Final = "inference.GRPCInferenceService"
HEALTH: Final = "grpc.health.v1.Health"


def _messages() -> dict[str, Any]:
    """All classes by their names."""
    compiled = files("attention_service.codecs.oip").joinpath(COMPILED).read_bytes()
    pool = DescriptorPool()
    classes: dict[str, Any] = {}
    for file in FileDescriptorSet.FromString(compiled).file:
        pool.Add(file)
        found = GetMessageClassesForFiles([file.name], pool)
        classes |= {name.removeprefix(f"{file.package}."): kind for name, kind in found.items()}
    return classes


MESSAGES: Final = _messages()
