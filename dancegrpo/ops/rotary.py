"""Rotary position embedding (Su et al., 2021): on interleaved pairs as in FLUX, or on halves as in LLaMA."""

import numpy as np
from mindspore import Tensor, nn, ops

from dancegrpo.ops.activations import float32
from dancegrpo.ops.device import select


class RotaryFrequencies(nn.Cell):
    """Cosines and sines of the rotation angles of tokens with integer positions on several axes.

    Args:
        axes_dim: channels of each axis, all even; their sum is the head dimension D.
        theta: base of the geometric frequencies.
    """

    def __init__(self, axes_dim: tuple[int, ...], theta: float = 10000.0):
        super().__init__()
        # One row an axis, zero outside its channels: angle = ids @ table, each frequency twice for its pair.
        table = np.zeros((len(axes_dim), sum(axes_dim)), np.float64)
        start = 0
        for axis, dim in enumerate(axes_dim):
            frequency = theta ** (-np.arange(0, dim, 2, dtype=np.float64) / dim)
            table[axis, start : start + dim] = np.repeat(frequency, 2)
            start += dim
        self.table = Tensor(table.astype(np.float32))

    def construct(self, ids: Tensor):  # (S, A) float -> cos, sin (S, D)
        angle = ops.matmul(ids, self.table)
        return ops.cos(angle), ops.sin(angle)


class _RotaryComposed(nn.Cell):
    """x cos + rotate(x) sin; the pairwise rotation is a product with a constant matrix, faster than slicing."""

    def __init__(self, head_dim: int, interleaved: bool):
        super().__init__()
        rotate = np.zeros((head_dim, head_dim), np.float32)
        pairs = np.arange(head_dim).reshape((-1, 2) if interleaved else (2, -1))
        first, second = pairs.T if interleaved else pairs
        rotate[second, first] = -1.0  # out[first] = -x[second]
        rotate[first, second] = 1.0  # out[second] = x[first]
        self.rotate = Tensor(rotate)

    def construct(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        y = float32(x)
        return (y * cos + ops.matmul(y, self.rotate) * sin).astype(x.dtype)


class _RotaryKernel(nn.Cell):
    """`mindspore.ops.rotary_position_embedding`, mode 0 (halves) or 1 (interleaved); Ascend only.

    The documentation of the kernel refuses layout BNSD when B * N > 8 S and D is 32-byte aligned.
    """

    def __init__(self, head_dim: int, interleaved: bool):
        super().__init__()
        self.composed = _RotaryComposed(head_dim, interleaved)
        self.mode = 1 if interleaved else 0

    def construct(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, heads, tokens, _ = x.shape
        if batch * heads > min(8 * tokens, 999):
            return self.composed(x, cos, sin)
        shape = (1, 1) + cos.shape[-2:]
        return ops.rotary_position_embedding(
            x, cos.reshape(shape).astype(x.dtype), sin.reshape(shape).astype(x.dtype), self.mode
        )


def ApplyRotary(head_dim: int, device: str | None = None, interleaved: bool = True) -> nn.Cell:
    """Rotate `x` (B, H, S, D) by `cos`, `sin` (S, D); returns (B, H, S, D) in the dtype of x.

    `interleaved` pairs channel 2k with 2k + 1, otherwise k goes with k + D / 2; each angle stands in both places.
    """
    return select({"CPU": _RotaryComposed, "Ascend": _RotaryKernel}, device)(head_dim, interleaved)
