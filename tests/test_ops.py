"""Pairs of implementations of one operator, where both run on CPU."""

import os
import subprocess
import sys

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, nn

from dancegrpo.ops import (
    GELU,
    BiasGELU,
    GatedResidual,
    JointRotaryAttention,
    LayerNorm,
    ModulatedLayerNorm,
    RotaryAttention,
    get_activation,
)
from dancegrpo.ops.cpu import library as native
from dancegrpo.ops.device import select, select_fused


@pytest.mark.parametrize("approximate", ["none", "tanh"])
def test_gelu_composition_equals_the_kernel(approximate):
    x = Tensor(np.linspace(-8, 8, 4001, dtype=np.float32))
    composed, kernel = GELU(approximate, device="CPU")(x), GELU(approximate, device="Ascend")(x)
    assert type(GELU(approximate, device="CPU")) is not type(GELU(approximate, device="Ascend"))
    np.testing.assert_allclose(composed.asnumpy(), kernel.asnumpy(), atol=2e-6)


def test_layer_norm_composition_equals_the_kernel():
    x = Tensor(np.random.default_rng(0).standard_normal((3, 5, 32)).astype(np.float32) * 4 + 2)
    composed, kernel = LayerNorm(32, device="CPU")(x), LayerNorm(32, device="Ascend")(x)
    np.testing.assert_allclose(composed.asnumpy(), kernel.asnumpy(), atol=2e-5)


@pytest.mark.parametrize("shape", [(1, 1, 8), (2, 3, 8)])
def test_layer_norm_of_a_single_token_has_its_gradient(shape):
    rng = np.random.default_rng(0)
    x, direction = (rng.standard_normal(shape).astype(np.float32) for _ in range(2))
    norm = LayerNorm(8, affine=False)

    def loss(x):
        return (x * norm(x)).sum()

    slope = (ms.grad(loss)(Tensor(x)).asnumpy() * direction).sum()
    up, down = (float(loss(Tensor(x + sign * 1e-2 * direction)).asnumpy()) for sign in (1, -1))
    assert slope == pytest.approx((up - down) / 2e-2, rel=1e-2)


def test_a_device_without_an_own_kernel_takes_the_composition():
    assert select({"CPU": "composed", "Ascend": "fused"}, "GPU") == "composed"
    assert select({"CPU": "composed", "Ascend": "fused"}, "Ascend") == "fused"


def test_unknown_activation_names_the_valid_ones():
    with pytest.raises(ValueError, match="quick_gelu"):
        get_activation("swoosh")


# ---- fused CPU kernels against the compositions: values, and the gradient of every input


class _WeightedSum(nn.Cell):
    """A scalar that depends on every output with a weight of its own."""

    def __init__(self, cell, weights):
        super().__init__()
        self.cell, self.weights = cell, weights

    def construct(self, *inputs):
        outputs = self.cell(*inputs)
        if len(self.weights) == 1:
            outputs = (outputs,)
        total = (outputs[0] * self.weights[0]).sum()
        for index in range(1, len(self.weights)):
            total = total + (outputs[index] * self.weights[index]).sum()
        return total


def _attention_inputs(normal, batch, tokens, heads, dim):
    width = heads * dim
    return [
        *(normal(batch, tokens, width) for _ in range(3)),
        *(normal(width) * 0.3 for _ in range(3)),
        *(1 + normal(dim) * 0.3 for _ in range(2)),
    ]


def _angles(normal, tokens, dim):
    angle = np.repeat(normal(tokens, dim // 2), 2, axis=1)  # a rotation turns a pair by one angle
    return [np.cos(angle), np.sin(angle)]


def _case(name, normal):
    if name == "modulated_layer_norm":
        return lambda d: ModulatedLayerNorm(40, 1e-6, d), [
            normal(3, 5, 40) * 3 + 1,
            normal(3, 1, 40),
            normal(3, 1, 40),
        ]
    if name == "gated_residual":
        return GatedResidual, [normal(3, 5, 40), normal(3, 1, 40), normal(3, 5, 40), normal(40)]
    if name == "bias_gelu":
        return BiasGELU, [normal(3, 7, 40) * 4, normal(40)]
    if name == "attention_32":
        inputs = _attention_inputs(normal, 3, 11, 2, 32) + _angles(normal, 11, 32)
        return lambda d: RotaryAttention(2, 32, device=d), inputs
    assert name == "joint_attention_24"  # a head dimension without a loop of its own
    inputs = _attention_inputs(normal, 3, 5, 2, 24) + _attention_inputs(normal, 3, 16, 2, 24)
    return lambda d: JointRotaryAttention(2, 24, device=d), inputs + _angles(normal, 21, 24)


@pytest.mark.skipif(native.library().path is None, reason=native.library().text)
@pytest.mark.parametrize(
    "name", ["modulated_layer_norm", "gated_residual", "bias_gelu", "attention_32", "joint_attention_24"]
)
def test_fused_kernel_equals_the_composition(name):
    rng = np.random.default_rng(3)
    build, inputs = _case(name, lambda *shape: rng.standard_normal(shape).astype(np.float32))
    tensors = [Tensor(array) for array in inputs]
    trained = tuple(range(len(inputs) - (2 if "attention" in name else 0)))  # cos and sin are constants
    results = []
    for device in ("CPU", "composed"):
        cell = build(device)
        outputs = cell(*tensors)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        weights = tuple(Tensor(np.cos(np.arange(y.size, dtype=np.float32)).reshape(y.shape)) for y in outputs)
        gradients = ms.grad(_WeightedSum(cell, weights), trained)(*tensors)
        results.append([y.asnumpy() for y in (*outputs, *gradients)])
    assert type(build("CPU")) is not type(build("composed"))
    for fused, composed in zip(*results, strict=True):
        np.testing.assert_allclose(fused, composed, rtol=2e-4, atol=2e-5 * np.abs(composed).max())


@pytest.mark.skipif(native.library().path is None, reason=native.library().text)
def test_fused_kernels_keep_not_a_number():
    x = np.zeros((1, 4, 16), np.float32)
    x[0, 1, 3] = np.nan
    assert np.isnan(BiasGELU()(Tensor(x), Tensor(np.zeros(16, np.float32))).asnumpy()[0, 1, 3])
    zeros = Tensor(np.zeros((1, 1, 16), np.float32))
    assert np.isnan(ModulatedLayerNorm(16, 1e-6)(Tensor(x), zeros, zeros).asnumpy()[0, 1]).all()


@pytest.mark.skipif(native.library().path is None, reason=native.library().text)
def test_a_sample_does_not_depend_on_its_place_in_the_batch():
    """What makes the probability ratio exactly 1 before an update: transitions are shuffled in between."""
    rng = np.random.default_rng(4)
    inputs = _attention_inputs(lambda *s: rng.standard_normal(s).astype(np.float32), 6, 11, 2, 32)
    angles = _angles(lambda *s: rng.standard_normal(s).astype(np.float32), 11, 32)
    cell = RotaryAttention(2, 32)
    straight = cell(*map(Tensor, inputs), *map(Tensor, angles)).asnumpy()
    turned = [array[::-1].copy() for array in inputs[:3]] + inputs[3:]
    assert (cell(*map(Tensor, turned), *map(Tensor, angles)).asnumpy()[::-1] == straight).all()


def test_without_a_compiler_the_composition_is_used_and_says_so(tmp_path):
    code = (
        "from dancegrpo.ops import GatedResidual, describe_operators\n"
        "print(type(GatedResidual()).__name__, '|', describe_operators())"
    )
    import dancegrpo

    package = os.path.dirname(os.path.dirname(dancegrpo.__file__))
    environment = {"PATH": str(tmp_path), "HOME": str(tmp_path), "PYTHONPATH": package}
    result = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert "_GatedResidualComposed |" in result.stdout, result.stderr
    assert "no C++ compiler" in result.stdout


def test_select_fused_takes_the_composition_on_other_devices():
    assert select_fused("fused", "composed", "Ascend") == "composed"
