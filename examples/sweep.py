"""Trains one run for each setting, evaluates all of them, and prints a table.

    python examples/sweep.py --output runs/sweep --jobs 2 "train.learning_rate=2e-5" "sampler.eta=0.4 train.seed=1"
    python examples/sweep.py --output runs/sweep --set train.iterations=100 -- "" "train.kl_weight=1"

Each setting is a list of overrides as `--set` takes them; "" is the config as it is; those of `--set` hold for all
runs. Runs are judged on the validation list, so that the held-out list stays unseen, and compared with the model that
they started from. A run that fails stays in the table with its message. What is finished is not done again.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue

TOOLS = Path(__file__).resolve().parent.parent / "tools"
COLUMNS = "| settings | accuracy | difference | CLIP score | distance of right images | seconds |"


def run_setting(setting: str, args: argparse.Namespace, cores: Sequence[int]) -> dict:
    """Trains and evaluates on some of the cores; returns what the table shows."""
    folder = Path(args.output) / (re.sub(r"[^\w.=-]+", "_", setting) or "as_it_is")
    result = folder.with_suffix(folder.suffix + ".json")
    overrides = [*args.set, *shlex.split(setting)]
    summary = folder / "summary.json"
    if not summary.is_file():
        command = ["train_grpo.py", "--config", args.config, "--output", folder, "--resume"]
        error = call(command + (["--set", *overrides] if overrides else []), cores, folder)
        if error:
            return {"setting": setting, "error": error}
    if not result.is_file():
        judged = [f"evaluation.prompts={args.prompts}", f"evaluation.images={args.images}"]
        command = ["evaluate.py", "--checkpoint", folder, "--compare", start_of(folder), "--json", result]
        error = call([*command, "--set", *judged], cores, folder)
        if error:
            return {"setting": setting, "error": error}
    seconds = json.loads(summary.read_text())["seconds"]
    return {"setting": setting, "seconds": seconds, "result": json.loads(result.read_text())}


def start_of(folder: Path) -> str:
    """The model that a run started from."""
    from dancegrpo.config import load_config

    return load_config(folder / "config.yaml").model.checkpoint


def call(command: Sequence[object], cores: Sequence[int], folder: Path) -> str:
    """Runs one of the tools; returns the last line that it wrote on failure, else nothing."""
    environment = {**os.environ, "OMP_NUM_THREADS": str(len(cores))}
    with folder.with_suffix(folder.suffix + ".log").open("ab") as log:
        done = subprocess.run(
            [sys.executable, str(TOOLS / command[0]), *map(str, command[1:])],
            env=environment,
            stdout=log,
            stderr=log,
            preexec_fn=lambda: os.sched_setaffinity(0, cores),
        )
    if not done.returncode:
        return ""
    lines = Path(log.name).read_text(errors="replace").strip().splitlines()
    return lines[-1] if lines else f"exit code {done.returncode}"


def table(rows: Sequence[dict]) -> str:
    """The results as a Markdown table."""
    lines = [COLUMNS, "| --- " * COLUMNS.count(" | ") + "| --- |"]
    for row in rows:
        name = row["setting"] or "as it is"
        if "error" in row:
            lines.append(f"| {name} | failed: {row['error']} | | | | |")
            continue
        result, seconds = row["result"], row["seconds"]
        accuracy, difference = result["accuracy"]["overall"], result["difference"]["overall"]
        low, high = 100 * difference["low"], 100 * difference["high"]
        clip = next((v["mean"] for k, v in result["reward"].items() if "Clip" in k), float("nan"))
        lines.append(
            f"| {name} | {100 * accuracy['value']:.1f}% | {100 * difference['value']:+.1f} ({low:+.1f} to {high:+.1f}) "
            f"| {clip:.3f} | {result['diversity']['clip_distance']['accepted']:.3f} | {seconds:.0f} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("settings", nargs="+", help='overrides of one run, as "train.learning_rate=2e-5 sampler.eta=0.4"')
    add("--output", required=True, help="folder for the runs and their results")
    add("--config", default="flux_small.yaml", help="config that the settings change")
    add("--set", nargs="+", default=[], metavar="KEY=VALUE", help="overrides for all runs")
    add("--jobs", type=int, default=1, help="runs at a time, each on its share of the cores")
    add("--prompts", default="shapes/validation", help="list to judge by")
    add("--images", type=int, default=510, help="images to judge by")
    args = parser.parse_args()
    Path(args.output).mkdir(parents=True, exist_ok=True)
    cores = sorted(os.sched_getaffinity(0))
    jobs = max(1, min(args.jobs, len(cores), len(args.settings)))
    shares: SimpleQueue = SimpleQueue()
    for job in range(jobs):
        shares.put(cores[job::jobs])

    def one(setting: str) -> dict:
        share = shares.get()
        try:
            return run_setting(setting, args, share)
        finally:
            shares.put(share)

    with ThreadPoolExecutor(jobs) as pool:
        rows = list(pool.map(one, args.settings))
    print(table(rows))


if __name__ == "__main__":
    sys.path.insert(0, str(TOOLS.parent))
    main()
