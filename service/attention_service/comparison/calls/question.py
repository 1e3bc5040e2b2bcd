"""A question about a call of another library: its arguments, and what its function returned."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Final

import numpy as np

from attention_service.attention.arrays import FLOATS, is_float
from attention_service.comparison.actual import check_array
from attention_service.comparison.calls.merging import as_call
from attention_service.comparison.legal import CODED_WEIGHTS, LIBERTIES, chosen
from attention_service.comparison.tolerances import Tolerance
from attention_service.engines.call import Call, Merge
from attention_service.errors import MissingField
from attention_service.schemas.compare import Judging

# Libraries whose kernels return plus infinity as the logsumexp of rows that see no key.
PLUS_INFINITY: Final = ("flash_attn.", "torch.", "vllm.")


@dataclass(frozen=True)
class CallQuestion:
    """A call, and what a kernel returned for it.

    function: its name; call: its arguments, decoded; dtype: whose rounding is legal
    actual: output (slots, l, h, e) and logsumexp (slots, l, h), or one of them; None to ask what the call could show
    tolerance, liberties, time_limit: as of Question
    rows: of each head that are judged alone if they are right; None for all
    reference: True if the report shall have what is right
    is_brief: True to end the search when a mistake of addressing explains all, without others and without power
    """

    function: str
    call: Call | Merge
    dtype: np.dtype
    actual: Mapping[str, np.ndarray] | None = None
    tolerance: Tolerance | None = None
    liberties: frozenset[str] = LIBERTIES
    time_limit: float | None = None
    rows: int | None = None
    reference: bool = False
    is_brief: bool = False

    @cached_property
    def addressed(self) -> Call:
        """The call; one that merges as the attention that it is."""
        return as_call(self.call) if isinstance(self.call, Merge) else self.call

    @property
    def ignored(self) -> int:
        """How many rows of what was returned belong to no sequence."""
        rows = self.addressed.query.rows
        assert rows is not None
        return 0 if self.actual is None else rows.slots * rows.length - int(rows.lengths.sum())


def make_call_question(
    function: str,
    call: Call | Merge,
    returned: Mapping[str, np.ndarray] | None,
    *,
    untyped: Collection[str] = (),
    dtype: str | None = None,
    judging: Judging | None = None,
) -> CallQuestion:
    """The question about what a function returned, in its own axes.

    returned: output and logsumexp, or one of them; None for nothing; untyped: those of them that came as lists
    dtype: whose rounding is legal. Default: that of the output, else of the queries; judging: how to judge it

    Errors: InvalidRequest of every kind, with pointers into /actual.
    """
    judging = judging or Judging()
    own, liberties = judging.tolerance, chosen(judging.legal)
    addressed = as_call(call) if isinstance(call, Merge) else call
    actual = None if returned is None else _read(function, addressed, returned, untyped)
    typed = {name: array for name, array in (returned or {}).items() if name not in untyped}
    kind = FLOATS[dtype] if dtype is not None else _type_of(addressed, typed)
    tokens = (addressed.query, addressed.value)
    if "rounded_weights" in liberties and all(one.dtype.itemsize == 1 and one.dtype.kind != "i" for one in tokens):
        liberties |= {CODED_WEIGHTS}
    tolerance = None if own is None else Tolerance("yours", own.rtol, own.atol, own.mismatches)
    limit, reference = judging.time_limit, bool(judging.reference)
    return CallQuestion(function, call, kind, actual, tolerance, liberties, limit, reference=reference)


def _read(
    function: str, call: Call, returned: Mapping[str, np.ndarray], untyped: Collection[str]
) -> dict[str, np.ndarray]:
    """What was returned, with the axes (slots, l, h, …)."""
    if not returned:
        raise MissingField.at("/actual", "output or logsumexp", "none", "leave actual out for power")
    found = {}
    for name, array in returned.items():
        check_array(array, array.shape, f"/actual/{name}")
        found[name] = call.form.read(name, array, call.query, call.value.features, f"/actual/{name}")
    if "logsumexp" in found:
        sums = found["logsumexp"].astype(np.float64)
        if "logsumexp" in untyped:  # null
            sums[np.isnan(sums)] = -np.inf
        if function.startswith(PLUS_INFINITY):
            sums[np.isposinf(sums)] = -np.inf
        found["logsumexp"] = sums
    return found


def _type_of(call: Call, typed: Mapping[str, np.ndarray]) -> np.dtype:
    """The type whose rounding is legal: that of the output, else of the queries, for codes of 8 bits bfloat16."""
    output = typed.get("output")
    kind = call.query.dtype if output is None else output.dtype
    if kind.itemsize == 1:
        return FLOATS["bfloat16"]
    return kind if is_float(kind) else FLOATS["float64"]
