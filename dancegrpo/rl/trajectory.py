"""What a rollout leaves behind, and which of its transitions are trained on, in which order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dancegrpo.diffusion.schedules import Schedule
from dancegrpo.rl.update import TransitionBatch
from dancegrpo.runtime import noise


@dataclass(frozen=True)
class Trajectory:
    """A rollout of P prompts with K candidates each: N = P K images, the candidates of a prompt side by side.

    Held on the host: a rollout of a large model does not fit beside its gradients on a device, and an update
    only needs a micro-batch at a time.

    Attributes:
        iteration: counted from 1.
        prompts: N prompts. metadata: their N records.
        group_size: K.
        conditions: what the denoiser takes for each of the P prompts, arrays (P, ...).
        schedule: sigmas and timesteps of the T steps.
        latents: float32 (T+1, N, ...), as they were stored when their log-probability was taken.
        log_probs: float32 (T, N), under the policy that sampled; not-a-number for deterministic steps.
        images: (N, 3, H, W) float in [0, 1], on the device.
        scoring: the `rewards.streaming.ScoreStream` of these images.
    """

    iteration: int
    prompts: Sequence[str]
    metadata: Sequence[Mapping[str, Any]]
    group_size: int
    conditions: tuple[np.ndarray, ...]
    schedule: Schedule
    latents: np.ndarray
    log_probs: np.ndarray
    images: Any
    scoring: Any = None

    def batch(
        self, chosen: np.ndarray, advantages: np.ndarray, reference_means: np.ndarray | None = None
    ) -> TransitionBatch:
        """The transitions that ``chosen``, int (B, 2) of image and step, names.

        Args:
            advantages: float32 (N,). reference_means: float32 (B, ...), of these transitions, or None.
        """
        image, step = chosen[:, 0], chosen[:, 1]
        sigmas, prompt = self.schedule.sigmas, image // self.group_size
        return TransitionBatch(
            latents=self.latents[step, image],
            following=self.latents[step + 1, image],
            sigmas=sigmas[step],
            sigmas_next=self.schedule.sigmas_next[step],
            timesteps=self.schedule.timesteps[step],
            log_probs=self.log_probs[step, image],
            advantages=advantages[image],
            conditions=tuple(array[prompt] for array in self.conditions),
            reference_means=reference_means,
        )


def select_transitions(
    images: np.ndarray, trainable: int, per_image: int, seed: int, iteration: int, selection: str = "random"
) -> np.ndarray:
    """Which transitions are trained, int (len(images) * per_image, 2) of image and step, in training order.

    For each of the ``images`` (their numbers in the rollout) ``per_image`` of the first ``trainable`` steps. The last
    step of a chain is never one of them: it does not touch the decoded image, which is the clean prediction made
    before it. The order is random, so that each update sees all prompts and noise levels. Both are pure functions of
    the arguments.

    Args:
        selection: "random" draws the steps of each image without replacement, "first" takes the noisiest ones.
    """
    drawn = [
        noise.generator("timesteps", seed, iteration, image).permutation(trainable)[:per_image]
        if selection == "random"
        else np.arange(per_image)
        for image in images
    ]
    pairs = np.stack([np.repeat(images, per_image), np.concatenate(drawn)], axis=1)
    return noise.generator("order", seed, iteration).permutation(pairs)
