"""Embeddings, the small autoencoder, the word tokenizer, and what loading and saving refuse."""

import json
from pathlib import Path

import mindspore as ms
import numpy as np
import pytest
from golden_models import load_case, relative
from mindspore import Tensor, nn

from dancegrpo.config import ConfigError
from dancegrpo.models import load_model, load_tokenizer, save_model
from dancegrpo.models.autoencoder import PatchAutoencoder, PatchAutoencoderConfig
from dancegrpo.models.layers import TimestepEmbedding
from dancegrpo.models.tokenizers import save_word_tokenizer
from dancegrpo.ops import ApplyRotary, RotaryFrequencies
from dancegrpo.runtime.setup import setup_runtime

setup_runtime(compile_cache=False)  # graph mode, else the numbers would be those of another execution

GOLDEN = Path(__file__).parent / "golden"


def test_embeddings_equal_diffusers():
    data = np.load(GOLDEN / "F_embeddings.npz")
    cos, sin = RotaryFrequencies(tuple(data["hp_rope_axes"].tolist()))(Tensor(data["in_rope_ids"]))
    assert relative(cos.asnumpy(), data["out_rope_cos"]) < 1e-5
    assert relative(sin.asnumpy(), data["out_rope_sin"]) < 1e-5
    x = Tensor(np.ascontiguousarray(data["in_rope_x"].transpose(0, 2, 1, 3)))
    rotated = ApplyRotary(x.shape[-1])(x, cos, sin).asnumpy().transpose(0, 2, 1, 3)
    assert relative(rotated, data["out_rope_x"]) < 1e-5
    embedding = TimestepEmbedding(8, channels=int(data["hp_dim"]))
    angle = data["in_timesteps"][:, None] * embedding.features.frequency.asnumpy()
    features = np.concatenate([np.cos(angle), np.sin(angle)], axis=1)
    assert relative(features, data["out_timestep_emb_flip_shift0"]) < 5e-5


def test_what_is_saved_loads_to_the_same_model(tmp_path):
    case = load_case("flux_no_guidance")
    model, inputs = case.model, case.inputs
    save_model(model, tmp_path)
    reference = json.loads((GOLDEN / "models" / "flux_no_guidance" / "config.json").read_text())
    saved = json.loads((tmp_path / "config.json").read_text())
    assert {key: saved[key] for key in reference if not key.startswith("_diff")} == {
        key: value for key, value in reference.items() if not key.startswith("_diff")
    }
    again = load_model(tmp_path)
    assert np.array_equal(again(**inputs)[0].asnumpy(), model(**inputs)[0].asnumpy())


def broken_copy(tmp_path, change):
    from safetensors.numpy import load_file, save_file

    source = GOLDEN / "models" / "flux_no_guidance"
    config = json.loads((source / "config.json").read_text())
    weights = load_file(source / "diffusion_pytorch_model.safetensors")
    change(config, weights)
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file(weights, tmp_path / "diffusion_pytorch_model.safetensors")
    return tmp_path


@pytest.mark.parametrize(
    "change, words",
    [
        (lambda config, weights: weights.pop("x_embedder.bias"), "missing x_embedder.bias"),
        (lambda config, weights: weights.update(extra=np.zeros(1, np.float32)), "unexpected extra"),
        (
            lambda config, weights: weights.update({"x_embedder.bias": np.zeros(3, np.float32)}),
            "expected (32,)",
        ),
        (lambda config, weights: config.update(_class_name="NoSuchModel"), "NoSuchModel"),
        (lambda config, weights: config.update(some_new_option=1), "some_new_option"),
        (lambda config, weights: config.update(axes_dims_rope=[4, 4, 4]), "attention_head_dim is 16"),
    ],
)
def test_a_folder_that_does_not_fit_is_refused_by_name(tmp_path, change, words):
    with pytest.raises(ConfigError, match=words.replace("(", r"\(").replace(")", r"\)")):
        load_model(broken_copy(tmp_path, change))


def test_a_truncated_file_is_refused(tmp_path):
    folder = broken_copy(tmp_path, lambda config, weights: None)
    file = folder / "diffusion_pytorch_model.safetensors"
    file.write_bytes(file.read_bytes()[:5000])
    with pytest.raises(ConfigError, match="cannot be read as safetensors"):
        load_model(folder)


def test_a_config_that_is_no_object_is_refused(tmp_path):
    folder = broken_copy(tmp_path, lambda config, weights: None)
    (folder / "config.json").write_text("[]")
    with pytest.raises(ConfigError, match="must hold an object"):
        load_model(folder)


class _Decoded(nn.Cell):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def construct(self, latents):
        decoded = self.model.decode(latents)
        return (decoded * decoded).mean()


def test_autoencoder_gradient_is_the_slope_of_its_loss():
    """Guards against kernels whose gradient reads memory that nobody wrote, as `ops.pad` does on CPU."""
    model = PatchAutoencoder(
        PatchAutoencoderConfig(
            sample_size=32, encoder_width=16, decoder_width=16, decoder_bottleneck=4, decoder_blocks=1
        )
    )
    rng = np.random.default_rng(0)
    loss, latents = _Decoded(model), rng.standard_normal((2, 16, 4, 4)).astype(np.float32)
    gradient = ms.value_and_grad(loss, 0, ms.ParameterTuple(model.trainable_params()))
    direction = rng.standard_normal(latents.shape).astype(np.float32)
    for _ in range(3):  # the third call meets memory that the first two left behind
        of_latents = gradient(Tensor(latents))[1][0].asnumpy()
        step = 1e-2
        up, down = (float(loss(Tensor(latents + sign * step * direction)).asnumpy()) for sign in (1, -1))
        assert (of_latents * direction).sum() == pytest.approx((up - down) / (2 * step), rel=2e-2)


def test_tokenizer_pads_truncates_and_names_unknown_words(tmp_path):
    save_word_tokenizer(("a", "circle", "red"), 5, tmp_path)
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer(["A red circle.", "a"]).tolist() == [[1, 2, 4, 3, 5], [1, 2, 5, 5, 5]]
    assert tokenizer.unknown_words("a purple circle, purple dog") == ["purple", "dog"]
    assert tokenizer.is_truncated("a red red red circle") and not tokenizer.is_truncated("a red circle")
