"""Transition kernels: one step of the reverse process, as a Gaussian policy, in static-graph cells.

A kernel maps the model's output at (x, sigma) to the distribution of the next latents. Everything is float32
inside, whatever the model computes in, because a ratio of probabilities that is clipped at 1e-4 does not
survive float16. Rectified flow: sigma falls from 1 to 0, x_sigma = (1 - sigma) x0 + sigma eps, v = eps - x0.
"""

from __future__ import annotations

import math
from typing import Any

import mindspore as ms
from mindspore import Tensor, nn, ops

from dancegrpo.config import ConfigError
from dancegrpo.diffusion.registry import Registry

TRANSITIONS = Registry("transition", "sampler.transition")

_HALF_LOG_TWO_PI = 0.5 * math.log(2.0 * math.pi)


def make_transition(name: str, **settings: Any) -> Transition:
    """The transition kernel of that name ("dance_sde", "ode").

    Raises:
        ConfigError: unknown name or setting.
    """
    return TRANSITIONS.build(name, **settings)


class Transition(nn.Cell):
    """Base of the kernels.

    Called as ``(model_output, sample, sigma, sigma_next, noise=None, prev_sample=None)``:

        model_output: (B, ...) the model's prediction, any float dtype and latent rank.
        sample: (B, ...) the latents at ``sigma``.
        sigma, sigma_next: (B,) or scalar, 0 <= sigma_next < sigma <= 1.
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

    def step_size(self, sigma: Tensor, sigma_next: Tensor) -> Tensor:
        """The time that a step takes, (B,) or (): divides the variance out of a step's std (see
        `rl.objectives`)."""
        return sigma - sigma_next


@TRANSITIONS.register("dance_sde")
class DanceSDE(Transition):
    """The SDE of DanceGRPO (Xue et al. 2025, arXiv 2505.07818, eq. 8; `flux_step` in its code).

    With dt = sigma_next - sigma: x0 = x - sigma v; score = -(x - (1 - sigma) x0) / sigma^2;
    mean = x + v dt - eta^2 / 2 score dt; std = eta sqrt(-dt).

    Args:
        eta: noise level, above 0.
    """

    def __init__(self, eta: float = 0.3) -> None:
        super().__init__()
        if not eta > 0:
            raise ConfigError(
                f"sampler.eta must be above 0 for 'dance_sde', got {eta}; for a deterministic chain "
                "choose the transition 'ode'"
            )
        self.eta = float(eta)

    def construct(self, model_output, sample, sigma, sigma_next, noise=None, prev_sample=None):
        if (noise is None) == (prev_sample is None):
            raise ValueError("a transition takes exactly one of noise and prev_sample")
        velocity = ops.cast(model_output, ms.float32)
        sample = ops.cast(sample, ms.float32)
        sigma = _per_sample(sigma, sample)
        dt = _per_sample(sigma_next, sample) - sigma
        pred_x0 = sample - sigma * velocity
        score = -(sample - (1.0 - sigma) * pred_x0) / (sigma * sigma)
        mean = sample + velocity * dt - (0.5 * self.eta * self.eta) * score * dt
        std = self.eta * ops.sqrt(-dt)
        if prev_sample is None:
            following = ops.stop_gradient(mean + std * ops.cast(noise, ms.float32))
        else:
            following = ops.stop_gradient(ops.cast(prev_sample, ms.float32))
        return following, mean, std, pred_x0, gaussian_log_prob(following, mean, std)


@TRANSITIONS.register("ode")
class EulerODE(Transition):
    """One Euler step of the probability-flow ODE: x + (sigma_next - sigma) v (Flow-Factory, diffusers).

    Deterministic: ``noise`` is not used and may be left out, and ``std`` is 0. There is no density:
    ``log_prob`` is not-a-number, and giving ``prev_sample`` (to be scored) is a ValueError.
    """

    stochastic = False

    def __init__(self) -> None:
        super().__init__()

    def construct(self, model_output, sample, sigma, sigma_next, noise=None, prev_sample=None):
        if prev_sample is not None:
            raise ValueError(
                "the ode transition is deterministic: it has no density to score prev_sample with"
            )
        velocity = ops.cast(model_output, ms.float32)
        sample = ops.cast(sample, ms.float32)
        sigma = _per_sample(sigma, sample)
        mean = sample + (_per_sample(sigma_next, sample) - sigma) * velocity
        # Not None: a graph that returns it calls back into Python, and cannot be kept in the compile cache.
        no_density = ops.full((sample.shape[0],), float("nan"), dtype=ms.float32)
        return mean, mean, ops.zeros_like(sigma), sample - sigma * velocity, no_density


def gaussian_log_prob(value: Tensor, mean: Tensor, std: Tensor) -> Tensor:
    """Log-density of N(mean, std^2), averaged over all dimensions but the first: (B, ...) to (B,).

    The mean, not the sum: ratios then stay near 1 at any latent size, and clip ranges carry over.
    """
    squares = ops.square(value - mean).reshape((value.shape[0], -1)).mean(axis=-1)
    std = std.reshape(-1)  # (1,) or (B,)
    # log1p(std - 1), because MindSpore's log on CPU gives a number another logarithm in the last places of a
    # batch than in the first ones: a transition could then not be scored twice to the same bit.
    return -squares / (2.0 * std * std) - ops.log1p(std - 1.0) - _HALF_LOG_TWO_PI


def _per_sample(sigma: Any, sample: Tensor) -> Tensor:
    """() stays a scalar; (B,) becomes (B, 1, ...), to broadcast over the latents."""
    if isinstance(sigma, (int, float)):
        sigma = Tensor(sigma, ms.float32)
    sigma = ops.cast(sigma, ms.float32)
    if sigma.ndim == 0:
        return sigma
    return sigma.reshape(sigma.shape + (1,) * (sample.ndim - sigma.ndim))
