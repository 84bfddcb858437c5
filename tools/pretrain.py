"""Trains the small models that ship with the package, from nothing.

    python tools/pretrain.py --output pretrained
    python tools/pretrain.py --output quick --set vae.steps=200 clip.steps=200 flow.steps=300 reward.steps=100
    python tools/pretrain.py --output other --from small-flux --stages clip flow reward

Four stages: vae, clip, flow, reward. The same command again goes on where an interrupted one stopped. Writes
OUTPUT/small-flux (a pipeline folder for --checkpoint), OUTPUT/losses.png and, while it works, OUTPUT/work.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # a clone works without being installed

from dancegrpo.config import find_config, load_sections
from dancegrpo.pretraining.recipe import STAGES, Recipe
from dancegrpo.runtime.cli import common_options, run_cli


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        parents=[common_options(default="the recipe of the shipped weights")],
    )
    parser.add_argument("--output", metavar="DIR", required=True, help="folder for work and result")
    parser.add_argument(
        "--from",
        dest="start",
        metavar="DIR",
        help="a folder that this command wrote (or small-flux, the shipped one): stages that --stages leaves out "
        "are taken from there",
    )
    parser.add_argument(
        "--stages",
        nargs="+",
        metavar="STAGE",
        choices=STAGES,
        default=STAGES,
        help=f"stages to train, to the last one: of {' '.join(STAGES)} (default: all)",
    )
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> None:
    args = parse(arguments)
    seed = [] if args.seed is None else [f"run.seed={args.seed}"]
    recipe = load_sections(Recipe, find_config(args.config) if args.config else None, [*args.set, *seed])
    from dancegrpo.runtime.setup import setup_runtime

    setup_runtime()
    from dancegrpo.pipelines.loading import resolve_checkpoint
    from dancegrpo.pretraining.assemble import pretrain

    start = resolve_checkpoint(args.start) if args.start else None
    print(f"{pretrain(recipe, Path(args.output), args.stages, start)}: use it with --checkpoint")


if __name__ == "__main__":
    run_cli(main)
