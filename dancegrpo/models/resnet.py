"""Convolutional layers of diffusers' U-Nets and autoencoders, on (B, C, H, W), with diffusers' parameter names."""

import math

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, nn, ops
from mindspore.common.initializer import Normal, initializer

from dancegrpo.models.layers import Linear
from dancegrpo.ops import Convolution, GroupNorm, SiLU
from dancegrpo.ops.activations import float32


class Conv2d(nn.Cell):
    """Convolution with zero padding and bias; `weight` (out, in, K, K), `bias` (out,), as torch.nn.Conv2d.

    Computes in `compute_dtype` (see `layers.set_compute_dtype`), which the result has; parameters stay as they are.

    Args:
        in_channels, out_channels, kernel_size, stride, padding: see `ops.Convolution`.
    """

    def __init__(self, in_channels: int, out_channels: int, kernel_size: int, stride: int = 1, padding=0):
        super().__init__()
        scale = 1.0 / math.sqrt(in_channels * kernel_size**2)
        shape = (out_channels, in_channels, kernel_size, kernel_size)
        self.weight = Parameter(initializer(Normal(scale), shape, ms.float32), name="weight")
        self.bias = Parameter(Tensor(np.zeros(out_channels, np.float32)), name="bias")
        self.compute_dtype = ms.float32
        self.convolution = Convolution(in_channels, out_channels, kernel_size, stride, padding)

    def construct(self, x: Tensor) -> Tensor:
        y = self.convolution(x.astype(self.compute_dtype), self.weight.astype(self.compute_dtype))
        return ops.bias_add(y, self.bias.astype(self.compute_dtype))


class PointwiseConv2d(nn.Cell):
    """A 1x1 convolution of tokens: (B, N, in) to (B, N, out); parameters as `Conv2d` has them."""

    def __init__(self, in_channels: int, out_channels: int):
        super().__init__()
        shape = (out_channels, in_channels, 1, 1)
        self.weight = Parameter(
            initializer(Normal(1.0 / math.sqrt(in_channels)), shape, ms.float32), name="weight"
        )
        self.bias = Parameter(Tensor(np.zeros(out_channels, np.float32)), name="bias")
        self.in_channels, self.out_channels = in_channels, out_channels
        self.compute_dtype = ms.float32
        self.product = ops.MatMul(transpose_b=True)

    def construct(self, x: Tensor) -> Tensor:
        matrix = self.weight.astype(self.compute_dtype).reshape((self.out_channels, self.in_channels))
        y = self.product(x.reshape((-1, self.in_channels)).astype(self.compute_dtype), matrix)
        y = ops.bias_add(y, self.bias.astype(self.compute_dtype))
        return y.reshape(x.shape[:-1] + (self.out_channels,))


class ResnetBlock2D(nn.Cell):
    """Norm, SiLU, convolution, twice, with a residual connection (He et al., 2016), float32 in and out.

    Args:
        in_channels: C.
        out_channels: C'; where it differs, the residual connection is a 1x1 convolution.
        time_channels: width of the time embedding that is added between the convolutions; None for none.
        num_groups, eps: of the group norms.
    """

    def __init__(
        self, in_channels: int, out_channels: int, time_channels: int | None, num_groups: int, eps: float
    ):
        super().__init__()
        self.norm1 = GroupNorm(num_groups, in_channels, eps)
        self.conv1 = Conv2d(in_channels, out_channels, 3, padding=1)
        self.time_emb_proj = None if time_channels is None else Linear(time_channels, out_channels)
        self.norm2 = GroupNorm(num_groups, out_channels, eps)
        self.conv2 = Conv2d(out_channels, out_channels, 3, padding=1)
        self.conv_shortcut = None if in_channels == out_channels else Conv2d(in_channels, out_channels, 1)
        self.nonlinearity = SiLU()

    def construct(self, x: Tensor, time: Tensor | None = None) -> Tensor:
        """x (B, C, H, W) and the time embedding after its SiLU (B, time_channels) or (1, time_channels)."""
        y = float32(self.conv1(self.nonlinearity(self.norm1(x))))
        if self.time_emb_proj is not None:
            shift = float32(self.time_emb_proj(time))
            y = y + shift.reshape((shift.shape[0], -1, 1, 1))
        y = float32(self.conv2(self.nonlinearity(self.norm2(y))))
        return y + (x if self.conv_shortcut is None else float32(self.conv_shortcut(x)))


class Downsample2D(nn.Cell):
    """3x3 convolution with stride 2; `padding` is 1, or 0 for one row and column of zeros below and on the right."""

    def __init__(self, channels: int, padding: int = 1):
        super().__init__()
        sides = (0, 1, 0, 1) if padding == 0 else padding
        self.conv = Conv2d(channels, channels, 3, stride=2, padding=sides)

    def construct(self, x: Tensor) -> Tensor:
        return float32(self.conv(x))


class Upsample2D(nn.Cell):
    """Nearest-neighbour enlargement to `size` (height, width), twice the input's when None, then a convolution."""

    def __init__(self, channels: int):
        super().__init__()
        self.conv = Conv2d(channels, channels, 3, padding=1)

    def construct(self, x: Tensor, size: tuple[int, int] | None = None) -> Tensor:
        if size is None:
            size = (2 * x.shape[2], 2 * x.shape[3])
        return float32(self.conv(ops.interpolate(x, size=size, mode="nearest")))


def to_tokens(x: Tensor) -> Tensor:
    """(B, C, H, W) to (B, H * W, C)."""
    return ops.transpose(x.reshape((x.shape[0], x.shape[1], -1)), (0, 2, 1))


def from_tokens(x: Tensor, height: int, width: int) -> Tensor:
    """(B, H * W, C) to (B, C, H, W)."""
    return ops.transpose(x, (0, 2, 1)).reshape((x.shape[0], x.shape[2], height, width))
