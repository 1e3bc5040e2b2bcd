"""Names that other libraries give to what this API has under another one, and how the two differ."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches
from typing import Final

# What to do, and the names for which. Sources: scaled_dot_product_attention and MultiheadAttention of torch, the ONNX
# operator Attention, keras.layers.MultiHeadAttention, jax.nn.dot_product_attention, flash_attn_func, Hugging Face
# configurations.
ADVICE: Final = {
    "send booleans as mask (true = takes part), or numbers to be added as bias": "attn_mask attention_mask",
    "use key_mask, inverted: there true = keep": "key_padding_mask",
    "use key_lengths": "nonpad_kv_seqlen kv_seqlen key_value_seq_lengths",
    "use query_lengths": "query_seq_lengths",
    "use window with left and right; leave an unbounded side out": "local_window_size window_size",
    "use window: a sliding window of n is left: n - 1 with is_causal": "sliding_window",
    "use softcap": "logit_cap attn_logit_softcapping",
    "use sinks": "s_aux",
    "use rotary with base": "rope_theta",
    "use rotary with query_positions and key_positions": "position_ids",
    "use past_key and past_value": "past_key_values",
    "use average_heads": "average_attn_weights",
    "attention here is exact and has no dropout; leave it out": "dropout dropout_p dropout_rate attention_dropout",
    "heads are grouped when num_kv_heads is less than num_heads; leave it out": "enable_gqa",
    "list attention_weights in include; they are returned by default, include: [] leaves them out": (
        "need_weights return_weights return_attention_scores return_attn_probs output_attentions"
    ),
    "in include, 0 is scaled_scores, 1 capped_scores, 2 masked_scores, 3 attention_weights": "qk_matmul_output_mode",
    "use is_causal": "causal use_causal_mask",
    "it is read from the shapes; leave it out": "embed_dim kdim vdim head_dim key_dim d_model",
    "use num_heads": "q_num_heads n_heads n_head num_attention_heads",
    "use num_kv_heads": "kv_num_heads num_key_value_heads",
    "use scale": "softmax_scale sm_scale",
    "use query": "q queries",
    "use key": "k keys",
    "use value": "v values",
    "use input": "x inputs hidden_states",
    "use context": "encoder_hidden_states",
    "use projection.query with weight (out, in) or kernel (in, out)": "w_q",
    "use projection.key with weight (out, in) or kernel (in, out)": "w_k",
    "use projection.value with weight (out, in) or kernel (in, out)": "w_v",
    "use projection.output with weight (out, in) or kernel (in, out)": "w_o out_proj",
    "split it into projection.query, .key and .value, each with a weight (out, in)": "in_proj_weight",
}
FOREIGN: Final = {name: advice for advice, names in ADVICE.items() for name in names.split()}


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
