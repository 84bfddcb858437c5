"""Noise schedules: which sigmas (or timesteps) a chain of denoising steps goes through. Host mathematics, float32."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from dancegrpo.config import ConfigError, choices_text
from dancegrpo.diffusion.registry import Registry

TRAIN_TIMESTEPS = 1000
"""Models are trained on timesteps 1000 * sigma (the convention of diffusers)."""

SCHEDULES = Registry("schedule")


@dataclass(frozen=True)
class Schedule:
    """A chain of T steps.

    Attributes:
        sigmas: float32 (T+1,), falling, of a flow from 1 to 0; of a diffusion process its timesteps, and at the end a
            negative number.
        timesteps: float32 (T,), what the model is told at each step.
        ends: float32 (T,), where step i from sigmas[i] ends; None: at sigmas[i+1].
    """

    sigmas: np.ndarray
    timesteps: np.ndarray
    ends: np.ndarray | None = None

    @property
    def sigmas_next(self) -> np.ndarray:
        """Float32 (T,): step i goes from sigmas[i] to sigmas_next[i]."""
        return self.sigmas[1:] if self.ends is None else self.ends

    @property
    def num_steps(self) -> int:
        """T."""
        return len(self.timesteps)


def make_schedule(name: str, num_steps: int, **settings: Any) -> Schedule:
    """The schedule of that name.

    Args:
        name: "flow_match", "flow_match_euler", "ddim" or "ddpm".
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


TIME_SHIFTS = ("exponential", "linear")


@SCHEDULES.register("flow_match_euler")
def flow_match_euler(
    num_steps: int,
    shift: float = 1.0,
    use_dynamic_shifting: bool = False,
    time_shift_type: str = "exponential",
    image_seq_len: int | None = None,
    base_shift: float = 0.5,
    max_shift: float = 1.15,
    base_image_seq_len: int = 256,
    max_image_seq_len: int = 4096,
    num_train_timesteps: int = TRAIN_TIMESTEPS,
    explicit_sigmas: bool | None = None,
) -> Schedule:
    """The schedule of diffusers' FlowMatchEulerDiscreteScheduler (SD3, FLUX), with its names of the settings.

    A grid u from 1 down, then sigma = s u / (1 + (s-1) u) with s = `shift`, and 0 as the last sigma. With dynamic
    shifting s = e^mu (exponential) or mu (linear), mu on the line through (base_image_seq_len, base_shift) and
    (max_image_seq_len, max_shift).

    Args:
        num_steps: T.
        shift: s > 0 of the static shift; without effect in a dynamic one.
        use_dynamic_shifting, time_shift_type, base_shift, max_shift, base_image_seq_len, max_image_seq_len: above.
        image_seq_len: number of image tokens, which a dynamic shift needs.
        num_train_timesteps: timesteps are this times sigma.
        explicit_sigmas: the grid ends at 1/T, as pipelines that give the scheduler their sigmas have it (FLUX);
            False: at the smallest sigma of training, already shifted (SD3). None: True for a dynamic shift.

    Raises:
        ConfigError: a value out of range.
    """
    if time_shift_type not in TIME_SHIFTS:
        raise ConfigError(
            f"time_shift_type is {time_shift_type!r}; {choices_text(time_shift_type, TIME_SHIFTS)}"
        )
    scale = float(shift)
    if use_dynamic_shifting:
        if image_seq_len is None or image_seq_len < 1:
            raise ConfigError(f"a dynamic shift needs image_seq_len, at least 1, got {image_seq_len}")
        mu = dynamic_shift(image_seq_len, base_shift, max_shift, base_image_seq_len, max_image_seq_len)
        scale = math.exp(mu) if time_shift_type == "exponential" else mu
    if not scale > 0:
        raise ConfigError(f"sampler.shift must be above 0, got {scale}")
    lowest = 1.0 / num_train_timesteps
    if not use_dynamic_shifting:
        lowest = scale * lowest / (1.0 + (scale - 1.0) * lowest)
    if use_dynamic_shifting if explicit_sigmas is None else explicit_sigmas:
        lowest = 1.0 / num_steps
    uniform = np.linspace(1.0, lowest, num_steps)
    sigmas = (scale * uniform / (1.0 + (scale - 1.0) * uniform)).astype(np.float32)
    return Schedule(np.append(sigmas, np.float32(0)), sigmas * np.float32(num_train_timesteps))


def dynamic_shift(
    image_seq_len: int,
    base_shift: float = 0.5,
    max_shift: float = 1.15,
    base_image_seq_len: int = 256,
    max_image_seq_len: int = 4096,
) -> float:
    """mu of a number of image tokens: more tokens, more steps at high noise."""
    slope = (max_shift - base_shift) / (max_image_seq_len - base_image_seq_len)
    return base_shift + slope * (image_seq_len - base_image_seq_len)


SPACINGS = ("leading", "trailing", "linspace")


@SCHEDULES.register("ddpm")
@SCHEDULES.register("ddim")
def diffusion_timesteps(
    num_steps: int,
    timestep_spacing: str = "leading",
    steps_offset: int = 0,
    num_train_timesteps: int = TRAIN_TIMESTEPS,
) -> Schedule:
    """The timesteps of diffusers' DDIM and DDPM schedulers, with its names of the settings.

    Step i goes from t_i to t_i - floor(num_train_timesteps / T), which is below 0 at the end.

    Args:
        num_steps: T, at most num_train_timesteps.
        timestep_spacing: "leading" i floor(1000 / T) + offset; "trailing" round(1000 - i 1000 / T) - 1; "linspace"
            T numbers from 0 to 999, rounded.
        steps_offset: of the leading spacing.
        num_train_timesteps: steps of the process.

    Raises:
        ConfigError: an unknown spacing or a value out of range.
    """
    if timestep_spacing not in SPACINGS:
        raise ConfigError(
            f"timestep_spacing is {timestep_spacing!r}; {choices_text(timestep_spacing, SPACINGS)}"
        )
    if num_steps > num_train_timesteps:
        raise ConfigError(
            f"sampler.num_steps is {num_steps}, but the model has {num_train_timesteps} timesteps"
        )
    ratio = num_train_timesteps // num_steps
    if timestep_spacing == "leading":
        timesteps = np.arange(num_steps)[::-1] * ratio + steps_offset
    elif timestep_spacing == "trailing":
        distance = num_train_timesteps / num_steps
        timesteps = np.round(np.arange(num_train_timesteps, 0, -distance))[:num_steps] - 1
    else:
        timesteps = np.round(np.linspace(0, num_train_timesteps - 1, num_steps))[::-1]
    if not 0 <= timesteps[0] < num_train_timesteps:
        raise ConfigError(
            f"steps_offset {steps_offset} makes the first timestep {timesteps[0]:.0f}; it must be below "
            f"{num_train_timesteps}"
        )
    timesteps = timesteps.astype(np.float32)
    ends = np.where(timesteps >= ratio, timesteps - ratio, -1).astype(np.float32)
    return Schedule(np.append(timesteps, np.float32(-1)), timesteps, ends)
