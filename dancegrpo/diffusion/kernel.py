"""What all transition kernels have in common: the base class, the registry, the Gaussian log-density."""

from __future__ import annotations

import math
from typing import Any

import mindspore as ms
from mindspore import Tensor, nn, ops

from dancegrpo.diffusion.registry import Registry

TRANSITIONS = Registry("transition", "sampler.transition")

_HALF_LOG_TWO_PI = 0.5 * math.log(2.0 * math.pi)


class Transition(nn.Cell):
    """Base of the kernels.

    Called as ``(model_output, sample, sigma, sigma_next, noise=None, prev_sample=None)``:

        model_output: (B, ...) the model's prediction, any float dtype and latent rank.
        sample: (B, ...) the latents at ``sigma``.
        sigma, sigma_next: (B,) or scalar, 0 <= sigma_next < sigma <= 1; timesteps where ``process`` is "diffusion".
        noise: (B, ...) standard normal; the next latents are then drawn with it (rollout).
        prev_sample: (B, ...) given next latents, whose log-probability is wanted (scoring).

    Exactly one of ``noise`` and ``prev_sample`` is given. Returns, all float32:

        prev_sample: (B, ...) the next latents, at ``sigma_next``.
        mean: (B, ...) mean of their distribution.
        std: () or (B, 1, ...) its standard deviation.
        pred_x0: (B, ...) the clean latents that the model predicts.
        log_prob: (B,) log-density of ``prev_sample``, *averaged* over all dimensions but the batch. The next
            latents are a constant for its gradient.
    """

    stochastic = True
    """Whether there is a density, so that the kernel can be trained with."""
    process = "flow"
    """The process that the model was trained on: "flow", or "diffusion" (variance preserving, as DDPM)."""

    def deterministic(self) -> Transition:
        """The noise-free kernel of the same process, for steps that are not to draw noise."""
        from dancegrpo.diffusion.transitions import EulerODE

        return EulerODE()

    def step_size(self, sigma: Tensor, sigma_next: Tensor) -> Tensor:
        """The time that a step takes, (B,) or (): divides the variance out of a step's std (see
        `rl.objectives`)."""
        return sigma - sigma_next


def gaussian_log_prob(value: Tensor, mean: Tensor, std: Tensor) -> Tensor:
    """Log-density of N(mean, std^2), averaged over all dimensions but the first: (B, ...) to (B,).

    The mean, not the sum: ratios then stay near 1 at any latent size, and clip ranges carry over.
    """
    squares = ops.square(value - mean).reshape((value.shape[0], -1)).mean(axis=-1)
    std = std.reshape(-1)  # (1,) or (B,)
    # log1p(std - 1), because MindSpore's log on CPU gives a number another logarithm in the last places of a
    # batch than in the first ones: a transition could then not be scored twice to the same bit.
    return -squares / (2.0 * std * std) - ops.log1p(std - 1.0) - _HALF_LOG_TWO_PI


def next_latents(mean: Tensor, std: Tensor, noise: Tensor | None, prev_sample: Tensor | None) -> Tensor:
    """The next latents, drawn from N(mean, std^2) with `noise` or the given ones; a constant for gradients."""
    if (noise is None) == (prev_sample is None):
        raise ValueError("a transition takes exactly one of noise and prev_sample")
    if prev_sample is None:
        return ops.stop_gradient(mean + std * ops.cast(noise, ms.float32))
    return ops.stop_gradient(ops.cast(prev_sample, ms.float32))


def without_density(mean: Tensor, prev_sample: Tensor | None) -> Tensor:
    """The log-probabilities of a deterministic kernel, (B,) not-a-number; given latents cannot be scored."""
    if prev_sample is not None:
        raise ValueError("a deterministic transition has no density to score prev_sample with")
    # Not None: a graph that returns it calls back into Python, and cannot be kept in the compile cache.
    return ops.full((mean.shape[0],), float("nan"), dtype=ms.float32)


def per_sample(sigma: Any, sample: Tensor) -> Tensor:
    """() stays a scalar; (B,) becomes (B, 1, ...), to broadcast over the latents."""
    if isinstance(sigma, (int, float)):
        sigma = Tensor(sigma, ms.float32)
    sigma = ops.cast(sigma, ms.float32)
    if sigma.ndim == 0:
        return sigma
    return sigma.reshape(sigma.shape + (1,) * (sample.ndim - sigma.ndim))
