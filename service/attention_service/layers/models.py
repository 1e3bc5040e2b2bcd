"""What configurations of each `model_type` say of attention: the options that are known, and what holds without them.

Sources: configuration_*.py and modeling_*.py of Hugging Face transformers 5.23.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple

from attention_service.errors import quote
from attention_service.layers.tensors import BadFile

FULL: Final = "full_attention"
SLIDING: Final = "sliding_attention"
# The type of a layer by its index and the options.
Kind = Callable[[int, Mapping[str, Any]], str]


class Model(NamedTuple):
    """What a configuration with one `model_type` can say of attention.

    options: the options that are known, with the values that transformers has where a configuration lacks them
    kind: the type of a layer without `layer_types`
    bias: the option that says whether the maps of queries, keys and values have biases, or what is always so
    output_bias: the same for the map of outputs
    """

    options: Mapping[str, Any]
    kind: Kind = lambda layer, options: FULL
    bias: str | bool = True
    output_bias: str | bool = True


def check_options(options: Mapping[str, Any], known: Mapping[str, Any]) -> None:
    """Errors: BadFile for an option that is not known, could change attention, and does not have a neutral value."""
    for name, value in options.items():
        neutral = NEUTRAL.get(name, (None, False, "", [], {}))
        if value in neutral or name in known or name in IRRELEVANT or IRRELEVANT_NAMES.fullmatch(name):
            continue
        raise BadFile(f"config.json: the option {quote(name)} is not known here, and has the value {quote(str(value))}")


def whole(options: Mapping[str, Any], key: str, least: int = 1) -> int:
    """A whole number of the options. Errors: BadFile if they lack it, or have something else."""
    value = options.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value < 2**31 or value % 1:
        got = "nothing" if value is None else quote(str(value))
        raise BadFile(f"config.json: expected {key}, a whole number of at least {least}; got {got}")
    return int(value)


def of_layer(options: Mapping[str, Any], key: str, layer: int) -> Any:
    """The value for a layer in a list with one for each; None for no list or an empty one. Errors: BadFile."""
    listed = options.get(key)
    if not listed:
        return None
    if not isinstance(listed, list) or len(listed) <= layer:
        raise BadFile(f"config.json: expected {key} with a value for layer {layer}")
    return listed[layer]


def is_turned(layer: int, options: Mapping[str, Any]) -> bool:
    """True if a layer has a rotary embedding, in models that say so by layer."""
    listed = of_layer(options, "no_rope_layers", layer)  # 1 for a layer that has one
    return bool((layer + 1) % whole(options, "no_rope_layer_interval") if listed is None else listed)


def _where(condition: Callable[[int, Mapping[str, Any]], Any]) -> Kind:
    """Layers slide if a condition holds, all others see everything."""
    return lambda layer, options: SLIDING if condition(layer, options) else FULL


def _all_but_each(count: int | str) -> Kind:
    """All layers slide but each count-th. count: a number, or the option that says it"""
    return _where(lambda i, options: (i + 1) % (count if isinstance(count, int) else whole(options, count)))


def _is_late(layer: int, options: Mapping[str, Any]) -> bool:
    return options["sliding_window"] is not None and layer >= whole(options, "max_window_layers", 0)


WINDOWED: Final = _where(lambda i, options: options["sliding_window"] is not None)
LATE: Final = _where(_is_late)
LATE_IF_USED: Final = _where(lambda i, options: options["use_sliding_window"] and _is_late(i, options))
ALL_IF_USED: Final = _where(lambda i, options: options["use_sliding_window"] and options["sliding_window"] is not None)
EARLY_AND_ODD: Final = _where(
    lambda i, options: options["use_sliding_window"] and not i % 2 and i < whole(options, "max_window_layers", 0)
)
WITHOUT_ROTATION: Final = _where(lambda i, options: ALL_IF_USED(i, options) == SLIDING and not is_turned(i, options))


def _decoder(
    kind: Kind = lambda layer, options: FULL,
    bias: str | bool = "attention_bias",
    output_bias: str | bool | None = None,
    **options: Any,
) -> Model:
    """A model whose layers have the options of Llama, and more. output_bias: None for that of the others"""
    own = {bias: False} if isinstance(bias, str) else {}
    return Model(DECODER | own | options, kind, bias, bias if output_bias is None else output_bias)


HEADS: Final = dict.fromkeys(("num_attention_heads", "num_key_value_heads", "head_dim", "rms_norm_eps"))
ROPE: Final = dict.fromkeys(("rope_theta", "rope_scaling", "rope_parameters", "original_max_position_embeddings"))
DECODER: Final[dict[str, Any]] = HEADS | ROPE
TYPES: Final[dict[str, Any]] = {"layer_types": None, "sliding_window": 4096}
QWEN: Final[dict[str, Any]] = TYPES | {"use_sliding_window": False, "max_window_layers": 28}
QWEN3_NEXT: Final = _decoder(
    lambda i, options: "linear_attention" if (i + 1) % whole(options, "full_attention_interval") else FULL,
    layer_types=None,
    full_attention_interval=4,
    partial_rotary_factor=0.25,
    attn_output_gate=True,
)
# sliding_window_size stands beside sliding_window in published configurations, and is never read.
GEMMA2: Final = _decoder(
    _all_but_each(2), **TYPES, sliding_window_size=None, query_pre_attn_scalar=256, attn_logit_softcapping=50.0
)
# The published configurations of Gemma 3 have only what differs.
GEMMA3: Final = _decoder(
    _all_but_each("sliding_window_pattern"),
    **TYPES,
    num_attention_heads=8,
    num_key_value_heads=4,
    head_dim=256,
    query_pre_attn_scalar=256,
    rms_norm_eps=1e-6,
    sliding_window_pattern=6,
    rope_theta=1e6,
    rope_local_base_freq=1e4,
    max_position_embeddings=131072,
)
GEMMA4_ROPE: Final = {
    SLIDING: {"rope_type": "default", "rope_theta": 1e4},
    FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
}
GRANITE: Final = _decoder(attention_multiplier=None)
GRANITE_SWA: Final = _decoder(
    _where(lambda i, options: i % 4),
    layer_types=None,
    sliding_window=128,
    attention_multiplier=None,
    layer_rope_theta=None,
)
NO_ROPE: Final[dict[str, Any]] = {"no_rope_layers": None, "no_rope_layer_interval": 4}
EXAONE: Final = _decoder(_all_but_each("sliding_window_pattern"), bias=False, **TYPES, sliding_window_pattern=4)
BERT: Final = Model({"num_attention_heads": None, "is_decoder": False, "is_causal": None})

MODELS: Final[dict[str, Model]] = {
    **dict.fromkeys(("bert", "roberta", "xlm-roberta", "camembert", "electra", "ernie", "data2vec-text"), BERT),
    "bert-generation": BERT,
    "layoutlm": Model({"num_attention_heads": None, "is_causal": None}),
    "gpt2": Model({"n_head": None, "num_attention_heads": None, "scale_attn_weights": True}
                  | {"scale_attn_by_inverse_layer_idx": False}),
    "gpt_bigcode": Model(dict.fromkeys(("n_head", "num_attention_heads", "num_key_value_heads"))
                         | {"multi_query": True, "scale_attn_weights": True}),
    "gpt_neox": Model(ROPE | {"num_attention_heads": None, "partial_rotary_factor": None, "attention_bias": True,
                              "rotary_emb_base": 10000.0, "rotary_pct": 0.25}, bias="attention_bias",
                      output_bias="attention_bias"),
    "falcon": Model(ROPE | {"num_attention_heads": None, "num_kv_heads": None, "multi_query": True, "alibi": False,
                            "new_decoder_architecture": False, "bias": False, "rope_theta": 10000.0},
                    bias="bias", output_bias="bias"),
    "vit": Model({"num_attention_heads": None, "qkv_bias": True, "is_causal": None}, bias="qkv_bias"),
    "whisper": Model({"encoder_attention_heads": None, "is_causal": None}),
    "llama": _decoder(rope_theta=10000.0),  # the configurations of the first two Llamas do not say it
    "arcee": _decoder(),
    "aria_text": _decoder(),
    "bitnet": _decoder(rope_theta=500000.0),
    "seed_oss": _decoder(output_bias="attention_out_bias", attention_bias=True, attention_out_bias=False),
    "mistral": _decoder(WINDOWED, bias=False, sliding_window=4096),
    "mixtral": _decoder(WINDOWED, bias=False, sliding_window=None),
    "starcoder2": _decoder(WINDOWED, bias="use_bias", use_bias=True, sliding_window=None),
    "qwen2": _decoder(LATE_IF_USED, bias=True, output_bias=False, **QWEN),
    "qwen2_moe": _decoder(EARLY_AND_ODD, bias="qkv_bias", output_bias=False, qkv_bias=True, **QWEN),
    "ministral": _decoder(WINDOWED, bias=False, **TYPES),
    "qwen3": _decoder(LATE_IF_USED, **QWEN),
    "qwen3_moe": _decoder(ALL_IF_USED, use_sliding_window=False, sliding_window=4096),
    "dots1": _decoder(LATE, **TYPES, max_window_layers=62),
    **dict.fromkeys(("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"), QWEN3_NEXT),
    **dict.fromkeys(("gemma2", "vaultgemma"), GEMMA2),
    **dict.fromkeys(("gemma3", "gemma3_text"), GEMMA3),
    "gemma3n_text": _decoder(_all_but_each(5), layer_types=None, sliding_window=512, num_kv_shared_layers=15,
                             rope_theta=1e6, rope_local_base_freq=1e4),
    "gemma4_text": Model(HEADS | {"layer_types": None, "sliding_window": 512, "num_kv_shared_layers": 0,
                                  "attention_bias": False, "rope_parameters": GEMMA4_ROPE, "rms_norm_eps": 1e-6}
                         | dict.fromkeys(("attention_k_eq_v", "global_head_dim", "num_global_key_value_heads",
                                          "per_layer_config", "use_bidirectional_attention")),
                         _all_but_each(6), "attention_bias", "attention_bias"),
    "llama4_text": _decoder(**NO_ROPE, layer_types=None, attention_chunk_size=8192, use_qk_norm=True,
                            attn_temperature_tuning=True, attn_scale=None, floor_scale=None),
    "gpt_oss": _decoder(_all_but_each(2), attention_bias=True, layer_types=None, sliding_window=128),
    "olmo2": _decoder(),
    "flex_olmo": _decoder(),
    "olmo": _decoder(clip_qkv=None),
    "olmoe": _decoder(clip_qkv=None),
    "olmo3": _decoder(_all_but_each(4), **TYPES, rope_theta=500000.0),
    **dict.fromkeys(("granite", "granitemoe", "granitemoeshared"), GRANITE),
    **dict.fromkeys(("granite_swa", "granitemoe_swa"), GRANITE_SWA),
    **dict.fromkeys(("glm", "glm4"), _decoder(output_bias=False, attention_bias=True, partial_rotary_factor=0.5)),
    **dict.fromkeys(("ernie4_5", "ernie4_5_moe"), _decoder(bias="use_bias")),
    "helium": _decoder(output_bias=False),
    "cohere2": _decoder(_all_but_each("sliding_window_pattern"), **TYPES, sliding_window_pattern=4, layer_switch=None,
                        order_of_interleaved_layers=None, position_embedding_type=None),
    "smollm3": _decoder(WITHOUT_ROTATION, **NO_ROPE, **QWEN | {"sliding_window": None}, pretraining_tp=1),
    "exaone4": EXAONE,
    "exaone_moe": EXAONE,
    "phi3": _decoder(WINDOWED, bias=False, sliding_window=None, partial_rotary_factor=1.0),
}  # fmt: skip

# Values that change nothing, of options that are not known. For all others: null, false, 0, and what is empty.
NEUTRAL: Final[dict[str, tuple[Any, ...]]] = {
    "is_causal": (True,),  # null is read as false
    **dict.fromkeys(("causal", "scale_attn_weights", "use_rope"), (None, True)),
    **dict.fromkeys(
        (
            "compression_ratio",
            "full_attn_mod",
            "interpolate_factor",
            "partial_rotary_factor",
            "pretraining_tp",
            "rotary_pct",
        ),
        (None, 1),
    ),
    "position_embedding_type": (None, "absolute"),
}
# Options that change nothing that an attention module computes: of other parts, training, tokens, and generation.
IRRELEVANT_NAMES: Final = re.compile(
    r"_.*|.*(dropout.*|_pdrop|layerdrop|_token_ids?|_token_index|suppress_tokens)"
    r"|(.*_)?(moe|experts?|router)(_.*)?|(altup|summary|mask_time|mask_feature|mtp|pooler|unsloth)_.*"
)
IRRELEVANT: Final = frozenset({
    # other parts of the model
    "activation", "activation_function", "activation_sparsity_pattern", "add_cross_attention",
    "chunk_size_feed_forward", "classifier_proj_size", "cross_attention_hidden_size", "d_model",
    "decoder_attention_heads", "decoder_ffn_dim", "decoder_layers", "decoder_sparse_step", "embedding_multiplier",
    "embedding_size", "encoder_ffn_dim", "encoder_layers", "encoder_stride", "ffn_hidden_size",
    "final_logit_softcapping", "first_k_dense_replace", "generator_size", "hidden_act", "hidden_activation",
    "hidden_size", "hidden_size_per_layer_input", "image_size", "intermediate_size", "intermediate_size_mlp",
    "is_encoder_decoder", "laurel_rank", "layer_norm_eps", "layer_norm_epsilon", "linear_conv_kernel_dim",
    "linear_key_head_dim", "linear_num_key_heads", "linear_num_value_heads", "linear_value_head_dim", "logit_scale",
    "logits_scaling", "mamba_ssm_dtype", "max_2d_position_embeddings", "max_position_embeddings", "max_sequence_length",
    "max_source_positions", "max_target_positions", "median_filter_width", "mlp_bias", "mlp_layer_types",
    "mlp_only_layers", "mlp_type", "n_ctx", "n_embd", "n_group", "n_inner", "n_layer", "n_positions", "norm_epsilon",
    "norm_topk_prob", "norm_type", "num_channels", "num_hidden_layers", "num_ln_in_parallel_attn", "num_mel_bins",
    "num_nextn_predict_layers", "parallel_attn", "patch_size", "predict_special_tokens", "residual_multiplier",
    "rms_norm_eps", "routed_scaling_factor", "sbert_ce_default_activation_function", "scale_embedding", "scoring_func",
    "sentence_transformers", "shared_intermediate_size", "swiglu_alpha", "swiglu_limit", "task_type_vocab_size",
    "tie_encoder_decoder", "tie_word_embeddings", "topk_group", "topk_method", "type_vocab_size", "use_double_wide_mlp",
    "use_embedding_sharing", "use_gated_activation", "use_parallel_block", "use_parallel_embedding",
    "use_parallel_residual", "use_task_id", "use_weighted_layer_sum", "vocab_size", "vocab_size_per_layer_input",
    # which layers have a window, where use_sliding_window says that any have one
    "max_window_layers",
    # training, files, and how it is computed
    "apply_spec_augment", "architectures", "attention_softmax_in_fp32", "attn_implementation", "author", "auto_map",
    "cache_implementation", "created_date", "custom_pipelines", "directionality", "dtype", "finetuning_task",
    "gradient_checkpointing", "id2label", "init_std", "initial_context_length", "initializer_factor",
    "initializer_range", "is_llama_config", "label2id", "language", "license", "model_max_length", "model_type", "name",
    "name_or_path", "num_labels", "output_attentions", "output_hidden_states", "output_past", "output_router_logits",
    "pad_key_length", "problem_type", "reorder_and_upcast_attn", "return_dict", "scale_attention_softmax_in_fp32",
    "task_specific_params", "tf_legacy_loss", "tokenizer_class", "torch_dtype", "torchscript", "transformers.js_config",
    "transformers_version", "use_bfloat16", "use_cache", "validate_runner_input",
    # generation
    "bad_words_ids", "diversity_penalty", "do_sample", "early_stopping", "encoder_no_repeat_ngram_size",
    "exponential_decay_length_penalty", "forced_decoder_ids", "length_penalty", "max_length", "min_length",
    "no_repeat_ngram_size", "num_beam_groups", "num_beams", "num_return_sequences", "output_scores", "prefix",
    "remove_invalid_values", "repetition_penalty", "return_dict_in_generate", "temperature", "top_k", "top_p",
    "typical_p",
})  # fmt: skip
