"""Layers that several models share. Parameter names are those of torch.nn.Linear and torch.nn.Embedding."""

import math

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, nn, ops
from mindspore.common.initializer import Normal, initializer

from dancegrpo.ops import SiLU
from dancegrpo.ops.activations import float32


class Linear(nn.Cell):
    """y = x W^T + b over the last axis; `weight` (out, in), `bias` (out,).

    With `compute_dtype` set (see `set_compute_dtype`) the product runs in that dtype, parameters stay as they are.
    """

    def __init__(self, in_features: int, out_features: int, bias: bool = True):
        super().__init__()
        scale = 1.0 / math.sqrt(max(in_features, 1))
        self.weight = Parameter(
            initializer(Normal(scale), (out_features, in_features), ms.float32), name="weight"
        )
        self.has_bias = bias
        if bias:
            self.bias = Parameter(Tensor(np.zeros(out_features, np.float32)), name="bias")
        self.in_features, self.out_features = in_features, out_features
        self.compute_dtype = ms.float32
        self.product = ops.MatMul(transpose_b=True)

    def construct(self, x: Tensor) -> Tensor:  # (..., in) -> (..., out)
        y = self._flat_product(x)
        if self.has_bias:
            y = ops.bias_add(y, self.bias.astype(self.compute_dtype))
        return y.reshape(x.shape[:-1] + (self.out_features,))

    def without_bias(self, x: Tensor) -> Tensor:
        """x W^T, for operators that add `bias` themselves."""
        return self._flat_product(x).reshape(x.shape[:-1] + (self.out_features,))

    def _flat_product(self, x: Tensor) -> Tensor:  # (..., in) -> (N, out)
        flat = x.reshape((-1, self.in_features)).astype(self.compute_dtype)
        return self.product(flat, self.weight.astype(self.compute_dtype))


class Embedding(nn.Cell):
    """Rows of `weight` (num, dim) by integer index."""

    def __init__(self, num_embeddings: int, embedding_dim: int):
        super().__init__()
        self.weight = Parameter(
            initializer(Normal(0.02), (num_embeddings, embedding_dim), ms.float32), name="weight"
        )

    def construct(self, ids: Tensor) -> Tensor:
        return ops.gather(self.weight, ids, 0)


class TimestepEmbedding(nn.Cell):
    """Sinusoidal features of a scalar, then linear, SiLU, linear (diffusers' Timesteps + TimestepEmbedding).

    The features are [cos, sin] at frequencies 10000^(-k / (d/2)), in float32: at t near 1000 a 16-bit angle
    has lost its phase.
    """

    def __init__(self, dim: int, channels: int = 256):
        super().__init__()
        half = channels // 2
        frequency = np.exp(-math.log(10000.0) * np.arange(half, dtype=np.float32) / half)
        self.frequency = Tensor(frequency.reshape(1, half).astype(np.float32))
        self.linear_1 = Linear(channels, dim)
        self.act = SiLU()
        self.linear_2 = Linear(dim, dim)

    def construct(self, timestep: Tensor) -> Tensor:  # (B,) -> (B, dim)
        angle = float32(timestep).reshape((-1, 1)) * self.frequency
        features = ops.concat((ops.cos(angle), ops.sin(angle)), axis=-1)
        return self.linear_2(self.act(self.linear_1(features)))


class TextProjection(nn.Cell):
    """Linear, SiLU, linear on the pooled text vector."""

    def __init__(self, in_features: int, dim: int):
        super().__init__()
        self.linear_1 = Linear(in_features, dim)
        self.act = SiLU()
        self.linear_2 = Linear(dim, dim)

    def construct(self, x: Tensor) -> Tensor:
        return self.linear_2(self.act(self.linear_1(x)))


def set_compute_dtype(cell: nn.Cell, dtype: ms.Type) -> nn.Cell:
    """Run the products of every layer below `cell` in `dtype`; norms, softmax and embeddings stay float32.

    A layer with products has an attribute `compute_dtype`.

    Must be called before the first graph of the cell is compiled.
    """
    for _, child in cell.cells_and_names():
        if hasattr(child, "compute_dtype"):
            child.compute_dtype = dtype
    return cell
