"""Which token each query and key of a call is, by the role of its module in the model that runs."""

from __future__ import annotations

import re
from typing import Any, Final

import torch

from attention_service.transformers.arguments import labels
from attention_service.transformers.call import AttentionCall

# What modules that read an encoder are called, in themselves and behind the number of their layer.
CROSS: Final = re.compile(r"cross|encdec|encoder_attn|encoder_decoder", re.IGNORECASE)
SIDE: Final = re.compile(r"encoder|decoder", re.IGNORECASE)


class Models:
    """The models that run. `see` is a hook that is called before each module of them."""

    def __init__(self) -> None:
        self._names: dict[Any, str] = {}
        self._of_encoder_decoder: set[Any] = set()

    def see(self, module: Any, _inputs: Any = None) -> None:
        """Keep the names of a model's modules before it runs. The compiler leaves the hook out of what it compiles."""
        if torch.compiler.is_compiling() or module in self._names:
            return
        names = {each: name for name, each in module.named_modules()}
        self._names |= names
        if getattr(getattr(module, "config", None), "is_encoder_decoder", False):
            self._of_encoder_decoder |= names.keys()

    def __contains__(self, module: Any) -> bool:
        return module in self._names

    def name(self, module: Any) -> str:
        """The name of a module within its model."""
        self.see(module)
        return self._names[module] or type(module).__name__

    def has_encoder(self, module: Any) -> bool:
        """True if the module belongs to a model with an encoder and a decoder, each with tokens of its own."""
        self.see(module)
        return module in self._of_encoder_decoder

    def role(self, module: Any) -> str:
        """cross if its keys are of another sequence than its queries; else decoder, or encoder if it is not causal."""
        name = self.name(module)
        if CROSS.search(f"{type(module).__name__}.{re.split(r'[.][0-9]+[.]', name)[-1]}"):
            return "cross"
        if getattr(module, "is_decoder", False):
            return "decoder"
        side = SIDE.search(name)
        if side is not None:
            return side[0].lower()
        return "decoder" if getattr(module, "is_causal", False) else "encoder"


class Labels:
    """The labels of `capture`, and those of each call.

    A module that runs with a cache has its last queries only, and with a window its last keys only. Which tokens these
    are follows from its calls before, and from what its cache has read before them.
    """

    def __init__(self, tokens: Any, decoder_tokens: Any) -> None:
        given = {"tokens": labels("tokens", tokens), "decoder_tokens": labels("decoder_tokens", decoder_tokens)}
        self._given = {argument: batches for argument, (batches, _) in given.items()}
        self._for_all = {argument for argument, (_, is_for_all) in given.items() if is_for_all}
        # How many tokens a module has read, and how many the last one of a decoder, which cross-attention follows.
        self._read: dict[Any, int] = {}
        self._decoded = 0
        # The last call of a cache: the index of the layer, how many tokens it had read, how many keys it returned.
        self._cached: tuple[int, int, int] | None = None
        # How many tokens of an argument the queries or keys of a module have reached, and the name of its layer.
        self._reached: dict[tuple[Any, str, str], tuple[int, str]] = {}

    @property
    def are_given(self) -> bool:
        """True if there are labels of any tokens."""
        return any(self._given.values())

    def check_known(self, is_known: bool) -> None:
        """Check that labels can be told apart. Errors: ValueError for a module of a model that no hook has seen."""
        if self.are_given and not is_known:
            raise ValueError(
                "tokens: a model that is compiled in place, or called by forward(), does not tell which of its layers "
                "have them; say which model it is by capture(model=…)"
            )

    def see_cache(self, layer: int, before: int, keys: int) -> None:
        """Note what a cache had read before the call of attention that follows, also before `capture` began."""
        self._cached = (layer, before, keys)

    def has_cached(self, module: Any, call: AttentionCall) -> bool:
        """True if the keys of a call have just come out of a cache."""
        last, keys = self._cached, call.key.shape[2]
        return last is not None and (last[0], last[2]) == (getattr(module, "layer_idx", None), keys)

    def follow(self, module: Any, role: str, call: AttentionCall) -> None:
        """Count the tokens that a module has read, also those of calls that are not captured."""
        queries, keys = call.query.shape[2], call.key.shape[2]
        is_cached = self.has_cached(module, call)
        cached, self._cached = self._cached, None
        if role == "cross":
            self._read[module] = max(self._decoded, queries)
            return
        known = None if queries == keys else self._read.get(module)
        if is_cached and cached is not None:
            known = cached[1]
        self._read[module] = keys if known is None else max(known + queries, keys)
        if role == "decoder":
            self._decoded = self._read[module]

    def of(
        self, module: Any, role: str, has_encoder: bool, call: AttentionCall, rows: list[int], where: str
    ) -> dict[str, Any]:
        """`query_tokens` of the rows, and `key_tokens`, each if its labels were given.

        has_encoder: whether the module is of a model with an encoder and a decoder
        where: the name of the layer, for errors

        Errors: ValueError for another number of labels than of tokens.
        """
        decoding = "decoder_tokens" if has_encoder or self._given["decoder_tokens"] else "tokens"
        batch, _, queries, _ = call.query.shape
        keys, end = call.key.shape[2], self._read[module]
        sides = {"query_tokens": (decoding, end - queries, end), "key_tokens": (decoding, end - keys, end)}
        if role == "encoder":
            sides = {"query_tokens": ("tokens", 0, queries), "key_tokens": ("tokens", 0, keys)}
        if role == "cross":  # without an encoder that reads `tokens`, keys are something else, like parts of a picture
            sides["key_tokens"] = ("tokens" if decoding == "decoder_tokens" else "", 0, keys)
        found = {}
        for side, (argument, begin, end) in sides.items():
            if not (batches := self._given.get(argument)):
                continue
            if argument not in self._for_all and len(batches) != batch:
                wanted = f"a list of labels, or one for each of {batch} batch entries of {where}"
                raise ValueError(f"{argument}: expected {wanted}; got {len(batches)}")
            grows = role == "decoder" or side == "query_tokens"
            if not grows or any(len(entry) < end for entry in batches):
                self._expect(argument, end, where)
            place = (module, side, argument)
            if side == "query_tokens" and begin == 0 and place in self._reached:  # the model begins anew
                self._expect(argument, *self._reached[place])
            self._reached[place] = (end, where)
            chosen = rows if side == "query_tokens" else range(keys)
            every = batches * batch if argument in self._for_all else batches
            found[side] = [[entry[begin + index] for index in chosen] for entry in every]
        return found

    def check_all_used(self) -> None:
        """Check at the end that no label is left over. Errors: ValueError."""
        for (_, _, argument), (end, where) in self._reached.items():
            self._expect(argument, end, where)
        used = {argument for _, _, argument in self._reached}
        for argument, batches in self._given.items():
            if batches and self._read and argument not in used:
                raise ValueError(f"{argument}: no layer that was captured has these tokens")

    def _expect(self, argument: str, count: int, where: str) -> None:
        for entry in self._given[argument]:
            if len(entry) != count:
                raise ValueError(
                    f"{argument}: expected {count} labels, one for each token of {where}; got {len(entry)}. "
                    "capture(model=…) chooses the part of a model that reads these tokens"
                )
