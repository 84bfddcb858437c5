"""The noise levels of variance-preserving diffusion (Ho et al. 2020, DDPM), with diffusers' names of the settings."""

from __future__ import annotations

import math

import numpy as np

from dancegrpo.config import ConfigError, choices_text

BETA_SCHEDULES = ("linear", "scaled_linear", "squaredcos_cap_v2")


def alphas_cumprod(
    beta_schedule: str = "scaled_linear",
    beta_start: float = 0.00085,
    beta_end: float = 0.012,
    num_train_timesteps: int = 1000,
    rescale_betas_zero_snr: bool = False,
) -> np.ndarray:
    """The share of the signal's variance at each timestep, float32 (num_train_timesteps,), falling.

    Args:
        beta_schedule: "linear" in beta, "scaled_linear" in its root (Stable Diffusion), or "squaredcos_cap_v2"
            (Nichol and Dhariwal 2021, eq. 17; start and end are not used).
        beta_start, beta_end: variance that the first and the last step add, in (0, 1).
        num_train_timesteps: steps of the process.
        rescale_betas_zero_snr: scale the levels so that the last one is exactly 0 (Lin et al. 2023, algorithm 1).

    Raises:
        ConfigError: an unknown schedule or a number out of range.
    """
    if beta_schedule not in BETA_SCHEDULES:
        raise ConfigError(
            f"beta_schedule is {beta_schedule!r}; {choices_text(beta_schedule, BETA_SCHEDULES)}"
        )
    if not 0 < beta_start <= beta_end < 1 or num_train_timesteps < 1:
        raise ConfigError(
            f"beta_start {beta_start}, beta_end {beta_end} and num_train_timesteps {num_train_timesteps} must be "
            "0 < start <= end < 1 and at least 1"
        )
    if beta_schedule == "linear":
        betas = np.linspace(beta_start, beta_end, num_train_timesteps)
    elif beta_schedule == "scaled_linear":
        betas = np.linspace(math.sqrt(beta_start), math.sqrt(beta_end), num_train_timesteps) ** 2
    else:
        u = np.arange(num_train_timesteps + 1) / num_train_timesteps
        level = np.cos((u + 0.008) / 1.008 * math.pi / 2) ** 2
        betas = np.minimum(1.0 - level[1:] / level[:-1], 0.999)
    levels = np.cumprod(1.0 - betas)
    if rescale_betas_zero_snr:
        root = np.sqrt(levels)
        levels = ((root - root[-1]) * root[0] / (root[0] - root[-1])) ** 2
    return levels.astype(np.float32)
