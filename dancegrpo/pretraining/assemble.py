"""All stages in order, and the pipeline folder that they make."""

import dataclasses
import json
from pathlib import Path

from dancegrpo.config import ConfigError
from dancegrpo.pretraining.loop import plot_losses, run_stage
from dancegrpo.pretraining.recipe import Recipe
from dancegrpo.pretraining.stages import AutoencoderStage, ClipStage, FlowStage
from dancegrpo.runtime.files import sha256, write_atomic, write_folder_atomic

MANIFEST = "manifest.json"
_STAGES = (AutoencoderStage, ClipStage, FlowStage)
STAGE_NAMES = tuple(stage.name for stage in _STAGES)
_MODEL_INDEX = {
    "_class_name": "FluxPipeline",
    "_diffusers_version": "0.36.0",
    "scheduler": ["diffusers", "FlowMatchEulerDiscreteScheduler"],
    "text_encoder": ["transformers", "CLIPTextModel"],
    "text_encoder_2": [None, None],
    "tokenizer": ["transformers", "PreTrainedTokenizerFast"],
    "tokenizer_2": [None, None],
    "transformer": ["diffusers", "FluxTransformer2DModel"],
    "vae": ["dancegrpo", "PatchAutoencoder"],
}
_SCHEDULER = {
    "_class_name": "FlowMatchEulerDiscreteScheduler",
    "_diffusers_version": "0.36.0",
    "num_train_timesteps": 1000,
    "shift": 1.0,
    "use_dynamic_shifting": False,
}


def pretrain(recipe: Recipe, output: Path) -> Path:
    """Train the three models and write `output/small-flux`.

    Work in progress lies in `output/work`; a finished stage is not trained again, an interrupted one goes on from
    its last saved step. Returns the finished folder.

    Raises:
        ConfigError: `output` holds the work of another recipe.
    """
    work, parts = output / "work", output / "work" / "parts"
    parts.mkdir(parents=True, exist_ok=True)
    _check_recipe(recipe, work / "recipe.json")
    for stage_class in _STAGES:
        figures_file = work / stage_class.name / "figures.json"
        if figures_file.is_file():
            continue
        stage = stage_class(recipe, parts)
        run_stage(stage, work)
        write_atomic(figures_file, json.dumps(stage.export(parts), indent=2) + "\n")
    return assemble(recipe, work, output)


def _check_recipe(recipe: Recipe, file: Path) -> None:
    wanted = json.dumps(dataclasses.asdict(recipe), indent=2) + "\n"
    if file.is_file() and file.read_text(encoding="utf-8") != wanted:
        raise ConfigError(f"{file} is of another recipe; choose another --output, or remove that folder")
    write_atomic(file, wanted)


def assemble(recipe: Recipe, work: Path, output: Path) -> Path:
    """The pipeline folder with its manifest: the recipe, the stages' figures, and a hash of every file."""
    plot_losses(work, list(STAGE_NAMES), output / "losses.png")
    target = output / "small-flux"
    with write_folder_atomic(target) as folder:
        for file in sorted(path for path in (work / "parts").rglob("*") if path.is_file()):
            place = folder / file.relative_to(work / "parts")
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_bytes(file.read_bytes())
        (folder / "scheduler").mkdir()
        _write_json(folder / "scheduler" / "scheduler_config.json", _SCHEDULER)
        _write_json(folder / "model_index.json", _MODEL_INDEX)
        figures = {name: json.loads((work / name / "figures.json").read_text()) for name in STAGE_NAMES}
        _write_json(
            folder / MANIFEST,
            {"recipe": dataclasses.asdict(recipe), "figures": figures, "sha256": file_hashes(folder)},
        )
    return target


def file_hashes(folder: Path) -> dict[str, str]:
    """SHA-256 of every file below `folder` but the manifest, by relative path."""
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != MANIFEST)
    return {path.relative_to(folder).as_posix(): sha256(path) for path in files}


def _write_json(path: Path, content: dict) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
