"""Tiny models whose attention knows relative positions, most of them encoders of speech, and what they read.

Sounds become as many frames as the tokens of the other models, of which the last three are padding in a batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
import transformers
from transformers import CONFIG_MAPPING
from transformers.models.granite_speech.modeling_granite_speech import GraniteSpeechCTCEncoder
from transformers.models.granite_speech_plus.modeling_granite_speech_plus import GraniteSpeechPlusCTCEncoder
from transformers.models.seamless_m4t.modeling_seamless_m4t import SeamlessM4TSpeechEncoder
from transformers.models.seamless_m4t_v2.modeling_seamless_m4t_v2 import SeamlessM4Tv2SpeechEncoder
from transformers.models.speecht5.modeling_speecht5 import SpeechT5EncoderWithTextPrenet

Inputs = Callable[[torch.Tensor, torch.Tensor], dict[str, Any]]


class Listener(NamedTuple):
    """A model, its configuration, and the arguments that it gets for tokens and their mask, both (b, l).

    implementation: of its attention; padded: it knows padding
    """

    made: Any
    sizes: Mapping[str, Any]
    inputs: Inputs
    implementation: str = "eager"
    padded: bool = True


def features(count: int, frames: int = 1, name: str = "input_features") -> Inputs:
    """Random features for each token. frames: of a token, which convolutions join"""

    def inputs(tokens: torch.Tensor, mask: torch.Tensor) -> dict[str, Any]:
        length = tokens.shape[1] * frames
        random = torch.Generator().manual_seed(2)
        given = torch.randn(len(tokens), length, count, generator=random)
        return {name: given, "attention_mask": mask.repeat_interleave(frames, dim=1).bool()}

    return inputs


def streamed(tokens: torch.Tensor, mask: torch.Tensor) -> dict[str, Any]:
    """Features of which eight frames become one, but the first frame is of one."""
    given = features(16, 8)(tokens, mask)
    return {name: value[:, 7:] for name, value in given.items()}


def texts(name: str = "input_ids") -> Inputs:
    """The tokens themselves."""
    return lambda tokens, mask: {name: tokens, "attention_mask": mask}


def remembering(tokens: torch.Tensor, mask: torch.Tensor) -> dict[str, Any]:
    """Tokens, where none is padding behind three hidden states of each layer that were there before."""
    random = torch.Generator().manual_seed(2)
    memory = {"mems": [torch.randn(3, len(tokens), 32, generator=random) for _ in range(2)]} if mask.all() else {}
    return {"input_ids": tokens, "attention_mask": mask.float()} | memory


def sounds(tokens: torch.Tensor, mask: torch.Tensor) -> dict[str, Any]:
    """Waves, of which a convolution makes a frame of two numbers."""
    random = torch.Generator().manual_seed(2)
    waves = torch.randn(len(tokens), 2 * tokens.shape[1], generator=random)
    return {"input_values": waves, "attention_mask": mask.repeat_interleave(2, dim=1)}


def mels(tokens: torch.Tensor, mask: torch.Tensor) -> dict[str, Any]:
    """Features of which four frames become one, with a mask that is true for padding."""
    given = features(32, 4, "audio_mel")(tokens, mask)
    return {"audio_mel": given["audio_mel"], "audio_mel_mask": ~given["attention_mask"]}


CONFORMER: dict[str, Any] = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48,
    "conv_depthwise_kernel_size": 3, "apply_spec_augment": False, "vocab_size": 16,
}  # fmt: skip
WAVES = {
    "num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2, "conv_dim": (8,), "conv_stride": (2,),
    "conv_kernel": (2,),
}  # fmt: skip
LIMITED = {"left_max_position_embeddings": 3, "right_max_position_embeddings": 2}
SEAMLESS = {
    "hidden_size": 32, "speech_encoder_layers": 2, "speech_encoder_attention_heads": 4,
    "speech_encoder_intermediate_size": 48, "conv_depthwise_kernel_size": 3, "feature_projection_input_dim": 16,
    "add_adapter": False,
}  # fmt: skip
FAST: dict[str, Any] = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48,
    "conv_kernel_size": 3, "subsampling_conv_channels": 8, "num_mel_bins": 16,
}  # fmt: skip
GRANITE = {
    "input_dim": 16, "num_layers": 2, "hidden_dim": 32, "num_heads": 4, "dim_head": 8, "output_dim": 8,
    "context_size": 4, "max_pos_emb": 6, "conv_kernel_size": 3,
}  # fmt: skip
LISTENERS: dict[str, Listener] = {
    "fastspeech2_conformer": Listener(
        transformers.FastSpeech2ConformerModel,
        {
            "hidden_size": 32,
            "vocab_size": 64,
            "encoder_layers": 2,
            "decoder_layers": 2,
            "num_mel_bins": 16,
            "encoder_num_attention_heads": 4,
            "decoder_num_attention_heads": 4,
            "encoder_linear_units": 48,
            "decoder_linear_units": 48,
            "encoder_kernel_size": 3,
            "decoder_kernel_size": 3,
            "speech_decoder_postnet_units": 16,
            "duration_predictor_channels": 16,
            "energy_predictor_channels": 16,
            "pitch_predictor_channels": 16,
        },
        texts(),
    ),
    "wav2vec2-conformer": Listener(transformers.Wav2Vec2ConformerModel, CONFORMER | WAVES, sounds),
    "wav2vec2-bert": Listener(
        transformers.Wav2Vec2BertModel, CONFORMER | LIMITED | {"feature_projection_input_dim": 16}, features(16)
    ),
    "seamless_m4t.speech_encoder": Listener(SeamlessM4TSpeechEncoder, SEAMLESS, features(16)),
    "seamless_m4t_v2.speech_encoder": Listener(
        SeamlessM4Tv2SpeechEncoder,
        SEAMLESS | LIMITED,
        features(16),
        "sdpa",  # eager attention gets booleans and adds them
    ),
    "parakeet_encoder": Listener(transformers.ParakeetEncoder, FAST, features(16, 8)),
    "nemotron_asr_streaming_encoder": Listener(
        transformers.NemotronAsrStreamingEncoder,
        FAST | {"sliding_window": 5, "default_num_lookahead_tokens": 1},
        streamed,
        "sdpa",  # eager attention gets numbers and takes each 0 for a hidden key
    ),
    "granite_speech_encoder": Listener(
        GraniteSpeechCTCEncoder, GRANITE, features(16, name="hidden_states"), padded=False
    ),
    "granite_speech_plus_encoder": Listener(
        GraniteSpeechPlusCTCEncoder, GRANITE, features(16, name="hidden_states"), padded=False
    ),
    "granite_speech5_encoder": Listener(
        transformers.GraniteSpeech5Encoder,
        {
            "vocab_size": 16,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_mel_bins": 4,
            "max_position_embeddings": 6,
            "context_size": 4,
            "conv_kernel_size": 3,
            "subsample_layers": [],
        },
        features(16),
    ),
    "gemma3n_audio": Listener(
        transformers.Gemma3nAudioEncoder,
        {
            "input_feat_size": 32,
            "hidden_size": 32,
            "conf_attention_chunk_size": 4,
            "conf_attention_context_left": 4,
            "conf_attention_context_right": 1,
            "conf_attention_logit_cap": 2.0,
            "conf_num_attention_heads": 4,
            "conf_num_hidden_layers": 2,
            "sscp_conv_channel_size": (8, 4),
        },
        mels,
    ),
    "gemma4_audio": Listener(
        transformers.Gemma4AudioModel,
        {
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "subsampling_conv_channels": (8, 4),
            "attention_chunk_size": 4,
            "attention_context_left": 5,
            "attention_logit_cap": 2.0,
            "output_proj_dims": 16,
        },
        features(8, 4),
    ),
    "speecht5": Listener(
        SpeechT5EncoderWithTextPrenet,
        {
            "hidden_size": 32,
            "encoder_layers": 2,
            "encoder_attention_heads": 4,
            "encoder_ffn_dim": 48,
            "encoder_max_relative_position": 4,
            "vocab_size": 64,
        },
        texts("input_values"),
    ),
    "xlnet": Listener(
        transformers.XLNetModel,
        {"vocab_size": 64, "d_model": 32, "n_layer": 2, "n_head": 4, "d_inner": 48},
        remembering,
    ),
}


def listener(architecture: str, more: Mapping[str, Any]) -> Any:
    """A model in inference mode. more: of its configuration"""
    row = LISTENERS[architecture]
    config = CONFIG_MAPPING[architecture.partition(".")[0]](**row.sizes | more)
    return row.made._from_config(config, attn_implementation=row.implementation).eval().float()


def listen(model: Any, architecture: str, tokens: torch.Tensor, mask: torch.Tensor) -> None:
    """Let a model compute."""
    row = LISTENERS[architecture]
    given = row.inputs(tokens, mask)
    model(**{name: value for name, value in given.items() if row.padded or name != "attention_mask"})
