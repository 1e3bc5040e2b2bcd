"""How an implementation is asked for gradients.

One with a parameter `grad_output` or `grad_logsumexp` returns them by name. Of others that are given tensors, or return
arrays of JAX, torch or JAX computes them from the output. All others are not asked.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Mapping
from contextlib import suppress
from typing import Any, Final

import numpy as np

from attention_service.attention.gradients import PREFIX
from attention_service.codecs.array_objects import as_numpy
from attention_service.comparison.inputs import COTANGENTS
from attention_service.conformance.target import Target, Unsupported, WithTensors, call, parameters, supported_answer

NOT_ASKED: Final = "not asked for gradients"
NO_WAY: Final = (
    f"{NOT_ASKED}: it has no parameter grad_output, and returns neither a tensor (--torch) nor an array of JAX"
)


def is_differentiated(fields: Mapping[str, Any]) -> bool:
    """True if a request has gradients of the output or the logsumexp."""
    return not COTANGENTS.keys().isdisjoint(fields)


def call_gradients(target: Target, fields: Mapping[str, Any], names: Collection[str]) -> dict[str, np.ndarray]:
    """The gradients with these names of a request, of arrays of its own: what an implementation returns, or what torch
    or JAX make of its output.

    Errors: as of `call`; Unsupported also for an implementation that cannot be asked.
    """
    known = parameters(target) or {}
    takes_all = any(parameter.kind.name == "VAR_KEYWORD" for parameter in known.values())
    if not COTANGENTS.keys().isdisjoint(known):
        is_known = takes_all or "gradients" in known  # which says nothing beside the names
        return call(target, {name: fields[name] for name in fields if is_known or name != "gradients"}, names)
    forward = {name: value for name, value in fields.items() if name not in {*COTANGENTS, "gradients"}}
    cotangents = {name.removeprefix(PREFIX): fields[name] for name in COTANGENTS if name in fields}
    leaves = [name.removeprefix(PREFIX) for name in names]
    if isinstance(target, WithTensors):
        return _named(_by_torch(target, forward, cotangents, leaves))
    if takes_all:
        with suppress(Unsupported):
            return call(target, fields, names)
    if _returns_jax(_outputs(target, forward, cotangents)):
        return _named(_by_jax(target, forward, cotangents, leaves))
    raise Unsupported(NO_WAY)


def _named(gradients: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Gradients by their names, as arrays. gradients: by field"""
    return {PREFIX + name: np.asarray(array) for name, array in as_numpy(gradients).items()}


def _outputs(target: Target, fields: Mapping[str, Any], names: Collection[str]) -> dict[str, Any]:
    """What an implementation returns under these names. Errors: Unsupported."""
    found = supported_answer(target, fields)
    if "logsumexp" in names and "logsumexp" not in found:  # which some return only if they are asked
        found = supported_answer(target, {**fields, "include": ["logsumexp"]})
    for name in names:
        if name not in found:
            raise Unsupported(f"returns no {name}")
    return {name: found[name] for name in names}


def _by_torch(
    target: WithTensors, fields: Mapping[str, Any], cotangents: Mapping[str, np.ndarray], leaves: Collection[str]
) -> dict[str, Any]:
    """The gradients of these fields by torch's autograd. Errors: Unsupported where it has none."""
    import torch

    tensors = {name: target.tensor(fields[name].copy()).requires_grad_() for name in leaves}
    outputs = _outputs(target, {**fields, **tensors}, cotangents)
    for name, tensor in outputs.items():
        if not (isinstance(tensor, torch.Tensor) and tensor.requires_grad):
            raise Unsupported(f"{NOT_ASKED}: autograd does not know where its {name} comes from")
    given = [target.tensor(cotangents[name].copy()).to(tensor.dtype) for name, tensor in outputs.items()]
    try:
        found = torch.autograd.grad([*outputs.values()], [*tensors.values()], given, materialize_grads=True)
    except NotImplementedError as error:
        raise Unsupported(f"{NOT_ASKED}: {error}") from None
    return dict(zip(leaves, found, strict=True))


def _returns_jax(outputs: Mapping[str, Any]) -> bool:
    """True if all outputs are arrays of JAX."""
    jax = sys.modules.get("jax")  # whoever has such an array has imported it
    return jax is not None and all(isinstance(array, jax.Array) for array in outputs.values())


def _by_jax(
    target: Target, fields: Mapping[str, Any], cotangents: Mapping[str, np.ndarray], leaves: Collection[str]
) -> dict[str, Any]:
    """The gradients of these fields by jax.vjp. Errors: Unsupported for a function that JAX cannot trace."""
    import jax

    def outputs(arrays: dict[str, Any]) -> dict[str, Any]:
        return _outputs(target, {**fields, **arrays}, cotangents)

    try:
        made, pull = jax.vjp(outputs, {name: jax.numpy.asarray(fields[name]) for name in leaves})
    except (jax.errors.TracerArrayConversionError, jax.errors.ConcretizationTypeError) as error:
        raise Unsupported(f"{NOT_ASKED}: JAX cannot trace it: {str(error).partition(chr(10))[0]}") from None
    given = {name: jax.numpy.asarray(cotangents[name], array.dtype) for name, array in made.items()}
    if "logsumexp" in given:
        [alone] = pull({name: array if name == "logsumexp" else 0 * array for name, array in given.items()})
        if not any(np.asarray(array).any() for array in alone.values()):  # as stop_gradient makes them
            raise Unsupported(f"{NOT_ASKED}: JAX is told to stop those of its logsumexp")
    [found] = pull(given)
    return dict(found)
