"""From the fields of a request to the question about a call."""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from attention_service.attention.arrays import FLOATS
from attention_service.codecs.decoded import Decoded
from attention_service.comparison.calls.question import CallQuestion, make_call_question
from attention_service.comparison.legal import chosen
from attention_service.comparison.tolerances import Tolerance
from attention_service.engines.table import decode
from attention_service.errors import InvalidRequest
from attention_service.pipeline.calls import in_arguments, named_call
from attention_service.schemas.compare import CompareRequest
from attention_service.schemas.request import CALL
from attention_service.schemas.validate import validate

# The fields that may stand beside a call in a comparison; the last two have no effect in any.
BESIDE: Final = CALL | {"actual", "tolerance", "legal", "time_limit", "reference", "dtype", "include", "encoding"}


def call_question(decoded: Decoded) -> CallQuestion:
    """The question of a request that is a call. Errors: InvalidRequest of every kind."""
    body = validate(CompareRequest, decoded.fields, decoded.unread)
    name, arguments, untyped = named_call(body, decoded, BESIDE)
    with in_arguments():
        call = decode(name, arguments, body.version, untyped)
    returned = None if body.actual is None else body.actual.arrays()
    given = decoded.fields.get("actual") or {}
    own = body.tolerance
    return make_call_question(
        name,
        call,
        returned,
        untyped=[one for one in returned or () if not isinstance(given.get(one), np.ndarray)],
        dtype=body.dtype,
        tolerance=None if own is None else Tolerance("yours", own.rtol, own.atol, own.mismatches),
        liberties=chosen(body.legal),
        time_limit=body.time_limit,
        reference=bool(body.reference),
    )


def typed_arguments(decoded: Decoded) -> dict[str, Any]:
    """The arguments of a call, with arrays that came as lists in types that functions take.

    Indices, which a call refuses as floats, become int32, as in all libraries. Other numbers get the `dtype` beside the
    call, by default float64. Errors: as of call_question.
    """
    body = validate(CompareRequest, decoded.fields, decoded.unread)
    function, arguments, untyped = named_call(body, decoded, BESIDE)
    kind = FLOATS[body.dtype or "float64"]
    for name in sorted(untyped):
        array = arguments[name]
        if isinstance(array, np.ndarray) and array.dtype.kind in "if":
            arguments[name] = array.astype(kind)
            if array.dtype.kind == "i" and not _is_accepted(function, arguments, body.version, untyped):
                arguments[name] = array.astype(np.int32)
    return arguments


def _is_accepted(function: str, arguments: dict[str, Any], version: int | None, untyped: set[str]) -> bool:
    try:
        decode(function, arguments, version, untyped)
    except InvalidRequest:
        return False
    return True
