"""Builds `kernels.cc` with the compiler of the machine, once, and keeps the library in the cache folder.

Wheels cannot carry it: the kernels are compiled for the very processor. Without a compiler the operators are
compositions of MindSpore's own, which give the same numbers to float32 rounding and take longer; `Library.text`
says which it is, and why.
"""

import os
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from functools import cache
from hashlib import blake2b
from pathlib import Path

from dancegrpo.config.folders import cache_folder

SWITCH = "DANCEGRPO_CPU_KERNELS"
_SOURCE = Path(__file__).with_name("kernels.cc")
_FLAGS = ("-std=c++17", "-O3", "-march=native", "-fno-math-errno", "-fno-trapping-math")
_LINKING = ("-fopenmp", "-shared", "-fPIC")
_TIMEOUT_S = 300


@dataclass(frozen=True)
class Library:
    """`path` of the shared library, or None and why there is none; `text` says it in words."""

    path: Path | None
    text: str


@cache
def library() -> Library:
    """The library for this machine, built if it is not in the cache. One answer for the life of the process.

    Raises:
        ValueError: the switch has an unknown value.
    """
    switch = os.environ.get(SWITCH, "auto")
    if switch not in ("auto", "off"):
        raise ValueError(f"{SWITCH}={switch!r} in the environment; valid: auto, off")
    if switch == "off":
        return Library(None, f"MindSpore's own operators ({SWITCH}=off)")
    compiler = next(filter(None, map(shutil.which, (os.environ.get("CXX", ""), "g++", "clang++"))), None)
    if compiler is None:
        return Library(None, "MindSpore's own operators, which are slower: there is no C++ compiler (g++)")
    try:
        return Library(_build(compiler), f"fused kernels, built with {compiler}")
    except (OSError, subprocess.SubprocessError) as error:
        lines = (getattr(error, "stderr", None) or str(error)).strip().splitlines()
        return Library(
            None,
            f"MindSpore's own operators, which are slower: {compiler} failed on {_SOURCE.name}: {lines[0]}",
        )


def _build(compiler: str) -> Path:
    """Compiles unless the same source was compiled with the same compiler for the same processor before."""
    # -### prints the compiler's version and what "native" stands for on this processor.
    asked = _run([compiler, *_FLAGS, *_LINKING, "-###", "-x", "c++", "-E", os.devnull]).stderr
    identity = "\n".join(line for line in asked.splitlines() if tempfile.gettempdir() not in line)
    digest = blake2b(_SOURCE.read_bytes() + identity.encode(), digest_size=12).hexdigest()
    target = cache_folder() / "kernels" / f"kernels-{digest}.so"
    if target.is_file():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        made = Path(scratch) / target.name
        _run([compiler, *_FLAGS, *_LINKING, str(_SOURCE), "-o", str(made)])
        os.replace(made, target)  # whole or not at all: other processes may look for it
    return target


def _run(command: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=True)
