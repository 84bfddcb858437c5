"""Measures how often a model draws what held-out prompts say.

    python tools/evaluate.py --checkpoint runs/first --json results.json
    python tools/evaluate.py --checkpoint runs/first --compare small-flux --json results.json
    python tools/evaluate.py --checkpoint runs/first --prompts shapes/validation --images 240 --json tune.json

Sampler, prompts and noise are fixed; the difference to another model is paired, image by image. To choose
settings use shapes/validation: what was looked at while tuning is no evidence any more. Prompts that are no captions
of the shapes world get rewards and diversity, but no verdicts.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # a clone works without being installed

from dancegrpo.config import load_config
from dancegrpo.runtime.checkpoints import config_of
from dancegrpo.runtime.cli import checkpoint_options, common_options, model_overrides, run_cli


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        parents=[checkpoint_options(), common_options()],
    )
    add = parser.add_argument
    add("--json", metavar="FILE", required=True, help="file for the results")
    add("--compare", metavar="PATH", help="also evaluate this model, and report checkpoint minus this")
    add("--prompts", metavar="LIST", help="evaluation.prompts, for example shapes/validation")
    add("--images", metavar="N", type=int, help="evaluation.images, spread evenly over the categories")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> None:
    args = parse(arguments)
    given = {"prompts": args.prompts, "images": args.images, "seed": args.seed}
    overrides = [f"evaluation.{key}={value}" for key, value in given.items() if value is not None]
    config = load_config(args.config or config_of(args.checkpoint), [*model_overrides(args), *overrides])

    from dancegrpo.runtime.setup import setup_runtime

    setup_runtime(config.precision.compute, compile_cache=config.output.compile_cache)
    from dancegrpo.evaluation.report import evaluate_checkpoints, format_comparison, format_results

    results = evaluate_checkpoints(
        config,
        args.json,
        checkpoint=args.checkpoint,
        weights=args.weights,
        compare=args.compare,
        lora=config.model.lora,
    )
    print(format_comparison(results, "compare", "checkpoint") if args.compare else format_results(results))
    print(f"written to {args.json}")


if __name__ == "__main__":
    run_cli(main)
