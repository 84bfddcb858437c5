"""Our side of the benchmarks: iterations of the real `Trainer`, in a process of its own."""

from __future__ import annotations

import dataclasses
import os
import sys
import time
from typing import Any

import numpy as np

from dancegrpo.config import Config
from dancegrpo.runtime import noise, probes


class _NoTorch:
    """Import hook: as in a default install, there is no PyTorch (tensorboardX loads it where it finds it)."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        if name == "torch":
            raise ModuleNotFoundError("No module named 'torch'", name="torch")


class OurIteration:
    """A trainer whose iterations are timed; for `workers.Worker`.

    Every iteration is iteration 1 again, with the weights of the last one: the same prompts, so that no text
    is encoded in the measured time.

    Args:
        config: the run's config.
        threads: of MindSpore's runtime.
        bare: no decoding and no reward: advantages are given.
    """

    def __init__(self, config: Config, threads: int, bare: bool) -> None:
        os.environ["USE_TORCH"] = "0"  # transformers and datasets then do not look for it
        sys.meta_path.insert(0, _NoTorch())
        output = dataclasses.replace(config.output, sample_every=0, compile_cache=False)
        self.config = dataclasses.replace(config, output=output)
        from dancegrpo.rl import build_trainer

        self.trainer = build_trainer(self.config, None)
        from mindspore.device_context.cpu.op_tuning import threads_num

        threads_num(threads)
        counts = self.trainer.counts
        self.advantages = None
        if bare:
            self.trainer.pipeline.decode = _undecoded
            rewards = noise.generator("benchmark", config.train.seed).random(counts.images, np.float32)
            self.advantages = self.trainer.advantage_rule(rewards, counts.candidates)
        self._trajectory = None

    def run(self) -> float:
        """Seconds of one iteration."""
        start = time.perf_counter()
        trajectory = self.trainer.rollout(1)
        advantages = self.advantages
        if advantages is None:
            advantages = self.trainer.advantage(self.trainer.score(trajectory), 1)
        self.trainer.update(trajectory, advantages)
        seconds = time.perf_counter() - start
        self._trajectory = trajectory
        return seconds

    def model(self) -> dict[str, Any]:
        """What PyTorch needs to build the same model: its folder and the guidance scale (None: no input)."""
        pipeline = self.trainer.pipeline
        folder = pipeline.folder / pipeline.component
        return {"folder": str(folder), "guidance_scale": pipeline.denoiser.guidance_scale}

    def write_reference(self, file: str) -> None:
        """Writes what others need to do the same work, and the numbers that they must get, as npz.

        Inputs: `conditions_<i>` (P, ...), `sigmas` (T+1,), `timesteps` (T,), `chosen` (M, 2) all trained
        transitions in order, `advantages` (N,), `latents` (T+1, N, ...), and `old_log_probs` (T, N): those of
        the rollout moved by up to two clip ranges, so that the loss has ratios on both sides of the clip.
        Results: `log_probs` (T, N) of the rollout, `velocities` (T, B, ...) at the latents of the first B
        images, `loss`, `grad_norm` and `update_norm` (length of the step) of the first update on
        `old_log_probs`.
        """
        from dancegrpo.rl.trajectory import select_transitions

        trainer, train, counts = self.trainer, self.config.train, self.trainer.counts
        trajectory = trainer.rollout(1)
        chosen = select_transitions(
            np.arange(counts.images),
            counts.steps - 1,
            counts.trained_per_image,
            train.seed,
            1,
            train.timestep_selection,
        )
        random = noise.generator("benchmark", "ratios", train.seed)
        moves = 2 * train.clip_range * random.uniform(-1, 1, trajectory.log_probs.shape)
        moved = dataclasses.replace(trajectory, log_probs=(trajectory.log_probs + moves).astype(np.float32))
        velocities = self._velocities(trajectory)
        for rows in chosen[: counts.transitions_per_update].reshape(-1, train.micro_batch, 2):
            trainer.updater.accumulate(moved.batch(rows, self.advantages))
        stats, before = trainer.updater.stats(), trainer.updater.flat.weights.asnumpy().copy()
        trainer.updater.apply()
        step = trainer.updater.flat.weights.asnumpy() - before
        np.savez(
            file,
            sigmas=trajectory.schedule.sigmas,
            timesteps=trajectory.schedule.timesteps,
            chosen=chosen,
            advantages=self.advantages,
            latents=trajectory.latents,
            log_probs=trajectory.log_probs,
            old_log_probs=moved.log_probs,
            velocities=velocities,
            loss=stats.policy_loss,
            grad_norm=stats.grad_norm,
            update_norm=np.linalg.norm(step.astype(np.float64)),
            **{f"conditions_{i}": array for i, array in enumerate(trajectory.conditions)},
        )

    def _velocities(self, trajectory: Any) -> np.ndarray:
        """Float32 (T, B, ...), through the rollout's own graph: v = (x - x0) / sigma."""
        from mindspore import Tensor

        batch, found = self.config.train.micro_batch, []
        nothing = np.zeros(len(trajectory.prompts), np.float32)
        for step in range(trajectory.schedule.num_steps):
            rows = np.stack([np.arange(batch), np.full(batch, step)], axis=1)
            at = trajectory.batch(rows, nothing)
            inputs = (at.latents, at.sigmas, at.sigmas_next, at.timesteps, np.zeros_like(at.latents))
            outputs = self.trainer.policy_step(*map(Tensor, inputs), None, *map(Tensor, at.conditions))
            sigma = trajectory.schedule.sigmas[step]
            found.append((at.latents - outputs[3].asnumpy()) / sigma)
        return np.stack(found)

    def memory(self) -> dict[str, float]:
        """Peak resident memory of this process so far, and what the last trajectory stores, in MB (2**20)."""
        trajectory = self._trajectory
        arrays = (trajectory.latents, trajectory.log_probs, trajectory.images, *trajectory.conditions)
        return {
            "peak_rss_mb": probes.peak_rss_mb(),
            "stored_mb": sum(array.nbytes for array in arrays) / 2**20,
        }


def _undecoded(latents: Any) -> Any:
    return latents
