"""The U-Nets and the convolutional autoencoders: their kernels, configs and what they refuse."""

import json
import sys
from pathlib import Path

import mindspore as ms
import numpy as np
import pytest
from golden_models import MODELS, load_case, relative
from mindspore import Tensor, nn, ops
from safetensors.numpy import load_file, save_file

sys.path.append(str(Path(__file__).resolve().parent.parent / "examples"))
from public_configs import PUBLIC

from dancegrpo.config import ConfigError
from dancegrpo.models import load_model, save_model
from dancegrpo.models.autoencoder_kl import AutoencoderKLConfig
from dancegrpo.models.layers import set_compute_dtype
from dancegrpo.models.loading import build_model, named_parameters
from dancegrpo.models.saving import parameter_arrays
from dancegrpo.ops import Convolution, GroupNorm
from dancegrpo.ops import convolution as convolution_module
from dancegrpo.runtime.setup import setup_runtime

setup_runtime(compile_cache=False)


def test_an_autoencoder_that_overflows_in_float16_keeps_float32_there():
    model = load_model(MODELS / "vae_sd_like", dtype=ms.float16)
    assert model.config.force_upcast and model.decoder.conv_in.compute_dtype == ms.float32
    assert set_compute_dtype(model, ms.bfloat16).decoder.conv_in.compute_dtype == ms.bfloat16
    config = json.loads((MODELS / "vae_sd_like" / "config.json").read_text()) | {"force_upcast": False}
    model = set_compute_dtype(build_model(config, "test"), ms.float16)
    assert model.decoder.conv_in.compute_dtype == ms.float16


def test_size_and_batch_are_free_and_samples_do_not_mix():
    config = _SD15_CONFIG | {
        "block_out_channels": [8, 16],
        "cross_attention_dim": 20,
        "down_block_types": ["DownBlock2D"] * 2,
        "layers_per_block": 1,
        "norm_num_groups": 4,
        "up_block_types": ["UpBlock2D"] * 2,
    }
    model = build_model(config, "test")
    rng = np.random.default_rng(0)
    sample = rng.standard_normal((3, 4, 5, 8)).astype(np.float32)  # odd: the way up returns to 5, not to 6
    states = rng.standard_normal((3, 7, 20)).astype(np.float32)
    timestep = np.float32([1.0, 500.5, 999.0])
    together = model(Tensor(sample), Tensor(timestep), Tensor(states))[0].asnumpy()
    alone = model(Tensor(sample[1:2]), Tensor(timestep[1:2]), Tensor(states[1:2]))[0].asnumpy()
    assert together.shape == sample.shape and relative(together[1:2], alone) < 1e-5


def test_added_conditions_are_asked_for_where_the_model_has_them():
    case = load_case("unet_sdxl_like")
    del case.inputs["time_ids"]
    with pytest.raises(ValueError, match="text_embeds and time_ids are required"):
        case.model(**case.inputs)


def test_float16_covers_convolutions():
    model = load_model(MODELS / "unet_sd15_like", dtype=ms.float16)
    assert model.conv_in.compute_dtype == model.down_blocks[0].resnets[0].conv1.compute_dtype == ms.float16


_SD15_CONFIG = PUBLIC["stable-diffusion-v1-5"]["unet"] | {"block_out_channels": [32, 64, 96, 96]}


def test_the_published_config_of_sd15_builds_all_its_parameters():
    names = named_parameters(build_model(_SD15_CONFIG, "sd15"))
    assert len(names) == 686  # as many tensors as the checkpoint has
    assert tuple(names["up_blocks.2.resnets.2.conv1.weight"].shape) == (64, 96, 3, 3)
    assert tuple(names["down_blocks.1.attentions.1.proj_in.weight"].shape) == (64, 64, 1, 1)


@pytest.mark.parametrize(
    "change, words",
    [
        ({"class_embed_type": "timestep"}, "class_embed_type is 'timestep'.*valid: None"),
        ({"addition_embed_type": "image"}, "addition_embed_type is 'image'.*valid: None, 'text_time'"),
        ({"addition_embed_type": "text_time"}, "needs addition_time_embed_dim"),
        ({"dual_cross_attention": True}, "dual_cross_attention is True.*valid: False"),
        ({"only_cross_attention": [True, False, False, False]}, "only_cross_attention is .*valid: False"),
        ({"num_class_embeds": 1000}, "num_class_embeds is 1000"),
        ({"time_cond_proj_dim": 256}, "time_cond_proj_dim is 256"),
        ({"down_block_types": ["ResnetDownsampleBlock2D"] * 4}, "has 'ResnetDownsampleBlock2D'.*DownBlock2D"),
        ({"transformer_layers_per_block": [[0], [1, 2], [1], [1]]}, "one whole number for each block"),
        ({"attention_head_dim": [8, 8, 8]}, "attention_head_dim has 3 entries"),
        ({"attention_head_dim": 7}, "attention_head_dim: 7"),
        ({"no_such_option": 1}, "no_such_option"),
    ],
)
def test_options_of_a_unet_that_are_not_supported_are_named(change, words):
    with pytest.raises(ConfigError, match=words):
        build_model(_SD15_CONFIG | change, "test")


def test_options_of_an_autoencoder_that_are_not_supported_are_named():
    for change in (
        {"latents_mean": (0.0,) * 4},
        {"act_fn": "relu"},
        {"down_block_types": ("AttnDownEncoderBlock2D",)},
    ):
        name, value = next(iter(change.items()))
        with pytest.raises(ValueError, match=f"{name} is .*{np.ravel(value)[0]}.*valid: "):
            AutoencoderKLConfig(**change)


def test_an_autoencoder_with_older_names_loads(tmp_path):
    source = MODELS / "vae_sd_like"
    (tmp_path / "config.json").write_text((source / "config.json").read_text())
    older = {"to_q": "query", "to_k": "key", "to_v": "value", "to_out.0": "proj_attn"}
    weights = {}
    for name, array in load_file(source / "diffusion_pytorch_model.safetensors").items():
        for new, old in older.items():
            name = name.replace(f"attentions.0.{new}.", f"attentions.0.{old}.")
        weights[name] = array[:, :, None, None] if name.endswith("proj_attn.weight") else array
    save_file(weights, tmp_path / "diffusion_pytorch_model.safetensors")
    assert "encoder.mid_block.attentions.0.proj_attn.weight" in weights
    older, newer = (parameter_arrays(load_model(folder)) for folder in (tmp_path, source))
    assert older.keys() == newer.keys()
    assert all(np.array_equal(older[name], newer[name]) for name in newer)


@pytest.mark.parametrize("name", ["unet_sdxl_like", "vae_flux_like"])
def test_what_is_saved_is_what_diffusers_saved(tmp_path, name):
    save_model(load_model(MODELS / name), tmp_path)
    saved, reference = (
        {
            key: value
            for key, value in json.loads((folder / "config.json").read_text()).items()
            if key != "_diffusers_version"
        }
        for folder in (tmp_path, MODELS / name)
    )
    assert saved == reference
    saved, reference = (
        load_file(folder / "diffusion_pytorch_model.safetensors") for folder in (tmp_path, MODELS / name)
    )
    assert saved.keys() == reference.keys()
    assert all(np.array_equal(saved[key], reference[key]) for key in reference)


class _Slope(nn.Cell):
    def __init__(self, layer, count):
        super().__init__()
        self.layer = layer
        self.gradient = ops.value_and_grad(self._loss, tuple(range(count)), has_aux=True)

    def _loss(self, *inputs):
        y = self.layer(*inputs)
        return (y * y * y).sum(), y

    def construct(self, *inputs):
        (_, y), gradients = self.gradient(*inputs)
        return (y, *gradients)


@pytest.mark.parametrize(
    "kernel, stride, padding, most",
    [(3, 1, 1, 2**26), (3, 2, (0, 1, 0, 1), 2**26), (3, 2, 1, 600), (1, 1, 0, 100)],
)
def test_convolution_equals_the_framework_kernel(monkeypatch, kernel, stride, padding, most):
    """Also with windows in several parts, which is what `most` does."""
    monkeypatch.setattr(convolution_module, "_MAX_COLUMNS", most)
    rng = np.random.default_rng(0)
    x = Tensor(rng.standard_normal((2, 4, 6, 9)).astype(np.float32))
    weight = Tensor(rng.standard_normal((5, 4, kernel, kernel)).astype(np.float32))
    ours, theirs = (
        _Slope(Convolution(4, 5, kernel, stride, padding, device=device), 2)(x, weight)
        for device in ("CPU", "Ascend")
    )
    for a, b in zip(ours, theirs, strict=True):
        assert a.shape == b.shape and relative(a.asnumpy(), b.asnumpy()) < 1e-5


def test_group_norm_equals_the_framework_kernel():
    rng = np.random.default_rng(0)
    x = Tensor(rng.standard_normal((2, 12, 5, 3)).astype(np.float32) * 3 + 1)
    ours, theirs = (_Slope(GroupNorm(4, 12, 1e-5, device=device), 1)(x) for device in ("CPU", "Ascend"))
    for a, b in zip(ours, theirs, strict=True):
        assert relative(a.asnumpy(), b.asnumpy()) < 1e-4
    with pytest.raises(ValueError, match="12 channels cannot be split into 5"):
        GroupNorm(5, 12)
