"""Operand steps: what is done to query, key and value before the scores, and to head outputs, one class each.

To add a step write a class with all methods of `OperandStep`, and put it into STEPS. Backends, the estimate of memory
and the comparison use nothing but these methods. Paths that begin before the steps refuse it until they are taught.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import fields
from typing import Any, Final, cast

from attention_service.attention.score_term import Frame
from attention_service.attention.spec import ROLES, AttentionSpec
from attention_service.attention.steps.clip import ClipStep
from attention_service.attention.steps.norm import NormStep
from attention_service.attention.steps.rotation import RotationStep
from attention_service.attention.steps.step import OperandStep

# What steps are done to: query, key and value after their maps, and the outputs of heads before the gate.
STEPPED: Final = (*ROLES, "output")
# In the order of computation; a norm may also follow the rotation.
STEPS: Final[tuple[type[OperandStep], ...]] = (NormStep, ClipStep, RotationStep)
# The options of plans that the steps are, see attention_service.attention.options.
OPTIONS: Final = frozenset(
    f"{role}_steps.{kind.__name__}{field}"
    for role in STEPPED
    for kind in STEPS
    for field in ("", *(f".{field.name}" for field in fields(cast(Any, kind))))
)
Steps = tuple[OperandStep, ...]


def make_steps(spec: AttentionSpec, frame: Frame) -> dict[str, Steps]:
    """The steps of a request by what they are done to, in the order of computation. Errors: InvalidRequest."""
    made = [kind.of(spec, frame) for kind in STEPS]
    return {role: in_order(steps[role] for steps in made if role in steps) for role in STEPPED}


def in_order(steps: Iterable[OperandStep]) -> Steps:
    """Steps of one operand in the order of computation."""

    def place(step: OperandStep) -> int:
        follows_all = isinstance(step, NormStep) and step.position == "after"
        return len(STEPS) if follows_all else STEPS.index(type(step))

    return tuple(sorted(steps, key=place))
