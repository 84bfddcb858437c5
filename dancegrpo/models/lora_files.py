"""LoRA files: `pytorch_lora_weights.safetensors` as diffusers' `load_lora_weights` reads it.

Names are `<component>.<module>.lora_A.weight` and `.lora_B.weight`. Rank, alpha and modules stand in the file's
metadata (`lora_adapter_metadata`, since diffusers 0.34); without them alpha is the rank, and older versions of
diffusers take it for that whatever the file says.

A checkpoint of a run with a LoRA holds the sum: in its model folder the weights are W + scale B A, so that everything
that reads a model reads the trained one, and nothing has to know of the LoRA. The LoRA file lies beside it, for the
model that the run started from; added to the checkpoint's own model it would count twice, which `find_lora` refuses.
A run is resumed from neither of them, but from the model that it started from and A and B as `run_state/` holds them,
to the same bits.

diffusers has no LoRA loader for DiT and PixArt. Their merged folders load as any other; the LoRA files have the
names of the other families and go into the bare model through PEFT.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import mindspore as ms  # noqa: F401, its import tells NumPy what bfloat16 is
import numpy as np
from mindspore import Tensor, nn
from safetensors import SafetensorError, safe_open
from safetensors.numpy import load_file, save_file

from dancegrpo.config import ConfigError
from dancegrpo.models.layers import Linear
from dancegrpo.models.lora import (
    Arrays,
    attach,
    check_backbone,
    check_layer,
    correction,
    find_targets,
    lora_layers,
    lora_parameters,
    merged,
)
from dancegrpo.models.weights import LORA_ENDINGS
from dancegrpo.runtime.runlog import checkpoint_path, saved_iterations

if TYPE_CHECKING:
    from dancegrpo.config import LoraConfig

LORA_FILE = "pytorch_lora_weights.safetensors"
_METADATA = "lora_adapter_metadata"
_ENDINGS = dict.fromkeys((LORA_ENDINGS[0], ".lora.down.weight"), "down")
_ENDINGS |= dict.fromkeys(
    (LORA_ENDINGS[1], ".lora.up.weight"), "up"
)  # the second ones: diffusers before PEFT
_ALPHA = ".alpha"
_PEFT_PREFIX = "base_model.model"
_REFUSED = ("use_dora", "use_rslora", "lora_bias")


@dataclass(frozen=True)
class LoraLayer:
    """`down` is A (rank, in), `up` B (out, rank), float32."""

    down: np.ndarray
    up: np.ndarray
    alpha: float

    @property
    def rank(self) -> int:
        return len(self.down)

    def correction(self) -> np.ndarray:
        """What is added to the weight, float64 (out, in)."""
        return correction(self.down, self.up, self.alpha / self.rank)


@dataclass(frozen=True)
class StoredLora:
    """Layers by module name, and the file that they are from."""

    file: Path
    layers: Mapping[str, LoraLayer]


def save_lora(model: nn.Cell, folder: str | Path, prefix: str, weights: Arrays | None = None) -> Path:
    """Write the LoRA of `model` into `folder`, which exists; returns the file.

    Args:
        model: has a LoRA.
        folder: of the pipeline.
        prefix: the model's component there, `transformer` or `unet`.
        weights: arrays by the names of `lora_parameters` to write in place of the model's own.
    """
    layers = lora_layers(model)
    arrays = {name: p.asnumpy() for name, p in lora_parameters(model).items()} if weights is None else weights
    stored = {f"{prefix}.{name}": np.ascontiguousarray(a, np.float32) for name, a in arrays.items()}
    layer = next(iter(layers.values()))
    alpha = layer.lora_alpha
    settings = {
        "r": layer.lora_A.out_features,
        "lora_alpha": int(alpha) if alpha.is_integer() else alpha,
        "target_modules": list(layers),  # whole names: the end of one may be another module's name
        **{"rank_pattern": {}, "alpha_pattern": {}},  # diffusers cannot do without them
    }
    packed = {f"{prefix}.{key}": value for key, value in settings.items()}
    file = Path(folder) / LORA_FILE
    # One entry of metadata: of several, some versions of safetensors make another order each time.
    save_file(stored, file, metadata={_METADATA: json.dumps(packed, indent=2, sort_keys=True)})
    file.chmod(0o644)  # safetensors makes files that only their owner may read
    return file


def find_lora(path: str | Path, model_folder: Path | None = None) -> Path:
    """The LoRA file that a path means.

    Args:
        path: a file, a folder with `pytorch_lora_weights.safetensors`, or a run (its last checkpoint).
        model_folder: of the pipeline that the LoRA is for.

    Raises:
        ConfigError: nothing there, or the weights in `model_folder` have this LoRA in them already.
    """
    file = Path(path)
    if (file / "checkpoints").is_dir() and saved_iterations(file):
        file = checkpoint_path(file, saved_iterations(file)[-1])
    if file.is_dir():
        file = file / LORA_FILE
    if not file.is_file():
        raise ConfigError(
            f"LoRA {path}: {file} does not exist; give a safetensors file, or a folder with {LORA_FILE}"
        )
    if model_folder is not None and file.resolve().parent == model_folder.resolve():
        raise ConfigError(
            f"LoRA {path}: the weights in {model_folder} have this LoRA in them already; leave it out, or give the "
            "model that it was trained on"
        )
    return file


def read_lora(path: str | Path, prefix: str) -> StoredLora:
    """Read a LoRA of the component `prefix`.

    Args:
        path: see `find_lora`.
        prefix: `transformer` or `unet`; files that PEFT itself saved have none and are taken as well.

    Raises:
        ConfigError: damaged, of another component, in other names, or with an option that is not supported.
    """
    file = find_lora(path)
    try:
        arrays = load_file(file)
        with safe_open(file, framework="np") as opened:
            metadata = json.loads((opened.metadata() or {}).get(_METADATA) or "{}")
    except (SafetensorError, OSError, ValueError) as error:
        raise ConfigError(f"{file} cannot be read as a LoRA: {error}") from error
    prefix = _prefix_of(arrays, prefix, file)
    settings = {key.removeprefix(f"{prefix}."): value for key, value in metadata.items()}
    for option in _REFUSED:
        if settings.get(option):
            raise ConfigError(
                f"{file}: {option} is {settings[option]}, which is not supported; only false is"
            )
    parts, alphas = _parts(arrays, prefix, file)
    layers = {}
    for module, factors in parts.items():
        down, up = factors.get("down"), factors.get("up")
        if down is None or up is None:
            raise ConfigError(
                f"{file}: {module} has {' and '.join(factors)} only; a LoRA needs both matrices"
            )
        if down.ndim != 2 or up.ndim != 2 or len(down) != up.shape[1]:
            raise ConfigError(
                f"{file}: {module} has A {down.shape} and B {up.shape}, expected (rank, in) and (out, rank)"
            )
        alpha = alphas.get(module, _alpha_of(module, settings, len(down)))
        layers[module] = LoraLayer(down.astype(np.float32), up.astype(np.float32), float(alpha))
    return StoredLora(file, layers)


def _prefix_of(names: Mapping[str, Any], prefix: str, file: Path) -> str:
    """The prefix that all names have; ConfigError where that is not what is wanted."""
    for known in (prefix, _PEFT_PREFIX):
        if names and all(name.startswith(f"{known}.") for name in names):
            return known
    others = sorted({name.split(".")[0] for name in names} - {prefix})
    raise ConfigError(
        f"{file} holds a LoRA of {', '.join(others[:3]) or 'nothing'}, but all its names should begin with {prefix!r} "
        "as diffusers has them"
    )


def _parts(
    arrays: Arrays, prefix: str, file: Path
) -> tuple[dict[str, dict[str, np.ndarray]], dict[str, float]]:
    """Both matrices by module, and alpha where it stands among the arrays."""
    parts: dict[str, dict[str, np.ndarray]] = {}
    alphas = {}
    for name, array in arrays.items():
        own = name.removeprefix(f"{prefix}.")
        ending = next((ending for ending in _ENDINGS if own.endswith(ending)), None)
        if ending:
            parts.setdefault(own.removesuffix(ending), {})[_ENDINGS[ending]] = array
        elif own.endswith(_ALPHA) and array.size == 1:
            alphas[own.removesuffix(_ALPHA)] = float(array.reshape(()))
        else:
            raise ConfigError(
                f"{file}: {name} is no part of a LoRA in diffusers' names ({prefix}.MODULE{LORA_ENDINGS[0]})"
            )
    return parts, alphas


def _alpha_of(module: str, settings: Mapping[str, Any], rank: int) -> float:
    """PEFT's: the first pattern that is the end of the module's name, else the common one, else the rank."""
    for pattern, alpha in (settings.get("alpha_pattern") or {}).items():
        if re.match(rf"(.*\.)?({pattern})$", module):
            return alpha
    return settings.get("lora_alpha", rank)


def merge_stored(model: nn.Cell, lora: StoredLora) -> None:
    """Add a stored LoRA to the weights of `model`, in their own number format.

    Raises:
        ConfigError: it is of another model; nothing has changed then.
    """
    for name, layer in _fitting_layers(model, lora).items():
        array = merged(layer.weight.asnumpy(), lora.layers[name].correction())
        layer.weight.set_data(Tensor(array, layer.weight.dtype))


def attach_stored(model: nn.Cell, lora: StoredLora, settings: LoraConfig) -> None:
    """Give `model` a stored LoRA to train on; see `lora.add_lora`.

    Args:
        model: a backbone without LoRA.
        lora: see `read_lora`.
        settings: its rank must be the stored one; alpha and targets too, unless they are null.

    Raises:
        ConfigError: it is of another model, or the settings are not those it was trained with.
    """
    layers = _fitting_layers(model, lora)
    for name, layer in lora.layers.items():
        if layer.rank != settings.rank:
            raise ConfigError(f"lora.rank is {settings.rank}, but {lora.file} has rank {layer.rank} ({name})")
    alphas = {layer.alpha for layer in lora.layers.values()}
    alpha = settings.alpha or max(alphas)
    if alphas != {alpha}:
        shown = ", ".join(f"{value:g}" for value in sorted(alphas))
        raise ConfigError(f"lora.alpha is {settings.alpha or 'null'}, but {lora.file} has alpha {shown}")
    if settings.targets is not None:
        other = set(find_targets(model, settings.targets)) ^ set(layers)
        if other:
            raise ConfigError(
                f"lora.targets chooses other layers than {lora.file} has, {min(other)} for one; null takes the file's"
            )
    factors = {name: (lora.layers[name].down, lora.layers[name].up) for name in layers}
    attach(model, layers, factors, alpha, settings.dtype)


def _fitting_layers(model: nn.Cell, lora: StoredLora) -> dict[str, Linear]:
    """The model's layers that a stored LoRA is for, in the model's order; ConfigError says what does not fit."""
    check_backbone(model)
    cells = dict(model.cells_and_names())
    title = f"{lora.file} does not fit {type(model).__name__}"
    for name, stored in lora.layers.items():
        if name not in cells:
            raise ConfigError(f"{title}: the model has no {name}; the LoRA is of another model")
        check_layer(name, cells[name], title)
        layer = cells[name]
        found, expected = (stored.up.shape[0], stored.down.shape[1]), (layer.out_features, layer.in_features)
        if found != expected:
            raise ConfigError(f"{title}: {name} is for weights {found}, the model's are {expected}")
    return {name: cell for name, cell in cells.items() if name in lora.layers}


def exchange(model: nn.Cell, lora: StoredLora, there: Arrays, wanted: Arrays) -> None:
    """Take one LoRA out of merged weights and put another in, in one sum that is rounded once.

    Args:
        model: whose weights have `there` in them.
        lora: says alpha. there, wanted: arrays by the names of `lora_parameters`.
    """
    for name, layer in _fitting_layers(model, lora).items():
        scale = lora.layers[name].alpha / lora.layers[name].rank
        out, into = (
            correction(arrays[name + LORA_ENDINGS[0]], arrays[name + LORA_ENDINGS[1]], scale)
            for arrays in (there, wanted)
        )
        layer.weight.set_data(Tensor(merged(layer.weight.asnumpy(), -out, into), layer.weight.dtype))
