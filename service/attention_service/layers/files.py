"""The two files of a stored layer: read, described, written, removed."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, Final

import numpy as np
from pydantic import BaseModel, ByteSize, ConfigDict, Field, ValidationError

from attention_service.codecs.safetensors import NAMES, file_chunks
from attention_service.errors import quote
from attention_service.layers.checks import check, check_header
from attention_service.layers.layer import Layer
from attention_service.layers.tensors import BadFile, ReadFile, TensorFile, arrays_of, parse_json
from attention_service.schemas.layers import StoredLayer, StoredTensor
from attention_service.whole_file import whole_file

# Bytes of the JSON of a layer.
MAX_DESCRIPTION: Final = 2**20
ALGORITHM: Final = "sha256:"


class LayerFile(BaseModel):
    """The JSON of a layer."""

    model_config = ConfigDict(extra="forbid", strict=True)

    hash: Annotated[str, Field(pattern=rf"^({ALGORITHM})?[0-9a-f]{{64}}$")]
    """SHA-256 of the file with its tensors."""
    options: dict[str, Any] = {}
    """The fields of a request that are no tensors."""
    source: str = ""
    """What it was made from, in words."""


def paths_of(folder: Path, name: str) -> tuple[Path, Path]:
    """The JSON of a layer, and its tensors. name: a valid one, see `is_name`"""
    return folder / f"{name}.json", folder / f"{name}.safetensors"


def read_description(path: Path) -> LayerFile:
    """The JSON of a layer. Errors: FileNotFoundError, BadFile."""
    with ReadFile(path) as file:
        if file.size > MAX_DESCRIPTION:
            raise BadFile(f"has a JSON of {file.size} bytes; expected at most {MAX_DESCRIPTION}")
        content = bytes(file.read(0, file.size))
    try:
        found = LayerFile.model_validate(parse_json(content))
    except RecursionError:
        raise BadFile("has a JSON that is nested too deeply") from None
    except ValidationError as error:
        fault = error.errors(include_url=False, include_input=False)[0]
        place = ".".join(map(str, fault["loc"])) or "the whole"
        raise BadFile(f"has a JSON in which {quote(place)} is wrong: {fault['msg']}") from None
    except ValueError as error:
        raise BadFile(f"has a JSON that cannot be parsed: {quote(str(error), 80)}") from None
    return found.model_copy(update={"hash": ALGORITHM + found.hash.removeprefix(ALGORITHM)})


def read_layer(
    folder: Path,
    name: str,
    limit: int,
    make_room: Callable[[int], bool],
    reserve: Callable[[Layer, int], bool],
) -> Layer:
    """A layer, whole and checked.

    limit: bytes that it may take; make_room: releases others for so many bytes; reserve: see LayerStore.reserve

    Errors: FileNotFoundError, BadFile.
    """
    description, tensors = paths_of(folder, name)
    about = read_description(description)
    with ReadFile(tensors) as file:
        _check_size(file.size, limit)
        make_room(file.size)  # even if there is too little: the version before is used until this one is read
        content = file.read(0, file.size)
    found = ALGORITHM + hashlib.sha256(content).hexdigest()
    if found != about.hash:
        raise BadFile(f"has tensors with the hash {found[:15]}…, in its JSON {about.hash[:15]}…")
    layer = Layer(name, found, about.source, about.options, arrays_of(content), reserve)
    check(layer)
    return layer


def describe(folder: Path, name: str, limit: int) -> StoredLayer:
    """What a layer is, by its JSON and the header of its tensors, and checked by these. limit: bytes that it may take

    What only its numbers tell, it does not know: whether they are finite, and those that were hashed.

    Errors: FileNotFoundError, BadFile.
    """
    description, tensors = paths_of(folder, name)
    about = read_description(description)
    with TensorFile(tensors) as file:
        _check_size(file.size, limit)
        entries = file.entries
    check_header(about.options, ((key, entry.dtype, entry.shape) for key, entry in entries.items()))
    listed = [
        StoredTensor(name=key, dtype=entry.dtype, shape=list(entry.shape), nbytes=entry.end - entry.begin)
        for key, entry in entries.items()
    ]
    return _stored(name, about.hash, about.source, about.options, listed)


def describe_layer(layer: Layer) -> StoredLayer:
    """What a layer in memory is."""
    listed = [
        StoredTensor(name=key, dtype=NAMES[array.dtype], shape=list(array.shape), nbytes=array.nbytes)
        for key, array in layer.arrays.items()
    ]
    return _stored(layer.name, layer.hash, layer.source, dict(layer.options), listed)


def _stored(name: str, digest: str, source: str, options: dict[str, Any], tensors: list[StoredTensor]) -> StoredLayer:
    size = sum(tensor.nbytes for tensor in tensors)
    return StoredLayer(name=name, hash=digest, source=source, options=options, tensors=tensors, nbytes=size)


def _check_size(size: int, limit: int) -> None:
    """Errors: BadFile for a file of more bytes than a layer may take."""
    if size > limit:
        most, has = (ByteSize(count).human_readable() for count in (limit, size))
        raise BadFile(f"has {has} of tensors; ATTENTION_LAYERS_MEMORY allows {most}")


def write_layer(
    folder: Path, name: str, arrays: Mapping[str, np.ndarray], options: Mapping[str, Any], source: str
) -> Layer:
    """Write a layer, checked, in place of one of the same name. No file is replaced before both are written.

    Whoever reads meanwhile finds the files of before, or a hash that does not agree with the tensors.

    Errors: OSError, BadFile if the fields are not those of a layer.
    """
    check(Layer(name, "", source, options, arrays))
    description, tensors = paths_of(folder, name)
    digest = hashlib.sha256()
    with whole_file(description, stored=True) as text, whole_file(tensors, stored=True) as file:
        for chunk in file_chunks(arrays, {})[0]:
            digest.update(chunk)
            file.write(chunk)
        about = LayerFile(hash=ALGORITHM + digest.hexdigest(), options=dict(options), source=source)
        text.write((json.dumps(about.model_dump(), indent=2, ensure_ascii=False) + "\n").encode())
        text.flush()
        os.fsync(text.fileno())
    return Layer(name, about.hash, source, options, arrays)


def remove_layer(folder: Path, name: str) -> None:
    """Remove a layer, its JSON first. Errors: OSError, FileNotFoundError if there is none."""
    description, tensors = paths_of(folder, name)
    description.unlink()
    tensors.unlink(missing_ok=True)
