"""Noise schedules: which sigmas a chain of denoising steps goes through. Host mathematics, float32."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from dancegrpo.config import ConfigError
from dancegrpo.diffusion.registry import Registry

TRAIN_TIMESTEPS = 1000
"""Models are trained on timesteps 1000 * sigma (the convention of diffusers)."""

SCHEDULES = Registry("schedule")


@dataclass(frozen=True)
class Schedule:
    """A chain of T steps.

    Attributes:
        sigmas: float32 (T+1,), strictly falling from 1 to 0; step i goes from sigmas[i] to sigmas[i+1].
        timesteps: float32 (T,), what the model is told at each step.
    """

    sigmas: np.ndarray
    timesteps: np.ndarray

    @property
    def num_steps(self) -> int:
        """T."""
        return len(self.timesteps)


def make_schedule(name: str, num_steps: int, **settings: Any) -> Schedule:
    """The schedule of that name.

    Args:
        name: "flow_match".
        num_steps: T >= 1.
        settings: see the schedule's function.

    Raises:
        ConfigError: unknown name or setting, or a value out of range.
    """
    if num_steps < 1:
        raise ConfigError(f"sampler.num_steps must be at least 1, got {num_steps}")
    return SCHEDULES.build(name, num_steps, **settings)


@SCHEDULES.register("flow_match")
def flow_match(num_steps: int, shift: float = 1.0, truncate_timesteps: bool = False) -> Schedule:
    """Uniform grid with a time shift: u_i = 1 - i/T, sigma_i = s u_i / (1 + (s-1) u_i).

    Source: Esser et al., "Scaling Rectified Flow Transformers", eq. 23; DanceGRPO's `sd3_time_shift`.

    Args:
        num_steps: T.
        shift: s > 0; above 1 spends more of the steps at high noise.
        truncate_timesteps: timesteps are the integer part of 1000 sigma, as in DanceGRPO's code, instead of
            1000 sigma.
    """
    if not shift > 0:
        raise ConfigError(f"sampler.shift must be above 0, got {shift}")
    uniform = np.linspace(1.0, 0.0, num_steps + 1, dtype=np.float32)
    shift = np.float32(shift)
    sigmas = shift * uniform / (np.float32(1) + (shift - np.float32(1)) * uniform)
    return Schedule(sigmas, timesteps_of(sigmas[:-1], truncate_timesteps))


def timesteps_of(sigmas: np.ndarray, truncate: bool = False) -> np.ndarray:
    """1000 * sigma in float32; with ``truncate`` its integer part (rounded toward zero, still float32)."""
    timesteps = np.asarray(sigmas, np.float32) * np.float32(TRAIN_TIMESTEPS)
    return np.trunc(timesteps) if truncate else timesteps
