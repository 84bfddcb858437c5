"""Reading and writing models in the layout of diffusers and transformers: config.json beside safetensors."""

import dataclasses
import json
from importlib import import_module
from pathlib import Path

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, nn
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from dancegrpo.config import ConfigError

# Class name in config.json -> module of dancegrpo.models that has a class of that name; imported when asked for.
_MODULES = {
    "CLIPModel": "clip",
    "CLIPTextModel": "clip",
    "CLIPTextModelWithProjection": "clip",
    "FluxTransformer2DModel": "flux",
    "LlamaModel": "llama",
    "OpenCLIPModel": "open_clip",
    "PatchAutoencoder": "autoencoder",
    "SiglipModel": "siglip",
    "T5EncoderModel": "t5",
}
_DIFFUSERS_WEIGHTS = "diffusion_pytorch_model.safetensors"
_TRANSFORMERS_WEIGHTS = "model.safetensors"
OPEN_CLIP_CONFIG = "open_clip_config.json"
_OPEN_CLIP_WEIGHTS = "open_clip_model.safetensors"


def load_model(folder: str | Path, dtype: ms.Type | None = None, hidden_states: bool = False) -> nn.Cell:
    """Build the model that `folder/config.json` names and load its weights.

    Args:
        folder: has `config.json` and one safetensors file, as diffusers or transformers save them.
        dtype: dtype of the products (`mindspore.float16`, ...); parameters are float32 whatever is on disk.
        hidden_states: a text encoder also returns `hidden_0` ... `hidden_n`.

    Returns:
        A Cell in evaluation mode whose call takes flat keyword arguments and returns a tuple;
        `model.output_names` names its entries.

    Raises:
        ConfigError: missing files, unknown class, an unsupported option in the config, or parameters that are
            missing, unexpected or misshapen.
    """
    from dancegrpo.models.layers import set_compute_dtype

    folder = Path(folder)
    config = read_config(folder)
    model = build_model(config, str(folder / "config.json"), hidden_states=hidden_states)
    load_parameters(model, read_weights(folder), str(folder))
    if dtype is not None and dtype != ms.float32:
        set_compute_dtype(model, dtype)
    return model.set_train(False)


def read_config(folder: Path) -> dict:
    """The parsed `config.json` of a model folder."""
    path = folder / "config.json"
    if not path.is_file() and (folder / OPEN_CLIP_CONFIG).is_file():
        return read_open_clip_config(folder / OPEN_CLIP_CONFIG)
    if not path.is_file():
        raise ConfigError(f"{folder} is not a model folder: it has no config.json")
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(config, dict):
        raise ConfigError(f"{path} must hold an object with the model's options")
    return config


def read_open_clip_config(path: Path) -> dict:
    """The parsed `open_clip_config.json`, which does not say what class it is for."""
    try:
        return {"_class_name": "OpenCLIPModel", **json.loads(path.read_text(encoding="utf-8"))}
    except (ValueError, TypeError) as error:
        raise ConfigError(f"{path} is not a JSON object: {error}") from error


def build_model(config: dict, source: str, **options) -> nn.Cell:
    """A model with random weights from a parsed `config.json`; `source` names it in messages."""
    name = config.get("_class_name") or (config.get("architectures") or [None])[0]
    if name not in _MODULES:
        raise ConfigError(
            f"{source}: model class {name!r} is not known; valid: {', '.join(sorted(_MODULES))}"
        )
    model_class = getattr(import_module(f"dancegrpo.models.{_MODULES[name]}"), name)
    try:
        model = model_class(
            model_class.config_class.from_dict(config)
            if hasattr(model_class.config_class, "from_dict")
            else _from_known_fields(model_class.config_class, config)
        )
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{source}: {error}") from error
    if options.get("hidden_states"):
        if not hasattr(model, "return_hidden_states"):
            raise ConfigError(f"{source}: {name} has no hidden states to return; it is not a text encoder")
        model.return_hidden_states()
    return model


def _from_known_fields(config_class, config: dict):
    """A config dataclass from the keys it knows; keys with a leading underscore are the library's own notes."""
    names = {field.name for field in dataclasses.fields(config_class)}
    unknown = sorted(key for key in config if key not in names and not key.startswith("_"))
    if unknown:
        raise ValueError(f"unsupported options {', '.join(unknown)}; supported: {', '.join(sorted(names))}")
    values = {
        key: tuple(value) if isinstance(value, list) else value
        for key, value in config.items()
        if key in names
    }
    return config_class(**values)


def read_weights(folder: Path) -> dict[str, np.ndarray]:
    """All tensors of the safetensors file in a model folder, as stored."""
    for name in (_DIFFUSERS_WEIGHTS, _TRANSFORMERS_WEIGHTS, _OPEN_CLIP_WEIGHTS):
        if (folder / name).is_file():
            return read_safetensors(folder / name)
    raise ConfigError(f"{folder} has no weights; expected {_DIFFUSERS_WEIGHTS} or {_TRANSFORMERS_WEIGHTS}")


def read_safetensors(file: Path) -> dict[str, np.ndarray]:
    """All tensors of one file; ConfigError when it is truncated or something else."""
    try:
        return load_file(file)
    except (SafetensorError, OSError, ValueError) as error:
        raise ConfigError(f"{file} cannot be read as safetensors: {error}") from error


def named_parameters(model: nn.Cell) -> dict[str, Parameter]:
    """Parameters by the reference's names."""
    return dict(model.parameters_and_names())


def load_parameters(model: nn.Cell, weights: dict[str, np.ndarray], source: str) -> None:
    """Set every parameter of `model` (kept in float32) from `weights`; names and shapes must match exactly."""
    parameters = named_parameters(model)
    missing = sorted(set(parameters) - set(weights))
    unexpected = sorted(set(weights) - set(parameters) - set(getattr(model, "ignored_weights", ())))
    misshapen = [
        f"{name} is {tuple(weights[name].shape)}, expected {tuple(parameters[name].shape)}"
        for name in sorted(set(parameters) & set(weights))
        if tuple(weights[name].shape) != tuple(parameters[name].shape)
    ]
    problems = [
        f"{label} {', '.join(names[:4])}{f' and {len(names) - 4} more' if len(names) > 4 else ''}"
        for label, names in (("missing", missing), ("unexpected", unexpected), ("misshapen:", misshapen))
        if names
    ]
    if problems:
        raise ConfigError(f"{source}: the weights do not fit {type(model).__name__}: {'; '.join(problems)}")
    for name, parameter in parameters.items():
        parameter.set_data(Tensor(np.array(weights[name], dtype=np.float32, order="C")))


def parameter_arrays(model: nn.Cell) -> dict[str, np.ndarray]:
    """Host copies of all parameters by the reference's names."""
    return {name: parameter.asnumpy() for name, parameter in named_parameters(model).items()}


def save_model(
    model: nn.Cell, folder: str | Path, dtype: str = "float32", weights: dict[str, np.ndarray] | None = None
) -> None:
    """Write `config.json` and one safetensors file, as the reference library would.

    Args:
        model: any model of this package.
        folder: created if needed; existing files of the same names are replaced.
        dtype: `"float32"` or `"float16"` on disk.
        weights: arrays to write in place of the model's own parameters (an EMA, say), by the same names.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    config = model.config.to_dict() if hasattr(model.config, "to_dict") else dataclasses.asdict(model.config)
    if model.class_name == "OpenCLIPModel":
        _save_open_clip(config, parameter_arrays(model) if weights is None else weights, folder, dtype)
        return
    is_transformers = getattr(model, "library", "diffusers") == "transformers"
    header = {"architectures": [model.class_name]} if is_transformers else {"_class_name": model.class_name}
    (folder / "config.json").write_text(json.dumps(header | config, indent=2) + "\n", encoding="utf-8")
    arrays = parameter_arrays(model) if weights is None else weights
    save_file(
        {name: np.array(array, dtype=dtype, order="C") for name, array in arrays.items()},
        folder / (_TRANSFORMERS_WEIGHTS if is_transformers else _DIFFUSERS_WEIGHTS),
        metadata={"format": "pt"},
    )


def _save_open_clip(config: dict, arrays: dict[str, np.ndarray], folder: Path, dtype: str) -> None:
    (folder / OPEN_CLIP_CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    arrays = {name: np.array(array, dtype=dtype, order="C") for name, array in arrays.items()}
    save_file(arrays, folder / _OPEN_CLIP_WEIGHTS, metadata={"format": "pt"})
