"""Stable Diffusion XL: two CLIPs, their states before the last layer side by side, and sizes as conditions.

Podell et al., 2023, "SDXL: Improving latent diffusion models for high-resolution image synthesis".
"""

import numpy as np
from mindspore import Tensor, nn, ops

from dancegrpo.pipelines.base import PromptEncoding
from dancegrpo.pipelines.checkpoint import GuidedPipeline


class SizedUNetDenoiser(nn.Cell):
    """Latents (B, C, h, w), timestep (B,), text states (B, L, D), pooled text (B, P).

    Args:
        unet: with `text_time` conditions.
        size: (height, width) in pixels: the image is said to be a whole one of that size, not a crop.
    """

    def __init__(self, unet: nn.Cell, size: tuple[int, int]):
        super().__init__(auto_prefix=False)  # the parameters keep the U-Net's own names
        self.unet = unet
        self.time_ids = Tensor(np.array([[*size, 0, 0, *size]], np.float32))

    def construct(self, latents: Tensor, timestep: Tensor, states: Tensor, pooled: Tensor) -> Tensor:
        time_ids = ops.tile(self.time_ids, (latents.shape[0], 1))
        return self.unet(latents, timestep, states, pooled, time_ids)[0]


class StableDiffusionXLPipeline(GuidedPipeline):
    """Text states (N, L, D1 + D2) of both CLIPs and the projected text (N, P) of the second."""

    family, process, component = "StableDiffusionXLPipeline", "diffusion", "unet"
    backbone_class = "UNet2DConditionModel"
    default_guidance = 5.0
    default_sample_size = 128

    def load_text(self):
        first = self.tower("text_encoder", "tokenizer", ("penultimate",))
        second = self.tower("text_encoder_2", "tokenizer_2", ("penultimate", "text_embeds"))
        config = self.backbone.config
        self.check_fit(("tokens of a text", first.context, "those of tokenizer_2", second.context))
        for width in set(config.per_block("cross_attention_dim")):
            total = first.width + second.width
            self.check_fit(("cross_attention_dim", width, "the sum of both text hidden_sizes", total))
        channels = second.config.projection_dim + 6 * (config.addition_time_embed_dim or 0)
        self.check_fit(
            (
                "projection_class_embeddings_input_dim",
                config.projection_class_embeddings_input_dim,
                "projection_dim of text_encoder_2 plus 6 times addition_time_embed_dim",
                channels,
            )
        )

    def make_denoiser(self):
        return SizedUNetDenoiser(self.backbone, self.image_size)

    def _encode(self, prompts: list[str]) -> PromptEncoding:
        first, second = self.towers
        (states,), (other_states, pooled) = first.encode(prompts), second.encode(prompts)
        return np.concatenate((states, other_states), axis=-1), pooled

    def _encode_unconditional(self) -> PromptEncoding:
        if self.options.negative_prompt is not None or not self.index.get(
            "force_zeros_for_empty_prompt", True
        ):
            return super()._encode_unconditional()
        return tuple(np.zeros_like(array) for array in self._encode([""]))
