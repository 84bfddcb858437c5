"""Digests of large files that are read once: what was computed is remembered as long as the file stays the same.

A file counts as the same by device, inode, size, time of modification and time of change. The last of them is what
makes this safe: copying and unpacking tools set the others to any value that they like, but no program can set the
time of change, which the system moves with every write, rename or change of the rest.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from hashlib import blake2b
from pathlib import Path

from dancegrpo.config.folders import cache_folder
from dancegrpo.runtime.files import sha256, write_atomic

Signature = tuple[int, ...]

_SETTLED_SECONDS = 2.0
"""A younger file could change again within the tick of its file system's clock, and nobody would see it."""


def signature(path: str | Path) -> Signature:
    """What changes when the file does."""
    found = os.stat(path)
    return (found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)


def content_digest(path: str | Path, memory: Path | None = None) -> str:
    """SHA-256 of a file's content, from memory where the file has not changed since it was computed.

    Args:
        path: the file.
        memory: folder of what is remembered; None is in the user's cache folder.

    Raises:
        OSError: the file cannot be read.
    """
    path = Path(path).resolve()
    memory = cache_folder() / "digests" if memory is None else memory
    note = memory / f"{blake2b(str(path).encode(errors='surrogatepass'), digest_size=16).hexdigest()}.json"
    before = signature(path)
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        known = json.loads(note.read_text(encoding="utf-8"))
        if tuple(known["signature"]) == before:
            return known["sha256"]
    digest = sha256(path)
    age = time.time() - max(before[-2:]) / 1e9
    if signature(path) == before and age > _SETTLED_SECONDS:
        content = json.dumps({"path": str(path), "signature": before, "sha256": digest})
        with contextlib.suppress(OSError):  # what is not remembered is computed again
            memory.mkdir(parents=True, exist_ok=True)
            write_atomic(note, content)
    return digest
