"""Names that other libraries give to what this API has under another one, and how the two differ."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches
from typing import Final, get_args

from attention_service.attention.spec import Included

# What to do, and the names for which. Sources: scaled_dot_product_attention and MultiheadAttention of torch, the ONNX
# operator Attention, keras.layers.MultiHeadAttention, jax.nn.dot_product_attention, flash_attn_func, Hugging Face
# configurations; and names that are obvious, but not close to ours.
ADVICE: Final = {
    "send booleans as mask (true = takes part), or numbers to be added as bias": "attn_mask attention_mask",
    "use key_mask, inverted: there true = keep": "key_padding_mask",
    "use key_mask": "value_mask",
    "use query_lengths, or mask": "query_mask",
    "use key_lengths": "nonpad_kv_seqlen kv_seqlen key_value_seq_lengths",
    "use key_lengths, and query_lengths": "lengths seq_lengths seq_lens seqlens",
    "use segment_ids with query and key": "cu_seqlens cu_seqlens_q cu_seqlens_k document_ids",
    "use query_lengths": "query_seq_lengths",
    "use window with left and right; leave an unbounded side out": "local_window_size window_size left right",
    "use window: a sliding window of n is left: n - 1 with is_causal": "sliding_window",
    "use chunk_size": "attention_chunk_size",
    "use selected_keys": "topk_indices top_k_indices sparse_indices",
    "use softcap": "logit_cap logits_soft_cap attn_logit_softcapping",
    "use sinks": "s_aux attention_sinks",
    "use alibi_slopes": "alibi",
    "use rotary with base": "rope_theta rotary_base",
    "use rotary with base, or with cos and sin": "rope rotary_emb rope_parameters position_embeddings",
    "use rotary with query_positions and key_positions": "position_ids",
    "use past_key and past_value": "past past_key_value past_key_values cache kv_cache",
    "use query_norm": "q_norm",
    "use key_norm": "k_norm",
    "use value_norm": "v_norm",
    "use grad_output": "dout do d_out grad_out output_grad cotangent",
    "use grad_logsumexp": "dlse grad_lse",
    "weights have no cotangent here; use grad_output": "grad_attention_weights grad_weights",
    "use gate, activated already, or projection.gate": "gates gate_proj g_proj attn_gate output_gate",
    "use average_heads": "average_attn_weights",
    "nothing is sampled here; leave it out": "top_p seed",
    "attention here is exact and has no dropout; leave it out": "dropout dropout_p dropout_rate attention_dropout",
    "heads are grouped when num_kv_heads is less than num_heads; leave it out": "enable_gqa",
    "list attention_weights in include; they are returned by default, include: [] leaves them out": (
        "need_weights return_weights return_attention_scores return_attn_probs output_attentions weights"
    ),
    "in include, 0 is scaled_scores, 1 capped_scores, 2 masked_scores, 3 attention_weights": "qk_matmul_output_mode",
    "output is always returned; leave it out": "output",
    "use is_causal": "causal causal_mask use_causal_mask",
    "it is read from the shapes; leave it out": (
        "embed_dim kdim vdim head_dim key_dim d_model batch_size seq_len seq_length sequence_length"
    ),
    "use num_heads": "q_num_heads n_heads n_head head heads num_attention_heads",
    "use num_kv_heads": "kv_num_heads n_kv_heads kv_heads num_key_value_heads num_query_groups",
    "use scale": "softmax_scale sm_scale scaling scale_factor",
    "use scale: its default is 1/sqrt(head_dim); divide it by the temperature": "temperature",
    "use dtype": "precision data_type torch_dtype",
    "use query_tokens, and key_tokens": "tokens labels",
    "use query": "q queries",
    "use key": "k keys",
    "use value": "v values",
    "use input": "x inputs hidden_states",
    "use context": "encoder_hidden_states",
    "use projection.query with weight (out, in) or kernel (in, out)": "w_q wq q_proj query_weight",
    "use projection.key with weight (out, in) or kernel (in, out)": "w_k wk k_proj key_weight",
    "use projection.value with weight (out, in) or kernel (in, out)": "w_v wv v_proj value_weight",
    "use projection.output with weight (out, in) or kernel (in, out)": "w_o wo o_proj out_proj",
    "split it into projection.query, .key and .value, each with a weight (out, in)": "in_proj_weight qkv qkv_proj",
}
FOREIGN: Final = {name: f"list {name} in include" for name in get_args(Included)} | {
    name: advice for advice, names in ADVICE.items() for name in names.split()
}
# Names of which so much is the same are a slip of the pen. Less alike are precision and projection, cache and scale.
SAME: Final = 0.92
ALIKE: Final = 0.79
# Letters of a name that means something within another one.
SHORTEST: Final = 3


def near(unknown: str, choices: Iterable[str]) -> str:
    """Which of the values that a field may have is meant by another one, as a hint; empty where none is close."""
    close = nearest(unknown, choices)
    return f"did you mean {close}?" if close else ""


def nearest(unknown: str, choices: Iterable[str]) -> str:
    """The value that a field may have which is close to another one; empty where none is.

    A value is close that is spelt alike, or that holds a whole name: weights, attention_weights.
    """
    choices = list(choices)
    key = unknown[:64].lower()
    close = get_close_matches(key, choices, n=1, cutoff=ALIKE)
    if not close and len(key) >= SHORTEST:
        close = [choice for choice in choices if key in choice or (len(choice) >= SHORTEST and choice in key)]
    return close[0] if close else ""


def advice(unknown: str, known: Iterable[str]) -> str:
    """What to write instead of an unknown name; empty where nothing is close."""
    known = list(known)
    key = unknown[:64].lower()
    if key in known:
        return f"did you mean {key}?"
    for cutoff in (SAME, ALIKE):
        close = get_close_matches(key, known, n=1, cutoff=cutoff)
        if close:
            return f"did you mean {close[0]}?"
        if key in FOREIGN:
            return FOREIGN[key]
    return ""
