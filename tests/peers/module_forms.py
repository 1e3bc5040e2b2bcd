"""How the attention modules of transformers become requests, one row for each architecture.

Nothing here imports torch or transformers: a form reads the parameters and the attributes of a module that it gets.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from attention_service.codecs.named_tensors import nested
from attention_service.layers.importing import family_of
from attention_service.layers.models import MODELS
from attention_service.layers.module import Module

Fields = dict[str, Any]

# What the linear maps and norms of attention modules are called.
MAPS: dict[str, tuple[str, ...]] = {
    "query": ("q_proj.linear", "q_proj", "self.query", "query", "q_lin", "Wq", "q"),
    "key": ("k_proj.linear", "k_proj", "self.key", "key", "k_lin", "Wk", "k"),
    "value": ("v_proj.linear", "v_proj", "self.value", "value", "v_lin", "Wv", "v"),
    "output": ("o_proj.linear", "o_proj", "out_proj", "output.dense", "dense", "out_lin", "Wo", "c_proj", "o"),
}
NORMS: dict[str, tuple[str, ...]] = {
    "query_norm": ("q_norm", "qk_norm", "q_layernorm", "query_layernorm"),
    "key_norm": ("k_norm", "qk_norm", "k_layernorm", "key_layernorm"),
    "value_norm": ("v_norm",),
}
GATES = ("gate_proj", "g_proj")
CONTEXT = ("key_value_states", "encoder_hidden_states")
CAUSAL = ("is_causal", "is_decoder")
HEAD_SIZES = ("head_dim", "head_size", "attention_head_size", "self.attention_head_size", "key_value_proj_dim")


class Call(NamedTuple):
    """One call of an attention module: what it got, and what it returned."""

    module: Any
    hidden: np.ndarray
    arguments: Mapping[str, Any]
    output: np.ndarray

    @property
    def length(self) -> int:
        """The number of new tokens."""
        return int(self.hidden.shape[1])


def called(module: Any, given: tuple[Any, ...], named: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a call by their names."""
    bound = dict(inspect.signature(module.forward).bind(*given, **named).arguments)
    return {**bound.pop("kwargs", {}), **bound}


def array(tensor: Any) -> np.ndarray:
    """A tensor of torch as an array."""
    found: np.ndarray = tensor.detach().numpy()
    return found


def found(module: Any, names: tuple[str, ...]) -> Any:
    """The first attribute of a module that is there and not None; `a.b` is one of another attribute."""
    for name in names:
        value = module
        for part in name.split("."):
            value = getattr(value, part, None)
        if value is not None:
            return value
    return None


def linear(layer: Any) -> dict[str, np.ndarray]:
    """A linear layer as a map of a request."""
    return {name: array(value) for name in ("weight", "bias") if (value := getattr(layer, name, None)) is not None}


def rows(layer: Any, pick: Callable[[np.ndarray], np.ndarray]) -> dict[str, np.ndarray]:
    """Some rows of a linear layer as a map of a request. pick: takes them from an array whose first axis has them"""
    return {name: pick(value) for name, value in linear(layer).items()}


def norm(layer: Any, head_dim: int, plus: float, position: str) -> Fields:
    """A norm of a module. plus: added to its weight, where a model stores it less 1; position: of the field"""
    each = list(getattr(layer, "norms", [layer]))  # some have one for each head
    if len(each) > 1:
        parts = [norm(one, head_dim, plus, position) for one in each]
        return parts[0] | {
            name: np.stack([part[name] for part in parts]) for name in ("weight", "bias") if name in parts[0]
        }
    weight = getattr(layer, "weight", None)
    fields: Fields = {"eps": float(found(layer, ("variance_epsilon", "eps")))}
    if "LayerNorm" in type(layer).__name__:
        fields |= {"kind": "layer"}
    if weight is not None:
        fields |= {"weight": array(weight) + np.float32(plus)}
        if weight.ndim == 1 and weight.numel() != head_dim:
            fields |= {"over": "all"}
    if getattr(layer, "bias", None) is not None:
        fields |= {"bias": array(layer.bias)}
    return fields | ({"position": position} if position != "before" else {})


def tables(call: Call) -> tuple[np.ndarray, np.ndarray] | None:
    """The cosines and sines that a module gets, (b, l, dim/2): most get each twice, some complex numbers instead."""
    given = call.arguments.get("position_embeddings")
    if given is None:
        return None
    if not isinstance(given, tuple):
        return array(given.real), array(given.imag)
    cos, sin = map(array, given)
    half = cos.shape[-1] // 2
    if np.array_equal(cos[..., :half], cos[..., half:]):
        part = slice(half)
    else:
        part = slice(None, None, 2 if np.array_equal(cos[..., ::2], cos[..., 1::2]) else 1)
    return cos[..., part], sin[..., part]


def rotary(call: Call, *, interleaved: bool = False) -> Fields:
    """The rotation of a module: its own cosines and sines, a row for each new token."""
    given = tables(call)
    if given is None:
        return {}
    return {"rotary": dict(zip(("cos", "sin"), given, strict=True)) | ({"interleaved": True} if interleaved else {})}


def apart(query: tuple[np.ndarray, np.ndarray], key: tuple[np.ndarray, np.ndarray], **more: Any) -> Fields:
    """A rotation that differs between queries and keys: the rows of both behind each other, chosen by positions.

    query, key: cosines and sines (l, dim/2)
    """
    count = len(query[0])
    cos, sin = (np.concatenate(pair) for pair in zip(query, key, strict=True))
    positions = {"query_positions": np.arange(count), "key_positions": count + np.arange(len(key[0]))}
    return {"rotary": {"cos": cos, "sin": sin} | positions | more}


def tempered(call: Call, temperature: np.ndarray, **more: Any) -> Fields:
    """Queries are multiplied by a number that depends on their position, (l,): the rotation of queries does it."""
    given = tables(call)
    if given is None:  # nothing turns
        dim = found(call.module, HEAD_SIZES)
        cos, sin = np.ones((call.length, dim // 2), np.float32), np.zeros((call.length, dim // 2), np.float32)
    else:
        cos, sin = (each[0] for each in given)
    factor = temperature[:, None].astype(np.float32)
    return apart((cos * factor, sin * factor), (cos, sin), **more)


def heads(projection: Fields, head_dim: int) -> Fields:
    """The numbers of heads, by the rows of the maps."""
    count = {role: len(projection[role]["weight"]) // head_dim for role in ("query", "key")}
    return {"num_heads": count["query"]} | ({"num_kv_heads": count["key"]} if count["key"] != count["query"] else {})


def options(call: Call) -> Fields:
    """What most modules have as attributes: scale, softcap, sinks, window, causal mask."""
    module, fields = call.module, dict[str, Any]()
    scale = found(module, ("scaling", "self.scaling"))
    if scale is not None and not np.isclose(scale, found(module, HEAD_SIZES) ** -0.5, rtol=1e-9):
        fields["scale"] = float(scale)
    if (softcap := found(module, ("attn_logit_softcapping",))) is not None:
        fields["softcap"] = softcap
    if (sinks := found(module, ("sinks",))) is not None:
        fields["sinks"] = array(sinks)
    context = found_argument(call, *CONTEXT)
    causal = context is None and any(found(module, (f"{inner}{name}",)) for name in CAUSAL for inner in ("", "self."))
    if isinstance(window := found(module, ("sliding_window",)), int) and getattr(module, "is_sliding", True):
        fields["window"] = dict.fromkeys(("left",) if causal else ("left", "right"), window - 1)
    return fields | ({"is_causal": True} if causal else {})


def norms(module: Any, head_dim: int, plus: float = 0.0, position: str = "before") -> Fields:
    """The norms of query, key and value that a module has."""
    there = {field: layer for field, names in NORMS.items() if (layer := found(module, names)) is not None}
    return {
        field: norm(layer, head_dim, plus, position if field != "value_norm" else "before")
        for field, layer in there.items()
    }


def separate(
    call: Call, *, interleaved: bool = False, plus: float = 0.0, position: str = "before", activation: str = "sigmoid"
) -> Fields:
    """A module with a map for each of query, key and value, as in Llama, BERT, BART and ViT.

    interleaved, position: of `rotary` and of the norms; plus: added to the weights of norms; activation: of the gate
    """
    module, head_dim = call.module, found(call.module, HEAD_SIZES)
    projection: Fields = {role: linear(found(module, names)) for role, names in MAPS.items()}
    fields = heads(projection, head_dim)
    if (gate := found(module, GATES)) is not None:
        projection["gate"] = linear(gate) | ({"activation": activation} if activation != "sigmoid" else {})
    context = found_argument(call, *CONTEXT)
    sources = {"input": call.hidden} | ({"context": array(context)} if context is not None else {})
    turned = rotary(call, interleaved=interleaved) if context is None else {}
    return sources | {"projection": projection} | fields | turned | options(call) | norms(
        module, head_dim, plus, position
    )  # fmt: skip


def found_argument(call: Call, *names: str) -> Any:
    """The first argument of a call that is there and not None."""
    return next((call.arguments[name] for name in names if call.arguments.get(name) is not None), None)


def but_not_turned(fields: Fields, turns: Any) -> Fields:
    """A request without its rotation, unless the layer turns its queries and keys."""
    return fields if turns else {name: value for name, value in fields.items() if name != "rotary"}


class State:
    """The state dict of a module in place of a checkpoint."""

    def __init__(self, module: Any) -> None:
        self._arrays = {name: array(tensor) for name, tensor in module.state_dict().items()}
        self.names = list(self._arrays)

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor."""
        return self._arrays[name].shape

    def tensor(self, name: str, rows: slice | None = None) -> np.ndarray:
        """A tensor, or some of its rows."""
        return self._arrays[name][rows or slice(None)]


def imported(call: Call) -> Fields:
    """A module of a family whose layers can be imported: the fields of the stored layer."""
    configuration = found(call.module, ("config", "self.config")).to_dict()
    family, layer = family_of(configuration), found(call.module, ("layer_idx", "self.layer_idx"))
    module = Module(
        State(call.module),  # type: ignore[arg-type]
        "",
        layer,
        model=MODELS[configuration["model_type"]],
        options=configuration,
        heads=None,
        positions=configuration.get("max_position_embeddings", 0),
        progress=lambda name, size: None,
    )
    options = family.fields(module)
    return {"input": call.hidden} | nested({**module.arrays, **options})
