"""Writes recordings as the flight recorder of FlashInfer 0.7.2 does (flashinfer/api_logging.py), without torch.

The same folders, lines and keys in the same order; of what it records of a machine, some values.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.numpy


@dataclass
class FlightRecorder:
    """Records calls into a folder. process: the process id; clock: milliseconds, which each call moves on by one"""

    root: Path
    process: int = 4711
    clock: int = 0
    calls: dict[str, int] = field(default_factory=dict)

    def record(
        self,
        name: str,
        signature: str,
        arguments: tuple[Any, ...],
        keywords: Mapping[str, Any],
        result: Any = None,
        *,
        self_id: int | None = None,
        completes: bool = True,
    ) -> Path:
        """Record a call. name: of the function, Class.method for wrappers, whose first argument is the object."""
        self.clock += 1
        self.calls[name] = number = self.calls.get(name, 0) + 1
        stamp = f"20261126_120000_{self.clock:03d}"
        folder = self.root / f"{stamp}_pid{self.process}_{name}_call{number:04d}"
        folder.mkdir(parents=True)
        tensors: dict[str, np.ndarray] = {}
        plain: dict[str, Any] = {}
        given = {f"arg_{n}": value for n, value in enumerate(arguments)}
        for key, value in (given | {f"kwarg_{name}": value for name, value in keywords.items()}).items():
            if isinstance(value, np.ndarray):
                tensors[key] = value
            else:
                plain[key] = described(value, key, tensors)
        size = sum(array.nbytes for array in tensors.values())
        save(folder / "inputs.safetensors", tensors)
        line: dict[str, Any] = {
            "function_name": name,
            "module": "flashinfer.prefill",
            "call_sequence": number,
            "timestamp": stamp,
            "process_id": self.process,
            "input_metadata": plain,
            "output_metadata": {},
            "tensor_info": {
                "input_tensor_keys": list(tensors),
                "output_tensor_keys": [],
                "input_size_bytes": size,
                "input_size_mb": size / 2**20,
            },
            "tensor_details": {},
            "tensor_format": "safetensors",
            "function_signature": signature,
            "versions": {"torch": "2.11.0", "python": "3.12.3"},
            "execution_status": "inputs_saved",
            "graph_capture": False,
        }
        if self_id is not None:
            line["self_id"] = self_id
        line["tensor_details"] = {key: details(array) for key, array in tensors.items()}
        line["versions"]["flashinfer"] = "0.7.2.post1"
        line["dump_dir"] = f"flashinfer_dumps/{folder.name}"  # as given to the recorder: relative, stale after a move
        self.append(folder, line)
        if completes:
            self.complete(folder, line, result)
        return folder

    def complete(self, folder: Path, line: dict[str, Any], result: Any) -> None:
        """Record what a call returned."""
        tensors: dict[str, np.ndarray] = {}
        plain: dict[str, Any] = {}
        if isinstance(result, np.ndarray):
            tensors["result"] = result
        elif isinstance(result, tuple):
            tensors |= {f"result_{n}": array for n, array in enumerate(result)}
        else:
            plain["result"] = described(result, "result", tensors)
        save(folder / "outputs.safetensors", tensors)
        info, size = line["tensor_info"], sum(array.nbytes for array in tensors.values())
        info |= {"output_tensor_keys": list(tensors), "output_size_bytes": size, "output_size_mb": size / 2**20}
        info["total_size_bytes"] = info["input_size_bytes"] + size
        info["total_size_mb"] = info["total_size_bytes"] / 2**20
        details_of = {key: details(array) for key, array in tensors.items()}
        line = line | {"output_metadata": plain, "execution_status": "completed"}
        line["tensor_details"] = line["tensor_details"] | details_of
        self.append(folder, line)

    def append(self, folder: Path, line: Mapping[str, Any]) -> None:
        """Append a line to the metadata of a call, and to those of the session."""
        for path in (folder / "metadata.jsonl", self.root / "session.jsonl"):
            with path.open("a") as file:
                file.write(json.dumps(line) + "\n")


def details(array: np.ndarray) -> dict[str, Any]:
    """What is written of a tensor."""
    strides = [step // array.itemsize for step in array.strides]
    dtype = f"torch.{array.dtype.name}"
    return {"shape": list(array.shape), "dtype": dtype, "stride": strides, "device": "cuda:0"}


def described(value: Any, key: str, tensors: dict[str, np.ndarray]) -> Any:
    """What is written of an argument that is no tensor; the tensors in it are added."""
    if isinstance(value, np.ndarray):
        tensors[key] = value
        known = details(value) | {"requires_grad": False, "is_contiguous": value.flags.c_contiguous}
        return {"type": "torch.Tensor"} | known | {"tensor_key": key}
    if isinstance(value, np.dtype):
        return {"type": "torch.dtype", "value": f"torch.{value.name}"}
    if isinstance(value, Enum):
        return {"type": "enum", "name": str(value), "value": value.value}
    if isinstance(value, list | tuple):
        items = [described(item, f"{key}__{n}", tensors) for n, item in enumerate(value)]
        return {"type": type(value).__name__, "length": len(value), "items": items, "truncated": False}
    if value is None or isinstance(value, int | float | str):
        return value
    return {"type": type(value).__name__, "repr": str(value)[:1000]}


def save(path: Path, tensors: Mapping[str, np.ndarray]) -> None:
    """Write a file of tensors; none if there are none."""
    if not tensors:
        return
    safetensors.numpy.save_file({key: np.ascontiguousarray(array) for key, array in tensors.items()}, path)
