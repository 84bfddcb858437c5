"""Adaptive layer norm and gated residual of diffusion transformers (Peebles and Xie, 2023, adaLN-Zero)."""

from mindspore import Tensor, nn

from dancegrpo.ops.activations import float32
from dancegrpo.ops.cpu.cells import GatedResidualFused, ModulatedLayerNormFused
from dancegrpo.ops.device import select_fused
from dancegrpo.ops.norms import LayerNorm


class _ModulatedLayerNormComposed(nn.Cell):
    def __init__(self, size: int, eps: float):
        super().__init__()
        self.normalize = LayerNorm(size, eps, affine=False)

    def construct(self, x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
        return self.normalize(x) * (1.0 + scale) + shift


def ModulatedLayerNorm(size: int, eps: float, device: str | None = None) -> nn.Cell:
    """LayerNorm(x) * (1 + scale) + shift: x (B, S, size), scale and shift (B, 1, size), all float32."""
    return select_fused(ModulatedLayerNormFused, _ModulatedLayerNormComposed, device)(size, eps)


class _GatedResidualComposed(nn.Cell):
    def construct(self, x: Tensor, gate: Tensor, y: Tensor, bias: Tensor) -> Tensor:
        return x + gate * (y + bias.astype(y.dtype))


class _GatedResidualOnCPU(nn.Cell):
    def __init__(self):
        super().__init__()
        self.kernel = GatedResidualFused()

    def construct(self, x: Tensor, gate: Tensor, y: Tensor, bias: Tensor) -> Tensor:
        return self.kernel(x, gate, float32(y), float32(bias))


def GatedResidual(device: str | None = None) -> nn.Cell:
    """x + gate * (y + bias): x, y (B, S, D), gate (B, 1, D), bias (D,); x and gate float32."""
    return select_fused(_GatedResidualOnCPU, _GatedResidualComposed, device)()
