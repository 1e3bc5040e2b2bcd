"""Random configurations of attention, computed by both of our backends and by other libraries.

Each peer is a strategy for configurations and a function that computes one both ways. Conventions that differ are
translated or not generated, as comments say.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

os.environ.setdefault("KERAS_BACKEND", "torch")

import jax
import ml_dtypes
import numpy as np
import torch
from hypothesis import strategies as st

from attention_service import attend
from attention_service.attention.arrays import FLOATS
from attention_service.attention.result import Result
from tests.peers.compare import deviation, same_zeros

jax.config.update("jax_enable_x64", True)

Pairs = dict[str, tuple[np.ndarray, np.ndarray]]  # name -> ours, theirs


@dataclass(frozen=True)
class Config:
    """Sizes, options and the seed of the numbers."""

    b: int
    g: int
    groups: int
    q: int
    k: int
    d: int
    e: int
    dtype: str
    seed: int
    options: frozenset[str]
    number: int

    @property
    def h(self) -> int:
        return self.g * self.groups

    def random(self) -> np.random.Generator:
        return np.random.default_rng(self.seed)

    def arrays(self, random: np.random.Generator) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """query (b, h, q, d), key (b, g, k, d), value (b, g, k, e)."""
        shapes = (self.b, self.h, self.q, self.d), (self.b, self.g, self.k, self.d), (self.b, self.g, self.k, self.e)
        query, key, value = (random.normal(size=shape).astype(FLOATS[self.dtype]) for shape in shapes)
        return query, key, value


def configs(*options: str, dtypes: tuple[str, ...] = ("float64", "float32"), **fixed: Any) -> st.SearchStrategy[Config]:
    """Configurations with any of these options."""
    drawn: dict[str, Any] = {
        "b": st.integers(1, 3),
        "g": st.integers(1, 3),
        "groups": st.integers(1, 3),
        "q": st.integers(1, 12),
        "k": st.integers(1, 12),
        "d": st.integers(1, 16),
        "e": st.integers(1, 16),
        "dtype": st.sampled_from(dtypes),
        "seed": st.integers(0, 2**32 - 1),
        "options": st.frozensets(st.sampled_from(options or ("plain",))),
        "number": st.integers(0, 5),
    }
    return st.builds(Config, **(drawn | fixed))


# A pool of shapes for peers that compile for each shape: b, g, groups, q, k, d, e.
_pool = np.random.default_rng(40)
POOL = [tuple(int(x) for x in _pool.integers(1, (4, 4, 4, 13, 13, 17, 17))) for _ in range(40)]


@st.composite
def pooled(draw: st.DrawFn, *options: str, dtypes: tuple[str, ...] = ("float64", "float32")) -> Config:
    """Configurations whose shapes come from the pool."""
    b, g, groups, q, k, d, e = draw(st.sampled_from(POOL))
    sizes = {"b": b, "g": g, "groups": groups, "q": q, "k": k, "d": d, "e": e}
    return draw(configs(*options, dtypes=dtypes, **{name: st.just(size) for name, size in sizes.items()}))


def tolerance(dtype: str, k: int) -> float:
    """1e-12 in float64; 2e-6 √k in float32."""
    return 1e-12 if dtype == "float64" else 2e-6 * np.sqrt(k)


def worst_ratio(pairs: Pairs, limit: float) -> float:
    """The largest deviation divided by the limit; at most 1 passes."""
    return max(deviation(ours, theirs) / limit for ours, theirs in pairs.values())


def ulps(ours: np.ndarray, theirs: np.ndarray, limit: float) -> float:
    """The largest deviation of 16-bit results, divided by two units in the last place.

    `theirs` is exact; float32, in which 16-bit types are computed, may deviate by `limit` of the largest number.
    """
    kind = ours.dtype
    a, b = ours.astype(np.float64), theirs.astype(np.float64)
    info = ml_dtypes.finfo(kind)
    exponent = np.floor(np.log2(np.maximum(np.abs(b), float(info.smallest_normal))))
    allowed = 2 * float(info.eps) * 2.0**exponent + limit * np.max(np.abs(b), initial=0)
    return float(np.max(np.abs(a - b) / allowed))


def to_torch(array: np.ndarray) -> torch.Tensor:
    wide = array.astype(np.float64) if array.dtype not in (np.float64, np.float32, np.bool_) else array
    return torch.from_numpy(np.ascontiguousarray(wide))


def visible_rows(result: Result) -> np.ndarray:
    """True for rows with a visible key; all conventions agree only there. (b, h, q)"""
    return np.isfinite(result["logsumexp"])


# torch.nn.functional.scaled_dot_product_attention: bool masks have our polarity, causal masking aligns at the first
# token (and gives NaN for a scale <= 0, not generated), fully masked rows are 0. It rounds intermediate 16-bit results,
# so 16-bit types are compared with its float64.


def torch_sdpa(config: Config, backend: str) -> tuple[Pairs, float]:
    random = config.random()
    query, key, value = config.arrays(random)
    ours: dict[str, Any] = {}
    theirs: dict[str, Any] = {"enable_gqa": True}
    shape = [size if random.random() < 0.7 else 1 for size in (config.b, config.h, config.q, config.k)]
    if "mask" in config.options:
        mask = random.random(shape) < 0.7
        ours["mask"], theirs["attn_mask"] = mask, torch.from_numpy(mask)
    elif "bias" in config.options:
        bias = random.normal(size=shape).astype(query.dtype)
        bias[random.random(shape) < 0.2] = -np.inf
        ours["bias"], theirs["attn_mask"] = bias, to_torch(bias)
    elif "causal" in config.options:
        ours |= {"is_causal": True, "query_offset": 0}
        theirs["is_causal"] = True
    if "scale" in config.options:
        scale = float(random.normal())
        ours["scale"] = theirs["scale"] = abs(scale) if "causal" in config.options else scale
    include = ["logsumexp"] if "dense" in config.options else []
    result = attend(query, key, value, include=include, backend=backend, **ours)
    expected = torch.nn.functional.scaled_dot_product_attention(*map(to_torch, (query, key, value)), **theirs)
    return {"output": (result.output, expected.numpy())}, tolerance(config.dtype, config.k)


# torch.nn.MultiheadAttention: True hides, fully masked rows are NaN (not generated: the first key is always visible).


def torch_mha(config: Config, backend: str) -> tuple[Pairs, float]:
    random = config.random()
    kind = getattr(torch, config.dtype)
    width, key_width, value_width = config.h * config.d, config.d + 1, config.e + 2
    with torch.random.fork_rng():
        torch.manual_seed(config.seed)
        module = torch.nn.MultiheadAttention(
            width,
            config.h,
            bias="bias" in config.options,
            kdim=key_width,
            vdim=value_width,
            dtype=kind,
            batch_first=True,
        )
        for parameter in module.parameters():
            torch.nn.init.normal_(parameter, std=0.5)
    query, key, value = (
        random.normal(size=shape).astype(config.dtype)
        for shape in (
            (config.b, config.q, width),
            (config.b, config.k, key_width),
            (config.b, config.k, value_width),
        )
    )
    ours: dict[str, Any] = {}
    theirs: dict[str, Any] = {}
    if "key_mask" in config.options:
        keep = random.random((config.b, config.k)) < 0.7
        keep[:, 0] = True
        ours["key_mask"], theirs["key_padding_mask"] = keep, torch.from_numpy(~keep)
    if "mask" in config.options:
        mask = random.random((config.q, config.k)) < 0.7
        mask[:, 0] = True
        ours["mask"], theirs["attn_mask"] = mask, torch.from_numpy(~mask)
    parameters = {name: parameter.detach().numpy() for name, parameter in module.named_parameters()}
    biases = np.split(parameters.get("in_proj_bias", np.zeros(3 * width, config.dtype)), 3)
    projection = {
        name: {"weight": parameters[f"{name[0]}_proj_weight"], "bias": bias}
        for name, bias in zip(("query", "key", "value"), biases, strict=True)
    }
    projection["output"] = {"weight": parameters["out_proj.weight"]}
    if "bias" in config.options:
        projection["output"]["bias"] = parameters["out_proj.bias"]
    average = "average" in config.options
    expected = module(*map(torch.from_numpy, (query, key, value)), average_attn_weights=average, **theirs)
    result = attend(
        query, key, value, projection=projection, num_heads=config.h, average_heads=average, backend=backend, **ours
    )
    output, weights = (tensor.detach().numpy() for tensor in expected)
    ours_weights = result["attention_weights"]
    if config.h == 1 and not average:
        ours_weights = ours_weights[:, None]
    # Projections add sums over the input features.
    return {"output": (result.output, output), "weights": (ours_weights, weights)}, tolerance(
        config.dtype, max(config.k, width)
    )


# jax.nn.dot_product_attention: tokens before heads, causal masking and windows align at the first token, the softmax
# is always float32, fully masked rows are uniform (not compared).


def jax_attention(config: Config, backend: str) -> tuple[Pairs, float]:
    random = config.random()
    arrays = config.arrays(random)
    query, key, value = (x.transpose(0, 2, 1, 3) for x in (arrays[0], arrays[1], arrays[1] + arrays[1][..., ::-1]))
    ours: dict[str, Any] = {"query_offset": 0}
    theirs: dict[str, Any] = {}
    if "bias" in config.options:
        ours["bias"] = theirs["bias"] = random.normal(size=(config.b, config.h, config.q, config.k)).astype(
            config.dtype
        )
    if "mask" in config.options:
        ours["mask"] = theirs["mask"] = random.random((config.b, config.h, config.q, config.k)) < 0.7
    if "causal" in config.options:
        ours["is_causal"] = theirs["is_causal"] = True
    if "lengths" in config.options:
        counts = {name: random.integers(1, n + 1, config.b) for name, n in (("query", config.q), ("key", config.k))}
        ours |= {"query_lengths": counts["query"], "key_lengths": counts["key"]}
        theirs |= {
            "query_seq_lengths": counts["query"].astype(np.int32),
            "key_value_seq_lengths": counts["key"].astype(np.int32),
        }
    if "window" in config.options:
        left, right = 1 + config.number, config.number // 2
        ours["window"] = {"left": left, "right": right}
        theirs["local_window_size"] = (left, right)
    if "scale" in config.options:
        ours["scale"] = theirs["scale"] = 0.3
    result = attend(query, key, value, layout="blhd", include=["logsumexp"], backend=backend, **ours)
    expected = np.asarray(jax.nn.dot_product_attention(query, key, value, **theirs))
    rows = visible_rows(result).transpose(0, 2, 1)
    return {"output": (result.output[rows], expected[rows])}, tolerance("float32", config.k)


# keras.layers.MultiHeadAttention: kernels (in, h, d), True is visible, fully masked rows are 0.


def keras_mha(config: Config, backend: str) -> tuple[Pairs, float]:
    import keras

    random = config.random()
    shapes = (config.b, config.q, config.d), (config.b, config.k, config.e), (config.b, config.k, config.d + 1)
    query, value, key = (random.normal(size=shape).astype(config.dtype) for shape in shapes)
    layer = keras.layers.MultiHeadAttention(
        config.h, config.d, value_dim=config.e, use_bias="bias" in config.options, dtype=config.dtype
    )
    layer.build(query.shape, value.shape, key.shape)
    layer.set_weights([random.normal(size=w.shape).astype(config.dtype) * 0.5 for w in layer.weights])
    named = {weight.path.split("/", 1)[-1]: np.asarray(keras.ops.convert_to_numpy(weight)) for weight in layer.weights}
    projection: dict[str, dict[str, np.ndarray]] = {}
    for name in ("query", "key", "value"):
        kernel = named[f"{name}/kernel"]  # (in, h, d)
        projection[name] = {"kernel": kernel.reshape(kernel.shape[0], -1)}
        if "bias" in config.options:
            projection[name]["bias"] = named[f"{name}/bias"]
    output_kernel = named["attention_output/kernel"]  # (h, e, out)
    projection["output"] = {"kernel": output_kernel.reshape(-1, output_kernel.shape[-1])}
    if "bias" in config.options:
        projection["output"]["bias"] = named["attention_output/bias"]
    ours: dict[str, Any] = {"query_offset": 0}
    theirs: dict[str, Any] = {}
    if "mask" in config.options:
        mask = random.random((config.b, config.q, config.k)) < 0.7
        ours["mask"], theirs["attention_mask"] = mask[:, None], mask
    if "causal" in config.options:
        ours["is_causal"] = theirs["use_causal_mask"] = True
    output, weights = layer(query, value, key=key, return_attention_scores=True, **theirs)
    result = attend(query, key, value, projection=projection, num_heads=config.h, backend=backend, **ours)
    ours_weights = result["attention_weights"]
    if config.h == 1:
        ours_weights = ours_weights[:, None]
    pairs = {
        "output": (result.output, np.asarray(keras.ops.convert_to_numpy(output))),
        "weights": (ours_weights, np.asarray(keras.ops.convert_to_numpy(weights))),
    }
    return pairs, tolerance(config.dtype, max(config.k, config.h * config.e, config.d + 1))


# torch FlexAttention, uncompiled: scores as a function of position. Fully masked rows are 0. exp(logsumexp) is compared
# instead of logsumexp: its relative error is that of the weights, while a logarithm near 0 has few correct digits.


def flex_attention(config: Config, backend: str) -> tuple[Pairs, float]:
    from torch.nn.attention.flex_attention import flex_attention as flex

    random = config.random()
    query, key, value = config.arrays(random)
    offset = int(random.integers(-2, 4))
    slopes = random.random(config.h).astype(config.dtype)
    ours: dict[str, Any] = {"query_offset": offset}
    if "softcap" in config.options:
        ours["softcap"] = 0.5 + config.number
    if "alibi" in config.options:
        ours["alibi_slopes"] = slopes
    if "window" in config.options:
        ours["window"] = {"left": config.number, "right": config.number // 2}
    if "causal" in config.options:
        ours["is_causal"] = True
    steep = torch.from_numpy(slopes)

    def score(s: torch.Tensor, b: Any, h: torch.Tensor, i: torch.Tensor, j: torch.Tensor) -> torch.Tensor:
        if "softcap" in ours:
            s = ours["softcap"] * torch.tanh(s / ours["softcap"])
        if "alibi" in config.options:
            s = s - steep[h] * (i + offset - j).abs()
        hidden = torch.zeros_like(s, dtype=torch.bool)
        if "window" in ours:
            hidden = hidden | (j < i + offset - ours["window"]["left"]) | (j > i + offset + ours["window"]["right"])
        if "causal" in config.options:
            hidden = hidden | (j > i + offset)
        return torch.where(hidden, -torch.inf, s)

    expected, logsumexp = flex(*map(to_torch, (query, key, value)), score_mod=score, enable_gqa=True, return_lse=True)
    result = attend(query, key, value, include=["logsumexp"], backend=backend, **ours)
    rows = visible_rows(result)
    pairs = {
        "output": (result.output, expected.numpy()),
        "exp(logsumexp)": (np.exp(result["logsumexp"][rows]), np.exp(logsumexp.numpy()[rows])),
    }
    return pairs, tolerance(config.dtype, config.k)


# Hugging Face's eager attention of gpt-oss, with sinks. Masks are added; in a fully masked row the sink has all weight.


def hugging_face(config: Config, backend: str) -> tuple[Pairs, float]:
    from transformers.models.gpt_oss.modeling_gpt_oss import eager_attention_forward

    random = config.random()
    query, key, value = config.arrays(random)
    sinks = random.normal(size=config.h).astype(config.dtype)
    module = torch.nn.Module()
    module.num_key_value_groups = config.groups  # type: ignore[assignment]
    module.sinks = torch.nn.Parameter(torch.from_numpy(sinks))
    module.training = False
    ours: dict[str, Any] = {"sinks": sinks, "scale": 0.1 + config.number / 5}
    mask = None
    if "mask" in config.options:
        seen = random.random((config.b, 1, config.q, config.k)) < 0.7
        ours["mask"] = seen
        mask = torch.where(torch.from_numpy(seen), 0.0, -torch.inf).to(getattr(torch, config.dtype))
    if "window" in config.options:  # gpt-oss's sliding window of n: the last n keys, this one counted
        ours |= {"window": {"left": config.number}, "is_causal": True, "query_offset": config.k - config.q}
        i, j = np.arange(config.q)[:, None] + config.k - config.q, np.arange(config.k)
        band = torch.from_numpy((j <= i) & (j >= i - config.number))
        hidden = torch.where(band, 0.0, -torch.inf).to(getattr(torch, config.dtype))[None, None]
        mask = hidden if mask is None else mask + hidden
    with torch.no_grad():
        output, weights = eager_attention_forward(
            module, *map(to_torch, (query, key, value)), attention_mask=mask, scaling=ours["scale"]
        )
    result = attend(query, key, value, backend=backend, **ours)
    pairs = {
        "output": (result.output, output.numpy().transpose(0, 2, 1, 3)),
        "weights": (result["attention_weights"], weights.numpy()),
    }
    return pairs, tolerance(config.dtype, config.k)


ALL_TYPES = ("float64", "float32", "float16", "bfloat16")


@dataclass(frozen=True)
class Peer:
    """An implementation for comparison: its configurations, and a function that computes one both ways."""

    configs: st.SearchStrategy[Config]
    compute: Callable[[Config, str], tuple[Pairs, float]]


PEERS = {
    "torch SDPA": Peer(configs("mask", "bias", "causal", "scale", "dense", dtypes=ALL_TYPES), torch_sdpa),
    "torch MultiheadAttention": Peer(configs("bias", "mask", "key_mask", "average"), torch_mha),
    "JAX": Peer(pooled("bias", "mask", "causal", "lengths", "window", "scale"), jax_attention),
    "Keras": Peer(pooled("bias", "mask", "causal"), keras_mha),
    "torch FlexAttention": Peer(configs("softcap", "alibi", "window", "causal"), flex_attention),
    "Hugging Face gpt-oss": Peer(configs("mask", "window"), hugging_face),
}


def ratio(peer: Peer, config: Config) -> float:
    """The largest deviation of both backends from the peer and from each other, divided by the tolerance."""
    found, outputs = 0.0, []
    for backend in ("numpy", "torch"):
        pairs, limit = peer.compute(config, backend)
        if config.dtype in ("float16", "bfloat16"):
            found = max(found, *(ulps(ours, theirs, limit) for ours, theirs in pairs.values()))
        else:
            found = max(found, worst_ratio(pairs, limit))
            exact = all(same_zeros(*pair) for pair in pairs.values())
            found = found if exact else math.inf
        outputs.append(pairs["output"][0].astype(np.float64))
    if config.dtype in ("float64", "float32"):
        found = max(found, deviation(*outputs) / limit)
    return found
