"""LoRA: a low-rank correction is trained in place of the weights (Hu et al., 2022).

A layer computes W x + scale B (A x) with W frozen, A (rank, in), B (out, rank) and scale = alpha / rank. B starts at
zero, so the model starts as it was. Names and meaning of every number are PEFT's; files are in `lora_files`.

The starting model, which a KL divergence refers to, needs no second copy of the weights: it is what the frozen ones
compute with the first values of A and B, and those are all that is kept of it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, nn

from dancegrpo.config import ConfigError, choices_text
from dancegrpo.models.layers import Linear
from dancegrpo.models.weights import LORA_ENDINGS, named_parameters
from dancegrpo.runtime.noise import generator
from dancegrpo.runtime.precision import DTYPES

if TYPE_CHECKING:
    from dancegrpo.config import LoraConfig

DEFAULT_TARGETS = (
    *("to_q", "to_k", "to_v", "to_out.0"),
    *("add_q_proj", "add_k_proj", "add_v_proj", "to_add_out"),
)
"""All projections of every attention; the second four are those of the text tokens in joint attention."""

BACKBONES = (
    "DiTTransformer2DModel",
    "FluxTransformer2DModel",
    "PixArtTransformer2DModel",
    "SD3Transformer2DModel",
    "UNet2DConditionModel",
)
"""Models that `add_lora` takes: those whose layers are known to call `Linear` and never its weights alone."""

Arrays = Mapping[str, np.ndarray]


def add_lora(
    model: nn.Cell,
    rank: int,
    alpha: float | None = None,
    targets: Sequence[str] | None = None,
    dtype: str = "float32",
    seed: int = 0,
) -> dict[str, Linear]:
    """Freeze `model` and give its target layers a LoRA; must be called before the first graph is compiled.

    Args:
        model: a backbone.
        rank: of the correction, at least 1.
        alpha: the correction is scaled by alpha / rank; None is the rank, so that the scale is 1.
        targets: see `find_targets`.
        dtype: number format in which the model holds A and B.
        seed: A is uniform in +-1 / sqrt(in), as PEFT's default, and a function of seed and layer name.

    Returns:
        The layers that have it, by name, in the order of the model.

    Raises:
        ConfigError: see `find_targets`; an unknown dtype, or a model that takes no LoRA.
    """
    layers = find_targets(model, targets)
    factors = {}
    for name, layer in layers.items():
        bound = layer.in_features**-0.5
        down = generator("lora", seed, name).uniform(-bound, bound, (rank, layer.in_features))
        factors[name] = down.astype(np.float32), np.zeros((layer.out_features, rank), np.float32)
    attach(model, layers, factors, rank if alpha is None else alpha, dtype)
    return layers


def find_targets(model: nn.Cell, targets: Sequence[str] | None = None) -> dict[str, Linear]:
    """The layers that `targets` choose, by name.

    Args:
        model: a backbone.
        targets: module names or their ends from a dot on (`to_q`, `attn.to_q`, `to_out.0`), as PEFT's
            `target_modules`; None is `DEFAULT_TARGETS`.

    Raises:
        ConfigError: a target that chooses nothing, or something that is no linear layer.
    """
    check_backbone(model)
    cells = {name: cell for name, cell in model.cells_and_names() if name}
    wanted = DEFAULT_TARGETS if targets is None else targets
    for target in wanted if targets is not None else ():
        if not any(matches(name, target) for name in cells):
            ends = {name.rsplit(".", 1)[-1] for name, cell in cells.items() if type(cell) is Linear}
            named = {end for end in ends if not end.isdigit()}
            raise ConfigError(
                f"lora.targets: no layer of {type(model).__name__} is called {target!r}; "
                f"{choices_text(target, sorted(named))}"
            )
    chosen = {name: cell for name, cell in cells.items() if any(matches(name, target) for target in wanted)}
    if not chosen:
        raise ConfigError(f"lora.targets must name at least one layer of {type(model).__name__}")
    for name, cell in chosen.items():
        check_layer(name, cell, "lora.targets")
    return chosen


def check_backbone(model: nn.Cell) -> None:
    """ConfigError unless the model takes a LoRA."""
    name = getattr(model, "class_name", type(model).__name__)
    if name not in BACKBONES:
        raise ConfigError(f"{name} takes no LoRA (lora.rank, model.lora); {', '.join(BACKBONES)} do")


def check_layer(name: str, cell: nn.Cell, source: str) -> None:
    """ConfigError unless the cell is a linear layer; `source` says who chose it."""
    if type(cell) is not Linear:  # subclasses hold their weight in another shape
        kind = type(cell).__name__.lstrip("_")
        raise ConfigError(
            f"{source}: {name} is no linear layer but a {kind}; a LoRA goes into linear layers only"
        )


def matches(name: str, target: str) -> bool:
    """Whether a target of PEFT's kind chooses the module: it is its name, or the end of it from a dot on."""
    return name == target or name.endswith(f".{target}")


def attach(
    model: nn.Cell,
    layers: Mapping[str, Linear],
    factors: Mapping[str, tuple[np.ndarray, np.ndarray]],
    alpha: float,
    dtype: str = "float32",
) -> None:
    """Freeze the model and put given A and B into its layers; see `add_lora`."""
    if lora_layers(model):
        raise ValueError("the model has a LoRA already")
    if dtype not in DTYPES:
        raise ConfigError(f"lora.dtype is {dtype!r}; {choices_text(dtype, DTYPES)}")
    for parameter in model.get_parameters():
        parameter.requires_grad = False
    for name, layer in layers.items():
        down, up = factors[name]
        layer.lora_alpha, layer.lora_scale = float(alpha), float(alpha) / len(down)
        for part, matrix in (("lora_A", down), ("lora_B", up)):
            cell = Linear(matrix.shape[1], matrix.shape[0], bias=False)
            cell.compute_dtype = layer.compute_dtype
            cell.weight = Parameter(Tensor(matrix, getattr(ms, dtype)), name="weight")
            setattr(layer, part, cell)
            cell.weight.name = (
                f"{name}.{part}.weight"  # whole: the layer was named when its parents were made
            )
        layer.has_lora = True


def lora_layers(model: nn.Cell) -> dict[str, Linear]:
    """The layers of `model` that have a LoRA, by name; empty for a model without one."""
    return {name: cell for name, cell in model.cells_and_names() if getattr(cell, "has_lora", False)}


def lora_parameters(model: nn.Cell) -> dict[str, Parameter]:
    """A and B of every layer, by the names `<layer>.lora_A.weight` and `<layer>.lora_B.weight`."""
    return {name: p for name, p in model.parameters_and_names() if name.endswith(LORA_ENDINGS)}


def describe_lora(model: nn.Cell) -> str:
    """A few words on what is trained; empty for a model without a LoRA."""
    layers, trained = lora_layers(model), lora_parameters(model)
    if not layers:
        return ""
    count = sum(parameter.size for parameter in trained.values())
    whole = sum(parameter.size for parameter in named_parameters(model).values())
    rank = next(iter(layers.values())).lora_A.out_features
    share = 100 * count / whole
    return f"a LoRA of rank {rank} in {len(layers)} layers: {count:,} weights, {share:.2g}% of the model's"


def correction(down: np.ndarray, up: np.ndarray, scale: float) -> np.ndarray:
    """scale B A in float64, whose rounding does not show in float32 whatever the order of the sums."""
    return scale * (up.astype(np.float64) @ down.astype(np.float64))


def merged(weight: np.ndarray, *corrections: np.ndarray) -> np.ndarray:
    """The weight with corrections added, rounded once, to float32."""
    total = weight.astype(np.float64)
    for part in corrections:
        total += part
    return total.astype(np.float32)


def merged_arrays(model: nn.Cell, lora: Arrays | None = None) -> Callable[[str], np.ndarray]:
    """A function from a parameter's name to its array, W + scale B A where the layer has a LoRA.

    Args:
        model: stays as it is.
        lora: arrays by the names of `lora_parameters` to take in place of the model's own A and B.
    """
    layers, parameters, trained = lora_layers(model), named_parameters(model), lora_parameters(model)

    def fetch(name: str) -> np.ndarray:
        weight, layer = parameters[name].asnumpy(), name.removesuffix(".weight")
        if layer not in layers:
            return weight
        names = [layer + ending for ending in LORA_ENDINGS]
        down, up = (trained[key].asnumpy() if lora is None else lora[key] for key in names)
        return merged(weight, correction(down, up, layers[layer].lora_scale))

    return fetch


def merge_lora(model: nn.Cell) -> nn.Cell:
    """Write W + scale B A into the weights and take the LoRA away; returns the model.

    The model computes what it did, within rounding. Its weights stay frozen.
    """
    fetch = merged_arrays(model)
    for name, layer in lora_layers(model).items():
        layer.weight.set_data(Tensor(fetch(f"{name}.weight"), layer.weight.dtype))
        up = layer.lora_B.weight  # zero for graphs that were compiled with it
        up.set_data(Tensor(np.zeros(up.shape, np.float32), up.dtype))
        layer.has_lora = False
        del layer.lora_A, layer.lora_B
    return model


def adapt(
    model: nn.Cell,
    settings: LoraConfig,
    start: str | None = None,
    prefix: str = "transformer",
    seed: int = 0,
) -> None:
    """What a training run does to its backbone before anything is compiled.

    Args:
        model: the backbone; one that has a LoRA already stays as it is.
        settings: section `lora`. With rank 0 the model stays whole and all its weights are trained.
        start: a stored LoRA (see `lora_files.find_lora`). It is trained on; with rank 0 it becomes part of the
            weights.
        prefix: of the model's names in that file.
        seed: see `add_lora`.

    Raises:
        ConfigError: settings or file do not fit the model, or each other.
    """
    from dancegrpo.models.lora_files import attach_stored, merge_stored, read_lora

    if lora_layers(model):
        return
    if start is not None:
        stored = read_lora(start, prefix)
        if settings.rank:
            attach_stored(model, stored, settings)
        else:
            merge_stored(model, stored)
    elif settings.rank:
        add_lora(model, settings.rank, settings.alpha, settings.targets, settings.dtype, seed)
