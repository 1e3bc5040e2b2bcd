"""Options that single models introduced, as these models compute them: their own modules, with random weights.

Each comparison makes a random configuration: a request, and what the model's code computes of the same numbers.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import Any
from unittest import mock

import numpy as np
import torch
from transformers import (
    AfmoeConfig,
    DeepseekV32Config,
    EsmcConfig,
    Gemma3nTextConfig,
    GraniteSWAConfig,
    HunYuanDenseV1Config,
    LagunaConfig,
    Lfm3Config,
    Olmo2Config,
    PersimmonConfig,
    Qwen3NextConfig,
    Swinv2Config,
)
from transformers.models.afmoe import modeling_afmoe
from transformers.models.deepseek_v32 import modeling_deepseek_v32
from transformers.models.esmc import modeling_esmc
from transformers.models.gemma3n import modeling_gemma3n
from transformers.models.granite_swa import modeling_granite_swa
from transformers.models.hunyuan_v1_dense import modeling_hunyuan_v1_dense
from transformers.models.inkling2 import modeling_inkling2
from transformers.models.laguna import modeling_laguna
from transformers.models.lfm3 import modeling_lfm3
from transformers.models.olmo2 import modeling_olmo2
from transformers.models.persimmon import modeling_persimmon
from transformers.models.qwen3_next import modeling_qwen3_next
from transformers.models.swinv2.modeling_swinv2 import Swinv2SelfAttention

from attention_service import attend
from tests.peers.layers_of_models import (
    Both,
    Sizes,
    causal,
    in_float64,
    layer_of,
    linear,
    positions_of,
    random_weights,
    rms,
)
from tests.peers.peers import worst_ratio
from tests.peers.run import run_seeds

Comparison = Callable[[np.random.Generator], Both]
LAYER_TYPES = ["full_attention"]
EPSILON = 2.0**-52


def swin_v2(random: np.random.Generator) -> Both:
    """Cosine attention: query and key have length 1, and each head has a scale of its own."""
    heads, head_dim, side = (int(x) for x in random.integers(1, (5, 6, 4)))
    dim = heads * head_dim
    module = random_weights(Swinv2SelfAttention(Swinv2Config(qkv_bias=True), dim, heads, side), random)
    module.relative_coords_table = module.relative_coords_table.double()
    tokens = torch.from_numpy(random.normal(size=(int(random.integers(1, 4)), side * side, dim)))
    with torch.no_grad():
        output, weights = module(tokens, output_attentions=True)
        bias = module.continuous_position_bias_mlp(module.relative_coords_table).view(-1, heads)
        bias = 16 * torch.sigmoid(bias[module.relative_position_index.view(-1)].view(side * side, side * side, heads))
    unit = {"weight": np.full(head_dim, 1 / np.sqrt(head_dim)), "eps": 1e-300}
    request = {
        "input": tokens.numpy(),
        "num_heads": heads,
        "projection": {name: linear(getattr(module, name)) for name in ("query", "key", "value")},
        "query_norm": unit,
        "key_norm": unit,
        "scale": module.logit_scale.detach().exp().ravel().numpy(),
        "bias": bias.permute(2, 0, 1).numpy()[None],
    }
    return Both(request, {"output": output, "attention_weights": weights})


def olmo_2(random: np.random.Generator) -> Both:
    """Query and key are normalised before they are split into heads."""
    sizes = Sizes.of(random)
    module = random_weights(modeling_olmo2.Olmo2Attention(sizes.config(Olmo2Config, random), 0), random)
    request, theirs, _ = layer_of(module, modeling_olmo2, sizes, random)
    norms = {f"{role}_norm": rms(getattr(module, f"{role[0]}_norm"), over="all") for role in ("query", "key")}
    return Both(request | norms, theirs)


def hunyuan(random: np.random.Generator) -> Both:
    """Query and key are normalised after the rotation."""
    sizes, modeling = Sizes.of(random), modeling_hunyuan_v1_dense
    config = sizes.config(HunYuanDenseV1Config, random, rms_norm_eps=float(random.choice([1e-5, 0.1])))
    module = random_weights(modeling.HunYuanDenseV1Attention(config, 0), random)
    request, theirs, _ = layer_of(module, modeling, sizes, random)
    norms = {f"{role}_norm": rms(getattr(module, f"{role}_layernorm"), position="after") for role in ("query", "key")}
    return Both(request | norms, theirs)


def persimmon(random: np.random.Generator) -> Both:
    """Layer norms with a bias of each head, before a rotation of the first half of the features."""
    sizes = Sizes.of(random)
    sizes.head_dim, sizes.kv_heads = 2 * sizes.head_dim, sizes.heads
    sizes.features = sizes.heads * sizes.head_dim
    rope = {"rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": 0.5}
    fields = {"hidden_size": sizes.features, "num_attention_heads": sizes.heads, "attn_implementation": "eager"}
    config = PersimmonConfig(**fields, rope_parameters=rope, layer_norm_eps=1e-3)  # type: ignore[arg-type]  # any fields
    module = random_weights(modeling_persimmon.PersimmonAttention(config, 0), random)
    rotary, positions = positions_of(sizes.length, sizes.head_dim // 2)
    tokens = sizes.tokens(random)
    with in_float64(modeling_persimmon):
        output, weights = module(tokens, position_embeddings=positions, attention_mask=causal(sizes.length))
    joined = {
        name: array.reshape(sizes.heads, 3, sizes.head_dim, -1)
        for name, array in linear(module.query_key_value).items()
    }
    maps = {
        role: {"weight": joined["weight"][:, part].reshape(-1, sizes.features), "bias": joined["bias"][:, part].ravel()}
        for part, role in enumerate(("query", "key", "value"))
    }
    request = {
        "input": tokens.numpy(),
        "num_heads": sizes.heads,
        "projection": maps | {"output": linear(module.dense)},
        "query_norm": rms(module.q_layernorm, kind="layer"),
        "key_norm": rms(module.k_layernorm, kind="layer"),
        "rotary": rotary,
        "is_causal": True,
    }
    return Both(request, {"output": output, "attention_weights": weights})


def esmc(random: np.random.Generator) -> Both:
    """Layer norms over all heads, without a mask."""
    sizes = Sizes.of(random)
    sizes.kv_heads, sizes.features = sizes.heads, sizes.heads * sizes.head_dim
    module = random_weights(modeling_esmc.EsmcAttention(sizes.config(EsmcConfig, random), 0), random)
    request, theirs, _ = layer_of(module, modeling_esmc, sizes, random, is_causal=False)
    norms = {"query_norm": module.q_norm, "key_norm": module.k_norm}
    return Both(request | {name: rms(norm, kind="layer", over="all") for name, norm in norms.items()}, theirs)


def gemma_3n(random: np.random.Generator) -> Both:
    """Values are normalised, too, without weights; scores are not scaled."""
    sizes = Sizes.of(random)
    sizes.features = 3 * sizes.heads  # it wants a multiple
    more = {"layer_types": LAYER_TYPES, "num_kv_shared_layers": 0}
    module = random_weights(
        modeling_gemma3n.Gemma3nTextAttention(sizes.config(Gemma3nTextConfig, random, **more), 0), random
    )
    request, theirs, _ = layer_of(module, modeling_gemma3n, sizes, random)
    norms = {f"{role}_norm": rms(getattr(module, f"{role[0]}_norm")) for role in ("query", "key", "value")}
    return Both(request | norms | {"scale": 1.0}, theirs)


def norms_of_torch(random: np.random.Generator) -> Both:
    """torch's own RMSNorm and LayerNorm, over each head or over all, before or after the rotation of OLMo 2."""
    heads, half, length = (int(x) for x in random.integers(1, (7, 4, 7)))
    head_dim = 2 * half
    kind, over = str(random.choice(["rms", "layer"])), str(random.choice(["head", "all"]))
    position = str(random.choice(["before", "after"]))
    width = heads * head_dim if over == "all" else head_dim
    eps = float(random.choice([1e-8, 1e-5, 0.1]))
    module = random_weights((torch.nn.RMSNorm if kind == "rms" else torch.nn.LayerNorm)(width, eps), random)
    tokens = random.normal(size=(2, length, heads * head_dim)) * 4 + 1
    rotary, tables = positions_of(length, head_dim)

    def normalised(given: torch.Tensor) -> torch.Tensor:
        parts: torch.Tensor = module(given.transpose(1, 2).reshape(2, length, -1, width))
        return parts.reshape(2, length, heads, head_dim).transpose(1, 2)

    def rotated(given: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = modeling_olmo2.apply_rotary_pos_emb(given, given, *tables)[0]
        return found

    split = torch.from_numpy(tokens).reshape(2, length, heads, head_dim).transpose(1, 2)
    with torch.no_grad():
        found = rotated(normalised(split)) if position == "before" else normalised(rotated(split))
        value = normalised(split)
    norm: dict[str, Any] = {"kind": kind, "over": over, "eps": eps} | linear(module)
    request = {"input": tokens, "num_heads": heads, "rotary": rotary, "value_norm": norm}
    request |= dict.fromkeys(("query_norm", "key_norm"), norm | {"position": position})
    given = torch.stack([split, rotated(split)]).transpose(2, 3).reshape(-1, width)
    spread = given.var(-1, correction=0) if kind == "layer" else given.square().mean(-1)
    condition = float((given.abs().amax(-1) / (spread + eps).sqrt()).max())
    return Both(request, {"query": found, "key": found, "value": value}, condition)


def qwen3_next(random: np.random.Generator) -> Both:
    """Its query map makes the query of each head and, after it, the gate of the head."""
    sizes = Sizes.of(random)
    module = random_weights(modeling_qwen3_next.Qwen3NextAttention(sizes.config(Qwen3NextConfig, random), 0), random)
    request, theirs, _ = layer_of(module, modeling_qwen3_next, sizes, random)
    both = {
        name: array.reshape(sizes.heads, 2, sizes.head_dim, -1)
        for name, array in request["projection"]["query"].items()
    }
    for part, role in enumerate(("query", "gate")):
        request["projection"][role] = {
            name: array[:, part].reshape((-1, sizes.features) if name == "weight" else -1)
            for name, array in both.items()
        }
    norms = {  # whose weights are those of the model less 1
        f"{role}_norm": {"weight": 1 + norm.weight.detach().numpy(), "eps": norm.eps}
        for role, norm in (("query", module.q_norm), ("key", module.k_norm))
    }
    return Both(request | norms, theirs)


def with_norms(request: dict[str, Any], module: Any) -> dict[str, Any]:
    """The request of a layer that normalises query and key by `q_norm` and `k_norm`."""
    return request | {"query_norm": rms(module.q_norm), "key_norm": rms(module.k_norm)}


def afmoe(random: np.random.Generator) -> Both:
    """Gates that are given as numbers."""
    sizes = Sizes.of(random)
    config = sizes.config(AfmoeConfig, random, layer_types=["sliding_attention"])
    module = random_weights(modeling_afmoe.AfmoeAttention(config, 0), random)
    request, theirs, _ = layer_of(module, modeling_afmoe, sizes, random)
    with torch.no_grad():
        gate = torch.sigmoid(module.gate_proj(torch.from_numpy(request["input"])))
    gate = gate.reshape(sizes.batch, sizes.length, sizes.heads, sizes.head_dim).transpose(1, 2)
    return Both(with_norms(request, module) | {"gate": gate.numpy()}, theirs)


def lfm_3(random: np.random.Generator) -> Both:
    """One gate for each head."""
    sizes = Sizes.of(random)
    config = sizes.config(Lfm3Config, random, layer_types=LAYER_TYPES)
    module = random_weights(modeling_lfm3.Lfm3Attention(config, 0), random)
    request, theirs, _ = layer_of(module, modeling_lfm3, sizes, random)
    request["projection"]["gate"] = linear(module.g_proj)
    return Both(with_norms(request, module), theirs)


def laguna(random: np.random.Generator) -> Both:
    """Gates that are softplus, one for each head or each feature."""
    sizes = Sizes.of(random)
    more = {"layer_types": LAYER_TYPES, "gating": str(random.choice(["per-head", "per-element"]))}
    config = sizes.config(LagunaConfig, random, **more)
    module = random_weights(modeling_laguna.LagunaAttention(config, 0, sizes.heads), random)
    request, theirs, _ = layer_of(module, modeling_laguna, sizes, random)
    request["projection"]["gate"] = linear(module.g_proj) | {"activation": "softplus"}
    return Both(with_norms(request, module), theirs)


def granite_swa(random: np.random.Generator) -> Both:
    """A sink for each head, and weights that do not hold it."""
    sizes = Sizes.of(random)
    scale = float(random.uniform(0.05, 1))
    config = sizes.config(GraniteSWAConfig, random, layer_types=LAYER_TYPES, attention_multiplier=scale)
    module = random_weights(modeling_granite_swa.GraniteSWAAttention(config, 0), random)
    request, theirs, _ = layer_of(module, modeling_granite_swa, sizes, random)
    alone = {"output": theirs["output"], "weights_without_sinks": theirs["attention_weights"]}
    return Both(request | {"scale": scale, "sinks": module.sinks.detach().numpy()}, alone)


def inkling_2(random: np.random.Generator) -> Both:
    """A sink for each query of a head, with a mask that may hide all keys of a row, and a bias."""
    b, g, groups, q, k, d, e = (int(x) for x in random.integers(1, (4, 4, 4, 9, 9, 9, 9)))
    shapes = {"query": (b, g * groups, q, d), "key": (b, g, k, d), "value": (b, g, k, e)}
    arrays = {name: random.normal(size=shape) for name, shape in shapes.items()}
    mask = random.random((b, 1, q, k)) < 0.6
    bias, sinks = random.normal(size=(b, g * groups, q, k)), random.normal(size=(b, g * groups, q)) * 3
    scale = float(random.normal())
    module = torch.nn.Module()
    module.num_key_value_groups = groups  # type: ignore[assignment]  # as a layer has it
    added = torch.where(torch.from_numpy(mask), 0.0, -torch.inf).double()
    with in_float64(modeling_inkling2):
        output, weights = modeling_inkling2.eager_attention_forward(
            module, *map(torch.from_numpy, arrays.values()), added, scale,
            position_bias=torch.from_numpy(bias), sinks=torch.from_numpy(sinks)[..., None],
        )  # fmt: skip
    request = arrays | {"scale": scale, "mask": mask, "bias": bias, "sinks": sinks}
    return Both(request, {"output": output.transpose(1, 2), "attention_weights": weights})


def deepseek_v32(random: np.random.Generator) -> Both:
    """The keys that its indexer chooses, of the queries, keys and values that its layer makes."""
    sizes, modeling = Sizes.of(random), modeling_deepseek_v32
    names = ("q_lora_rank", "kv_lora_rank", "v_head_dim", "qk_nope_head_dim", "index_n_heads", "index_topk")
    more = dict(zip(names, (int(x) for x in random.integers(1, 7, len(names))), strict=True))
    more |= {"qk_rope_head_dim": sizes.head_dim, "index_head_dim": sizes.head_dim + 1}
    config = sizes.config(DeepseekV32Config, random, num_key_value_heads=sizes.heads, **more)
    module = random_weights(modeling.DeepseekV32Attention(config, 0), random)
    calls: list[tuple[Any, ...]] = []
    chosen: list[torch.Tensor] = []
    eager = modeling.eager_attention_forward

    def recorded(layer: Any, query: Any, key: Any, value: Any, mask: Any, **arguments: Any) -> Any:
        found = eager(layer, query, key, value, mask, **arguments)
        calls.append((query, key, value, *found))
        return found

    module.indexer.register_forward_hook(lambda _module, _given, found: chosen.append(found))
    _, positions = positions_of(sizes.length, sizes.head_dim)
    with in_float64(modeling), mock.patch.object(modeling, "eager_attention_forward", recorded):
        module(sizes.tokens(random), position_embeddings=positions, attention_mask=causal(sizes.length))
    [(query, key, value, output, weights)], [indices] = calls, chosen
    request: dict[str, Any] = {"query": query.numpy(), "key": key.numpy(), "value": value.numpy()}
    request |= {"selected_keys": indices[:, None].numpy(), "is_causal": True}
    return Both(request, {"output": output.transpose(1, 2), "attention_weights": weights})


def sigmoid(random: np.random.Generator) -> Both:
    """The formula of Ramapuram et al. in torch: σ(q kᵀ / √d + b) v with b = -ln n, causal. No library here has it."""
    b, h, q, past, d, e = (int(x) for x in random.integers(1, (4, 5, 9, 9, 9, 9)))
    k = q + past
    shapes = {"query": (b, h, q, d), "key": (b, h, k, d), "value": (b, h, k, e)}
    arrays = {name: random.normal(size=shape) * 2 for name, shape in shapes.items()}
    query, key, value = map(torch.from_numpy, arrays.values())
    scores = torch.einsum("bhid,bhjd->bhij", query, key) / d**0.5 - np.log(k)
    weights = torch.sigmoid(scores).tril(past)
    request = arrays | {"normalization": "sigmoid", "bias": np.full((1, 1, q, k), -np.log(k)), "is_causal": True}
    return Both(request | {"query_offset": past}, {"output": weights @ value, "attention_weights": weights})


COMPARISONS: dict[str, Comparison] = {
    "scale per head: Swin V2": swin_v2,
    "norm over all: OLMo 2": olmo_2,
    "norm after rotary: HunYuan": hunyuan,
    "layer norm, bias: Persimmon": persimmon,
    "layer norm over all: ESMC": esmc,
    "norm of values: Gemma 3n": gemma_3n,
    "norms: torch": norms_of_torch,
    "projection.gate: Qwen3-Next": qwen3_next,
    "gate: AFMoE": afmoe,
    "gate per head: LFM3": lfm_3,
    "gate, softplus: Laguna": laguna,
    "weights_without_sinks: Granite": granite_swa,
    "sinks per query: Inkling 2": inkling_2,
    "selected_keys: DeepSeek V3.2": deepseek_v32,
    "sigmoid: formula in torch": sigmoid,
}


def ratio(name: str, seed: int) -> float:
    """The largest deviation of both backends in the configuration of a seed, divided by what rounding allows.

    Rounding allows 16 ε · max(10, largest score) of the largest number of an array, as docs/exactness.md says, and more
    where a norm enlarges it.
    """
    request, theirs, condition = COMPARISONS[name](np.random.default_rng([zlib.crc32(name.encode()), seed]))
    include = [array for array in theirs if array != "output"]
    found = 0.0
    for backend in ("numpy", "torch"):
        ours = attend(**request, include=[*include, "scaled_scores"], backend=backend)
        allowed = 16 * EPSILON * max(10.0, condition, float(np.abs(ours["scaled_scores"]).max()))
        pairs = {array: (ours[array].reshape(tensor.shape), tensor.numpy()) for array, tensor in theirs.items()}
        found = max(found, worst_ratio(pairs, allowed))
    return found


def run_option(name: str, examples: int, first_seed: int) -> tuple[int, float]:
    """Compare so many configurations, as `run_seeds` does."""
    return run_seeds(name, ratio, examples, first_seed)
