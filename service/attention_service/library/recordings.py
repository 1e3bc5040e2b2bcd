"""Recordings of engines: folders that the flight recorder of FlashInfer wrote (flashinfer/api_logging.py, 0.7.2).

`session.jsonl` has a line before and after each call; the folder of a call has its arguments and results. An object of
a wrapper class has several calls: its constructor, `plan`, and `run`, whose pages and lengths are those of the last
`plan`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path
from typing import Any, Final

import numpy as np

from attention_service.engines.table import FUNCTIONS
from attention_service.errors import InvalidRequest, MissingField
from attention_service.library.tensor_files import map_tensors, read_torch

SESSION: Final = "session.jsonl"
METADATA: Final = "metadata.jsonl"
LIBRARY: Final = "flashinfer."
# Engines that capture graphs use subclasses, which differ in nothing that is recorded.
CAPTURED: Final = "CUDAGraph"
# What the calls before `run` of the same object are called.
STATES: Final = ("__init__", "plan")
RUN: Final = "Wrapper.run"
# The argument that the constructor says, and one that stands for the boundaries of a plan.
LAYOUT: Final = "kv_layout"
PLANNED: Final = ("block_tables", "metadata")
RESULTS: Final = ("output", "logsumexp")
IGNORED: Final = "changes nothing"

Record = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class RecordedCall:
    """A call in a recording.

    name: its folder in the recording; function: as `call` names it; record: the last line about it
    before: the constructor and the last plan of its object, by the names of STATES
    """

    name: str
    folder: Path
    function: str
    record: Record
    before: Mapping[str, tuple[Path, Record]] = field(default_factory=dict)

    def arguments(self) -> dict[str, Any]:
        """The arguments by name, those of the constructor and of the plan included.

        Errors: MissingField where these were not recorded; InvalidRequest, OSError.
        """
        rows = FUNCTIONS[self.function].rows
        found: dict[str, Any] = {}
        for folder, record in (*self.before.values(), (self.folder, self.record)):
            found |= {name: value for name, value in _arguments(folder, record).items() if value is not None}
        self._check_states(found)
        return {name: value for name, value in found.items() if name not in rows or rows[name].text != IGNORED}

    def _check_states(self, arguments: Mapping[str, Any]) -> None:
        """Refuse a run of an object whose pages or layout nothing says: by default values it would be judged wrong.

        Errors: MissingField.
        """
        if not self.function.endswith(RUN):
            return
        constructor, plan = STATES
        if plan not in self.before and not any(name in PLANNED or "indptr" in name for name in arguments):
            raise MissingField.at("", "a plan of the same object before this call", "no plan recorded")
        if constructor not in self.before and LAYOUT in FUNCTIONS[self.function].rows and LAYOUT not in arguments:
            got = f"no __init__ recorded, so that {LAYOUT} is unknown"
            raise MissingField.at("", "the constructor of the same object before this call", got)

    def results(self) -> dict[str, np.ndarray]:
        """What the call returned. Errors: MissingField if it did not end; InvalidRequest, OSError."""
        tensors = _tensors(self.folder, "outputs")
        if not tensors:
            raise MissingField.at("", "results of the call", f"execution_status {self.record.get('execution_status')}")
        return dict(zip(RESULTS, (tensors[key] for key in sorted(tensors)), strict=False))


@dataclass(frozen=True, slots=True)
class Recording:
    """Calls of attention in the order in which they began. others: of other functions; lost: lines that are cut off"""

    calls: list[RecordedCall]
    others: int
    lost: int


def is_recording(path: Path) -> bool:
    """True for a folder that a recorder wrote: of a session, or of one call."""
    return any((path / name).is_file() for name in (SESSION, METADATA)) or any(path.glob(f"*/{METADATA}"))


def read_recording(root: Path) -> Recording:
    """The calls of a recording, read as far as it goes. root: its folder, or one of a call

    Errors: OSError, InvalidRequest for a call whose folder is elsewhere.
    """
    if (root / METADATA).is_file():
        every = read_recording(root.parent)
        return Recording([one for one in every.calls if one.folder == root], 0, every.lost)
    records, lost = _records(root)
    states: dict[tuple[str, str], dict[str, tuple[Path, Record]]] = {}
    calls, others = [], 0
    for name, record in records.items():
        owner, _, method = str(record.get("function_name")).removeprefix(CAPTURED).rpartition(".")
        state = states.setdefault((str(record.get("process_id")), str(record.get("self_id"))), {}) if owner else {}
        if owner and method in STATES:
            if method == STATES[0]:
                state.clear()
            state[method] = root / name, record
            continue
        function = LIBRARY + (f"{owner}.{method}" if owner else method)
        if function not in FUNCTIONS:
            others += 1
            continue
        before: dict[str, tuple[Path, Record]] = {one: state[one] for one in STATES if one in state}
        calls.append(RecordedCall(name, root / name, function, record, before))
    return Recording(calls, others, lost)


def _records(root: Path) -> tuple[dict[str, Record], int]:
    """The last line about each call, by its folder, and how many lines are no whole ones.

    A captured call is replaced by its replays, each with a folder of its own. Calls whose lines the session has lost
    come last, in the order of their folders, which begin with their time.

    Errors: OSError, InvalidRequest for a folder that is not below `root`.
    """
    found: dict[str, Record] = {}
    lost = 0
    for file in (root / SESSION, *sorted(root.glob(f"*/{METADATA}"))):
        if file.parent.name in found or not file.is_file():
            continue
        for line in file.read_bytes().splitlines():
            try:
                record = json.loads(line)
                folder = Path(record["dump_dir"])
                base = record.get("graph_capture_base_dump_dir")
                name = folder.name if base is None else f"{Path(base).name}/{folder.parent.name}/{folder.name}"
                is_inside = name in found or root.resolve() in (root / name).resolve().parents
            except (ValueError, KeyError, TypeError, AttributeError, OSError, RuntimeError):
                lost += bool(line.strip())
                continue
            if not is_inside:  # as by .. or a symbolic link
                raise InvalidRequest.of("/dump_dir", f"a folder in {root}", record["dump_dir"])
            found[name] = record
    replayed = {name.partition("/")[0] for name in found if "/" in name}
    return {name: record for name, record in found.items() if name not in replayed}, lost


def _arguments(folder: Path, record: Record) -> dict[str, Any]:
    """The arguments of one call by name. Errors: InvalidRequest, OSError."""
    found: dict[str, Any] = {}
    names = parameters(str(record.get("function_signature", "")))
    tensors = _tensors(folder, "inputs")
    plain = record.get("input_metadata")
    if not isinstance(plain, Mapping):
        raise InvalidRequest.of("/input_metadata", "an object", plain)
    info = record.get("tensor_info")
    listed = info.get("input_tensor_keys", ()) if isinstance(info, Mapping) else ()
    for key in listed if isinstance(listed, list) else ():
        _tensor(key, tensors)
    for key in dict.fromkeys((*tensors, *plain)):
        kind, _, name = key.partition("_")
        if "__" in name and key not in plain:  # of a list or an object, which stands in the metadata
            continue
        value = tensors[key] if key in tensors else _value(plain[key], tensors)
        if kind == "kwarg":
            found[name] = value
        elif kind == "arg" and name.isdecimal() and int(name) < len(names):
            if (parameter := names[int(name)]) != "self":
                found[parameter] = value
        else:
            raise InvalidRequest.at("", f"{len(names)} arguments, as the signature has them", key)
    return found


def parameters(signature: str) -> list[str]:
    """The names of positional parameters in the text of a signature, which may have values that are no Python."""
    names, depth, begun = [], 0, ""
    for part in re.split(r"([\[\](){}<>,]|->)", signature.partition("(")[2]):
        if part in ("[", "(", "{", "<"):
            depth += 1
        elif part in ("]", ")", "}", ">") and depth:
            depth -= 1
        elif part in (",", ")") and not depth:
            names.append(re.split(r"[:=]", begun)[0].strip())
            begun = ""
            if part == ")":
                break
        elif not depth:
            begun += part
    return [name for name in takewhile(lambda name: not name.startswith("*"), names) if name not in ("", "/")]


def _value(value: Any, tensors: Mapping[str, np.ndarray]) -> Any:
    """A value of the metadata: numbers and text as they are, the name of an enumeration's member or of a type."""
    if not isinstance(value, Mapping):
        return value
    if "tensor_key" in value:
        return _tensor(value["tensor_key"], tensors)
    if isinstance(value.get("items"), list):
        return [_value(item, tensors) for item in value["items"]]
    if value.get("type") == "enum":
        return value.get("value")
    return str(value.get("value", value.get("repr", ""))).removeprefix("torch.")


def _tensor(key: Any, tensors: Mapping[str, np.ndarray]) -> np.ndarray:
    """The tensor with a key. Errors: MissingField."""
    if not isinstance(key, str) or key not in tensors:
        raise MissingField.at("", f"the tensor {key} in the inputs of the call", "none")
    return tensors[key]


def _tensors(folder: Path, kind: str) -> dict[str, Any]:
    """The tensors of a call, `inputs` or `outputs`; none without a file of them. Errors: InvalidRequest, OSError."""
    if (file := folder / f"{kind}.safetensors").is_file():
        return map_tensors(file)
    if (file := folder / f"{kind}.pt").is_file():
        found = read_torch(file)
        if isinstance(found, Mapping):
            return dict(found)
        raise InvalidRequest.at("", "a dict of tensors", f"another object in {file.name}")
    return {}
