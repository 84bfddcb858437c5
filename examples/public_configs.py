"""What the config.json files of public checkpoints on the hub say, without the keys that start with an underscore.

PUBLIC: name of a pipeline folder -> its models. Repositories are in docs/checkpoints.md.
"""

from __future__ import annotations

from typing import Any

Model = dict[str, Any]

CLIP_L: Model = {
    "_class_name": "CLIPTextModel",
    "vocab_size": 49408,
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "hidden_act": "quick_gelu",
}
CLIP_H: Model = CLIP_L | {
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 23,
    "num_attention_heads": 16,
    "hidden_act": "gelu",
}
CLIP_L_PROJECTED: Model = CLIP_L | {"_class_name": "CLIPTextModelWithProjection", "projection_dim": 768}
CLIP_G_PROJECTED: Model = {
    "_class_name": "CLIPTextModelWithProjection",
    "vocab_size": 49408,
    "hidden_size": 1280,
    "intermediate_size": 5120,
    "num_hidden_layers": 32,
    "num_attention_heads": 20,
    "hidden_act": "gelu",
    "projection_dim": 1280,
}
T5_XXL: Model = {
    "_class_name": "T5EncoderModel",
    "vocab_size": 32128,
    "d_model": 4096,
    "d_kv": 64,
    "d_ff": 10240,
    "num_layers": 24,
    "num_heads": 64,
    "feed_forward_proj": "gated-gelu",
}
VAE: Model = {
    "_class_name": "AutoencoderKL",
    "act_fn": "silu",
    "block_out_channels": [128, 256, 512, 512],
    "down_block_types": ["DownEncoderBlock2D"] * 4,
    "in_channels": 3,
    "latent_channels": 4,
    "layers_per_block": 2,
    "norm_num_groups": 32,
    "out_channels": 3,
    "sample_size": 512,
    "up_block_types": ["UpDecoderBlock2D"] * 4,
}
VAE_SDXL: Model = VAE | {"sample_size": 1024, "scaling_factor": 0.13025, "force_upcast": True}
VAE_16: Model = VAE | {
    "latent_channels": 16,
    "sample_size": 1024,
    "force_upcast": True,
    "use_quant_conv": False,
    "use_post_quant_conv": False,
}
VAE_FLUX: Model = VAE_16 | {"scaling_factor": 0.3611, "shift_factor": 0.1159}
VAE_SD3: Model = VAE_16 | {"scaling_factor": 1.5305, "shift_factor": 0.0609}
FLUX: Model = {
    "_class_name": "FluxTransformer2DModel",
    "attention_head_dim": 128,
    "guidance_embeds": True,
    "in_channels": 64,
    "joint_attention_dim": 4096,
    "num_attention_heads": 24,
    "num_layers": 19,
    "num_single_layers": 38,
    "patch_size": 1,
    "pooled_projection_dim": 768,
}
UNET_SD15: Model = {
    "_class_name": "UNet2DConditionModel",
    "act_fn": "silu",
    "attention_head_dim": 8,
    "block_out_channels": [320, 640, 1280, 1280],
    "center_input_sample": False,
    "cross_attention_dim": 768,
    "down_block_types": ["CrossAttnDownBlock2D"] * 3 + ["DownBlock2D"],
    "downsample_padding": 1,
    "flip_sin_to_cos": True,
    "freq_shift": 0,
    "in_channels": 4,
    "layers_per_block": 2,
    "mid_block_scale_factor": 1,
    "norm_eps": 1e-05,
    "norm_num_groups": 32,
    "out_channels": 4,
    "sample_size": 64,
    "up_block_types": ["UpBlock2D"] + ["CrossAttnUpBlock2D"] * 3,
}
UNET_SD21: Model = UNET_SD15 | {
    "attention_head_dim": [5, 10, 20, 20],
    "cross_attention_dim": 1024,
    "sample_size": 96,
    "use_linear_projection": True,
    "upcast_attention": True,
}
UNET_SDXL: Model = UNET_SD15 | {
    "addition_embed_type": "text_time",
    "addition_time_embed_dim": 256,
    "attention_head_dim": [5, 10, 20],
    "block_out_channels": [320, 640, 1280],
    "cross_attention_dim": 2048,
    "down_block_types": ["DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"],
    "projection_class_embeddings_input_dim": 2816,
    "sample_size": 128,
    "transformer_layers_per_block": [1, 2, 10],
    "up_block_types": ["CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"],
    "use_linear_projection": True,
}
SD3: Model = {
    "_class_name": "SD3Transformer2DModel",
    "attention_head_dim": 64,
    "caption_projection_dim": 1536,
    "in_channels": 16,
    "joint_attention_dim": 4096,
    "num_attention_heads": 24,
    "num_layers": 24,
    "out_channels": 16,
    "patch_size": 2,
    "pooled_projection_dim": 2048,
    "pos_embed_max_size": 192,
    "sample_size": 128,
}
SD35_MEDIUM: Model = SD3 | {
    "dual_attention_layers": list(range(13)),
    "pos_embed_max_size": 384,
    "qk_norm": "rms_norm",
}
SD35_LARGE: Model = SD3 | {
    "caption_projection_dim": 2432,
    "num_attention_heads": 38,
    "num_layers": 38,
    "qk_norm": "rms_norm",
}
_OLDER: Model = {
    "activation_fn": "gelu-approximate",
    "attention_bias": True,
    "attention_head_dim": 72,
    "dropout": 0.0,
    "in_channels": 4,
    "norm_elementwise_affine": False,
    "norm_num_groups": 32,
    "num_attention_heads": 16,
    "num_embeds_ada_norm": 1000,
    "num_layers": 28,
    "num_vector_embeds": None,
    "only_cross_attention": False,
    "out_channels": 8,
    "patch_size": 2,
    "upcast_attention": False,
    "use_linear_projection": False,
}
DIT: Model = _OLDER | {
    "_class_name": "Transformer2DModel",
    "cross_attention_dim": None,
    "norm_type": "ada_norm_zero",
    "sample_size": 32,
}
PIXART_ALPHA: Model = _OLDER | {
    "_class_name": "Transformer2DModel",
    "attention_type": "default",
    "caption_channels": 4096,
    "cross_attention_dim": 1152,
    "double_self_attention": False,
    "norm_eps": 1e-06,
    "norm_type": "ada_norm_single",
    "sample_size": 128,
}
PIXART_SIGMA: Model = PIXART_ALPHA | {"interpolation_scale": 2, "use_additional_conditions": False}

_SD3_TEXT = {
    "text_encoder": CLIP_L_PROJECTED,
    "text_encoder_2": CLIP_G_PROJECTED,
    "text_encoder_3": T5_XXL,
}
PUBLIC: dict[str, dict[str, Model]] = {
    "FLUX.1-dev": {"transformer": FLUX, "text_encoder": CLIP_L, "text_encoder_2": T5_XXL, "vae": VAE_FLUX},
    "stable-diffusion-v1-5": {"unet": UNET_SD15, "text_encoder": CLIP_L, "vae": VAE},
    "stable-diffusion-2-1": {"unet": UNET_SD21, "text_encoder": CLIP_H, "vae": VAE | {"sample_size": 768}},
    "stable-diffusion-xl-base-1.0": {
        "unet": UNET_SDXL,
        "text_encoder": CLIP_L,
        "text_encoder_2": CLIP_G_PROJECTED,
        "vae": VAE_SDXL,
    },
    "stable-diffusion-3-medium": {"transformer": SD3, **_SD3_TEXT, "vae": VAE_SD3},
    "stable-diffusion-3.5-medium": {"transformer": SD35_MEDIUM, **_SD3_TEXT, "vae": VAE_SD3},
    "stable-diffusion-3.5-large": {"transformer": SD35_LARGE, **_SD3_TEXT, "vae": VAE_SD3},
    "DiT-XL-2-256": {"transformer": DIT, "vae": VAE | {"sample_size": 256}},
    "PixArt-XL-2-1024-MS": {"transformer": PIXART_ALPHA, "text_encoder": T5_XXL, "vae": VAE},
    "PixArt-Sigma-XL-2-1024-MS": {"transformer": PIXART_SIGMA, "text_encoder": T5_XXL, "vae": VAE_SDXL},
}
