"""Transition kernels: one step of the reverse process, as a Gaussian policy, in static-graph cells.

A kernel maps the model's output at (x, sigma) to the distribution of the next latents. Everything is float32
inside, whatever the model computes in, because a ratio of probabilities that is clipped at 1e-4 does not
survive float16. Rectified flow: sigma falls from 1 to 0, x_sigma = (1 - sigma) x0 + sigma eps, v = eps - x0.
"""

from __future__ import annotations

import math
from typing import Any

import mindspore as ms
from mindspore import Tensor, ops

from dancegrpo.config import ConfigError
from dancegrpo.diffusion.ddim import DDIM
from dancegrpo.diffusion.kernel import (
    TRANSITIONS,
    Transition,
    gaussian_log_prob,
    next_latents,
    per_sample,
    without_density,
)

__all__ = [
    "CPS",
    "DDIM",
    "TRANSITIONS",
    "DanceSDE",
    "EulerODE",
    "FlowSDE",
    "Transition",
    "gaussian_log_prob",
    "make_transition",
]


def make_transition(name: str, **settings: Any) -> Transition:
    """The transition kernel of that name ("dance_sde", "flow_sde", "cps", "ddim", "ode").

    Raises:
        ConfigError: unknown name or setting.
    """
    return TRANSITIONS.build(name, **settings)


def _checked_eta(name: str, eta: float) -> float:
    if not eta > 0:
        raise ConfigError(
            f"sampler.eta must be above 0 for {name!r}, got {eta}; for a deterministic chain choose the "
            "transition 'ode'"
        )
    return float(eta)


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
        self.eta = _checked_eta("dance_sde", eta)

    def construct(self, model_output, sample, sigma, sigma_next, noise=None, prev_sample=None):
        velocity, sample = ops.cast(model_output, ms.float32), ops.cast(sample, ms.float32)
        sigma = per_sample(sigma, sample)
        dt = per_sample(sigma_next, sample) - sigma
        pred_x0 = sample - sigma * velocity
        score = -(sample - (1.0 - sigma) * pred_x0) / (sigma * sigma)
        mean = sample + velocity * dt - (0.5 * self.eta * self.eta) * score * dt
        std = self.eta * ops.sqrt(-dt)
        following = next_latents(mean, std, noise, prev_sample)
        return following, mean, std, pred_x0, gaussian_log_prob(following, mean, std)


@TRANSITIONS.register("flow_sde")
class FlowSDE(Transition):
    """The SDE of Flow-GRPO (Liu et al. 2025, arXiv 2505.05470, eq. 9; `sde_step_with_logprob` in its code).

    With dt = sigma_next - sigma and s = eta sqrt(sigma / (1 - sigma)):
    mean = x (1 + s^2 / (2 sigma) dt) + v (1 + s^2 (1 - sigma) / (2 sigma)) dt; std = s sqrt(-dt).
    At sigma = 1, where s is infinite, its sigma is the next one.

    Args:
        eta: noise level, above 0.
    """

    def __init__(self, eta: float = 0.7) -> None:
        super().__init__()
        self.eta = _checked_eta("flow_sde", eta)

    def construct(self, model_output, sample, sigma, sigma_next, noise=None, prev_sample=None):
        velocity, sample = ops.cast(model_output, ms.float32), ops.cast(sample, ms.float32)
        sigma, following_sigma = per_sample(sigma, sample), per_sample(sigma_next, sample)
        dt = following_sigma - sigma
        finite = ops.where(sigma >= 1.0, following_sigma, sigma)
        variance = (self.eta * self.eta) * sigma / (1.0 - finite)
        drift = 0.5 * variance / sigma * dt
        mean = sample * (1.0 + drift) + velocity * (dt + drift * (1.0 - sigma))
        std = ops.sqrt(variance) * ops.sqrt(-dt)
        following = next_latents(mean, std, noise, prev_sample)
        log_prob = gaussian_log_prob(following, mean, std)
        return following, mean, std, sample - sigma * velocity, log_prob


@TRANSITIONS.register("cps")
class CPS(Transition):
    """Coefficient-preserving sampling (Wang and Yu 2025, Flow-CPS, arXiv 2509.05952).

    std = sigma_next sin(pi eta / 2); x0 = x - sigma v, x1 = x + (1 - sigma) v;
    mean = (1 - sigma_next) x0 + sqrt(sigma_next^2 - std^2) x1. So noise replaces noise and the latents have the level
    that the model expects. What it calls the log-probability is -<(x' - mean)^2>, without the variance, as its
    authors define it: finite at sigma_next = 0 too.

    Args:
        eta: noise level in (0, 1]; 1 replaces all noise.
    """

    def __init__(self, eta: float = 0.7) -> None:
        super().__init__()
        self.eta = _checked_eta("cps", eta)
        if eta > 1:
            raise ConfigError(f"sampler.eta must be at most 1 for 'cps', which replaces noise, got {eta}")
        self.share, self.rest = math.sin(0.5 * math.pi * eta), math.cos(0.5 * math.pi * eta)

    def step_size(self, sigma: Tensor, sigma_next: Tensor) -> Tensor:
        """1: the std has no time-step factor."""
        return ops.ones_like(sigma)

    def construct(self, model_output, sample, sigma, sigma_next, noise=None, prev_sample=None):
        velocity, sample = ops.cast(model_output, ms.float32), ops.cast(sample, ms.float32)
        sigma, following_sigma = per_sample(sigma, sample), per_sample(sigma_next, sample)
        pred_x0 = sample - sigma * velocity
        pred_noise = sample + (1.0 - sigma) * velocity
        std = following_sigma * self.share
        mean = (1.0 - following_sigma) * pred_x0 + following_sigma * self.rest * pred_noise
        following = next_latents(mean, std, noise, prev_sample)
        squares = ops.square(following - mean).reshape((sample.shape[0], -1)).mean(axis=-1)
        return following, mean, std, pred_x0, -squares


@TRANSITIONS.register("ode")
class EulerODE(Transition):
    """One Euler step of the probability-flow ODE: x + (sigma_next - sigma) v (Flow-Factory, diffusers).

    std is 0 and there is no density: ``noise`` is ignored, ``log_prob`` is not-a-number, and ``prev_sample``
    cannot be scored.
    """

    stochastic = False

    def __init__(self) -> None:
        super().__init__()

    def construct(self, model_output, sample, sigma, sigma_next, noise=None, prev_sample=None):
        velocity, sample = ops.cast(model_output, ms.float32), ops.cast(sample, ms.float32)
        sigma = per_sample(sigma, sample)
        mean = sample + (per_sample(sigma_next, sample) - sigma) * velocity
        log_prob = without_density(mean, prev_sample)
        return mean, mean, ops.zeros_like(sigma), sample - sigma * velocity, log_prob
