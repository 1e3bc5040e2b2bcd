"""A model of one Attention node, with RotaryEmbedding nodes before it, by ONNX Runtime and by onnx's own evaluator."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import onnx
from onnx import TensorProto, helper

from attention_service.attention.arrays import BFLOAT16
from attention_service.conformance.target import Unsupported
from tests.peers.conformance.adapters.request import Request, adapter

OPSETS: Final = (25, 24, 23)
KNOWN: Final = (
    "bias",
    "is_causal",
    "key_lengths",
    "key_mask",
    "mask",
    "past_key",
    "past_value",
    "query_offset",
    "rotary",
    "scale",
    "softcap",
    "window",
)
TYPES: Final = {
    "float64": TensorProto.DOUBLE,
    "float32": TensorProto.FLOAT,
    "float16": TensorProto.FLOAT16,
    "bfloat16": TensorProto.BFLOAT16,
    "bool": TensorProto.BOOL,
    "int64": TensorProto.INT64,
}


@adapter(*KNOWN)
def runtime(request: Request) -> Any:
    """The output of ONNX Runtime on the CPU."""
    import onnxruntime

    onnxruntime.set_default_logger_severity(4)  # what it refuses is raised, too
    if request.query.dtype == BFLOAT16:
        raise Unsupported("no bfloat16 of NumPy")
    for opset in OPSETS if "window" not in request else OPSETS[:1]:
        model, feeds = make_model(request, opset)
        try:
            session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
        except Exception as error:  # its errors have no common class but this
            refusal = str(error)
            continue
        return request.restored(session.run(None, feeds)[0])
    raise Unsupported(f"refused: {refusal}")


@adapter(*KNOWN)
def reference(request: Request) -> Any:
    """The output of onnx.reference.ReferenceEvaluator."""
    from onnx.reference import ReferenceEvaluator

    model, feeds = make_model(request, OPSETS[0])
    return request.restored(ReferenceEvaluator(model).run(None, feeds)[0])


def make_model(request: Request, opset: int) -> tuple[onnx.ModelProto, dict[str, np.ndarray]]:
    """The model for a request, and its inputs."""
    feeds = {"Q": request.query, "K": request.key, "V": request.value}
    given = {"scale": request.scale, "softcap": request.fields.get("softcap")}
    attributes: dict[str, Any] = {name: number for name, number in given.items() if number is not None}
    if "is_causal" in request:
        attributes["is_causal"] = 1
    for side, width in request.fields.get("window", {}).items():
        attributes[f"{side}_window_size"] = width
    if (mask := _mask(request)) is not None:
        feeds["M"] = mask
    if "past_key" in request:
        feeds |= {"PK": request["past_key"], "PV": request["past_value"]}
    if (keys := _real_keys(request)) is not None:
        feeds["N"] = keys
    nodes = []
    operands = {"Q": "Q", "K": "K"}
    if "rotary" in request:
        for name, role in (("Q", "query"), ("K", "key")):
            nodes.append(_rotation(request, feeds, name, role))
            operands[name] = f"{name}R"
    names = [operands.get(name, name) if name in feeds else "" for name in ("Q", "K", "V", "M", "PK", "PV", "N")]
    outputs = ["Y", "present_key", "present_value"] if "PK" in feeds else ["Y"]
    nodes.append(helper.make_node("Attention", names, outputs, **attributes))
    inputs = [helper.make_tensor_value_info(n, TYPES[array.dtype.name], array.shape) for n, array in feeds.items()]
    result = helper.make_tensor_value_info("Y", TYPES[request.query.dtype.name], None)
    graph = helper.make_graph(nodes, "attention", inputs, [result])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=11), feeds


def _mask(request: Request) -> np.ndarray | None:
    """What becomes attn_mask: booleans, or numbers in the type of the query."""
    seen = request.seen()
    if "bias" in request:
        if seen is not None:
            raise Unsupported("one attn_mask only")
        numbers: np.ndarray = request["bias"].astype(request.query.dtype)
        return numbers
    if seen is None:
        return None
    # All axes but the first are full, as the operator has no other broadcasting for rank 4.
    return np.ascontiguousarray(np.broadcast_to(seen, (*request.query.shape[:2], request.lengths[0], seen.shape[-1])))


def _real_keys(request: Request) -> np.ndarray | None:
    """nonpad_kv_seqlen (b,): it sets the position of the first query, too."""
    b, (q, k) = request.query.shape[0], request.lengths
    moves = {"is_causal", "window"} & request.fields.keys()
    offset = request.offset
    if "key_lengths" in request:
        lengths = np.broadcast_to(request["key_lengths"], (b,)).astype(np.int64)
        if moves and not (offset is not None and (offset == lengths - q).all()):
            raise Unsupported("no offset but nonpad_kv_seqlen − q")
        return lengths
    if not moves or offset is None or (offset == 0).all():
        return None
    if "past_key" not in request and (offset == k - q).all():
        return np.full(b, k, np.int64)
    raise Unsupported("no argument for query_offset")


def _rotation(request: Request, feeds: dict[str, np.ndarray], name: str, role: str) -> onnx.NodeProto:
    """The RotaryEmbedding node of query or key; its inputs are added to the feeds."""
    rotary, array = request["rotary"], feeds[name]
    b, _, length, d = array.shape
    dim = rotary.get("dim", d)
    past = request["past_key"].shape[2] if "past_key" in request else 0
    positions = np.broadcast_to(rotary.get(f"{role}_positions", past + np.arange(length)), (b, length))
    if "cos" in rotary:
        tables = rotary["cos"], rotary["sin"]
    else:
        angles = np.arange(positions.max() + 1)[:, None] * rotary["base"] ** (-np.arange(0, dim, 2) / dim)
        tables = np.cos(angles), np.sin(angles)
    feeds |= {f"{name}C": tables[0].astype(array.dtype), f"{name}S": tables[1].astype(array.dtype)}
    feeds[f"{name}P"] = positions.astype(np.int64)
    options = {"interleaved": int(rotary.get("interleaved", False))}
    if dim != d:
        options["rotary_embedding_dim"] = dim
    return helper.make_node("RotaryEmbedding", [name, f"{name}C", f"{name}S", f"{name}P"], [f"{name}R"], **options)
