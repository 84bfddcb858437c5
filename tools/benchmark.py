"""Reproduces a measured claim of the README, as a ratio from one run.

python tools/benchmark.py denoise --json denoise.json    static graph against eager mode, one denoising step
python tools/benchmark.py start --json start.json        first start against a start with the compile cache
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # a clone works without being installed

from dancegrpo.config import load_config
from dancegrpo.diagnostics.benchmarks import BENCHMARKS, run_benchmark
from dancegrpo.runtime.cli import common_options, run_cli
from dancegrpo.runtime.files import write_atomic


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        parents=[common_options()],
    )
    parser.add_argument("name", metavar="NAME", help=f"which: {', '.join(sorted(BENCHMARKS))}")
    parser.add_argument("--json", metavar="FILE", required=True, help="file for the result")
    parser.add_argument("--repeats", metavar="N", type=int, help="measurements, of which the median is taken")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> None:
    args = parse(arguments)
    seed = [] if args.seed is None else [f"train.seed={args.seed}"]
    file = Path(args.json)
    file.parent.mkdir(parents=True, exist_ok=True)
    result = run_benchmark(args.name, load_config(args.config, [*args.set, *seed]), args.repeats)
    text = json.dumps(result, indent=2)
    write_atomic(file, text + "\n")
    print(text)


if __name__ == "__main__":
    run_cli(main)
