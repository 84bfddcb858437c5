"""The README's measured claims, each reproduced by one command and given as a ratio from one run.

A benchmark is a function of (config, repeats) in `BENCHMARKS`, which returns what goes into the JSON file.
Times alternate between the contenders, so that other load on the machine meets all of them, and medians are
compared.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from dancegrpo.config import Config, ConfigError, choices_text
from dancegrpo.diagnostics import iteration, operators, sampling, scaling, starts


@dataclass(frozen=True)
class Benchmark:
    """A measurement.

    Attributes:
        measure: what does it.
        repeats: how often, unless told otherwise.
        about: one line for the command's help.
        settings: config overrides that it is made for; they count where no config file is named.
    """

    measure: Callable[[Config, int], dict[str, Any]]
    repeats: int
    about: str
    settings: tuple[str, ...] = ()


BENCHMARKS: dict[str, Benchmark] = {
    "batch": Benchmark(sampling.batch, 9, "16 images against 1"),
    "chain": Benchmark(sampling.chain, 9, "one graph a denoising step against one graph for all of them"),
    "denoise": Benchmark(sampling.denoise, 9, "static graph against eager mode, one denoising step"),
    "iteration": Benchmark(
        iteration.iteration,
        5,
        "one training iteration against diffusers in PyTorch (extra: parity)",
        iteration.SETTINGS,
    ),
    "operators": Benchmark(operators.operators, 5, "the costliest operators of rollout and update"),
    "scaling": Benchmark(scaling.scaling, 3, "time and memory from 48 to 384 images", scaling.SETTINGS),
    "start": Benchmark(starts.start, 1, "first start against a start with the compile cache"),
}


def find_benchmark(name: str) -> Benchmark:
    """The benchmark of that name.

    Raises:
        ConfigError: there is none.
    """
    if name not in BENCHMARKS:
        raise ConfigError(f"unknown benchmark {name!r}; {choices_text(name, BENCHMARKS)}")
    return BENCHMARKS[name]


def run_benchmark(name: str, config: Config, repeats: int | None = None) -> dict[str, Any]:
    """Runs one benchmark; the result also says what was measured on which machine.

    Raises:
        ConfigError: unknown name, or fewer than one repeat.
    """
    found = find_benchmark(name)
    repeats = found.repeats if repeats is None else repeats
    if repeats < 1:
        raise ConfigError(f"--repeats must be at least 1, got {repeats}")
    load = os.getloadavg()[0]
    result = found.measure(config, repeats)
    return {"benchmark": name, **result, "repeats": repeats, "cpu_count": os.cpu_count(), "load_before": load}
