"""Attention layers of transformers with random weights, as requests."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import torch


class Both(NamedTuple):
    """A request, and arrays of its response as a model computes them.

    condition: how many times larger a relative error of the request may be in the arrays
    """

    request: dict[str, Any]
    theirs: dict[str, torch.Tensor]
    condition: float = 1.0


class Wide:
    """The module torch, with float64 in the place of float32."""

    float32 = torch.float64

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


@contextmanager
def in_float64(modeling: Any) -> Iterator[None]:
    """Let a model compute in float64 also what it computes in float32, whose rounding would hide mistakes."""
    with (
        mock.patch.object(modeling, "torch", Wide()),
        mock.patch.object(torch.Tensor, "float", torch.Tensor.double),
        torch.no_grad(),
    ):
        yield


def random_weights(module: torch.nn.Module, random: np.random.Generator) -> Any:
    """The module in float64, with random numbers for all its parameters."""
    for parameter in module.double().parameters():
        parameter.data = torch.from_numpy(random.normal(size=tuple(parameter.shape)) * 0.5)
    return module.eval()


def linear(layer: Any) -> dict[str, np.ndarray]:
    """A linear layer of torch as a map of a request; the weight and the bias of a norm."""
    return {name: parameter.detach().numpy() for name, parameter in layer.named_parameters()}


def rms(norm: Any, **more: Any) -> dict[str, Any]:
    """An RMS norm of transformers as one of a request."""
    return linear(norm) | {"eps": getattr(norm, "variance_epsilon", getattr(norm, "eps", None))} | more


def positions_of(length: int, head_dim: int) -> tuple[dict[str, np.ndarray], tuple[torch.Tensor, torch.Tensor]]:
    """The same cosines and sines for a request, and doubled, as Hugging Face has them."""
    angles = np.arange(length)[:, None] * 100.0 ** (-np.arange(0, head_dim, 2) / head_dim)
    doubled = torch.from_numpy(np.concatenate([angles, angles], axis=-1))[None]
    return {"cos": np.cos(angles), "sin": np.sin(angles)}, (doubled.cos(), doubled.sin())


def causal(length: int) -> torch.Tensor:
    return torch.full((length, length), -torch.inf, dtype=torch.float64).triu(1)[None, None]


@dataclass
class Sizes:
    """Sizes of a decoder's layer. more: fields of its configuration"""

    heads: int
    kv_heads: int
    head_dim: int
    length: int
    batch: int
    features: int

    @classmethod
    def of(cls, random: np.random.Generator) -> Sizes:
        # Heads of two features may be nearly 0, and a norm would then enlarge the rounding of what made them.
        kv_heads, groups, half, length, batch = (int(x) for x in random.integers((1, 1, 2, 1, 1), (4, 4, 5, 9, 4)))
        return cls(kv_heads * groups, kv_heads, 2 * half, length, batch, int(random.integers(3, 20)))

    def config(self, made: Any, random: np.random.Generator, **more: Any) -> Any:
        """A configuration of these sizes."""
        sizes = {"num_attention_heads": self.heads, "num_key_value_heads": self.kv_heads, "head_dim": self.head_dim}
        fields = {"hidden_size": self.features, "num_hidden_layers": 1, "attention_bias": bool(random.integers(2))}
        return made(**(sizes | fields | {"attn_implementation": "eager"} | more))

    def tokens(self, random: np.random.Generator) -> torch.Tensor:
        return torch.from_numpy(random.normal(size=(self.batch, self.length, self.features)))


def layer_of(module: Any, modeling: Any, sizes: Sizes, random: np.random.Generator, *, is_causal: bool = True) -> Both:
    """The request of a layer without what is its own, and what the layer computes."""
    rotary, positions = positions_of(sizes.length, sizes.head_dim)
    tokens = sizes.tokens(random)
    mask = causal(sizes.length) if is_causal else None
    with in_float64(modeling):
        output, weights = module(tokens, position_embeddings=positions, attention_mask=mask)
    maps = {"query": "q_proj", "key": "k_proj", "value": "v_proj", "output": "o_proj"}
    request = {
        "input": tokens.numpy(),
        "num_heads": sizes.heads,
        "num_kv_heads": sizes.kv_heads,
        "projection": {name: linear(getattr(module, theirs)) for name, theirs in maps.items()},
        "rotary": rotary,
        "is_causal": is_causal,
    }
    return Both(request, {"output": output, "attention_weights": weights})
