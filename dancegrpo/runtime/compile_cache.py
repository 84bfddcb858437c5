"""Compiled graphs kept on disk for the next process.

MindSpore's own cache (MS_COMPILER_CACHE_ENABLE) names a graph by its number in the order of compilation and
checks nothing but the entry script: a process that compiles in another order silently computes with the wrong
graph, and two processes write the same files. So each process gives MindSpore a private folder, and this
module moves single graphs between that folder and a store in which they are named by content
(see ``fingerprint``):

    <cache folder>/compile/<versions, source, device, config>/<graph>.mindir

A file appears in the store whole, by a rename, so processes can share it.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import importlib.metadata
import os
import platform
import shutil
import tempfile
import time
from collections.abc import Iterator
from hashlib import blake2b
from pathlib import Path
from typing import Any

from dancegrpo import __version__
from dancegrpo.runtime.fingerprint import Fingerprint, NotFingerprintable

_UNUSED_DAYS = 30
_SCRATCH = ".process-"


class _State:
    """The store in use, MindSpore's private folder, and the number it will give to the next cached graph."""

    store: Path | None = None
    scratch: Path | None = None  # MindSpore reads its path once, so there is one for the life of the process
    next_number = 0
    hits = 0
    misses = 0
    refused: list[str] = []


def enable(folder: Path, cache_key: str, device: str) -> Path:
    """Starts to use the store for this key below ``folder``; returns its path."""
    key = blake2b(
        repr((_versions(), source_digest(), device, cache_key)).encode(), digest_size=12
    ).hexdigest()
    store = folder / key
    store.mkdir(parents=True, exist_ok=True)
    os.utime(store)
    if _State.scratch is None:
        _remove_unused(folder)
        _State.scratch = Path(tempfile.mkdtemp(prefix=f"{_SCRATCH}{os.getpid()}-", dir=folder))
        atexit.register(shutil.rmtree, _State.scratch, ignore_errors=True)
        os.environ["MS_COMPILER_CACHE_PATH"] = str(_State.scratch)
        _wrap_compilers()
    _State.store = store
    return store


def disable() -> None:
    """Graphs compiled from now on are neither read nor kept."""
    _State.store = None


def statistics() -> dict[str, Any]:
    """Graphs read from the store, graphs compiled and kept, and why others were not cached."""
    return {"hits": _State.hits, "misses": _State.misses, "refused": list(_State.refused)}


@functools.cache
def source_digest() -> str:
    """Digest of all Python source of this package."""
    package = Path(__file__).resolve().parent.parent
    digest = blake2b(digest_size=12)
    for file in sorted(package.rglob("*.py")):
        digest.update(file.relative_to(package).as_posix().encode() + b"\0" + file.read_bytes() + b"\0")
    return digest.hexdigest()


def graph_digest(source: Any, args: Any, kwargs: Any, jit_config: Any) -> str:
    """Content name of a graph.

    Raises:
        NotFingerprintable: when something in it cannot be told (see ``fingerprint``).
    """
    fingerprint = Fingerprint()
    fingerprint.add(getattr(source, "__parse_method__", None))
    fingerprint.add(source)
    fingerprint.add_arguments(args, kwargs)
    fingerprint.add(dict(jit_config or {}))
    # MindSpore gives a graph from its cache the values of the Parameters that the Cell registers, and leaves
    # the memory of others as it is: their graphs compute with garbage.
    registered = source.parameters_dict() if hasattr(source, "parameters_dict") else {}
    for parameter in fingerprint.parameters:
        if registered.get(parameter.name) is not parameter:
            raise NotFingerprintable(
                f"it uses {parameter.name}, which is not a Parameter of the Cell or its children"
            )
    return fingerprint.hexdigest()


def installed_version(package: str) -> str | None:
    """Version of an installed package; None if it is not there."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _wrap_compilers() -> None:
    from mindspore._c_expression import GraphExecutor_, JitExecutor_

    for executor in (GraphExecutor_, JitExecutor_):
        executor.compile = _cached(executor.compile)


def _cached(original):
    @functools.wraps(original)
    def compile(executor, source, args, kwargs, phase, jit_config):
        stored = _stored_file(source, args, kwargs, jit_config)
        if stored is None:
            return original(executor, source, args, kwargs, phase, jit_config)
        with _mindspore_cache(stored):
            return original(executor, source, args, kwargs, phase, jit_config)

    compile.counted = getattr(original, "counted", False)
    return compile


def _stored_file(source: Any, args: Any, kwargs: Any, jit_config: Any) -> Path | None:
    if _State.store is None:
        return None
    try:
        return _State.store / f"{graph_digest(source, args, kwargs, jit_config)}.mindir"
    except Exception as reason:  # a cache must never be what stops a program
        _State.refused.append(f"{type(source).__name__}: {reason}")
        return None


@contextlib.contextmanager
def _mindspore_cache(stored: Path) -> Iterator[None]:
    """Turns MindSpore's cache on for one compilation.

    Puts the stored graph where MindSpore will look, or takes the new one from where it was written. The
    folder never holds any other graph's file, so that even a wrong guess of the number cannot give a wrong
    graph.
    """
    folder = _State.scratch / f"rank_{os.environ.get('RANK_ID', '0')}" / "graph_cache"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    placed = folder / f"compile_cache_{_State.next_number}.mindir"
    if stored.is_file():
        try:
            shutil.copyfile(stored, placed)
            os.utime(placed, ns=(0, 0))
        except OSError:  # a full disk must not stop a program that only wanted to start faster
            placed.unlink(missing_ok=True)
    os.environ["MS_COMPILER_CACHE_ENABLE"] = "1"
    # The digest stands for MindSpore's check of the entry script.
    os.environ["MS_DEV_FORCE_USE_COMPILE_CACHE"] = "1"
    try:
        yield
    finally:
        os.environ.pop("MS_COMPILER_CACHE_ENABLE", None)
        os.environ.pop("MS_DEV_FORCE_USE_COMPILE_CACHE", None)
    # MindSpore writes a file when it found none or could not read it (which also mends a broken store).
    written = [file for file in folder.glob("compile_cache_*.mindir") if file.stat().st_mtime_ns != 0]
    if len(written) == 1:
        _State.misses += 1
        _State.next_number = int(written[0].stem.rpartition("_")[2]) + 1
        with contextlib.suppress(OSError):  # another process may have pruned the store meanwhile
            os.replace(written[0], stored)
    else:
        _State.hits += 1
        _State.next_number += 1
        with contextlib.suppress(OSError):
            os.utime(stored)


def _versions() -> tuple[str, ...]:
    names = ("mindspore", "mindformers", "numpy")
    ranks = (os.environ.get("RANK_ID", "0"), os.environ.get("RANK_SIZE", "1"))
    return (
        __version__,
        platform.python_version(),
        platform.machine(),
        *ranks,
        *(importlib.metadata.version(name) for name in names),
    )


def _remove_unused(folder: Path) -> None:
    """Stores that nobody used for a month, and private folders of processes that were killed."""
    now = time.time()
    for entry in folder.iterdir():
        age_days = (now - entry.stat().st_mtime) / 86400
        if age_days > (1 if entry.name.startswith(_SCRATCH) else _UNUSED_DAYS):
            shutil.rmtree(entry, ignore_errors=True)
