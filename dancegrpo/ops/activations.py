"""Activations. MindSpore's own GELU kernels on CPU are 8 to 14 times slower than these compositions."""

import math

import mindspore as ms
from mindspore import Tensor, nn, ops

from dancegrpo.ops.cpu.cells import BiasGELUFused
from dancegrpo.ops.device import select, select_fused

_SQRT_HALF = math.sqrt(0.5)
_TANH_GELU_SLOPE = 2.0 * math.sqrt(2.0 / math.pi)


class SiLU(nn.Cell):
    """x * sigmoid(x), any shape; computed in the dtype of x."""

    def construct(self, x: Tensor) -> Tensor:
        return x * ops.sigmoid(x)


class _TanhGELUComposed(nn.Cell):
    """Tanh GELU through the sigmoid: 1/2 (1 + tanh(z)) = sigmoid(2 z), exact and one kernel cheaper."""

    def construct(self, x: Tensor) -> Tensor:
        return x * ops.sigmoid(_TANH_GELU_SLOPE * (x + 0.044715 * x * x * x))


class _ErfGELUComposed(nn.Cell):
    def construct(self, x: Tensor) -> Tensor:
        return 0.5 * x * (1.0 + ops.erf(x * _SQRT_HALF))


class _GELUKernel(nn.Cell):
    def __init__(self, approximate: str):
        super().__init__()
        self.approximate = approximate

    def construct(self, x: Tensor) -> Tensor:
        return ops.gelu(x, approximate=self.approximate)


class _QuickGELUComposed(nn.Cell):
    def construct(self, x: Tensor) -> Tensor:
        return x * ops.sigmoid(1.702 * x)


class _QuickGELUKernel(nn.Cell):
    """CANN's FastGeLU is x * sigmoid(1.702 x) in one kernel (`mindspore.ops.FastGeLU`, Ascend only)."""

    def __init__(self):
        super().__init__()
        self.fast_gelu = ops.FastGeLU()

    def construct(self, x: Tensor) -> Tensor:
        return self.fast_gelu(x)


def GELU(approximate: str = "none", device: str | None = None) -> nn.Cell:
    """GELU (Hendrycks and Gimpel, 2016): `"none"` the exact form with erf, `"tanh"` its approximation.

    Raises:
        ValueError: another value of `approximate`.
    """
    composed = {"none": _ErfGELUComposed, "tanh": _TanhGELUComposed}
    if approximate not in composed:
        raise ValueError(f"approximate is {approximate!r}; valid: {', '.join(composed)}")
    return select({"CPU": composed[approximate], "Ascend": lambda: _GELUKernel(approximate)}, device)()


class _BiasGELUComposed(nn.Cell):
    def __init__(self):
        super().__init__()
        self.gelu = GELU("tanh")

    def construct(self, x: Tensor, bias: Tensor) -> Tensor:
        return self.gelu(x + bias.astype(x.dtype))


class _BiasGELUOnCPU(nn.Cell):
    def __init__(self):
        super().__init__()
        self.kernel = BiasGELUFused()

    def construct(self, x: Tensor, bias: Tensor) -> Tensor:
        return self.kernel(float32(x), float32(bias))


def BiasGELU(device: str | None = None) -> nn.Cell:
    """Tanh GELU of x + bias: x (..., D), bias (D,). The fused kernel returns float32, whatever x is."""
    return select_fused(_BiasGELUOnCPU, _BiasGELUComposed, device)()


def QuickGELU(device: str | None = None) -> nn.Cell:
    """x * sigmoid(1.702 x), the activation of OpenAI's CLIP."""
    return select({"CPU": _QuickGELUComposed, "Ascend": _QuickGELUKernel}, device)()


_BY_NAME = {
    "gelu": lambda: GELU("none"),
    "gelu_new": lambda: GELU("tanh"),
    "gelu_pytorch_tanh": lambda: GELU("tanh"),
    "quick_gelu": QuickGELU,
    "relu": nn.ReLU,
    "silu": SiLU,
}


def get_activation(name: str) -> nn.Cell:
    """The activation by its name in a transformers config (`hidden_act`).

    Raises:
        ValueError: unknown name; the message lists the valid ones.
    """
    if name not in _BY_NAME:
        raise ValueError(f"hidden_act is {name!r}; valid: {', '.join(sorted(_BY_NAME))}")
    return _BY_NAME[name]()


def float32(x: Tensor) -> Tensor:
    """Enter a float32 island (no operator at all where x is float32 already)."""
    return x if x.dtype == ms.float32 else x.astype(ms.float32)
