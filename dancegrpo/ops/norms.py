"""Layer norm, RMS norm and group norm, always computed in float32 and returned in the input's dtype."""

import numpy as np
from mindspore import Parameter, Tensor, nn, ops

from dancegrpo.ops.activations import float32
from dancegrpo.ops.device import select


class _MeanLastAxis(nn.Cell):
    """Mean over the last axis as a product with a constant column.

    On CPU this halves the time of the norms' gradient against `ReduceMean`. Of two axes: MindSpore's gradient of a
    product of (1, 1, size) has an axis too many.
    """

    def __init__(self, size: int):
        super().__init__()
        self.size = size
        self.column = Tensor(np.full((size, 1), 1.0 / size, np.float32))

    def construct(self, x: Tensor) -> Tensor:  # (..., size) -> (..., 1)
        return ops.matmul(x.reshape((-1, self.size)), self.column).reshape(x.shape[:-1] + (1,))


class _LayerNormComposed(nn.Cell):
    def __init__(self, size: int, eps: float):
        super().__init__()
        self.mean = _MeanLastAxis(size)
        self.eps = eps

    def construct(self, x: Tensor) -> Tensor:
        centred = x - self.mean(x)
        return centred * ops.rsqrt(self.mean(centred * centred) + self.eps)


class _LayerNormKernel(nn.Cell):
    def __init__(self, size: int, eps: float):
        super().__init__()
        self.norm = ops.LayerNorm(begin_norm_axis=-1, begin_params_axis=-1, epsilon=eps)
        self.ones = Tensor(np.ones(size, np.float32))
        self.zeros = Tensor(np.zeros(size, np.float32))

    def construct(self, x: Tensor) -> Tensor:
        return self.norm(x, self.ones, self.zeros)[0]


class LayerNorm(nn.Cell):
    """Layer normalisation (Ba et al., 2016) over the last axis.

    Args:
        size: length of the last axis.
        eps: added to the variance.
        affine: with parameters `weight` and `bias` of shape (size,), as torch.nn.LayerNorm names them.
        device: device target, the current one when None.
    """

    def __init__(self, size: int, eps: float = 1e-5, affine: bool = True, device: str | None = None):
        super().__init__()
        self.normalize = select({"CPU": _LayerNormComposed, "Ascend": _LayerNormKernel}, device)(size, eps)
        self.affine = affine
        if affine:
            self.weight = Parameter(Tensor(np.ones(size, np.float32)), name="weight")
            self.bias = Parameter(Tensor(np.zeros(size, np.float32)), name="bias")

    def construct(self, x: Tensor) -> Tensor:
        y = self.normalize(float32(x))
        if self.affine:
            y = y * float32(self.weight) + float32(self.bias)
        return y.astype(x.dtype)


class _RMSNormComposed(nn.Cell):
    def __init__(self, size: int, eps: float):
        super().__init__()
        self.mean = _MeanLastAxis(size)
        self.eps = eps

    def construct(self, x: Tensor, weight: Tensor) -> Tensor:
        return x * ops.rsqrt(self.mean(x * x) + self.eps) * weight


class _RMSNormKernel(nn.Cell):
    def __init__(self, size: int, eps: float):
        super().__init__()
        self.eps = eps

    def construct(self, x: Tensor, weight: Tensor) -> Tensor:
        return ops.rms_norm(x, weight, self.eps)[0]


def RMSNormalize(size: int, eps: float, device: str | None = None) -> nn.Cell:
    """RMS norm as a function of (x, weight), for a weight that another Cell holds; result in the dtype of x."""
    return _InFloat32(select({"CPU": _RMSNormComposed, "Ascend": _RMSNormKernel}, device)(size, eps))


class _InFloat32(nn.Cell):
    def __init__(self, normalize: nn.Cell):
        super().__init__()
        self.normalize = normalize

    def construct(self, x: Tensor, weight: Tensor) -> Tensor:
        return self.normalize(float32(x), float32(weight)).astype(x.dtype)


class RMSNorm(nn.Cell):
    """Root-mean-square normalisation (Zhang and Sennrich, 2019) over the last axis, parameter `weight` (size,)."""

    def __init__(self, size: int, eps: float = 1e-6, device: str | None = None):
        super().__init__()
        self.normalize = RMSNormalize(size, eps, device)
        self.weight = Parameter(Tensor(np.ones(size, np.float32)), name="weight")

    def construct(self, x: Tensor) -> Tensor:
        return self.normalize(x, self.weight)


class _GroupNormComposed(nn.Cell):
    """Means over a group's channels and pixels are products with a constant column, as in `_MeanLastAxis`."""

    def __init__(self, num_groups: int, eps: float):
        super().__init__()
        self.num_groups, self.eps = num_groups, eps

    def construct(self, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        batch, channels = x.shape[0], x.shape[1]
        groups = x.reshape((batch * self.num_groups, -1))
        column = _mean_column(groups.shape[1])
        centred = groups - ops.matmul(groups, column)
        y = centred * ops.rsqrt(ops.matmul(centred * centred, column) + self.eps)
        y = y.reshape((batch, channels, -1)) * weight.reshape((1, -1, 1)) + bias.reshape((1, -1, 1))
        return y.reshape(x.shape)


@ops.constexpr
def _mean_column(size: int) -> Tensor:
    return Tensor(np.full((size, 1), 1.0 / size, np.float32))


class _GroupNormKernel(nn.Cell):
    """`mindspore.ops.group_norm`, one kernel on Ascend."""

    def __init__(self, num_groups: int, eps: float):
        super().__init__()
        self.num_groups, self.eps = num_groups, eps

    def construct(self, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return ops.group_norm(x, self.num_groups, weight, bias, self.eps)


class GroupNorm(nn.Cell):
    """Group normalisation (Wu and He, 2018) of (B, C, H, W); parameters `weight` and `bias` (C,).

    Args:
        num_groups: number of groups that the channels are split into; mean and variance are over a group's
            channels and all pixels.
        num_channels: C.
        eps: added to the variance.
        device: device target, the current one when None.

    Raises:
        ValueError: C is not a multiple of `num_groups`.
    """

    def __init__(self, num_groups: int, num_channels: int, eps: float = 1e-5, device: str | None = None):
        super().__init__()
        if num_channels % num_groups:
            raise ValueError(f"{num_channels} channels cannot be split into {num_groups} groups of a norm")
        self.normalize = select({"CPU": _GroupNormComposed, "Ascend": _GroupNormKernel}, device)(
            num_groups, eps
        )
        self.weight = Parameter(Tensor(np.ones(num_channels, np.float32)), name="weight")
        self.bias = Parameter(Tensor(np.zeros(num_channels, np.float32)), name="bias")

    def construct(self, x: Tensor) -> Tensor:
        return self.normalize(float32(x), float32(self.weight), float32(self.bias)).astype(x.dtype)
