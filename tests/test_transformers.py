"""SD3, DiT and PixArt transformers: their parts, published configs and what they refuse."""

import dataclasses
import json
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.append(str(Path(__file__).resolve().parent.parent / "examples"))
from public_configs import PUBLIC

from dancegrpo.runtime.setup import setup_runtime

setup_runtime(compile_cache=False)

import mindspore as ms  # noqa: E402
from golden_models import MODELS, load_case, relative  # noqa: E402
from mindspore import Tensor, ops  # noqa: E402

from dancegrpo.config import ConfigError  # noqa: E402
from dancegrpo.models import load_model, save_model  # noqa: E402
from dancegrpo.models.dit import DiTConfig, DiTTransformer2DModel  # noqa: E402
from dancegrpo.models.patches import PatchEmbed, sincos_table, unpatchify  # noqa: E402
from dancegrpo.models.pixart import PixArtConfig  # noqa: E402
from dancegrpo.models.sd3 import SD3Config  # noqa: E402

CASES = (
    "sd3_medium_like",
    "sd35_like_qknorm_dual",
    "dit_xl_like",
    "pixart_alpha_like_micro",
    "pixart_sigma_like",
)


@pytest.mark.parametrize("name", CASES)
def test_what_is_saved_is_what_was_read(name, tmp_path):
    from safetensors.numpy import load_file

    save_model(load_model(MODELS / name), tmp_path)
    read, saved = (json.loads((folder / "config.json").read_text()) for folder in (MODELS / name, tmp_path))
    read.pop("_diffusers_version")
    assert saved == read
    file = "diffusion_pytorch_model.safetensors"
    weights, again = load_file(MODELS / name / file), load_file(tmp_path / file)
    assert weights.keys() == again.keys()
    assert all(np.array_equal(weights[key], again[key]) for key in weights)


def test_positions_of_the_stored_table_are_computed_alike():
    """The reference's table, from its weights file, against ours, and its middle under a latent that is no square."""
    model = load_model(MODELS / "sd35_like_qknorm_dual")
    stored = model.pos_embed.pos_embed.asnumpy()[0]
    assert np.abs(stored - sincos_table(12, 12, 32, 4, 1.0)).max() < 1e-6
    model.pos_embed.proj.weight.set_data(ops.zeros_like(model.pos_embed.proj.weight))
    model.pos_embed.proj.bias.set_data(ops.zeros_like(model.pos_embed.proj.bias))
    positions = model.pos_embed(ops.zeros((1, 4, 6, 20), ms.float32)).asnumpy()
    assert np.array_equal(positions.reshape(3, 10, 32), stored.reshape(12, 12, 32)[4:7, 1:11])


def test_patch_embedding_is_the_convolution_it_stands_for():
    embed = PatchEmbed(3, 8, 2, sample_size=8, interpolation_scale=2.0)
    rng = np.random.default_rng(0)
    latents = rng.standard_normal((2, 3, 4, 10)).astype(np.float32)
    tokens = embed(Tensor(latents)).asnumpy()
    weight = embed.proj.weight.asnumpy()
    for row, column in ((0, 0), (1, 3), (1, 4)):
        patch = latents[:, :, 2 * row : 2 * row + 2, 2 * column : 2 * column + 2]
        # A grid of 2 x 5 spans the 4 x 4 positions of the sample size, halved by the interpolation scale.
        position = [4 / 5 * column / 2, 4 / 2 * row / 2]
        angle = np.outer(position, [1.0, 0.01])
        added = np.concatenate([np.concatenate([np.sin(a), np.cos(a)]) for a in angle])
        expected = np.einsum("bcpq,dcpq->bd", patch, weight) + added
        assert np.abs(tokens[:, 5 * row + column] - expected).max() < 1e-5


def test_unpatchify_puts_every_patch_back_in_its_place():
    image = np.arange(2 * 3 * 4 * 6, dtype=np.float32).reshape(2, 3, 4, 6)
    tokens = image.reshape(2, 3, 2, 2, 3, 2).transpose(0, 2, 4, 3, 5, 1).reshape(2, 6, 12)
    assert np.array_equal(unpatchify(Tensor(tokens), 4, 6, 2).asnumpy(), image)


def test_masked_text_tokens_have_no_say():
    case = load_case("pixart_sigma_like")
    model, io, inputs = case.model, case.stored, case.inputs
    text = io["in_encoder_hidden_states"].copy()
    text[io["in_encoder_attention_mask"] == 0] = 7.0
    changed = model(**{**inputs, "encoder_hidden_states": Tensor(text)})[0].asnumpy()
    assert relative(changed, io["out_sample"]) < 2e-5
    inputs.pop("encoder_attention_mask")
    everything = model(**inputs)[0].asnumpy()
    assert relative(everything[:1], io["out_sample"][:1]) < 2e-5  # its mask is all ones
    assert relative(everything[1:], io["out_sample"][1:]) > 1e-4


def test_size_conditions_are_asked_for():
    case = load_case("pixart_alpha_like_micro")
    case.inputs.pop("resolution")
    with pytest.raises(ValueError, match="needs resolution and aspect_ratio"):
        case.model(**case.inputs)


@pytest.mark.parametrize(
    "shape, words",
    [((1, 4, 7, 8), "7 x 8 cannot be cut into patches of 2"), ((1, 4, 8, 26), "pos_embed_max_size is 12")],
)
def test_latents_that_do_not_fit_are_refused(shape, words):
    model = load_model(MODELS / "sd3_medium_like")
    with pytest.raises(ValueError, match=words):
        model.pos_embed(ops.zeros(shape, ms.float32))


def test_a_folder_of_the_older_class_loads(tmp_path):
    """Public DiT and PixArt checkpoints name Transformer2DModel and carry options that it alone had."""
    folder = tmp_path / "older"
    shutil.copytree(MODELS / "dit_xl_like", folder)
    config = json.loads((folder / "config.json").read_text())
    older = {"num_vector_embeds": None, "use_linear_projection": False, "cross_attention_dim": None}
    config |= older | {"_class_name": "Transformer2DModel", "only_cross_attention": False}
    (folder / "config.json").write_text(json.dumps(config))
    model = load_model(folder)
    assert isinstance(model, DiTTransformer2DModel)
    save_model(model, tmp_path / "again")
    saved = json.loads((tmp_path / "again" / "config.json").read_text())
    assert saved["_class_name"] == "DiTTransformer2DModel" and not set(older) & set(saved)

    (folder / "config.json").write_text(json.dumps(config | {"norm_type": "layer_norm"}))
    with pytest.raises(ConfigError, match="'Transformer2DModel' is not known"):
        load_model(folder)
    (folder / "config.json").write_text(json.dumps(config | {"cross_attention_dim": 1024}))
    with pytest.raises(ConfigError, match="cross_attention_dim is 1024, which is not supported; valid: None"):
        load_model(folder)


HUB = {
    "stable-diffusion-3-medium": SD3Config,
    "stable-diffusion-3.5-medium": SD3Config,
    "stable-diffusion-3.5-large": SD3Config,
    "DiT-XL-2-256": DiTConfig,
    "PixArt-XL-2-1024-MS": PixArtConfig,
    "PixArt-Sigma-XL-2-1024-MS": PixArtConfig,
}


@pytest.mark.parametrize("name", HUB)
def test_public_configs_are_understood(name):
    config_class, options = HUB[name], {}
    for key, value in PUBLIC[name]["transformer"].items():
        if key != "_class_name":
            options[key] = tuple(value) if isinstance(value, list) else value
    config = config_class(**options)
    assert {key: getattr(config, key) for key in options} == options
    width = {"stable-diffusion-3.5-large": 2432}.get(name, 1536 if "diffusion" in name else 1152)
    assert config.inner_dim == width
    if (
        config_class is PixArtConfig
    ):  # alpha at 1024 pixels says nothing of either: both follow from sample_size
        assert config.has_size_conditions == ("Sigma" not in name) and config.position_scale == 2


@pytest.mark.parametrize(
    "config_class, change, words",
    [
        (SD3Config, {"qk_norm": "layer_norm"}, "qk_norm is 'layer_norm'.*valid: None, 'rms_norm'"),
        (SD3Config, {"caption_projection_dim": 1536}, "caption_projection_dim is 1536.*1152"),
        (SD3Config, {"dual_attention_layers": (3, 18)}, r"dual_attention_layers names \[18\].*0 to 17"),
        (SD3Config, {"pos_embed_max_size": None}, "pos_embed_max_size is None"),
        (SD3Config, {"attention_head_dim": 1, "caption_projection_dim": 18}, "is 18.*multiple of 4"),
        (DiTConfig, {"activation_fn": "geglu"}, "activation_fn is 'geglu'.*valid: 'gelu-approximate'"),
        (DiTConfig, {"norm_type": "layer_norm"}, "norm_type is 'layer_norm'.*valid: 'ada_norm_zero'"),
        (DiTConfig, {"norm_elementwise_affine": True}, "norm_elementwise_affine is True"),
        (DiTConfig, {"num_embeds_ada_norm": None}, "num_embeds_ada_norm is None"),
        (PixArtConfig, {"attention_type": "gated"}, "attention_type is 'gated'.*valid: 'default'"),
        (PixArtConfig, {"double_self_attention": True}, "double_self_attention is True"),
        (PixArtConfig, {"cross_attention_dim": None}, "cross_attention_dim is None"),
        (PixArtConfig, {"caption_channels": 8, "cross_attention_dim": 64}, "cross_attention_dim is 64.*1152"),
        (PixArtConfig, {"num_attention_heads": 1, "attention_head_dim": 64}, "is 64.*multiple of 3"),
    ],
)
def test_options_that_are_not_supported_are_refused_by_name(config_class, change, words):
    with pytest.raises(ValueError, match=words):
        dataclasses.replace(config_class(), **change)
