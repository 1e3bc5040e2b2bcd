"""Tiny models of the architectures of transformers, with random weights."""

from __future__ import annotations

import inspect
from typing import Any

import torch
import transformers
from transformers import CONFIG_MAPPING
from transformers.models.auto import modeling_auto

# The size of what a configuration has, by the names that configurations use.
SIZES: dict[str, Any] = {
    # features
    **dict.fromkeys(
        ("hidden_size", "hidden_dim", "n_embd", "d_model", "dim", "embedding_size", "embed_dim", "word_embed_proj_dim"),
        32,
    ),
    **dict.fromkeys(
        ("intermediate_size", "ffn_dim", "ffn_hidden_size", "d_ff", "n_inner", "encoder_ffn_dim", "decoder_ffn_dim"), 48
    ),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "shared_intermediate_size"), 16),
    "intermediate_size_mlp": 32,
    "hidden_size_per_layer_input": 8,
    # layers
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers", "decoder_layers"), 2),
    "num_decoder_layers": 2,
    # heads
    **dict.fromkeys(
        ("num_attention_heads", "n_head", "n_heads", "num_heads", "encoder_attention_heads", "decoder_attention_heads"),
        4,
    ),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads", "swa_num_key_value_heads"), 2),
    "swa_num_attention_heads": 4,
    **dict.fromkeys(("head_dim", "d_kv", "kv_channels", "attention_head_dim", "swa_head_dim", "swa_v_head_dim"), 8),
    **dict.fromkeys(("qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim", "index_head_dim"), 8),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank", "o_lora_rank"), 16),
    "o_groups": 2,
    "index_n_heads": 2,
    "index_topk": 4,
    # tokens: ten of them do not fit into a window
    "vocab_size": 64,
    "vocab_size_per_layer_input": 64,
    "type_vocab_size": 2,
    **dict.fromkeys(
        (
            "max_position_embeddings",
            "n_positions",
            "n_ctx",
            "max_seq_len",
            "max_source_positions",
            "max_target_positions",
        ),
        64,
    ),
    **dict.fromkeys(("sliding_window", "attention_chunk_size", "block_size"), 4),
    "local_attention": 8,
    "rotary_dim": 4,
    "relative_attention_num_buckets": 8,
    "relative_attention_max_distance": 16,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    # experts
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_topk", "moe_k"), 2),
    **dict.fromkeys(("n_group", "topk_group", "n_shared_experts", "num_shared_experts", "first_k_dense_replace"), 1),
    # layers without attention
    **dict.fromkeys(("linear_num_value_heads", "mamba_n_heads", "mamba_num_heads"), 4),
    "linear_num_key_heads": 2,
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim", "mamba_d_state", "ssm_state_size"), 8),
    **dict.fromkeys(("mamba_d_head", "mamba_head_dim"), 16),
    **dict.fromkeys(("mamba_n_groups", "n_groups"), 1),
    "laurel_rank": 4,
    "altup_num_inputs": 2,
    "num_kv_shared_layers": 0,
    # pictures
    "image_size": 16,
    "patch_size": 4,
}
# More parameters than this are a size that has another name.
MOST = 3_000_000


def tiny_config(architecture: str, **more: Any) -> Any:
    """The configuration of an architecture with a layer of each type, at least two. more: sizes of its own"""
    made = CONFIG_MAPPING[architecture]
    default = made()
    names = set(default.to_dict()) | set(inspect.signature(made.__init__).parameters)
    names |= {name for name in SIZES if hasattr(default, name)}
    chosen = {name: size for name, size in SIZES.items() if name in names - set(made.attribute_map)}
    types = getattr(default, "layer_types", None)
    if types:
        kinds = list(dict.fromkeys(types))
        count = max(2, len(kinds))
        chosen["layer_types"] = (kinds * 2)[:count]
        chosen |= {name: count for name in ("num_hidden_layers", "n_layer", "n_layers", "num_layers") if name in chosen}
    if "qk_rope_head_dim" in chosen and "swa_head_dim" not in chosen:  # latent attention derives these
        chosen.pop("head_dim", None)
        chosen["num_key_value_heads"] = 4
    return made(**chosen | more)


def model_class(architecture: str) -> Any:
    """What computes logits, or of a picture its features."""
    for names in (
        modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES if architecture in SEQ2SEQ else {},
        modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES if architecture not in ENCODERS else {},
        modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES,
        modeling_auto.MODEL_MAPPING_NAMES,
    ):
        if architecture in names:
            name = names[architecture]
            return getattr(transformers, name if isinstance(name, str) else name[0])
    raise KeyError(architecture)


def tiny_model(architecture: str, implementation: str = "eager", **more: Any) -> Any:
    """A model with weights so large that attention is far from uniform."""
    made, config = model_class(architecture), tiny_config(architecture, **more)
    with torch.device("meta"):
        count = sum(each.numel() for each in made._from_config(config, attn_implementation="eager").parameters())
    assert count < MOST, f"{architecture}: {count} parameters"
    model = made._from_config(config, attn_implementation=implementation).eval().float()
    random = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim >= 2:
                weight.copy_(torch.randn(weight.shape, generator=random) * weight.shape[-1] ** -0.5)
            elif "sink" in name:
                weight.copy_(torch.randn(weight.shape, generator=random))
    return model


def names(text: str) -> tuple[str, ...]:
    """The words of a text."""
    return tuple(text.split())


SEQ2SEQ = names(
    "bart bigbird_pegasus blenderbot blenderbot-small longt5 m2m_100 marian mbart mt5 nllb-moe pegasus pegasus_x "
    "plbart seamless_m4t seamless_m4t_v2 switch_transformers t5 umt5"
)
ENCODERS = names(
    "albert bert camembert data2vec-text distilbert electra ernie esm eurobert gte jina_embeddings_v3 layoutlm "
    "mobilebert modernbert nomic_bert roberta roberta-prelayernorm ultrabert xlm-roberta xlm-roberta-xl"
)
PICTURES = names("deit dinov2 dinov2_with_registers ijepa siglip_vision_model clip_vision_model vit vit_msn")
# What most people run.
COMMON = names(
    "llama mistral mixtral qwen2 qwen2_moe qwen3 qwen3_moe qwen3_next gemma gemma2 gemma3_text phi phi3 gpt2 gpt_neox "
    "gpt_oss opt starcoder2 deepseek_v2 deepseek_v3 cohere2 granite olmo2 glm4 llama4_text smollm3 bert roberta t5 "
    "vit"
)
OTHERS = names(
    "afmoe albert apertus arcee aria_text axk1 axk2 bart beam bert-generation bigbird_pegasus biogpt bitnet "
    "blenderbot blenderbot-small camembert clip_vision_model cohere cohere2_moe ctrl cwm data2vec-text deepseek_v32 "
    "deepseek_v4 deit diffllama dinov2 dinov2_with_registers distilbert doge dots1 electra ernie ernie4_5 "
    "ernie4_5_moe esm eurobert exaone4 exaone_moe flex_olmo flint gemma3n_text glm glm4_moe glm4_moe_lite glm_moe_dsa "
    "gpt-sw3 gpt_bigcode granite_swa granitemoe granitemoe_swa granitemoeshared gte helium hrm_text hunyuan_v1_dense "
    "hunyuan_v1_moe hy_v3 hy_v4 hyperclovax ijepa inkling_text inkling2_text internlm3 iquestcoder jais2 jetmoe "
    "jina_embeddings_v3 kolibri1 laguna layoutlm lfm2 lfm3 longt5 m2m_100 marian mbart mellum "
    "mimo_v2_flash minicpm3 minimax minimax_m2 "
    "minimax_m3_vl_text ministral ministral3 mobilebert modernbert modernbert-decoder moshi mt5 nanochat nemotron "
    "nemotron_h nllb-moe nomic_bert olmo olmo3 olmo_hybrid olmoe pegasus pegasus_x persimmon phimoe plbart "
    "qwen3_5_moe_text qwen3_5_text roberta-prelayernorm seamless_m4t seamless_m4t_v2 seed_oss siglip_vision_model "
    "solar_open stablelm switch_transformers ultrabert umt5 vaultgemma vit_msn whisper xlm-roberta xlm-roberta-xl "
    "youtu"
)
# Sizes with which layers attend to chosen blocks of keys: two of five.
BLOCKS: dict[str, dict[str, Any]] = {
    "minimax_m3_vl_text": {
        "layer_types": ["minimax_m3_sparse"] * 2,
        "index_block_size": 2,
        "index_topk_blocks": 2,
        "index_local_blocks": 1,
        "index_head_dim": 8,
        "index_n_heads": 2,
    },
}
# Their attention does not go by transformers' AttentionInterface: some keep it whatever the implementation is called,
# some accept no name but their own.
OWN_ATTENTION = names("bloom codegen mpt rembert roformer xglm deberta deberta-v2 longformer tapas")
OWN_NAMES = names("gptj")
