"""What a run costs: time per phase, peak memory, graph compilations."""

from __future__ import annotations

import contextlib
import functools
import resource
import sys
import time
from collections.abc import Iterator

_compilations = 0


class PhaseTimer:
    """Adds up seconds per phase: ``with timer("rollout"): ...`` makes ``time/rollout`` of ``metrics()``."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}

    @contextlib.contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            self._seconds[phase] = self._seconds.get(phase, 0.0) + time.perf_counter() - start

    def metrics(self) -> dict[str, float]:
        """Seconds per phase since the last reset, keys ``time/<phase>``."""
        return {f"time/{phase}": seconds for phase, seconds in self._seconds.items()}

    def reset(self) -> None:
        """Starts again from zero."""
        self._seconds.clear()


def peak_rss_mb() -> float:
    """Peak resident memory of this process in MB (2**20 bytes)."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / 2**20 if sys.platform == "darwin" else peak / 2**10


def compilations() -> int:
    """Graphs compiled by this process since the counter was installed (``setup_runtime`` does); look-ups of
    compiled graphs do not count, loads from the compile cache on disk do."""
    return _compilations


def install_compilation_counter() -> None:
    """Counts every call into MindSpore's graph compilers; a second call does nothing.

    Both compilers of MindSpore (for Cells in graph mode and for ``mindspore.jit``) look a graph up by its
    arguments in Python, and call ``compile`` of an executor class in C++ only when there is none. So a
    wrapper around those two methods counts exactly the real compilations.
    """
    from mindspore._c_expression import GraphExecutor_, JitExecutor_

    for executor in (GraphExecutor_, JitExecutor_):
        if "compile" not in vars(executor):
            continue  # inherits the other's
        original = executor.compile
        if not hasattr(original, "counted"):
            executor.compile = _counted(original)


def _counted(original):
    @functools.wraps(original)
    def compile(*args, **kwargs):
        global _compilations
        _compilations += 1
        return original(*args, **kwargs)

    compile.counted = True
    return compile
