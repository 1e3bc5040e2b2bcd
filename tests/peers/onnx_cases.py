"""The backend tests of the onnx package as requests of this API."""

from __future__ import annotations

import multiprocessing
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from tests.helpers.wire import typed_array as encode


@dataclass(frozen=True)
class OnnxCase:
    """One test of one operator: named inputs, attributes, named outputs."""

    name: str
    opset: int
    inputs: dict[str, np.ndarray]
    attributes: dict[str, Any]
    outputs: dict[str, np.ndarray]


@cache
def collect(operator: str) -> list[OnnxCase]:
    """All tests of an operator, without those of its expansion into other operators.

    The collector of onnx caches its first result for the whole process, so each operator gets a separate process.
    """
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(_collect, (operator,))


def _collect(operator: str) -> list[OnnxCase]:
    import warnings

    warnings.simplefilter("ignore")
    from onnx.backend.test.case.node import collect_testcases
    from onnx.helper import get_attribute_value

    cases = collect_testcases(operator)
    assert len(cases) == {"Attention": 186, "RotaryEmbedding": 8 * 2}[operator], f"{len(cases)} tests of {operator}"
    found = []
    for case in cases:
        if case.name.endswith("_expanded"):
            continue
        (node,), ((inputs, outputs),) = case.model.graph.node, case.data_sets
        named = [name for name in node.input if name]
        results = [name for name in node.output if name]
        found.append(
            OnnxCase(
                name=case.name,
                opset=case.model.opset_import[0].version,
                inputs=dict(zip(named, (np.asarray(x) for x in inputs), strict=True)),
                attributes={a.name: get_attribute_value(a) for a in node.attribute},
                outputs=dict(zip(results, (np.asarray(x) for x in outputs), strict=True)),
            )
        )
    return found


# The modes of qk_matmul_output, as names of our outputs.
STAGES = ("scaled_scores", "capped_scores", "masked_scores", "attention_weights")


def attention_request(case: OnnxCase) -> tuple[dict[str, Any], dict[str, str]]:
    """The request for a test of Attention, and our field for each of its outputs."""
    given, options = case.inputs, case.attributes
    stage = STAGES[options.get("qk_matmul_output_mode", 0)]
    fields = {"Y": "output", "present_key": "present_key", "present_value": "present_value", "qk_matmul_output": stage}
    renamed = {"Q": "query", "K": "key", "V": "value", "past_key": "past_key", "past_value": "past_value"}
    request: dict[str, Any] = {ours: encode(given[theirs]) for theirs, ours in renamed.items() if theirs in given}
    queries = given["Q"].shape[-2]
    keys = given["K"].shape[-2] + (given["past_key"].shape[2] if "past_key" in given else 0)
    if given["Q"].ndim == 3:
        request |= {"num_heads": options["q_num_heads"], "num_kv_heads": options["kv_num_heads"]}
    request |= {name: options[name] for name in ("scale", "softcap") if options.get(name)}
    if options.get("is_causal"):
        request["is_causal"] = True
    sides = {side: options.get(f"{side}_window_size", -1) for side in ("left", "right")}
    if max(sides.values()) >= 0:
        request["window"] = {side: width for side, width in sides.items() if width >= 0}
    if "attn_mask" in given:
        request |= _mask(given["attn_mask"], keys)
    if "nonpad_kv_seqlen" in given:
        request["key_lengths"] = encode(given["nonpad_kv_seqlen"])
        request["query_offset"] = encode(given["nonpad_kv_seqlen"] - queries)
    elif "past_key" not in given:
        request["query_offset"] = 0
    request["include"] = [fields[name] for name in case.outputs if name != "Y"]
    return request, {theirs: ours for theirs, ours in fields.items() if theirs in case.outputs}


def _mask(mask: np.ndarray, keys: int) -> dict[str, Any]:
    """The field mask or bias for an ONNX mask. A mask that is too short is padded and hides the remaining keys."""
    hidden = False if mask.dtype == bool else -np.inf
    widths = [(0, 0)] * (mask.ndim - 1) + [(0, keys - mask.shape[-1])]
    return {"mask" if mask.dtype == bool else "bias": encode(np.pad(mask, widths, constant_values=hidden))}


def rotary_request(case: OnnxCase) -> dict[str, Any]:
    """The request for a test of RotaryEmbedding: attention whose query, as rotated, is returned."""
    options = case.attributes
    rotary: dict[str, Any] = {"cos": encode(case.inputs["cos_cache"]), "sin": encode(case.inputs["sin_cache"])}
    if "position_ids" in case.inputs:
        positions = encode(case.inputs["position_ids"])
        rotary |= {"query_positions": positions, "key_positions": positions}
    if options.get("rotary_embedding_dim"):
        rotary["dim"] = options["rotary_embedding_dim"]
    rotary["interleaved"] = bool(options.get("interleaved", 0))
    request = {"input": encode(case.inputs[next(iter(case.inputs))]), "rotary": rotary, "include": ["query"]}
    if case.inputs[next(iter(case.inputs))].ndim == 3:
        request["num_heads"] = options["num_heads"]
    return request
