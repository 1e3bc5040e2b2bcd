"""The conventions of other libraries are those that docs/coming-from.md describes."""

from __future__ import annotations

import os

os.environ.setdefault("KERAS_BACKEND", "torch")

import jax
import numpy as np
import onnx.helper
import pytest
import torch
from onnx.reference import ReferenceEvaluator

from attention_service import attend

ZEROS = torch.zeros(1, 1, 2, 4)
VALUES = torch.arange(8.0).reshape(1, 1, 2, 4)
HIDDEN = torch.zeros(2, 2, dtype=torch.bool)
MEAN = VALUES.mean(dim=2, keepdim=True).expand(1, 1, 2, 4)
pytestmark = pytest.mark.filterwarnings("ignore")


def test_the_conventions_of_torch_sdpa() -> None:
    """True is visible; a fully masked row is 0; causal masking aligns at the first token."""
    attention = torch.nn.functional.scaled_dot_product_attention
    seen = torch.tensor([[True, False], [True, True]])
    assert torch.equal(attention(ZEROS, ZEROS, VALUES, attn_mask=seen)[0, 0, 0], VALUES[0, 0, 0])
    assert not attention(ZEROS, ZEROS, VALUES, attn_mask=HIDDEN).any()
    first = attention(ZEROS[:, :, :1], ZEROS, VALUES, is_causal=True)
    assert torch.equal(first[0, 0, 0], VALUES[0, 0, 0])
    ours = attend(np.zeros((1, 4)), np.zeros((2, 4)), VALUES[0, 0].numpy(), is_causal=True, query_offset=0)
    np.testing.assert_array_equal(ours.output, first[0, 0])


def test_the_conventions_of_torch_multihead_attention() -> None:
    """True is hidden; a fully masked row is NaN; add_zero_attn is our sink of 0."""
    module = torch.nn.MultiheadAttention(4, 1, batch_first=True, bias=False)
    tokens = VALUES[0]
    _, weights = module(tokens, tokens, tokens, attn_mask=torch.tensor([[False, True], [True, False]]))
    assert torch.equal(weights[0], torch.eye(2))
    assert module(tokens, tokens, tokens, attn_mask=~HIDDEN)[1].isnan().all()
    with_zero = torch.nn.MultiheadAttention(4, 1, batch_first=True, bias=False, add_zero_attn=True)
    output, weights = with_zero(tokens, tokens, tokens)
    maps = {
        n: w.detach().numpy() for n, w in zip(("query", "key", "value"), with_zero.in_proj_weight.chunk(3), strict=True)
    }
    projection = {name: {"weight": weight} for name, weight in maps.items()}
    projection["output"] = {"weight": with_zero.out_proj.weight.detach().numpy()}
    ours = attend(input=tokens.numpy(), projection=projection, sinks=[0.0])
    np.testing.assert_allclose(ours.output, output.detach().numpy(), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(ours["attention_weights"], weights[..., :2].detach().numpy(), rtol=1e-5, atol=1e-6)


def test_the_conventions_of_jax() -> None:
    """True is visible; the axis of tokens comes before heads; a fully masked row is uniform."""
    zeros, values = ZEROS.numpy().transpose(0, 2, 1, 3), VALUES.numpy().transpose(0, 2, 1, 3)
    output = np.asarray(jax.nn.dot_product_attention(zeros, zeros, values, mask=HIDDEN.numpy()[None, None]))
    np.testing.assert_allclose(output, MEAN.numpy().transpose(0, 2, 1, 3))
    first = np.asarray(jax.nn.dot_product_attention(zeros[:, :1], zeros, values, is_causal=True))
    np.testing.assert_allclose(first[0, 0, 0], VALUES[0, 0, 0])


def test_the_conventions_of_keras() -> None:
    """True is visible; a fully masked row is 0; kernels are (in, h, d) and (h, d, out)."""
    import keras

    layer = keras.layers.MultiHeadAttention(3, 2)
    tokens = VALUES[0].numpy()
    _, weights = layer(tokens, tokens, attention_mask=HIDDEN.numpy()[None], return_attention_scores=True)
    assert not keras.ops.convert_to_numpy(weights).any()
    assert tuple(layer.weights[0].shape) == (4, 3, 2)
    assert tuple(layer.weights[-2].shape) == (3, 2, 4)


@pytest.mark.parametrize(("opset", "expected"), [(23, 0.0), (24, 0.0)])
def test_the_conventions_of_onnx(opset: int, expected: float) -> None:
    """True is visible; a fully masked row is 0."""
    node = onnx.helper.make_node("Attention", ["Q", "K", "V", "M"], ["Y"])
    names = [onnx.helper.make_tensor_value_info(n, onnx.TensorProto.FLOAT, None) for n in ("Q", "K", "V")]
    names.append(onnx.helper.make_tensor_value_info("M", onnx.TensorProto.BOOL, None))
    result = onnx.helper.make_tensor_value_info("Y", onnx.TensorProto.FLOAT, None)
    graph = onnx.helper.make_graph([node], "g", names, [result])
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", opset)])
    feeds = {"Q": ZEROS.numpy(), "K": ZEROS.numpy(), "V": VALUES.numpy(), "M": HIDDEN.numpy()}
    (output,) = ReferenceEvaluator(model).run(None, feeds)
    np.testing.assert_array_equal(output, np.full((1, 1, 2, 4), expected))


def test_hugging_face_rotates_halves_as_our_default() -> None:
    """rotate_half is our default, with rope_theta as base."""
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    random = np.random.default_rng(1)
    query = random.normal(size=(1, 2, 5, 8))
    angles = np.arange(5)[:, None] * 10000.0 ** (-np.arange(0, 8, 2) / 8)
    table = torch.from_numpy(np.concatenate([angles, angles], axis=-1))[None]
    rotated, _ = apply_rotary_pos_emb(torch.from_numpy(query), torch.from_numpy(query), table.cos(), table.sin())
    ours = attend(input=query, rotary={"base": 10000.0}, include=["query"])
    np.testing.assert_allclose(ours["query"], rotated.numpy(), rtol=1e-13, atol=1e-14)
