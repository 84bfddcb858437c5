"""Classifier-free guidance: the model is asked with and without the prompt, and led away from the second answer."""

from __future__ import annotations

from mindspore import Tensor, nn, ops

from dancegrpo.config import ConfigError
from dancegrpo.pipelines.base import PipelineOptions


class GuidedDenoiser(nn.Cell):
    """Ho and Salimans, 2022 (arXiv 2207.12598): second + scale (first - second), both branches in one call on 2 B.

    Called as the denoiser that it wraps, with conditions (B, 2, ...): first the prompt's, then the others.

    Args:
        denoiser: denoiser(latents (B, ...), timestep (B,), *conditions (B, ...)) -> (B, ...).
        scale: above 1.
    """

    def __init__(self, denoiser: nn.Cell, scale: float):
        super().__init__(auto_prefix=False)  # the parameters keep the backbone's own names
        self.denoiser, self.guidance_scale = denoiser, float(scale)

    def construct(self, latents: Tensor, timestep: Tensor, *conditions: Tensor) -> Tensor:
        batch = latents.shape[0]
        flat = ()
        for condition in conditions:
            flat += (condition.reshape((2 * batch,) + condition.shape[2:]),)
        doubled = ops.stack((latents, latents), 1).reshape((2 * batch,) + latents.shape[1:])
        times = ops.stack((timestep, timestep), 1).reshape((2 * batch,))
        output = self.denoiser(doubled, times, *flat)
        pairs = output.reshape((batch, 2) + output.shape[1:])
        return pairs[:, 1] + self.guidance_scale * (pairs[:, 0] - pairs[:, 1])


def guidance_scale(options: PipelineOptions, default: float, family: str, negative: bool = True) -> float:
    """The scale that a family of classifier-free guidance works with; at most 1 is off.

    Args:
        options: asked for. default: the family's. family: for messages.
        negative: the family takes a negative prompt.

    Raises:
        ConfigError: a negative prompt where none has an effect.
    """
    scale = default if options.guidance_scale is None else options.guidance_scale
    if options.negative_prompt is not None and not negative:
        raise ConfigError(
            f"sampler.negative_prompt is {options.negative_prompt!r}, but {family} takes none; set it to null"
        )
    if options.negative_prompt and scale <= 1:
        raise ConfigError(
            f"sampler.negative_prompt is {options.negative_prompt!r}, but sampler.guidance_scale {scale:g} turns "
            "guidance off; set it above 1, or the prompt to null"
        )
    return scale
