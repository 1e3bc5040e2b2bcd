"""The architectures of transformers, and the form in which each one's attention module is a request.

`python -m tests.peers.modules` writes the tables of docs/models.md. Nothing here imports torch or transformers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

from tests.helpers.documents import ROOT
from tests.peers import module_distances as distances
from tests.peers import module_families as forms
from tests.peers.module_forms import Call, Fields, but_not_turned, imported, separate


class Row(NamedTuple):
    """An architecture whose attention modules are requests.

    module: the class of the module; form: makes the fields of a request of a call
    fields: what its requests have beside the source, the projection and the numbers of heads
    more: of its configuration
    inside: parts of the module whose outputs the form needs
    before: what is computed before the request, where that is more than nothing
    entry, part: the modules inside which hidden states enter, and which returns the output, if not the module itself
    last: the part of `inside` whose last output is that of the module
    tokens_first: its hidden states are (l, b, features)
    """

    module: str
    form: Callable[[Call], Fields] = separate
    fields: str = ""
    more: Mapping[str, Any] = {}
    part: str = ""
    entry: str = ""
    inside: tuple[str, ...] = ()
    before: str = ""
    last: str = ""
    tokens_first: bool = False


interleaved = partial(separate, interleaved=True)


def turns(name: str, **how: Any) -> Callable[[Call], Fields]:
    """A form whose layers rotate only if an attribute of the module, or a test of it, says so."""
    return lambda call: but_not_turned(separate(call, **how), TURNS[name](call.module))


TURNS: dict[str, Callable[[Any], Any]] = {
    "sliding": lambda module: module.sliding_window is not None,
    "sliding or all": lambda module: module.sliding_window is None or module.is_sliding,
    "use_rope": lambda module: module.use_rope,
}


GEMMA4: dict[str, Any] = {
    "vocab_size": 64, "vocab_size_per_layer_input": 64, "hidden_size": 32, "intermediate_size": 48,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "global_head_dim": 16,
    "num_global_key_value_heads": 1, "attention_k_eq_v": True, "sliding_window": 4, "num_kv_shared_layers": 2,
    "num_hidden_layers": 5, "hidden_size_per_layer_input": 8, "max_position_embeddings": 64, "pad_token_id": 0,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "sliding_attention", "full_attention"],
}  # fmt: skip
FALCON: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 2, "alibi": False,
    "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
FUNNEL: dict[str, Any] = {
    "vocab_size": 64, "d_model": 32, "n_head": 4, "d_head": 8, "d_inner": 48, "block_sizes": [1, 1],
}  # fmt: skip
VITS: dict[str, Any] = {"upsample_initial_channel": 32, "flow_size": 32, "spectrogram_bins": 16}
# Few positions, so that the temperature differs between them.
TEMPERED: dict[str, Any] = {"rope_parameters": {
    "rope_type": "yarn", "rope_theta": 1e4, "factor": 16.0, "original_max_position_embeddings": 4, "beta_fast": 32.0,
    "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.5,
    "max_position_embeddings": 64}}  # fmt: skip
GROWING = {"log_scaling_n_floor": 3, "log_scaling_alpha": 0.5, "sliding_window_size": 4}
SECTIONS = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}}
# architectures.py imports torch; the docs are compared with this table where there is none.
PICTURES = ("clip_vision_model", "deit", "dinov2", "dinov2_with_registers", "ijepa",
            "siglip_vision_model", "vit", "vit_msn")  # fmt: skip
SEQ2SEQ = ("bart", "blenderbot", "blenderbot-small", "m2m_100", "marian", "mbart", "mt5", "nllb-moe", "pegasus",
           "plbart", "seamless_m4t", "seamless_m4t_v2", "switch_transformers", "t5", "umt5")  # fmt: skip
ENCODERS = ("albert", "bert", "camembert", "data2vec-text", "distilbert", "electra", "ernie", "esm", "eurobert", "gte",
            "jina_embeddings_v3", "layoutlm", "markuplm", "megatron-bert", "mobilebert", "modernbert", "nomic_bert",
            "rembert", "roberta", "roberta-prelayernorm", "splinter", "ultrabert", "visual_bert", "xlm-roberta",
            "xlm-roberta-xl")  # fmt: skip
# Each of their layers runs several times for a token.
UNCACHED = ("hrm_text",)
# Their configurations cannot be made smaller by the names of sizes.
WHOLE = ("gemma4_text", "falcon", "funnel")
INKLING = ("q_proj", "k_sconv", "v_sconv", "rel_logits_proj")
INKLING2 = (*INKLING, "q_l2_clip", "k_l2_clip", "gate_proj", "sink_proj")
CONFORMERS = {
    "fastspeech2_conformer": "FastSpeech2Conformer",
    "parakeet_encoder": "ParakeetEncoder",
    "seamless_m4t.speech_encoder": "SeamlessM4TConformerSelf",
    "wav2vec2-conformer": "Wav2Vec2ConformerSelf",
}
DISTANCES = "the keys for distances"
CONVOLUTIONS = "short convolutions of keys and values"
LATENT = "the latents and their norms"
INDEXER = f"{LATENT}; the keys that an indexer selects"

ROWS: dict[str, Row] = {
    "llama": Row("LlamaAttention", imported, fields="is_causal rotary"),
    "mistral": Row("MistralAttention", imported, fields="is_causal rotary window"),
    "mixtral": Row("MixtralAttention", imported, fields="is_causal rotary window"),
    "qwen2": Row("Qwen2Attention", imported, fields="is_causal rotary"),
    "qwen2_moe": Row("Qwen2MoeAttention", imported, fields="is_causal rotary"),
    "qwen3": Row("Qwen3Attention", imported, fields="is_causal key_norm query_norm rotary"),
    "qwen3_moe": Row("Qwen3MoeAttention", imported, fields="is_causal key_norm query_norm rotary"),
    "gemma": Row("GemmaAttention", fields="is_causal rotary"),
    "gpt2": Row("GPT2Attention", imported, fields="is_causal"),
    "gpt-sw3": Row("GPT2Attention", imported, fields="is_causal"),
    "phi3": Row("Phi3Attention", imported, fields="is_causal rotary window"),
    "qwen3_next": Row("Qwen3NextAttention", imported, fields="is_causal key_norm projection.gate query_norm rotary"),
    "qwen3_5_moe_text": Row(
        "Qwen3_5MoeAttention", imported, fields="is_causal key_norm projection.gate query_norm rotary"
    ),
    "gemma2": Row(
        "Gemma2Attention",
        imported,
        more={"attn_logit_softcapping": 2.0},
        fields="is_causal rotary scale softcap window",
    ),
    "gemma3_text": Row("Gemma3Attention", imported, fields="is_causal key_norm query_norm rotary scale window"),
    "gemma3n_text": Row(
        "Gemma3nTextAttention",
        forms.gemma,
        more={
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "num_hidden_layers": 4,
            "num_kv_shared_layers": 2,
        },
        fields="is_causal key_norm query_norm rotary rotary.query_positions scale value_norm window",
    ),
    "gemma4_text": Row(
        "Gemma4TextAttention",
        forms.gemma,
        more=GEMMA4,
        fields="is_causal key_norm query_norm rotary rotary.query_positions scale value_norm window",
    ),
    "phi": Row("PhiAttention", fields="is_causal rotary"),
    "gpt_neox": Row("GPTNeoXAttention", imported, fields="is_causal rotary"),
    "gpt_oss": Row("GptOssAttention", imported, fields="is_causal rotary sinks window"),
    "opt": Row("OPTAttention", fields="is_causal"),
    "starcoder2": Row("Starcoder2Attention", imported, fields="is_causal rotary window"),
    "deepseek_v2": Row(
        "DeepseekV2Attention", forms.latent, before=LATENT, fields="is_causal rotary rotary.interleaved"
    ),
    "deepseek_v3": Row(
        "DeepseekV3Attention", forms.latent, before=LATENT, fields="is_causal rotary rotary.interleaved"
    ),
    "cohere2": Row("Cohere2Attention", imported, fields="is_causal rotary rotary.interleaved window"),
    "granite": Row("GraniteAttention", imported, fields="is_causal rotary scale"),
    "granite_swa": Row("GraniteSWAAttention", imported, fields="is_causal rotary scale sinks window"),
    "olmo2": Row(
        "Olmo2Attention", imported, fields="is_causal key_norm key_norm.over query_norm query_norm.over rotary"
    ),
    "glm4": Row("Glm4Attention", imported, fields="is_causal rotary rotary.interleaved"),
    "llama4_text": Row(
        "Llama4TextAttention",
        forms.llama4,
        more={"no_rope_layers": [1, 0], "floor_scale": 3, "attn_scale": 0.5},
        fields="chunk_size is_causal key_norm key_norm.position "
        "query_norm query_norm.position rotary rotary.interleaved rotary.query_positions",
    ),
    "smollm3": Row("SmolLM3Attention", imported, fields="is_causal rotary"),
    "bert": Row("BertAttention", imported, part="output.dense"),
    "roberta-prelayernorm": Row("RobertaPreLayerNormAttention", part="output.dense", entry="self"),
    "roberta": Row("RobertaAttention", imported, part="output.dense"),
    "t5": Row("T5Attention", forms.t5, fields="bias is_causal scale"),
    "vit": Row("ViTAttention"),
    # others
    "falcon": Row("FalconAttention", imported, more=FALCON, fields="is_causal rotary"),
    "gptj": Row("GPTJAttention", forms.gptj, fields="is_causal rotary rotary.interleaved"),
    "mpt": Row("MptAttention", forms.mpt, fields="alibi_slopes is_causal"),
    "xglm": Row("XGLMAttention", fields="is_causal"),
    "rembert": Row("RemBertAttention", part="output.dense"),
    "megatron-bert": Row("MegatronBertAttention", part="output.dense", entry="self"),
    "splinter": Row("SplinterAttention", part="output.dense"),
    "visual_bert": Row("VisualBertAttention", part="output.dense"),
    "markuplm": Row("MarkupLMAttention", part="output.dense"),
    "trocr": Row("TrOCRAttention", fields="is_causal"),
    "mobilebert": Row("MobileBertAttention", forms.mobilebert, part="output.dense"),
    "mistral4": Row(
        "Mistral4Attention",
        forms.mistral4,
        more=TEMPERED,
        before=LATENT,
        fields="is_causal rotary rotary.interleaved rotary.query_positions scale",
    ),
    "qwen2_vl_text": Row("Qwen2VLAttention", more=SECTIONS, fields="is_causal rotary"),
    "qwen2_5_vl_text": Row("Qwen2_5_VLAttention", more=SECTIONS, fields="is_causal rotary"),
    "qwen3_vl_text": Row("Qwen3VLTextAttention", fields="is_causal key_norm query_norm rotary"),
    "glm4v_text": Row("Glm4vTextAttention", interleaved, more=SECTIONS, fields="is_causal rotary rotary.interleaved"),
    "hrm_text": Row("HrmTextAttention", fields="is_causal projection.gate rotary"),
    "seamless_m4t": Row("SeamlessM4TAttention", fields="is_causal"),
    "seamless_m4t_v2": Row("SeamlessM4Tv2Attention", fields="is_causal"),
    "inkling_text": Row(
        "InklingAttention",
        forms.inkling,
        more=GROWING,
        inside=INKLING,
        before=CONVOLUTIONS,
        fields="bias is_causal key_norm query_norm rotary rotary.query_positions scale window",
    ),
    "inkling2_text": Row(
        "Inkling2SlidingAttention Inkling2FullAttention",
        forms.inkling,
        more=GROWING,
        inside=INKLING2,
        before=f"{CONVOLUTIONS}; clips",
        fields="bias gate is_causal rotary rotary.query_positions sinks value_norm window",
    ),
    "deepseek_v32": Row(
        "DeepseekV32Attention",
        forms.sparse,
        inside=("indexer",),
        before=INDEXER,
        fields="is_causal rotary rotary.interleaved selected_keys",
    ),
    "glm_moe_dsa": Row(
        "GlmMoeDsaAttention",
        forms.sparse,
        inside=("indexer",),
        before=INDEXER,
        fields="is_causal rotary rotary.interleaved selected_keys",
    ),
    "afmoe": Row(
        "AfmoeAttention", turns("sliding"), fields="is_causal key_norm projection.gate query_norm rotary window"
    ),
    "albert": Row("AlbertAttention", part="dense"),
    "apertus": Row("ApertusAttention", fields="is_causal key_norm query_norm rotary"),
    "arcee": Row("ArceeAttention", imported, fields="is_causal rotary"),
    "aria_text": Row("AriaTextAttention", imported, fields="is_causal rotary"),
    "axk1": Row("AXK1Attention", forms.latent, before=LATENT, fields="is_causal rotary rotary.interleaved"),
    "bart": Row("BartAttention", fields="is_causal"),
    "beam": Row(
        "BeamAttention",
        forms.beam,
        fields="is_causal key_norm projection.gate query_norm rotary rotary.query_positions window",
    ),
    "bert-generation": Row(
        "BertGenerationAttention", imported, part="output.dense", more={"is_decoder": True}, fields="is_causal"
    ),
    "biogpt": Row("BioGptAttention", fields="is_causal"),
    "bitnet": Row("BitNetAttention", imported, fields="is_causal output_norm output_norm.over rotary"),
    "blenderbot": Row("BlenderbotAttention", fields="is_causal"),
    "blenderbot-small": Row("BlenderbotSmallAttention", fields="is_causal"),
    "bloom": Row("BloomAttention", forms.bloom, part="dense", fields="alibi_slopes is_causal"),
    "camembert": Row("CamembertAttention", imported, part="output.dense"),
    "clip_vision_model": Row("CLIPAttention"),
    "cohere": Row(
        "CohereAttention",
        interleaved,
        more={"use_qk_norm": True},
        fields="is_causal key_norm key_norm.kind query_norm query_norm.kind rotary rotary.interleaved",
    ),
    "cohere2_moe": Row(
        "Cohere2MoeAttention", turns("sliding", interleaved=True), fields="is_causal rotary rotary.interleaved window"
    ),
    "ctrl": Row("MultiHeadAttention", fields="is_causal"),
    "cwm": Row("CwmAttention", fields="is_causal rotary window"),
    "data2vec-text": Row("Data2VecTextAttention", imported, part="output.dense"),
    "deit": Row("DeiTAttention"),
    "dinov2": Row("Dinov2Attention"),
    "dinov2_with_registers": Row("Dinov2WithRegistersAttention"),
    "distilbert": Row("DistilBertSelfAttention"),
    "dots1": Row("Dots1Attention", imported, fields="is_causal key_norm query_norm rotary"),
    "electra": Row("ElectraAttention", imported, part="output.dense"),
    "ernie": Row("ErnieAttention", imported, part="output.dense"),
    "ernie4_5": Row("Ernie4_5Attention", imported, fields="is_causal rotary rotary.interleaved"),
    "ernie4_5_moe": Row("Ernie4_5_MoeAttention", imported, fields="is_causal rotary rotary.interleaved"),
    "esm": Row("EsmAttention", forms.esm, part="output.dense", entry="self"),
    "eurobert": Row("EuroBertAttention", fields="rotary"),
    "exaone4": Row("Exaone4Attention", imported, fields="is_causal key_norm query_norm rotary window"),
    "exaone_moe": Row("ExaoneMoeAttention", imported, fields="is_causal key_norm query_norm rotary window"),
    "flex_olmo": Row(
        "FlexOlmoAttention", imported, fields="is_causal key_norm key_norm.over query_norm query_norm.over rotary"
    ),
    "flint": Row("FlintAttention", turns("sliding"), fields="is_causal key_norm query_norm rotary sinks window"),
    "glm": Row("GlmAttention", imported, fields="is_causal rotary rotary.interleaved"),
    "glm4_moe": Row("Glm4MoeAttention", fields="is_causal rotary"),
    "glm4_moe_lite": Row(
        "Glm4MoeLiteAttention", forms.latent, before=LATENT, fields="is_causal rotary rotary.interleaved"
    ),
    "gpt_bigcode": Row("GPTBigCodeAttention", imported, more={"num_key_value_heads": 1}, fields="is_causal"),
    "granitemoe": Row("GraniteMoeAttention", imported, fields="is_causal rotary scale"),
    "granitemoe_swa": Row("GraniteMoeSWAAttention", imported, fields="is_causal rotary scale sinks window"),
    "granitemoeshared": Row("GraniteMoeSharedAttention", imported, fields="is_causal rotary scale"),
    "gte": Row("GteAttention", fields="rotary"),
    "helium": Row("HeliumAttention", imported, fields="is_causal rotary rotary.interleaved"),
    "hunyuan_v1_dense": Row(
        "HunYuanDenseV1Attention",
        partial(separate, position="after"),
        fields="is_causal key_norm key_norm.position query_norm query_norm.position rotary",
    ),
    "hunyuan_v1_moe": Row(
        "HunYuanMoEV1Attention",
        partial(separate, position="after"),
        fields="is_causal key_norm key_norm.position query_norm query_norm.position rotary",
    ),
    "hy_v3": Row("HYV3Attention", fields="is_causal key_norm query_norm rotary"),
    "hyperclovax": Row("HyperCLOVAXAttention", fields="is_causal rotary"),
    "ijepa": Row("IJepaAttention"),
    "jais2": Row("Jais2Attention", fields="is_causal rotary"),
    "jina_embeddings_v3": Row("JinaEmbeddingsV3Attention", fields="rotary"),
    "kolibri1": Row("Kolibri1Attention", turns("sliding or all"), fields="is_causal key_norm query_norm rotary window"),
    "laguna": Row(
        "LagunaAttention",
        partial(separate, activation="softplus"),
        fields="is_causal key_norm projection.gate query_norm rotary",
    ),
    "layoutlm": Row("LayoutLMAttention", imported, part="output.dense"),
    "lfm2": Row("Lfm2Attention", fields="is_causal key_norm query_norm rotary"),
    "lfm3": Row("Lfm3Attention", fields="is_causal key_norm projection.gate query_norm rotary window"),
    "m2m_100": Row("M2M100Attention", fields="is_causal"),
    "marian": Row("MarianAttention", fields="is_causal"),
    "mbart": Row("MBartAttention", fields="is_causal"),
    "mellum": Row("MellumAttention", fields="is_causal key_norm query_norm rotary"),
    "mimo_v2_flash": Row("MiMoV2FlashAttention", forms.mimo, fields="is_causal rotary sinks window"),
    "minicpm3": Row("MiniCPM3Attention", forms.latent, before=LATENT, fields="is_causal rotary"),
    "minimax": Row("MiniMaxAttention", forms.windowed, fields="is_causal rotary window"),
    "minimax_m2": Row(
        "MiniMaxM2Attention", fields="is_causal key_norm key_norm.over query_norm query_norm.over rotary"
    ),
    "ministral": Row("MinistralAttention", imported, fields="is_causal rotary window"),
    "ministral3": Row(
        "Ministral3Attention", forms.ministral3, more=TEMPERED, fields="is_causal rotary rotary.query_positions window"
    ),
    "modernbert": Row("ModernBertAttention", partial(forms.packed, name="Wqkv", order="3hd"), fields="rotary window"),
    "modernbert-decoder": Row("ModernBertDecoderAttention", fields="is_causal rotary window"),
    "mt5": Row("MT5Attention", forms.t5, fields="bias is_causal scale"),
    "nanochat": Row(
        "NanoChatAttention",
        forms.nanochat,
        fields="is_causal key_norm key_norm.position query_norm query_norm.position rotary",
    ),
    "nemotron": Row("NemotronAttention", fields="is_causal rotary"),
    "nemotron_h": Row("NemotronHAttention", fields="is_causal"),
    "nllb-moe": Row("NllbMoeAttention", fields="is_causal"),
    "nomic_bert": Row("NomicBertAttention", fields="rotary"),
    "olmo": Row("OlmoAttention", imported, more={"clip_qkv": 0.2}, fields="clip_qkv is_causal rotary"),
    "olmo3": Row(
        "Olmo3Attention", imported, fields="is_causal key_norm key_norm.over query_norm query_norm.over rotary window"
    ),
    "olmo_hybrid": Row(
        "OlmoHybridAttention", fields="is_causal key_norm key_norm.over query_norm query_norm.over rotary"
    ),
    "olmoe": Row(
        "OlmoeAttention",
        imported,
        more={"clip_qkv": 0.8},
        fields="clip_qkv is_causal key_norm key_norm.over query_norm query_norm.over rotary",
    ),
    "pegasus": Row("PegasusAttention", fields="is_causal"),
    "persimmon": Row(
        "PersimmonAttention", forms.packed, fields="is_causal key_norm key_norm.kind query_norm query_norm.kind rotary"
    ),
    "phimoe": Row("PhimoeAttention", forms.windowed, fields="is_causal rotary window"),
    "plbart": Row("PLBartAttention", fields="is_causal"),
    "qwen3_5_text": Row("Qwen3_5Attention", imported, fields="is_causal key_norm projection.gate query_norm rotary"),
    "seed_oss": Row("SeedOssAttention", imported, fields="is_causal rotary"),
    "siglip_vision_model": Row("SiglipAttention"),
    "solar_open": Row("SolarOpenAttention", fields="is_causal rotary"),
    "stablelm": Row(
        "StableLmAttention",
        more={"qk_layernorm": True},
        fields="is_causal key_norm key_norm.kind query_norm query_norm.kind rotary",
    ),
    "switch_transformers": Row("SwitchTransformersAttention", forms.t5, fields="bias is_causal scale"),
    "ultrabert": Row("UltrabertAttention", fields="rotary window"),
    "umt5": Row("UMT5Attention", forms.t5, fields="bias is_causal scale"),
    "vaultgemma": Row(
        "VaultGemmaAttention",
        imported,
        more={"attn_logit_softcapping": 2.0},
        fields="is_causal rotary scale softcap window",
    ),
    "vit_msn": Row("ViTMSNAttention"),
    "whisper": Row("WhisperAttention", fields="is_causal"),
    "wav2vec2-bert": Row("Wav2Vec2BertSelfAttention", distances.shaw, fields="relative_keys relative_keys.first"),
    "seamless_m4t_v2.speech_encoder": Row(
        "SeamlessM4Tv2ConformerSelfAttention", distances.shaw, fields="relative_keys relative_keys.first"
    ),
    **{
        name: Row(
            f"{module}Attention", distances.conformer, before=DISTANCES, fields="relative_keys relative_keys.query_bias"
        )
        for name, module in CONFORMERS.items()
    },
    "nemotron_asr_streaming_encoder": Row(
        "NemotronAsrStreamingEncoderAttention",
        distances.streaming,
        before=DISTANCES,
        fields="mask relative_keys relative_keys.query_bias",
    ),
    "granite_speech_encoder": Row(
        "GraniteSpeechConformerAttention",
        distances.shaw_in_chunks,
        inside=("pre_norm",),
        before="the norm in front of the maps",
        fields="chunk_size relative_keys",
    ),
    "granite_speech_plus_encoder": Row(
        "GraniteSpeechPlusConformerAttention",
        distances.shaw_in_chunks,
        inside=("pre_norm",),
        before="the norm in front of the maps",
        fields="chunk_size relative_keys",
    ),
    "granite_speech5_encoder": Row(
        "GraniteSpeech5EncoderAttention", distances.shaw_in_chunks, fields="chunk_size relative_keys"
    ),
    "gemma3n_audio": Row(
        "Gemma3nAudioConformerAttention",
        distances.gemma3n_audio,
        before=DISTANCES,
        entry="attn",
        part="post",
        fields="relative_keys relative_keys.first scale softcap window",
    ),
    "gemma4_audio": Row(
        "Gemma4AudioAttention",
        distances.gemma4_audio,
        before=DISTANCES,
        fields="relative_keys relative_keys.first scale softcap window",
    ),
    "speecht5": Row("SpeechT5Attention", distances.speecht5, fields="relative_keys"),
    "xlnet": Row(
        "XLNetRelativeAttention",
        distances.xlnet,
        before=DISTANCES,
        inside=("dropout",),
        last="dropout",
        tokens_first=True,
        fields="relative_keys relative_keys.first relative_keys.query_bias",
    ),
    "xlm-roberta": Row("XLMRobertaAttention", imported, part="output.dense"),
    "xlm-roberta-xl": Row("XLMRobertaXLAttention", part="output.dense", entry="self"),
    "youtu": Row("YoutuAttention", forms.latent, before=LATENT, fields="is_causal rotary rotary.interleaved"),
}


class Other(NamedTuple):
    """An architecture whose attention module is no request.

    module: the class of the module; part: its attribute that no field has; why: in words
    """

    module: str
    part: str
    why: str
    more: Mapping[str, Any] = {}


OTHERS: dict[str, Other] = {
    "bigbird_pegasus": Other(
        "BigBirdPegasusBlockSparseAttention", "num_random_blocks", "blocks of random keys; `mask` can have them"
    ),
    "deberta": Other(
        "DisentangledSelfAttention",
        "pos_proj",
        "positions have queries and keys of their own",
        {"relative_attention": True, "pos_att_type": ["c2p", "p2c"]},
    ),
    "deepseek_v4": Other("DeepseekV4Attention", "compressor", "compressed keys and values beside those of a window"),
    "diffllama": Other("DiffLlamaAttention", "groupnorm", "the difference of two attentions, and a norm of it"),
    "doge": Other("DogeAttention", "dt_proj", "its values make a bias; a request can have it as `bias`"),
    "funnel": Other(
        "FunnelRelMultiheadAttention",
        "seg_embed",
        "segments have keys of their own beside those for distances",
        FUNNEL,
    ),
    "jetmoe": Other("JetMoeAttention", "experts", "a router chooses maps for each token"),
    "minimax": Other("MiniMaxLightningAttention", "output_gate", "lightning layers: linear attention, not softmax"),
    "sam_vision_model": Other(
        "SamVisionAttention", "rel_pos_h", "keys for distances in rows and in columns; a request has those of one axis"
    ),
    "vits": Other("VitsAttention", "emb_rel_v", "values for distances, too; `relative_keys` has keys only", VITS),
}


def shown(fields: str) -> str:
    """The options of a row in words of the docs: nested ones behind the option that they are part of."""
    names = fields.split()
    cells = []
    for name in names:
        if "." in name and not name.startswith("projection."):
            continue
        parts = [each.partition(".")[2] for each in names if each.startswith(f"{name}.")]
        cells.append(f"`{name}`" + (f" ({', '.join(f'`{part}`' for part in parts)})" if parts else ""))
    return ", ".join(cells) or "none"


def tables() -> dict[str, str]:
    """The tables of docs/models.md, by the names of their places there."""
    groups: dict[tuple[str, str], list[str]] = {}
    for name, row in ROWS.items():
        groups.setdefault((row.before, row.fields), []).append(f"`{name}`")
    lines = ["| architectures | options | computed before the request |", "|---|---|---|"]
    for (before, fields), names in sorted(groups.items(), key=lambda group: bool(group[0][0])):
        lines.append(f"| {', '.join(names)} | {shown(fields)} | {before or 'nothing'} |")
    others = ["| architecture | why |", "|---|---|", *(f"| `{name}` | {each.why} |" for name, each in OTHERS.items())]
    return {"modules": "\n".join(lines), "others": "\n".join(others)}


def placed(page: str) -> str:
    """The text of docs/models.md with these tables in their places."""
    for name, table in tables().items():
        begin, end = f"<!-- {name}: begin -->\n", f"\n<!-- {name}: end -->"
        before, _, rest = page.partition(begin)
        page = f"{before}{begin}{table}{end}{rest.partition(end.lstrip())[2]}"
    return page


if __name__ == "__main__":
    PAGE = ROOT / "docs" / "models.md"
    PAGE.write_text(placed(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
