"""Every pipeline family from a folder: pictures, two iterations of training, and the checkpoint that comes out."""

import dataclasses
import filecmp
import importlib.util
import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file
from tiny_pipelines import CLIP_TOKENS, SIZE, T5_TOKENS, save_pipeline, save_random, save_t5_tokenizer
from tiny_pipelines import FAMILIES as FOLDERS

from dancegrpo.config import Config, ConfigError, load_config
from dancegrpo.runtime.setup import setup_runtime

setup_runtime(
    cache_key="families"
)  # families share text encoders and autoencoders, and their graphs with the cache

import mindspore as ms  # noqa: E402
from mindspore import Tensor, nn, ops  # noqa: E402

from dancegrpo.data import PromptSet  # noqa: E402
from dancegrpo.diffusion import chain_schedule, make_schedule, scheduler_settings  # noqa: E402
from dancegrpo.evaluation import evaluate  # noqa: E402
from dancegrpo.pipelines import Pipeline, PipelineOptions, load_pipeline, read_process  # noqa: E402
from dancegrpo.pipelines.base import components_of  # noqa: E402
from dancegrpo.pipelines.checkpoint import LatentDecoder  # noqa: E402
from dancegrpo.pipelines.generate import ImageGenerator, ImageRequest, warn_of_words  # noqa: E402
from dancegrpo.pipelines.guidance import GuidedDenoiser  # noqa: E402
from dancegrpo.rewards import FunctionReward, LabelledReward, RewardSet  # noqa: E402
from dancegrpo.rl import Trainer, open_run  # noqa: E402
from dancegrpo.rl.chain import trained_transition  # noqa: E402

SIZED, LONG = {"height": SIZE, "width": SIZE}, {"max_sequence_length": T5_TOKENS}
OPTIONS = {
    "flux": SIZED | LONG,
    "sd15": {"negative_prompt": "blurry"},
    "sd21": {},
    "sdxl": {},
    "sd3": LONG,
    "dit": {},
    "pixart_alpha": SIZED | LONG,
    "pixart_sigma": {"height": SIZE, "width": SIZE + 8} | LONG,
}
COMPONENT = {"sd15": "unet", "sd21": "unet", "sdxl": "unet"}
STEPS = 3


def config_of(process: str, options: dict) -> Config:
    base = Config()
    return dataclasses.replace(
        base,
        model=dataclasses.replace(base.model, **{k: v for k, v in options.items() if k != "negative_prompt"}),
        sampler=dataclasses.replace(
            base.sampler,
            num_steps=STEPS,
            transition="ddim" if process == "diffusion" else "dance_sde",
            negative_prompt=options.get("negative_prompt"),
        ),
        data=dataclasses.replace(base.data, prompts_per_iteration=2),
        train=dataclasses.replace(
            base.train, iterations=2, candidates=2, micro_batch=4, shared_noise=False, learning_rate=1e-3
        ),
        evaluation=dataclasses.replace(base.evaluation, num_steps=2),
        output=dataclasses.replace(base.output, tensorboard=False, sample_every=1, sample_prompts=2),
    )


def redness(images, prompts, metadata):
    return (images[..., 0].mean(axis=(1, 2)) - images[..., 2].mean(axis=(1, 2))) / 255


def weights_of(folder: Path) -> dict[str, np.ndarray]:
    return load_file(folder / "diffusion_pytorch_model.safetensors")


@pytest.mark.parametrize("family", OPTIONS)
def test_a_family_draws_learns_and_reloads(family, tmp_path):
    start = save_pipeline(family, tmp_path / "start")
    process, _ = read_process(start)
    config = config_of(process, OPTIONS[family])
    pipeline = load_pipeline(start, PipelineOptions.of(config))
    names = ("goldfish", "2") if family == "dit" else ("a red circle", "Two Stars")
    prompts = PromptSet(names, ({}, {}))
    rewards = RewardSet([LabelledReward("redness", FunctionReward(redness))])
    with open_run(tmp_path / "run", config) as run:
        trainer = Trainer(config, pipeline, rewards, prompts, run)
        trainer.train()
        rows, checkpoint = run.metrics(), run.checkpoint(2)
    assert ms.get_context("mode") == ms.GRAPH_MODE
    assert [row["ratio/first_max_deviation"] for row in rows] == [0.0, 0.0]
    assert not any(row["skipped"] or row["groups/dead"] for row in rows)
    assert min(row["grad/norm"] for row in rows) > 0
    assert len({row["graph/compilations"] for row in rows}) == 1

    images = trainer.samples.images()
    assert images.shape == (2, *pipeline.image_size, 3) and images.std() > 2
    assert np.array_equal(trainer.samples.images(), images)
    assert np.abs(images[0].astype(int) - images[1]).mean() > 1  # prompts and noise tell them apart

    component = COMPONENT.get(family, "transformer")
    before, after = weights_of(start / component), weights_of(checkpoint / component)
    same = [name for name in before if np.array_equal(before[name], after[name])]
    assert before.keys() == after.keys() and set(same) <= {"pos_embed.pos_embed"}
    for name in ("vae", "scheduler", *(path.name for path in start.glob("t*_*"))):
        compared = filecmp.dircmp(start / name, checkpoint / name)
        assert compared.left_list == compared.right_list == compared.same_files

    reloaded = load_pipeline(tmp_path / "run", PipelineOptions.of(config), "raw")
    requests = [ImageRequest(prompt, index) for index, prompt in enumerate(names)]
    generator = ImageGenerator(reloaded, num_steps=2, batch=2)
    assert np.array_equal(generator.images(requests, config.train.seed), images)


def test_the_loop_and_the_evaluation_name_no_model():
    package = Path(__file__).resolve().parent.parent / "dancegrpo"
    names = re.compile(
        r"flux(?!_small)|stable.?diffusion|sd3|sdxl|pixart|u-?net|\bdit\b|\bt5\b|llama", re.IGNORECASE
    )
    for file in [*(package / "rl").glob("*.py"), *(package / "evaluation").glob("*.py")]:
        assert not names.search(file.read_text()), file


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
    sampler = dataclasses.replace(Config().sampler, num_steps=4)
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


def _generate(*arguments) -> None:
    spec = importlib.util.spec_from_file_location(
        "generate_tool", Path(__file__).resolve().parent.parent / "tools" / "generate.py"
    )
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    tool.main(list(map(str, arguments)))


def test_the_command_line_draws_classes_and_names_those_near_an_unknown_one(tmp_path):
    folder = save_pipeline("dit", tmp_path / "dit")
    common = ("--checkpoint", folder, "--output", tmp_path / "out", "--steps", 2, "--batch", 2)
    _generate(*common, "--prompt", "Tinca tinca", "--prompt", "0")
    assert [json.loads(line)["prompt"] for line in (tmp_path / "out" / "prompts.jsonl").open()] == [
        "Tinca tinca",
        "0",
    ]
    pipeline = load_pipeline(folder)
    assert np.array_equal(pipeline.encode_prompts(["Tench", "great white shark"])[0], [[0, 1000], [2, 1000]])
    for prompt, words in [
        ("gold fish", "no class of this model: .* a number from 0 to 999; did you mean 'goldfish'?"),
        ("", "the prompt '' is no class"),
        ("1000", "the prompt '1000' is no class"),
    ]:
        with pytest.raises(ConfigError, match=words):
            _generate(*common, "--overwrite", "--prompt", prompt)
    with pytest.raises(ConfigError, match="DiTPipeline takes none"):
        _generate(*common, "--overwrite", "--prompt", "1", "--negative-prompt", "x")


def test_long_prompts_are_cut_with_a_warning_and_empty_ones_allowed(tmp_path, capsys):
    pipeline = load_pipeline(save_pipeline("sdxl", tmp_path), PipelineOptions(guidance_scale=1.0))
    long = "very " * 2000
    states, _ = pipeline.encode_prompts([long, "", long + "end"])
    assert np.array_equal(states[0], states[2]) and np.isfinite(states[1]).all()
    warn_of_words(pipeline, [long, ""])
    warning = capsys.readouterr().err
    assert warning.count("\n") == 1 and "is cut off" in warning and len(warning) < 200


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


def test_saving_copies_what_it_does_not_know_and_leaves_the_folder(tmp_path):
    extra = {
        "safety_checker": ["stable_diffusion", "StableDiffusionSafetyChecker"],
        "feature_extractor": ["transformers", "CLIPImageProcessor"],
        "../outside": ["a", "B"],
        "..": ["a", "B"],
        "requires_safety_checker": True,
    }
    folder = save_pipeline("sd15", tmp_path / "start", **extra)
    (folder / "safety_checker").mkdir()
    (folder / "safety_checker" / "pytorch_model.bin").write_bytes(b"not even a pickle")
    (tmp_path / "outside").mkdir()
    load_pipeline(folder).save(tmp_path / "new" / "saved")
    saved = tmp_path / "new" / "saved"
    assert (saved / "safety_checker" / "pytorch_model.bin").read_bytes() == b"not even a pickle"
    assert not (tmp_path / "new" / "outside").exists()
    index = json.loads((saved / "model_index.json").read_text())
    assert index["feature_extractor"] == [None, None] and index["requires_safety_checker"]
    assert {"../outside", ".."}.isdisjoint(components_of(index))


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


def test_latents_are_unscaled_before_they_are_decoded():
    class Identity(nn.Cell):
        config = type("Config", (), {"scaling_factor": 0.5, "shift_factor": None})

        def decode(self, latents):
            return latents

    images = LatentDecoder(Identity())(Tensor(np.array([[0.1, -3.0]], np.float32))).asnumpy()
    np.testing.assert_allclose(images, [[0.6, 0.0]], atol=1e-6)
