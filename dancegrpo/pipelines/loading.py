"""From a path on the command line to a loaded pipeline."""

from importlib import import_module
from pathlib import Path

from dancegrpo.config import ConfigError, choices_text
from dancegrpo.diffusion.scheduler_config import SchedulerSettings
from dancegrpo.pipelines.base import Pipeline, PipelineOptions
from dancegrpo.pipelines.checkpoint import CheckpointPipeline
from dancegrpo.runtime.files import read_json
from dancegrpo.runtime.runlog import checkpoint_path, saved_iterations

SHIPPED = {"small-flux": Path(__file__).resolve().parent.parent / "assets" / "small-flux"}
# Class name in model_index.json -> module of dancegrpo.pipelines that has that class; imported when asked for.
_FAMILIES = {
    "DiTPipeline": "dit",
    "FluxPipeline": "flux",
    "PixArtAlphaPipeline": "pixart",
    "PixArtSigmaPipeline": "pixart",
    "StableDiffusion3Pipeline": "stable_diffusion_3",
    "StableDiffusionPipeline": "stable_diffusion",
    "StableDiffusionXLPipeline": "stable_diffusion_xl",
}


def resolve_checkpoint(path: str | Path) -> Path:
    """The pipeline folder that a path means.

    Args:
        path: a shipped name (`small-flux`), a run folder (its last checkpoint), a checkpoint folder, or any folder
            with `model_index.json`.

    Raises:
        ConfigError: nothing usable there.
    """
    if str(path) in SHIPPED and not Path(path).is_dir():
        return SHIPPED[str(path)]
    folder = Path(path)
    if not folder.is_dir():
        raise ConfigError(
            f"checkpoint {folder} does not exist; give a folder, or one of: {', '.join(SHIPPED)}"
        )
    if (folder / "checkpoints").is_dir():
        saved = saved_iterations(folder)
        if not saved:
            raise ConfigError(f"{folder} is a run that has not saved a checkpoint yet")
        return checkpoint_path(folder, saved[-1])
    if not (folder / "model_index.json").is_file():
        raise ConfigError(
            f"checkpoint {folder} is neither a run nor a pipeline folder: it has no model_index.json"
        )
    return folder


def find_family(folder: Path) -> type[CheckpointPipeline]:
    """The class for a pipeline folder, by the name in its `model_index.json`; nothing of the folder is executed.

    Raises:
        ConfigError: the file cannot be read, or names a class that is not supported.
    """
    family = read_json(folder / "model_index.json").get("_class_name")
    if not isinstance(family, str) or family not in _FAMILIES:
        raise ConfigError(
            f"{folder}: pipeline class {family!r} is not supported; {choices_text(str(family), _FAMILIES)}"
        )
    return getattr(import_module(f"dancegrpo.pipelines.{_FAMILIES[family]}"), family)


def load_pipeline(
    path: str | Path,
    options: PipelineOptions | None = None,
    weights: str | None = None,
    lora: str | None = None,
) -> CheckpointPipeline:
    """Load a pipeline for sampling or training.

    Args:
        path: see `resolve_checkpoint`.
        options: what the config asks for (`PipelineOptions.of`); None: nothing.
        weights: `"raw"` takes the trained weights of a run that also kept an average, `"ema"` insists on the
            average; None takes what the checkpoint shows (the average if there is one).
        lora: a LoRA to add to the backbone's weights, see `models.lora_files.find_lora`.

    Raises:
        ConfigError: unknown pipeline class, missing or unfitting components or LoRA, options that the model cannot
            follow.
    """
    from dancegrpo.models.lora_files import find_lora, merge_stored, read_lora

    folder = resolve_checkpoint(path)
    lora_file = None if lora is None else find_lora(lora, folder)
    pipeline = find_family(folder)(folder, options)
    _choose_weights(pipeline, folder, weights)
    if lora_file is not None:
        merge_stored(pipeline.backbone, read_lora(lora_file, pipeline.component))
    return pipeline


def read_process(path: str | Path) -> tuple[str, SchedulerSettings]:
    """What a checkpoint was trained on, and its scheduler, as `rl.chain` takes them; no model is loaded.

    Raises:
        ConfigError: the checkpoint or its scheduler cannot be had.
    """
    folder = resolve_checkpoint(path)
    family = find_family(folder)
    return family.process, family.read_scheduler(folder)


def _choose_weights(pipeline: Pipeline, folder: Path, weights: str | None) -> None:
    from safetensors.numpy import load_file

    from dancegrpo.models.loading import find_config
    from dancegrpo.models.lora_files import LORA_FILE, exchange, read_lora
    from dancegrpo.models.weights import find_weights, load_parameters, read_headers

    if weights not in (None, "raw", "ema"):
        raise ConfigError(f"weights is {weights!r}; valid: raw, ema")
    state = folder / "run_state"
    if weights == "ema" and not (state / "average.safetensors").is_file():
        raise ConfigError(f"{folder} keeps no average of its weights; use --weights raw")
    if weights == "raw" and (state / "policy.safetensors").is_file():
        if not (folder / LORA_FILE).is_file():
            shown = folder / pipeline.component  # parameters that are never trained are only there
            stored = find_weights(shown, find_config(shown)[2])
            load_parameters(
                pipeline.backbone, stored | read_headers([state / "policy.safetensors"]), str(state)
            )
        elif (state / "average.safetensors").is_file():  # else what is shown is what was trained
            lora = read_lora(folder, pipeline.component)
            average, policy = (load_file(state / f"{name}.safetensors") for name in ("average", "policy"))
            exchange(pipeline.backbone, lora, average, policy)
