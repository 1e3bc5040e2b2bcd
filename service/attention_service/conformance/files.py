"""A suite as files: a safetensors file for each case, and `index.json`, as docs/conformance.md describes them."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Final

from attention_service.codecs.named_tensors import add_dotted, dotted_tensors, plain_fields
from attention_service.codecs.safetensors import SafetensorsCodec, file_chunks
from attention_service.conformance.requests import Choice
from attention_service.conformance.suite import SuiteCase, make_cases
from attention_service.version import __version__
from attention_service.whole_file import whole_file

INDEX: Final = "index.json"
EXPECTED: Final = "expected"
TOLERANCE: Final = "tolerance"
# The version of the files, which changes with what their readers must know.
FORMAT: Final = 1


def write(
    directory: str | Path,
    cases: int = 1000,
    seed: int = 0,
    *,
    only: Collection[str] | None = None,
    head_dims: Sequence[int] = (),
    dtypes: Sequence[str] = (),
) -> int:
    """Write a suite into a directory, which is made if it is missing, and return the number of its cases.

    The same seed makes the same requests. only, head_dims, dtypes: as of `run`, of the cases that are made

    Errors: OSError; ValueError for a choice that no suite has.
    """
    choice = Choice.of(only, head_dims, dtypes)
    folder = Path(directory)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / INDEX).unlink(missing_ok=True)  # a suite that ends early is none, rather than cases of two
    entries = []
    for case in make_cases(cases, seed, choice):
        name = f"{case.name}.safetensors"
        arrays = dict(dotted_tensors({**case.fields, EXPECTED: case.expected, TOLERANCE: case.tolerance}))
        with whole_file(folder / name) as file:
            file.writelines(file_chunks(arrays, {})[0])
        entries.append(
            {
                "file": name,
                "corner": case.corner,
                "dtype": case.dtype,
                "options": case.options,
                "request": plain_fields(case.fields),
                TOLERANCE: plain_fields(case.tolerance),
            }
        )
    index = {"format": FORMAT, "version": __version__, "seed": seed, "cases": entries}
    with whole_file(folder / INDEX) as file:
        file.write(json.dumps(index, indent=1).encode())
    return len(entries)


def read(directory: str | Path) -> Iterator[SuiteCase]:
    """The cases of a directory that `write` made. Errors: OSError; ValueError for an index of another format."""
    folder = Path(directory)
    index = json.loads((folder / INDEX).read_text(encoding="utf-8"))
    if not isinstance(index, dict) or index.get("format") != FORMAT:
        raise ValueError(f"{folder / INDEX}: not a suite of format {FORMAT}")
    for entry in index["cases"]:
        body = (folder / entry["file"]).read_bytes()
        arrays = SafetensorsCodec().decode(body, len(body)).fields
        expected, tolerance = arrays.pop(EXPECTED), entry[TOLERANCE] | arrays.pop(TOLERANCE, {})
        fields = entry["request"]
        add_dotted(fields, dict(dotted_tensors(arrays)))
        yield SuiteCase(Path(entry["file"]).stem, entry["corner"], fields, expected, tolerance)
