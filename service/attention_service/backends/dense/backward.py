"""The backward pass around the tiles: from the cotangent of the output to the heads, and from them to the fields."""

from __future__ import annotations

from typing import Final

import numpy as np

from attention_service.attention.gradients import PREFIX
from attention_service.attention.outputs import OUTPUTS
from attention_service.attention.plan import Plan
from attention_service.attention.projections import DenseMap
from attention_service.attention.roles import Role
from attention_service.attention.shapes import from_canonical, unaligned
from attention_service.attention.spec import ROLES
from attention_service.attention.steps import Steps
from attention_service.attention.steps.step import OperandStep
from attention_service.backends.dense.gates import activation_slope, apply_map, gated
from attention_service.backends.dense.library import Array, ArrayLibrary, finite
from attention_service.backends.dense.operands import (
    DENSE_OPTIONS,
    LoadedOperands,
    heads_of,
    norms_after_maps,
    norms_of_outputs,
    stepped_outputs,
)
from attention_service.backends.dense.products import join_heads, split_heads
from attention_service.errors import FieldConflict

Named = dict[str, Array]
# The options whose gradients are known, beside those of score terms and steps, which have methods for them. A plan with
# another one is refused.
KNOWN: Final = DENSE_OPTIONS | {f"selection.include.{name}" for name in OUTPUTS}


class Backward:
    """The backward pass of a plan, in the order of its methods: `output`, the tiles, `fields`.

    found: the gradients by the dotted names of their fields. Errors: FieldConflict for an option that is not KNOWN
    """

    def __init__(self, plan: Plan, lib: ArrayLibrary, loaded: LoadedOperands) -> None:
        assert plan.gradients is not None
        assert loaded.operands is not None
        unknown = [name for name in plan.options - KNOWN if not name.startswith(("terms.", "gradients."))]
        if unknown:
            raise FieldConflict.at("/gradients", "options whose gradients are known", ", ".join(sorted(unknown)))
        self._plan, self._lib, self._loaded = plan, lib, loaded
        self._gradients, self._operands = plan.gradients, loaded.operands
        self._gated: Array | None = None  # the gradient of the head outputs after the gate
        self.found: Named = {}

    def output(self, head_outputs: Array | None) -> Array | None:
        """The gradient (b, h, q, e) of the head outputs; None for zeros. head_outputs: needed by output steps only"""
        plan, lib = self._plan, self._lib
        if self._gradients.output is None:
            return None
        gradient = lib.load(self._gradients.output)
        if "h" not in plan.layout:
            linear = plan.roles.output_map
            if linear is not None:
                gradient = lib.linear(gradient, lib.load(linear.weight).T)  # b q h·e
            gradient = split_heads(gradient, plan.sizes.num_heads, lib.xp)
        self._gated = gradient
        if self._loaded.gate is not None:
            gradient = gradient * self._clean(self._loaded.gate)
        if not plan.output_steps:
            return gradient
        assert head_outputs is not None
        bounds = norms_of_outputs(plan, self._loaded)
        return self._steps(head_outputs, gradient, plan.output_steps, bounds, "output_norm")

    def fields(self, head_outputs: Array, tiles: Named) -> Named:
        """All gradients that the plan returns, by their names. tiles: what the tiles added up, by field"""
        plan, xp = self._plan, self._lib.xp
        self._gate_and_output_map(head_outputs)
        for name, role in zip(ROLES, plan.roles.inputs, strict=True):
            if name in tiles:
                self._role(name, role, tiles.pop(name))
        if "scale" in tiles and plan.head_scales is None:
            tiles["scale"] = xp.sum(tiles["scale"])
        shapes = {gradient.field: gradient.shape for gradient in self._gradients.wanted}
        for name, array in tiles.items():
            if name == "bias":
                array = unaligned(array, shapes[name], plan.score_axes, plan.sizes, xp)
            self.found[name] = array
        return {PREFIX + name: self._in_shape(name, shape) for name, shape in shapes.items()}

    def _in_shape(self, name: str, shape: tuple[int, ...]) -> Array:
        """A gradient in the shape of its field; zeros if nothing depends on the field."""
        found = self.found.get(name)
        if found is not None:
            return self._lib.xp.reshape(found, shape)
        assert self._gradients.output is None or 0 in shape, f"nobody computed the gradient of {name}"
        return self._lib.zeros(shape, self._plan.compute_dtype)

    def _gate_and_output_map(self, head_outputs: Array) -> None:
        """The gradients of the gate and of the output map."""
        plan, lib, xp, gate = self._plan, self._lib, self._lib.xp, self._loaded.gate
        cotangent = self._gradients.output
        if cotangent is None or self._gated is None:
            return
        outputs = head_outputs
        if plan.output_steps:
            outputs = stepped_outputs(plan, lib, self._loaded, head_outputs)
        if gate is not None:
            of_gate = self._gated * outputs
            if gate.shape[-1] == 1:
                of_gate = xp.sum(of_gate, axis=-1, keepdims=True)
            if plan.gate is not None:
                self.found["gate"] = of_gate
            else:
                self._gate_map(of_gate)
        if plan.roles.output_map is not None and self._gradients.wants("projection.output"):
            joined = join_heads(gated(plan, lib, gate, xp.asarray(outputs, copy=True)), xp)
            self._map_parameters(plan.roles.output_map, joined, lib.load(cotangent), "projection.output")

    def _gate_map(self, of_gate: Array) -> None:
        """The gradients of the map of the gates, and of its source. of_gate: (b, h, q, e or 1)"""
        plan, lib, xp, linear = self._plan, self._lib, self._lib.xp, self._plan.roles.gate_map
        assert linear is not None
        assert self._operands.gate_source is not None
        source = self._clean(lib.load(self._operands.gate_source))
        mapped = apply_map(linear, source, lib)  # b q h·e, or b q h
        of_mapped = join_heads(of_gate, xp) * activation_slope(mapped, plan.roles.gate_activation, xp)
        self._source(plan.roles.query.field, self._map(linear, source, of_mapped, "projection.gate"), None)

    def _role(self, name: str, role: Role, gradient: Array) -> None:
        """The gradients of what query, key or value come from. gradient: (b, heads, l, d), of past and new tokens"""
        plan, lib, past = self._plan, self._lib, self._plan.roles.past_length
        if name != "query" and past:
            self.found[f"past_{name}"] = gradient[:, :, :past]
            gradient = gradient[:, :, past:]
        index = ROLES.index(name)
        heads = plan.sizes.num_heads if name == "query" else plan.sizes.num_kv_heads
        tokens = self._clean(lib.load((self._operands.query, self._operands.key, self._operands.value)[index]))
        steps = plan.steps[index]
        if steps:
            before = heads_of(tokens, role, heads, lib)
            bounds = norms_after_maps(plan, self._operands)[index]
            gradient = self._steps(finite(before, lib.xp), gradient, steps, bounds, f"{name}_norm")
        if role.map is None:
            self._source(role.field, gradient, heads)
            return
        of_mapped = join_heads(gradient, lib.xp)
        self._source(role.field, self._map(role.map, tokens, of_mapped, f"projection.{name}"), None)

    def _steps(self, array: Array, gradient: Array, steps: Steps, bounds: np.ndarray, norm: str) -> Array:
        """The gradient (b, h, l, d) of an operand before its steps, and those of the parameters of its norm.

        array: before the steps; gradient: after them; bounds: as of `stepped`; norm: the field of the norm
        """
        lib = self._lib
        stages: list[tuple[OperandStep, Array, np.ndarray]] = []
        for step in steps:
            if stages:
                former, before, bounds = stages[-1]
                array = finite(former.apply(before, lib, bounds), lib.xp)
                bounds = np.broadcast_to(former.bound(bounds, tuple(before.shape), lib.compute_dtype), bounds.shape)
            stages.append((step, array, bounds))
        for step, before, bound in reversed(stages):
            gradient, parameters = step.backward(before, gradient, lib, bound)
            self.found |= {f"{norm}.{name}": array for name, array in parameters.items()}
        return gradient

    def _map(self, linear: DenseMap, tokens: Array, gradient: Array, place: str) -> Array:
        """The gradient (b, l, in) of what goes into a map, and those of the map. gradient: (b, l, out)"""
        self._map_parameters(linear, tokens, gradient, place)
        return self._lib.linear(gradient, self._lib.load(linear.weight).T)

    def _map_parameters(self, linear: DenseMap, tokens: Array, gradient: Array, place: str) -> None:
        """The gradients of the arrays of a map. tokens: (b, l, in), what goes in; gradient: (b, l, out)"""
        xp = self._lib.xp
        field = linear.pointer.rpartition("/")[2]
        if self._gradients.wants(f"{place}.{field}"):
            given, returned = (xp.reshape(array, (-1, array.shape[-1])) for array in (tokens, gradient))
            product = xp.permute_dims(returned, (1, 0)) @ given  # out in, of all entries at once
            if linear.heads is not None:
                product = xp.reshape(product, (linear.heads, -1, product.shape[-1]))
            self.found[f"{place}.{field}"] = product if field == "weight" else xp.swapaxes(product, -1, -2)
        if linear.bias is not None:
            self.found[f"{place}.bias"] = xp.sum(gradient, axis=(0, 1))

    def _source(self, field: str, gradient: Array, heads: int | None) -> None:
        """Add to the gradient of a source, (b, heads, l, d), or (b, l, in) if `heads` is None."""
        wanted = self._gradients.named(PREFIX + field)
        if wanted is None:
            return
        found = from_canonical(gradient, wanted.shape, self._plan.layout, heads, self._lib.xp)
        self.found[field] = self.found[field] + found if field in self.found else found

    def _clean(self, array: Array) -> Array:
        """Numbers of tokens, with 0 for what is not finite: only hidden tokens may have it."""
        return array if self._operands.finite.all() else finite(array, self._lib.xp)
