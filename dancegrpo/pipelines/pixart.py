"""PixArt-alpha and PixArt-Sigma: a transformer on the states of a T5.

Chen et al., 2024, "PixArt-alpha: Fast training of diffusion transformer" and "PixArt-Sigma: Weak-to-strong training".
"""

import numpy as np
from mindspore import Tensor, nn, ops

from dancegrpo.pipelines.base import PromptEncoding
from dancegrpo.pipelines.checkpoint import GuidedPipeline


class PixArtDenoiser(nn.Cell):
    """Latents (B, C, h, w), timestep (B,), text states (B, L, D), their mask (B, L); a learned variance is dropped.

    Args:
        transformer: takes the size of the image as a condition, or not.
        size: (height, width) in pixels.
    """

    def __init__(self, transformer: nn.Cell, size: tuple[int, int]):
        super().__init__(auto_prefix=False)  # the parameters keep the transformer's own names
        self.transformer, self.channels = transformer, transformer.config.in_channels
        self.sized = transformer.config.has_size_conditions
        self.resolution = Tensor(np.array([size], np.float32))
        self.aspect_ratio = Tensor(np.array([[size[0] / size[1]]], np.float32))

    def construct(self, latents: Tensor, timestep: Tensor, states: Tensor, mask: Tensor) -> Tensor:
        batch = latents.shape[0]
        resolution, aspect_ratio = None, None
        if self.sized:
            resolution = ops.tile(self.resolution, (batch, 1))
            aspect_ratio = ops.tile(self.aspect_ratio, (batch, 1))
        return self.transformer(latents, states, timestep, mask, resolution, aspect_ratio)[0][
            :, : self.channels
        ]


class PixArtAlphaPipeline(GuidedPipeline):
    """Text states (N, L, D) and mask (N, L). Prompts are read in lower case, as the model was trained."""

    family, process = "PixArtAlphaPipeline", "diffusion"
    backbone_class = "PixArtTransformer2DModel"
    default_guidance = 4.5
    takes_sequence_length = True
    text_tokens = 120

    def load_text(self):
        tokens = self.options.max_sequence_length or self.text_tokens
        tower = self.tower("text_encoder", "tokenizer", ("last_hidden_state",), tokens, masked=True)
        config = self.backbone.config
        name = "caption_channels" if config.caption_channels else "cross_attention_dim"
        self.check_fit((name, getattr(config, name), "d_model of text_encoder", tower.width))

    def make_denoiser(self):
        return PixArtDenoiser(self.backbone, self.image_size)

    def _encode(self, prompts: list[str]) -> PromptEncoding:
        texts = [prompt.lower().strip() for prompt in prompts]
        return (*self.towers[0].encode(texts), self.towers[0].mask(texts))


class PixArtSigmaPipeline(PixArtAlphaPipeline):
    """The same with longer texts."""

    family = "PixArtSigmaPipeline"
    text_tokens = 300
