"""The kernels of `kernels.cc` as Cells with gradients. All take and return float32."""

from collections.abc import Callable, Sequence

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn, ops

from dancegrpo.ops.cpu.library import library


def _kernel(name: str, outputs: Sequence[int], bprop: Callable | None = None) -> ops.Custom:
    """A kernel whose outputs have the shapes of the inputs that `outputs` names, in order."""
    many = len(outputs) > 1

    def shapes(*inputs):
        picked = tuple(inputs[i] for i in outputs)
        return picked if many else picked[0]

    def dtypes(*_inputs):
        return (ms.float32,) * len(outputs) if many else ms.float32

    return ops.Custom(f"{library().path}:{name}", shapes, dtypes, "aot", bprop=bprop)


def _scalar(value: float) -> Tensor:
    return Tensor(np.full(1, value, np.float32))


class ModulatedLayerNormFused(nn.Cell):
    """See `ops.modulation.ModulatedLayerNorm`."""

    def __init__(self, size: int, eps: float):
        super().__init__()
        self.eps = _scalar(eps)
        grad = _kernel("modulated_layer_norm_grad", (0, 1, 1))

        def bprop(x, scale, shift, eps, out, dout):
            dx, dscale, dshift = grad(x, scale, eps, dout)
            return dx, dscale, dshift, ops.zeros_like(eps)

        self.kernel = _kernel("modulated_layer_norm", (0,), bprop)

    def construct(self, x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
        return self.kernel(x, scale, shift, self.eps)


class GatedResidualFused(nn.Cell):
    """See `ops.modulation.GatedResidual`."""

    def __init__(self):
        super().__init__()
        grad = _kernel("gated_residual_grad", (0, 1, 2))

        def bprop(x, gate, y, bias, out, dout):
            dgate, dy, dbias = grad(gate, y, bias, dout)
            return dout, dgate, dy, dbias

        self.kernel = _kernel("gated_residual", (0,), bprop)

    def construct(self, x: Tensor, gate: Tensor, y: Tensor, bias: Tensor) -> Tensor:
        return self.kernel(x, gate, y, bias)


class BiasGELUFused(nn.Cell):
    """See `ops.activations.BiasGELU`."""

    def __init__(self):
        super().__init__()
        grad = _kernel("bias_gelu_grad", (0, 1))

        def bprop(x, bias, out, dout):
            return grad(x, bias, dout)

        self.kernel = _kernel("bias_gelu", (0,), bprop)

    def construct(self, x: Tensor, bias: Tensor) -> Tensor:
        return self.kernel(x, bias)


class RotaryAttentionFused(nn.Cell):
    """See `ops.attention.RotaryAttention`."""

    def __init__(self, eps: float):
        super().__init__()
        self.eps = _scalar(eps)
        grad = _kernel("rotary_attention_grad", tuple(range(8)))

        def bprop(q, k, v, qb, kb, vb, qw, kw, cos, sin, eps, out, dout):
            gradients = grad(q, k, v, qb, kb, vb, qw, kw, cos, sin, eps, dout)
            return gradients + (ops.zeros_like(cos), ops.zeros_like(sin), ops.zeros_like(eps))

        self.kernel = _kernel("rotary_attention", (0,), bprop)

    def construct(self, q, k, v, qb, kb, vb, qw, kw, cos, sin):
        return self.kernel(q, k, v, qb, kb, vb, qw, kw, cos, sin, self.eps)


class JointRotaryAttentionFused(nn.Cell):
    """See `ops.attention.JointRotaryAttention`."""

    def __init__(self, eps: float):
        super().__init__()
        self.eps = _scalar(eps)
        grad = _kernel("joint_rotary_attention_grad", tuple(range(16)))

        # Two streams of the same eight inputs: text (c for context) and image.
        def bprop(cq, ck, cv, cqb, ckb, cvb, cqw, ckw, q, k, v, qb, kb, vb, qw, kw, cos, sin, eps, out, dout):
            gradients = grad(
                cq,
                ck,
                cv,
                cqb,
                ckb,
                cvb,
                cqw,
                ckw,
                q,
                k,
                v,
                qb,
                kb,
                vb,
                qw,
                kw,
                cos,
                sin,
                eps,
                dout[0],
                dout[1],
            )
            return gradients + (ops.zeros_like(cos), ops.zeros_like(sin), ops.zeros_like(eps))

        self.kernel = _kernel("joint_rotary_attention", (0, 8), bprop)

    def construct(self, cq, ck, cv, cqb, ckb, cvb, cqw, ckw, q, k, v, qb, kb, vb, qw, kw, cos, sin):
        return self.kernel(
            cq, ck, cv, cqb, ckb, cvb, cqw, ckw, q, k, v, qb, kb, vb, qw, kw, cos, sin, self.eps
        )
