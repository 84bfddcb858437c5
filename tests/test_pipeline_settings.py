"""What pipelines make of options and checkpoints: guidance, schedules, sizes, text encoders, and what they refuse."""

import dataclasses
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from tiny_pipelines import CLIP_TOKENS, SIZE, T5_TOKENS, save_pipeline, save_random, save_t5_tokenizer
from tiny_pipelines import FAMILIES as FOLDERS

from dancegrpo.config import Config, ConfigError, load_config
from dancegrpo.runtime.setup import setup_runtime

setup_runtime()  # families share text encoders and autoencoders, and through the cache their graphs

from mindspore import Tensor, nn, ops  # noqa: E402

from dancegrpo.data import PromptSet  # noqa: E402
from dancegrpo.diffusion import chain_schedule, make_schedule, scheduler_settings  # noqa: E402
from dancegrpo.evaluation import evaluate  # noqa: E402
from dancegrpo.models.preprocess import PIXEL_MEAN, PIXEL_STD, ImagePreprocess, to_square  # noqa: E402
from dancegrpo.pipelines import Pipeline, PipelineOptions, load_pipeline, read_process  # noqa: E402
from dancegrpo.pipelines.checkpoint import LatentDecoder  # noqa: E402
from dancegrpo.pipelines.generate import ImageGenerator  # noqa: E402
from dancegrpo.pipelines.guidance import GuidedDenoiser  # noqa: E402
from dancegrpo.rl.chain import trained_transition  # noqa: E402

SIZED, LONG = {"height": SIZE, "width": SIZE}, {"max_sequence_length": T5_TOKENS}


class _Weigh(nn.Cell):
    """A denoiser whose answer tells what it was asked with."""

    def construct(self, latents, timestep, first, second):
        return latents * (timestep + first).reshape((-1, 1)) + second


def test_guidance_asks_once_for_both_branches_and_leads_away_from_the_second():
    rng = np.random.default_rng(0)
    latents, time, first, second = (
        rng.standard_normal(shape).astype(np.float32) for shape in ((3, 4), (3,), (3, 2), (3, 2, 4))
    )
    guided = GuidedDenoiser(_Weigh(), 2.5)(*map(Tensor, (latents, time, first, second))).asnumpy()
    given, other = (latents * (time + first[:, i])[:, None] + second[:, i] for i in (0, 1))
    np.testing.assert_allclose(guided, other + 2.5 * (given - other), rtol=1e-5, atol=1e-5)


def test_a_scale_of_one_turns_the_second_branch_off_and_sdxl_has_an_empty_one(tmp_path):
    folder = save_pipeline("sdxl", tmp_path)
    off = load_pipeline(folder, PipelineOptions(guidance_scale=1.0))
    states, pooled = off.encode_prompts(["a", "b", "a"])
    assert states.shape == (3, CLIP_TOKENS, 64) and pooled.shape == (3, 16)
    assert np.array_equal(states[0], states[2]) and not np.array_equal(states[0], states[1])
    assert not isinstance(off.denoiser, GuidedDenoiser)
    on = load_pipeline(folder)
    assert isinstance(on.denoiser, GuidedDenoiser) and on.denoiser.guidance_scale == 5.0
    both = on.encode_prompts(["a"])
    assert all(
        np.array_equal(array[0, 0], plain[0]) for array, plain in zip(both, (states, pooled), strict=True)
    )
    assert not any(array[0, 1].any() for array in both)
    empty = load_pipeline(folder, PipelineOptions(negative_prompt="")).encode_prompts(["a", ""])
    assert all(np.array_equal(array[0, 1], array[1, 0]) for array in empty)
    with pytest.raises(
        ConfigError, match="negative_prompt is 'b', but sampler.guidance_scale 1 turns guidance off"
    ):
        load_pipeline(folder, PipelineOptions(guidance_scale=1.0, negative_prompt="b"))


def test_the_schedule_is_the_checkpoints_unless_the_config_has_its_own(tmp_path, monkeypatch):
    flux, sd3 = (save_pipeline(name, tmp_path / name) for name in ("flux", "sd3"))
    pipeline = load_pipeline(flux, PipelineOptions(**SIZED, **LONG))
    rows = (SIZE // 4) ** 2
    expected = make_schedule("flow_match_euler", 5, use_dynamic_shifting=True, image_seq_len=rows)
    assert np.array_equal(pipeline.schedule(5).sigmas, expected.sigmas)
    static = make_schedule("flow_match", 5, shift=3.0).sigmas
    np.testing.assert_allclose(pipeline.schedule(5, shift=3.0).sigmas, static, atol=1e-6)
    without = save_pipeline("sd3", tmp_path / "without", without=("text_encoder_3",))
    pipeline = load_pipeline(without, PipelineOptions(**LONG))
    assert pipeline.schedule(4).timesteps[1] == make_schedule("flow_match_euler", 4, shift=3.0).timesteps[1]
    assert chain_schedule(4, read_process(sd3)[1], truncate_timesteps=True).timesteps[1] % 1 == 0
    states, _ = pipeline.encode_prompts(["a"])
    assert states.shape == (1, 2, CLIP_TOKENS + T5_TOKENS, 72)
    assert not states[..., CLIP_TOKENS:, :].any() and not states[..., 64:].any()

    asked = {}

    class Generator(ImageGenerator):
        def __init__(self, pipeline, **settings):
            asked.update(settings)
            raise KeyboardInterrupt

    monkeypatch.setattr(evaluate, "ImageGenerator", Generator)
    config = load_config(overrides=["sampler.shift=2.5"])
    with pytest.raises(KeyboardInterrupt):
        evaluate.Evaluator(config, PromptSet(("a red circle",), ({},))).evaluate(pipeline)
    assert asked["shift"] == 2.5


def test_what_does_not_fit_a_checkpoint_is_one_sentence(tmp_path):
    folders = {name: save_pipeline(name, tmp_path / name) for name in ("sd15", "sd3", "flux", "dit")}
    for name, options, words in [
        ("sd15", {"height": 17}, "model.height is 17, which does not divide by 2; nearest valid: 16 or 18"),
        ("sd3", {"width": 34}, "model.width is 34, which does not divide by 4; nearest valid: 32 or 36"),
        ("sd3", {"width": 36}, "model.width is 36; this model has positions for up to 32, in steps of 4"),
        ("sd15", {"text_encoder": "x"}, "StableDiffusionPipeline only takes its own"),
        (
            "dit",
            {"max_sequence_length": 9},
            "model.max_sequence_length is 9, but DiTPipeline only takes its own",
        ),
        ("flux", {"guidance_scale": 2.0, "height": 18}, "model.height is 18, which does not divide by 4"),
        ("flux", {"negative_prompt": "x"}, "FluxPipeline takes none"),
        ("flux", {"text_encoder": "nowhere"}, "model.text_encoder nowhere does not exist"),
        ("dit", {"negative_prompt": "x"}, "DiTPipeline takes none"),
    ]:
        with pytest.raises(ConfigError, match=words):
            load_pipeline(folders[name], PipelineOptions(**options))
    with pytest.raises(
        ConfigError, match="model.height is 48; this model's autoencoder makes 64 pixels only"
    ):
        load_pipeline("small-flux", PipelineOptions(height=48))
    with pytest.raises(ConfigError, match="max_sequence_length is 9, but .*small-flux has a CLIP only"):
        load_pipeline("small-flux", PipelineOptions(max_sequence_length=9))
    with pytest.raises(ConfigError, match="guidance_scale is 2.0, but .* has no guidance embedding"):
        load_pipeline("small-flux", PipelineOptions(guidance_scale=2.0))
    shutil.copytree(folders["dit"] / "transformer", tmp_path / "mixed" / "unet")
    for name in ("vae", "scheduler", "model_index.json"):
        copy = shutil.copytree if (folders["sd15"] / name).is_dir() else shutil.copyfile
        copy(folders["sd15"] / name, tmp_path / "mixed" / name)
    with pytest.raises(
        ConfigError, match="unet is a DiTTransformer2DModel; StableDiffusionPipeline needs a UNet2D"
    ):
        load_pipeline(tmp_path / "mixed")
    velocity = save_pipeline("sd21", tmp_path / "velocity")
    sampler = dataclasses.replace(Config().sampler, num_steps=4, transition="ddim", eta=1.0)
    assert trained_transition(sampler, *read_process(velocity)).predicts_velocity
    assert not trained_transition(sampler, *read_process(folders["sd15"])).predicts_velocity
    sampler = dataclasses.replace(sampler, transition="dance_sde")
    with pytest.raises(ConfigError, match="'dance_sde' is for models of a flow process.*choose 'ddim'"):
        trained_transition(sampler, *read_process(folders["sd15"]))
    with pytest.raises(
        ConfigError, match="sampler.shift is 2, but the model was trained on a diffusion process"
    ):
        chain_schedule(4, read_process(folders["sd15"])[1], shift=2.0)
    scheduler = folders["sd15"] / "scheduler" / "scheduler_config.json"
    scheduler.write_text(json.dumps({"_class_name": "FlowMatchEulerDiscreteScheduler"}))
    with pytest.raises(
        ConfigError, match="is of a flow process, but StableDiffusionPipeline is a model of a diff"
    ):
        read_process(folders["sd15"])
    index = folders["sd3"] / "model_index.json"
    for name, words in [
        ("StableDiffusionLXPipeline", "did you mean 'StableDiffusionXLPipeline'"),
        (["code.py", "Mine"], r"pipeline class \['code.py', 'Mine'\] is not supported; valid: DiT"),
    ]:
        index.write_text(json.dumps({"_class_name": name}))
        with pytest.raises(ConfigError, match=words):
            load_pipeline(folders["sd3"])
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match="neither a run nor a pipeline folder: it has no model_index.json"):
        load_pipeline(tmp_path / "empty")


def test_schedulers_of_published_checkpoints_are_read_whichever_solver_they_name():
    euler = {
        "_class_name": "EulerDiscreteScheduler", "beta_end": 0.012, "beta_schedule": "scaled_linear",
        "beta_start": 0.00085, "clip_sample": False, "interpolation_type": "linear", "num_train_timesteps": 1000,
        "prediction_type": "epsilon", "sample_max_value": 1.0, "set_alpha_to_one": False, "skip_prk_steps": True,
        "steps_offset": 1, "timestep_spacing": "leading", "trained_betas": None, "use_karras_sigmas": False,
    }  # fmt: skip
    name, schedule, transition = scheduler_settings(euler, "SDXL")
    assert chain_schedule(4, (name, schedule, transition)).timesteps.tolist() == [751, 501, 251, 1]
    dpm = {
        "_class_name": "DPMSolverMultistepScheduler", "algorithm_type": "dpmsolver++", "beta_end": 0.02,
        "beta_schedule": "linear", "beta_start": 0.0001, "dynamic_thresholding_ratio": 0.995,
        "euler_at_final": False, "lambda_min_clipped": float("-inf"), "lower_order_final": True,
        "num_train_timesteps": 1000, "prediction_type": "epsilon", "sample_max_value": 1.0, "solver_order": 2,
        "solver_type": "midpoint", "steps_offset": 0, "thresholding": False, "timestep_spacing": "linspace",
        "trained_betas": None, "use_karras_sigmas": False, "use_lu_lambdas": False, "variance_type": None,
    }  # fmt: skip
    assert scheduler_settings(dpm, "PixArt")[2]["beta_schedule"] == "linear"
    with pytest.raises(ConfigError, match="use_flow_sigmas is True; supported: False"):
        scheduler_settings(dpm | {"use_flow_sigmas": True}, "other")


def _encoder(kind: str, width: int, folder: Path) -> Path:
    llama = {
        "architectures": ["LlamaModel"], "model_type": "llama", "vocab_size": 48, "hidden_size": width,
        "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "max_position_embeddings": 14,
    }  # fmt: skip
    t5 = FOLDERS["flux"][1]["text_encoder_2"] | {"d_model": width}
    save_random(llama if kind == "llama" else t5, folder)
    save_t5_tokenizer(folder / "tokenizer")
    for file in (folder / "tokenizer").iterdir():
        file.rename(folder / file.name)
    return folder


def test_another_text_encoder_stands_under_the_small_flux_and_in_its_checkpoint(tmp_path):
    llama = _encoder("llama", 128, tmp_path / "llama")
    pipeline = load_pipeline("small-flux", PipelineOptions(text_encoder=str(llama)))
    plain = load_pipeline("small-flux").encode_prompts(["a red circle"])
    states, pooled = pipeline.encode_prompts(["a red circle"])
    assert states.shape == (1, 14, 128)  # all positions that it has
    np.testing.assert_allclose(pooled, plain[1], atol=1e-5)  # still the CLIP's
    assert pipeline.denoiser.txt_ids.shape == (14, 3)
    pipeline.save(tmp_path / "saved")
    index = json.loads((tmp_path / "saved" / "model_index.json").read_text())
    assert index["text_encoder_2"] == ["transformers", "LlamaModel"]
    assert not list((tmp_path / "saved" / "tokenizer_2").glob("*.safetensors"))
    again = load_pipeline(tmp_path / "saved").encode_prompts(["a red circle"])
    assert np.array_equal(again[0], states) and np.array_equal(again[1], pooled)
    t5 = _encoder("t5", 128, tmp_path / "t5")
    short = load_pipeline("small-flux", PipelineOptions(text_encoder=str(t5), max_sequence_length=9))
    assert short.encode_prompts(["a"])[0].shape == (1, 9, 128)
    narrow = _encoder("t5", 64, tmp_path / "narrow")
    with pytest.raises(ConfigError, match="joint_attention_dim is 128, but width of .*narrow is 64"):
        load_pipeline("small-flux", PipelineOptions(text_encoder=str(narrow)))


class _Constant(Pipeline):
    latent_shape, image_size = (1,), (1, 1)

    def __init__(self):
        super().__init__(Path())
        self.calls = 0

    def _encode(self, prompts):
        self.calls += len(prompts)
        return (np.zeros((len(prompts), 1024), np.float32),)

    def unknown_words(self, prompt):
        return []

    def decode(self, latents):
        return ops.zeros((1, 3, 1, 1))


def test_encoded_prompts_are_remembered_within_bounds(monkeypatch):
    monkeypatch.setattr("dancegrpo.pipelines.base._REMEMBERED_BYTES", 3 * 4096)
    pipeline = _Constant()
    assert pipeline.encode_prompts(["a", "b", "a"])[0].shape == (3, 1024) and pipeline.calls == 2
    assert pipeline.encode_prompts([*"abcde"])[0].shape == (5, 1024) and pipeline.calls == 5
    pipeline.encode_prompts(["e"])
    assert pipeline.calls == 5  # the latest are kept
    pipeline.encode_prompts(["a"])
    assert pipeline.calls == 6 and len(pipeline._encoded) == 3


class _Square(nn.Cell):
    def construct(self, images):
        return to_square(images, 12)


def test_pictures_of_any_size_are_made_square_for_a_clip():
    images = np.random.default_rng(0).random((2, 3, 16, 28), np.float32)
    expected = ImagePreprocess(16, 28, 12, rounded=False)(Tensor(images)).asnumpy()
    statistics = (np.float32(array).reshape(1, 3, 1, 1) for array in (PIXEL_MEAN, PIXEL_STD))
    mean, std = statistics
    np.testing.assert_allclose((_Square()(Tensor(images)).asnumpy() - mean) / std, expected, atol=1e-5)
    square = Tensor(images[..., :12, :12])
    assert np.array_equal(_Square()(square).asnumpy(), square.asnumpy())


def test_latents_are_unscaled_before_they_are_decoded():
    class Identity(nn.Cell):
        config = type("Config", (), {"scaling_factor": 0.5, "shift_factor": None})

        def decode(self, latents):
            return latents

    images = LatentDecoder(Identity())(Tensor(np.array([[0.1, -3.0]], np.float32))).asnumpy()
    np.testing.assert_allclose(images, [[0.6, 0.0]], atol=1e-6)
