"""The compiled sampler: one graph for a denoising step, called T times by the host."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from mindspore import Tensor, nn

from dancegrpo.diffusion.schedules import Schedule
from dancegrpo.diffusion.transitions import Transition


class PolicyStep(nn.Cell):
    """The policy: the moments of a transition, for rollout and for scoring.

    Both go through this one cell, at one batch shape, and score the next latents as stored. So the
    probability ratio before the first update is exactly 1.

    Args:
        denoiser: Cell, ``denoiser(latents, timestep, *conditions) -> model output``.
        transition: see `diffusion.transitions`.
    """

    def __init__(self, denoiser: nn.Cell, transition: Transition) -> None:
        super().__init__(auto_prefix=False)  # the model's parameters keep their names
        self.denoiser = denoiser
        self.transition = transition

    def construct(self, latents, sigma, sigma_next, timestep, noise, prev_sample, *conditions):
        """latents: (B, ...); sigma, sigma_next, timestep: (B,); one of noise and prev_sample: (B, ...), the
        other None. Returns prev_sample, mean, std, pred_x0, log_prob as the transition does."""
        output = self.denoiser(latents, timestep, *conditions)
        return self.transition(output, latents, sigma, sigma_next, noise, prev_sample)


@dataclass(frozen=True)
class Chain:
    """A sampled chain of T steps for B images, on the device.

    Attributes:
        latents: T+1 tensors (B, ...), from the initial noise; empty unless the trajectory was kept.
        log_probs: T tensors (B,), not-a-number for deterministic steps; empty unless the trajectory was kept and
            the transition has a density.
        final: (B, ...) what is decoded: where a deterministic last step ends, else the clean latents that the model
            predicts in it, so that its noise does not reach the image.
    """

    latents: tuple[Tensor, ...]
    log_probs: tuple[Tensor, ...]
    final: Tensor


class Sampler:
    """Runs whole chains at one batch shape.

    Latents stay on the device from step to step; noise comes in from the host, so that it can be
    counter-based.

    Args:
        policy_step: the step; shared with the update graphs.
        schedule: sigmas and timesteps of the chain.
        batch: B, images per call.
        stochastic_steps: steps after that many take the transition's deterministic step, as in MixGRPO (Li et al.,
            2025, arXiv 2507.21802): noise there would blur which of the trained steps earned the reward.
            None: all steps are ``policy_step``.
    """

    def __init__(
        self, policy_step: PolicyStep, schedule: Schedule, batch: int, stochastic_steps: int | None = None
    ) -> None:
        self.policy_step, self.schedule, self.batch = policy_step, schedule, batch
        self.stochastic_steps = schedule.num_steps if stochastic_steps is None else stochastic_steps
        self.ode_step = None
        if self.stochastic_steps < schedule.num_steps:
            self.ode_step = PolicyStep(policy_step.denoiser, policy_step.transition.deterministic())
        self._steps = [
            tuple(Tensor(np.full(batch, value, np.float32)) for value in step)
            for step in zip(schedule.sigmas[:-1], schedule.sigmas_next, schedule.timesteps, strict=True)
        ]

    def sample(
        self,
        initial: np.ndarray,
        conditions: Sequence[np.ndarray],
        noise: np.ndarray | None = None,
        keep: bool = False,
    ) -> Chain:
        """One chain.

        Args:
            initial: float32 (B, ...) standard normal, the latents at sigma = 1.
            conditions: what the denoiser takes besides, each (B, ...).
            noise: float32 (T, B, ...); None for a deterministic transition.
            keep: keep the trajectory.
        """
        if len(initial) != self.batch:
            raise ValueError(f"this sampler was made for {self.batch} images, got {len(initial)}")
        latents = Tensor(np.ascontiguousarray(initial, np.float32))
        conditions = tuple(Tensor(np.ascontiguousarray(array)) for array in conditions)
        kept, log_probs, final = [latents], [], latents
        for index, step in enumerate(self._steps):
            stochastic = index < self.stochastic_steps
            drawn = Tensor(noise[index]) if stochastic and noise is not None else None
            policy_step = self.policy_step if stochastic else self.ode_step
            latents, _, _, clean, log_prob = policy_step(latents, *step, drawn, None, *conditions)
            final = clean if policy_step.transition.stochastic else latents
            if keep:
                kept.append(latents)
                if self.policy_step.transition.stochastic:
                    log_probs.append(log_prob)
        if not keep:
            kept = []
        return Chain(tuple(kept), tuple(log_probs), final)
