"""Contenders in processes of their own, which take turns: one works, the others wait for their next call.

Two frameworks in one process would share its thread pools and memory; here each has its own, on the same
processors. What a waiting process still uses of them is measured, see `Worker.idle_cpu_s`.
"""

from __future__ import annotations

import contextlib
import importlib
import multiprocessing
import os
import threading
import time
import traceback
from collections.abc import Iterator
from multiprocessing.connection import Connection
from typing import Any, NoReturn

from tqdm import tqdm

from dancegrpo.config import ConfigError

THREADS = 2
"""Threads that each contender computes with, where the machine has as many processors."""

_IDLE = "idle"
_STOP_TIMEOUT_S = 10


def thread_count() -> int:
    """`THREADS`, or fewer on a machine, or under a `taskset`, with fewer processors."""
    return min(THREADS, len(_processors()))


def _processors() -> list[int]:
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


class Worker:
    """An object that lives in a new process, and whose methods are called from here.

    Args:
        factory: "module:class", imported in the new process only.
        arguments: what the class takes (pickled).
        threads: processors that the process is bound to, and OMP_NUM_THREADS.

    Attributes:
        cpu_s: processor seconds of the last call, over all threads of the process.

    Raises:
        ConfigError: the factory did, with that sentence. RuntimeError: it failed otherwise.
    """

    def __init__(self, factory: str, *arguments: Any, threads: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._name, self.cpu_s = factory.rpartition(":")[2], 0.0
        self._connection, theirs = context.Pipe()
        self._process = context.Process(
            target=_serve, args=(theirs, factory, arguments, threads), name=self._name, daemon=True
        )
        with _environment(OMP_NUM_THREADS=str(threads)):  # read when the libraries are loaded
            self._process.start()
        theirs.close()
        try:
            self._answer()
        except BaseException:
            self.close(0)
            raise

    def call(self, method: str, *arguments: Any) -> Any:
        """What the object's method returns (pickled); raises what `Worker` does."""
        try:
            self._connection.send((method, arguments))
        except OSError:  # not to be taken for a broken pipe of our own output
            self._died()
        return self._answer()

    def idle_cpu_s(self) -> float:
        """Processor seconds that the process has used while it waited for calls."""
        return self.call(_IDLE)

    def close(self, patience_s: float = _STOP_TIMEOUT_S) -> None:
        """Ends the process, by force if it does not end by itself in that time."""
        self._connection.close()  # it sees that when it waits for its next call
        self._process.join(patience_s)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.close(_STOP_TIMEOUT_S if kind is None else 0)

    def _answer(self) -> Any:
        try:
            kind, value, self.cpu_s = self._connection.recv()
        except (EOFError, OSError):
            self._died()
        if kind == "config_error":
            raise ConfigError(value)
        if kind == "error":
            raise RuntimeError(f"{self._name} failed: {value}")
        return value

    def _died(self) -> NoReturn:
        self._process.join(_STOP_TIMEOUT_S)
        raise RuntimeError(f"{self._name} died (exit code {self._process.exitcode})") from None


@contextlib.contextmanager
def _environment(**variables: str) -> Iterator[None]:
    old = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in old.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _serve(connection: Connection, factory: str, arguments: tuple, threads: int) -> None:
    """The process: makes the object and answers calls until the other end is closed."""
    os.dup2(2, 1)  # standard output is for the command's result
    tqdm.set_lock(threading.RLock())  # its usual one, for processes, is reported as leaked after a Ctrl-C
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, _processors()[:threads])
    target, idle = None, 0.0
    method: str | None = None
    while True:
        start = time.process_time()
        try:
            if method is None:
                module, _, name = factory.partition(":")
                target, result = getattr(importlib.import_module(module), name)(*arguments), None
            else:
                result = idle if method == _IDLE else getattr(target, method)(*arguments)
            kind = "value"
        except ConfigError as error:
            kind, result = "config_error", str(error)
        except Exception as error:
            trace = "".join(traceback.format_tb(error.__traceback__)[-3:])
            kind, result = "error", f"{type(error).__name__}: {error}\n{trace}"
        try:
            connection.send((kind, result, time.process_time() - start))
            before = time.process_time()
            method, arguments = connection.recv()
        except (EOFError, OSError):
            return
        idle += time.process_time() - before
