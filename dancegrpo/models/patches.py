"""Latents to patch tokens and back, and the fixed sine and cosine positions of vision transformers.

A patch embedding is a strided convolution whose windows do not overlap (Dosovitskiy et al., 2021); here it is a
reshape and one product. The position tables depend on shapes only, so they are made while the graph is compiled.
"""

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, nn
from mindspore.common.initializer import Normal, initializer

from dancegrpo.models.layers import Linear
from dancegrpo.ops.activations import float32


def sincos_table(rows: int, columns: int, dim: int, base_size: int, interpolation_scale: float) -> np.ndarray:
    """Sine and cosine features of the positions of a grid of patches, (rows * columns, dim) float32.

    The first half of the channels encodes the column, the second the row. A grid of any size spans `base_size`
    positions, divided by `interpolation_scale`, as diffusers scales them.
    """
    frequency = 10000.0 ** (-np.arange(dim // 4, dtype=np.float64) / (dim // 4))

    def features(count: int) -> np.ndarray:  # (count, dim // 2)
        # Positions are rounded to float32 before the product in float64, as in the reference.
        scale = np.float32(count / base_size), np.float32(interpolation_scale)
        position = np.arange(count, dtype=np.float32) / scale[0] / scale[1]
        angle = np.outer(position.astype(np.float64), frequency)
        return np.concatenate((np.sin(angle), np.cos(angle)), axis=1)

    table = np.concatenate(
        (np.tile(features(columns), (rows, 1)), np.repeat(features(rows), columns, axis=0)), axis=1
    )
    return table.astype(np.float32)


@ms.constexpr
def _constant_positions(rows, columns, dim, base_size, interpolation_scale):
    return Tensor(sincos_table(rows, columns, dim, base_size, interpolation_scale))


@ms.constexpr
def grid_size(height, width, patch_size):
    """Rows and columns of patches of a latent image; ValueError where it cannot be cut into whole patches."""
    if height % patch_size or width % patch_size:
        raise ValueError(f"latents of {height} x {width} cannot be cut into patches of {patch_size}")
    return height // patch_size, width // patch_size


@ms.constexpr
def _crop_start(rows, columns, size):
    if rows > size or columns > size:
        raise ValueError(
            f"{rows} x {columns} patches do not fit into the position table: pos_embed_max_size is {size}"
        )
    return (size - rows) // 2, (size - columns) // 2


class PatchProjection(Linear):
    """Patches (..., C * P * P) to tokens (..., dim), with the weight (dim, C, P, P) of a convolution."""

    def __init__(self, in_channels: int, dim: int, patch_size: int):
        super().__init__(in_channels * patch_size**2, dim)
        self.weight = Parameter(
            initializer(
                Normal(self.in_features**-0.5), (dim, in_channels, patch_size, patch_size), ms.float32
            ),
            name="weight",
        )

    def _flat_product(self, x: Tensor) -> Tensor:
        weight = self.weight.reshape((self.out_features, self.in_features)).astype(self.compute_dtype)
        return self.product(x.reshape((-1, self.in_features)).astype(self.compute_dtype), weight)


class PatchEmbed(nn.Cell):
    """Latents (B, C, H, W) to tokens (B, H/P * W/P, dim) in float32, positions added; any multiples of P.

    Args:
        in_channels: C.
        dim: channels of a token, a multiple of 4.
        patch_size: P.
        sample_size: height and width of the latents that the model was made for.
        interpolation_scale: divides the positions.
    """

    def __init__(
        self,
        in_channels: int,
        dim: int,
        patch_size: int,
        sample_size: int,
        interpolation_scale: float = 1.0,
    ):
        super().__init__()
        self.proj = PatchProjection(in_channels, dim, patch_size)
        self.patch_size, self.dim = patch_size, dim
        self.base_size = sample_size // patch_size
        self.interpolation_scale = float(interpolation_scale)

    def construct(self, latents: Tensor) -> Tensor:
        return self._tokens(latents) + self._positions(latents)

    def _tokens(self, latents: Tensor) -> Tensor:
        p = self.patch_size
        batch, channels, height, width = latents.shape
        rows, columns = grid_size(height, width, p)
        x = latents.reshape((batch * channels * rows, p, columns, p)).transpose((0, 2, 1, 3))
        x = x.reshape((batch, channels, rows * columns, p * p)).transpose((0, 2, 1, 3))
        return float32(self.proj(x.reshape((batch, rows * columns, channels * p * p))))

    def _positions(self, latents: Tensor) -> Tensor:
        rows, columns = grid_size(latents.shape[2], latents.shape[3], self.patch_size)
        return _constant_positions(rows, columns, self.dim, self.base_size, self.interpolation_scale)


class CroppedPatchEmbed(PatchEmbed):
    """A `PatchEmbed` whose positions are the middle of a fixed square table, as SD3 has it.

    The table `pos_embed` (1, max_size * max_size, dim) is stored with the weights and never trained.
    """

    def __init__(self, in_channels: int, dim: int, patch_size: int, sample_size: int, max_size: int):
        super().__init__(in_channels, dim, patch_size, sample_size)
        self.max_size = max_size
        table = sincos_table(max_size, max_size, dim, self.base_size, 1.0)
        self.pos_embed = Parameter(Tensor(table[None]), name="pos_embed", requires_grad=False)

    def _positions(self, latents: Tensor) -> Tensor:
        rows, columns = grid_size(latents.shape[2], latents.shape[3], self.patch_size)
        top, left = _crop_start(rows, columns, self.max_size)
        table = self.pos_embed.reshape((self.max_size, self.max_size, self.dim))
        return table[top : top + rows, left : left + columns].reshape((1, rows * columns, self.dim))


def unpatchify(tokens: Tensor, height: int, width: int, patch_size: int) -> Tensor:
    """Tokens (B, H/P * W/P, P * P * C), channels last, to (B, C, H, W)."""
    p = patch_size
    rows, columns = grid_size(height, width, p)
    batch, count, size = tokens.shape
    channels = size // (p * p)
    x = tokens.reshape((batch, count, p * p, channels)).transpose((0, 3, 1, 2))
    x = x.reshape((batch * channels * rows, columns, p, p)).transpose((0, 2, 1, 3))
    return x.reshape((batch, channels, height, width))
