"""From the fields of a request to the question about a call."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import numpy as np

from attention_service.attention.arrays import FLOATS
from attention_service.codecs.decoded import Decoded
from attention_service.comparison.calls.question import CallQuestion, make_call_question
from attention_service.engines.table import decode
from attention_service.errors import InvalidRequest
from attention_service.pipeline.calls import arguments_of, decoded_call, in_arguments, untyped_arguments
from attention_service.schemas.compare import CompareCallRequest
from attention_service.schemas.validate import validate


def call_question(decoded: Decoded, within: Callable[[], AbstractContextManager[None]] = in_arguments) -> CallQuestion:
    """The question of a request that compares a call.

    within: the context that arguments are read in, which points their faults into /arguments

    Errors: InvalidRequest of every kind.
    """
    body = validate(CompareCallRequest, decoded.fields, decoded.unread)
    with within():
        call = decoded_call(body, decoded)
    returned = None if body.actual is None else body.actual.arrays()
    given = decoded.fields.get("actual") or {}
    untyped = [name for name in returned or () if not isinstance(given.get(name), np.ndarray)]
    return make_call_question(body.call, call, returned, untyped=untyped, dtype=body.dtype, judging=body)


def typed_arguments(decoded: Decoded) -> dict[str, Any]:
    """The arguments of a call, with arrays that came as lists in types that functions take.

    Indices, which a call refuses as floats, become int32, as in all libraries. Other numbers get the `dtype` beside the
    call, by default float64. Errors: as of call_question.
    """
    body = validate(CompareCallRequest, decoded.fields, decoded.unread)
    with in_arguments():
        arguments, untyped = arguments_of(body), untyped_arguments(decoded)
    kind = FLOATS[body.dtype or "float64"]
    for name in sorted(untyped):
        array = arguments[name]
        if isinstance(array, np.ndarray) and array.dtype.kind in "if":
            arguments[name] = array.astype(kind)
            if array.dtype.kind == "i" and not _is_accepted(body, arguments, untyped):
                arguments[name] = array.astype(np.int32)
    return arguments


def _is_accepted(body: CompareCallRequest, arguments: dict[str, Any], untyped: set[str]) -> bool:
    try:
        decode(body.call, arguments, body.version, untyped)
    except InvalidRequest:
        return False
    return True
