"""Pipeline folders of every family with tiny random models, in the layout that diffusers reads too."""

import json
from pathlib import Path

import mindspore as ms
import numpy as np
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from dancegrpo.models import save_model
from dancegrpo.models.loading import build_model

CLIP_TOKENS, T5_TOKENS = 10, 12
SIZE = 16  # pixels of an image
"""Height and width; latents are half of it."""

_DDIM = {
    "_class_name": "DDIMScheduler",
    "num_train_timesteps": 1000,
    "beta_start": 0.00085,
    "beta_end": 0.012,
    "beta_schedule": "scaled_linear",
    "clip_sample": False,
    "set_alpha_to_one": False,
    "steps_offset": 1,
    "timestep_spacing": "leading",
}
_FLOW = {"_class_name": "FlowMatchEulerDiscreteScheduler", "num_train_timesteps": 1000, "shift": 3.0}
_DYNAMIC = _FLOW | {
    "use_dynamic_shifting": True,
    "base_shift": 0.5,
    "max_shift": 1.15,
    "base_image_seq_len": 256,
    "max_image_seq_len": 4096,
}
_CLIP = {
    "architectures": ["CLIPTextModel"],
    "model_type": "clip_text_model",
    "vocab_size": 514,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": CLIP_TOKENS,
    "bos_token_id": 512,
    "eos_token_id": 513,
    "pad_token_id": 513,
}
_PROJECTED = _CLIP | {"architectures": ["CLIPTextModelWithProjection"], "projection_dim": 16}
_UNET = {
    "_class_name": "UNet2DConditionModel",
    "sample_size": SIZE // 2,
    "block_out_channels": [16, 16],
    "down_block_types": ["CrossAttnDownBlock2D", "DownBlock2D"],
    "up_block_types": ["UpBlock2D", "CrossAttnUpBlock2D"],
    "layers_per_block": 1,
    "norm_num_groups": 4,
    "attention_head_dim": 2,
    "cross_attention_dim": 32,
}
_TRANSFORMER = {"num_attention_heads": 2, "num_layers": 1, "in_channels": 4, "sample_size": SIZE // 2}
_PIXART = _TRANSFORMER | {
    "_class_name": "PixArtTransformer2DModel",
    "attention_head_dim": 12,
    "cross_attention_dim": 24,
    "caption_channels": 24,
}


def _t5(width: int) -> dict:
    return {
        "architectures": ["T5EncoderModel"],
        "model_type": "t5",
        "vocab_size": 48,
        "d_model": width,
        "d_kv": 8,
        "d_ff": 32,
        "num_layers": 1,
        "num_heads": 2,
        "relative_attention_num_buckets": 8,
        "relative_attention_max_distance": 16,
        "feed_forward_proj": "gated-gelu",
        "is_encoder_decoder": False,
        "use_cache": False,
    }


def _vae(**changes) -> dict:
    return {
        "_class_name": "AutoencoderKL",
        "block_out_channels": [8, 8],
        "down_block_types": ["DownEncoderBlock2D"] * 2,
        "up_block_types": ["UpDecoderBlock2D"] * 2,
        "norm_num_groups": 4,
        "sample_size": SIZE,
    } | changes


_SD = {"text_encoder": _CLIP, "unet": _UNET, "vae": _vae(), "scheduler": _DDIM}
FAMILIES: dict[str, tuple[str, dict[str, dict]]] = {
    "flux": (
        "FluxPipeline",
        {
            "text_encoder": _CLIP,
            "text_encoder_2": _t5(24),
            "transformer": {
                "_class_name": "FluxTransformer2DModel",
                "in_channels": 16,
                "num_layers": 1,
                "num_single_layers": 1,
                "attention_head_dim": 16,
                "num_attention_heads": 2,
                "joint_attention_dim": 24,
                "pooled_projection_dim": 32,
                "guidance_embeds": True,
                "axes_dims_rope": [4, 6, 6],
            },
            "vae": _vae(
                scaling_factor=0.36, shift_factor=0.12, use_quant_conv=False, use_post_quant_conv=False
            ),
            "scheduler": _DYNAMIC,
        },
    ),
    "sd15": ("StableDiffusionPipeline", _SD),
    "sd21": (
        "StableDiffusionPipeline",
        _SD | {"scheduler": _DDIM | {"prediction_type": "v_prediction"}},
    ),
    "sdxl": (
        "StableDiffusionXLPipeline",
        {
            "text_encoder": _CLIP,
            "text_encoder_2": _PROJECTED,
            "unet": _UNET
            | {
                "cross_attention_dim": 64,
                "use_linear_projection": True,
                "addition_embed_type": "text_time",
                "addition_time_embed_dim": 8,
                "projection_class_embeddings_input_dim": 64,
            },
            "vae": _vae(scaling_factor=0.13),
            "scheduler": _DDIM,
        },
    ),
    "sd3": (
        "StableDiffusion3Pipeline",
        {
            "text_encoder": _PROJECTED,
            "text_encoder_2": _PROJECTED,
            "text_encoder_3": _t5(72),
            "transformer": _TRANSFORMER
            | {
                "_class_name": "SD3Transformer2DModel",
                "num_layers": 2,
                "attention_head_dim": 16,
                "joint_attention_dim": 72,
                "caption_projection_dim": 32,
                "pooled_projection_dim": 32,
                "out_channels": 4,
                "pos_embed_max_size": 8,
            },
            "vae": _vae(scaling_factor=1.5, shift_factor=0.06),
            "scheduler": _FLOW,
        },
    ),
    "dit": (
        "DiTPipeline",
        {
            "transformer": _TRANSFORMER
            | {"_class_name": "DiTTransformer2DModel", "attention_head_dim": 12, "out_channels": 8},
            "vae": _vae(),
            "scheduler": _DDIM | {"beta_schedule": "linear", "beta_start": 0.0001, "beta_end": 0.02},
        },
    ),
    # The alpha of 1024 pixels: its pipeline tells the size only to models that were made for it.
    "pixart_alpha": (
        "PixArtAlphaPipeline",
        {
            "text_encoder": _t5(24),
            "transformer": _PIXART | {"sample_size": 128},
            "vae": _vae(),
            "scheduler": _DDIM | {"beta_schedule": "linear", "beta_start": 0.0001, "beta_end": 0.02},
        },
    ),
    "pixart_sigma": (
        "PixArtSigmaPipeline",
        {
            "text_encoder": _t5(24),
            "transformer": _PIXART | {"use_additional_conditions": False},
            "vae": _vae(),
            "scheduler": _DDIM,
        },
    ),
}


def save_pipeline(
    family: str, folder: Path, without: tuple[str, ...] = (), changes: dict[str, dict] | None = None, **extra
) -> Path:
    """Writes the folder of a family with random weights.

    Args:
        without: components that are left out, as None in the index.
        changes: by component, options in place of those above.
        extra: further entries of model_index.json.
    """
    name, components = FAMILIES[family]
    index = {"_class_name": name, "_diffusers_version": "0.36.0", **extra}
    for number, (component, config) in enumerate(components.items()):
        if component in without:
            index[component] = index[component.replace("text_encoder", "tokenizer")] = [None, None]
            continue
        config = config | (changes or {}).get(component, {})
        library = "transformers" if component.startswith("text_encoder") else "diffusers"
        index[component] = [library, config.get("_class_name") or config["architectures"][0]]
        if component == "scheduler":
            _write(folder / component / "scheduler_config.json", config)
            continue
        save_random(config, folder / component, seed=number)
        if library == "transformers":
            tokenizer = component.replace("text_encoder", "tokenizer")
            t5 = config["model_type"] == "t5"
            index[tokenizer] = ["transformers", "T5TokenizerFast" if t5 else "CLIPTokenizer"]
            (save_t5_tokenizer if t5 else save_clip_tokenizer)(folder / tokenizer)
    if family == "dit":
        index["id2label"] = {"0": "tench, Tinca tinca", "1": "goldfish", "2": "great white shark"}
    _write(folder / "model_index.json", index)
    return folder


def save_random(config: dict, folder: Path, seed: int = 0) -> None:
    """A model of that config whose every parameter is random, so that none of them is without effect."""
    model, rng = build_model(config, str(folder)), np.random.default_rng(seed)
    for parameter in model.get_parameters():
        shape, name = tuple(parameter.shape), parameter.name
        if name.endswith("pos_embed"):
            continue  # a table, not a weight
        scale = 0.1 if len(shape) < 2 else 1.5 / np.sqrt(np.prod(shape[1:]))
        values = scale * rng.standard_normal(shape) + (
            len(shape) == 1 and "norm" in name and "weight" in name
        )
        parameter.set_data(ms.Tensor(values.astype(np.float32)))
    save_model(model, folder)


def save_clip_tokenizer(folder: Path) -> None:
    """CLIP's byte-level tokenizer without any merges."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    letters = [chr(byte) for byte in printable] + [chr(256 + i) for i in range(len(others))]
    tokens = [*letters, *(letter + "</w>" for letter in letters), "<|startoftext|>", "<|endoftext|>"]
    _write(folder / "vocab.json", {token: i for i, token in enumerate(tokens)})
    (folder / "merges.txt").write_text("#version: 0.2\n")
    special = {
        "bos_token": tokens[-2],
        "eos_token": tokens[-1],
        "unk_token": tokens[-1],
        "pad_token": tokens[-1],
    }
    _write(
        folder / "tokenizer_config.json",
        {"tokenizer_class": "CLIPTokenizer", "model_max_length": CLIP_TOKENS, **special},
    )
    _write(folder / "special_tokens_map.json", special)


def save_t5_tokenizer(folder: Path) -> None:
    """T5's kind of tokenizer whose pieces are letters."""
    pieces = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("\u2581", -2.0)]
    pieces += [(letter, -3.0) for letter in "abcdefghijklmnopqrstuvwxyz0123456789"]
    tokenizer = Tokenizer(models.Unigram(pieces, unk_id=2))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    tokenizer.add_special_tokens(["<pad>", "</s>", "<unk>"])
    folder.mkdir(parents=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    special = {"eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}
    _write(
        folder / "tokenizer_config.json",
        {"tokenizer_class": "T5TokenizerFast", "model_max_length": 512, "extra_ids": 0, **special},
    )


def _write(file: Path, content: dict) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(content, indent=1) + "\n")
