"""Makes images from prompts.

    python tools/generate.py --prompt "a red circle to the left of a blue square" --seed 7 --output out
    python tools/generate.py --checkpoint runs/first --prompts-file mine.txt --num-images 4 --output out
    echo "two green stars" | python tools/generate.py - --output out

Writes image_0000.png ..., grid.png and prompts.jsonl. The same command writes the same bytes.
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
    add("stdin", nargs="?", choices=("-",), help="read prompts from standard input, one a line")
    add("--prompt", metavar="TEXT", action="append", default=[], help="a prompt; give it again for more")
    add("--prompts-file", metavar="FILE", help="txt, csv, jsonl or parquet file, dataset folder, or -")
    add("--output", metavar="DIR", required=True, help="folder for the images")
    add("--overwrite", action="store_true", help="replace the images of an earlier call")
    add("--num-images", metavar="N", type=int, default=1, help="images for each prompt (default: 1)")
    add(
        "--negative-prompt",
        metavar="TEXT",
        help="what guidance leads away from (default: sampler.negative_prompt)",
    )
    add("--steps", metavar="N", type=int, help="denoising steps (default: evaluation.num_steps)")
    add(
        "--batch",
        metavar="N",
        type=int,
        default=8,
        help="images per graph call: memory and time (default: 8)",
    )
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> None:
    args = parse(arguments)
    config = load_config(args.config or config_of(args.checkpoint), model_overrides(args))

    from dancegrpo.runtime.setup import setup_runtime

    setup_runtime(config.precision.compute, compile_cache=config.output.compile_cache)
    from dancegrpo.pipelines.generate import GenerateOptions, generate

    options = GenerateOptions(
        output=args.output,
        prompts=tuple(args.prompt),
        prompts_file=args.prompts_file or args.stdin,
        images_per_prompt=args.num_images,
        num_steps=args.steps,
        batch=args.batch,
        seed=args.seed or 0,
        negative_prompt=args.negative_prompt,
        checkpoint=args.checkpoint,
        weights=args.weights,
        overwrite=args.overwrite,
    )
    count, folder = generate(config, options)
    print(f"{folder}: {count} image{'s' if count > 1 else ''}, grid.png, prompts.jsonl")


if __name__ == "__main__":
    run_cli(main)
