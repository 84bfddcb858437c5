"""The run folder: everything that a training run leaves behind, and what resuming needs of it."""

from __future__ import annotations

import contextlib
import fcntl
import importlib.metadata
import json
import math
import os
import platform
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from dancegrpo import __version__
from dancegrpo.config import Config, ConfigError, dump_yaml, load_config
from dancegrpo.runtime.files import remove_leftovers, write_atomic
from dancegrpo.runtime.images import save_png

_OWN = (
    "config.yaml",
    "versions.json",
    "metrics.jsonl",
    "summary.json",
    "evaluation.json",
    "report.png",
    "samples",
    "tb",
    "checkpoints",
)
_CHECKPOINT = re.compile(r"iteration_(\d{6,})")
_ASIDE = ".overwritten"
"""Where an earlier run waits while the one that replaces it has not done anything yet."""
# What may change between a run and its continuation; every other key shapes what was computed so far.
_FREE_ON_RESUME = ("train.iterations", "output.", "evaluation.")


class RunFolder:
    """A run folder opened for writing; no second process can open it at the same time.

    Attributes:
        path: the folder.
        start: iteration to continue after; 0 for a new run, ``train.iterations`` for a run that is finished.
    """

    def __init__(
        self, path: str | Path, config: Config, *, resume: bool | int = False, overwrite: bool = False
    ) -> None:
        """Creates or reopens the folder.

        Args:
            path: the folder.
            config: the resolved config; written, or on resume compared with the one that is there.
            resume: True continues after the last checkpoint, a number after that one. With nothing saved yet
                the run starts at the beginning.
            overwrite: an earlier run in the folder is replaced (files of others stay). It is only set aside until
                the first iteration is logged; see ``undo_overwrite``.

        Raises:
            ConfigError: the folder holds something else, holds a run and neither resume nor overwrite is
                given, or the run to resume had another config or has no such checkpoint.
        """
        self.path = Path(path)
        self._metrics_file = None
        self._writer = None
        self._tensorboard = config.output.tensorboard
        self._iterations = config.train.iterations
        is_run = (self.path / "config.yaml").is_file() or (self.path / _ASIDE).is_dir()
        self._check_place(is_run, resume, overwrite)
        self.path.mkdir(parents=True, exist_ok=True)
        self._lock()
        try:
            self.start = self._prepare(config, resume if is_run else False, overwrite=is_run and overwrite)
        except BaseException:
            self.close()
            raise

    @property
    def evaluation_file(self) -> Path:
        """Results of the evaluation of the finished run."""
        return self.path / "evaluation.json"

    @property
    def finished(self) -> bool:
        """Whether the run that was opened has nothing left to train."""
        return self.start >= self._iterations and (self.path / "summary.json").exists()

    @property
    def checkpoints(self) -> Path:
        """The folder of the checkpoints."""
        return self.path / "checkpoints"

    def checkpoint(self, iteration: int) -> Path:
        """Folder of one checkpoint; whoever saves uses ``write_folder_atomic`` on it."""
        return checkpoint_path(self.path, iteration)

    def saved_iterations(self) -> list[int]:
        """Iterations with a complete checkpoint, ascending."""
        return saved_iterations(self.path)

    def prune_checkpoints(self, keep_last: int) -> None:
        """Removes all but the last ``keep_last`` checkpoints; 0 keeps all."""
        for iteration in self.saved_iterations()[:-keep_last] if keep_last else []:
            _remove_checkpoint(self.checkpoint(iteration))

    def log(self, metrics: Mapping[str, Any]) -> None:
        """Appends one iteration to metrics.jsonl, on the disk when this returns, and to TensorBoard.

        To be called before the iteration's checkpoint is saved: then every checkpoint has its whole history.
        """
        row = {key: _plain(value) for key, value in metrics.items()}
        if self._metrics_file is None:
            shutil.rmtree(self.path / _ASIDE, ignore_errors=True)
            self._metrics_file = open(self.path / "metrics.jsonl", "ab")  # noqa: SIM115 (open for the whole run)
        self._metrics_file.write((json.dumps(row) + "\n").encode())
        self._metrics_file.flush()
        os.fsync(self._metrics_file.fileno())
        if self._tensorboard:
            self._log_tensorboard(row)

    def metrics(self) -> list[dict[str, Any]]:
        """All rows of metrics.jsonl."""
        return read_metrics(self.path)

    def save_sample(self, iteration: int, grid: Image.Image | np.ndarray) -> Path:
        """Writes a sample grid, samples/iteration_000010.png (0 is the starting model)."""
        path = self.path / "samples" / f"iteration_{iteration:06d}.png"
        save_png(path, grid)
        if self._tensorboard:
            self._open_writer().add_image("samples", np.asarray(grid), iteration, dataformats="HWC")
        return path

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        """Writes summary.json; its presence says that the run ended as planned."""
        plain = json.dumps(_plain(dict(summary)), indent=2) + "\n"
        write_atomic(self.path / "summary.json", plain)

    def close(self) -> None:
        """Closes the files and lets other processes open the folder."""
        if self._metrics_file is not None:
            self._metrics_file.close()
        if self._writer is not None:
            self._writer.close()
        os.close(self._descriptor)

    def __enter__(self) -> RunFolder:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _check_place(self, is_run: bool, resume: bool | int, overwrite: bool) -> None:
        if resume is not False and overwrite:
            raise ConfigError(f"{self.path}: --resume and --overwrite exclude each other")
        if self.path.exists() and not self.path.is_dir():
            raise ConfigError(f"{self.path}: the output must be a folder, but there is a file of that name")
        if not self.path.is_dir() or not any(self.path.iterdir()):
            return
        if not is_run:
            raise ConfigError(
                f"{self.path}: the folder is not empty and holds no run; choose another --output"
            )
        if not overwrite and resume is False:
            raise ConfigError(
                f"{self.path}: the folder holds another run; use --resume to continue it, --overwrite to "
                "replace it, or another --output"
            )

    def _prepare(self, config: Config, resume: bool | int, *, overwrite: bool) -> int:
        """Makes the folder ready for the iteration after the one that is returned."""
        remove_leftovers(self.path)
        remove_leftovers(self.checkpoints)
        self.undo_overwrite()
        start = 0
        if overwrite:
            self._set_aside()
        elif resume is not False:
            start = self._find_start(resume)
            self._check_same(config)
        for folder in ("samples", "checkpoints"):
            (self.path / folder).mkdir(exist_ok=True)
        if start < config.train.iterations:
            self._rewind(start)
        write_atomic(self.path / "versions.json", json.dumps(versions(), indent=2) + "\n")
        write_atomic(self.path / "config.yaml", dump_yaml(config))
        return start

    def _lock(self) -> None:
        self._descriptor = os.open(self.path, os.O_RDONLY)
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self._descriptor)
            raise ConfigError(f"{self.path}: another process is writing to this run") from None
        except OSError:
            pass  # a file system without locks

    def _set_aside(self) -> None:
        aside = self.path / _ASIDE
        aside.mkdir()
        # Metrics go first: without them at the top, undo_overwrite brings everything back.
        for name in sorted(_OWN, key=lambda name: name != "metrics.jsonl"):
            if (self.path / name).exists():
                os.replace(self.path / name, aside / name)

    def undo_overwrite(self) -> None:
        """Puts back the run that was set aside, unless the new one has logged an iteration."""
        aside = self.path / _ASIDE
        if not aside.is_dir():
            return
        if not (self.path / "metrics.jsonl").is_file():
            for entry in aside.iterdir():
                _remove(self.path / entry.name)
                os.replace(entry, self.path / entry.name)
        shutil.rmtree(aside)

    def _find_start(self, resume: bool | int) -> int:
        saved = self.saved_iterations()
        if resume is True:
            return saved[-1] if saved else 0
        if resume not in (0, *saved):
            raise ConfigError(
                f"{self.path}: there is no checkpoint of iteration {resume} to resume; "
                f"saved are {', '.join(map(str, saved)) or 'none'}"
            )
        return resume

    def _check_same(self, config: Config) -> None:
        """Refuses to continue a run with a config that would have made another run of it."""
        then, now = _flat(load_config(self.path / "config.yaml")), _flat(config)
        for key in now:
            if then[key] != now[key] and not key.startswith(_FREE_ON_RESUME):
                raise ConfigError(
                    f"{self.path}: the run to resume has {key} = {then[key]!r}, but now it is "
                    f"{now[key]!r}; use the same value, or another --output for a new run"
                )

    def _rewind(self, iteration: int) -> None:
        """Forgets everything after ``iteration``, so that each iteration appears once."""
        for later in [saved for saved in self.saved_iterations() if saved > iteration]:
            _remove_checkpoint(self.checkpoint(later))
        for sample in (self.path / "samples").glob("iteration_*.png"):
            if int(sample.stem.rpartition("_")[2]) > iteration:
                sample.unlink()
        file = self.path / "metrics.jsonl"
        if file.exists():
            rows = [row for row in read_metrics(self.path) if row["iteration"] <= iteration]
            write_atomic(file, "".join(json.dumps(row) + "\n" for row in rows))
        for of_the_end in ("summary.json", "evaluation.json"):
            (self.path / of_the_end).unlink(missing_ok=True)
        if iteration == 0 and (self.path / "tb").exists():
            shutil.rmtree(self.path / "tb")

    def _open_writer(self):
        if self._writer is None:
            from tensorboardX import SummaryWriter

            # purge_step hides what an interrupted run logged after its last checkpoint.
            purge = self.start + 1 if self.start else None
            self._writer = SummaryWriter(str(self.path / "tb"), purge_step=purge)
        return self._writer

    def _log_tensorboard(self, row: Mapping[str, Any]) -> None:
        writer = self._open_writer()
        for key, value in row.items():
            if isinstance(value, int | float) and key != "iteration":
                writer.add_scalar(key, value, row["iteration"])
        writer.flush()


def checkpoint_path(run: str | Path, iteration: int) -> Path:
    """``RUN/checkpoints/iteration_000004``."""
    return Path(run) / "checkpoints" / f"iteration_{iteration:06d}"


def saved_iterations(run: str | Path) -> list[int]:
    """Iterations of a run with a complete checkpoint, ascending; for readers, which change nothing."""
    folder = Path(run) / "checkpoints"
    names = (
        [entry.name for entry in folder.iterdir() if (entry / "model_index.json").is_file()]
        if folder.is_dir()
        else []
    )
    return sorted(int(match.group(1)) for match in map(_CHECKPOINT.fullmatch, names) if match)


def read_metrics(run: str | Path) -> list[dict[str, Any]]:
    """Rows of a run's metrics.jsonl; a last line that a kill cut short is left out."""
    file = Path(run) / "metrics.jsonl"
    rows = []
    for line in file.read_text(encoding="utf-8").splitlines() if file.exists() else []:
        with contextlib.suppress(json.JSONDecodeError):
            rows.append(json.loads(line))
    return rows


def versions() -> dict[str, str]:
    """Versions of what computes, for versions.json."""
    packages = (
        "mindspore",
        "mindformers",
        "numpy",
        "scipy",
        "scikit-image",
        "pillow",
        "datasets",
        "tokenizers",
        "safetensors",
    )
    found = {"dancegrpo": __version__, "python": platform.python_version(), "platform": platform.platform()}
    for name in packages:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def _remove(entry: Path) -> None:
    shutil.rmtree(entry) if entry.is_dir() else entry.unlink(missing_ok=True)


def _remove_checkpoint(folder: Path) -> None:
    """Under its name a checkpoint is whole, so it loses the name before its files."""
    doomed = folder.with_name(f".tmp-{folder.name}")
    os.replace(folder, doomed)
    shutil.rmtree(doomed)


def _flat(config: Config) -> dict[str, Any]:
    return {
        f"{section}.{key}": value
        for section, values in config.to_dict().items()
        for key, value in values.items()
    }


def _plain(value: Any) -> Any:
    """NumPy numbers to Python's; not-a-number and infinities to null, which JSON has no other word for."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, np.generic):
        value = value.item()
    return None if isinstance(value, float) and not math.isfinite(value) else value
