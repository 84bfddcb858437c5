"""PyTorch's pickled checkpoints (.pt, .bin, .ckpt) to model folders with safetensors.

PyTorch is asked to unpickle tensors only, because a pickle may hold any code.
"""

from __future__ import annotations

import pickle
import shutil
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from zipfile import BadZipFile, is_zipfile

import mindspore as ms  # noqa: F401, its import tells NumPy what bfloat16 is
import numpy as np
from mindspore.nn.utils import no_init_parameters

from dancegrpo.config import ConfigError, ReportedError, choices_text
from dancegrpo.models.loading import OPEN_CLIP_CONFIG, build_model
from dancegrpo.models.saving import SHARD_BYTES, cast, write_weights
from dancegrpo.models.weights import find_weights, match_weights, read_weight_map
from dancegrpo.runtime.files import read_json, write_folder_atomic
from dancegrpo.runtime.precision import DTYPES

_SUFFIXES = (".pt", ".bin", ".ckpt", ".pth")
_KEPT = (".json", ".txt", ".model")
"""Files beside a checkpoint that belong to the model: configs and tokenizers."""
_NESTED = "state_dict"
_PREFIX = "module."


def convert(
    source: str | Path,
    output: str | Path,
    *,
    config: str | Path | None = None,
    dtype: str | None = None,
    overwrite: bool = False,
    shard_bytes: int = SHARD_BYTES,
) -> int:
    """Write a model folder with safetensors weights; returns the number of tensors.

    Args:
        source: a checkpoint file, or a folder with one, or with shards and their index.
        output: the new folder.
        config: the model's config.json or open_clip_config.json; None looks beside the checkpoint.
        dtype: `"float32"`, `"float16"` or `"bfloat16"`; None keeps each tensor's own.
        overwrite: replace what an earlier call left in `output`.
        shard_bytes: larger weights are cut into several files.

    Raises:
        ConfigError: nothing to convert, a file that is no checkpoint or holds other things than tensors, or weights
            that do not fit the config.
        ReportedError: PyTorch is not installed.
    """
    source, output = Path(source), Path(output).absolute()
    if dtype is not None and dtype not in DTYPES:
        raise ConfigError(f"--dtype is {dtype!r}; {choices_text(dtype, DTYPES)}")
    if output.exists() and not overwrite:
        raise ConfigError(f"{output} exists already; choose another --output, or --overwrite it")
    files = _find_pickles(source)
    config_file = _config_beside(files[0]) if config is None else Path(config)
    options = read_json(config_file)
    tensors = _read_all(files)

    def fetch(name: str) -> np.ndarray:
        array = _to_numpy(tensors[name])
        is_float = array.dtype.kind == "f" or array.dtype == np.dtype("bfloat16")
        return cast(array, dtype, name) if dtype and is_float else array

    is_open_clip = config_file.name == OPEN_CLIP_CONFIG
    plain = "diffusion_pytorch_model" if "_class_name" in options else "model"
    stem = "open_clip_model" if is_open_clip else plain
    sizes = {name: _size(tensor, dtype) for name, tensor in tensors.items()}
    with write_folder_atomic(output) as new:
        write_weights(new, stem, sizes, fetch, shard_bytes)
        for file in sorted(files[0].parent.iterdir() if source.is_dir() else ()):
            if file.suffix in _KEPT and not file.name.endswith(".index.json"):
                shutil.copy2(file, new / file.name)
        shutil.copy2(config_file, new / (OPEN_CLIP_CONFIG if is_open_clip else "config.json"))
        with no_init_parameters():
            named = {"_class_name": "OpenCLIPModel", **options} if is_open_clip else options
            model = build_model(named, str(config_file))
        match_weights(model, find_weights(new, (stem,)), str(source))
    return len(tensors)


def _find_pickles(source: Path) -> list[Path]:
    """The checkpoint's files: one, or the shards that an index lists."""
    if source.is_file():
        return [source]
    if not source.is_dir():
        raise ConfigError(f"{source} does not exist; give a checkpoint file or a folder with one")
    indexes = sorted(source.glob("*.bin.index.json"))
    if indexes:
        shards = sorted(set(read_weight_map(indexes[0]).values()))
        return [source / shard for shard in shards]
    found = sorted(file for file in source.iterdir() if file.suffix in _SUFFIXES)
    if len(found) != 1:
        names = ", ".join(file.name for file in found) or f"no file that ends in {', '.join(_SUFFIXES)}"
        raise ConfigError(f"{source} must hold one checkpoint, or shards with an index; it has {names}")
    return found


def _config_beside(file: Path) -> Path:
    for name in ("config.json", OPEN_CLIP_CONFIG):
        if (file.parent / name).is_file():
            return file.parent / name
    raise ConfigError(f"{file.parent} has neither config.json nor {OPEN_CLIP_CONFIG}; name one by --config")


def _read_all(files: list[Path]) -> dict[str, Any]:
    tensors: dict[str, Any] = {}
    for file in files:
        for name, tensor in _read_tensors(file).items():
            if name in tensors:
                raise ConfigError(f"{file}: {name} is in another file as well")
            tensors[name] = tensor
    return tensors


def _read_tensors(file: Path) -> Mapping[str, Any]:
    """The tensors of one file by name; PyTorch maps them from the disk where the format allows it."""
    try:
        import torch
    except ImportError:
        raise ReportedError(
            "PyTorch is needed to read its checkpoints and is not installed: pip install 'dancegrpo[convert]'"
        ) from None
    try:
        loaded = torch.load(file, map_location="cpu", weights_only=True, mmap=is_zipfile(file))
    except pickle.UnpicklingError as error:
        first = str(error).strip().splitlines()[0]
        raise ConfigError(
            f"{file} is refused: it is damaged or holds other objects than tensors, and unpickling those could run "
            f"any code ({first})"
        ) from None
    except (OSError, RuntimeError, EOFError, BadZipFile, struct.error, ValueError) as error:
        raise ConfigError(f"{file} cannot be read as a PyTorch checkpoint: {error}") from None
    if isinstance(loaded, Mapping) and isinstance(loaded.get(_NESTED), Mapping):
        loaded = loaded[_NESTED]
    if not isinstance(loaded, Mapping):
        raise ConfigError(f"{file} holds a {type(loaded).__name__}, not a dictionary of tensors")
    others = [name for name, value in loaded.items() if not isinstance(value, torch.Tensor)]
    if others or not loaded:
        what = f"{others[0]!r}, which is no tensor" if others else "no tensors"
        raise ConfigError(f"{file} must hold tensors by name, or under {_NESTED!r}; it has {what}")
    if all(name.startswith(_PREFIX) for name in loaded):
        return {name.removeprefix(_PREFIX): tensor for name, tensor in loaded.items()}
    return loaded


def _to_numpy(tensor: Any) -> np.ndarray:
    """A PyTorch tensor as an array; bfloat16 by its bits, for which PyTorch has no NumPy type."""
    import torch

    tensor = tensor.detach().contiguous()
    if tensor.dtype == torch.bfloat16:
        return tensor.view(torch.int16).numpy().view(np.dtype("bfloat16"))
    return tensor.numpy()


def _size(tensor: Any, dtype: str | None) -> int:
    each = np.dtype(dtype).itemsize if dtype and tensor.is_floating_point() else tensor.element_size()
    return tensor.numel() * each
