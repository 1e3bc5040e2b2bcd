"""Checkpoints made by hand, of decoders with four heads of four features."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.numpy

HIDDEN, HEADS, GROUPS, DIM = 8, 4, 2, 4
Q, K = HEADS * DIM, GROUPS * DIM
DECODER: dict[str, Any] = {"num_attention_heads": HEADS, "num_key_value_heads": GROUPS, "rms_norm_eps": 1e-5,
                           "rope_theta": 100.0, "max_position_embeddings": 32, "hidden_size": 16}  # fmt: skip
CAUSAL = {"num_heads": HEADS, "num_kv_heads": GROUPS, "is_causal": True, "rotary": {"base": 100.0}}
EPS = {"query_norm": {"eps": 1e-5}, "key_norm": {"eps": 1e-5}}
SEPARATE: dict[str, tuple[int, ...]] = {
    "q_proj": (Q, HIDDEN),
    "k_proj": (K, HIDDEN),
    "v_proj": (K, HIDDEN),
    "o_proj": (HIDDEN, Q),
}


def tensors(shapes: dict[str, tuple[int, ...]], place: str, seed: int = 0) -> dict[str, np.ndarray]:
    """Random tensors of these shapes; a name is that of a map or norm, unless it is that of a bias or of sinks."""
    random = np.random.default_rng(seed)
    whole = {name if name.endswith((".bias", "sinks")) else f"{name}.weight": shape for name, shape in shapes.items()}
    return {f"{place}{name}": random.normal(size=shape).astype(np.float32) for name, shape in whole.items()}


def checkpoint(folder: Path, configuration: dict[str, Any] | None, arrays: dict[str, np.ndarray]) -> Path:
    folder.mkdir(exist_ok=True)
    safetensors.numpy.save_file(arrays | {"other.weight": np.zeros(3, np.float32)}, folder / "model.safetensors")
    if configuration is not None:
        (folder / "config.json").write_text(json.dumps(configuration))
    return folder


LLAMA = tensors(SEPARATE, "model.layers.1.self_attn.")
LLAMA_CONFIG = DECODER | {"model_type": "llama"}
