"""What gradients are computed from, right or with a mistake, in float64."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, is_dataclass, replace
from functools import cached_property
from typing import Any, Final

import numpy as np

from attention_service.attention.arrays import compute_dtype
from attention_service.attention.gradients import PREFIX
from attention_service.attention.operands import as_cast, make_operands
from attention_service.attention.outputs import OUTPUTS
from attention_service.attention.plan import Plan
from attention_service.attention.planning import make_plan
from attention_service.attention.result import request_axes
from attention_service.attention.shapes import reordered
from attention_service.attention.spec import AttentionSpec, Operand, Parameter, field_types
from attention_service.attention.tiles import Tiling
from attention_service.backends.base import Check, no_check
from attention_service.backends.dense.backward import Backward
from attention_service.backends.dense.buffers import ResultBuffers
from attention_service.backends.dense.compute import compute_tiles, empty_outputs
from attention_service.backends.dense.gradients import GradientBuffers, TileBackward
from attention_service.backends.dense.operands import LoadedOperands, load_operands
from attention_service.backends.numpy.backend import NumpyLibrary

# Gradients by their dotted names, in the shapes of their fields.
Gradients = Mapping[str, np.ndarray]
# Sums of all tiles by field, with the axes of the plan.
Sums = dict[str, np.ndarray]
# Scores of a tile.
TILE: Final = 2**18
# Numbers of the terms of sums, which are kept beside each other; of larger gradients they are not told.
MOST_TERMS: Final = 2**22
# The types of fields that are arrays.
ARRAYS: Final = (np.ndarray | None, Operand | None, Parameter | None)


@dataclass(frozen=True, eq=False)
class GradientCase:
    """A request whose gradients are computed in float64, and what its forward pass made.

    spec, plan: with cotangents, in float64; names: of the gradients that are compared; dtype: of the request
    outputs: (b, h, q, e), of the heads before their steps; cotangent: (b, h, q, e), theirs, None for zeros
    logsumexp: (b, h, q)
    check: raises to end the computation; right: the right gradients
    """

    spec: AttentionSpec
    plan: Plan
    names: tuple[str, ...]
    dtype: np.dtype
    loaded: LoadedOperands
    outputs: np.ndarray
    logsumexp: np.ndarray
    cotangent: np.ndarray | None
    check: Check = no_check
    right: Gradients = field(default_factory=dict)

    @cached_property
    def delta(self) -> np.ndarray:
        """D (b, h, q): rowsum(O ⊙ dO)."""
        if self.cotangent is None:
            return np.zeros(self.logsumexp.shape)
        found: np.ndarray = np.vecdot(self.outputs, self.cotangent)
        return found

    @property
    def group(self) -> int:
        """Query heads that share a key/value head."""
        return self.plan.sizes.num_heads // self.plan.sizes.num_kv_heads

    def changed(self, change: Mapping[str, Any]) -> GradientCase:
        """The case of a request with other fields, but the outputs and the logsumexp of this one."""
        spec = with_fields(self.spec, change)
        return replace(self, spec=spec, plan=make_plan(spec), names=names_in(self.names, spec))

    def library(self) -> NumpyLibrary:
        """NumPy with tiles of whole rows, computed one after the other."""
        return NumpyLibrary(self.plan, Tiling(scores=TILE), None)

    def run(
        self,
        of_tiles: Callable[..., TileBackward] = TileBackward,
        edit: Callable[[Sums], Sums] = dict,
        around: Plan | None = None,
    ) -> Gradients:
        """The gradients, right or with a mistake.

        of_tiles: makes the backward pass of tiles; edit: changes what they added up
        around: the plan of the backward pass around the tiles; None for that of the case
        """
        plan, lib = self.plan, self.library()
        backward = Backward(plan if around is None else around, lib, self.loaded)
        tiles = of_tiles(plan, lib, self.loaded, backward.output(self.outputs))
        buffers = GradientBuffers(plan, lib, tiles)
        compute_tiles(plan, lib, self.loaded, empty_outputs(plan, lib, plan.compute_dtype), buffers, self.check)
        sums = {name: np.asarray(array) for name, array in buffers.gradients.items()}
        found = {name: np.asarray(array) for name, array in backward.fields(self.outputs, edit(sums)).items()}
        matrices = {name: reordered(array, *request_axes(name, plan)) for name, array in buffers.arrays.items()}
        return {name: array for name, array in (matrices | found).items() if name in self.names}


def make_case(spec: AttentionSpec, dtype: np.dtype, names: tuple[str, ...], check: Check = no_check) -> GradientCase:
    """The case of a request with cotangents. names: dotted names of gradients; dtype: of the request

    Errors: InvalidRequest of every kind.
    """
    include = included(names)
    exact = as_cast(spec, dtype)._replace(
        dtype="float64",
        backend="numpy",
        device="cpu",
        gradients=None,
        include=(*include, "logsumexp") if spec.normalization == "softmax" else include,  # type: ignore[arg-type]  # names of arrays
        top_k=None,
        average_heads=False,
        allow_non_finite=True,
    )
    plan = make_plan(exact)
    with np.errstate(all="ignore"):
        lib = NumpyLibrary(plan, Tiling(scores=TILE), None)
        loaded = load_operands(plan, make_operands(exact, plan, exact.sources), lib)
        outputs = np.asarray(empty_outputs(plan, lib, plan.compute_dtype))
        whole = replace(plan, selection=replace(plan.selection, include=plan.selection.include & {"logsumexp"}))
        whole = replace(whole, selection=replace(whole.selection, heads=None, queries=None))
        buffers = ResultBuffers(whole, lib)
        compute_tiles(whole, lib, loaded, outputs, buffers, check)
        cotangent = Backward(plan, lib, loaded).output(outputs)
    sizes = plan.sizes
    shape = (sizes.batch_size, sizes.num_heads, sizes.query_length)
    logsumexp = np.asarray(buffers.arrays.get("logsumexp", np.zeros(shape)))
    case = GradientCase(exact, plan, names, dtype, loaded, outputs, logsumexp, cotangent, check)
    with np.errstate(all="ignore"):
        return replace(case, right=case.run())


def included(names: Iterable[str]) -> tuple[str, ...]:
    """What a request includes for gradients with these dotted names."""
    return tuple(dict.fromkeys(name if name in OUTPUTS else name.partition(".")[0] for name in names))


def with_fields(spec: AttentionSpec, change: Mapping[str, Any]) -> AttentionSpec:
    """A request with other fields, which includes no gradient of those that are None."""
    gone = {PREFIX + name for name, value in change.items() if value is None}
    return spec._replace(**change, include=tuple(name for name in spec.include if name not in gone))


def names_in(names: Iterable[str], spec: AttentionSpec) -> tuple[str, ...]:
    """The dotted names of gradients whose fields a request has, and those of scores."""
    return tuple(name for name in names if getattr(spec, name.removeprefix(PREFIX).partition(".")[0], 0) is not None)


def leaves(arrays: Mapping[str, Any], prefix: str = "") -> dict[str, np.ndarray]:
    """The gradients in a response by their dotted names."""
    found: dict[str, np.ndarray] = {}
    for name, value in arrays.items():
        if isinstance(value, Mapping):
            found |= leaves(value, f"{prefix}{name}.")
        elif (prefix + name).startswith(PREFIX):
            found[prefix + name] = np.asarray(value)
    return found


def changed_spec(spec: AttentionSpec, change: Mapping[str, Any] | None) -> AttentionSpec | None:
    """The request that a change of fields makes; None if it is not said in values, as "transposed" of a mask."""
    if not change:
        return None
    values = {name: _value(AttentionSpec, name, value, getattr(spec, name)) for name, value in change.items()}
    if any(value is NotImplemented for value in values.values()):
        return None
    return with_fields(spec, values)


def _value(kind: type, name: str, value: Any, former: Any) -> Any:
    """A field of a changed request as its class holds it; NotImplemented for words that stand for many numbers."""
    if value is None:
        return AttentionSpec._field_defaults[name] if kind is AttentionSpec else None
    if isinstance(value, Mapping):
        if not is_dataclass(former) or isinstance(former, type):
            return NotImplemented
        inner = {one: _value(type(former), one, item, getattr(former, one)) for one, item in value.items()}
        is_said = all(item is not NotImplemented for item in inner.values())
        return replace(former, **inner) if is_said else NotImplemented
    if isinstance(value, list):
        return np.asarray(value)
    if isinstance(value, str):
        return value if name == "normalization" else NotImplemented
    return np.asarray(value) if field_types(kind)[name] in ARRAYS else value


def stored_dtype(case: GradientCase, name: str) -> np.dtype:
    """The type in which a kernel returns a gradient: that of the request, or of parameters that it computes in."""
    wanted = None if case.plan.gradients is None else case.plan.gradients.named(name)
    return case.dtype if wanted is not None and wanted.is_operand else compute_dtype(case.dtype)
