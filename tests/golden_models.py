"""Models against stored numbers of the reference implementations (diffusers, transformers, OpenCLIP).

`tests/golden` has, for every model, a config, random weights, inputs, outputs, cotangents, the gradients of
sum(output * cotangent) for inputs and some weights, and the norms of the gradients of all weights.
"""

import inspect
import tempfile
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn, ops
from safetensors.numpy import save_file

from dancegrpo.models import load_model
from dancegrpo.models.weights import named_parameters

_GOLDEN = Path(__file__).parent / "golden"
MODELS, OPEN_CLIP = _GOLDEN / "models", _GOLDEN / "open_clip"
CASES = tuple(
    sorted(folder.name for root in (MODELS, OPEN_CLIP) for folder in root.iterdir() if folder.is_dir())
)
_NO_OUTPUTS = ("loss", "param_grad_l2")


def relative(actual, expected) -> float:
    """Norm of the deviation over the norm of what is expected."""
    return float(np.linalg.norm(np.asarray(actual, np.float64) - expected) / np.linalg.norm(expected))


@dataclass(frozen=True)
class GoldenCase:
    """A loaded model, its inputs by name, and all stored arrays, by names as `in_...`, `out_...`, `grad_w__...`."""

    model: nn.Cell
    inputs: dict[str, Tensor]
    stored: dict[str, np.ndarray]


@dataclass(frozen=True)
class Errors:
    """`relative` of each stored output, and of each stored gradient; the norms of all gradients are one of these."""

    outputs: dict[str, float]
    gradients: dict[str, float]


class _AutoencoderPasses(nn.Cell):
    """Both halves of an autoencoder in one call."""

    output_names = ("mean", "logvar", "decoded")

    def __init__(self, model):
        super().__init__(auto_prefix=False)
        self.model = model

    def construct(self, pixels, latents):
        return (*self.model.encode(pixels), self.model.decode(latents))


class _WithAndWithoutMask(nn.Cell):
    output_names = ("last_hidden_state_no_mask", "last_hidden_state_masked")

    def __init__(self, model):
        super().__init__(auto_prefix=False)
        self.model = model

    def construct(self, input_ids, attention_mask):
        return self.model(input_ids)[0], self.model(input_ids, attention_mask)[0]


class _Gradient(nn.Cell):
    """Gradients of the weighted sum of the outputs at `positions`, and all outputs."""

    def __init__(self, net, positions, weights, of_inputs, parameters):
        super().__init__()
        self.net, self.positions, self.weights = net, positions, weights
        self.gradient = ops.value_and_grad(self._loss, of_inputs or None, ms.ParameterTuple(parameters), True)

    def _loss(self, *inputs):
        outputs, total = self.net(*inputs), 0.0
        for i in range(len(self.positions)):
            total = total + (outputs[self.positions[i]] * self.weights[i]).sum()
        return total, outputs

    def construct(self, *inputs):
        return self.gradient(*inputs)


def load_case(name: str, **options) -> GoldenCase:
    """The case of that name; `options` are those of `load_model`."""
    if (OPEN_CLIP / name).is_dir():
        return _load_open_clip(name, **options)
    stored = dict(np.load(MODELS / name / "io.npz"))
    states = any(key.startswith(("out_hidden_", "out_penultimate")) for key in stored)
    model = load_model(MODELS / name, **{"hidden_states": states, **options})
    given = (key.removeprefix("in_") for key in stored if key.startswith("in_"))
    return GoldenCase(model, {key: Tensor(_int32(stored[f"in_{key}"])) for key in given}, stored)


def _int32(array: np.ndarray) -> np.ndarray:
    return array.astype(np.int32) if array.dtype == np.int64 else array


def open_clip_folder(name: str, folder: Path) -> Path:
    """Makes a model folder of an OpenCLIP case; its vocabulary has rows for the tokens of the golden texts only."""
    arrays = dict(np.load(OPEN_CLIP / name / "weights.npz"))
    rows, ids = arrays["token_embedding.weight"], arrays.pop("token_ids")
    arrays["token_embedding.weight"] = np.zeros((49408, rows.shape[1]), np.float32)
    arrays["token_embedding.weight"][ids] = rows
    save_file(arrays, folder / "open_clip_model.safetensors")
    (folder / "open_clip_config.json").write_text((OPEN_CLIP / name / "open_clip_config.json").read_text())
    return folder


def _load_open_clip(name: str, **options) -> GoldenCase:
    with tempfile.TemporaryDirectory() as folder:
        model = load_model(open_clip_folder(name, Path(folder)), **options)
    io, data = np.load(OPEN_CLIP / name / "io.npz"), np.load(OPEN_CLIP / "preprocess.npz")
    names = {"logits": "logits_per_image", "image_features": "image_embeds", "text_features": "text_embeds"}
    stored = {f"out_{ours}": io[theirs] for theirs, ours in names.items()}
    stored |= {"cot_logits_per_image": io["weight_for_sum"], "grad_in_pixel_values": io["grad_pixel_values"]}
    stored |= {key.replace("grad.", "grad_w__"): io[key] for key in io.files if key.startswith("grad.")}
    inputs = {"input_ids": Tensor(data["token_ids"]), "pixel_values": Tensor(data["pixel_values"])}
    return GoldenCase(model, inputs, stored)


def measure(case: GoldenCase, weights: Collection[str] | None = None) -> Errors:
    """Calls the model once, forward and backward, in one graph.

    Args:
        case: from `load_case`.
        weights: names of those whose gradients are taken; None: all that are trained. The norms of all gradients are
            only compared then.
    """
    assert ms.get_context("mode") == ms.GRAPH_MODE
    model, stored = case.model, case.stored
    net = model
    if "out_decoded" in stored:
        net = _AutoencoderPasses(model)
    elif "out_last_hidden_state_masked" in stored:
        net = _WithAndWithoutMask(model)
    parameters = {key: p for key, p in named_parameters(model).items() if p.requires_grad}
    if weights is not None:
        parameters = {key: parameters[key] for key in weights}
    taken = [key for key in inspect.signature(type(net).construct).parameters if key != "self"]
    wanted = [key for key in taken if f"grad_in_{key}" in stored]
    weighted = [key.removeprefix("cot_") for key in stored if key.startswith("cot_")]
    gradient = _Gradient(
        net,
        tuple(net.output_names.index(_output(model, key)) for key in weighted),
        tuple(Tensor(stored[f"cot_{key}"]) for key in weighted),
        tuple(taken.index(key) for key in wanted),
        parameters.values(),
    )
    (_, outputs), found = gradient(*[case.inputs.get(key) for key in taken])
    of_inputs, of_weights = found if wanted else ((), found)
    of_inputs = of_inputs if isinstance(of_inputs, tuple) else (of_inputs,)
    found = {f"grad_in_{key}": g.asnumpy() for key, g in zip(wanted, of_inputs, strict=True)}
    found |= {f"grad_w__{key}": g.asnumpy() for key, g in zip(parameters, of_weights, strict=True)}
    outputs = dict(zip(net.output_names, outputs, strict=True))
    listed = [key.removeprefix("out_") for key in stored if key.startswith("out_")]
    errors = {
        key: relative(outputs[_output(model, key)].asnumpy(), stored[f"out_{key}"])
        for key in listed
        if key not in _NO_OUTPUTS
    }
    of_gradients = {key: relative(found[key], stored[key]) for key in stored if key.startswith("grad_")}
    if weights is None and "param_names" in stored:
        norms = dict(zip(stored["param_names"], stored["out_param_grad_l2"], strict=True))
        assert norms.keys() == parameters.keys()  # all that the reference trains, and no more
        ours = [np.linalg.norm(found[f"grad_w__{key}"].astype(np.float64)) for key in norms]
        of_gradients["norms"] = relative(ours, np.array(list(norms.values())))
    return Errors(errors, of_gradients)


def _output(model: nn.Cell, stored: str) -> str:
    """Our name of a stored output."""
    return f"hidden_{model.config.num_hidden_layers - 1}" if stored == "penultimate" else stored
