"""Stable Diffusion 1.x and 2.x: a U-Net on the last states of a CLIP; noise or velocity, as the scheduler says.

Rombach et al., 2022, "High-resolution image synthesis with latent diffusion models".
"""

from mindspore import Tensor, nn

from dancegrpo.config import ConfigError
from dancegrpo.pipelines.base import PromptEncoding
from dancegrpo.pipelines.checkpoint import GuidedPipeline


class UNetDenoiser(nn.Cell):
    """Latents (B, C, h, w), timestep (B,), text states (B, L, D)."""

    def __init__(self, unet: nn.Cell):
        super().__init__(auto_prefix=False)  # the parameters keep the U-Net's own names
        self.unet = unet

    def construct(self, latents: Tensor, timestep: Tensor, states: Tensor) -> Tensor:
        return self.unet(latents, timestep, states)[0]


class StableDiffusionPipeline(GuidedPipeline):
    """Text states (N, L, D)."""

    family, process, component = "StableDiffusionPipeline", "diffusion", "unet"
    backbone_class = "UNet2DConditionModel"
    default_guidance = 7.5
    # Configs of the first checkpoints lack them, and diffusers' pipeline corrects those.
    scheduler_changes = {"clip_sample": False, "steps_offset": 1}

    def load_text(self):
        tower = self.tower("text_encoder", "tokenizer", ("last_hidden_state",))
        if tower.config.extra.get("use_attention_mask"):
            raise ConfigError(
                f"{tower.folder}: use_attention_mask is true, which is not supported; valid: false"
            )
        kind = self.backbone.config.addition_embed_type
        self.check_fit(("addition_embed_type", kind, "what this pipeline has for it", None))
        for width in set(self.backbone.config.per_block("cross_attention_dim")):
            self.check_fit(("cross_attention_dim", width, "text hidden_size", tower.width))

    def make_denoiser(self):
        return UNetDenoiser(self.backbone)

    def _encode(self, prompts: list[str]) -> PromptEncoding:
        return self.towers[0].encode(prompts)
