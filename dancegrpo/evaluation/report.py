"""An evaluation from checkpoints to a JSON file, and its results as a table to read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from dancegrpo.config import Config
from dancegrpo.data import load_prompts
from dancegrpo.evaluation.evaluate import Evaluator, results
from dancegrpo.pipelines import load_pipeline
from dancegrpo.runtime.files import check_writable, write_atomic


def evaluate_checkpoints(
    config: Config,
    json_file: str | Path,
    *,
    checkpoint: str | None = None,
    weights: str | None = None,
    compare: str | None = None,
) -> dict[str, Any]:
    """Evaluates one checkpoint, or two on the same prompts and noise, and writes the results.

    Args:
        config: see `Evaluator`.
        json_file: where the results go.
        checkpoint, weights: see `load_pipeline`; None is `model.checkpoint` of the config.
        compare: the checkpoint that the difference is taken to.

    Raises:
        ConfigError: prompts, checkpoints or file cannot be had; nothing was sampled then.
    """
    file = Path(json_file)
    check_writable(file, "--json")
    checkpoint = checkpoint or config.model.checkpoint
    evaluator = Evaluator(config, load_prompts(config.evaluation.prompts))
    compute, guidance = config.precision.compute, config.sampler.guidance_scale
    model = load_pipeline(checkpoint, compute, guidance, weights)
    other = load_pipeline(compare, compute, guidance) if compare else None
    file.parent.mkdir(parents=True, exist_ok=True)
    found = evaluator.evaluate(model)
    table = results(config, checkpoint, found, compare, evaluator.evaluate(other) if other else None)
    write_atomic(file, json.dumps(table, indent=2) + "\n")
    return table


def format_results(table: dict[str, Any]) -> str:
    """Accuracy with 95% intervals, per category, and what else was measured, as lines of text."""
    difference = table.get("difference", {})
    heads = ["category", "images", "accuracy", "95% interval"]
    heads += ["difference", "95% interval"] if difference else []
    rows = [heads]
    for name, entry in table["accuracy"].items():
        row = [name, str(entry["n"]), _percent(entry["value"]), _range(entry)]
        if difference:
            row += [f"{100 * difference[name]['value']:+.1f}", _range(difference[name], sign="+")]
        rows.append(row)
    widths = [max(len(row[column]) for row in rows) for column in range(len(heads))]
    lines = ["  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)) for row in rows]
    lines = [line.rstrip() for line in lines]
    agreement, distance = table["agreement"]["overall"]["value"], table["diversity"]["clip_distance"]
    lines.append("")
    lines += [f"{label}: mean {entry['mean']:.4f}" for label, entry in table["reward"].items()]
    lines.append(f"both verifiers agree on {_percent(agreement)} of the images")
    if distance["accepted"] is not None:
        lines.append(f"CLIP distance between right images of one prompt: {distance['accepted']:.4f}")
    return "\n".join(lines)


def _percent(value: float) -> str:
    return f"{100 * value:.1f}%"


def _range(entry: dict[str, Any], sign: str = "") -> str:
    return f"{100 * entry['low']:{sign}.1f} to {100 * entry['high']:{sign}.1f}"
