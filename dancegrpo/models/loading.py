"""Reading and writing models in the layout of diffusers and transformers: config.json beside safetensors."""

import dataclasses
from importlib import import_module
from pathlib import Path

import mindspore as ms
from mindspore import nn
from mindspore.nn.utils import no_init_parameters

from dancegrpo.config import ConfigError
from dancegrpo.models.weights import find_weights, load_parameters
from dancegrpo.models.weights import named_parameters as named_parameters
from dancegrpo.runtime.files import read_json
from dancegrpo.runtime.precision import check_precision

# Class name in config.json -> module of dancegrpo.models that has a class of that name; imported when asked for.
_MODULES = {
    "AutoencoderKL": "autoencoder_kl",
    "CLIPModel": "clip",
    "CLIPTextModel": "clip",
    "CLIPTextModelWithProjection": "clip",
    "DiTTransformer2DModel": "dit",
    "FluxTransformer2DModel": "flux",
    "LlamaModel": "llama",
    "OpenCLIPModel": "open_clip",
    "PatchAutoencoder": "autoencoder",
    "PixArtTransformer2DModel": "pixart",
    "SD3Transformer2DModel": "sd3",
    "SiglipModel": "siglip",
    "T5EncoderModel": "t5",
    "UNet2DConditionModel": "unet",
}
# Models with something on top that a text encoder does without: their weights are left in the file.
_WITHIN = {"LlamaForCausalLM": "LlamaModel", "T5ForConditionalGeneration": "T5EncoderModel"}
# diffusers' older class for several models, told apart by `norm_type`: public DiT and PixArt folders name it.
_OLDER_CLASS = "Transformer2DModel"
_BY_NORM = {"ada_norm_zero": "DiTTransformer2DModel", "ada_norm_single": "PixArtTransformer2DModel"}
_CONFIG, OPEN_CLIP_CONFIG = "config.json", "open_clip_config.json"
_STEMS, _OPEN_CLIP_STEMS = ("diffusion_pytorch_model", "model"), ("open_clip_model",)


def load_model(
    folder: str | Path,
    dtype: ms.Type | None = None,
    hidden_states: bool = False,
    parameters_dtype: ms.Type | None = None,
) -> nn.Cell:
    """Build the model that `folder/config.json` (or `open_clip_config.json`) names and load its weights.

    Names and shapes are compared before any number is read, and numbers are read piece by piece, so that loading
    takes hardly more memory than the model.

    Args:
        folder: has the config and safetensors weights, whole or in shards, float32, float16 or bfloat16, as
            diffusers, transformers or OpenCLIP save them.
        dtype: dtype of the products (`mindspore.float16`, ...); None is float32.
        hidden_states: a text encoder also returns `hidden_0` ... `hidden_n`.
        parameters_dtype: dtype in which matrices are held, whatever is on disk; None is float32, which a model that
            is trained needs. A frozen model takes half the memory in the dtype of its products.

    Returns:
        A Cell in evaluation mode whose call takes flat keyword arguments and returns a tuple;
        `model.output_names` names its entries.

    Raises:
        ConfigError: missing or damaged files, unknown class, an unsupported option in the config, or parameters
            that are missing, unexpected or misshapen.
    """
    from dancegrpo.models.layers import set_compute_dtype, set_parameters_dtype

    folder = Path(folder)
    for asked in (dtype, parameters_dtype):
        if asked is not None:
            check_precision(str(asked).lower(), ms.get_context("device_target"))
    config, file, stems = find_config(folder)
    with no_init_parameters():  # random numbers for billions of parameters take minutes and are not needed
        model = build_model(config, str(file), hidden_states=hidden_states)
    stored = find_weights(folder, stems)
    if parameters_dtype is not None and parameters_dtype != ms.float32:
        set_parameters_dtype(model, parameters_dtype)
    load_parameters(model, stored, str(folder))
    if dtype is not None and dtype != ms.float32:
        set_compute_dtype(model, dtype)
    return model.set_train(False)


def find_config(folder: Path) -> tuple[dict, Path, tuple[str, ...]]:
    """The config of a model folder, its file, and the stems of the weights that belong to it.

    Published OpenCLIP folders often hold the same model for transformers as well, which then comes first.
    """
    if (folder / OPEN_CLIP_CONFIG).is_file():
        others = [file for stem in _STEMS for file in folder.glob(f"{stem}*.safetensors*")]
        if not (others and (folder / _CONFIG).is_file()):
            config = {"_class_name": "OpenCLIPModel", **read_json(folder / OPEN_CLIP_CONFIG)}
            return config, folder / OPEN_CLIP_CONFIG, _OPEN_CLIP_STEMS
    return read_config(folder), folder / _CONFIG, _STEMS


def read_config(folder: Path) -> dict:
    """The parsed `config.json` of a model folder."""
    if not (folder / _CONFIG).is_file():
        raise ConfigError(f"{folder} is not a model folder: it has no {_CONFIG}")
    return read_json(folder / _CONFIG)


def build_model(config: dict, source: str, **options) -> nn.Cell:
    """A model with random weights from a parsed `config.json`; `source` names it in messages."""
    name = config.get("_class_name") or (config.get("architectures") or [None])[0]
    if name == _OLDER_CLASS:
        name = _BY_NORM.get(str(config.get("norm_type")), name)
    name = _WITHIN.get(name, name)
    if name not in _MODULES:
        known = ", ".join(sorted([*_MODULES, *_WITHIN]))
        raise ConfigError(f"{source}: model class {name!r} is not known; valid: {known}")
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
