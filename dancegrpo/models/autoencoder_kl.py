"""The convolutional autoencoder of Stable Diffusion, SD3 and FLUX, as diffusers' AutoencoderKL.

Rombach et al., 2022, "High-resolution image synthesis with latent diffusion models"; the latents are Gaussian with a
small Kullback-Leibler term (Kingma and Welling, 2013).
"""

from dataclasses import dataclass

from mindspore import Tensor, nn, ops

from dancegrpo.models.options import refuse_unsupported
from dancegrpo.models.resnet import (
    Conv2d,
    Downsample2D,
    ResnetBlock2D,
    Upsample2D,
    from_tokens,
    to_tokens,
)
from dancegrpo.models.spatial_transformer import Attention
from dancegrpo.ops import GroupNorm, SiLU
from dancegrpo.ops.activations import float32

_EPS = 1e-6
_OLD_ATTENTION_NAMES = {"query": "to_q", "key": "to_k", "value": "to_v", "proj_attn": "to_out.0"}


@dataclass(frozen=True)
class AutoencoderKLConfig:
    """diffusers' `config.json` of an AutoencoderKL, with diffusers' defaults.

    The pipeline feeds the backbone with (latents - shift_factor) * scaling_factor; None is no shift. `sample_size` only
    says what the model was trained on. With `force_upcast` the model does not compute in float16, whose range
    activations of SDXL's autoencoder exceed; bfloat16 has that range.
    """

    in_channels: int = 3
    out_channels: int = 3
    down_block_types: tuple[str, ...] = ("DownEncoderBlock2D",)
    up_block_types: tuple[str, ...] = ("UpDecoderBlock2D",)
    block_out_channels: tuple[int, ...] = (64,)
    layers_per_block: int = 1
    act_fn: str = "silu"
    latent_channels: int = 4
    norm_num_groups: int = 32
    sample_size: int | tuple[int, int] = 32
    scaling_factor: float = 0.18215
    shift_factor: float | None = None
    latents_mean: tuple[float, ...] | None = None
    latents_std: tuple[float, ...] | None = None
    force_upcast: bool = True
    use_quant_conv: bool = True
    use_post_quant_conv: bool = True
    mid_block_add_attention: bool = True

    def __post_init__(self):
        refuse_unsupported(
            self, {"act_fn": ("silu", "swish"), "latents_mean": (None,), "latents_std": (None,)}
        )
        for name, valid in (
            ("down_block_types", "DownEncoderBlock2D"),
            ("up_block_types", "UpDecoderBlock2D"),
        ):
            types = getattr(self, name)
            if set(types) != {valid}:
                raise ValueError(f"{name} is {types!r}, which is not supported; valid: only {valid!r}")
            if len(types) != len(self.block_out_channels):
                raise ValueError(
                    f"{name} has {len(types)} entries, but block_out_channels has {len(self.block_out_channels)}"
                )


class _SpatialAttention(Attention):
    """Attention of all pixels over each other, one head, added to its input."""

    def __init__(self, channels: int, num_groups: int):
        super().__init__(channels, 1, bias=True)
        self.group_norm = GroupNorm(num_groups, channels, _EPS)

    def construct(self, x: Tensor) -> Tensor:  # (B, C, H, W)
        tokens = to_tokens(self.group_norm(x))
        y = self.attend(tokens, tokens)
        return x + from_tokens(float32(y), x.shape[2], x.shape[3])


class _MidBlock(nn.Cell):
    def __init__(self, config: AutoencoderKLConfig):
        super().__init__()
        channels = config.block_out_channels[-1]
        self.attentions = None
        if config.mid_block_add_attention:
            self.attentions = nn.CellList([_SpatialAttention(channels, config.norm_num_groups)])
        self.resnets = nn.CellList([_resnet(config, channels, channels) for _ in range(2)])

    def construct(self, x: Tensor) -> Tensor:
        x = self.resnets[0](x)
        if self.attentions is not None:
            x = self.attentions[0](x)
        return self.resnets[1](x)


class _Block(nn.Cell):
    """Residual blocks, then half (`downsamplers`) or twice (`upsamplers`) the resolution."""

    def __init__(
        self, config: AutoencoderKLConfig, in_channels: int, out_channels: int, count: int, resample: str
    ):
        super().__init__()
        self.resnets = nn.CellList(
            [_resnet(config, out_channels if i else in_channels, out_channels) for i in range(count)]
        )
        self.downsamplers = nn.CellList([Downsample2D(out_channels, 0)]) if resample == "down" else None
        self.upsamplers = nn.CellList([Upsample2D(out_channels)]) if resample == "up" else None

    def construct(self, x: Tensor) -> Tensor:
        for resnet in self.resnets:
            x = resnet(x)
        if self.downsamplers is not None:
            x = self.downsamplers[0](x)
        if self.upsamplers is not None:
            x = self.upsamplers[0](x)
        return x


def _resnet(config: AutoencoderKLConfig, in_channels: int, out_channels: int) -> ResnetBlock2D:
    return ResnetBlock2D(in_channels, out_channels, None, config.norm_num_groups, _EPS)


class _Encoder(nn.Cell):
    def __init__(self, config: AutoencoderKLConfig):
        super().__init__()
        channels, last = config.block_out_channels, len(config.block_out_channels) - 1
        self.conv_in = Conv2d(config.in_channels, channels[0], 3, padding=1)
        self.down_blocks = nn.CellList(
            [
                _Block(
                    config,
                    channels[max(i - 1, 0)],
                    channels[i],
                    config.layers_per_block,
                    "" if i == last else "down",
                )
                for i in range(len(channels))
            ]
        )
        self.mid_block = _MidBlock(config)
        self.conv_norm_out = GroupNorm(config.norm_num_groups, channels[-1], _EPS)
        self.act = SiLU()
        self.conv_out = Conv2d(channels[-1], 2 * config.latent_channels, 3, padding=1)

    def construct(self, pixels: Tensor) -> Tensor:
        x = float32(self.conv_in(pixels))
        for block in self.down_blocks:
            x = block(x)
        return self.conv_out(self.act(self.conv_norm_out(self.mid_block(x))))


class _Decoder(nn.Cell):
    def __init__(self, config: AutoencoderKLConfig):
        super().__init__()
        channels, last = config.block_out_channels[::-1], len(config.block_out_channels) - 1
        self.conv_in = Conv2d(config.latent_channels, channels[0], 3, padding=1)
        self.mid_block = _MidBlock(config)
        self.up_blocks = nn.CellList(
            [
                _Block(
                    config,
                    channels[max(i - 1, 0)],
                    channels[i],
                    config.layers_per_block + 1,
                    "" if i == last else "up",
                )
                for i in range(len(channels))
            ]
        )
        self.conv_norm_out = GroupNorm(config.norm_num_groups, channels[-1], _EPS)
        self.act = SiLU()
        self.conv_out = Conv2d(channels[-1], config.out_channels, 3, padding=1)

    def construct(self, latents: Tensor) -> Tensor:
        x = self.mid_block(float32(self.conv_in(latents)))
        for block in self.up_blocks:
            x = block(x)
        return self.conv_out(self.act(self.conv_norm_out(x)))


class AutoencoderKL(nn.Cell):
    """Images (B, 3, H, W) in [-1, 1] to Gaussian latents (B, latent_channels, H / f, W / f) and back.

    f is 2 to the number of blocks less one, 8 in all published models; H and W are multiples of it.
    """

    output_names = ("sample",)
    config_class = AutoencoderKLConfig
    class_name = "AutoencoderKL"

    def __init__(self, config: AutoencoderKLConfig):
        super().__init__()
        self.config = config
        latent = config.latent_channels
        self.encoder, self.decoder = _Encoder(config), _Decoder(config)
        self.quant_conv = Conv2d(2 * latent, 2 * latent, 1) if config.use_quant_conv else None
        self.post_quant_conv = Conv2d(latent, latent, 1) if config.use_post_quant_conv else None
        for _, cell in self.cells_and_names():
            if config.force_upcast and hasattr(cell, "compute_dtype"):
                cell.needs_float32_range = True

    @staticmethod
    def weight_name(name: str) -> str:
        """The parameter's name for a name in a checkpoint: older ones (SD 1.x) name the attention differently."""
        parts = name.split(".")
        if len(parts) == 6 and parts[1:3] == ["mid_block", "attentions"]:
            parts[4] = _OLD_ATTENTION_NAMES.get(parts[4], parts[4])
        return ".".join(parts)

    def encode(self, pixels: Tensor):
        """(B, 3, H, W) in [-1, 1] to mean and logvar, both (B, latent_channels, H / f, W / f), float32."""
        moments = self.encoder(pixels)
        if self.quant_conv is not None:
            moments = self.quant_conv(moments)
        mean, logvar = ops.split(float32(moments), self.config.latent_channels, axis=1)
        return mean, ops.clamp(logvar, -30.0, 20.0)

    def decode(self, latents: Tensor) -> Tensor:
        """(B, latent_channels, H / f, W / f), unscaled, to images (B, 3, H, W), about [-1, 1], not clipped."""
        if self.post_quant_conv is not None:
            latents = self.post_quant_conv(latents)
        return float32(self.decoder(latents))

    def construct(self, pixels: Tensor):
        """Reconstruction from the mean latents, (sample,)."""
        return (self.decode(self.encode(pixels)[0]),)
