"""From the fields of a request to the question that it asks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, cast

import numpy as np

from attention_service.attention.arrays import is_float, widest
from attention_service.attention.outputs import FORWARD, OUTPUTS, row_of
from attention_service.attention.spec import AttentionSpec, DType
from attention_service.codecs.decoded import Decoded
from attention_service.comparison.actual import check_names, is_gradient
from attention_service.comparison.gradients.case import included
from attention_service.comparison.legal import chosen
from attention_service.comparison.tolerances import Tolerance
from attention_service.comparison.truth import GradientQuestion, Question
from attention_service.errors import InvalidValue, MissingField
from attention_service.layers.layer import Layer
from attention_service.pipeline.prepare import planned, validated
from attention_service.schemas.compare import ActualArrays, CompareRequest

# The fields of a request that hold what kernels returned.
ANSWERS: Final = ("actual", "against")


def make_question(decoded: Decoded, layer: Layer | None = None) -> Question:
    """The question of a decoded request. layer: the stored layer that it names

    Errors: InvalidRequest of every kind.
    """
    body, spec = validated(CompareRequest, decoded, layer, allow_non_finite=True)
    actual, against = (_sent(getattr(body, name), decoded.fields.get(name), name, spec) for name in ANSWERS)
    if against is not None and actual is None:
        raise MissingField.at("/actual", "the first answer, beside against", "none")
    if actual and spec.dtype is None and spec.sources.keys() <= decoded.untyped:
        spec = spec._replace(dtype=_dtype_of(actual, decoded))
    own = body.tolerance
    tolerance = None if own is None else Tolerance("yours", own.rtol, own.atol, own.mismatches)
    is_base2, liberties = body.logsumexp_base == "2", chosen(body.legal)
    gradients = _gradients(spec, layer, {**(actual or {}), **(against or {})}, is_asked=actual is None)
    return Question(
        *planned(spec.forward(), layer),
        is_base2,
        tolerance,
        liberties,
        gradients=gradients,
        actual=actual,
        against=against,
        reference=bool(body.reference),
        time_limit=body.time_limit,
    )


def _gradients(
    spec: AttentionSpec, layer: Layer | None, sent: Mapping[str, np.ndarray], *, is_asked: bool
) -> GradientQuestion | None:
    """The gradients that were sent, or of which the power is asked: all that the request has; None for none.

    Errors: MissingField without a cotangent, and those of a plan.
    """
    names = tuple(name for name in sent if is_gradient(name))
    has_cotangent = spec.grad_output is not None or spec.grad_logsumexp is not None
    if not names and not (is_asked and has_cotangent):
        return None
    if names and not has_cotangent:
        raise MissingField.at("/grad_output", f"the gradient of output, which {names[0]} belongs to", "none")
    include = included(names)
    spec = spec._replace(gradients=None if names else "all", include=include)  # type: ignore[arg-type]  # names of arrays
    whole = spec._replace(top_k=None, average_heads=False)
    spec, plan = planned(whole, layer)
    assert plan.gradients is not None
    known = [one.name for one in plan.gradients.wanted]
    for name in names:
        if name not in known and name not in OUTPUTS:
            raise InvalidValue.of(f"/actual/{name.replace('.', '/')}", f"one of {', '.join(known)}", name)
    return GradientQuestion(spec, plan, names or tuple(known))


def _sent(sent: ActualArrays | None, given: Any, name: str, spec: AttentionSpec) -> dict[str, np.ndarray] | None:
    """The arrays of an answer; None if there is none. given: the field as it was decoded; name: of the field"""
    if sent is None:
        return None
    arrays = sent.arrays()
    check_names(arrays, name, top_k=spec.top_k)
    for one in arrays:
        if isinstance(given.get(one), list) and one in FORWARD and row_of(one).may_be_minus_infinity:  # that a null is
            arrays[one] = np.where(np.isnan(arrays[one]), -np.inf, arrays[one])
    return arrays


def _dtype_of(actual: Mapping[str, np.ndarray], decoded: Decoded) -> DType | None:
    """The type of what a kernel returned, where the numbers of the request have none; None if it has none, either."""
    given = decoded.fields["actual"]
    typed = [array.dtype for name, array in actual.items() if isinstance(given.get(name), np.ndarray)]
    floats = [dtype for dtype in typed if is_float(dtype)]
    return cast(DType, widest(floats).name) if floats else None
