"""Pairs of implementations of one operator, where both run on CPU."""

import numpy as np
import pytest
from mindspore import Tensor

from dancegrpo.ops import GELU, LayerNorm, get_activation
from dancegrpo.ops.device import select


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


def test_a_device_without_an_own_kernel_takes_the_composition():
    assert select({"CPU": "composed", "Ascend": "fused"}, "GPU") == "composed"
    assert select({"CPU": "composed", "Ascend": "fused"}, "Ascend") == "fused"


def test_unknown_activation_names_the_valid_ones():
    with pytest.raises(ValueError, match="quick_gelu"):
        get_activation("swoosh")
