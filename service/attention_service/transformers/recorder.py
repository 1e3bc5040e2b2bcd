"""capture(): the attention of chosen layers, heads and rows, while a model runs by whatever implementation it has."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch.nn.modules.module import register_module_forward_pre_hook
from transformers import AttentionInterface
from transformers.cache_utils import Cache

from attention_service.attention.result import Result
from attention_service.backends.threads import single_threaded_blas
from attention_service.codecs.array_objects import as_numpy
from attention_service.library import attend
from attention_service.transformers.arguments import count_layers, from_start, indices, modules, names
from attention_service.transformers.call import AttentionCall, call_of, eager_of, make_request, without_unread
from attention_service.transformers.captured import Captured, CapturedAttention, picture_of
from attention_service.transformers.interface import NAME
from attention_service.transformers.labels import Labels, Models
from attention_service.transformers.visible import with_rows

MASKED: Final = "masked_scores"
# Implementations whose function drops words of a call that it has no parameter for.
DROPPING: Final = (None, "eager", "sdpa")


@contextmanager
def capture(
    layers: Sequence[int] | None = None,
    *,
    heads: Sequence[int] | None = None,
    rows: Sequence[int] | None = None,
    include: Sequence[str] = ("attention_weights", "logsumexp"),
    tokens: Sequence[Any] | None = None,
    decoder_tokens: Sequence[Any] | None = None,
    model: Any = None,
) -> Iterator[Captured]:
    """Within this context, keep the attention of layers, whatever `attn_implementation` their model has.

        with capture(layers=[0, 3], rows=[-1]) as captured:
            model(**inputs)
        captured[3].attention_weights  # (b, h, 1, k)

    The model computes its output as ever. The service computes the chosen rows beside it, in this process, from the
    query, key, value and mask that the model's attention gets: memory grows with rows times keys.

    Args:
        layers: Indices of layers; negative ones count from the end of `model`, which they need. Layers that share a
            module, as those of ALBERT, have one index. Default: all.
        heads: Indices of query heads; negative ones count from the end. Default: all.
        rows: Indices of queries; negative ones count from the end. A call without such a query, like that of one token
            with a cache, is left out. Default: all.
        include: What to keep, beside the output of each head: attention_weights, logsumexp, entropy, scores,
            scaled_scores, capped_scores, masked_scores, hidden_by, query, key, value (docs/attention.md).
        tokens: Labels of the tokens that the model reads, one for each: a list, or one for each batch entry. In a model
            with an encoder and a decoder, those of the encoder.
        decoder_tokens: Labels of the tokens that the decoder reads, likewise.
        model: Capture the layers of this model, or of this part of a model, only. Default: of every model that runs.

    Errors: TypeError and ValueError for a wrong argument, IndexError for a layer or head that is not there, ValueError
    for another number of labels than of tokens, UnsupportedCall for a layer whose attention the service would compute
    differently. Those that depend on the model come while it runs, or at the end.
    """
    recorder = _Recorder(layers, heads, rows, include, Labels(tokens, decoder_tokens), model)
    with _listening(recorder):
        yield recorder.captured
    recorder.captured.check_layers(recorder.layers or ())
    recorder.labels.check_all_used()


@contextmanager
def _listening(recorder: _Recorder) -> Iterator[None]:
    """Within this context, the recorder learns of each model, each call of attention, and each call of a cache."""
    original, update = AttentionInterface.get_interface, Cache.update

    def get_interface(self: Any, attn_implementation: Any, default: Any) -> Any:
        return recorder.around(attn_implementation, original(self, attn_implementation, default))

    AttentionInterface.get_interface = get_interface
    Cache.update = recorder.around_cache(update)
    hook = register_module_forward_pre_hook(recorder.models.see)
    try:
        yield
    finally:
        AttentionInterface.get_interface, Cache.update = original, update
        hook.remove()


class _Recorder:
    """Computes and keeps the chosen rows of each call."""

    def __init__(self, layers: Any, heads: Any, rows: Any, include: Any, tokens: Labels, model: Any) -> None:
        self.captured, self.models, self.labels = Captured(), Models(), tokens
        self._heads, self._rows = indices("heads", heads), indices("rows", rows)
        self._include = names(include)
        self._names = modules(model)
        if model is not None:
            self.models.see(model)
        chosen = indices("layers", layers)
        if chosen is not None and min(chosen) < 0:
            chosen = from_start("layers", chosen, count_layers(model), type(model).__name__)
        self.layers = None if chosen is None else frozenset(chosen)
        # Modules without an index of their own, in the order of their first calls.
        self._unnumbered: dict[type, list[Any]] = {}

    def around(self, implementation: str | None, attention: Callable[..., Any]) -> Callable[..., Any]:
        """An attention function that records its call, then computes what `attention` does."""

        @torch.compiler.disable  # a compiled model calls it as it is
        def recorded(
            module: Any, query: Any, key: Any, value: Any, attention_mask: Any = None, **arguments: Any
        ) -> Any:
            dropping = attention if implementation in DROPPING else None
            rule = eager_of(module) if implementation == NAME else dropping
            call = call_of(module, query, key, value, attention_mask, without_unread(rule, module, arguments))
            self._record(implementation, module, call)
            return attention(module, query, key, value, attention_mask, **arguments)

        return recorded

    def around_cache(self, update: Callable[..., Any]) -> Callable[..., Any]:
        """The method `update` of caches, which tells the labels how many tokens a cache has read."""

        @torch.compiler.disable
        def updated(cache: Any, key_states: Any, value_states: Any, layer_idx: int, *more: Any, **named: Any) -> Any:
            before = int(cache.get_seq_length(layer_idx))
            found = update(cache, key_states, value_states, layer_idx, *more, **named)
            self.labels.see_cache(layer_idx, before, found[0].shape[-2])
            return found

        return updated

    def _record(self, implementation: str | None, module: Any, call: AttentionCall) -> None:
        """Compute the chosen rows of a call, and keep them."""
        self.labels.check_known(module in self.models)
        role = self.models.role(module)
        if role == "encoder" and self.labels.has_cached(module, call):  # as the text of PaliGemma, which is not causal
            role = "decoder"
        self.labels.follow(module, role, call)
        if self._names is not None and module not in self._names:
            return
        layer = self._layer(module)
        self.captured.see(role, layer)
        if self.layers is not None and layer not in self.layers:
            return
        length, count = call.query.shape[2], call.query.shape[1]
        rows = list(range(length)) if self._rows is None else [i % length for i in self._rows if -length <= i < length]
        full = self.models.name(module)
        of = self.labels.of(module, role, self.models.has_encoder(module), call, rows, f"layer {layer} ({full})")
        if not rows:
            self.captured.miss(role, layer, length)
            return
        heads = list(range(count)) if self._heads is None else from_start("heads", self._heads, count, call.where)
        part = with_rows(implementation, call, rows, None if self._heads is None else heads)
        found = _computed(part, self._include, of, layer, call.where if self._names is None else self._names[module])
        found.rows, found.heads, found.role = rows, heads, role
        self.captured.add(found, f"{full} ({id(module):#x})" if self._names is None else found.module)

    def _layer(self, module: Any) -> int:
        """The index of a layer: its own, or the place of its first call among modules of its class."""
        if isinstance(index := getattr(module, "layer_idx", None), int):
            return index
        known = self._unnumbered.setdefault(type(module), [])
        if not any(module is other for other in known):
            known.append(module)
        return next(index for index, other in enumerate(known) if module is other)


def _computed(
    part: AttentionCall, include: Sequence[str], labels: Mapping[str, Any], layer: int, name: str
) -> CapturedAttention:
    """The result of a call that has the chosen rows and heads only. labels: `query_tokens` and `key_tokens`"""
    fields = make_request(part)
    # A few rows take longer to share among BLAS threads, which wait for torch's, than to compute.
    with single_threaded_blas():
        result = attend(**fields, include=[*include, *([] if MASKED in include else [MASKED])])
    arrays = dict(result.arrays)
    scores = arrays[MASKED] if MASKED in include else arrays.pop(MASKED)
    # By minus infinity, or as eager attention hides, by the least number.
    hidden = scores <= torch.finfo(part.query.dtype).min / 2
    # The model may change its tensors later, as static caches do.
    arrays |= {each: arrays[each].copy() for each in ("query", "key", "value") if each in arrays}
    sinks = {"sinks": as_numpy(fields["sinks"])} if "sinks" in fields else {}
    return CapturedAttention(Result(arrays, result.metadata), picture_of(sinks, scores, hidden, labels), layer, name)
