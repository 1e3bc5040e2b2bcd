"""Parts to merge, from the fields of a request: what POST /attention/merge and merge() share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, NamedTuple

import numpy as np

from attention_service.attention.arrays import FLOATS, compute_dtype, per_head, wider, widest
from attention_service.attention.result import Metadata, Result
from attention_service.codecs.decoded import Decoded
from attention_service.engines.partial import State, merge, rounded
from attention_service.errors import Overflow, ShapeMismatch
from attention_service.schemas.merge import MergeRequest
from attention_service.schemas.validate import validate

LAYOUTS: Final = {2: "ld", 3: "bld", 4: "bhld"}


class Parts(NamedTuple):
    """A request that is validated. states: outputs as ([b,] [h,] q, e); order: of their axes in the layout"""

    states: list[State]
    base: str
    sinks: np.ndarray | None
    order: tuple[int, ...]
    dtype: np.dtype
    decoded: Decoded

    def merged(self, check: Callable[[], None]) -> Result:
        """The result. Errors: InvalidRequest of every kind, and what `check` raises."""
        output, sums = merge(self.states, self.base, self.sinks, check=check)
        with np.errstate(over="ignore"):
            typed = output.astype(self.dtype)
        if not np.isfinite(typed).all():
            raise Overflow.of("/dtype", "a type that can hold the output", self.dtype.name, wider(self.dtype))
        arrays = {
            "output": typed.transpose(np.argsort(self.order)),
            "logsumexp": rounded("logsumexp", sums, compute_dtype(self.dtype)),
        }
        b, h, q, e = (1,) * (4 - output.ndim) + output.shape
        empty = int(np.isinf(sums).sum())
        about = ("numpy", "cpu", self.dtype.name, "merge", h, h, b, q, 0, 0, e, 1.0, empty, ())
        return Result(arrays, Metadata(*about))


def make_parts(decoded: Decoded) -> Parts:
    """The parts that decoded fields hold. Errors: InvalidRequest of every kind."""
    body = validate(MergeRequest, decoded.fields, decoded.unread)
    states = [State(part.output, part.logsumexp) for part in body.parts]
    first = states[0].output
    layout = body.layout or LAYOUTS.get(first.ndim, "bhld")
    for n, state in enumerate(states):
        if state.output.ndim != len(layout):
            axes = f"the axes {', '.join(layout)}"
            raise ShapeMismatch.of(f"/parts/{n}/output", axes, state.output)
    order = tuple(layout.index(letter) for letter in "bhld" if letter in layout)
    states = [state._replace(output=state.output.transpose(order)) for state in states]
    sinks = body.sinks
    if sinks is not None:
        heads = first.shape[layout.index("h")] if "h" in layout else 1
        sinks = per_head(sinks, "/sinks", heads, FLOATS["float64"])[:, None]
        sinks = sinks if "h" in layout else sinks[0]
    dtype = FLOATS[body.dtype] if body.dtype else widest([state.output.dtype for state in states])
    return Parts(states, body.logsumexp_base or "e", sinks, order, dtype, decoded)
