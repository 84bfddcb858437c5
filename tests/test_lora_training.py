"""Runs with a LoRA: they train nothing else, refer to the base model, resume and leave merged checkpoints."""

import dataclasses
import shutil

import numpy as np
import pytest

from dancegrpo.config import Config, ConfigError, LoraConfig, PrecisionConfig
from dancegrpo.runtime.setup import setup_runtime

setup_runtime(compile_cache=False)

import mindspore as ms  # noqa: E402
from mindspore import Tensor  # noqa: E402
from safetensors.numpy import load_file  # noqa: E402

from dancegrpo.data import PromptSet  # noqa: E402
from dancegrpo.diffusion import PolicyStep  # noqa: E402
from dancegrpo.models import save_model  # noqa: E402
from dancegrpo.models.flux import FluxConfig, FluxTransformer2DModel  # noqa: E402
from dancegrpo.models.lora import (  # noqa: E402
    correction,
    describe_lora,
    lora_layers,
    lora_parameters,
)
from dancegrpo.models.lora_files import LORA_FILE  # noqa: E402
from dancegrpo.models.saving import parameter_arrays  # noqa: E402
from dancegrpo.pipelines import PipelineOptions, load_pipeline  # noqa: E402
from dancegrpo.pipelines.loading import SHIPPED  # noqa: E402
from dancegrpo.rewards import FunctionReward, LabelledReward, RewardSet  # noqa: E402
from dancegrpo.rl import Trainer, open_run  # noqa: E402
from dancegrpo.rl.launch import RunInputs, build_trainer  # noqa: E402
from dancegrpo.rl.run_state import load_run_state  # noqa: E402


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A pipeline with a tiny FLUX between the shipped text encoder and autoencoder."""
    path = tmp_path_factory.mktemp("tiny")
    shutil.copytree(
        SHIPPED["small-flux"], path, dirs_exist_ok=True, ignore=lambda *_: ["transformer", "reward_clip"]
    )
    model = FluxTransformer2DModel(
        FluxConfig(
            in_channels=64, num_layers=1, num_single_layers=1, attention_head_dim=16, num_attention_heads=2,
            joint_attention_dim=128, pooled_projection_dim=128, axes_dims_rope=(4, 6, 6),
        )
    )  # fmt: skip
    rng = np.random.default_rng(0)
    for parameter in model.get_parameters():
        parameter.set_data(Tensor((0.2 * rng.standard_normal(parameter.shape)).astype(np.float32)))
    save_model(model, path / "transformer")
    return path


def redness(images, prompts, metadata):
    return images[..., 0].mean(axis=(1, 2)) / 255 - images[..., 2].mean(axis=(1, 2)) / 255


class Watching(Trainer):
    """Keeps what the reference said, and of which transitions."""

    seen = ()

    def _reference_means(self, trajectory, batches):
        means = super()._reference_means(trajectory, batches)
        none = np.zeros(len(trajectory.prompts), np.float32)
        self.seen = [(trajectory.batch(b, none), m) for b, m in zip(batches, means, strict=True)]
        return means


PROMPTS = PromptSet(("a red circle", "a blue square"), ({}, {}))
REWARDS = RewardSet([LabelledReward("redness", FunctionReward(redness))])


def config_of(folder):
    base = Config()
    return dataclasses.replace(
        base,
        model=dataclasses.replace(base.model, checkpoint=str(folder)),
        lora=LoraConfig(rank=4, alpha=8.0),
        sampler=dataclasses.replace(base.sampler, num_steps=3),
        data=dataclasses.replace(base.data, prompts_per_iteration=2),
        train=dataclasses.replace(
            base.train, iterations=2, candidates=2, micro_batch=4, learning_rate=1e-2, clip_range=0.1,
            timestep_fraction=0.5, shared_noise=False, kl_weight=0.1, ema_decay=0.5, ema_warmup=False, seed=3,
        ),
        output=dataclasses.replace(
            base.output, sample_every=0, checkpoint_every=1, keep_last=0, tensorboard=False
        ),
    )  # fmt: skip


def run(output, folder, resume=False):
    config = config_of(folder)
    with open_run(output, config, resume=resume) as opened:
        trainer = Watching(config, load_pipeline(folder), REWARDS, PROMPTS, opened)
        trainer.train()
        return trainer, opened.metrics()


@pytest.fixture(scope="module")
def trained(folder, tmp_path_factory):
    output = tmp_path_factory.mktemp("runs") / "run"
    return output, *run(output, folder)


def test_a_run_trains_the_lora_alone(folder, trained):
    output, trainer, rows = trained
    assert [row["ratio/first_max_deviation"] for row in rows] == [0.0, 0.0]
    assert len({row["graph/compilations"] for row in rows}) == 1 and not any(row["skipped"] for row in rows)
    backbone, flat = trainer.pipeline.backbone, trainer.updater.flat
    base = load_file(folder / "transformer" / "diffusion_pytorch_model.safetensors")
    assert all(np.array_equal(array, base[key]) for key, array in parameter_arrays(backbone).items())
    # Optimizer, average and reference are of the LoRA's size.
    size = sum(parameter.size for parameter in lora_parameters(backbone).values())
    assert flat.names == list(lora_parameters(backbone)) and flat.size == size == len(trainer.reference)
    assert trainer.updater.average.size == size < 0.1 * sum(array.size for array in base.values())
    changed = flat.split(flat.weights.asnumpy() != trainer.reference)
    assert all(array.any() for array in changed.values())
    assert "LoRA of rank 4 in 11 layers" in describe_lora(backbone)


def test_a_frozen_model_is_held_in_the_format_it_computes_in(folder, tmp_path):
    """Half the memory, and the same bits, of which training changes none."""
    config = dataclasses.replace(config_of(folder), precision=PrecisionConfig(compute="float16"))
    config = dataclasses.replace(config, train=dataclasses.replace(config.train, iterations=1))
    with open_run(tmp_path / "run", config) as opened:
        trainer = build_trainer(config, opened, RunInputs(PROMPTS, REWARDS, None))
        held = {name: p.dtype for name, p in trainer.pipeline.backbone.parameters_and_names() if p.ndim > 1}
        lora = set(lora_parameters(trainer.pipeline.backbone))
        assert {name for name, dtype in held.items() if dtype == ms.float32} == lora
        assert {held[name] for name in held.keys() - lora} == {ms.float16}
        before = parameter_arrays(trainer.pipeline.backbone)
        trainer.train()
        (row,) = opened.metrics()
    assert row["ratio/first_max_deviation"] == 0.0 and not row["skipped"]
    assert all(
        np.array_equal(a, before[key]) for key, a in parameter_arrays(trainer.pipeline.backbone).items()
    )
    flat = trainer.updater.flat
    assert any((a != 0).any() for key, a in flat.split(flat.weights.asnumpy()).items() if "lora_B" in key)

    rng = np.random.default_rng(1)
    pipelines = [load_pipeline(folder, PipelineOptions("float16", frozen=frozen)) for frozen in (True, False)]
    latents = Tensor(rng.standard_normal((2, *pipelines[0].latent_shape), np.float32))
    conditions = list(map(Tensor, pipelines[0].encode_prompts(list(PROMPTS.prompts))))
    halves, whole = (p.denoiser(latents, Tensor([900.0, 100.0]), *conditions).asnumpy() for p in pipelines)
    assert np.array_equal(halves, whole)


def test_the_reference_is_the_base_model(folder, trained):
    _, trainer, rows = trained
    assert rows[0]["loss/kl"] == 0.0 < rows[1]["loss/kl"]  # the first rollout is that of the reference
    start = trainer.updater.flat.split(trainer.reference)
    assert not any(array.any() for name, array in start.items() if "lora_B" in name)
    policy = PolicyStep(load_pipeline(folder).denoiser, trainer.policy_step.transition)
    assert len(trainer.seen) == 1
    for batch, means in trainer.seen:  # of the second iteration, when the weights had moved
        inputs = (
            batch.latents,
            batch.sigmas,
            batch.sigmas_next,
            batch.timesteps,
            np.zeros_like(batch.latents),
        )
        expected = policy(*map(Tensor, inputs), None, *map(Tensor, batch.conditions))[1].asnumpy()
        assert np.array_equal(means, expected)


def test_resumes_to_the_same_bytes(folder, trained, tmp_path):
    output = trained[0]
    shutil.copytree(output, tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "iteration_000002")
    run(tmp_path / "run", folder, resume=True)
    files = sorted((output / "checkpoints").rglob("*.safetensors"))
    assert {file.name for file in files} >= {LORA_FILE, "policy.safetensors", "optimizer.safetensors"}
    for file in files:
        assert (tmp_path / "run" / file.relative_to(output)).read_bytes() == file.read_bytes(), file
    state = load_run_state(output / "checkpoints" / "iteration_000002")
    names = set(lora_parameters(trained[1].pipeline.backbone))
    for arrays in (state.policy, state.first_moments, state.second_moments, state.average):
        assert set(arrays) == names


def test_checkpoints_hold_the_sum_and_the_lora_beside_it(folder, trained):
    output, trainer, _ = trained
    last = output / "checkpoints" / "iteration_000002"
    base = load_file(folder / "transformer" / "diffusion_pytorch_model.safetensors")
    state = load_run_state(last)
    layers = lora_layers(trainer.pipeline.backbone)

    def sums(arrays):
        total = dict(base)
        for name in layers:
            parts = arrays[f"{name}.lora_A.weight"], arrays[f"{name}.lora_B.weight"]
            total[f"{name}.weight"] = (base[f"{name}.weight"] + correction(*parts, 2.0)).astype(np.float32)
        return total

    def same(pipeline, arrays, tolerance=0.0):
        found = parameter_arrays(pipeline.backbone)
        assert found.keys() == arrays.keys()
        return max(np.abs(found[key] - arrays[key]).max() for key in arrays) <= tolerance

    shown, raw = sums(state.average), sums(state.policy)
    assert same(load_pipeline(output), shown)  # with the average, which the run keeps
    assert same(load_pipeline(output, weights="raw"), raw, 1e-6)
    assert not same(load_pipeline(output), raw, 1e-4)
    # Added to the model that the run started from, the LoRA gives the checkpoint; to the checkpoint, it counts twice.
    for source in (output, last, last / LORA_FILE):
        assert same(load_pipeline(folder, lora=str(source)), shown)
    for model in (output, last):
        with pytest.raises(ConfigError, match="have this LoRA in them already"):
            load_pipeline(model, lora=str(output))
    with pytest.raises(
        ConfigError, match="does not fit FluxTransformer2DModel: .*weights .32, 32., the model's are"
    ):
        load_pipeline("small-flux", lora=str(output))
