"""Writing models as diffusers and transformers do: the config beside safetensors, in shards where they are large."""

from __future__ import annotations

import dataclasses
import json
import math
import shutil
from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase
from pathlib import Path

import mindspore as ms  # noqa: F401, its import tells NumPy what bfloat16 is
import numpy as np
from mindspore import nn
from safetensors.numpy import save_file

from dancegrpo.config import ConfigError, choices_text
from dancegrpo.models.lora import lora_parameters, merged_arrays
from dancegrpo.models.weights import find_weights, match_weights, named_parameters
from dancegrpo.runtime.files import write_folder_atomic
from dancegrpo.runtime.precision import DTYPES

SHARD_BYTES = 10 * 10**9
"""Size above which diffusers and we cut weights into several files."""

# What the library that a class comes from calls its files: config, and weights without extension.
_LAYOUTS = {
    "diffusers": ("config.json", "diffusion_pytorch_model"),
    "transformers": ("config.json", "model"),
    "open_clip": ("open_clip_config.json", "open_clip_model"),
}


def parameter_arrays(model: nn.Cell) -> dict[str, np.ndarray]:
    """Host copies of all parameters by the reference's names."""
    return {name: parameter.asnumpy() for name, parameter in named_parameters(model).items()}


def save_model(
    model: nn.Cell,
    folder: str | Path,
    dtype: str = "float32",
    weights: Mapping[str, np.ndarray] | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Write the config and safetensors weights, as the reference library would.

    The folder appears when it is whole. In a folder that is there already, config and weights are replaced and
    other files (a tokenizer, say) stay. What is written of a model with a LoRA is the sum of both.

    Args:
        model: any model of this package.
        folder: created if needed.
        dtype: `"float32"`, `"float16"` or `"bfloat16"` on disk.
        weights: arrays to write in place of the model's own parameters (an EMA, say), by the same names;
            for a model with a LoRA by the names of `lora.lora_parameters`.
        shard_bytes: larger weights are cut into several files with an index.

    Raises:
        ConfigError: an unknown dtype, `weights` that are not the model's, or a number beyond the dtype's range.
    """
    if dtype not in DTYPES:
        raise ConfigError(f"cannot save weights as {dtype!r}; {choices_text(dtype, DTYPES)}")
    parameters = named_parameters(model)
    shapes = {name: tuple(parameter.shape) for name, parameter in parameters.items()}
    lora = {name: tuple(parameter.shape) for name, parameter in lora_parameters(model).items()}
    if weights is not None:
        _check_arrays(weights, lora or shapes, type(model).__name__)
    sums = merged_arrays(model, weights) if lora else None

    def fetch(name: str) -> np.ndarray:
        if sums:
            return cast(sums(name), dtype, name)
        return cast(parameters[name].asnumpy() if weights is None else weights[name], dtype, name)

    folder = Path(folder).absolute()
    config_file, stem = _LAYOUTS[getattr(model, "library", "diffusers")]
    with write_folder_atomic(folder) as new:
        if folder.is_dir():
            ours = (config_file, f"{stem}.safetensors*", f"{stem}.*.safetensors", f"{stem}-*-of-*")
            _copy_others(folder, new, ours)
        config = json.dumps(_config_of(model), indent=2) + "\n"
        (new / config_file).write_text(config, encoding="utf-8")
        sizes = {name: math.prod(shape) * np.dtype(dtype).itemsize for name, shape in shapes.items()}
        write_weights(new, stem, sizes, fetch, shard_bytes)
        match_weights(model, find_weights(new, (stem,)), str(folder))


def _config_of(model: nn.Cell) -> dict:
    config = model.config.to_dict() if hasattr(model.config, "to_dict") else dataclasses.asdict(model.config)
    library = getattr(model, "library", "diffusers")
    if library == "open_clip":
        return config
    header = (
        {"architectures": [model.class_name]}
        if library == "transformers"
        else {"_class_name": model.class_name}
    )
    return header | config


def _check_arrays(weights: Mapping[str, np.ndarray], shapes: Mapping[str, tuple], model: str) -> None:
    different = sorted(set(weights) ^ set(shapes))
    if different:
        raise ConfigError(f"the weights to save are not those of {model}: {', '.join(different[:4])} differ")
    for name, array in weights.items():
        if array.shape != shapes[name]:
            raise ConfigError(f"the weights to save: {name} is {array.shape}, expected {shapes[name]}")


def _copy_others(old: Path, new: Path, ours: tuple[str, ...]) -> None:
    for entry in old.iterdir():
        if not any(fnmatchcase(entry.name, pattern) for pattern in ours):
            copy = shutil.copytree if entry.is_dir() else shutil.copy2
            copy(entry, new / entry.name)


def cast(array: np.ndarray, dtype: str, name: str) -> np.ndarray:
    """The array in another type, contiguous; ConfigError where that turns a finite number into an infinite one."""
    with np.errstate(over="ignore"):
        result = np.array(array, dtype=np.dtype(dtype), order="C")
    overflow = dtype == "float16" and np.isinf(result).any()
    if overflow and np.isfinite(np.asarray(array, np.float32)).all():
        raise ConfigError(f"{name} has numbers beyond the range of float16; save it as float32 or bfloat16")
    return result


def write_weights(
    folder: Path,
    stem: str,
    sizes: Mapping[str, int],
    fetch: Callable[[str], np.ndarray],
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Write `<stem>.safetensors`, or shards and their index.

    Args:
        folder: is there.
        stem: file name without extension.
        sizes: bytes of each tensor by name.
        fetch: gives the array of a name; those of one shard are held at a time.
        shard_bytes: a shard is no larger, unless a single tensor is.
    """
    shards: list[list[str]] = [[]]
    filled = 0
    for name, size in sizes.items():
        if shards[-1] and filled + size > shard_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(name)
        filled += size
    total = len(shards)
    files = (
        [f"{stem}.safetensors"]
        if total == 1
        else [f"{stem}-{number:05d}-of-{total:05d}.safetensors" for number in range(1, total + 1)]
    )
    for file, names in zip(files, shards, strict=True):
        save_file({name: fetch(name) for name in names}, folder / file, metadata={"format": "pt"})
        (folder / file).chmod(0o644)  # safetensors makes files that only their owner may read
    if total > 1:
        listed = {name: file for file, names in zip(files, shards, strict=True) for name in names}
        index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": listed}
        text = json.dumps(index, indent=2, sort_keys=True) + "\n"
        (folder / f"{stem}.safetensors.index.json").write_text(text, encoding="utf-8")
