"""RL post-training of a text-to-image model with GRPO.

    python tools/train_grpo.py --config flux_small.yaml --output runs/first
    python tools/train_grpo.py --output runs/first --resume
    python tools/train_grpo.py --output runs/mine --set data.prompts=mine.txt train.iterations=50

Writes checkpoints, metrics.jsonl, TensorBoard events, sample grids and report.png into the output folder. The
same command writes the same weights; Ctrl-C saves, and --resume continues to the same weights. At the end the model is
compared with the one that it started from, on prompts that it was not trained on (evaluation.after_training).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # a clone works without being installed

from dancegrpo.config import Config, ConfigError, ReportedError, counts_table, load_config
from dancegrpo.runtime.checkpoints import config_of as run_config
from dancegrpo.runtime.cli import common_options, run_cli


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, parents=[common_options()]
    )
    parser.add_argument("--output", metavar="RUN", required=True, help="run folder")
    parser.add_argument(
        "--resume",
        metavar="ITERATION",
        nargs="?",
        type=int,
        const=True,
        default=False,
        help="continue the run after its last checkpoint, or after this iteration",
    )
    parser.add_argument("--overwrite", action="store_true", help="replace the run that is in the folder")
    parser.add_argument(
        "--checkpoint",
        metavar="PATH",
        help="model to start from: a folder in diffusers layout, a "
        "checkpoint or a run folder (default: model.checkpoint of the config)",
    )
    return parser.parse_args(arguments)


def config_of(args: argparse.Namespace) -> Config:
    """The config given, else that of the run to resume or to start from, else the default."""
    known = run_config(args.output) if args.resume is not False else None
    # A run's own LoRA to start from is part of its checkpoints.
    overrides = [*(["model.lora=null"] if args.checkpoint else []), *args.set]
    overrides += [f"train.seed={args.seed}"] if args.seed is not None else []
    overrides += [f"model.checkpoint={args.checkpoint}"] if args.checkpoint else []
    return load_config(args.config or known or run_config(args.checkpoint), overrides)


def main(arguments: Sequence[str] | None = None) -> None:
    args = parse(arguments)
    config = config_of(args)
    from dancegrpo.rl.launch import build_trainer, evaluate_run, load_inputs, needs_evaluation, open_run

    with open_run(args.output, config, resume=args.resume, overwrite=args.overwrite) as folder:
        if folder.finished:
            print(f"{args.output}: nothing to train, all {folder.start} iterations are done")
            if needs_evaluation(config, folder):
                print(evaluate_run(config, folder))
            return
        inputs = load_inputs(config)
        print(counts_table(config))
        begin = f"continuing after iteration {folder.start}" if folder.start else "starting"
        print(
            f"\n{begin}: {config.model.checkpoint} on {config.data.prompts}, into {args.output}", flush=True
        )
        show_summary(args.output, build_trainer(config, folder, inputs).train())
        if needs_evaluation(config, folder):
            try:
                print(evaluate_run(config, folder, inputs))
            except (ConfigError, ReportedError) as error:
                print(
                    f"warning: the run is complete, but its evaluation failed: {error}; --resume makes it, with "
                    "another evaluation.prompts if those are at fault",
                    file=sys.stderr,
                )


def show_summary(output: str, summary: Mapping[str, Any]) -> None:
    rewards = ", ".join(
        f"{label} {_number(values['first'])} to {_number(values['last'])}"
        for label, values in summary["reward"].items()
    )
    print(
        f"\n{summary['iterations']} iterations, {summary['images']} images in {summary['seconds']:.0f} s; "
        f"mean reward, first to last iteration: {rewards}"
    )
    if summary["clipping"]:
        print(summary["clipping"])
    for name, what in (
        (summary["checkpoint"], "the trained model"),
        ("report.png", "before, after and curves"),
        ("samples/", "the same prompts over time"),
        ("metrics.jsonl", "every number"),
    ):
        print(f"  {output}/{name}: {what}")


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


if __name__ == "__main__":
    run_cli(main)
