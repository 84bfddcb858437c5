"""Fresh random models of diffusers and transformers here, and ours there, at other sizes than the stored cases have.

Configs are those of tests/golden with changes; latents that are no square, odd numbers of tokens, batches of 1 and 3.
Needs torch, diffusers and transformers, which nothing else here does.
"""

import json
import sys
import zlib
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")
diffusers = pytest.importorskip("diffusers")
transformers = pytest.importorskip("transformers")

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from dancegrpo.runtime.setup import setup_runtime  # noqa: E402

setup_runtime(compile_cache=False)

from golden_models import MODELS, GoldenCase, measure  # noqa: E402
from mindspore import Tensor  # noqa: E402

from dancegrpo.models import load_model, save_model  # noqa: E402

# Golden case whose config is taken -> changes of a first and of a second size.
SIZES = {
    "flux_guidance": (
        {"num_attention_heads": 3, "num_layers": 1},
        {"attention_head_dim": 24, "axes_dims_rope": [4, 10, 10], "num_layers": 1, "num_single_layers": 3},
    ),
    "flux_no_guidance": ({"in_channels": 8}, {"num_layers": 2, "num_attention_heads": 1}),
    "sd3_medium_like": (
        {"num_layers": 3},
        {"num_attention_heads": 2, "caption_projection_dim": 16, "in_channels": 6},
    ),
    "sd35_like_qknorm_dual": (
        {"num_layers": 3, "dual_attention_layers": [0, 1]},
        {"attention_head_dim": 16, "caption_projection_dim": 64, "dual_attention_layers": [1]},
    ),
    "unet_sd15_like": (
        {"layers_per_block": 2, "attention_head_dim": 2},
        {
            "use_linear_projection": True,
            "attention_head_dim": [4, 8],
            "cross_attention_dim": 12,
            "norm_num_groups": 4,
        },
    ),
    "unet_sdxl_like": (
        {"transformer_layers_per_block": [1, 3], "block_out_channels": [8, 16]},
        {"addition_time_embed_dim": 4, "projection_class_embeddings_input_dim": 36, "layers_per_block": 2},
    ),
    "dit_xl_like": (
        {"num_attention_heads": 3, "num_layers": 1},
        {"attention_head_dim": 24, "sample_size": 12},
    ),
    "pixart_alpha_like_micro": (
        {"num_layers": 2},
        {"num_attention_heads": 6, "cross_attention_dim": 48, "caption_channels": 10},
    ),
    "pixart_sigma_like": (
        {"num_layers": 1, "sample_size": 16},
        {"num_attention_heads": 3, "cross_attention_dim": 48},
    ),
    "vae_sd_like": ({"layers_per_block": 2}, {"block_out_channels": [8, 16], "norm_num_groups": 4}),
    "vae_flux_like": ({"layers_per_block": 2}, {"block_out_channels": [16, 8, 16], "latent_channels": 4}),
    "clip_text_gelu": ({"num_hidden_layers": 3}, {"hidden_size": 24, "num_attention_heads": 2}),
    "clip_text_quick_gelu_legacy_eos": (
        {"intermediate_size": 60},
        {"hidden_size": 16, "num_attention_heads": 4},
    ),
    "clip_text_with_projection": ({"projection_dim": 12}, {"num_hidden_layers": 2, "intermediate_size": 40}),
    "clip_dual_gelu": ({"projection_dim": 20}, {"logit_scale_init_value": 1.5}),
    "siglip_dual": ({}, {}),
    "t5_encoder_gated_gelu": (
        {"num_layers": 1, "num_heads": 2},
        {"d_kv": 12, "relative_attention_num_buckets": 12},
    ),
    "t5_encoder_relu": ({"num_layers": 3}, {"num_heads": 3, "d_ff": 40}),
    "llama_gqa": (
        {"num_key_value_heads": 1},
        {"num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 4},
    ),
    "llama3_rope": ({"num_hidden_layers": 1}, {"head_dim": 12, "num_key_value_heads": 4}),
}
BATCHES = (1, 3)
ROWS, COLUMNS, TOKENS = 6, 10, 7  # latents and text tokens
IN_SHARDS, IN_FLOAT16 = ("sd3_medium_like", 0), ("unet_sdxl_like", 0)


def random_reference(name, size, rng):
    """Their model with random weights: diffusers begins some layers with zeros, and a zero hides mistakes."""
    config = json.loads((MODELS / name / "config.json").read_text()) | SIZES[name][size]
    if "_class_name" in config:
        model = getattr(diffusers, config["_class_name"]).from_config(config)
    else:
        model_class = getattr(transformers, config["architectures"][0])
        model = model_class(model_class.config_class.from_dict(config))
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            noise = rng.standard_normal(tuple(parameter.shape)).astype(np.float32)
            if parameter.ndim > 1:
                noise /= np.sqrt(np.prod(parameter.shape[1:]))
            elif key.endswith("logit_scale"):
                continue
            else:
                noise = 0.1 * noise + float("norm" in key and key.endswith("weight"))
            parameter.copy_(torch.from_numpy(noise.reshape(tuple(parameter.shape))))
    return model.eval()


def random_inputs(model, batch, rng):
    """Flat inputs as our models take them, by name."""
    config, kind = model.config, type(model).__name__

    def normal(*shape):
        return rng.standard_normal(shape).astype(np.float32)

    def integers(high, *shape):
        return rng.integers(0, high, shape)

    if kind == "AutoencoderKL":
        factor = 2 ** (len(config.block_out_channels) - 1)
        latents = normal(batch, config.latent_channels, 3, 5)
        return {"pixels": normal(batch, 3, 4 * factor, 3 * factor), "latents": latents}
    if kind == "UNet2DConditionModel":
        inputs = {
            "sample": normal(batch, config.in_channels, ROWS, COLUMNS),
            "timestep": integers(1000, batch),
        }
        inputs["encoder_hidden_states"] = normal(batch, TOKENS, config.cross_attention_dim)
        if config.addition_embed_type:
            pooled = config.projection_class_embeddings_input_dim - 6 * config.addition_time_embed_dim
            inputs |= {"text_embeds": normal(batch, pooled), "time_ids": 8.0 * np.abs(normal(batch, 6))}
        return inputs
    if kind == "FluxTransformer2DModel":
        grid = np.stack(np.meshgrid(np.arange(3), np.arange(5), indexing="ij"), -1).reshape(15, 2)
        inputs = {
            "hidden_states": normal(batch, 15, config.in_channels),
            "encoder_hidden_states": normal(batch, TOKENS, config.joint_attention_dim),
            "pooled_projections": normal(batch, config.pooled_projection_dim),
            "timestep": rng.uniform(size=batch).astype(np.float32),
            "img_ids": np.concatenate([np.zeros((15, 1)), grid], 1).astype(np.float32),
            "txt_ids": np.zeros((TOKENS, 3), np.float32),
        }
        return inputs | ({"guidance": np.full(batch, 3.5, np.float32)} if config.guidance_embeds else {})
    if kind.endswith("2DModel"):
        inputs = {
            "hidden_states": normal(batch, config.in_channels, ROWS, COLUMNS),
            "timestep": integers(1000, batch),
        }
        if kind == "DiTTransformer2DModel":  # diffusers' takes squares only
            inputs["hidden_states"] = inputs["hidden_states"][..., :ROWS]
            return inputs | {"class_labels": integers(config.num_embeds_ada_norm, batch)}
        if kind == "SD3Transformer2DModel":
            inputs["timestep"] = inputs["timestep"].astype(np.float32)
            inputs["pooled_projections"] = normal(batch, config.pooled_projection_dim)
            return inputs | {"encoder_hidden_states": normal(batch, TOKENS, config.joint_attention_dim)}
        mask = (np.arange(TOKENS) < np.arange(TOKENS, TOKENS - batch, -1)[:, None]).astype(np.float32)
        inputs |= {"encoder_hidden_states": normal(batch, TOKENS, config.caption_channels)}
        inputs |= {"encoder_attention_mask": mask}
        if config.use_additional_conditions:
            inputs["resolution"] = np.tile(np.float32([[48, 80]]), (batch, 1))
            inputs["aspect_ratio"] = np.full((batch, 1), 0.6, np.float32)
        return inputs
    return text_inputs(config, kind, batch, integers, normal)


def text_inputs(config, kind, batch, integers, normal):
    text = getattr(config, "text_config", config)
    ids = 3 + integers(text.vocab_size - 12, batch, TOKENS)
    if (
        "CLIP" in kind
    ):  # pools at the end token, which is the largest number where the config has its old value
        end = text.eos_token_id if text.eos_token_id != 2 else text.vocab_size - 1
        ids[ids == end] = 3
        for row in range(batch):
            ids[row, TOKENS - 1 - row :] = end
    inputs = {"input_ids": ids}
    if kind.startswith("T5"):
        inputs["attention_mask"] = (
            np.arange(TOKENS) < np.arange(TOKENS, TOKENS - batch, -1)[:, None]
        ).astype(int)
    if hasattr(config, "vision_config"):
        size = config.vision_config.image_size
        inputs["pixel_values"] = normal(batch, 3, size, size)
    return inputs


def call(model, inputs):
    """What the reference gives, by our names of it."""
    inputs = dict(inputs)
    if isinstance(model, diffusers.AutoencoderKL):
        posterior = model.encode(inputs["pixels"]).latent_dist
        decoded = model.decode(inputs["latents"]).sample
        return {"mean": posterior.mean, "logvar": posterior.logvar, "decoded": decoded}
    added = {
        key: inputs.pop(key)
        for key in ("text_embeds", "time_ids", "resolution", "aspect_ratio")
        if key in inputs
    }
    found = model(**inputs, **({"added_cond_kwargs": added} if added else {}))
    names = (
        "sample",
        "logits_per_image",
        "image_embeds",
        "text_embeds",
        "last_hidden_state",
        "pooler_output",
    )
    skipped = ("pooler_output",) if "with_projection" in str(type(model)) else ()
    return {key: found[key] for key in names if key in found and key not in skipped}


def with_numbers(reference, inputs, rng):
    """Outputs, cotangents and gradients of the reference, named as the golden set names them."""
    given = {key: torch.from_numpy(array) for key, array in inputs.items()}
    wanted = [k for k in given if k in ("sample", "hidden_states", "pixels", "latents", "pixel_values")]
    for key in wanted:
        given[key].requires_grad_(True)
    outputs = call(reference, given)
    stored = {f"out_{key}": value.detach().numpy() for key, value in outputs.items()}
    cotangents = {
        key: rng.standard_normal(tuple(value.shape)).astype(np.float32) for key, value in outputs.items()
    }
    sum((value * torch.from_numpy(cotangents[key])).sum() for key, value in outputs.items()).backward()
    stored |= {f"cot_{key}": array for key, array in cotangents.items()}
    stored |= {f"grad_in_{key}": given[key].grad.numpy() for key in wanted}
    gradients = {
        k: p.grad.numpy() for k, p in reference.named_parameters() if p.grad is not None and p.ndim > 1
    }
    largest = sorted(gradients, key=lambda key: -gradients[key].size)[:3]
    return stored | {f"grad_w__{key}": gradients[key] for key in largest}, largest


@pytest.mark.parametrize("size", (0, 1))
@pytest.mark.parametrize("name", SIZES)
def test_fresh_models_agree_in_both_directions(name, size, tmp_path):
    rng = np.random.default_rng([size, zlib.crc32(name.encode())])
    reference = random_reference(name, size, rng)
    if (name, size) == IN_FLOAT16:
        reference = reference.half()
    shards = {"max_shard_size": "50KB"} if (name, size) == IN_SHARDS else {}
    reference.save_pretrained(tmp_path / "theirs", **shards)
    reference = reference.float()
    inputs = random_inputs(reference, BATCHES[size], rng)
    stored, largest = with_numbers(reference, inputs, rng)
    assert all(np.abs(array).max() > 1e-6 for array in stored.values())

    model = load_model(tmp_path / "theirs")
    assert (len(list((tmp_path / "theirs").glob("*.safetensors"))) > 1) == bool(shards)
    tensors = {key: Tensor(a.astype(np.int32) if a.dtype == np.int64 else a) for key, a in inputs.items()}
    errors = measure(GoldenCase(model, tensors, stored), largest)
    outputs, gradients = max(errors.outputs.values()), max(errors.gradients.values())
    print(f"\n{name}, size {size}: outputs {outputs:.1e}, gradients {gradients:.1e}")
    assert outputs < 1e-4, errors.outputs
    assert gradients < 1e-3, errors.gradients

    save_model(model, tmp_path / "ours")
    again = type(reference).from_pretrained(tmp_path / "ours").eval()
    expected, found = reference.state_dict(), again.state_dict()
    assert expected.keys() == found.keys() and all(torch.equal(expected[key], found[key]) for key in expected)
    with torch.no_grad():
        outputs = call(again, {key: torch.from_numpy(array) for key, array in inputs.items()})
    for key, value in outputs.items():
        assert np.array_equal(value.numpy(), stored[f"out_{key}"]), key
