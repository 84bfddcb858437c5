"""Checkpoints on disk: which safetensors files a folder has, what their headers promise, and their numbers.

Files are read by the safetensors library. It asks NumPy for a type called bfloat16, which MindSpore registers.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, nn
from safetensors import SafetensorError, safe_open

from dancegrpo.config import ConfigError

_FLOATS = ("F32", "F16", "BF16", "F64")
_PIECE = 4 * 2**20
"""Bytes that are read at a time, so that a conversion never holds a whole tensor twice."""
_REOPEN = 8 * 2**20
"""Bytes after which a file is opened anew: pages of a mapped file count as resident memory until it is closed."""
_LISTED = 4


@dataclass(frozen=True)
class StoredTensor:
    """What a header says of one tensor: its file, its name there, shape and safetensors' name of its type."""

    file: Path
    name: str
    shape: tuple[int, ...]
    dtype: str


Stored = dict[str, StoredTensor]


def find_weights(folder: Path, stems: Sequence[str]) -> Stored:
    """The tensors of a model folder by name, from the headers alone.

    Args:
        folder: holds `<stem>.safetensors`, or `<stem>.safetensors.index.json` with its shards, or a variant of
            one of them (`<stem>.fp16.safetensors`), which is taken when there is no plain one.
        stems: file names without extension, the first one that is there counts.

    Raises:
        ConfigError: no weights, a shard that is missing or holds something else than the index says, or a file
            that is truncated or no safetensors file.
    """
    for stem in stems:
        if (folder / f"{stem}.safetensors").is_file():
            return read_headers([folder / f"{stem}.safetensors"])
        if (folder / f"{stem}.safetensors.index.json").is_file():
            return _read_index(folder / f"{stem}.safetensors.index.json")
    for stem in stems:
        variant = _variant(folder, stem)
        if variant is not None:
            return _read_index(variant) if variant.suffix == ".json" else read_headers([variant])
    expected = " or ".join(f"{stem}.safetensors" for stem in stems)
    pickles = sorted(file.name for pattern in ("*.bin", "*.pt", "*.ckpt") for file in folder.glob(pattern))
    hint = f"; {pickles[0]} has to be converted first: tools/convert.py" if pickles else ""
    raise ConfigError(f"{folder} has no weights; expected {expected}{hint}")


def _variant(folder: Path, stem: str) -> Path | None:
    """`<stem>.<variant>.safetensors` or its index; "fp16" where there are several."""
    found = {file.name.split(".")[-2]: file for file in folder.glob(f"{stem}.safetensors.index.*.json")}
    files = (file for file in folder.glob(f"{stem}.*.safetensors") if "-of-" not in file.name)
    found |= {file.name.split(".")[-2]: file for file in files}
    if len(found) > 1 and "fp16" not in found:
        raise ConfigError(f"{folder} has the variants {', '.join(sorted(found))} of {stem}; keep one of them")
    return found.get("fp16") or next(iter(found.values()), None)


def read_weight_map(index: Path) -> dict[str, str]:
    """Tensor names to shards, as an index of shards lists them; the shards lie beside it.

    Raises:
        ConfigError: it is no index, or a shard is missing or in another folder.
    """
    try:
        listed = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        shards = sorted(set(listed.values()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{index} is no index of shards (it needs a weight_map): {error!r}") from error
    outside = [shard for shard in shards if Path(str(shard)).name != shard]
    if outside:
        raise ConfigError(f"{index} names {outside[0]!r}, which is no file of its own folder")
    missing = [shard for shard in shards if not (index.parent / shard).is_file()]
    if missing:
        raise ConfigError(f"{index.parent}: shard {missing[0]} is missing, which {index.name} lists")
    return listed


def _read_index(index: Path) -> Stored:
    """The tensors that an index lists, each looked up in the header of its shard."""
    listed = read_weight_map(index)
    stored = read_headers([index.parent / shard for shard in sorted(set(listed.values()))])
    for name, shard in listed.items():
        if name not in stored:
            raise ConfigError(f"{index}: {name} should be in {shard}, but is in none of the shards")
        if stored[name].file.name != shard:
            raise ConfigError(f"{index}: {name} should be in {shard}, but is in {stored[name].file.name}")
    unlisted = sorted(set(stored) - set(listed))
    if unlisted:
        raise ConfigError(
            f"{index}: {stored[unlisted[0]].file.name} holds {unlisted[0]}, which is not listed"
        )
    return stored


def read_headers(files: Iterable[Path]) -> Stored:
    """The tensors of some safetensors files by name; ConfigError for a damaged file or a name in two of them."""
    stored: Stored = {}
    for file in files:
        try:
            with safe_open(file, framework="np") as opened:
                for name in opened.keys():  # noqa: SIM118, not a dictionary
                    entry = opened.get_slice(name)
                    if name in stored:
                        raise ConfigError(f"{name} is both in {stored[name].file} and in {file}")
                    stored[name] = StoredTensor(file, name, tuple(entry.get_shape()), entry.get_dtype())
        except (SafetensorError, OSError) as error:
            raise ConfigError(f"{file} cannot be read as safetensors: {error}") from error
    return stored


LORA_ENDINGS = (".lora_A.weight", ".lora_B.weight")
"""How the names of a LoRA's own parameters end, as in PEFT."""


def named_parameters(model: nn.Cell) -> dict[str, Parameter]:
    """Parameters by the reference's names; those of a LoRA, which is no part of the model, are left out."""
    return {name: p for name, p in model.parameters_and_names() if not name.endswith(LORA_ENDINGS)}


def match_weights(model: nn.Cell, stored: Stored, source: str) -> Stored:
    """The stored tensor of every parameter of `model`; nothing is read or allocated.

    A model whose checkpoints come with older names as well has `weight_name(stored name) -> parameter name`;
    its `ignored_weights` are names, or patterns as in a shell, that a checkpoint may hold beside parameters.

    Raises:
        ConfigError: parameters are missing, unexpected, misshapen or not floating point, with names and shapes.
    """
    parameters, ignored = named_parameters(model), getattr(model, "ignored_weights", ())
    rename = getattr(model, "weight_name", None)
    found: Stored = {}
    unexpected, doubled = [], []
    for name, tensor in stored.items():
        own = rename(name) if rename else name
        if own in found:
            doubled.append(f"{name} and {found[own].name}")
        elif own in parameters:
            found[own] = tensor
        elif not any(fnmatchcase(name, pattern) for pattern in ignored):
            unexpected.append(name)
    missing = [name for name in parameters if name not in found]
    misshapen = [
        f"{tensor.name} is {tensor.shape}, expected {tuple(parameters[name].shape)}"
        for name, tensor in found.items()
        if not _fits(tensor, tuple(parameters[name].shape), renamed=tensor.name != name)
    ]
    types = [f"{tensor.name} is {tensor.dtype}" for tensor in found.values() if tensor.dtype not in _FLOATS]
    problems = (
        ("missing", missing),
        ("unexpected", unexpected),
        ("twice under different names:", doubled),
        ("misshapen:", misshapen),
        (f"not one of {', '.join(_FLOATS)}:", types),
    )
    texts = [f"{label} {_listing(entries)}" for label, entries in problems if entries]
    if texts:
        raise ConfigError(f"{source}: the weights do not fit {type(model).__name__}: {'; '.join(texts)}")
    return found


def _fits(tensor: StoredTensor, shape: tuple[int, ...], renamed: bool) -> bool:
    """Whether the shape is right; what has an older name may be a 1x1 convolution in place of a matrix."""
    return tensor.shape == shape or (renamed and tensor.shape == (*shape, 1, 1))


def _listing(entries: Sequence[str]) -> str:
    entries = sorted(entries)
    more = f" and {len(entries) - _LISTED} more" if len(entries) > _LISTED else ""
    return f"{', '.join(entries[:_LISTED])}{more}"


def load_parameters(model: nn.Cell, stored: Stored, source: str) -> None:
    """Set every parameter of `model`, in the type that it has, from `stored`; names and shapes must match exactly.

    Tensors are read piece by piece into the memory that the parameters keep, so that loading needs little more
    than the model itself.

    Raises:
        ConfigError: see `match_weights`; raised before anything is read.
    """
    found, parameters = match_weights(model, stored, source), named_parameters(model)
    by_file = defaultdict(dict)
    for name, tensor in found.items():
        by_file[tensor.file][tensor.name] = parameters[name]
    for file, wanted in by_file.items():
        _load_file(file, wanted)


def _load_file(file: Path, wanted: dict[str, Parameter]) -> None:
    reader = _Reader(file)
    try:
        for name in reader.in_order(wanted):
            parameter = wanted[name]
            array = np.empty(tuple(parameter.shape), _numpy_dtype(parameter.dtype))
            reader.fill(array, name)
            parameter.set_data(Tensor.from_numpy(array))  # not a copy: the parameter keeps the array
            parameter.init_mode = None  # else a pickled copy of the parameter would be drawn at random again
    except SafetensorError as error:
        raise ConfigError(f"{file} cannot be read as safetensors: {error}") from error
    finally:
        reader.close()


class _Reader:
    """Pieces of the tensors of one file, with little of the file in memory at any time."""

    def __init__(self, file: Path) -> None:
        self._file, self._mapped = file, 0
        self._opened = safe_open(file, framework="np")

    def in_order(self, names: Iterable[str]) -> list[str]:
        """Those names as they lie in the file."""
        names = set(names)
        return [name for name in self._opened.offset_keys() if name in names]

    def fill(self, array: np.ndarray, name: str) -> None:
        """Writes the tensor of that name into `array`, in the array's type."""
        if not array.ndim:
            array[()] = self._opened.get_tensor(name)
            return
        rows = max(1, _PIECE // max(1, array[:1].nbytes))
        for start in range(0, len(array), rows):
            if self._mapped > _REOPEN:
                self.close()
                self._opened, self._mapped = safe_open(self._file, framework="np"), 0
            part = slice(start, min(start + rows, len(array)))  # an end beyond the last row is an error here
            piece = self._opened.get_slice(name)[part].reshape(array[part].shape)
            with np.errstate(over="ignore"):
                array[part] = piece
            if array.dtype == np.float16 != piece.dtype and np.isinf(array[part]).any():
                raise ConfigError(f"{self._file}: {name} has numbers beyond the range of float16")
            self._mapped += piece.nbytes

    def close(self) -> None:
        self._opened.__exit__(None, None, None)


def _numpy_dtype(dtype: ms.Type) -> np.dtype:
    return np.dtype(str(dtype).lower())
