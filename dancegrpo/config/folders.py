"""Places outside the working directory."""

import os
import tempfile
from pathlib import Path


def cache_folder() -> Path:
    """The user's cache folder for this package: ``$XDG_CACHE_HOME/dancegrpo`` or ``~/.cache/dancegrpo``.

    A temporary folder stands in where the home folder cannot be written.
    """
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = base / "dancegrpo"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK):
            raise PermissionError(folder)
    except OSError:
        folder = Path(tempfile.gettempdir()) / f"dancegrpo-{os.getuid()}"
        folder.mkdir(exist_ok=True)
    return folder
