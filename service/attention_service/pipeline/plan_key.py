"""What the plan of a request follows from, as the key under which the plan is kept for later requests."""

from __future__ import annotations

import json
from collections.abc import Hashable
from typing import Any, Final, TypeVar

import numpy as np

from attention_service.attention.spec import SOURCES
from attention_service.codecs.decoded import Decoded
from attention_service.schemas.request import AttentionRequest
from attention_service.schemas.validate import misplaced

T = TypeVar("T")
# Plans that are kept. A service meets few kinds of requests, and without arrays a plan is small.
MAX_PLANS: Final = 256
# Characters of the fields, as JSON, of a request whose plan is kept.
MAX_TEXT: Final = 1024
# Longest string or list of such a request.
MAX_LENGTH: Final = 64
# Bytes of the arrays of a plan that is kept, which hold tables and masks.
MAX_ARRAYS: Final = 2**16


def keep(plans: dict[Hashable, T], key: Hashable, plan: T, size: int) -> None:
    """Keep a plan for later requests if its arrays have at most MAX_ARRAYS bytes; too many plans are all dropped."""
    if size <= MAX_ARRAYS:
        if len(plans) >= MAX_PLANS:
            plans.clear()
        plans[key] = plan


def is_short(value: Any, most: int) -> bool:
    """True if a decoded value has at most so many characters and items, of which no more are looked at."""
    left, waiting = most, [value]
    while waiting and left >= 0:
        one = waiting.pop()
        if isinstance(one, str | list | dict):
            left -= len(one)
            if left >= 0 and not isinstance(one, str):
                waiting += one if isinstance(one, list) else [*one, *one.values()]
    return left >= 0


def plan_key(decoded: Decoded) -> Hashable | None:
    """All that specification and plan depend on, if that is shapes and a few numbers and names; else None."""
    if decoded.unread and misplaced(AttentionRequest, decoded.unread):
        return None
    parts: list[Hashable] = []
    options: dict[str, Any] = {}
    for name, value in decoded.fields.items():
        if len(name) > MAX_LENGTH:
            return None
        if name in SOURCES:
            if type(value) is not np.ndarray:
                return None
            parts.append((name, value.shape, value.dtype))
        elif (isinstance(value, str | list) and len(value) > MAX_LENGTH) or (
            isinstance(value, list | dict) and not is_short(value, MAX_TEXT)
        ):
            return None
        elif isinstance(value, str):
            parts.append((name, value))
        else:
            options[name] = value
    try:
        text = json.dumps(options) if options else ""  # unlike equality, it tells True from 1, and 0.0 from -0.0
    except (TypeError, ValueError):  # other arrays, or an integer of thousands of digits
        return None
    return (decoded.untyped, text, *parts) if len(text) <= MAX_TEXT else None
