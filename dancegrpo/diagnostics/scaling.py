"""How the cost of an iteration grows with its images: time in proportion, memory by what is stored."""

from __future__ import annotations

import contextlib
import dataclasses
import statistics
import sys
from typing import Any

from tqdm import tqdm

from dancegrpo.config import Config, ConfigError, check_counts
from dancegrpo.diagnostics.workers import Worker, thread_count

SIZES = (48, 96, 192, 384)
"""Images an iteration."""

SETTINGS = (
    "train.candidates=12",
    "train.micro_batch=48",
    "train.updates_per_rollout=3",
    "train.trained_prompts=null",
)
"""So that every size divides, and trains all that it draws."""

_OURS = "dancegrpo.diagnostics.ours:OurIteration"


def scaling(config: Config, repeats: int) -> dict[str, Any]:
    """Whole iterations of the real `Trainer`, decoding and rewards included, at `SIZES` images.

    Each size has a process of its own, so that its peak memory is its own. They take turns, so that other load on
    the machine meets all of them, and each turn begins with an iteration that is not measured. A turn has so many
    iterations that all sizes draw as many images in it: else the short ones would mostly measure the start of a turn.

    Returns:
        `linear`: images a second by size; `spread`: the fastest over the slowest, minus 1. `peak_rss_mb` and
        `stored_mb` (the trajectory: latents, log-probabilities, images, prompt encodings) by size.
        `stored_bytes_per_image`. `peak_growth_mb` and `stored_growth_mb`: the largest size minus the smallest.
        `seconds`: an iteration's, mean of each turn.

    Raises:
        ConfigError: a size does not divide by the config's candidates, micro-batch or updates.
    """
    configs = {size: _sized(config, size) for size in SIZES}
    threads = thread_count()
    seconds: dict[int, list[float]] = {size: [] for size in SIZES}
    total = len(SIZES) * (repeats + 1)
    with (
        tqdm(total=total, unit="run", dynamic_ncols=True, file=sys.stderr) as progress,
        contextlib.ExitStack() as stack,
    ):
        workers = {}
        for size in SIZES:
            progress.set_description(f"{size} images: compiling")
            worker = Worker(_OURS, configs[size], threads, False, threads=threads)
            workers[size] = stack.enter_context(worker)
            worker.call("run")
            progress.update()
        for _ in range(repeats):
            for size, worker in workers.items():
                progress.set_description(f"{size} images")
                worker.call("run")
                turn = [worker.call("run") for _ in range(SIZES[-1] // size)]
                seconds[size].append(statistics.fmean(turn))
                progress.update()
        memory = {size: worker.call("memory") for size, worker in workers.items()}
    rates = {size: size / statistics.median(values) for size, values in seconds.items()}
    smallest, largest = memory[SIZES[0]], memory[SIZES[-1]]
    return {
        "linear": rates,
        "spread": max(rates.values()) / min(rates.values()) - 1.0,
        "peak_rss_mb": {size: memory[size]["peak_rss_mb"] for size in SIZES},
        "stored_mb": {size: memory[size]["stored_mb"] for size in SIZES},
        "stored_bytes_per_image": round(largest["stored_mb"] * 2**20 / SIZES[-1]),
        "peak_growth_mb": largest["peak_rss_mb"] - smallest["peak_rss_mb"],
        "stored_growth_mb": largest["stored_mb"] - smallest["stored_mb"],
        "threads": threads,
        "seconds": seconds,
    }


def _sized(config: Config, images: int) -> Config:
    candidates = config.train.candidates
    if images % candidates:
        raise ConfigError(
            f"train.candidates: the scaling benchmark needs a number that divides {', '.join(map(str, SIZES))} "
            f"images, got {candidates}"
        )
    data = dataclasses.replace(config.data, prompts_per_iteration=images // candidates)
    sized = dataclasses.replace(config, data=data)
    check_counts(sized, f"scaling, {images} images")
    return sized
