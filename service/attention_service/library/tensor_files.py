"""Tensors in files, which are read when they are used."""

from __future__ import annotations

import mmap
from pathlib import Path
from typing import Any
from zipfile import is_zipfile

from attention_service.codecs.array_objects import as_numpy
from attention_service.codecs.safetensors import SafetensorsCodec
from attention_service.errors import InvalidRequest, InvalidTensors


def map_tensors(path: Path) -> dict[str, Any]:
    """The tensors of a file in safetensors, which are read when they are used. Errors: InvalidTensors, OSError."""
    with path.open("rb") as file:
        try:
            body = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except ValueError:  # an empty file
            raise InvalidTensors.at("", "a file of tensors", f"an empty file {path.name}") from None
    return SafetensorsCodec().decode(memoryview(body), len(body)).fields


def read_torch(path: Path) -> Any:
    """What torch saved in a file: a tensor, or a dict of tensors and numbers. Errors: InvalidRequest without torch.

    Tensors are read when they are used, but for those in the format of torch before 1.6, which is no zip.
    """
    try:
        import torch
    except ModuleNotFoundError:
        raise InvalidRequest.at("", "torch, to read a file .pt", "no torch", "pip install torch") from None
    try:
        return as_numpy(torch.load(path, map_location="cpu", weights_only=True, mmap=is_zipfile(path)))
    except Exception as error:  # pickle's and zipfile's errors, and torch's own
        raise InvalidTensors.at("", "a file that torch saved, with tensors only", str(error)[:80]) from None
