"""Encoded prompts on disk, for the next iteration and the next run.

    <cache folder>/embeddings/<key>/<prompt>.safetensors

The key is a digest of all that an encoding follows from besides the prompt (see `Pipeline.text_key`), so an encoder
that changed never meets what another one made. A file appears whole, by a rename, so processes can share the folder;
it holds a checksum over prompt and numbers, so nothing depends on the disk having kept it. That is also why nothing is
synced: a power cut costs an encoding, and syncing thousands of small files would cost more than encoding them.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
import uuid
from hashlib import blake2b
from pathlib import Path

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load, save

from dancegrpo.config.folders import cache_folder
from dancegrpo.runtime.files import TEMPORARY_PREFIX

Encoding = tuple[np.ndarray, ...]

_CHECKSUM, _SUFFIX = "checksum", ".safetensors"
_ABANDONED_SECONDS = 3600
_SHRINK_TO = 0.9
"""Of the bound: the folder is not looked through for every file that is added at the bound."""


class EmbeddingCache:
    """Encodings by the text that they are of.

    Args:
        key: what they follow from besides the text.
        limit: bytes of all encodings on disk, of every key; the ones that were not used for longest go first.
        folder: None is in the user's cache folder.
    """

    def __init__(self, key: str, limit: int, folder: Path | None = None):
        self.root = cache_folder() / "embeddings" if folder is None else Path(folder)
        self.folder = self.root / blake2b(key.encode(), digest_size=16).hexdigest()
        self.limit = limit
        self._total: int | None = None  # bytes below the root; None: not counted yet
        self._warned = False

    def get(self, text: str) -> Encoding | None:
        """What was put there for the text, to the bit; None (after a warning) if the file is damaged."""
        file = self._file(text)
        try:
            content = file.read_bytes()
        except OSError:
            return None
        try:
            arrays = load(content)
            checksum = arrays.pop(_CHECKSUM)
            encoding = tuple(arrays[str(index)] for index in range(len(arrays)))
            if checksum.tobytes() != _checksum(text, encoding):
                raise ValueError("checksum")
        except (SafetensorError, ValueError, KeyError):
            print(f"warning: {file} is damaged; its prompt is encoded anew", file=sys.stderr)
            file.unlink(missing_ok=True)
            return None
        with contextlib.suppress(OSError):
            os.utime(file)  # it was used
        return encoding

    def put(self, text: str, encoding: Encoding) -> bool:
        """Keeps an encoding; False (after a warning) if the disk does not take it."""
        arrays = {str(index): np.ascontiguousarray(array) for index, array in enumerate(encoding)}
        content = save({**arrays, _CHECKSUM: np.frombuffer(_checksum(text, encoding), np.uint8)})
        file = self._file(text)
        temporary = file.with_name(f"{TEMPORARY_PREFIX}{uuid.uuid4().hex}")
        if not self._make_room(len(content)):
            return False
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            replaced = file.stat().st_size if file.exists() else 0
            temporary.write_bytes(content)
            os.replace(temporary, file)
        except OSError as error:
            with contextlib.suppress(OSError):
                temporary.unlink()
            self._warn(f"{self.root} cannot keep encoded prompts: {error.strerror}")
            return False
        self._total += len(content) - replaced
        return True

    def touch(self, text: str) -> bool:
        """Whether there is a file for the text, which counts as used now."""
        try:
            os.utime(self._file(text))
        except OSError:
            return False
        return True

    @property
    def safe_limit(self) -> int:
        """Bytes that stay if they are the ones that were used last."""
        return int(_SHRINK_TO * self.limit)

    def clear(self) -> None:
        """Forgets the encodings of this key."""
        for file in self.folder.glob(f"*{_SUFFIX}"):
            file.unlink(missing_ok=True)
        self._total = None

    def _file(self, text: str) -> Path:
        return self.folder / f"{blake2b(_bytes(text), digest_size=16).hexdigest()}{_SUFFIX}"

    def _make_room(self, size: int) -> bool:
        """Removes the oldest files where `size` more bytes would exceed the limit."""
        if size > self.limit:
            self._warn(f"an encoded prompt has {size} bytes, the limit of all is {self.limit}")
            return False
        if self._total is not None and self._total + size <= self.limit:
            return True
        files, now = [], time.time()
        for file in self.root.glob("*/*"):
            with contextlib.suppress(OSError):  # another process may have removed it
                found = file.stat()
                if file.name.startswith(TEMPORARY_PREFIX) and now - found.st_mtime > _ABANDONED_SECONDS:
                    file.unlink()
                elif file.suffix == _SUFFIX:
                    files.append((found.st_mtime_ns, found.st_size, file))
        self._total = sum(bytes_ for _, bytes_, _ in files)
        if self._total + size <= self.limit:
            return True
        for _, bytes_, file in sorted(files):
            if self._total + size <= _SHRINK_TO * self.limit or self._total == 0:
                break
            file.unlink(missing_ok=True)
            self._total -= bytes_
            with contextlib.suppress(OSError):
                file.parent.rmdir()  # works where it was the last one
        return True

    def _warn(self, message: str) -> None:
        if not self._warned:
            print(f"warning: {message}", file=sys.stderr)
        self._warned = True


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", errors="surrogatepass")


def _checksum(text: str, encoding: Encoding) -> bytes:
    digest = blake2b(_bytes(text), digest_size=16)
    for array in encoding:
        digest.update(repr((array.dtype.str, array.shape)).encode())
        digest.update(np.ascontiguousarray(array).tobytes())
    return digest.digest()
