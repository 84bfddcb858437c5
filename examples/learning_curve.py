"""Held-out accuracy over the iterations of several runs, as a figure.

    python examples/learning_curve.py --output curve.png runs/s0 runs/s1 runs/s2 --control runs/c0 runs/c1 runs/c2

Evaluates the model that the runs started from and every checkpoint that they kept (`output.keep_last: 0` keeps all), on
the fixed evaluation. Results lie beside the figure in curve.json, from which a second call takes what it has.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from dancegrpo.config import load_config
from dancegrpo.runtime.cli import common_options, run_cli
from dancegrpo.runtime.files import write_atomic
from dancegrpo.runtime.runlog import checkpoint_path, saved_iterations


def chosen_iterations(run: str, every: int) -> list[int]:
    """The saved iterations that are a multiple of ``every``, and the last one."""
    saved = saved_iterations(run)
    return [i for i in saved if i % every == 0 or i == saved[-1]]


def evaluate_all(config, runs: Sequence[str], every: int, file: Path) -> dict[str, dict]:
    """Results by checkpoint path, the start's included; written to ``file`` after each one."""
    from dancegrpo.runtime.setup import setup_runtime

    setup_runtime(config.precision.compute, compile_cache=config.output.compile_cache)
    from dancegrpo.data import load_prompts
    from dancegrpo.evaluation.evaluate import Evaluator, results
    from dancegrpo.pipelines import load_pipeline

    known = json.loads(file.read_text()) if file.is_file() else {}
    evaluator = Evaluator(config, load_prompts(config.evaluation.prompts))
    checkpoints = [config.model.checkpoint]
    checkpoints += [str(checkpoint_path(run, i)) for run in runs for i in chosen_iterations(run, every)]
    for checkpoint in checkpoints:
        if checkpoint not in known:
            known[checkpoint] = results(config, checkpoint, evaluator.evaluate(load_pipeline(checkpoint)))
            write_atomic(file, json.dumps(known, indent=2) + "\n")
    return known


def curve_of(run: str, start: str, every: int, known: dict[str, dict]) -> tuple[list[int], list[dict]]:
    """Iterations from 0 on, and what was measured there."""
    iterations = chosen_iterations(run, every)
    entries = [known[start], *(known[str(checkpoint_path(run, i))] for i in iterations)]
    return [0, *iterations], entries


def draw(
    known: dict[str, dict], start: str, runs: Sequence[str], control: Sequence[str], every: int, output: Path
) -> None:
    """Accuracy on the left; on the right the CLIP score, which tells of a reward that is fooled."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
    styles = [(run, "C0", "-") for run in runs] + [(run, "C7", "--") for run in control]
    for run, color, style in styles:
        iterations, entries = curve_of(run, start, every, known)
        overall = [entry["accuracy"]["overall"] for entry in entries]
        label = {"C0": "trained", "C7": "control: shuffled advantages"}[color]
        label = label if run in (runs[:1] + control[:1]) else None
        left.plot(
            iterations, [100 * e["value"] for e in overall], style, marker=".", color=color, label=label
        )
        low, high = ([100 * e[key] for e in overall] for key in ("low", "high"))
        left.fill_between(iterations, low, high, color=color, alpha=0.08)
        clip = [next(v["mean"] for k, v in e["reward"].items() if "Clip" in k) for e in entries]
        right.plot(iterations, clip, style, marker=".", color=color)
    images = known[start]["accuracy"]["overall"]["n"]
    left.set(xlabel="iteration", ylabel=f"accuracy, % of {images} held-out images")
    right.set(xlabel="iteration", ylabel="CLIP score of the same images")
    left.legend(frameon=False)
    figure.savefig(output, dpi=120)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, parents=[common_options()]
    )
    parser.add_argument("runs", nargs="+", metavar="RUN", help="run folders")
    parser.add_argument("--control", nargs="*", default=[], metavar="RUN", help="runs with train.control")
    parser.add_argument("--every", type=int, default=1, help="leave out checkpoints between multiples of it")
    parser.add_argument("--output", required=True, metavar="FILE.png", help="the figure")
    args = parser.parse_args(arguments)
    output = Path(args.output)
    config = load_config(args.config or Path(args.runs[0]) / "config.yaml", args.set)
    known = evaluate_all(config, [*args.runs, *args.control], args.every, output.with_suffix(".json"))
    draw(known, config.model.checkpoint, args.runs, args.control, args.every, output)
    print(f"written to {output} and {output.with_suffix('.json')}")


if __name__ == "__main__":
    run_cli(main)
