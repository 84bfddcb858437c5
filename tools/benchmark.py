"""Reproduces a measured claim of the README, as a ratio from one run.

{benchmarks}

    python tools/benchmark.py start --json start.json
    python tools/benchmark.py iteration --json iteration.json --set train.updates_per_rollout=1 train.micro_batch=48

Run it on an otherwise idle machine: the contenders take turns, but whatever else computes slows them unevenly.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # a clone works without being installed

from dancegrpo.config import load_config
from dancegrpo.diagnostics.benchmarks import BENCHMARKS, find_benchmark, run_benchmark
from dancegrpo.runtime.cli import common_options, run_cli
from dancegrpo.runtime.files import check_writable, write_atomic


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    listed = "\n".join(f"    {name:<12}{entry.about}" for name, entry in sorted(BENCHMARKS.items()))
    parser = argparse.ArgumentParser(
        description=__doc__.format(benchmarks=listed),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        parents=[common_options("flux_small.yaml with the counts that the benchmark is made for")],
    )
    parser.add_argument("name", metavar="NAME", help=f"which: {', '.join(sorted(BENCHMARKS))}")
    parser.add_argument("--json", metavar="FILE", required=True, help="file for the result")
    parser.add_argument("--repeats", metavar="N", type=int, help="measurements, of which the median is taken")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> None:
    args = parse(arguments)
    seed = [] if args.seed is None else [f"train.seed={args.seed}"]
    settings = () if args.config else find_benchmark(args.name).settings
    file = Path(args.json)
    check_writable(file, "--json")
    result = run_benchmark(args.name, load_config(args.config, [*settings, *args.set, *seed]), args.repeats)
    text = json.dumps(result, indent=2)
    print(text)  # before it is written: a full disk must not cost the measurement
    file.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(file, text + "\n")


if __name__ == "__main__":
    run_cli(main)
