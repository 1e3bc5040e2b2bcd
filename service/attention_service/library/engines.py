"""call() and merge(): calls of other libraries, and results of parts of the keys."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

import numpy as np

from attention_service.attention.arrays import FLOATS
from attention_service.backends.base import no_check
from attention_service.codecs.array_objects import PLAIN, as_numpy
from attention_service.codecs.decoded import Decoded
from attention_service.engines.partial import State
from attention_service.errors import InvalidRequest
from attention_service.library import calls
from attention_service.library.result import AttentionResult
from attention_service.library.types import Array
from attention_service.pipeline.parts import make_parts
from attention_service.schemas.call import CallRequest
from attention_service.schemas.validate import validate

# Layouts whose outputs have the last two axes of logsumexp in the other order.
SWAPPED: Final = ("blhd", "lbd")


class CallResult(NamedTuple):
    """What a function of another library returns, exactly, in its own axes, with its own base of logarithms.

    Rows that belong to no sequence are NaN. attention_weights: (h, q, k) of each sequence, None unless asked for
    heads_first: True if logsumexp has heads before queries, which output has behind them, for `merge`
    """

    output: np.ndarray
    logsumexp: np.ndarray
    attention_weights: list[np.ndarray] | None = None
    heads_first: bool = False


def call(
    function: str,
    /,
    *,
    version: int | None = None,
    include: Sequence[str] | None = None,
    dtype: str | None = None,
    **arguments: Any,
) -> CallResult:
    """The exact answer of a function of FlashAttention, FlashInfer, torch or vLLM, by its own name and arguments.

        result = call("flash_attn.flash_attn_varlen_func", q=q, k=k, v=v, cu_seqlens_q=bounds, cu_seqlens_k=bounds)
        result.output, result.logsumexp

    docs/coming-from.md lists functions and arguments. Of a class of FlashInfer the arguments are those of its
    constructor, of `plan` and of `run` together. All is computed in float64.

    Args:
        function: Its name, `flash_attn.flash_attn_func` for example.
        version: Of FlashAttention: 2, 3 or 4, which differ in names and windows. Default: the names of all.
        include: ["attention_weights"] returns the weights, an array for each sequence.
        dtype: float32, float16 or bfloat16: what results are rounded to, logsumexp to float32 at least. Default:
            float64.
        arguments: Those of the function. None stands for one that is left out.

    Errors: attention_service.errors.InvalidRequest, with a pointer to each argument at fault.
    """
    __tracebackhide__ = True
    from attention_service.pipeline.calls import decoded_call

    try:
        decoded = called(function, arguments, version=version, include=include, dtype=dtype)
        body = validate(CallRequest, decoded.fields)
        weights = "attention_weights" in (body.include or ())
        answer = decoded_call(body, decoded).answer(
            lambda fields: calls.computed(Decoded(fields, frozenset())), weights=weights
        )
        return CallResult(*answer.rounded(FLOATS[body.dtype or "float64"]))
    except InvalidRequest as error:  # a mistake of the caller, who has no use for the lines that found it
        raise error.with_traceback(None) from None


def merge(
    parts: Sequence[Any],
    *,
    logsumexp_base: str | None = "e",
    sinks: Array | None = None,
    layout: str | None = None,
    dtype: str | None = None,
) -> State:
    """The output and the logsumexp over all keys, from what attention over parts of them returned.

        merged = merge([(output, logsumexp), (other_output, other_logsumexp)])
        merged.output, merged.logsumexp

    Args:
        parts: Of each part, the output and its logsumexp ([b,] [h,] q): a tuple, a dict with these names, or a result
            of `attend` or `call`; the logsumexp of `call` is brought into these axes, or without a layout into those of
            its output. A row whose logsumexp is infinite, of either sign, has no key in the part, and its output does
            not count.
        logsumexp_base: The base of all logarithms, "e" or "2".
        sinks: (h,): one natural logit per head that no part has yet. Default: none.
        layout: The axes of all outputs. Default: ld, bld or bhld, by rank.
        dtype: Type of the output. Default: the widest of the outputs; all is computed in float64.

    Errors: attention_service.errors.InvalidRequest, with a pointer to each field at fault.
    """
    __tracebackhide__ = True
    try:
        fields: dict[str, Any] = {"logsumexp_base": logsumexp_base, "layout": layout, "dtype": dtype}
        fields["parts"] = [_part(part, n, layout) for n, part in enumerate(parts)]
        fields["sinks"] = as_numpy(sinks, "/sinks")
        found = make_parts(Decoded(fields, frozenset())).merged(no_check)
        return State(found["output"], found["logsumexp"])
    except InvalidRequest as error:
        raise error.with_traceback(None) from None


def _part(part: Any, n: int, layout: str | None) -> dict[str, Any]:
    """A part by its names, with arrays that have none."""
    if isinstance(part, CallResult) and part.logsumexp.ndim > 1 and part.heads_first != (str(layout) in SWAPPED):
        part = part._replace(logsumexp=part.logsumexp.swapaxes(-1, -2))
    is_result = isinstance(part, CallResult | AttentionResult)
    given = {"output": part.output, "logsumexp": part.logsumexp} if is_result else calls.named(part)
    found = {}
    for name, value in given.items():
        array = as_numpy(value, f"/parts/{n}/{name}")
        found[name] = np.array(array, np.float64) if isinstance(array, float | int) else array
    return found


def called(function: Any, arguments: Mapping[str, Any], **fields: Any) -> Decoded:
    """The fields of the request of a call that are not None. Errors: InvalidArray for an argument."""
    given = {name: converted(name, value) for name, value in arguments.items()}
    present = {name: as_numpy(value, f"/{name}") for name, value in fields.items() if value is not None}
    return Decoded({"call": function, "arguments": given, **present}, frozenset())


def converted(name: str, value: Any) -> Any:
    """An argument with ndarrays in the place of arrays of other libraries; a pair of arrays stays a pair."""
    if (
        isinstance(value, list | tuple)
        and len(value) == 2
        and not any(type(one) in PLAIN or isinstance(one, list) for one in value)
    ):
        return [as_numpy(one, f"/{name}/{n}") for n, one in enumerate(value)]
    return as_numpy(value, f"/{name}")
