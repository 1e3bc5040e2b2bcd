"""Prepare: validate the fields of a request and make its plan, with the stored layer that it names.

Requests that others are made of, as those of a call, are also computed here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from attention_service.attention.plan import Plan
from attention_service.attention.planning import dtype_of, make_plan
from attention_service.attention.result import Result
from attention_service.attention.spec import AttentionSpec
from attention_service.backends.base import Backend, Check, no_check
from attention_service.codecs.decoded import Decoded
from attention_service.schemas.request import AttentionRequest
from attention_service.schemas.validate import validate

if TYPE_CHECKING:  # `attend` has no use for files, and for what reads their JSON
    from attention_service.layers.layer import Layer

B = TypeVar("B", bound=AttentionRequest)


def validated(
    schema: type[B], decoded: Decoded, layer: Layer | None = None, *, allow_non_finite: bool = False
) -> tuple[B, AttentionSpec]:
    """The validated body of a request, and its specification. Errors: InvalidRequest of every kind.

    layer: the stored layer that the request names, whose fields body and specification have, too
    allow_non_finite: accept infinity and NaN in keys and values
    """
    fields = decoded.fields if layer is None else layer.merged(decoded.fields)
    body = validate(schema, fields, decoded.unread)
    return body, body.attention_spec(decoded.untyped, allow_non_finite=allow_non_finite)


def planned(spec: AttentionSpec, layer: Layer | None = None) -> tuple[AttentionSpec, Plan]:
    """The plan of a specification, which then has the projection of its layer in the type of the request.

    Errors: InvalidRequest of every kind.
    """
    if layer is not None and spec.projection is not None:
        projection = layer.projection_in(dtype_of(spec), spec.projection)
        if projection is not None:
            spec = spec._replace(projection=projection)
    return spec, make_plan(spec)


def make_spec_and_plan(decoded: Decoded, *, allow_non_finite: bool = False) -> tuple[AttentionSpec, Plan]:
    """The specification of a request without a stored layer, and its plan. Arguments, errors: as of `validated`"""
    return planned(validated(AttentionRequest, decoded, allow_non_finite=allow_non_finite)[1])


def plan_of_fields(fields: Mapping[str, Any]) -> tuple[AttentionSpec, Plan]:
    """Specification and plan of fields that code made, whose hidden keys and values may be inf or NaN.

    Errors: InvalidRequest of every kind.
    """
    return make_spec_and_plan(Decoded(dict(fields), frozenset()), allow_non_finite=True)


def run_fields(fields: Mapping[str, Any], backend: Backend, check: Check = no_check) -> Result:
    """The result of such fields, on a backend. Errors: InvalidRequest of every kind, and what `check` raises."""
    check()
    spec, plan = plan_of_fields(fields)
    return backend.program(plan, spec)(spec.sources, check)
