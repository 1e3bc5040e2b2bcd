"""A suite as files: a safetensors file for each case, and `index.json`, as docs/conformance.md describes them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np

from service.codecs.named_tensors import add_dotted
from service.codecs.safetensors import NAMES, SafetensorsCodec
from service.conformance.suite import Case, dotted_arrays, make_cases, plain_fields
from service.version import __version__

INDEX: Final = "index.json"
EXPECTED: Final = "expected"
# The version of the files, which changes with what their readers must know.
FORMAT: Final = 1


def write(directory: str | Path, cases: int = 1000, seed: int = 0) -> int:
    """Write a suite into a directory, which is made if it is missing, and return the number of its cases.

    The same seed makes the same requests. Errors: OSError.
    """
    folder = Path(directory)
    folder.mkdir(parents=True, exist_ok=True)
    entries = []
    for case in make_cases(cases, seed):
        name = f"{case.name}.safetensors"
        arrays = dotted_arrays({**case.fields, EXPECTED: case.expected})
        (folder / name).write_bytes(safetensors_bytes(arrays))
        entries.append(
            {
                "file": name,
                "corner": case.corner,
                "dtype": case.dtype,
                "options": case.options,
                "request": plain_fields(case.fields),
                "tolerance": dict(case.tolerance),
            }
        )
    index = {"format": FORMAT, "version": __version__, "seed": seed, "cases": entries}
    (folder / INDEX).write_text(json.dumps(index, indent=1), encoding="utf-8")
    return len(entries)


def read(directory: str | Path) -> Iterator[Case]:
    """The cases of a directory that `write` made. Errors: OSError; ValueError for an index of another format."""
    folder = Path(directory)
    index = json.loads((folder / INDEX).read_text(encoding="utf-8"))
    if not isinstance(index, dict) or index.get("format") != FORMAT:
        raise ValueError(f"{folder / INDEX}: not a suite of format {FORMAT}")
    for entry in index["cases"]:
        body = (folder / entry["file"]).read_bytes()
        arrays = SafetensorsCodec().decode(body, len(body)).fields
        expected = arrays.pop(EXPECTED)
        fields = entry["request"]
        add_dotted(fields, dotted_arrays(arrays))
        yield Case(Path(entry["file"]).stem, entry["corner"], fields, expected, entry["tolerance"])


def safetensors_bytes(arrays: Mapping[str, np.ndarray]) -> bytes:
    """The arrays as a safetensors file."""
    header: dict[str, Any] = {}
    data = b""
    # Wide elements first, so that all are aligned.
    for name, array in sorted(arrays.items(), key=lambda item: -item[1].itemsize):
        octets = np.ascontiguousarray(array).tobytes()
        span = [len(data), len(data) + len(octets)]
        header[name] = {"dtype": NAMES[array.dtype], "shape": array.shape, "data_offsets": span}
        data += octets
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text + data
