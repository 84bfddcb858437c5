"""What a `--checkpoint` path says before a model is loaded from it."""

from __future__ import annotations

from pathlib import Path


def config_of(path: str | Path | None) -> Path | None:
    """The resolved config of the run that a path names; None if it names no run.

    Args:
        path: a run folder, or one of the folders below its `checkpoints/`.
    """
    if path is None:
        return None
    folder = Path(path).resolve()
    runs = [folder, *([folder.parent.parent] if folder.parent.name == "checkpoints" else [])]
    return next((run / "config.yaml" for run in runs if (run / "config.yaml").is_file()), None)
