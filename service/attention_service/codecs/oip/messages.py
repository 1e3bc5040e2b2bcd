"""The messages of inference.proto, as protobuf's library makes them from its compiled form.

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
PACKAGE: Final = "inference"
SERVICE: Final = f"{PACKAGE}.GRPCInferenceService"


def _messages() -> dict[str, Any]:
    """All classes by their names."""
    (file,) = FileDescriptorSet.FromString(files("attention_service.codecs.oip").joinpath(COMPILED).read_bytes()).file
    pool = DescriptorPool()
    pool.Add(file)
    classes = GetMessageClassesForFiles([file.name], pool)
    return {name.removeprefix(f"{PACKAGE}."): kind for name, kind in classes.items()}


MESSAGES: Final = _messages()
