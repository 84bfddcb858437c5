"""The U-Net of Stable Diffusion 1.x, 2.x and XL, as diffusers' UNet2DConditionModel.

Rombach et al., 2022, "High-resolution image synthesis with latent diffusion models"; Podell et al., 2023, "SDXL",
which adds the pooled text and the image's sizes and crop to the time embedding. What the output means (noise or
velocity) is the scheduler's business.
"""

from mindspore import Tensor, nn, ops

from dancegrpo.models.layers import SinusoidalFeatures, TextProjection
from dancegrpo.models.resnet import Conv2d
from dancegrpo.models.unet_blocks import BlockConfig, DownBlock, MidBlock, UpBlock
from dancegrpo.models.unet_config import UNet2DConditionConfig
from dancegrpo.ops import GroupNorm, SiLU
from dancegrpo.ops.activations import float32


class UNet2DConditionModel(nn.Cell):
    """Noisy latents, timestep and text states to the predicted noise or velocity."""

    output_names = ("sample",)
    config_class = UNet2DConditionConfig
    class_name = "UNet2DConditionModel"

    def __init__(self, config: UNet2DConditionConfig):
        super().__init__()
        self.config = config
        channels = config.block_out_channels
        kernel = config.conv_in_kernel
        self.conv_in = Conv2d(config.in_channels, channels[0], kernel, padding=kernel // 2)
        self.time_proj = SinusoidalFeatures(channels[0])
        self.time_embedding = TextProjection(channels[0], config.time_channels)
        self.has_text_time = config.addition_embed_type == "text_time"
        if self.has_text_time:
            self.add_time_proj = SinusoidalFeatures(config.addition_time_embed_dim)
            self.add_embedding = TextProjection(
                config.projection_class_embeddings_input_dim, config.time_channels
            )
        self.down_blocks = nn.CellList(_down_blocks(config))
        last = len(channels) - 1
        self.mid_block = None
        if config.mid_block_type is not None:
            layers = config.per_block("transformer_layers_per_block")[last]
            self.mid_block = MidBlock(_block_config(config, last, True, layers), channels[-1])
        self.up_blocks = nn.CellList(_up_blocks(config))
        self.conv_norm_out = GroupNorm(config.norm_num_groups, channels[0], config.norm_eps)
        self.act = SiLU()
        kernel = config.conv_out_kernel
        self.conv_out = Conv2d(channels[0], config.out_channels, kernel, padding=kernel // 2)

    def _condition(self, timestep: Tensor, text_embeds: Tensor | None, time_ids: Tensor | None) -> Tensor:
        time = float32(self.time_embedding(self.time_proj(timestep)))
        if self.has_text_time:
            if text_embeds is None or time_ids is None:
                raise ValueError("text_embeds and time_ids are required: addition_embed_type is 'text_time'")
            sizes = self.add_time_proj(time_ids).reshape((text_embeds.shape[0], -1))
            time = time + float32(self.add_embedding(ops.concat((float32(text_embeds), sizes), -1)))
        elif text_embeds is not None or time_ids is not None:
            raise ValueError("text_embeds and time_ids are not used: addition_embed_type is None")
        return self.act(time)

    def construct(
        self,
        sample: Tensor,
        timestep: Tensor,
        encoder_hidden_states: Tensor,
        text_embeds: Tensor | None = None,
        time_ids: Tensor | None = None,
    ):
        """The prediction as (sample,), float32.

        Args:
            sample: latents (B, in_channels, H, W).
            timestep: (B,), of the schedule's 1,000 steps, whole numbers or not.
            encoder_hidden_states: text states (B, L, cross_attention_dim).
            text_embeds: pooled text (B, D), where `addition_embed_type` is "text_time".
            time_ids: (B, 6): original height and width, top and left of the crop, target height and width, in
                pixels; where `addition_embed_type` is "text_time".
        """
        time = self._condition(timestep, text_embeds, time_ids)
        x = float32(self.conv_in(sample))
        skips = (x,)
        for block in self.down_blocks:
            x, states = block(x, time, encoder_hidden_states)
            skips = skips + states
        if self.mid_block is not None:
            x = self.mid_block(x, time, encoder_hidden_states)
        for block in self.up_blocks:
            used, skips = skips[: -block.count - 1 : -1], skips[: -block.count]
            size = skips[-1].shape[2:] if len(skips) > 0 else None
            x = block(x, used, time, encoder_hidden_states, size)
        return (float32(self.conv_out(self.act(self.conv_norm_out(x)))),)


def _block_config(config: UNet2DConditionConfig, index: int, attention: bool, num_layers: int) -> BlockConfig:
    """Settings of the block that has the channels of down block `index`."""
    return BlockConfig(
        time_channels=config.time_channels,
        num_groups=config.norm_num_groups,
        eps=config.norm_eps,
        attention=attention,
        num_heads=config.per_block("attention_head_dim")[index],
        num_layers=num_layers,
        context_dim=config.per_block("cross_attention_dim")[index],
        linear_projection=config.use_linear_projection,
        upcast=config.upcast_attention,
    )


def _down_blocks(config: UNet2DConditionConfig) -> list[DownBlock]:
    channels, last = config.block_out_channels, len(config.block_out_channels) - 1
    return [
        DownBlock(
            _block_config(
                config, i, kind.startswith("CrossAttn"), config.per_block("transformer_layers_per_block")[i]
            ),
            channels[max(i - 1, 0)],
            channels[i],
            config.per_block("layers_per_block")[i],
            None if i == last else config.downsample_padding,
        )
        for i, kind in enumerate(config.down_block_types)
    ]


def _up_blocks(config: UNet2DConditionConfig) -> list[UpBlock]:
    channels, last = config.block_out_channels, len(config.block_out_channels) - 1
    blocks = []
    for i, kind in enumerate(config.up_block_types):
        mirrored = last - i
        layers = config.per_block("layers_per_block")[mirrored]
        blocks.append(
            UpBlock(
                _block_config(
                    config, mirrored, kind.startswith("CrossAttn"), config.up_transformer_layers[i]
                ),
                channels[min(mirrored + 1, last)],
                (channels[mirrored],) * layers + (channels[max(mirrored - 1, 0)],),
                channels[mirrored],
                i != last,
            )
        )
    return blocks
