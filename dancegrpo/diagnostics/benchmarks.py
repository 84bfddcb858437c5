"""The README's measured claims, each reproduced by one command and given as a ratio from one run.

A benchmark is a function of (config, repeats) in `BENCHMARKS`, which returns what goes into the JSON file.
Times alternate between the contenders, so that other load on the machine meets both, and medians are
compared.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import dancegrpo
from dancegrpo.config import Config, ConfigError, choices_text, dump_yaml

Measure = Callable[[Config, int], dict[str, Any]]


@dataclass(frozen=True)
class Benchmark:
    """A measurement and how often it is repeated unless told otherwise."""

    measure: Measure
    repeats: int


BENCHMARKS: dict[str, Benchmark] = {}

_START_TIMEOUT_S = 900


def benchmark(name: str, repeats: int) -> Callable[[Measure], Measure]:
    """Decorator that adds a benchmark under a name, with its default number of repeats."""

    def add(measure: Measure) -> Measure:
        BENCHMARKS[name] = Benchmark(measure, repeats)
        return measure

    return add


def run_benchmark(name: str, config: Config, repeats: int | None = None) -> dict[str, Any]:
    """Runs one benchmark; the result also says what was measured on which machine.

    Raises:
        ConfigError: unknown name, or fewer than one repeat.
    """
    if name not in BENCHMARKS:
        raise ConfigError(f"unknown benchmark {name!r}; {choices_text(name, BENCHMARKS)}")
    repeats = BENCHMARKS[name].repeats if repeats is None else repeats
    if repeats < 1:
        raise ConfigError(f"--repeats must be at least 1, got {repeats}")
    load = os.getloadavg()[0]
    result = BENCHMARKS[name].measure(config, repeats)
    return {"benchmark": name, **result, "repeats": repeats, "cpu_count": os.cpu_count(), "load_before": load}


@benchmark("denoise", repeats=9)
def denoise(config: Config, repeats: int) -> dict[str, Any]:
    """One denoising step at the run's micro-batch: static graph against PyNative (eager) mode."""
    from dancegrpo.runtime.setup import setup_runtime

    setup_runtime(config.precision.compute, compile_cache=False)
    import mindspore as ms

    from dancegrpo.diffusion import PolicyStep, make_schedule, make_transition
    from dancegrpo.pipelines import load_pipeline

    batch = config.train.micro_batch
    pipeline = load_pipeline(config.model.checkpoint, compute=config.precision.compute)
    step = PolicyStep(pipeline.denoiser, make_transition("dance_sde", eta=config.sampler.eta))
    schedule = make_schedule("flow_match", config.sampler.num_steps, shift=config.sampler.shift)
    random = np.random.default_rng(0)
    latents, drawn = (
        ms.Tensor(random.standard_normal((batch, *pipeline.latent_shape), np.float32)) for _ in "ab"
    )
    times = [
        ms.Tensor(np.full(batch, value, np.float32))
        for value in (schedule.sigmas[0], schedule.sigmas[1], schedule.timesteps[0])
    ]
    conditions = [ms.Tensor(array) for array in pipeline.encode_prompts(["a red circle"] * batch)]

    def run() -> None:
        # One value read back is enough to wait for the whole step.
        step(latents, *times, drawn, None, *conditions)[0].asnumpy()

    modes = {"graph": ms.GRAPH_MODE, "pynative": ms.PYNATIVE_MODE}
    seconds: dict[str, list[float]] = {name: [] for name in modes}
    for turn in range(repeats + 1):
        for name, mode in modes.items():
            ms.set_context(mode=mode)
            run()  # compiles the first time, and warms up after each change of mode
            start = time.perf_counter()
            run()
            if turn:  # the first turn is warm-up
                seconds[name].append(time.perf_counter() - start)
    ms.set_context(mode=ms.GRAPH_MODE)
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    return {"seconds": medians, "ratio": {"pynative": medians["pynative"] / medians["graph"]}, "batch": batch}


@benchmark("start", repeats=1)
def start(config: Config, repeats: int) -> dict[str, Any]:
    """From the command's start to the end of iteration 1, with an empty and with a filled compile cache."""
    script = Path(dancegrpo.__file__).resolve().parent.parent / "tools" / "train_grpo.py"
    if not script.is_file():
        raise ConfigError(
            f"the start benchmark runs the command line of a checkout, and there is no {script}"
        )
    cold, warm = [], []
    for _ in range(repeats):
        with tempfile.TemporaryDirectory(prefix="dancegrpo-start-") as folder:
            cold.append(_seconds_to_first_iteration(script, config, Path(folder), "cold"))
            warm.append(_seconds_to_first_iteration(script, config, Path(folder), "warm"))
    medians = {"cold": statistics.median(cold), "warm": statistics.median(warm)}
    return {"seconds": medians, "ratio": {"warm_to_cold": medians["warm"] / medians["cold"]}}


def _seconds_to_first_iteration(script: Path, config: Config, folder: Path, name: str) -> float:
    """Runs one iteration in a process of its own, with its compile cache below `folder`."""
    config_file, run = folder / f"{name}.yaml", folder / name
    config_file.write_text(dump_yaml(config), encoding="utf-8")
    command = [
        sys.executable,
        str(script),
        "--config",
        str(config_file),
        "--output",
        str(run),
        "--set",
        "train.iterations=1",
        "--set",
        "output.compile_cache=true",
    ]
    metrics, begin = run / "metrics.jsonl", time.perf_counter()
    environment = {**os.environ, "XDG_CACHE_HOME": str(folder / "cache")}
    with (folder / f"{name}.log").open("w+") as log:
        process = subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT)
        try:
            while not (metrics.is_file() and metrics.read_bytes().endswith(b"\n")):
                if process.poll() is not None or time.perf_counter() - begin > _START_TIMEOUT_S:
                    log.seek(0)
                    raise RuntimeError(
                        f"{' '.join(command)} did not finish its first iteration:\n{log.read()[-2000:]}"
                    )
                time.sleep(0.05)
            seconds = time.perf_counter() - begin
            process.wait(_START_TIMEOUT_S)
        finally:
            process.kill()
            process.wait()
    return seconds
