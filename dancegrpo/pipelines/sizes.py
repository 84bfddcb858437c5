"""How large images and latents are."""

from __future__ import annotations

from collections.abc import Sequence

from mindspore import nn

from dancegrpo.config import ConfigError
from dancegrpo.models.autoencoder import PatchAutoencoder
from dancegrpo.pipelines.base import PipelineOptions


def vae_factor(vae: nn.Cell) -> int:
    """Pixels of an image side for one of its latents."""
    if isinstance(vae, PatchAutoencoder):
        return vae.config.patch_size
    return 2 ** (len(vae.config.block_out_channels) - 1)


def image_size(
    options: PipelineOptions,
    vae: nn.Cell,
    default: int | Sequence[int],
    multiple: int = 1,
    maximum: int | None = None,
) -> tuple[int, int]:
    """(height, width) of the images in pixels.

    Args:
        options: asked for.
        vae: says how many pixels a latent has; some only know one size.
        default: what the model was made for, in latents, one number or (height, width).
        multiple: what latents must be multiples of, because the backbone cuts them into patches.
        maximum: largest side in latents.

    Raises:
        ConfigError: a size that the model cannot make, with the nearest ones that it can.
    """
    factor = vae_factor(vae)
    fixed = vae.config.sample_size if isinstance(vae, PatchAutoencoder) else None
    own = (default, default) if isinstance(default, int) else tuple(default)
    size = []
    for key, asked, latents in zip(("height", "width"), (options.height, options.width), own, strict=True):
        value = asked or fixed or factor * latents
        if fixed is not None and value != fixed:
            raise ConfigError(f"model.{key} is {value}; this model's autoencoder makes {fixed} pixels only")
        unit = factor * multiple
        if value % unit:
            below, above = value // unit * unit, (value // unit + 1) * unit
            valid = f"{below} or {above}" if below else str(above)
            raise ConfigError(
                f"model.{key} is {value}, which does not divide by {unit}; nearest valid: {valid}"
            )
        if maximum is not None and value > factor * maximum:
            raise ConfigError(
                f"model.{key} is {value}; this model has positions for up to {factor * maximum}, in steps of {unit}"
            )
        size.append(value)
    return size[0], size[1]
