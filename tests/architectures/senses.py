"""Models of images, sound, series and of several of them together."""

from __future__ import annotations

from typing import Any

import torch

from tests.architectures.architecture import (
    HIDDEN,
    VOCABULARY,
    Architecture,
    Batch,
    classes,
    ids,
    images,
    pixels,
)
from tests.architectures.text import NO_DROPOUT, SIZES, TOKENS
from tests.architectures.unet import UNet

LAYERS: dict[str, Any] = {
    "hidden_size": HIDDEN,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
PATCHES: dict[str, Any] = {"image_size": 16, "patch_size": 8}
THREE: dict[str, Any] = {"num_labels": 3}


def vision(name: str, prefix: str, note: str = "", **settings: Any) -> Architecture:
    return Architecture(
        name,
        "vision",
        f"{prefix}ForImageClassification",
        images,
        f"{prefix}Config",
        {**settings, **THREE},
        note,
    )


def segments(rows: int, generator: torch.Generator) -> Batch:
    labels = torch.randint(0, 3, (rows, 32, 32), generator=generator)
    return {"pixel_values": pixels(rows, generator, 32), "labels": labels}


def masked_images(rows: int, generator: torch.Generator) -> Batch:
    """Images, and the noise by which patches are masked."""
    return {
        "pixel_values": pixels(rows, generator),
        "noise": torch.rand(rows, 4, generator=generator),
    }


def waves(rows: int, generator: torch.Generator) -> Batch:
    labels = torch.randint(1, VOCABULARY, (rows, 4), generator=generator)
    return {"input_values": torch.randn(rows, 400, generator=generator), "labels": labels}


def spectra(rows: int, generator: torch.Generator) -> Batch:
    features = torch.randn(rows, 8, 32, generator=generator)
    return {"input_features": features, "labels": ids(rows, generator, 8)}


def sounds(rows: int, generator: torch.Generator) -> Batch:
    return {
        "input_values": torch.randn(rows, 24, 16, generator=generator),
        "labels": classes(rows, generator),
    }


def captions(rows: int, generator: torch.Generator) -> Batch:
    """Pictures and texts that belong together."""
    return {
        "input_ids": ids(rows, generator),
        "pixel_values": pixels(rows, generator),
        "return_loss": True,
    }


def pictures_in_text(rows: int, generator: torch.Generator) -> Batch:
    """Four patches of a picture stand where token 3 is."""
    tokens = ids(rows, generator)
    tokens[:, 1:5] = 3
    return {"input_ids": tokens, "pixel_values": pixels(rows, generator), "labels": tokens}


def questions(rows: int, generator: torch.Generator) -> Batch:
    return {
        "input_ids": ids(rows, generator),
        "pixel_values": pixels(rows, generator),
        "labels": torch.rand(rows, 3, generator=generator),
    }


def series(rows: int, generator: torch.Generator) -> Batch:
    return {
        "past_values": torch.randn(rows, 16, 2, generator=generator),
        "future_values": torch.randn(rows, 4, 2, generator=generator),
    }


def noise(rows: int, generator: torch.Generator) -> Batch:
    """Noisy pictures, the time of each, a text to look at, and the noise to find."""
    return {
        "sample": pixels(rows, generator),
        "time": torch.randint(0, 1000, (rows,), generator=generator),
        "context": torch.randn(rows, 6, 16, generator=generator),
        "target": pixels(rows, generator),
    }


VISION = [
    vision("vit", "ViT", "", **LAYERS, **PATCHES, **NO_DROPOUT),
    vision(
        "dinov2",
        "Dinov2",
        "layer scale",
        hidden_size=HIDDEN,
        num_hidden_layers=2,
        num_attention_heads=4,
        mlp_ratio=2,
        drop_path_rate=0.0,
        **PATCHES,
        **NO_DROPOUT,
    ),
    vision(
        "swin",
        "Swin",
        "shifted windows",
        image_size=16,
        patch_size=2,
        embed_dim=16,
        depths=[2, 2],
        num_heads=[2, 4],
        window_size=4,
        drop_path_rate=0.0,
        **NO_DROPOUT,
    ),
    vision(
        "convnext",
        "ConvNext",
        "depthwise convolutions",
        hidden_sizes=[16, 32],
        depths=[2, 2],
        num_stages=2,
        patch_size=2,
        image_size=16,
    ),
    vision(
        "resnet",
        "ResNet",
        "BatchNorm",
        embedding_size=16,
        hidden_sizes=[16, 32],
        depths=[2, 2],
        layer_type="basic",
    ),
    Architecture(
        "segformer",
        "vision",
        "SegformerForSemanticSegmentation",
        segments,
        "SegformerConfig",
        {
            "num_encoder_blocks": 2,
            "depths": [1, 1],
            "sr_ratios": [2, 1],
            "hidden_sizes": [16, 32],
            "patch_sizes": [7, 3],
            "strides": [4, 2],
            "num_attention_heads": [2, 4],
            "mlp_ratios": [2, 2],
            "decoder_hidden_size": 16,
            "classifier_dropout_prob": 0.0,
            "drop_path_rate": 0.0,
            "num_labels": 3,
            **NO_DROPOUT,
        },
        "pyramid, BatchNorm",
    ),
    Architecture(
        "vit_mae",
        "vision",
        "ViTMAEForPreTraining",
        masked_images,
        "ViTMAEConfig",
        {
            **LAYERS,
            **PATCHES,
            **NO_DROPOUT,
            "decoder_hidden_size": 16,
            "decoder_num_hidden_layers": 2,
            "decoder_num_attention_heads": 2,
            "decoder_intermediate_size": 24,
            "mask_ratio": 0.5,
        },
        "random patches",
    ),
]

SPEECH = [
    Architecture(
        "wav2vec2",
        "speech",
        "Wav2Vec2ForCTC",
        waves,
        "Wav2Vec2Config",
        {
            **LAYERS,
            "vocab_size": VOCABULARY,
            "pad_token_id": 0,
            "hidden_dropout": 0.0,
            "activation_dropout": 0.0,
            "attention_dropout": 0.0,
            "feat_proj_dropout": 0.0,
            "final_dropout": 0.0,
            "layerdrop": 0.0,
            "apply_spec_augment": False,
            "conv_dim": [16, 16],
            "conv_kernel": [10, 3],
            "conv_stride": [5, 2],
            "num_feat_extract_layers": 2,
            "num_conv_pos_embeddings": 4,
            "num_conv_pos_embedding_groups": 2,
            "ctc_loss_reduction": "mean",
        },
        "CTC, a weight norm",
    ),
    Architecture(
        "whisper",
        "speech",
        "WhisperForConditionalGeneration",
        spectra,
        "WhisperConfig",
        {
            **TOKENS,
            "vocab_size": VOCABULARY,
            "d_model": HIDDEN,
            "encoder_layers": 2,
            "decoder_layers": 2,
            "encoder_attention_heads": 4,
            "decoder_attention_heads": 4,
            "encoder_ffn_dim": 48,
            "decoder_ffn_dim": 48,
            "num_mel_bins": 8,
            "max_source_positions": 16,
            "max_target_positions": 16,
            "dropout": 0.0,
            "decoder_start_token_id": 1,
        },
        "log-mel spectra",
    ),
    Architecture(
        "audio_spectrogram_transformer",
        "speech",
        "ASTForAudioClassification",
        sounds,
        "ASTConfig",
        {
            **LAYERS,
            **NO_DROPOUT,
            **THREE,
            "patch_size": 8,
            "frequency_stride": 4,
            "time_stride": 4,
            "max_length": 24,
            "num_mel_bins": 16,
        },
        "overlapping patches",
    ),
]

CLIP_TEXT: dict[str, Any] = {**SIZES, **TOKENS, "projection_dim": 16}
CLIP_VISION: dict[str, Any] = {**LAYERS, **PATCHES, "projection_dim": 16}

TOGETHER = [
    Architecture(
        "clip",
        "multimodal",
        "CLIPModel",
        captions,
        "CLIPConfig",
        {"text_config": CLIP_TEXT, "vision_config": CLIP_VISION, "projection_dim": 16},
        "contrastive",
    ),
    Architecture(
        "llava",
        "multimodal",
        "LlavaForConditionalGeneration",
        pictures_in_text,
        "LlavaConfig",
        {
            "text_config": {"model_type": "llama", **SIZES, **TOKENS},
            "vision_config": {"model_type": "clip_vision_model", **CLIP_VISION},
            "image_token_index": 3,
            "vision_feature_layer": -1,
        },
        "patches among tokens, which a frozen tower finds",
        frozen="model.vision_tower",
    ),
    Architecture(
        "vilt",
        "multimodal",
        "ViltForQuestionAnswering",
        questions,
        "ViltConfig",
        {**SIZES, **PATCHES, **NO_DROPOUT, **THREE, "max_image_length": -1},
        "patches beside tokens",
    ),
]

OTHERS = [
    Architecture(
        "patchtst",
        "series",
        "PatchTSTForPrediction",
        series,
        "PatchTSTConfig",
        {
            "num_input_channels": 2,
            "context_length": 16,
            "prediction_length": 4,
            "patch_length": 4,
            "patch_stride": 4,
            "d_model": HIDDEN,
            "ffn_dim": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "loss": "mse",
            "attention_dropout": 0.0,
            "positional_dropout": 0.0,
            "ff_dropout": 0.0,
            "head_dropout": 0.0,
        },
        "BatchNorm over series",
    ),
    Architecture(
        "unet",
        "diffusion",
        UNet,
        noise,
        note="as diffusers' UNet2DConditionModel: time, cross attention, skips",
    ),
]

SENSES = [*VISION, *SPEECH, *TOGETHER, *OTHERS]
