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
    With a LoRA (see `lora.add_lora`) W is W + scale B A, computed as two more, narrow products.
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
        self.has_lora, self.lora_scale = False, 1.0

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
        y = self.product(flat, self.weight.astype(self.compute_dtype))
        if self.has_lora:  # the factor goes where the numbers are few
            y = y + self.lora_B.without_bias(self.lora_A.without_bias(flat) * self.lora_scale)
        return y


class Embedding(nn.Cell):
    """Rows of `weight` (num, dim) by integer index."""

    def __init__(self, num_embeddings: int, embedding_dim: int):
        super().__init__()
        self.weight = Parameter(
            initializer(Normal(0.02), (num_embeddings, embedding_dim), ms.float32), name="weight"
        )

    def construct(self, ids: Tensor) -> Tensor:
        return float32(ops.gather(self.weight, ids, 0))


class SinusoidalFeatures(nn.Cell):
    """[cos, sin] of x 10000^(-k / (channels / 2 - frequency_shift)): (N,) or more numbers to (N, channels).

    In float32: at t near 1000 a 16-bit angle has lost its phase.
    """

    def __init__(self, channels: int, frequency_shift: float = 0.0):
        super().__init__()
        half = channels // 2
        k = np.arange(half, dtype=np.float32)
        frequency = np.exp(-math.log(10000.0) * k / (half - frequency_shift))
        self.frequency = Tensor(frequency.reshape(1, half).astype(np.float32))

    def construct(self, x: Tensor) -> Tensor:
        angle = float32(x).reshape((-1, 1)) * self.frequency
        return ops.concat((ops.cos(angle), ops.sin(angle)), axis=-1)


class TimestepEmbedding(nn.Cell):
    """Sinusoidal features of a scalar, then linear, SiLU, linear (diffusers' Timesteps + TimestepEmbedding)."""

    def __init__(self, dim: int, channels: int = 256, frequency_shift: float = 0.0):
        super().__init__()
        self.features = SinusoidalFeatures(channels, frequency_shift)
        self.linear_1 = Linear(channels, dim)
        self.act = SiLU()
        self.linear_2 = Linear(dim, dim)

    def construct(self, timestep: Tensor) -> Tensor:  # (B,) -> (B, dim)
        return self.linear_2(self.act(self.linear_1(self.features(timestep))))


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

    A layer with products has an attribute `compute_dtype`; one with `needs_float32_range` does not take float16.

    Must be called before the first graph of the cell is compiled.
    """
    for _, child in cell.cells_and_names():
        if hasattr(child, "compute_dtype") and not (
            dtype == ms.float16 and getattr(child, "needs_float32_range", False)
        ):
            child.compute_dtype = dtype
    return cell


def set_parameters_dtype(cell: nn.Cell, dtype: ms.Type) -> nn.Cell:
    """Hold the matrices below `cell` in `dtype`: those of embeddings and of all cells with a `compute_dtype`.

    For frozen models: a 16-bit weight cannot take a small update. Vectors (biases, norms) are few and stay float32.
    Must be called before the first graph of the cell is compiled.
    """
    for _, child in cell.cells_and_names():
        # The attribute is that of layers whose numbers leave the range of float16.
        wide = dtype == ms.float16 and getattr(child, "needs_float32_range", False)
        if (isinstance(child, Embedding) or hasattr(child, "compute_dtype")) and not wide:
            for parameter in child.get_parameters(expand=False):
                if parameter.ndim > 1:
                    parameter.set_dtype(dtype)
                    parameter.requires_grad = False
    return cell
