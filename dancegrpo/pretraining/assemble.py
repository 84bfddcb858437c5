"""All stages in order, and the pipeline folder that they make."""

import dataclasses
import json
import shutil
from collections.abc import Sequence
from pathlib import Path

from dancegrpo.config import ConfigError
from dancegrpo.pretraining.loop import plot_losses, run_stage
from dancegrpo.pretraining.recipe import STAGES, Recipe
from dancegrpo.pretraining.reward_stage import RewardStage
from dancegrpo.pretraining.stages import AutoencoderStage, ClipStage, FlowStage
from dancegrpo.runtime.files import sha256, write_atomic, write_folder_atomic

MANIFEST = "manifest.json"
_STAGES = (AutoencoderStage, ClipStage, FlowStage, RewardStage)
_PARTS = {"vae": ("vae",), "clip": ("tokenizer", "text_encoder", "reward_clip"), "flow": ("transformer",)}
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


def pretrain(recipe: Recipe, output: Path, stages: Sequence[str] = STAGES, start: Path | None = None) -> Path:
    """Train the models and write `output/small-flux`.

    Work in progress lies in `output/work`; a finished stage is not trained again, an interrupted one goes on from
    its last saved step. Returns the finished folder.

    Args:
        recipe: of the stages that are trained; those that come from `start` keep the recipe of its manifest.
        output: created if needed.
        stages: names of the stages to train.
        start: a folder that an earlier call wrote; the stages that are not trained are taken from it.

    Raises:
        ConfigError: `output` holds the work of another recipe, or the stages cannot be had in this way.
    """
    manifest = None if start is None else _read_manifest(start)
    recipe = _check_stages(recipe, stages, manifest, start)
    work, parts = output / "work", output / "work" / "parts"
    parts.mkdir(parents=True, exist_ok=True)
    _check_recipe(recipe, work / "recipe.json")
    if start is not None:
        _take_over(start, manifest, work, [name for name in STAGES if name not in stages])
    for stage_class in _STAGES:
        figures_file = work / stage_class.name / "figures.json"
        if figures_file.is_file():
            continue
        stage = stage_class(recipe, parts)
        run_stage(stage, work)
        write_atomic(figures_file, json.dumps(stage.export(parts), indent=2) + "\n")
    return assemble(recipe, work, output)


def _read_manifest(start: Path) -> dict:
    try:
        manifest = json.loads((start / MANIFEST).read_text(encoding="utf-8"))
        return {key: manifest[key] for key in ("recipe", "figures", "sha256")}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{start} is no folder that pre-training wrote: {MANIFEST}: {error!r}") from error


def _check_stages(recipe: Recipe, stages: Sequence[str], manifest: dict | None, start: Path | None) -> Recipe:
    """The recipe of the result: what the manifest says of the stages that are not trained."""
    kept = [name for name in STAGES if name not in stages]
    if manifest is None:
        if kept:
            raise ConfigError(f"--stages leaves out {', '.join(kept)}; say where they come from with --from")
        return recipe
    if tuple(stages) != STAGES[len(kept) :] or not kept:
        raise ConfigError(
            f"--stages is {' '.join(stages)}, but a stage needs the ones before it; with --from, valid: "
            + ", or ".join(" ".join(STAGES[k:]) for k in range(1, len(STAGES)))
        )
    missing = [name for name in kept if name not in manifest["figures"]]
    if missing:
        raise ConfigError(f"{start} lacks the stages {', '.join(missing)}")
    if file_hashes(start) != manifest["sha256"]:
        raise ConfigError(f"the files in {start} are not those of its {MANIFEST}")
    if "clip" in kept and "reward" in manifest["figures"]:
        raise ConfigError(
            f"reward_clip in {start} has been through the stage reward, which starts from what the stage clip "
            f"makes; name that one, too: --stages {' '.join(STAGES[1:])}"
        )
    for name in ("run", *kept):
        given = getattr(recipe, name)
        try:
            recorded = type(given)(**manifest["recipe"][name])
        except (KeyError, TypeError) as error:
            raise ConfigError(f"{start / MANIFEST}: no recipe of this version for {name}: {error}") from error
        if given not in (recorded, getattr(Recipe(), name)):
            raise ConfigError(f"{name} comes from {start}; leave the settings {name}.* away")
        recipe = dataclasses.replace(recipe, **{name: recorded})
    return recipe


def _take_over(start: Path, manifest: dict, work: Path, names: Sequence[str]) -> None:
    """The parts and figures of finished stages."""
    for name in names:
        figures_file = work / name / "figures.json"
        if figures_file.is_file():
            continue
        figures_file.parent.mkdir(parents=True, exist_ok=True)
        for part in _PARTS[name]:
            with write_folder_atomic(work / "parts" / part) as folder:
                shutil.copytree(start / part, folder, dirs_exist_ok=True)
        write_atomic(figures_file, json.dumps(manifest["figures"][name], indent=2) + "\n")


def _check_recipe(recipe: Recipe, file: Path) -> None:
    wanted = json.dumps(dataclasses.asdict(recipe), indent=2) + "\n"
    if file.is_file() and file.read_text(encoding="utf-8") != wanted:
        raise ConfigError(f"{file} is of another recipe; choose another --output, or remove that folder")
    write_atomic(file, wanted)


def assemble(recipe: Recipe, work: Path, output: Path) -> Path:
    """The pipeline folder with its manifest: the recipe, the stages' figures, and a hash of every file."""
    trained = [name for name in STAGES if (work / name / "losses.jsonl").is_file()]
    plot_losses(work, trained, output / "losses.png")
    target = output / "small-flux"
    with write_folder_atomic(target) as folder:
        for file in sorted(path for path in (work / "parts").rglob("*") if path.is_file()):
            place = folder / file.relative_to(work / "parts")
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_bytes(file.read_bytes())
        (folder / "scheduler").mkdir()
        _write_json(folder / "scheduler" / "scheduler_config.json", _SCHEDULER)
        _write_json(folder / "model_index.json", _MODEL_INDEX)
        figures = {name: json.loads((work / name / "figures.json").read_text()) for name in STAGES}
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
