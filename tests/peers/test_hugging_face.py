"""What docs/coming-from.md says of Hugging Face holds for its models: tiny ones with random weights."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import numpy as np
import pytest
import torch
from transformers import Gemma3TextConfig, Gemma3TextModel, Llama4TextConfig, ModernBertConfig, ModernBertModel
from transformers.masking_utils import chunked_causal_mask_function, eager_mask

from attention_service import attend

pytestmark = pytest.mark.filterwarnings("ignore")

LENGTH, HEAD_DIM = 9, 8
TINY: dict[str, Any] = {"vocab_size": 16, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1,
                        "num_attention_heads": 2, "attn_implementation": "eager"}  # fmt: skip


def visible(weights: Any) -> np.ndarray:
    """Which key each query sees, by attention weights (…, q, k) that are the same pattern for all heads."""
    pattern: np.ndarray = np.asarray(weights).reshape(-1, LENGTH, LENGTH) > 0
    assert (pattern == pattern[0]).all()
    return pattern[0]


def seen_by(model: torch.nn.Module) -> np.ndarray:
    """Which key each query sees in the first layer of a model."""
    with torch.no_grad():
        return visible(model.eval()(torch.arange(LENGTH)[None], output_attentions=True).attentions[0])


def seen_here(**options: Any) -> np.ndarray:
    return visible(attend(input=np.zeros((LENGTH, HEAD_DIM)), **options)["attention_weights"])


@pytest.mark.parametrize("window", [4, 6])
def test_the_bidirectional_window_of_gemma_counts_the_token_itself(window: int) -> None:
    """The model halves the window of its configuration once, when it is made."""
    config = Gemma3TextConfig(
        **TINY, head_dim=HEAD_DIM, num_key_value_heads=1, sliding_window=window, use_bidirectional_attention=True,
        layer_types=["sliding_attention"],
    )  # fmt: skip
    assert config.sliding_window == window // 2 + 1
    side = config.sliding_window - 1
    np.testing.assert_array_equal(seen_here(window={"left": side, "right": side}), seen_by(Gemma3TextModel(config)))


def test_the_causal_window_of_gemma_counts_the_token_itself() -> None:
    config = Gemma3TextConfig(
        **TINY, head_dim=HEAD_DIM, num_key_value_heads=1, sliding_window=4, layer_types=["sliding_attention"]
    )
    np.testing.assert_array_equal(seen_here(window={"left": 3}, is_causal=True), seen_by(Gemma3TextModel(config)))


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_the_window_of_modernbert_does_not_count_the_token_itself(attention: str) -> None:
    """`sdpa` returns no weights: a token that is not seen does not change the output of another."""
    options = TINY | {"attn_implementation": attention}
    model = ModernBertModel(
        ModernBertConfig(**options, local_attention=4, layer_types=["sliding_attention"], pad_token_id=0)
    ).eval()
    side = model.config.sliding_window
    assert side == 2
    ours = seen_here(window={"left": side, "right": side})
    if attention == "eager":
        np.testing.assert_array_equal(ours, seen_by(model))
    tokens = torch.arange(1, 1 + LENGTH)[None]
    with torch.no_grad():
        before = model(tokens).last_hidden_state[0]
        for j in range(LENGTH):
            changed = tokens.clone()
            changed[0, j] = 15
            after = model(changed).last_hidden_state[0]
            np.testing.assert_array_equal((after != before).any(dim=-1).numpy(), ours[:, j])


@pytest.mark.parametrize(
    ("family", "options", "part", "interleaved"),
    [
        ("llama", {}, np.s_[..., : HEAD_DIM // 2], False),
        ("cohere", {}, np.s_[..., ::2], True),
        ("ernie4_5", {"head_dim": HEAD_DIM}, np.s_[..., : HEAD_DIM // 2], True),
        ("glm", {"head_dim": HEAD_DIM}, np.s_[..., : HEAD_DIM // 4], True),  # turns half of the features
        ("gpt_oss", {"head_dim": HEAD_DIM, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
         np.s_[...], False),
    ],
)  # fmt: skip
def test_cosines_are_doubled_as_described(family: str, options: dict[str, Any], part: Any, interleaved: bool) -> None:
    module = import_module(f"transformers.models.{family}.modeling_{family}")
    prefix = {"llama": "Llama", "cohere": "Cohere", "glm": "Glm", "ernie4_5": "Ernie4_5", "gpt_oss": "GptOss"}[family]
    config = getattr(import_module("transformers"), f"{prefix}Config")(**TINY | options)
    query = torch.from_numpy(np.random.default_rng(3).normal(size=(1, 2, LENGTH, HEAD_DIM)))
    cos, sin = getattr(module, f"{prefix}RotaryEmbedding")(config)(query, torch.arange(LENGTH)[None])
    theirs, _ = module.apply_rotary_pos_emb(query, query, cos, sin)
    tables = {"cos": cos[part].numpy(), "sin": sin[part].numpy()}
    ours = attend(input=query.numpy(), rotary=tables | {"interleaved": interleaved}, include=["query"])
    # Cohere turns in float32.
    np.testing.assert_allclose(ours["query"], theirs.numpy(), rtol=1e-6, atol=1e-6)
    assert not np.allclose(theirs.numpy(), query.numpy())


@pytest.mark.parametrize(
    ("family", "name", "added"),
    [
        ("gemma", "Gemma", 1),
        ("gemma2", "Gemma2", 1),
        ("gemma3", "Gemma3", 1),
        ("qwen3_next", "Qwen3Next", 1),
        ("qwen3", "Qwen3", 0),
        ("gemma4", "Gemma4", 0),
    ],
)
def test_the_weight_of_gemmas_norm_is_added_to_1(family: str, name: str, added: int) -> None:
    norm = getattr(import_module(f"transformers.models.{family}.modeling_{family}"), f"{name}RMSNorm")(
        HEAD_DIM, eps=1e-6
    )
    random = np.random.default_rng(4)
    weight, tokens = random.normal(size=HEAD_DIM), random.normal(size=(LENGTH, HEAD_DIM))
    with torch.no_grad():
        norm.weight.copy_(torch.from_numpy(weight))
        theirs = norm(torch.from_numpy(tokens).float())
    ours = attend(input=tokens, query_norm={"weight": added + weight, "eps": 1e-6}, include=["query"])
    np.testing.assert_allclose(ours["query"], theirs.numpy(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_a_row_without_a_visible_key_is_uniform_by_finfo_min_and_zero_by_a_mask(dtype: str) -> None:
    """Left padding in a causal model: the first query sees no key."""
    padding = torch.tensor([[0, 1, 1]])
    bias = eager_mask(1, 3, 3, attention_mask=padding.bool(), dtype=torch.float32)
    assert bias[0, 0, 0].tolist() == [torch.finfo(torch.float32).min] * 3
    tokens = np.random.default_rng(5).normal(size=(3, 4)).astype(dtype)
    scores = torch.from_numpy(tokens @ tokens.T / 2)
    theirs = torch.softmax(scores + bias[0, 0], dim=-1)
    torch.testing.assert_close(theirs[0].float(), torch.full((3,), 1 / 3))
    ours = attend(input=tokens, bias=bias[0, 0].numpy())["attention_weights"]
    np.testing.assert_allclose(ours, theirs.numpy(), rtol=1e-6, atol=1e-7)
    masked = attend(input=tokens, is_causal=True, key_mask=padding[0].numpy() != 0)
    np.testing.assert_array_equal(masked["attention_weights"][0], [0, 0, 0])
    np.testing.assert_allclose(masked["attention_weights"][1:], theirs[1:].numpy(), rtol=1e-6, atol=1e-7)
    assert masked.metadata.fully_masked_rows == 1


def test_the_chunks_of_llama_4_begin_at_the_first_token_that_is_no_padding() -> None:
    """Layers of the type chunked_attention; tests/peers/test_chunked_attention.py compares batches without padding."""
    config = Llama4TextConfig(**TINY | {"num_hidden_layers": 4}, attention_chunk_size=3)
    assert config.layer_types == ["chunked_attention"] * 3 + ["full_attention"]
    padding, positions = 2, torch.arange(LENGTH)
    function = chunked_causal_mask_function(config.attention_chunk_size, torch.tensor([padding]))
    theirs = torch.stack([function(torch.tensor(0), 0, i, positions) for i in positions])
    ids = (np.arange(LENGTH) - padding) // config.attention_chunk_size
    ours = seen_here(is_causal=True, segment_ids={"query": ids, "key": ids})
    np.testing.assert_array_equal(ours, theirs.numpy())
    assert (ours != seen_here(is_causal=True, chunk_size=config.attention_chunk_size)).any()
