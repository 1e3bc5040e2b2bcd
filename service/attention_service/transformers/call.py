"""What a model of transformers asks of its attention function, as the fields of a request."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple

import torch

# Arguments that do not change the result, each with the reason. Others that are not None are refused by their names.
HARMLESS: Final = {
    "cache_position": "where the cache was written to; key and value have come out of it",
    "deterministic": "whether a fused kernel's gradients are the same in each run",
    "labels": "for the loss",
    "logits_to_keep": "which logits are computed, after the last layer",
    "num_items_in_batch": "for the loss",
    "output_hidden_states": "whether the model returns something else, too",
    "output_router_logits": "whether the model returns something else, too",
    "past_key_values": "the cache; key and value have come out of it",
    "position_embeddings": "query and key are rotated already",
    "position_ids": "query and key are rotated already; the mask separates packed sequences",
    "return_dict": "the form of the model's output",
    "use_cache": "whether the model returns its cache",
}
# Arguments of generate() about the choice of tokens, which some models hand on to their layers. Those whose names a
# layer could use for itself, like temperature and top_k, are not among them.
GENERATION: Final = frozenset(
    {"bad_words_ids", "begin_suppress_tokens", "bos_token_id", "decoder_start_token_id", "diversity_penalty",
     "do_sample", "early_stopping", "encoder_no_repeat_ngram_size", "eos_token_id", "force_words_ids",
     "forced_bos_token_id", "forced_eos_token_id", "length_penalty", "max_length", "max_new_tokens", "max_time",
     "min_length", "min_new_tokens", "no_repeat_ngram_size", "num_beam_groups", "num_beams", "num_return_sequences",
     "output_logits", "output_scores", "pad_token_id", "remove_invalid_values", "renormalize_logits",
     "repetition_penalty", "return_dict_in_generate", "stop_strings", "suppress_tokens"}
)  # fmt: skip
# Arguments that some functions of attention apply, and others take and do not read.
IGNORABLE: Final = frozenset({"position_bias", "s_aux", "softcap"})
# Arguments that have a meaning here, see `make_request`.
KNOWN: Final = frozenset(
    {"dropout", "indices", "is_causal", "output_attentions", "position_bias", "s_aux", "scaling", "sinks",
     "sliding_window", "softcap"}
)  # fmt: skip
ACCEPTED: Final = GENERATION | KNOWN | HARMLESS.keys()


class UnsupportedCall(NotImplementedError):
    """A call of a model that would be computed wrongly, and is therefore refused."""


class AttentionCall(NamedTuple):
    """A call of an attention function: query, key and value are (b, h, l, d), heads of key and value may be fewer.

    where: the class of the module that calls
    groups: how many query heads read a head of key and value, as the module has it
    causal: whether the module says that it is causal
    """

    where: str
    groups: int
    causal: bool | None
    query: Any
    key: Any
    value: Any
    mask: Any
    arguments: Mapping[str, Any]

    def argument(self, name: str) -> Any:
        """A keyword argument, or None."""
        return self.arguments.get(name)


def call_of(module: Any, query: Any, key: Any, value: Any, mask: Any, arguments: Mapping[str, Any]) -> AttentionCall:
    """The call that a module makes."""
    groups, causal = getattr(module, "num_key_value_groups", 1), getattr(module, "is_causal", None)
    blocks, indexer = arguments.get("block_indices"), getattr(module, "indexer", None)
    if blocks is not None and indexer is not None and getattr(mask, "ndim", 0) == 4:
        # Blocks of keys, as in MiniMax M3, by the function that puts them into the mask for eager attention, a second
        # time without effect. The mask says what selected keys could not: a query that sees no key averages all.
        mask = indexer.build_block_mask(blocks, mask, key.shape[2], query.dtype, query.device, None)
        arguments = {name: value for name, value in arguments.items() if name != "block_indices"}
    indices = arguments.get("indices")
    if indices is not None and _is_added(mask):
        mask = _with_chosen_keys(mask, indices)
        arguments = {name: value for name, value in arguments.items() if name != "indices"}
    return AttentionCall(type(module).__name__, groups, causal, query, key, value, mask, arguments)


def eager_of(module: Any) -> Any:
    """The eager attention function of the model of transformers that a module is of; None for other modules."""
    files = (sys.modules.get(kind.__module__) for kind in type(module).__mro__)
    return next(filter(None, (getattr(file, "eager_attention_forward", None) for file in files)), None)


def without_unread(
    attention: Callable[..., Any] | None, module: Any, arguments: Mapping[str, Any]
) -> Mapping[str, Any]:
    """The arguments of a call that a function of eager or sdpa attention applies; all of them if that is None.

    It ignores those that it has no parameter for, such as `softcap` in the call of a Llama, unless the module holds the
    value: then it reads it there, as gpt-oss its sinks.
    """
    ignored = IGNORABLE & arguments.keys()
    if attention is None or not ignored:
        return arguments
    ignored -= inspect.signature(attention).parameters.keys()
    held = [*vars(module).values(), *module.parameters(recurse=False)] if ignored else []

    def is_held(value: Any) -> bool:
        return any(value is each or (type(value) is type(each) is float and value == each) for each in held)

    return {name: value for name, value in arguments.items() if name not in ignored or is_held(value)}


def _is_added(mask: Any) -> bool:
    return isinstance(mask, torch.Tensor) and mask.ndim == 4 and mask.is_floating_point()


def _with_chosen_keys(mask: Any, indices: Any) -> Any:
    """A mask that is added, which hides all keys but those of `indices`: (b, q, n) or (b, h, q, n), -1 is no key.

    As eager attention of DeepSeek V3.2 hides them: a query that sees no key, as in padding on the left, then averages
    all keys and not only the chosen ones.
    """
    by_head = indices if indices.ndim == 4 else indices[:, None]
    keys = mask.shape[-1]
    chosen = torch.zeros((*by_head.shape[:3], keys + 1), dtype=torch.bool, device=mask.device)
    chosen.scatter_(-1, torch.where(by_head < 0, keys, by_head).long(), True)
    return torch.where(chosen[..., :keys], mask, torch.finfo(mask.dtype).min)


def make_request(call: AttentionCall) -> dict[str, Any]:
    """The fields of a request for a call whose mask hides all that is to be hidden.

    Errors: UnsupportedCall for whatever has no field.
    """
    _check(call)
    query, key, value = _of_one_batch(call)
    fields: dict[str, Any] = {"query": query, "key": key, "value": value, "layout": "bhld"}
    if (scale := call.argument("scaling")) is not None:
        number = _number(call, "scaling", scale)
        fields["scale"] = scale.reshape(()) if getattr(scale, "requires_grad", False) else number
    if (softcap := call.argument("softcap")) is not None:
        fields["softcap"] = _number(call, "softcap", softcap)
    if (sinks := _sinks(call, query.shape[0])) is not None:
        fields["sinks"] = sinks
    fields |= _hiding(call.mask, call.argument("position_bias"), call)
    if (indices := call.argument("indices")) is not None:  # (b, q, n) or (b, h, q, n)
        fields["selected_keys"] = indices[:, None] if indices.ndim == 3 else indices
    return fields


def _sinks(call: AttentionCall, batch: int) -> Any:
    """The sinks of heads by `s_aux` (h,), or of queries by `sinks` (b, h, q, n), n of them as one; or None."""
    heads, queries = call.query.shape[1:3]
    of_heads, of_queries = call.argument("s_aux"), call.argument("sinks")
    if of_queries is not None:
        if of_heads is not None or of_queries.ndim != 4 or of_queries.shape[1:3] != (heads, queries):
            raise UnsupportedCall(f"{call.where}: sinks must be alone, and have the axes b, h, q and one more")
        return of_queries.logsumexp(-1).expand(batch, -1, -1)
    if of_heads is not None and of_heads.numel() != heads:
        raise UnsupportedCall(f"{call.where}: s_aux must have one number for each of {heads} heads")
    return None if of_heads is None else of_heads.reshape(-1)


def as_booleans(mask: Any) -> Any:
    """A mask that is added, as booleans if that changes nothing, so that hidden keys are hidden and not just far off.

    Models hide by the least number of the type. A query that sees no key then has equal weights for all keys, which
    booleans could not say. A mask that requires grad is a bias, of which booleans have no gradient.
    """
    if mask.dtype == torch.bool or mask.requires_grad:
        return mask
    seen, hidden = mask == 0, mask <= torch.finfo(mask.dtype).min
    if bool((seen | hidden).all()) and bool(seen.any(-1).all()):
        return seen
    # The service computes float16 in float32, where the least number of float16 does not swallow a score.
    widened = mask.dtype == torch.float16 and bool(hidden.any())
    return torch.where(hidden, torch.finfo(torch.float32).min, mask.float()) if widened else mask


def _check(call: AttentionCall) -> None:
    """Refuse what has no field."""
    unknown = [name for name, value in call.arguments.items() if value is not None and name not in ACCEPTED]
    if unknown:
        names = ", ".join(sorted(unknown))
        raise UnsupportedCall(f"{call.where}: {names} could change the result, and the service has no such field")
    ranks = {name: len(getattr(call, name).shape) for name in ("query", "key", "value")}
    if set(ranks.values()) != {4}:
        raise UnsupportedCall(
            f"{call.where}: expected query, key and value with the axes b, h, l, d; their ranks: {ranks}"
        )
    heads, kv_heads = call.query.shape[1], call.key.shape[1]
    if kv_heads not in (1, heads) and kv_heads * call.groups != heads:
        raise UnsupportedCall(
            f"{call.where}: {heads} query heads, {kv_heads} of keys, num_key_value_groups {call.groups}"
        )
    if call.mask is None and _needs_mask(call):
        raise UnsupportedCall(
            f"{call.where} gives no mask, although is_causal or sliding_window asks for one. Make the mask by the "
            "functions of transformers.masking_utils"
        )


def _needs_mask(call: AttentionCall) -> bool:
    """True if some implementations of transformers would hide keys, though there is no mask."""
    window = call.argument("sliding_window")
    is_narrow = window is not None and 0 < window < call.key.shape[2]
    return is_narrow or (bool(call.argument("is_causal")) and call.query.shape[2] > 1)


def _of_one_batch(call: AttentionCall) -> tuple[Any, Any, Any]:
    """Query, key and value with the same number of batch entries: one entry stands for all, as in torch."""
    sources = (call.query, call.key, call.value)
    batch = max(source.shape[0] for source in sources)
    first, second, third = (each if each.shape[0] == batch else each.expand(batch, -1, -1, -1) for each in sources)
    return first, second, third


def _hiding(mask: Any, position_bias: Any, call: AttentionCall) -> dict[str, Any]:
    """The fields `mask` and `bias`: booleans hide where they are false, numbers are added."""
    fields: dict[str, Any] = {}
    if mask is not None:
        if not isinstance(mask, torch.Tensor) or not (mask.dtype == torch.bool or mask.is_floating_point()):
            kind = mask.dtype if isinstance(mask, torch.Tensor) else type(mask).__name__
            raise UnsupportedCall(f"{call.where}: attention_mask must be a tensor of booleans or floats, not {kind}")
        found = as_booleans(_of_rank_4(mask, call))
        fields["mask" if found.dtype == torch.bool else "bias"] = found
    if position_bias is not None:
        bias = _of_rank_4(position_bias, call)
        fields["bias"] = fields["bias"] + bias if "bias" in fields else bias
    return fields


def _of_rank_4(array: Any, call: AttentionCall) -> Any:
    """An array that torch would broadcast to the scores, with the axes b, h, q, k. Errors: UnsupportedCall."""
    if array.ndim > 4:
        raise UnsupportedCall(f"{call.where}: a mask or bias of the shape {tuple(array.shape)}, expected b, h, q, k")
    return array.reshape((1,) * (4 - array.ndim) + tuple(array.shape))


def _number(call: AttentionCall, name: str, value: Any) -> float:
    """An argument that is one number. Errors: UnsupportedCall for several."""
    if isinstance(value, torch.Tensor) and value.numel() != 1:
        raise UnsupportedCall(f"{call.where}: {name} must be one number, not {tuple(value.shape)}")
    return float(value)
