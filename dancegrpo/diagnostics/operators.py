"""Where the time of the two big graphs goes, by operator, from MindSpore's own profiler."""

from __future__ import annotations

import contextlib
import csv
import dataclasses
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from dancegrpo.config import Config, ConfigError
from dancegrpo.runtime import noise

SHOWN = 20
"""Operators that are listed, the costliest ones."""


def operators(config: Config, repeats: int) -> dict[str, Any]:
    """Costliest operators of the rollout's denoising step and of the update's gradient graph, on a CPU.

    Both run at the config's micro-batch in the real `Trainer`. Kernels that run side by side each count with
    their whole time, so `kernel_ms` can exceed `wall_ms`; `outside_share` counts moments, not kernels.

    Returns:
        `rollout_step` and `update`, each with `wall_ms` of a call and `unprofiled_wall_ms`, medians;
        `kernels`, how many run in a call; `kernel_ms`, the sum of their times in a call; `outside_share`, the
        share of the wall time in which none of them runs; and `operators`: the `SHOWN` costliest types, with
        their number and `ms` in a call and their `share` of `kernel_ms`.

    Raises:
        ConfigError: the device is no CPU, or the model cannot be had as the config says.
    """
    output = dataclasses.replace(config.output, sample_every=0, compile_cache=False)
    config = dataclasses.replace(config, output=output)
    from dancegrpo.rl import build_trainer

    trainer = build_trainer(config, None)
    import mindspore as ms

    if ms.get_context("device_target") != "CPU":
        raise ConfigError(
            "the operators benchmark reads the profiler's CPU tables; use msprof on other devices"
        )
    step, update = _calls(trainer)
    return {
        "rollout_step": _profiled(step, repeats),
        "update": _profiled(update, repeats),
        "micro_batch": config.train.micro_batch,
    }


def _calls(trainer: Any) -> tuple[Callable[[], None], Callable[[], None]]:
    """A denoising step, and forward and backward of a micro-batch, each with its result read back."""
    from mindspore import Tensor

    size = trainer.config.train.micro_batch
    random = noise.generator("benchmark", "operators", trainer.config.train.seed)
    trajectory = trainer.rollout(1)
    advantages = random.standard_normal(len(trajectory.prompts), np.float32)
    rows = np.stack([np.arange(size), np.zeros(size, np.int64)], axis=1)
    batch = trajectory.batch(rows, advantages)
    inputs = (batch.latents, batch.sigmas, batch.sigmas_next, batch.timesteps, np.zeros_like(batch.latents))

    def step() -> None:
        # Inputs come from the host, as those of the update do.
        trainer.policy_step(*map(Tensor, inputs), None, *map(Tensor, batch.conditions))[0].asnumpy()

    def update() -> None:
        trainer.updater.accumulate(batch)
        trainer.updater.stats()

    return step, update


def _profiled(call: Callable[[], None], repeats: int) -> dict[str, Any]:
    for _ in range(2):  # compiles and warms up
        call()
    plain = _times(call, repeats)
    with tempfile.TemporaryDirectory(prefix="dancegrpo-profile-") as folder:
        with _cpu_profile(folder):
            profiled = _times(call, repeats)
        kernels = read_kernels(_only(folder, "cpu_op_execute_timestamp_0.txt"))
        types = read_types(_only(folder, "cpu_op_type_info_0.csv"), repeats)
    busy, total = busy_ms(kernels), sum(entry["ms"] for entry in types)
    return {
        "wall_ms": 1e3 * statistics.median(profiled),
        "unprofiled_wall_ms": 1e3 * statistics.median(plain),
        "kernels": sum(entry["count"] for entry in types),
        "kernel_ms": total,
        "outside_share": 1.0 - busy / (1e3 * sum(profiled)),
        "operators": [entry | {"share": entry["ms"] / total} for entry in types[:SHOWN]],
    }


def _times(call: Callable[[], None], repeats: int) -> list[float]:
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - start)
    return seconds


@contextlib.contextmanager
def _cpu_profile(folder: str) -> Iterator[None]:
    """Profiles the block into `folder`. The profiler's own messages go to standard error."""
    from mindspore.profiler import ProfilerActivity, profile, tensorboard_trace_handler

    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        handler = tensorboard_trace_handler(folder, analyse_flag=False)  # the raw tables are enough
        with profile(activities=[ProfilerActivity.CPU], on_trace_ready=handler):
            yield
    finally:
        sys.stdout.flush()
        os.dup2(kept, 1)
        os.close(kept)


def _only(folder: str, name: str) -> Path:
    found = list(Path(folder).rglob(name))
    if len(found) != 1:
        raise RuntimeError(f"MindSpore's profiler wrote {len(found)} files {name}, expected one")
    return found[0]


def read_types(file: Path, calls: int) -> list[dict[str, Any]]:
    """Operator types of a `cpu_op_type_info_0.csv`, costliest first: `type`, `count` and `ms` in a call."""
    with file.open(encoding="utf-8", newline="") as lines:
        rows = [
            {
                "type": row["op_type"],
                "count": int(row["type_occurrences"]) // calls,
                "ms": float(row["total_compute_time"]) / calls,
            }
            for row in csv.DictReader(lines)
        ]
    return sorted(rows, key=lambda row: -row["ms"])


def read_kernels(file: Path) -> np.ndarray:
    """Begin and end in ms, float64 (n, 2), of all kernels in a `cpu_op_execute_timestamp_0.txt`.

    A line holds name;kind; and then for each run: begin in ns,duration in ms,thread. Times are relative to the
    first.
    """
    begins, durations = [], []
    for line in file.read_text(encoding="utf-8").splitlines():
        for run in line.split(";")[2].split():
            begin, duration, _ = run.split(",")
            begins.append(int(begin))
            durations.append(float(duration))
    first = min(begins)  # subtracted as integers: a float64 does not hold ns since 1970
    start = np.array([(begin - first) * 1e-6 for begin in begins])
    return np.stack([start, start + np.array(durations)], axis=1)


def busy_ms(kernels: np.ndarray) -> float:
    """Time in which at least one of the kernels, (n, 2) begin and end, runs."""
    ordered = kernels[np.argsort(kernels[:, 0])]
    # What ran before a kernel has ended by then, or the kernel only adds what lies beyond that.
    ended = np.concatenate([[-np.inf], np.maximum.accumulate(ordered[:-1, 1])])
    return float(np.maximum(0.0, ordered[:, 1] - np.maximum(ordered[:, 0], ended)).sum())
