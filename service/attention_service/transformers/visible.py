"""Chosen rows and heads of a call, with a mask of them, by the rules of the implementation that gets the call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch
from transformers import masking_utils
from transformers.utils.generic import is_flash_attention_requested

from attention_service.transformers.call import AttentionCall, UnsupportedCall
from attention_service.transformers.interface import NAME

# Arguments that count in the mask that `with_rows` makes, and the dropout, which comes after the weights.
IN_MASK: Final = frozenset({"dropout", "is_causal", "sliding_window", "output_attentions"})
# Arguments with the axes … q, and one more.
BY_ROW: Final = ("indices", "position_bias", "sinks")
# Chosen keys, which models have put into the mask for these implementations.
CHOSEN: Final = frozenset({"indices", "block_indices"})


def with_rows(
    implementation: str | None, call: AttentionCall, rows: list[int], heads: list[int] | None
) -> AttentionCall:
    """The call with these queries and these heads only (None: all), and a mask that hides all that is to be hidden.

    Errors: UnsupportedCall for an implementation whose rules are not known.
    """
    name = implementation or "eager"
    index = torch.tensor(rows, device=call.query.device)
    mask = _rule(name)(call, index)
    dropped = IN_MASK | (CHOSEN if name in ("eager", "sdpa") else frozenset())
    arguments = {each: value for each, value in call.arguments.items() if each not in dropped}
    for each in BY_ROW:
        if arguments.get(each) is not None:
            arguments[each] = _rows_of(arguments[each], index)
    part = call._replace(query=call.query.index_select(2, index), mask=mask, arguments=arguments)
    return part if heads is None else _with_heads(part, heads)


def _with_heads(call: AttentionCall, heads: list[int]) -> AttentionCall:
    """The call with these query heads, each with the head of key and value that it reads."""
    groups = call.query.shape[1] // call.key.shape[1]
    theirs = [head // groups for head in heads]
    arguments = dict(call.arguments)
    for each in BY_ROW:
        # Indices without heads have three axes.
        if arguments.get(each) is not None and (each != "indices" or arguments[each].ndim == 4):
            arguments[each] = _heads_of(arguments[each], heads)
    if arguments.get("s_aux") is not None:
        arguments["s_aux"] = arguments["s_aux"].reshape(-1)[heads]
    return call._replace(
        query=call.query[:, heads],
        key=call.key[:, theirs],
        value=call.value[:, theirs],
        mask=None if call.mask is None else _heads_of(call.mask, heads),
        arguments=arguments,
    )


def _heads_of(array: Any, heads: list[int]) -> Any:
    """These heads of a mask or bias, which may stand for all heads."""
    return array if array.ndim < 3 or array.shape[-3] == 1 else array[..., heads, :, :]


def _rows_of(array: Any, rows: Any) -> Any:
    """These rows of a mask or bias, which may stand for all rows."""
    return array if array.ndim < 2 or array.shape[-2] == 1 else array.index_select(-2, rows)


def _eager(call: AttentionCall, rows: Any) -> Any:
    """The mask is added to the scores, also one of booleans or integers, as numbers.

    So a mask of booleans that a user gives hides nothing in these implementations. What they computed counts.
    """
    mask = _given(call, rows)
    return mask if mask is None or mask.is_floating_point() else mask.to(call.query.dtype)


def _given(call: AttentionCall, rows: Any) -> Any:
    """The mask as it is: booleans hide where they are false, numbers are added."""
    if call.mask is None:
        return None
    if not isinstance(call.mask, torch.Tensor):
        raise UnsupportedCall(f"{call.where}: attention_mask must be a tensor, not {type(call.mask).__name__}")
    return _rows_of(call.mask, rows)


def _sdpa(call: AttentionCall, rows: Any) -> Any:
    """Without a mask, a causal layer hides keys after the query, counting both from the first one."""
    if call.mask is not None or call.query.shape[2] == 1 or not _is_causal(call):
        return _given(call, rows)
    keys = torch.arange(call.key.shape[2], device=rows.device)
    return (keys <= rows[:, None])[None, None]


def _flash(call: AttentionCall, rows: Any) -> Any:
    """A mask (b, k) of padding; a causal layer and a window count from the last query and key."""
    positions = call.argument("position_ids")
    if call.mask is None and positions is not None and bool((positions.diff(dim=-1) != 1).any()):
        raise UnsupportedCall(f"{call.where}: packed sequences of flash attention")
    queries, length = call.query.shape[2], call.key.shape[2]
    keys = torch.arange(length, device=rows.device)
    own = (rows + length - queries)[:, None]
    seen = torch.ones((rows.numel(), length), dtype=torch.bool, device=rows.device)
    if is_causal := _is_causal(call):
        seen = keys <= own
    window = call.argument("sliding_window")
    if window is not None and length > window:
        seen = seen & (keys > own - window)
        seen = seen if is_causal else seen & (keys < own + window)
    found = seen[None, None]
    return found if call.mask is None else found & call.mask[:, None, None, -length:].bool()


def _flex(call: AttentionCall, rows: Any) -> Any:
    """A block mask has a function of batch entry, head, query and key."""
    if call.mask is None or isinstance(call.mask, torch.Tensor):
        return _eager(call, rows)
    sees: Any = call.mask.mask_mod
    for axes in ((None, None, None, 0), (None, None, 0, None), (None, 0, None, None), (0, None, None, None)):
        sees = torch.vmap(sees, in_dims=axes)
    batch, heads, _, _ = call.mask.shape
    places = (torch.arange(size, device=rows.device) for size in (batch, heads, call.key.shape[2]))
    entry, head, key = places
    return sees(entry, head, rows, key)


def _is_causal(call: AttentionCall) -> bool:
    """Whether a layer is causal: as it calls, else as its module says."""
    given = call.argument("is_causal")
    return bool(given) if given is not None else call.causal is not False


RULES: Final[dict[str, Callable[[AttentionCall, Any], Any]]] = {
    "eager": _eager,
    "sdpa": _sdpa,
    "flex_attention": _flex,
    NAME: _given,  # what its masks would not tell, it refuses itself
}


MADE: Final[dict[Callable[..., Any], Callable[[AttentionCall, Any], Any]]] = {
    masking_utils.eager_mask: _eager,
    masking_utils.sdpa_mask: _sdpa,
    masking_utils.flash_attention_mask: _flash,
    masking_utils.flex_attention_mask: _flex,
}


def _rule(name: str) -> Callable[[AttentionCall, Any], Any]:
    """The function that makes the mask of an implementation. Errors: UnsupportedCall for one that nobody knows here."""
    if name in RULES:
        return RULES[name]
    if is_flash_attention_requested(requested_attention_implementation=name):
        return _flash
    # One that somebody registered hides what the function of its masks says.
    for known, rule in MADE.items():
        if masking_utils.ALL_MASK_ATTENTION_FUNCTIONS.get(name) is known:
            return rule
    raise UnsupportedCall(f'capture does not know which keys attn_implementation="{name}" hides')
