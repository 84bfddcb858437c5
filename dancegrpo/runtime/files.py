"""Writes that are whole or not there, and checksums."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path

from dancegrpo.config import ConfigError

TEMPORARY_PREFIX = ".tmp-"
"""Names of unfinished files and folders start with this; left-overs are safe to remove."""
REPLACED_PREFIX = ".old-"
"""A folder that is replaced has this before its name for the moment in which the new one takes its place."""


def check_writable(path: str | Path, option: str) -> None:
    """Looks whether a file can be written at ``path``, where folders may still be missing; changes nothing.

    Args:
        option: what the user calls it, for messages ("--json").

    Raises:
        ConfigError: it is a folder, a folder on the way to it is a file, or may not be written to.
    """
    path = Path(path)
    if os.path.isdir(path):  # unlike Path's methods, those of os.path do not raise where they may not look
        raise ConfigError(f"{option} {path} is a folder, not a file")
    folder = next(parent for parent in path.absolute().parents if os.path.exists(parent))
    if not os.path.isdir(folder):
        raise ConfigError(f"{option} {path}: {folder} is a file, not a folder")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise ConfigError(f"{option} {path}: no permission to write to {folder}")


def read_json(path: str | Path) -> dict:
    """The object that a JSON file holds.

    Raises:
        ConfigError: it cannot be read, is not valid JSON, or holds something else than an object.
    """
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
    except ValueError as error:
        raise ConfigError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{path} must hold an object with options")
    return content


def write_atomic(path: str | Path, data: bytes | str) -> None:
    """Writes a file so that a crash at any moment leaves the old content or the new one, never a part."""
    path = Path(path)
    temporary = _temporary(path)
    try:
        with open(temporary, "wb") as file:
            file.write(data.encode() if isinstance(data, str) else data)
            _sync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    _sync_folder(path.parent)


@contextlib.contextmanager
def write_folder_atomic(path: str | Path) -> Iterator[Path]:
    """Gives a temporary folder to fill; on success it becomes ``path`` (an old folder there is replaced).

    The folder appears under its name only when every file in it is on the disk. If the block raises, or the
    process dies, ``path`` is as it was; ``remove_leftovers`` puts it back where the process died between the
    two renames of a replacement.
    """
    path = Path(path)
    temporary = _temporary(path)
    temporary.mkdir(parents=True)
    try:
        yield temporary
        for file in sorted(temporary.rglob("*")):
            _sync_path(file)
        _sync_path(temporary)
        old = None
        if path.exists():
            old = path.parent / f"{REPLACED_PREFIX}{path.name}"
            if old.exists():
                shutil.rmtree(old)
            os.replace(path, old)
        os.replace(temporary, path)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    _sync_folder(path.parent)
    if old is not None:
        shutil.rmtree(old)


def remove_leftovers(folder: str | Path) -> list[str]:
    """Removes what interrupted writes left in ``folder`` and finishes or undoes interrupted replacements.

    Returns the names of what was removed. Only for a folder that no other process is writing to.
    """
    folder = Path(folder)
    entries = sorted(folder.iterdir()) if folder.is_dir() else []
    names = []
    for entry in entries:
        if entry.name.startswith(REPLACED_PREFIX):
            kept = folder / entry.name.removeprefix(REPLACED_PREFIX)
            if not kept.exists():
                os.replace(entry, kept)
                continue
        elif not entry.name.startswith(TEMPORARY_PREFIX):
            continue
        shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
        names.append(entry.name)
    return names


def sha256(path: str | Path) -> str:
    """Hex digest of a file's content."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _temporary(path: Path) -> Path:
    return path.parent / f"{TEMPORARY_PREFIX}{path.name}-{uuid.uuid4().hex[:8]}"


def _sync(descriptor: int) -> None:
    os.fsync(descriptor)


def _sync_path(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _sync_folder(folder: Path) -> None:
    _sync_path(folder)
