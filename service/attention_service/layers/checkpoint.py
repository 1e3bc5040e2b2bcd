"""Checkpoints of other libraries: one file of safetensors, or several with an index, and their configuration.

Only headers and the tensors that are asked for are read.
"""

from __future__ import annotations

import json
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final, Self

import numpy as np

from attention_service.errors import quote
from attention_service.layers.tensors import MAX_CHECKPOINT_HEADER, BadFile, ReadFile, TensorFile, unique

INDEX: Final = "model.safetensors.index.json"
SINGLE: Final = "model.safetensors"
CONFIGURATION: Final = "config.json"
# Bytes of a configuration or index.
MAX_JSON: Final = 100 * 10**6


class Checkpoint:
    """The tensors of a checkpoint, by name. A context manager.

    path: a directory with model.safetensors, else with several files and their index, as transformers chooses; or one
    file of safetensors

    Errors: BadFile, with the name of the file.
    """

    def __init__(self, path: Path) -> None:
        self._open = ExitStack()
        self._files: dict[Path, TensorFile] = {}
        self.path = path
        folder = path if path.is_dir() else path.parent
        index, single = path / INDEX, path / SINGLE if path.is_dir() else path
        if index.is_file() and not single.is_file():
            names = read_json(index).get("weight_map")
            if not isinstance(names, dict) or not all(_is_file_name(file) for file in names.values()):
                raise BadFile(f"{INDEX}: expected weight_map, with a file of the same directory for each tensor")
            self._places = {name: folder / file for name, file in names.items()}
        else:
            if not single.is_file():
                expected = f"{SINGLE}, or {INDEX} with the files that it names"
                raise BadFile(f"{path}: expected a directory with {expected}, or a file of safetensors")
            self._places = dict.fromkeys(self._file(single).entries, single)
        configuration = folder / CONFIGURATION
        self.configuration: dict[str, Any] | None = read_json(configuration) if configuration.is_file() else None

    @property
    def names(self) -> list[str]:
        """The names of all tensors."""
        return list(self._places)

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor. Errors: BadFile."""
        file = self._file(self._places[name])
        if name not in file.entries:
            raise BadFile(f"{self._places[name].name}: lacks {quote(name, 80)}, which the index says it has")
        return file.entries[name].shape

    def tensor(self, name: str, rows: slice | None = None) -> np.ndarray:
        """A tensor, or some of its rows, which alone are read. Errors: BadFile."""
        self.shape(name)
        place = self._places[name]
        try:
            return self._file(place).tensor(name, rows)
        except BadFile as error:
            raise BadFile(f"{place.name}: {error}") from None

    def _file(self, path: Path) -> TensorFile:
        if path not in self._files:
            try:
                file = TensorFile(path, longest=MAX_CHECKPOINT_HEADER, follow=True)
            except FileNotFoundError:
                raise BadFile(f"{path.name}: is missing") from None
            except BadFile as error:
                raise BadFile(f"{path.name}: {error}") from None
            self._files[path] = self._open.enter_context(file)
        return self._files[path]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._open.close()


def _is_file_name(name: Any) -> bool:
    return isinstance(name, str) and bool(name) and "\0" not in name and Path(name).name == name


def read_json(path: Path) -> dict[str, Any]:
    """An object in a file of JSON. Errors: BadFile."""
    try:
        with ReadFile(path, follow=True) as file:  # Hugging Face's cache consists of links
            if file.size > MAX_JSON:
                raise BadFile(f"has {file.size} bytes; expected at most {MAX_JSON}")
            found = json.loads(bytes(file.read(0, file.size)), object_pairs_hook=unique)
    except BadFile as error:
        raise BadFile(f"{path.name}: {error}") from None
    except (ValueError, RecursionError) as error:
        raise BadFile(f"{path.name}: cannot be parsed: {quote(str(error), 80)}") from None
    if not isinstance(found, dict):
        raise BadFile(f"{path.name}: expected an object")
    return found
