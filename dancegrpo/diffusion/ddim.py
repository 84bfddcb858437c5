"""DDIM with noise, for models of variance-preserving diffusion (Stable Diffusion's U-Nets, DiT, PixArt)."""

from __future__ import annotations

import mindspore as ms
import numpy as np
from mindspore import Tensor, ops

from dancegrpo.config import ConfigError, choices_text
from dancegrpo.diffusion.kernel import (
    TRANSITIONS,
    Transition,
    gaussian_log_prob,
    next_latents,
    per_sample,
    without_density,
)
from dancegrpo.diffusion.noise_levels import alphas_cumprod

PREDICTION_TYPES = ("epsilon", "v_prediction")


@TRANSITIONS.register("ddim")
class DDIM(Transition):
    """Song et al. 2021 (arXiv 2010.02502, eq. 12 and 16); as a policy: DDPO (Black et al. 2023), DanceGRPO.

    Called with timesteps in place of sigmas, t' < t; a negative t' is the end of the chain. With a_t the share of
    signal at t: x0 from the prediction e or v, std = eta sqrt((1 - a') / (1 - a) (1 - a / a')),
    mean = sqrt(a') x0 + sqrt(1 - a' - std^2) e. x0 is not clipped.

    Args:
        eta: 1 is the noise of DDPM; 0 is deterministic, without a density.
        prediction_type: "epsilon" or "v_prediction" (Salimans and Ho 2022).
        beta_schedule, beta_start, beta_end, num_train_timesteps, rescale_betas_zero_snr: see
            `noise_levels.alphas_cumprod`; the defaults are Stable Diffusion 1's.
        set_alpha_to_one: the end of the chain has no noise left; else it has that of timestep 0.

    Raises:
        ConfigError: a value out of range, or epsilon prediction where the last level has no signal.
    """

    process = "diffusion"

    def __init__(
        self,
        eta: float = 1.0,
        prediction_type: str = "epsilon",
        beta_schedule: str = "scaled_linear",
        beta_start: float = 0.00085,
        beta_end: float = 0.012,
        num_train_timesteps: int = 1000,
        rescale_betas_zero_snr: bool = False,
        set_alpha_to_one: bool = False,
    ) -> None:
        super().__init__()
        if not 0 <= eta <= 1:
            raise ConfigError(f"sampler.eta must lie in 0 ... 1 for 'ddim', got {eta}")
        if prediction_type not in PREDICTION_TYPES:
            raise ConfigError(
                f"prediction_type is {prediction_type!r}; {choices_text(prediction_type, PREDICTION_TYPES)}"
            )
        if rescale_betas_zero_snr and prediction_type == "epsilon":
            raise ConfigError(
                "rescale_betas_zero_snr needs prediction_type v_prediction: where there is no signal, "
                "the noise does not tell the image"
            )
        self._levels = {
            "beta_schedule": beta_schedule,
            "beta_start": beta_start,
            "beta_end": beta_end,
            "num_train_timesteps": num_train_timesteps,
            "rescale_betas_zero_snr": rescale_betas_zero_snr,
        }
        self._end, self.prediction_type = set_alpha_to_one, prediction_type
        levels = alphas_cumprod(**self._levels)
        last = np.float32(1) if set_alpha_to_one else levels[0]
        self.levels = Tensor(np.concatenate([[last], levels]).astype(np.float32))  # [t + 1] is that of t
        self.highest = num_train_timesteps
        self.eta, self.stochastic = float(eta), eta > 0
        self.predicts_velocity = prediction_type == "v_prediction"

    def deterministic(self) -> Transition:
        return DDIM(eta=0.0, prediction_type=self.prediction_type, set_alpha_to_one=self._end, **self._levels)

    def step_size(self, sigma: Tensor, sigma_next: Tensor) -> Tensor:
        """1: the std has no time-step factor."""
        return ops.ones_like(sigma)

    def _level(self, timestep: Tensor, sample: Tensor) -> Tensor:
        index = ops.cast(per_sample(timestep, sample), ms.int32) + 1
        return ops.gather(self.levels, ops.clamp(index, 0, self.highest), 0)

    def construct(self, model_output, sample, timestep, timestep_next, noise=None, prev_sample=None):
        output, sample = ops.cast(model_output, ms.float32), ops.cast(sample, ms.float32)
        now, after = self._level(timestep, sample), self._level(timestep_next, sample)
        signal, spread = ops.sqrt(now), ops.sqrt(1.0 - now)
        if self.predicts_velocity:
            pred_x0 = signal * sample - spread * output
            direction = signal * output + spread * sample
        else:
            pred_x0 = (sample - spread * output) / signal
            direction = output
        variance = (1.0 - after) / (1.0 - now) * (1.0 - now / after)
        std = self.eta * ops.sqrt(ops.maximum(variance, 0.0))
        rest = ops.sqrt(ops.maximum(1.0 - after - std * std, 0.0))
        mean = ops.sqrt(after) * pred_x0 + rest * direction
        if not self.stochastic:
            log_prob = without_density(mean, prev_sample)
            return mean, mean, std, pred_x0, log_prob
        following = next_latents(mean, std, noise, prev_sample)
        return following, mean, std, pred_x0, gaussian_log_prob(following, mean, std)
