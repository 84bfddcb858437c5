"""What a checkpoint holds beside the model, so that a run continues to the same bytes: `run_state/`.

policy.safetensors       the trained weights, float32 (the model's folder holds the average, if any)
optimizer.safetensors    AdamW's moments, `exp_avg.<name>` and `exp_avg_sq.<name>`
average.safetensors      the moving average of the weights, if one is kept
counters.json            iteration, optimizer steps, skipped updates, loss scale
checksums.json           SHA-256 of every file of the checkpoint, model included
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from dancegrpo.config import ConfigError
from dancegrpo.runtime.files import sha256
from dancegrpo.runtime.runlog import checkpoint_path, saved_iterations

FOLDER = "run_state"
_CHECKSUMS = "checksums.json"
_FIRST, _SECOND = "exp_avg.", "exp_avg_sq."

Arrays = Mapping[str, np.ndarray]


class CheckpointError(ConfigError):
    """A checkpoint is not whole; the message names the folder and the file."""


@dataclass(frozen=True)
class RunState:
    """Weights by name (float32) and plain counters; ``average`` is None if no average is kept."""

    policy: Arrays
    first_moments: Arrays
    second_moments: Arrays
    average: Arrays | None
    counters: Mapping[str, Any]


def save_run_state(checkpoint: Path, state: RunState) -> None:
    """Writes `run_state/` into a checkpoint folder that holds the model, and checksums of everything."""
    folder = checkpoint / FOLDER
    folder.mkdir()
    save_file(dict(state.policy), folder / "policy.safetensors")
    moments = {_FIRST + name: array for name, array in state.first_moments.items()}
    moments |= {_SECOND + name: array for name, array in state.second_moments.items()}
    save_file(moments, folder / "optimizer.safetensors")
    if state.average is not None:
        save_file(dict(state.average), folder / "average.safetensors")
    (folder / "counters.json").write_text(json.dumps(dict(state.counters), indent=2, sort_keys=True) + "\n")
    files = sorted(file for file in checkpoint.rglob("*") if file.is_file())
    for file in files:
        file.chmod(0o644)  # safetensors makes files that only their owner may read
    sums = {file.relative_to(checkpoint).as_posix(): sha256(file) for file in files}
    (folder / _CHECKSUMS).write_text(json.dumps(sums, indent=2) + "\n")


def load_run_state(checkpoint: Path) -> RunState:
    """Reads `run_state/` of a checkpoint folder.

    Raises:
        CheckpointError: a file is missing or damaged.
    """
    check_checkpoint(checkpoint)
    folder = checkpoint / FOLDER
    try:
        moments = load_file(folder / "optimizer.safetensors")
        average = folder / "average.safetensors"
        return RunState(
            policy=load_file(folder / "policy.safetensors"),
            first_moments={
                name[len(_FIRST) :]: array for name, array in moments.items() if name.startswith(_FIRST)
            },
            second_moments={
                name[len(_SECOND) :]: array for name, array in moments.items() if name.startswith(_SECOND)
            },
            average=load_file(average) if average.exists() else None,
            counters=json.loads((folder / "counters.json").read_text()),
        )
    except (OSError, ValueError, SafetensorError) as error:
        raise CheckpointError(f"{folder}: cannot be read: {error}") from error


def check_checkpoint(checkpoint: Path) -> None:
    """Compares every file of a checkpoint with its checksum.

    Raises:
        CheckpointError: one is missing or differs, or there are no checksums.
    """
    file = checkpoint / FOLDER / _CHECKSUMS
    try:
        sums = json.loads(file.read_text())
    except (OSError, ValueError):
        raise CheckpointError(
            f"{checkpoint}: the checkpoint is damaged: {FOLDER}/{_CHECKSUMS} is missing or cannot be read"
        ) from None
    for name, expected in sums.items():
        path = checkpoint / name
        if not path.is_file() or sha256(path) != expected:
            raise CheckpointError(
                f"{checkpoint}: the checkpoint is damaged: {name} "
                f"{'has changed since it was saved' if path.is_file() else 'is missing'}"
            )


def find_resume_point(run: Path, wanted: int | None = None) -> tuple[int, list[str]]:
    """The iteration to resume a run after, and what was wrong with later checkpoints.

    Args:
        run: the run folder.
        wanted: a certain iteration; None: the last one whose checkpoint is whole.

    Returns:
        The iteration (0: nothing saved yet, start at the beginning) and a message for each damaged checkpoint
        that was passed over.

    Raises:
        ConfigError: the wanted checkpoint is damaged, or every checkpoint is.
    """
    saved = saved_iterations(run)
    if wanted is not None:
        if wanted in saved:
            check_checkpoint(checkpoint_path(run, wanted))
        return wanted, []  # an iteration that was not saved is refused by the run folder
    problems: list[str] = []
    for iteration in reversed(saved):
        try:
            check_checkpoint(checkpoint_path(run, iteration))
        except CheckpointError as error:
            problems.append(str(error))
        else:
            return iteration, problems
    if saved:
        raise ConfigError(f"{run}: no checkpoint is whole ({problems[0]}); use --overwrite to start again")
    return 0, []
