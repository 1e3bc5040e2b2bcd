"""The attention module of a checkpoint, from which a family takes what its layer needs."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, Final

import numpy as np

from attention_service.attention.arrays import is_float
from attention_service.errors import quote
from attention_service.layers.checkpoint import Checkpoint
from attention_service.layers.models import Model, whole
from attention_service.layers.positions import number, positive, rotary_fields
from attention_service.layers.tensors import BadFile

# What some checkpoints have beside the parameters of attention: tables and masks that follow from the configuration.
TABLES: Final = frozenset({"bias", "masked_bias", "rotary_emb.inv_freq"})


class Module:
    """Takes tensors of one attention module, and what the configuration says of it.

    place: the start of the names of its tensors, with a dot at its end
    layer: the index of its layer, if it is one of several; heads: from the command line
    model, options: what its configuration can say, and does
    positions: rows of rotary tables; progress: told the name and size of each tensor that is read

    arrays: by the names of fields of a request, filled by the methods
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        place: str,
        layer: int | None,
        *,
        model: Model,
        options: Mapping[str, Any],
        heads: int | None,
        positions: int,
        progress: Callable[[str, int], None],
    ) -> None:
        self._checkpoint = checkpoint
        self._names = set(checkpoint.names)
        self._taken: set[str] = set()
        self._positions = positions
        self._progress = progress
        self.place = place
        self.layer = layer or 0
        self.options = {**model.options, **options}
        self.known = model.options
        self.kind = model.kind
        self._biases = dict.fromkeys(("query", "key", "value"), model.bias) | {"output": model.output_bias}
        self.heads = heads
        self.arrays: dict[str, np.ndarray] = {}

    def has(self, name: str) -> bool:
        """True if the module has a tensor of this name."""
        return self.place + name in self._names

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor. Errors: BadFile if there is none."""
        if not self.has(name):
            raise BadFile(f"the checkpoint has no tensor {quote(self.place + name, 120)}")
        return self._checkpoint.shape(self.place + name)

    def matrix(self, name: str) -> tuple[int, int]:
        """The shape of a tensor with two axes. Errors: BadFile."""
        shape = self.shape(name)
        if len(shape) != 2:
            raise BadFile(f"{quote(self.place + name, 120)}: expected two axes, got {len(shape)}")
        return shape[0], shape[1]

    def has_bias(self, role: str, name: str) -> bool:
        """True if the map of a role has a bias. Errors: BadFile for one that transformers would not load."""
        option = self._biases[role]
        if self.has(f"{name}.bias") and not (self.get(option) if isinstance(option, str) else option):
            why = f", and {option} is {quote(str(self.get(option)))}" if isinstance(option, str) else ""
            raise BadFile(f"{quote(f'{self.place}{name}.bias', 120)} is a bias that models of this kind lack{why}")
        if self.has(f"{name}.bias") and self.shape(f"{name}.bias") != self.shape(f"{name}.weight")[:1]:
            raise BadFile(f"{quote(f'{self.place}{name}.bias', 120)}: expected a number for each row of the weight")
        return self.has(f"{name}.bias")

    def tensor(self, name: str, rows: slice | None = None) -> np.ndarray:
        """A tensor, or some of its rows. Errors: BadFile, also for integers, as of quantized weights."""
        self.shape(name)
        found = self._checkpoint.tensor(self.place + name, rows)
        if not is_float(found.dtype):
            raise BadFile(f"{quote(self.place + name, 120)} holds {found.dtype}; expected floating-point numbers")
        self._taken.add(name)
        self._progress(self.place + name, found.nbytes)
        return found

    def linear(self, role: str, name: str, rows: slice | None = None) -> None:
        """Take a map like torch.nn.Linear, with its bias if it has one; or some of its outputs. Errors: BadFile."""
        self.matrix(f"{name}.weight")
        self.arrays[f"projection.{role}.weight"] = self.tensor(f"{name}.weight", rows)
        if self.has_bias(role, name):
            self.arrays[f"projection.{role}.bias"] = self.tensor(f"{name}.bias", rows)

    def norm(self, field: str, name: str, *, plus: float = 0.0) -> dict[str, Any]:
        """Take an RMS norm, and return its options. plus: added to its weight

        Errors: BadFile.
        """
        weight = self.tensor(f"{name}.weight")
        self.arrays[f"{field}.weight"] = weight.astype(np.float32) + np.float32(plus) if plus else weight
        return {f"{field}.eps": self.number("rms_norm_eps")}

    def rotary(self, rope: Mapping[str, Any], head_dim: int) -> dict[str, Any]:
        """The options of a rotary embedding; tables are taken as arrays. Errors: BadFile."""
        found = rotary_fields(rope, head_dim, self._positions)
        self.arrays |= {name: value for name, value in found.items() if isinstance(value, np.ndarray)}
        return {name: value for name, value in found.items() if not isinstance(value, np.ndarray)}

    def get(self, key: str) -> Any:
        """A value of the configuration, None if it has none."""
        return self.options.get(key)

    def mapping(self, key: str) -> dict[str, Any]:
        """An object of the configuration, empty if it has none. Errors: BadFile for something else."""
        value = self.get(key)
        if value is not None and not isinstance(value, dict):
            raise BadFile(f"config.json: expected {key}, an object; got {quote(str(value))}")
        return dict(value or {})

    def number(self, key: str) -> float:
        """A number of the configuration. Errors: BadFile."""
        return number(self.options, key)

    def positive(self, key: str) -> float:
        """A number of the configuration above 0. Errors: BadFile."""
        return positive(self.options, key)

    def count(self, *keys: str) -> int:
        """A whole number of the configuration, at least 1. keys: its names. Errors: BadFile, also if names disagree."""
        given = [key for key in keys if self.get(key) is not None] or [keys[0]]
        numbers = [whole(self.options, key) for key in given]
        if len(set(numbers)) > 1:
            raise BadFile(f"config.json: {' and '.join(given)} are names of the same number, and differ")
        return numbers[0]

    def refuse(self, key: str, *allowed: Any) -> None:
        """Errors: BadFile if a value of the configuration is there and none of those that are known."""
        value = self.get(key)
        if value is not None and value not in allowed:
            known = " or ".join(map(str, allowed)) or "none"
            raise BadFile(f"config.json: {key} {quote(str(value))} cannot be expressed; expected {known}")

    def check_all_taken(self, *others: str) -> None:
        """Errors: BadFile for a tensor of the module that no field holds, unless its name begins as one of `others`."""
        for name in sorted(self._names):
            rest = name.removeprefix(self.place)
            if name.startswith(self.place) and rest not in self._taken | TABLES and not rest.startswith(others):
                raise BadFile(f"the tensor {quote(name, 120)} has a meaning that is not known here")


def layer_number(names: list[str], pattern: str, first: str, layer: int | None, prefix: str | None) -> int | None:
    """The number of a layer from 0, where a negative one counts from the end. Arguments: as of find_module

    Errors: BadFile for a layer that there is not.
    """
    place = re.compile(rf"(?:^|\.){re.escape(f'{pattern}.{first}').replace(re.escape('{layer}'), '([0-9]{1,9})')}$")
    matches = [place.search(name) for name in names if name.startswith(prefix or "")]
    count = max((int(match[1]) + 1 for match in matches if match and match.lastindex), default=0)
    if layer is None or not count:
        return layer
    if not -count <= layer < count:
        raise BadFile(f"--layer: expected 0 to {count - 1}, or -1 for the last of them, got {layer}")
    return layer % count


def find_module(names: list[str], pattern: str, first: str, layer: int | None, prefix: str | None) -> str:
    """The start of the names of a module's tensors.

    pattern: its place, with `{layer}`; first: the name of one of its tensors; prefix: how names begin, if that is given

    Errors: BadFile for none or several.
    """
    if "{layer}" in pattern and layer is None:
        raise BadFile(f"which layer? Its tensors are in {pattern}; say --layer N")
    inner = re.escape(pattern.replace("{layer}", str(layer)) + "." if pattern else "")
    ending = re.compile(rf"(?:^|.*\.){inner}(?={re.escape(first)}$)")
    found = sorted({match[0] for name in names if (match := ending.match(name)) and name.startswith(prefix or "")})
    if not found:
        place = f"{pattern.replace('{layer}', str(layer))}.{first}".lstrip(".")
        raise BadFile(f"no tensor of the checkpoint has a name that ends in {place}")
    if len(found) > 1:
        raise BadFile(f"several modules fit, say which by --prefix: {', '.join(found[:5])}")
    return found[0]
