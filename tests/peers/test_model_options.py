"""Options that single models introduced, beside the attention modules of these models, with random weights."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from transformers import Olmo2Config, Qwen3NextConfig, Swinv2Config
from transformers.models.olmo2.modeling_olmo2 import Olmo2Attention
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextAttention
from transformers.models.swinv2.modeling_swinv2 import Swinv2SelfAttention

from service import attend
from tests.helpers.backends import BACKENDS

pytestmark = pytest.mark.filterwarnings("ignore")

SEEDS = range(40)


def random_weights(module: torch.nn.Module, random: np.random.Generator) -> torch.nn.Module:
    """The module in float64, with random numbers for all its parameters."""
    for parameter in module.double().parameters():
        parameter.data = torch.from_numpy(random.normal(size=tuple(parameter.shape)) * 0.5)
    return module.eval()


def linear(layer: Any) -> dict[str, np.ndarray]:
    """A linear layer of torch as a map of a request."""
    return {name: parameter.detach().numpy() for name, parameter in layer.named_parameters()}


def agree(ours: Any, theirs: torch.Tensor) -> None:
    np.testing.assert_allclose(ours, theirs.detach().numpy(), rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("seed", SEEDS)
def test_the_scale_of_each_head_of_swin_v2(seed: int, backend: str) -> None:
    """Cosine attention: query and key have length 1, and each head has a scale of its own."""
    random = np.random.default_rng(seed)
    heads, head_dim, side = int(random.integers(1, 5)), int(random.integers(1, 6)), int(random.integers(1, 4))
    dim = heads * head_dim
    module: Any = random_weights(Swinv2SelfAttention(Swinv2Config(qkv_bias=True), dim, heads, side), random)
    module.relative_coords_table = module.relative_coords_table.double()
    tokens = torch.from_numpy(random.normal(size=(int(random.integers(1, 4)), side * side, dim)))
    with torch.no_grad():
        theirs, weights = module(tokens, output_attentions=True)
        bias = module.continuous_position_bias_mlp(module.relative_coords_table).view(-1, heads)
        bias = 16 * torch.sigmoid(bias[module.relative_position_index.view(-1)].view(side * side, side * side, heads))
    unit = {"weight": np.full(head_dim, 1 / np.sqrt(head_dim)), "eps": 1e-300}
    ours = attend(
        input=tokens.numpy(),
        num_heads=heads,
        projection={name: linear(getattr(module, name)) for name in ("query", "key", "value")},
        query_norm=unit,
        key_norm=unit,
        scale=module.logit_scale.detach().exp().ravel().numpy(),
        bias=bias.permute(2, 0, 1).numpy()[None],
        backend=backend,
    )
    agree(ours.output, theirs)
    agree(ours["attention_weights"].reshape(weights.shape), weights)


def positions_of(length: int, head_dim: int) -> tuple[dict[str, np.ndarray], tuple[torch.Tensor, torch.Tensor]]:
    """The same cosines and sines for a request, and doubled, as Hugging Face has them."""
    angles = np.arange(length)[:, None] * 100.0 ** (-np.arange(0, head_dim, 2) / head_dim)
    doubled = torch.from_numpy(np.concatenate([angles, angles], axis=-1))[None]
    return {"cos": np.cos(angles), "sin": np.sin(angles)}, (doubled.cos(), doubled.sin())


def causal(length: int) -> torch.Tensor:
    return torch.full((length, length), -torch.inf, dtype=torch.float64).triu(1)[None, None]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("seed", SEEDS)
def test_the_norm_over_all_heads_of_olmo_2(seed: int, backend: str) -> None:
    """Query and key are normalised before they are split into heads."""
    random = np.random.default_rng(seed)
    kv_heads, head_dim, length = (
        int(x) for x in (random.integers(1, 4), 2 * random.integers(1, 4), random.integers(1, 9))
    )
    heads = kv_heads * int(random.integers(1, 4))
    config = Olmo2Config(
        hidden_size=int(random.integers(3, 20)),
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        attention_bias=bool(seed % 2),
        attn_implementation="eager",
    )
    module: Any = random_weights(Olmo2Attention(config, 0), random)
    rotary, positions = positions_of(length, head_dim)
    tokens = torch.from_numpy(random.normal(size=(int(random.integers(1, 4)), length, config.hidden_size)))
    with torch.no_grad():
        theirs, weights = module(tokens, positions, causal(length))
    names = {"query": module.q_proj, "key": module.k_proj, "value": module.v_proj, "output": module.o_proj}
    norms: dict[str, Any] = {
        f"{role}_norm": {"over": "all", "weight": norm.weight.detach().numpy(), "eps": norm.variance_epsilon}
        for role, norm in (("query", module.q_norm), ("key", module.k_norm))
    }
    ours = attend(
        input=tokens.numpy(),
        num_heads=heads,
        num_kv_heads=kv_heads,
        projection={name: linear(layer) for name, layer in names.items()},
        rotary=rotary,
        is_causal=True,
        backend=backend,
        **norms,
    )
    # The norm of Hugging Face computes in float32.
    np.testing.assert_allclose(ours.output, theirs.numpy(), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(ours["attention_weights"].reshape(weights.shape), weights.numpy(), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("seed", SEEDS)
def test_norms_of_torch(seed: int, backend: str) -> None:
    """torch's own RMSNorm and LayerNorm, over each head or over all, in float64."""
    random = np.random.default_rng(seed)
    heads, head_dim, length = (int(x) for x in random.integers(1, 7, 3))
    kind, over = ("rms", "layer")[seed % 2], ("head", "all")[seed // 2 % 2]
    width = heads * head_dim if over == "all" else head_dim
    eps = float(random.choice([1e-8, 1e-5, 0.1]))
    module: Any = torch.nn.RMSNorm(width, eps) if kind == "rms" else torch.nn.LayerNorm(width, eps)
    random_weights(module, random)
    tokens = random.normal(size=(2, length, heads * head_dim)) * 4 + 1
    with torch.no_grad():
        theirs = module(torch.from_numpy(tokens).reshape(2, length, -1, width)).reshape(2, length, heads, head_dim)
    norm: dict[str, Any] = {"kind": kind, "over": over, "eps": eps} | linear(module)
    ours = attend(
        input=tokens, num_heads=heads, query_norm=norm, key_norm=norm, value_norm=norm, backend=backend,
        include=["query", "key", "value"],
    )  # fmt: skip
    for role in ("query", "key", "value"):
        agree(ours[role].reshape(2, heads, length, head_dim), theirs.transpose(1, 2))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("seed", SEEDS)
def test_the_gate_of_qwen3_next(seed: int, backend: str) -> None:
    """Its query map makes the query of each head and, after it, the gate of the head."""
    random = np.random.default_rng(seed)
    kv_heads, head_dim, length = (
        int(x) for x in (random.integers(1, 4), 2 * random.integers(1, 4), random.integers(1, 9))
    )
    heads, features = kv_heads * int(random.integers(1, 4)), int(random.integers(3, 20))
    config = Qwen3NextConfig(
        hidden_size=features,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        attention_bias=bool(seed % 2),
        attn_implementation="eager",
    )
    module: Any = random_weights(Qwen3NextAttention(config, 0), random)
    rotary, positions = positions_of(length, head_dim)
    tokens = torch.from_numpy(random.normal(size=(int(random.integers(1, 4)), length, features)))
    with torch.no_grad():
        theirs, weights = module(tokens, positions, causal(length))
    both = {name: array.reshape(heads, 2, head_dim, -1) for name, array in linear(module.q_proj).items()}
    query, gate = (
        {name: array[:, part].reshape((-1, features) if name == "weight" else -1) for name, array in both.items()}
        for part in (0, 1)
    )
    names = {"key": module.k_proj, "value": module.v_proj, "output": module.o_proj}
    norms: dict[str, Any] = {  # whose weights are those of the model less 1
        f"{role}_norm": {"weight": 1 + norm.weight.detach().numpy(), "eps": norm.eps}
        for role, norm in (("query", module.q_norm), ("key", module.k_norm))
    }
    ours = attend(
        input=tokens.numpy(),
        num_heads=heads,
        num_kv_heads=kv_heads,
        projection={name: linear(layer) for name, layer in names.items()} | {"query": query, "gate": gate},
        rotary=rotary,
        is_causal=True,
        backend=backend,
        **norms,
    )
    # The norm of Hugging Face computes in float32.
    np.testing.assert_allclose(ours.output, theirs.numpy(), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(ours["attention_weights"].reshape(weights.shape), weights.numpy(), rtol=1e-4, atol=1e-6)
