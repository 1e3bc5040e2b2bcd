"""Names that other libraries give to what this API has under another one, and how the two differ."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches
from typing import Final

_EXACT = "attention here is exact and has no dropout; leave it out"
_MASK = "send booleans as mask (true = takes part), or numbers to be added as bias"
_INCLUDE = "list attention_weights in include; they are returned by default, include: [] leaves them out"
_READ = "it is read from the shapes; leave it out"
_GROUPED = "heads are grouped when num_kv_heads is less than num_heads; leave it out"

# Sources: torch.nn.functional.scaled_dot_product_attention, torch.nn.MultiheadAttention, the ONNX operator Attention,
# keras.layers.MultiHeadAttention, jax.nn.dot_product_attention, flash_attn_func, Hugging Face configurations.
FOREIGN: Final[dict[str, str]] = {
    "attn_mask": _MASK,
    "attention_mask": _MASK,
    "key_padding_mask": "use key_mask, inverted: there true = keep",
    "nonpad_kv_seqlen": "use key_lengths",
    "kv_seqlen": "use key_lengths",
    "key_value_seq_lengths": "use key_lengths",
    "query_seq_lengths": "use query_lengths",
    "local_window_size": "use window with left and right; leave an unbounded side out",
    "window_size": "use window with left and right; leave an unbounded side out",
    "sliding_window": "use window: a sliding window of n is left: n - 1 with is_causal",
    "logit_cap": "use softcap",
    "attn_logit_softcapping": "use softcap",
    "s_aux": "use sinks",
    "rope_theta": "use rotary with base",
    "position_ids": "use rotary with query_positions and key_positions",
    "past_key_values": "use past_key and past_value",
    "average_attn_weights": "use average_heads",
    "dropout": _EXACT,
    "dropout_p": _EXACT,
    "dropout_rate": _EXACT,
    "attention_dropout": _EXACT,
    "enable_gqa": _GROUPED,
    "need_weights": _INCLUDE,
    "return_weights": _INCLUDE,
    "return_attention_scores": _INCLUDE,
    "return_attn_probs": _INCLUDE,
    "output_attentions": _INCLUDE,
    "qk_matmul_output_mode": "in include, 0 is scaled_scores, 1 capped_scores, 2 masked_scores, 3 attention_weights",
    "causal": "use is_causal",
    "use_causal_mask": "use is_causal",
    "embed_dim": _READ,
    "kdim": _READ,
    "vdim": _READ,
    "head_dim": _READ,
    "key_dim": _READ,
    "d_model": _READ,
    "q_num_heads": "use num_heads",
    "n_heads": "use num_heads",
    "n_head": "use num_heads",
    "num_attention_heads": "use num_heads",
    "kv_num_heads": "use num_kv_heads",
    "num_key_value_heads": "use num_kv_heads",
    "softmax_scale": "use scale",
    "sm_scale": "use scale",
    "q": "use query",
    "k": "use key",
    "v": "use value",
    "queries": "use query",
    "keys": "use key",
    "values": "use value",
    "x": "use input",
    "inputs": "use input",
    "hidden_states": "use input",
    "encoder_hidden_states": "use context",
    "w_q": "use projection.query with weight (out, in) or kernel (in, out)",
    "w_k": "use projection.key with weight (out, in) or kernel (in, out)",
    "w_v": "use projection.value with weight (out, in) or kernel (in, out)",
    "w_o": "use projection.output with weight (out, in) or kernel (in, out)",
    "in_proj_weight": "split it into projection.query, .key and .value, each with a weight (out, in)",
    "out_proj": "use projection.output with weight (out, in) or kernel (in, out)",
}


def advice(unknown: str, known: Iterable[str]) -> str:
    """What to write instead of an unknown name; empty where nothing is close."""
    known = list(known)
    key = unknown.lower()[:64]
    if key in known:
        return f"did you mean {key}?"
    if key in FOREIGN:
        return FOREIGN[key]
    close = get_close_matches(key, known, n=1)
    return f"did you mean {close[0]}?" if close else ""
