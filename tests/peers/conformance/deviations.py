"""Where other libraries compute something else than the definition here, each with a program that shows it.

Most have another definition: their documentation says something else, or promises nothing. `breaks` is for a library
that does not do what its own documentation says; a quotation of it shows so. A program is a block of
docs/conformance.md. Each of its expressions has its value behind it as a comment, and a test runs all of them. What a
library does is a fact of its versions, which the page names.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True)
class Deviation:
    """What libraries do otherwise.

    cells: (adapter, corner) of the matrix
    code: None where there is nothing to show
    quote, source: a sentence of their documentation, and what it documents; None where they promise nothing
    breaks: whether they do not do what that sentence says
    """

    title: str
    text: str
    cells: tuple[tuple[str, str], ...]
    code: str | None
    quote: str | None = None
    source: str | None = None
    breaks: bool = False

    @property
    def anchor(self) -> str:
        """The anchor of its heading."""
        return self.title.lower().replace(" ", "-")


ALL: Final = (
    "torch-sdpa",
    "flex-attention",
    "torch-mha",
    "jax",
    "keras",
    "onnxruntime",
    "onnx",
    "transformers",
)
DEVIATIONS: Final = (
    Deviation(
        "torch and a scale of 0 or less",
        "With `is_causal` and a scale of 0 or less, `scaled_dot_product_attention` on the CPU returns NaN for every "
        "row that has a hidden key: its kernel hides by −∞ before it multiplies by the scale. The formula adds −∞ "
        "after that, and so does the kernel with a mask.",
        (("torch-sdpa", "scale.zero_causal"), ("torch-sdpa", "scale.negative_causal")),
        """\
import torch

query, value = torch.ones(1, 1, 3, 4), torch.arange(12.0).reshape(1, 1, 3, 4)
attention = torch.nn.functional.scaled_dot_product_attention
output = attention(query, query, value, is_causal=True, scale=0.0)
output[0, 0].isnan().any(dim=-1).tolist()  # [True, True, False]
seen = torch.ones(3, 3, dtype=torch.bool).tril()
attention(query, query, value, attn_mask=seen, scale=0.0)[0, 0, 0].tolist()  # [0.0, 1.0, 2.0, 3.0]
""",
        "attn_weight = query @ key.transpose(-2, -1) * scale_factor",
        "torch.nn.functional.scaled_dot_product_attention",
        breaks=True,
    ),
    Deviation(
        "MultiheadAttention and rows without a key",
        "`nn.MultiheadAttention` returns NaN for a row that sees no key. With `need_weights=False` and gradients it "
        "takes another path, and returns 0; in eval mode without gradients a third one may return NaN.",
        (("torch-mha", "mask.empty_row"), ("torch-mha", "bias.empty_row"), ("torch-mha", "causal.padding")),
        """\
import torch

layer = torch.nn.MultiheadAttention(4, 1, bias=False, batch_first=True)
tokens, hidden = torch.ones(1, 3, 4), torch.ones(3, 3, dtype=torch.bool)
layer(tokens, tokens, tokens, attn_mask=hidden)[0].isnan().all().item()  # True
layer(tokens, tokens, tokens, attn_mask=hidden, need_weights=False)[0].any().item()  # False
""",
    ),
    Deviation(
        "JAX and rows without a key",
        "`dot_product_attention` hides by a large negative number, so that a row that sees no key has the mean of all "
        "values, and a large negative logsumexp. With a bias of −∞ such a row is NaN, as the softmax of −∞ alone is.",
        (
            ("jax", "mask.empty_row"),
            ("jax", "key_lengths.zero"),
            ("jax", "bias.empty_row"),
            ("jax", "logsumexp.empty_row"),
            ("jax", "causal.padding"),
        ),
        """\
import jax
import numpy as np

zeros, values = np.zeros((1, 2, 1, 4), np.float32), np.arange(8, dtype=np.float32).reshape(1, 2, 1, 4)
hidden = np.zeros((1, 1, 2, 2), np.bool_)
output, residual = jax.nn.dot_product_attention(zeros, zeros, values, mask=hidden, return_residual=True)
output[0, 0, 0].tolist()  # [2.0, 3.0, 4.0, 5.0]
bool(np.isfinite(residual).all())  # True
bias = np.full((1, 1, 2, 2), -np.inf, np.float32)
bool(np.isnan(jax.nn.dot_product_attention(zeros, zeros, values, bias=bias)).all())  # True
""",
    ),
    Deviation(
        "JAX and double precision",
        "`dot_product_attention` computes the softmax in float32, whatever the type is.",
        (("jax", "float64"),),
        """\
import jax
import numpy as np

jax.config.update("jax_enable_x64", True)
query, key = np.ones((1, 1, 1, 1)), np.array([0.0, 1.0]).reshape(1, 2, 1, 1)
output = jax.nn.dot_product_attention(query, key, key)
output.dtype.name  # 'float64'
1e-10 < abs(output.item() - np.e / (1 + np.e)) < 1e-7  # True
""",
    ),
    Deviation(
        "Keras and rows without a key",
        "`MultiHeadAttention` returns the mean of all values for a row that sees no key, but 0 if "
        "`return_attention_scores` is set. Seen with torch and TensorFlow as its backends, also where only a causal "
        "mask and padding together hide all keys.",
        (("keras", "mask.empty_row"), ("keras", "causal.padding")),
        """\
import os

os.environ["KERAS_BACKEND"] = "torch"
import keras

layer = keras.layers.MultiHeadAttention(1, 2)
tokens, hidden = keras.ops.ones((1, 3, 4)), keras.ops.zeros((1, 3, 3), "bool")
bool(keras.ops.any(layer(tokens, tokens, attention_mask=hidden)))  # True
bool(keras.ops.any(layer(tokens, tokens, attention_mask=hidden, return_attention_scores=True)[0]))  # False
""",
    ),
    Deviation(
        "Keras and double precision",
        "`MultiHeadAttention` and `keras.ops.dot_product_attention` compute float64 in float32, unless TensorFlow is "
        "the backend. With `return_attention_scores` the layer computes in float64. A layer has a `dtype` for its "
        "computations; whether it counts for every step of them is not said.",
        (("keras", "float64"),),
        """\
import os

os.environ["KERAS_BACKEND"] = "torch"
import keras

tokens = keras.ops.ones((1, 2, 1, 4), "float64")
keras.backend.standardize_dtype(keras.ops.dot_product_attention(tokens, tokens, tokens).dtype)  # 'float32'
""",
    ),
    Deviation(
        "ONNX Runtime and one query with a past",
        "A causal query sees the past and its own key. If it is alone, and comes with several new keys, the kernel "
        "shows it all of them. Below, values are 0, 2 and 4, and 1 is right.",
        (("onnxruntime", "past.one_query"),),
        """\
import numpy as np
import onnxruntime
from onnx import TensorProto, helper

names = ["Q", "K", "V", "PK", "PV"], ["Y", "NK", "NV"]
tensors = [[helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in side] for side in names]
node = helper.make_node("Attention", [*names[0][:3], "", *names[0][3:]], names[1], is_causal=1)
graph = helper.make_graph([node], "attention", *tensors)
model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 24)], ir_version=11)
zeros, values = np.zeros((1, 1, 2, 8), np.float32), np.arange(2, dtype=np.float32).reshape(1, 1, 2, 1) + 1
feeds = {"Q": zeros[:, :, :1], "K": zeros, "V": 2 * values, "PK": zeros[:, :, :1], "PV": 0 * values[:, :, :1]}
output = onnxruntime.InferenceSession(model.SerializeToString()).run(None, feeds)[0]
output.ravel().tolist()  # [2.0]
""",
        "`offset = past_sequence_length` when `past_key` is provided",
        "the operator Attention of ONNX",
        True,
    ),
    Deviation(
        "ONNX Runtime and double precision",
        "ONNX Runtime has no kernel for float64, and computes the operator in small steps. The scale is then a float32 "
        "number, as the attribute is, also where it is 1/√d. In these steps a row that sees no key is NaN, and "
        "`nonpad_kv_seqlen` does not move the causal mask: so it was in ONNX itself until an erratum in onnx 1.23. Its "
        "kernel for float32 has neither, and refuses scales of 0 and less, and windows.",
        (("onnxruntime", "float64"),),
        """\
import numpy as np
import onnxruntime
from onnx import TensorProto, helper


def run(kind, seen):
    tensors = [helper.make_tensor_value_info(name, kind, None) for name in "QKVY"]
    mask = helper.make_tensor_value_info("M", TensorProto.BOOL, None)
    node = helper.make_node("Attention", ["Q", "K", "V", "M"], ["Y"])
    graph = helper.make_graph([node], "attention", [*tensors[:3], mask], tensors[3:])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 24)], ir_version=11)
    feeds = {"Q": np.ones((1, 1, 1, 8)), "K": np.arange(16.0).reshape(1, 1, 2, 8), "V": np.eye(2).reshape(1, 1, 2, 2)}
    feeds = {name: array.astype(helper.tensor_dtype_to_np_dtype(kind)) for name, array in feeds.items()}
    session = onnxruntime.InferenceSession(model.SerializeToString())
    return session.run(None, feeds | {"M": np.full((1, 2), seen)})[0].ravel()


1e-7 < abs(np.log(run(TensorProto.DOUBLE, True)[0]) + 64 / np.sqrt(8)) < 1e-5  # True
run(TensorProto.DOUBLE, False).tolist() == run(TensorProto.FLOAT, False).tolist() == [0, 0]  # False
run(TensorProto.FLOAT, False).tolist()  # [0.0, 0.0]
""",
    ),
    Deviation(
        "The ONNX reference and negative scales",
        "The operator multiplies query and key by the square root of the scale each, which is NaN for a negative one. "
        "The text is ambiguous: as a factor of q kᵀ a scale may be negative, but not under the root, which is there "
        '"to prevent numerical overflow".',
        (("onnx", "scale.negative"), ("onnx", "scale.negative_causal")),
        """\
import numpy as np
from onnx import TensorProto, helper
from onnx.reference import ReferenceEvaluator

tensors = [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in "QKVY"]
node = helper.make_node("Attention", ["Q", "K", "V"], ["Y"], scale=-1.0)
graph = helper.make_graph([node], "attention", tensors[:3], tensors[3:])
model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 24)])
ones = np.ones((1, 1, 2, 4), np.float32)
bool(np.isnan(ReferenceEvaluator(model).run(None, {"Q": ones, "K": ones, "V": ones})[0]).all())  # True
""",
        "Scaling factor applied to $Q*K^T$. … scale `Q`, `K` by `sqrt(scale)` before matmul",
        "the operator Attention of ONNX",
    ),
    Deviation(
        "Hugging Face and rows without a key",
        "Masks of eager attention hold the least number of the type. A row that sees no key has the mean of all "
        "values; with a bias of −∞ it is NaN. [Padding](coming-from.md#padding) has such rows.",
        (("transformers", "mask.empty_row"), ("transformers", "bias.empty_row")),
        """\
import torch
from transformers.models.llama.modeling_llama import eager_attention_forward

module, zeros = torch.nn.Module(), torch.zeros(1, 1, 2, 4)
module.num_key_value_groups, module.training = 1, False
values = torch.arange(8.0).reshape(1, 1, 2, 4)


def output(hidden):
    mask = torch.full((1, 1, 2, 2), hidden)
    return eager_attention_forward(module, zeros, zeros, values, mask, scaling=1.0)[0]


output(torch.finfo(torch.float32).min)[0, 0, 0].tolist()  # [2.0, 3.0, 4.0, 5.0]
output(-torch.inf).isnan().all().item()  # True
""",
    ),
    Deviation(
        "Hugging Face and weights without sinks",
        "Eager attention of Granite SWA returns the weights of the softmax over the keys alone. Those of a row that "
        "sees no key are equal, although its output is 0.",
        (("transformers", "sinks.without_empty_row"),),
        """\
import torch
from transformers.models.granite_swa.modeling_granite_swa import eager_attention_forward

module, query = torch.nn.Module(), torch.zeros(1, 1, 1, 4)
module.num_key_value_groups, module.training, module.sinks = 1, False, torch.zeros(1)
keys, hidden = torch.ones(1, 1, 2, 4), torch.full((1, 1, 1, 2), torch.finfo(torch.float32).min)
output, weights = eager_attention_forward(module, query, keys, keys, hidden, scaling=1.0)
output.flatten().tolist(), weights.flatten().tolist()  # ([0.0, 0.0, 0.0, 0.0], [0.5, 0.5])
""",
    ),
    Deviation(
        "Hugging Face and double precision",
        "Eager attention computes the softmax in float32, whatever the type is.",
        (("transformers", "float64"),),
        """\
import torch
from transformers.models.llama.modeling_llama import eager_attention_forward

module = torch.nn.Module()
module.num_key_value_groups, module.training = 1, False
query, key = torch.ones(1, 1, 1, 1, dtype=torch.float64), torch.tensor([0.0, 1.0], dtype=torch.float64)
keys = key.reshape(1, 1, 2, 1)
output, _ = eager_attention_forward(module, query, keys, keys, None, scaling=1.0)
1e-10 < abs(output.item() - torch.sigmoid(key[1]).item()) < 1e-7  # True
""",
    ),
    Deviation(
        "Hugging Face and large scores in float16",
        "Eager attention rounds q kᵀ to float16 before it multiplies by the scale, so that products beyond 65504 "
        "become infinite.",
        (("transformers", "float16.large"),),
        """\
import torch
from transformers.models.llama.modeling_llama import eager_attention_forward

module = torch.nn.Module()
module.num_key_value_groups, module.training = 1, False
query, value = torch.full((1, 1, 2, 8), 200.0, dtype=torch.float16), torch.ones(1, 1, 2, 8, dtype=torch.float16)
output, _ = eager_attention_forward(module, query, query, value, None, scaling=1e-5)
output.isnan().all().item()  # True
""",
    ),
    Deviation(
        "NaN and infinity in hidden keys and values",
        "All libraries here multiply weights of 0 by hidden values, and 0 · ∞ is NaN: what is hidden must be finite. "
        "The formula that torch documents says so; for the others this is measured. In this service what is hidden has "
        "no effect, as in ggml's fused operation, which is not on this page.",
        tuple((name, "hidden_nan") for name in ALL),
        """\
import numpy as np
import torch

from attention_service import attend

query, value = torch.zeros(1, 1, 1, 4), torch.tensor([[1.0], [torch.nan]]).reshape(1, 1, 2, 1)
key, seen = torch.zeros(1, 1, 2, 4), torch.tensor([[True, False]])
attention = torch.nn.functional.scaled_dot_product_attention
attention(query, key, value, attn_mask=seen).item() == 1  # False
attend(*(array.numpy() for array in (query, key, value)), key_mask=seen[0].numpy()).output.item()  # 1.0
""",
        "return attn_weight @ value",
        "torch.nn.functional.scaled_dot_product_attention",
    ),
    Deviation(
        "Rounding of scores to bfloat16",
        "onnx's evaluator computes each step in the type of the query, and so rounds scores, too. Kernels keep them in "
        "float32.",
        (("onnx", "bfloat16"),),
        None,
        "If softmax precision is not provided, the same precision as the input of softmax (Q and K) is used.",
        "the operator Attention of ONNX",
    ),
)
BY_CELL: Final = {cell: deviation for deviation in DEVIATIONS for cell in deviation.cells}
