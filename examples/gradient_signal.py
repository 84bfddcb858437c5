"""How much of a policy gradient is signal, and how far along it one may go.

    python examples/gradient_signal.py --rollouts 5
    python examples/gradient_signal.py --rollouts 6 --set train.shared_noise=false

Trains nothing. Prints, for each denoising step, how well the gradients of different rollouts (other prompts, other
noise) agree, and then what steps of several lengths along the averaged gradient do to the reward of fresh rollouts.
The settings of docs/recipes.md are those of flux_small.yaml with 24 prompts a rollout.
"""

from __future__ import annotations

import argparse
import itertools
import tempfile
from pathlib import Path

import numpy as np

from dancegrpo.config import load_config
from dancegrpo.runtime.cli import common_options, run_cli

LENGTHS = (0.3, 1.0, 3.0)
FRESH = (101, 102)  # iterations whose prompts and noise no gradient has seen


def gradients(trainer, iteration: int) -> np.ndarray:
    """Flat gradients (T - 1, size) at the current weights: for each step that of all chains of one rollout."""
    trajectory = trainer.rollout(iteration)
    advantages = trainer.advantage(trainer.score(trajectory), iteration)
    images = np.arange(len(trajectory.prompts))
    result = []
    for step in range(trainer.counts.steps - 1):
        pairs = np.stack([images, np.full_like(images, step)], axis=1)
        for part in pairs.reshape(-1, trainer.config.train.micro_batch, 2):
            trainer.updater.accumulate(trajectory.batch(part, advantages))
        result.append(trainer.updater.gradients.asnumpy().copy())
        trainer.updater.discard()
    return np.stack(result)


def agreement(gradients: np.ndarray, scale: np.ndarray) -> str:
    """Mean cosine between rows, with its standard error over the pairs."""
    rows = gradients / scale
    rows /= np.linalg.norm(rows, axis=1, keepdims=True)
    cosines = [float(a @ b) for a, b in itertools.combinations(rows, 2)]
    return f"{np.mean(cosines):+.4f} +- {np.std(cosines) / np.sqrt(len(cosines)):.4f}"


def fresh_rewards(trainer, weights: np.ndarray) -> np.ndarray:
    """Mean reward of each group of the fresh rollouts with these weights."""
    trainer.updater.flat.show(weights.astype(np.float32))
    totals = [trainer.reward_set.total(trainer.score(trainer.rollout(iteration))) for iteration in FRESH]
    return np.concatenate(totals).reshape(-1, trainer.config.train.candidates).mean(axis=1)


def measure(trainer, rollouts: int) -> None:
    per_step = np.stack([gradients(trainer, iteration) for iteration in range(1, rollouts + 1)], axis=1)
    scale = np.sqrt((per_step**2).mean(axis=(0, 1))) + 1e-12  # what AdamW divides by
    steps = len(per_step)
    for step in range(steps):
        print(f"step {step}: cosine between rollouts {agreement(per_step[step], scale)}")
    print(f"all steps: {agreement(per_step.sum(axis=0), scale)}")

    start = trainer.updater.flat.weights.asnumpy().copy()
    base = fresh_rewards(trainer, start)
    print(f"reward of fresh rollouts: {base.mean():.4f}")
    directions = {
        "all steps": per_step.mean(axis=(0, 1)) / scale,
        "first half": per_step[: (steps + 1) // 2].mean(axis=(0, 1)) / scale,
        "random": np.random.default_rng(0).standard_normal(start.shape),
    }
    for (name, direction), length in itertools.product(directions.items(), LENGTHS):
        gain = fresh_rewards(trainer, start - length * direction / np.linalg.norm(direction)) - base
        print(
            f"{name}, length {length}: {gain.mean():+.4f} +- {gain.std() / np.sqrt(len(gain)):.4f}",
            flush=True,
        )


def main(arguments=None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, parents=[common_options()]
    )
    parser.add_argument(
        "--rollouts", type=int, default=5, metavar="N", help="rollouts per gradient (default: 5)"
    )
    args = parser.parse_args(arguments)
    fixed = ["data.prompts_per_iteration=24", "train.updates_per_rollout=1", "output.sample_every=0"]
    config = load_config(args.config, [*fixed, "output.tensorboard=false", *args.set])
    from dancegrpo.rl.launch import build_trainer, open_run

    with tempfile.TemporaryDirectory() as folder, open_run(Path(folder, "run"), config) as run:
        measure(build_trainer(config, run), args.rollouts)


if __name__ == "__main__":
    run_cli(main)
