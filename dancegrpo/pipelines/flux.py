"""FLUX: packed latents, embedded guidance, text from a CLIP tower."""

import numpy as np
from mindspore import Tensor, nn, ops

from dancegrpo.config import ConfigError
from dancegrpo.models import load_model, load_tokenizer
from dancegrpo.models.autoencoder import PatchAutoencoder
from dancegrpo.models.flux import FluxTransformer2DModel
from dancegrpo.pipelines.base import Pipeline, PromptEncoding
from dancegrpo.pipelines.latents import image_ids
from dancegrpo.runtime.batching import run_batched
from dancegrpo.runtime.precision import compute_dtype

_TEXT_BATCH = 16
_DEFAULT_GUIDANCE = 3.5  # what FLUX.1-dev was distilled around


class FluxDenoiser(nn.Cell):
    """Velocity from packed latents (B, S, C), timestep (B,) = 1000 sigma, text states (B, L, D), pooled (B, P)."""

    def __init__(
        self,
        transformer: FluxTransformer2DModel,
        rows: int,
        columns: int,
        text_tokens: int,
        guidance_scale: float | None,
    ):
        super().__init__(auto_prefix=False)  # the parameters keep the transformer's own names
        self.transformer = transformer
        self.img_ids = Tensor(image_ids(rows, columns))
        self.txt_ids = Tensor(np.zeros((text_tokens, 3), np.float32))
        self.guidance_scale = guidance_scale

    def construct(self, latents: Tensor, timestep: Tensor, prompt_embeds: Tensor, pooled: Tensor) -> Tensor:
        guidance = None
        if self.guidance_scale is not None:
            guidance = ops.ones_like(timestep) * self.guidance_scale
        return self.transformer(
            latents, prompt_embeds, pooled, timestep * 0.001, self.img_ids, self.txt_ids, guidance
        )[0]


class FluxDecoder(nn.Cell):
    """Packed latents (B, S, 4 C) to images (B, 3, H, W) in [0, 1]."""

    def __init__(self, vae: PatchAutoencoder, rows: int, columns: int):
        super().__init__(auto_prefix=False)
        self.vae = vae
        self.rows, self.columns, self.channels = rows, columns, vae.config.latent_channels
        self.scale, self.shift = 1.0 / vae.config.scaling_factor, vae.config.shift_factor

    def construct(self, packed: Tensor) -> Tensor:
        batch, rows, columns, channels = packed.shape[0], self.rows, self.columns, self.channels
        # unpack_latents in two 4-D transposes: those of higher rank are pathologically slow on CPU.
        x = packed.reshape((batch, rows * columns, channels, 4)).transpose((0, 2, 1, 3))
        x = x.reshape((batch * channels * rows, columns, 2, 2)).transpose((0, 2, 1, 3))
        latents = x.reshape((batch, channels, 2 * rows, 2 * columns)) * self.scale + self.shift
        return ops.clamp(self.vae.decode(latents) * 0.5 + 0.5, 0.0, 1.0)


class FluxPipeline(Pipeline):
    """The small FLUX: its CLIP text tower gives the token sequence (where FLUX.1 has T5) and the pooled vector."""

    family = "FluxPipeline"

    def __init__(self, folder, compute: str = "float32", guidance_scale: float | None = None):
        super().__init__(folder)
        dtype = compute_dtype(compute)
        self.backbone = load_model(folder / "transformer", dtype)
        self.vae = load_model(folder / "vae", dtype, parameters_dtype=dtype)
        self.text_encoder = load_model(folder / "text_encoder", dtype, parameters_dtype=dtype)
        self.tokenizer = load_tokenizer(folder / "tokenizer")
        self._check(guidance_scale)
        config = self.backbone.config
        if config.guidance_embeds and guidance_scale is None:
            guidance_scale = _DEFAULT_GUIDANCE
        rows = self.vae.grid // 2
        self.denoiser = FluxDenoiser(self.backbone, rows, rows, self.tokenizer.context, guidance_scale)
        self._decoder = FluxDecoder(self.vae, rows, rows)
        self.latent_shape = (rows * rows, config.in_channels)
        self.image_size = (self.vae.config.sample_size,) * 2
        for frozen in (self.vae, self.text_encoder):
            for parameter in frozen.get_parameters():
                parameter.requires_grad = False

    def _check(self, guidance_scale: float | None) -> None:
        """The components must fit together; each mismatch names both numbers."""
        config, text = self.backbone.config, self.text_encoder.config
        if not config.guidance_embeds and guidance_scale is not None:
            raise ConfigError(
                f"sampler.guidance_scale is {guidance_scale}, but {self.folder / 'transformer'} has no "
                "guidance embedding; set it to null"
            )
        pairs = (
            ("joint_attention_dim", config.joint_attention_dim, "text hidden_size", text.hidden_size),
            ("pooled_projection_dim", config.pooled_projection_dim, "text hidden_size", text.hidden_size),
            (
                "in_channels",
                config.in_channels,
                "4 x VAE latent_channels",
                4 * self.vae.config.latent_channels,
            ),
        )
        for name, value, other, expected in pairs:
            if value != expected:
                raise ConfigError(f"{self.folder}: transformer {name} is {value}, but {other} is {expected}")

    def _encode(self, prompts: list[str]) -> PromptEncoding:
        ids = self.tokenizer(prompts)
        return run_batched(lambda part: self.text_encoder(Tensor(part)), (ids,), _TEXT_BATCH)

    def unknown_words(self, prompt: str) -> list[str]:
        return self.tokenizer.unknown_words(prompt)

    def is_truncated(self, prompt: str) -> bool:
        return self.tokenizer.is_truncated(prompt)

    def decode(self, latents: Tensor) -> Tensor:
        return self._decoder(latents)
