"""The loop on a toy model: it learns, resumes to the same bytes, and never lets a bad number through."""

import dataclasses
import json
import os
import signal
import subprocess
import sys
import zlib
from pathlib import Path

import numpy as np
import pytest

from dancegrpo.config import Config, ConfigError
from dancegrpo.runtime.setup import setup_runtime

setup_runtime(compile_cache=False)

import mindspore as ms  # noqa: E402
from mindspore import Tensor, nn, ops  # noqa: E402
from safetensors.numpy import load_file, save_file  # noqa: E402

from dancegrpo.data import PromptSet  # noqa: E402
from dancegrpo.diffusion import PolicyStep, Sampler, make_schedule, make_transition  # noqa: E402
from dancegrpo.pipelines import Pipeline  # noqa: E402
from dancegrpo.rewards import FunctionReward, LabelledReward, RewardSet  # noqa: E402
from dancegrpo.rl import Trainer, open_run  # noqa: E402
from dancegrpo.rl.clipping import ClipRange, clip_verdict  # noqa: E402
from dancegrpo.rl.guard import NotFinite, RatioCheck  # noqa: E402
from dancegrpo.rl.objectives import make_objective  # noqa: E402
from dancegrpo.rl.run_state import CheckpointError, find_resume_point, load_run_state  # noqa: E402
from dancegrpo.rl.trajectory import Trajectory, select_transitions  # noqa: E402
from dancegrpo.rl.update import PolicyUpdater  # noqa: E402
from dancegrpo.runtime.signals import Terminated  # noqa: E402

PROMPTS = PromptSet(tuple(f"prompt {i}" for i in range(5)), tuple({"index": i} for i in range(5)))
KEYS = {
    "iteration", "images", "reward/redness/mean", "reward/redness/group_std",
    "ratio/first_max_deviation", "ratio/mean", "ratio/spread", "ratio/clip_range", "ratio/clip_fraction",
    "loss/policy", "loss/kl", "groups/dead",
    "grad/norm", "lr", "skipped", "time/rollout", "time/score", "time/update",
    "memory/peak_rss_mb", "graph/compilations",
}  # fmt: skip


INTERRUPTED = """
from dancegrpo.runtime.cli import run_cli
from dancegrpo.runtime.signals import StopSignal

def main(arguments):
    from dancegrpo.runtime.setup import setup_runtime
    setup_runtime(compile_cache=False)
    import os, signal, time
    import numpy as np
    from mindspore import Tensor, nn

    class Double(nn.Cell):
        def construct(self, x):
            return x + x

    with StopSignal() as stop:
        Double()(Tensor(np.ones(3, np.float32)))
        os.kill(os.getpid(), signal.SIGINT)
        while not stop.requested:
            time.sleep(0.01)
        stop.check()

run_cli(main)
"""


class ToyDenoiser(nn.Cell):
    """A two-layer network on flattened latents (3, 4), time and a condition."""

    def __init__(self):
        super().__init__()
        rng = np.random.default_rng(0)
        self.inner, self.outer = nn.Dense(12 + 1 + 4, 16), nn.Dense(16, 12)
        for parameter in self.trainable_params():
            values = 0.3 * rng.standard_normal(parameter.shape)
            parameter.set_data(Tensor(values.astype(np.float32)))

    def construct(self, latents, timestep, condition):
        x = ops.cat((latents.reshape((-1, 12)), timestep.reshape((-1, 1)) * 0.001, condition), axis=1)
        return self.outer(ops.sigmoid(self.inner(x))).reshape((-1, 3, 4))


class ToyDecoder(nn.Cell):
    def construct(self, latents):
        return ops.sigmoid(latents).reshape((-1, 3, 2, 2))


class ToyPipeline(Pipeline):
    family, latent_shape, image_size = "ToyPipeline", (3, 4), (2, 2)

    def __init__(self):
        super().__init__(Path())
        self.backbone = self.denoiser = ToyDenoiser()
        self._decoder = ToyDecoder()

    def _encode(self, prompts):
        rows = [np.random.default_rng(zlib.crc32(p.encode())).standard_normal(4) for p in prompts]
        return (np.array(rows, np.float32),)

    def unknown_words(self, prompt):
        return []

    def decode(self, latents):
        return self._decoder(latents)

    def save(self, folder, weights=None):
        (folder / "transformer").mkdir()
        save_file(dict(weights), folder / "transformer" / "weights.safetensors")
        (folder / "model_index.json").write_text("{}")


def redness(images, prompts, metadata):
    """Red minus blue; every prompt has its own scale, so that only groups compare."""
    scale = np.array([1 + record["index"] for record in metadata])
    return scale * (images[..., 0].mean(axis=(1, 2)) - images[..., 2].mean(axis=(1, 2))) / 255


def config_of(iterations=4, output=None, **train) -> Config:
    settings = {
        "candidates": 4, "micro_batch": 8, "learning_rate": 3e-3, "clip_range": 0.02,
        "timestep_fraction": 0.67, "shared_noise": False, "iterations": iterations,
    } | train  # fmt: skip
    base = Config()
    return dataclasses.replace(
        base,
        sampler=dataclasses.replace(base.sampler, num_steps=4),
        data=dataclasses.replace(base.data, prompts_per_iteration=4),
        train=dataclasses.replace(base.train, **settings),
        evaluation=dataclasses.replace(base.evaluation, num_steps=3),
        output=dataclasses.replace(base.output, tensorboard=False, **{"sample_every": 0} | (output or {})),
    )


def train(folder, config, reward=redness, resume=False, trainer=Trainer):
    with open_run(folder, config, resume=resume) as run:
        rewards = RewardSet([LabelledReward("redness", FunctionReward(reward))])
        return trainer(config, ToyPipeline(), rewards, PROMPTS, run).train(), run.metrics()


def bytes_of(folder) -> dict[str, bytes]:
    files = sorted(Path(folder, "checkpoints").rglob("*.safetensors"))
    return {str(file.relative_to(folder)): file.read_bytes() for file in files}


def lasting(rows):
    volatile = ("time/", "memory/", "graph/")
    return [{key: value for key, value in row.items() if not key.startswith(volatile)} for row in rows]


def test_learns_within_its_contract(tmp_path):
    output = {"sample_every": 8, "checkpoint_every": 6, "keep_last": 2}
    config = config_of(16, output, updates_per_rollout=2)
    summary, rows = train(tmp_path / "run", config)
    assert all(set(row) == KEYS for row in rows)
    assert [row["iteration"] for row in rows] == list(range(1, 17))
    assert rows[0]["images"] == 16 and not any(row["skipped"] for row in rows)
    means = [row["reward/redness/mean"] for row in rows]
    assert np.mean(means[-4:]) > np.mean(means[:4]) + 0.1
    assert {row["ratio/first_max_deviation"] for row in rows} == {0.0}
    assert max(abs(row["ratio/mean"] - 1) for row in rows) > 0  # the second update is off-policy
    assert min(row["ratio/spread"] for row in rows) > 0
    assert {row["ratio/clip_range"] for row in rows} == {0.02}
    assert len({row["graph/compilations"] for row in rows}) == 1
    saved = sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir())
    assert saved == ["iteration_000012", "iteration_000016"]
    samples = sorted(path.name for path in (tmp_path / "run" / "samples").iterdir())
    assert samples == [f"iteration_{i:06d}.png" for i in (0, 8, 16)]
    assert (tmp_path / "run" / "report.png").exists()
    assert json.loads((tmp_path / "run" / "summary.json").read_text()) == summary
    assert summary["checkpoint"] == "checkpoints/iteration_000016" and summary["images"] == 256


def test_a_run_says_what_its_clip_range_did(tmp_path):
    config = config_of(2, updates_per_rollout=2, clip_range=1.0, clip_unit="spread")
    summary, rows = train(tmp_path / "run", config)
    # The first rollout is measured, the second is clipped by what it showed.
    assert [row["ratio/clip_range"] for row in rows] == [None, rows[0]["ratio/spread"]]
    assert rows[0]["ratio/clip_fraction"] == 0 < rows[1]["ratio/clip_fraction"] < 0.45
    assert summary["clipping"] is None

    def words(fraction, **settings):
        changed = [row | {"ratio/clip_fraction": fraction, "ratio/clip_range": 0.01} for row in rows]
        return clip_verdict(changed, config_of(2, **{"updates_per_rollout": 2} | settings).train)

    assert "(0.01) never bound in 2 iterations: the ratio's spread" in words(0.0, clip_range=0.01)
    assert "bound nearly everywhere: 96% of the transitions after the first" in words(0.48, clip_range=0.01)
    assert words(0.4) is None  # of all updates; the first of the two never counts
    assert "never used" in words(0.0, updates_per_rollout=1)


def test_resumes_to_the_same_bytes(tmp_path):
    config = config_of(
        4, output={"checkpoint_every": 2, "keep_last": 0, "sample_every": 2}, updates_per_rollout=2,
        ema_decay=0.9, lr_schedule="cosine", warmup_iterations=1, kl_weight=0.1,
        clip_unit="spread", clip_range=1.0,
    )  # fmt: skip
    _, straight = train(tmp_path / "straight", config)
    assert len({row["ratio/clip_range"] for row in straight}) == 4  # follows what is measured
    assert len({row["graph/compilations"] for row in straight}) == 1

    calls = []

    def dying(*args):
        calls.append(1)
        if len(calls) == 4:
            raise RuntimeError("killed")
        return redness(*args)

    with pytest.raises(RuntimeError, match="killed"):
        train(tmp_path / "resumed", config, dying)
    assert len((tmp_path / "resumed" / "metrics.jsonl").read_text().splitlines()) == 3
    _, resumed = train(tmp_path / "resumed", config, resume=True)
    assert lasting(resumed) == lasting(straight)
    expected = bytes_of(tmp_path / "straight")
    assert bytes_of(tmp_path / "resumed") == expected
    assert len(expected) == 2 * 4  # model, policy, optimizer and average of two checkpoints
    for name in ("samples/iteration_000000.png", "samples/iteration_000004.png"):
        assert (tmp_path / "resumed" / name).read_bytes() == (tmp_path / "straight" / name).read_bytes()

    # With an average, it is what the model's folder shows; the weights that are trained lie beside it.
    last = tmp_path / "straight" / "checkpoints" / "iteration_000004"
    state = load_run_state(last)
    shown = load_file(last / "transformer" / "weights.safetensors")
    assert all(np.array_equal(shown[name], state.average[name]) for name in shown)
    assert not np.array_equal(shown["outer.weight"], state.policy["outer.weight"])

    # KL: exactly 0 while the weights are the reference's, then above.
    assert straight[0]["loss/kl"] > 0  # its second update
    assert straight[-1]["loss/kl"] > straight[0]["loss/kl"]

    # A damaged checkpoint is passed over with a message, and one that is asked for is refused.
    weights = last / "run_state" / "policy.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\0")
    point, problems = find_resume_point(tmp_path / "straight")
    assert point == 2 and "iteration_000004" in problems[0] and "policy.safetensors" in problems[0]
    with pytest.raises(CheckpointError, match="policy.safetensors"):
        find_resume_point(tmp_path / "straight", 4)
    (last.parent / "iteration_000002" / "run_state" / "counters.json").unlink()
    with pytest.raises(ConfigError, match="no checkpoint is whole"):
        find_resume_point(tmp_path / "straight")


def test_interrupt_before_an_update_saves_the_iteration_before(tmp_path):
    calls = []

    def interrupting(*args):
        calls.append(1)
        if len(calls) == 2:
            os.kill(os.getpid(), signal.SIGTERM)
        return redness(*args)

    config = config_of(4)
    with pytest.raises(Terminated):
        train(tmp_path / "run", config, interrupting)
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["iteration_000001"]
    assert len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) == 1
    _, rows = train(tmp_path / "run", config, resume=True)
    assert [row["iteration"] for row in rows] == [1, 2, 3, 4]


def test_ctrl_c_stays_ctrl_c_after_a_graph_ran(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(INTERRUPTED)
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=300)
    assert done.returncode == 130, done.stderr


def test_rewards_that_are_not_finite_change_nothing(tmp_path):
    calls = []

    def failing(*args):
        calls.append(1)
        scores = redness(*args)
        if len(calls) == 2:
            scores[3] = np.nan
        return scores if len(calls) < 4 else np.full_like(scores, np.inf)

    config = config_of(9, output={"checkpoint_every": 1, "keep_last": 0}, max_skipped=3)
    with pytest.raises(NotFinite, match=r"iteration 6: 3 updates.*the reward 'redness'.*iteration_000005"):
        train(tmp_path / "run", config, failing)
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [row["skipped"] for row in rows] == [0, 1, 0, 1, 1]
    assert rows[1]["loss/policy"] is None and rows[2]["loss/policy"] is not None
    saved = [load_run_state(path) for path in sorted((tmp_path / "run" / "checkpoints").iterdir())]
    weights = [np.concatenate([array.ravel() for array in state.policy.values()]) for state in saved]
    assert np.isfinite(weights).all()
    changed = [not np.array_equal(a, b) for a, b in zip(weights[:-1], weights[1:], strict=True)]
    assert changed == [False, True, False, False]
    assert [state.counters["updates"] for state in saved] == [1, 1, 2, 2, 2]


class TinyTrajectory:
    """A rollout of the toy model for tests of the updater."""

    def __init__(self, denoiser, conditions, shape, images, batch, steps=4):
        rng = np.random.default_rng(1)
        self.step = PolicyStep(denoiser, make_transition("dance_sde", eta=0.6))
        schedule = make_schedule("flow_match", steps)
        sampler = Sampler(self.step, schedule, batch)
        initial = rng.standard_normal((images, *shape)).astype(np.float32)
        noise = rng.standard_normal((steps, images, *shape)).astype(np.float32)
        parts = [slice(i, i + batch) for i in range(0, images, batch)]
        chains = [sampler.sample(initial[p], [c[p] for c in conditions], noise[:, p], True) for p in parts]
        latents, log_probs = (
            np.concatenate([np.stack([t.asnumpy() for t in getattr(c, name)]) for c in chains], axis=1)
            for name in ("latents", "log_probs")
        )
        self.data = Trajectory(
            1, [""] * images, [{}] * images, 1, tuple(conditions), schedule, latents, log_probs, None
        )
        self.advantages = rng.standard_normal(images).astype(np.float32)
        self.chosen = select_transitions(
            np.arange(images), steps - 1, steps - 1, seed=0, iteration=1
        ).reshape(-1, batch, 2)

    def means(self, batch):
        """Means under the current weights, by the graph of the rollout."""
        arrays = (batch.latents, batch.sigmas, batch.sigmas_next, batch.timesteps, batch.latents)
        return self.step(*map(Tensor, arrays), None, *map(Tensor, batch.conditions))[1].asnumpy()

    def updater(self, **train):
        settings = {"clip_range": 0.02, "learning_rate": 1e-2} | train
        config = dataclasses.replace(Config(), train=dataclasses.replace(Config().train, **settings))
        parameters = self.step.denoiser.trainable_params()
        objective = make_objective("clipped_surrogate")
        return PolicyUpdater(self.step, parameters, objective, config, self.chosen.size // 2)


def toy_trajectory():
    conditions = np.random.default_rng(2).standard_normal((8, 4)).astype(np.float32)
    return TinyTrajectory(ToyDenoiser(), (conditions,), (3, 4), 8, 4)


def test_gradients_that_are_not_finite_change_nothing():
    toy = toy_trajectory()
    updater = toy.updater()
    before = updater.flat.weights.asnumpy().copy()
    bad = toy.advantages.copy()
    bad[5] = np.inf
    for batch in toy.chosen:
        updater.accumulate(toy.data.batch(batch, bad))
    assert not updater.stats().finite
    assert updater.discard() == "the gradient of inner.weight"
    assert np.array_equal(updater.flat.weights.asnumpy(), before)
    for batch in toy.chosen:  # nothing of it is left in the next update
        updater.accumulate(toy.data.batch(batch, toy.advantages))
    stats = updater.stats()
    assert stats.finite and stats.ratio_deviation == 0.0
    updater.apply()
    after = updater.flat.weights.asnumpy()
    assert np.isfinite(after).all() and not np.array_equal(after, before)


def test_trains_on_the_prompts_whose_rewards_differ_most(tmp_path):
    trained = []

    class Watching(Trainer):
        def update(self, trajectory, advantages, images):
            trained.append(images.tolist())
            return super().update(trajectory, advantages, images)

    def reward(images, prompts, metadata):
        """No spread for one prompt in two."""
        values = redness(images, prompts, metadata)
        return np.where(np.array([record["index"] for record in metadata]) % 2, values, 0.0)

    config = config_of(2, trained_prompts=2, updates_per_rollout=1)
    _, rows = train(tmp_path / "run", config, reward, trainer=Watching)
    for iteration, row in enumerate(rows, 1):
        drawn = PROMPTS.batch(iteration, 4, config.train.seed, config.data.shuffle)
        odd = [group for group, index in enumerate(drawn) if index % 2][:2]
        assert row["groups/dead"] == np.mean([index % 2 == 0 for index in drawn])
        assert trained[iteration - 1] == [4 * group + k for group in odd for k in range(4)]


def test_each_loss_term_has_a_gradient():
    toy = toy_trajectory()
    updater = toy.updater(kl_weight=0.5)

    def gradients(advantages, shift):
        """With the reference's means as far from the policy's as ``shift`` says."""
        for chosen in toy.chosen:
            batch = toy.data.batch(chosen, advantages)
            means = toy.means(batch) + np.float32(shift)
            updater.accumulate(dataclasses.replace(batch, reference_means=means))
        stats, flat = updater.stats(), updater.gradients.asnumpy().copy()
        updater.discard()
        return flat, stats

    none = np.zeros_like(toy.advantages)
    dead, stats = gradients(none, 0.0)
    assert not dead.any() and stats.policy_loss == stats.kl_loss == 0
    policy, stats = gradients(toy.advantages, 0.0)
    assert policy.any() and stats.kl_loss == 0
    kl, stats = gradients(none, 1.0)
    assert kl.any() and stats.kl_loss > 0
    both, _ = gradients(toy.advantages, 1.0)
    assert np.abs(both - policy - kl).max() < 1e-5 * np.abs(both).max()

    # The reference and the average are shown to the compiled graph by putting their weights in place.
    batch, flat = toy.data.batch(toy.chosen[0], none), updater.flat
    before, weights = toy.means(batch), flat.weights.asnumpy().copy()
    flat.show(0.5 * weights)
    assert not np.array_equal(toy.means(batch), before)
    assert np.array_equal(flat.weights.asnumpy(), weights)
    flat.show(weights)
    assert np.array_equal(toy.means(batch), before)


def test_ratio_is_exactly_one_for_flux_in_any_order():
    from dancegrpo.models.flux import FluxConfig, FluxTransformer2DModel
    from dancegrpo.pipelines.flux import FluxDenoiser

    settings = FluxConfig(
        in_channels=8, num_layers=1, num_single_layers=1, attention_head_dim=16, num_attention_heads=2,
        joint_attention_dim=24, pooled_projection_dim=24, axes_dims_rope=(4, 6, 6),
    )  # fmt: skip
    model = FluxTransformer2DModel(settings)
    rng = np.random.default_rng(0)
    for parameter in model.trainable_params():
        parameter.set_data(Tensor((0.2 * rng.standard_normal(parameter.shape)).astype(np.float32)))
    text = rng.standard_normal((14, 5, 24)).astype(np.float32)
    pooled = rng.standard_normal((14, 24)).astype(np.float32)
    denoiser = FluxDenoiser(model, 2, 2, 5, None)
    flux = TinyTrajectory(denoiser, (text, pooled), (4, 8), 14, 7)  # 7: no multiple of any vector length
    assert [step for step in flux.chosen[0][:, 1]] != sorted(flux.chosen[0][:, 1])
    updater = flux.updater()
    for batch in flux.chosen:
        updater.accumulate(flux.data.batch(batch, flux.advantages))
    stats = updater.stats()
    assert stats.ratio_deviation == 0.0 and stats.ratio_mean == 1.0 and stats.grad_norm > 0


def test_refuses_what_cannot_train(tmp_path):
    config = config_of()
    ode = dataclasses.replace(config, sampler=dataclasses.replace(config.sampler, transition="ode"))
    with pytest.raises(ConfigError, match="deterministic"):
        train(tmp_path / "run", ode)
    assert not (tmp_path / "run").exists()  # a mistake in the config leaves nothing in the way
    train(tmp_path / "run", config_of(1))
    model = dataclasses.replace(config.model, checkpoint=str(tmp_path / "run" / "checkpoints"))
    with pytest.raises(ConfigError, match="--overwrite would replace the run that holds the model"):
        open_run(tmp_path / "run", dataclasses.replace(config, model=model), overwrite=True).__enter__()
    assert (tmp_path / "run" / "summary.json").exists()
    with pytest.raises(ConfigError, match="numerical noise"):
        RatioCheck(ClipRange(1e-4)).look(2e-4)
    measured = ClipRange(2.0, "spread")
    check = RatioCheck(measured)
    check.look(2e-4)  # nothing is clipped yet
    measured.observe(5e-5)
    with pytest.raises(ConfigError, match="2 spreads = 0.0001 lies below the numerical noise"):
        check.look(2e-4)
    assert ms.get_context("mode") == ms.GRAPH_MODE
