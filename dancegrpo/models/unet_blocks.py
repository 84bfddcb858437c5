"""Down, middle and up blocks of diffusers' UNet2DConditionModel; all states are float32 (B, C, H, W)."""

from dataclasses import dataclass

from mindspore import Tensor, nn, ops

from dancegrpo.models.resnet import Downsample2D, ResnetBlock2D, Upsample2D
from dancegrpo.models.spatial_transformer import Transformer2DModel


@dataclass(frozen=True)
class BlockConfig:
    """What the layers of one block share.

    Attributes:
        time_channels: width of the time embedding.
        num_groups, eps: of the group norms.
        attention: with a transformer after each residual block.
        num_heads, num_layers, context_dim: of those transformers.
        linear_projection, upcast: see `Transformer2DModel`.
    """

    time_channels: int
    num_groups: int
    eps: float
    attention: bool
    num_heads: int
    num_layers: int
    context_dim: int
    linear_projection: bool
    upcast: bool

    def resnet(self, in_channels: int, out_channels: int) -> ResnetBlock2D:
        """A residual block with these settings."""
        return ResnetBlock2D(in_channels, out_channels, self.time_channels, self.num_groups, self.eps)

    def transformers(self, channels: int, count: int) -> nn.CellList | None:
        """`count` transformers with these settings, None without attention."""
        if not self.attention:
            return None
        return nn.CellList(
            [
                Transformer2DModel(
                    channels,
                    self.num_heads,
                    self.num_layers,
                    self.context_dim,
                    self.num_groups,
                    self.linear_projection,
                    self.upcast,
                )
                for _ in range(count)
            ]
        )


class DownBlock(nn.Cell):
    """Residual blocks, each with its transformer, then half the resolution (CrossAttnDownBlock2D, DownBlock2D).

    Args:
        config: settings of the layers.
        in_channels, out_channels: of the block.
        count: number of residual blocks.
        downsample: padding of the convolution that halves the resolution, None to keep it.
    """

    def __init__(
        self, config: BlockConfig, in_channels: int, out_channels: int, count: int, downsample: int | None
    ):
        super().__init__()
        self.resnets = nn.CellList(
            [config.resnet(out_channels if i else in_channels, out_channels) for i in range(count)]
        )
        self.attentions = config.transformers(out_channels, count)
        self.downsamplers = None
        if downsample is not None:
            self.downsamplers = nn.CellList([Downsample2D(out_channels, downsample)])
        self.count = count

    def construct(self, x: Tensor, time: Tensor, text: Tensor):
        """Returns the state and the tuple of states that the up blocks take."""
        skips = ()
        for i in range(self.count):
            x = self.resnets[i](x, time)
            if self.attentions is not None:
                x = self.attentions[i](x, text)
            skips = skips + (x,)
        if self.downsamplers is not None:
            x = self.downsamplers[0](x)
            skips = skips + (x,)
        return x, skips


class MidBlock(nn.Cell):
    """Residual block, transformer, residual block (UNetMidBlock2DCrossAttn)."""

    def __init__(self, config: BlockConfig, channels: int):
        super().__init__()
        self.attentions = config.transformers(channels, 1)
        self.resnets = nn.CellList([config.resnet(channels, channels) for _ in range(2)])

    def construct(self, x: Tensor, time: Tensor, text: Tensor) -> Tensor:
        x = self.attentions[0](self.resnets[0](x, time), text)
        return self.resnets[1](x, time)


class UpBlock(nn.Cell):
    """Residual blocks on the state beside a state of the way down, each with its transformer, then twice the
    resolution (CrossAttnUpBlock2D, UpBlock2D).

    Args:
        config: settings of the layers.
        in_channels: of the state.
        skip_channels: of the states from the way down, one for each residual block.
        out_channels: of the block.
        upsample: whether the resolution grows.
    """

    def __init__(
        self,
        config: BlockConfig,
        in_channels: int,
        skip_channels: tuple[int, ...],
        out_channels: int,
        upsample: bool,
    ):
        super().__init__()
        self.count = len(skip_channels)
        self.resnets = nn.CellList(
            [
                config.resnet((out_channels if i else in_channels) + skip_channels[i], out_channels)
                for i in range(self.count)
            ]
        )
        self.attentions = config.transformers(out_channels, self.count)
        self.upsamplers = nn.CellList([Upsample2D(out_channels)]) if upsample else None

    def construct(self, x: Tensor, skips, time: Tensor, text: Tensor, size=None) -> Tensor:
        """`skips` in the order in which they are used; `size` is the (height, width) to enlarge to."""
        for i in range(self.count):
            x = self.resnets[i](ops.concat((x, skips[i]), 1), time)
            if self.attentions is not None:
                x = self.attentions[i](x, text)
        return x if self.upsamplers is None else self.upsamplers[0](x, size)
