"""The U-Nets and the convolutional autoencoders against diffusers' numbers, in graph mode."""

import json
import re
import shutil
from pathlib import Path

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, nn, ops
from safetensors.numpy import load_file, save_file

from dancegrpo.config import ConfigError
from dancegrpo.models import load_model, save_model
from dancegrpo.models.loading import build_model, named_parameters
from dancegrpo.ops import Convolution, GroupNorm
from dancegrpo.ops import convolution as convolution_module
from dancegrpo.runtime.setup import setup_runtime

setup_runtime(compile_cache=False)

MODELS = Path(__file__).parent / "golden" / "models"
UNETS = ("unet_sd15_like", "unet_sdxl_like")
VAES = ("vae_sd_like", "vae_flux_like")


def relative(actual, expected) -> float:
    return float(np.linalg.norm(np.asarray(actual, np.float64) - expected) / np.linalg.norm(expected))


def golden(name):
    io = np.load(MODELS / name / "io.npz")
    inputs = {key.removeprefix("in_"): io[key] for key in io.files if key.startswith("in_")}
    return io, {
        key: Tensor(value.astype(np.int32) if value.dtype == np.int64 else value)
        for key, value in inputs.items()
    }


class _UNetLoss(nn.Cell):
    def __init__(self, model, names, weights):
        super().__init__()
        self.model, self.names, self.weights = model, names, weights

    def construct(self, *inputs):
        outputs = self.model(*inputs)
        return (outputs[0] * self.weights[0]).sum(), outputs


class _VAELoss(nn.Cell):
    def __init__(self, model, names, weights):
        super().__init__()
        self.model, self.weights = model, weights

    def construct(self, pixels, latents):
        mean, logvar = self.model.encode(pixels)
        decoded = self.model.decode(latents)
        loss = (mean * self.weights[0]).sum() + (logvar * self.weights[1]).sum()
        return loss + (decoded * self.weights[2]).sum(), (mean, logvar, decoded)


class _Gradient(nn.Cell):
    def __init__(self, loss, positions, parameters):
        super().__init__()
        self.gradient = ops.value_and_grad(loss, positions, ms.ParameterTuple(parameters), has_aux=True)

    def construct(self, *inputs):
        return self.gradient(*inputs)


@pytest.mark.parametrize("name", UNETS + VAES)
def test_outputs_and_gradients_equal_the_reference(name):
    assert ms.get_context("mode") == ms.GRAPH_MODE
    io, inputs = golden(name)
    model = load_model(MODELS / name)
    names = model.output_names if name in UNETS else ("mean", "logvar", "decoded")
    weights = tuple(Tensor(io[f"cot_{output}"]) for output in names)
    loss = (_UNetLoss if name in UNETS else _VAELoss)(model, names, weights)
    parameters = named_parameters(model)
    positions = tuple(i for i, key in enumerate(inputs) if f"grad_in_{key}" in io)
    gradient = _Gradient(loss, positions, parameters.values())
    (_, outputs), (of_inputs, of_weights) = gradient(*inputs.values())

    errors = {
        key: relative(value.asnumpy(), io[f"out_{key}"]) for key, value in zip(names, outputs, strict=True)
    }
    assert max(errors.values()) < 1e-5, errors
    of_inputs = of_inputs if isinstance(of_inputs, tuple) else (of_inputs,)
    gradients = {f"in_{list(inputs)[i]}": g for i, g in zip(positions, of_inputs, strict=True)}
    gradients |= {f"w__{key}": g for key, g in zip(parameters, of_weights, strict=True)}
    errors = {
        key: relative(gradients[key.removeprefix("grad_")].asnumpy(), io[key])
        for key in io.files
        if key.startswith("grad_")
    }
    print(name, errors)
    assert len(errors) >= 4 and max(errors.values()) < 1e-4, errors
    expected = dict(zip(io["param_names"], io["out_param_grad_l2"], strict=True))
    assert set(expected) == set(parameters)
    norms = [np.linalg.norm(gradients[f"w__{key}"].asnumpy().astype(np.float64)) for key in expected]
    assert relative(norms, np.array(list(expected.values()))) < 1e-4
