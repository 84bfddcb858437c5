"""How long a start takes, with an empty and with a filled compile cache."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import dancegrpo
from dancegrpo.config import Config, ConfigError, dump_yaml

_START_TIMEOUT_S = 900


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
