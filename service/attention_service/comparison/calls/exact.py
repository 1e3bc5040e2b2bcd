"""The exact answer of a call, in float64."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from attention_service.attention.result import Result
from attention_service.backends.base import Backend, Check
from attention_service.codecs.decoded import Decoded
from attention_service.engines.call import Answer, Call, Fields
from attention_service.pipeline.prepare import make_spec_and_plan


def exact_answer(call: Call, backend: Backend, check: Check) -> Answer:
    """The answer of a call, in the axes and the base of its function. Errors: as of Call.answer."""

    def run(fields: Fields) -> Mapping[str, Any]:
        check()
        spec, plan = make_spec_and_plan(Decoded(fields, frozenset()), allow_non_finite=True)
        result: Result = backend.run(plan, spec, spec.sources, check)
        return result.arrays

    return call.answer(run, check=check)
