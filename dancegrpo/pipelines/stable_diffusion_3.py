"""Stable Diffusion 3 and 3.5: two CLIPs and, where the checkpoint has it, a T5; rectified flow.

Esser et al., 2024, "Scaling rectified flow transformers for high-resolution image synthesis".
"""

import numpy as np
from mindspore import Tensor, nn

from dancegrpo.config import ConfigError
from dancegrpo.pipelines.base import PromptEncoding
from dancegrpo.pipelines.checkpoint import GuidedPipeline

_T5_TOKENS = 256  # as in diffusers


class SD3Denoiser(nn.Cell):
    """Latents (B, C, h, w), timestep (B,) = 1000 sigma, text tokens (B, L, D), pooled text (B, P)."""

    def __init__(self, transformer: nn.Cell):
        super().__init__(auto_prefix=False)  # the parameters keep the transformer's own names
        self.transformer = transformer

    def construct(self, latents: Tensor, timestep: Tensor, states: Tensor, pooled: Tensor) -> Tensor:
        return self.transformer(latents, states, pooled, timestep)[0]


class StableDiffusion3Pipeline(GuidedPipeline):
    """Text tokens (N, L + M, D): L of both CLIPs side by side, filled up with zeros to D channels, then M of the T5,
    zeros without one; and both projected texts side by side (N, P)."""

    family = "StableDiffusion3Pipeline"
    backbone_class = "SD3Transformer2DModel"
    default_guidance = 7.0
    takes_sequence_length = True

    def largest_side(self):
        return self.backbone.config.pos_embed_max_size * self.backbone.config.patch_size

    def load_text(self):
        config, asked = self.backbone.config, self.options.max_sequence_length
        outputs = ("penultimate", "text_embeds")
        first = self.tower("text_encoder", "tokenizer", outputs)
        second = self.tower("text_encoder_2", "tokenizer_2", outputs, first.context)
        pooled = first.config.projection_dim + second.config.projection_dim
        self.check_fit(
            ("pooled_projection_dim", config.pooled_projection_dim, "the sum of both projection_dims", pooled)
        )
        self._width, self._t5_tokens = config.joint_attention_dim, asked or _T5_TOKENS
        if first.width + second.width > self._width:
            raise ConfigError(
                f"{self.folder}: transformer joint_attention_dim is {self._width}, but both CLIPs have "
                f"{first.width + second.width} channels"
            )
        if self.has("text_encoder_3"):
            third = self.tower("text_encoder_3", "tokenizer_3", ("last_hidden_state",), self._t5_tokens)
            self.check_fit(("joint_attention_dim", self._width, "d_model of text_encoder_3", third.width))

    def make_denoiser(self):
        return SD3Denoiser(self.backbone)

    def _encode(self, prompts: list[str]) -> PromptEncoding:
        (first, pooled), (second, other_pooled) = (tower.encode(prompts) for tower in self.towers[:2])
        missing = self._width - first.shape[-1] - second.shape[-1]
        clip = np.concatenate((first, second, np.zeros((*first.shape[:2], missing), np.float32)), axis=-1)
        if len(self.towers) == 3:
            (t5,) = self.towers[2].encode(prompts)
        else:
            t5 = np.zeros((len(prompts), self._t5_tokens, self._width), np.float32)
        return np.concatenate((clip, t5), axis=1), np.concatenate((pooled, other_pooled), axis=-1)
