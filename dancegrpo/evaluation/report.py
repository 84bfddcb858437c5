"""An evaluation from checkpoints to a JSON file, and its results as a table to read."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from dancegrpo.config import Config
from dancegrpo.data import PromptSet
from dancegrpo.evaluation.evaluate import Evaluator, evaluation_prompts, results
from dancegrpo.evaluation.statistics import OVERALL
from dancegrpo.pipelines import PipelineOptions, load_pipeline
from dancegrpo.runtime.files import check_writable, write_atomic

Entry = dict[str, Any]


def evaluate_checkpoints(
    config: Config,
    json_file: str | Path,
    *,
    checkpoint: str | None = None,
    weights: str | None = None,
    compare: str | None = None,
    lora: str | None = None,
    compare_lora: str | None = None,
    prompts: PromptSet | None = None,
) -> dict[str, Any]:
    """Evaluates one checkpoint, or two on the same prompts and noise, and writes the results.

    Args:
        config: see `Evaluator`.
        json_file: where the results go.
        checkpoint, weights: see `load_pipeline`; None is `model.checkpoint` of the config.
        compare: the checkpoint that the difference is taken to.
        lora, compare_lora: a LoRA to add to either one, see `load_pipeline`.
        prompts: None are those that the config names.

    Raises:
        ConfigError: prompts, checkpoints or file cannot be had; nothing was sampled then.
    """
    file = Path(json_file)
    check_writable(file, "--json")
    checkpoint = checkpoint or config.model.checkpoint
    evaluator = Evaluator(config, prompts or evaluation_prompts(config))
    options = PipelineOptions.of(config, frozen=True)
    model = load_pipeline(checkpoint, options, weights, lora)
    other = load_pipeline(compare, options, lora=compare_lora) if compare else None
    for pipeline in filter(None, (model, other)):
        pipeline.check_prompts(evaluator.prompts.prompts)
    file.parent.mkdir(parents=True, exist_ok=True)
    found = evaluator.evaluate(model, "evaluating")
    base = evaluator.evaluate(other, f"evaluating {compare}") if other else None
    table = results(config, checkpoint, found, compare, base)
    write_atomic(file, json.dumps(table, indent=2) + "\n")
    return table


def format_results(table: dict[str, Any]) -> str:
    """One model's accuracy with 95% intervals, per category, and what else was measured, as lines of text."""
    lines = []
    if "accuracy" in table:
        rows = [["category", "images", "accuracy", "95% interval"]]
        for name, entry in table["accuracy"].items():
            rows.append([name, str(entry["n"]), _percent(entry["value"]), _range(entry, _share)])
        lines = [*_aligned(rows), ""]
    lines += [f"{label}: mean {entry['mean']:.4f}" for label, entry in table["reward"].items()]
    distance = table["diversity"]["clip_distance"]
    lines.append(f"CLIP distance between images of one prompt: {distance['all']:.4f}")
    if distance["accepted"] is not None:
        lines.append(f"CLIP distance between right images of one prompt: {distance['accepted']:.4f}")
    return "\n".join(lines + _closing(table))


def format_comparison(table: dict[str, Any], before: str, after: str) -> str:
    """Two models side by side with paired differences and their 95% intervals, as lines of text.

    Args:
        table: see `results`, with `compare`.
        before, after: what the columns of the model that was compared with and of the other are called.
    """
    rows = [["", before, after, "difference", "95% interval", "over"]]
    other = table["compare"]
    for name, entry in table.get("accuracy", {}).items():
        values = other["accuracy"][name]["value"], entry["value"]
        label = f"accuracy, {name}" if name == OVERALL else f"  {name}"
        row = [label, *map(_percent, values)]
        rows.append([*row, *_difference(table["difference"][name], "images", _points)])
    for label, entry in table["reward"].items():
        values = other["reward"][label]["mean"], entry["mean"]
        row = [f"reward, {label}", *map(_number, values)]
        rows.append([*row, *_difference(table["reward_difference"][label], "images", _signed)])
    for kind, entry in table["diversity_difference"].items():
        if entry is not None:
            words = {"all": "all images", "accepted": "right images"}[kind]
            row = [f"diversity, {words}", *map(_number, (entry["compare_mean"], entry["mean"]))]
            rows.append([*row, *_difference(entry, "prompts", _signed)])
    return "\n".join(_aligned(rows) + _closing(table))


def short_form(table: dict[str, Any]) -> dict[str, Any]:
    """Overall accuracy, rewards and diversity of a comparison: before, after, and the difference with its interval."""
    other = table["compare"]

    def entry(before: float, after: float, difference: Entry | None) -> Entry:
        interval = difference and {key: difference[key] for key in ("value", "low", "high", "n")}
        return {"before": before, "after": after, "difference": interval}

    short: dict[str, Any] = {}
    if "accuracy" in table:
        values = (side["accuracy"][OVERALL]["value"] for side in (other, table))
        short["accuracy"] = entry(*values, table["difference"][OVERALL])
    short["reward"] = {
        label: entry(other["reward"][label]["mean"], found["mean"], table["reward_difference"][label])
        for label, found in table["reward"].items()
    }
    short["diversity"] = {
        kind: found and entry(found["compare_mean"], found["mean"], found)
        for kind, found in table["diversity_difference"].items()
    }
    return short


def _closing(table: dict[str, Any]) -> list[str]:
    agreement = table.get("agreement")
    lines = (
        [f"both verifiers agree on {_percent(agreement[OVERALL]['value'])} of the images"]
        if agreement
        else []
    )
    return lines + table.get("notes", [])


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Columns: the first one flush left, the others flush right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.rjust(width) if index else cell.ljust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    ]


def _difference(entry: Entry | None, unit: str, write: Callable[[float], str]) -> list[str]:
    if entry is None:  # fewer than two pairs
        return ["", "", ""]
    return [write(entry["value"]), _range(entry, write), f"{entry['n']} {unit}"]


def _range(entry: Entry, write: Callable[[float], str]) -> str:
    return f"{write(entry['low'])} to {write(entry['high'])}"


def _percent(value: float) -> str:
    return f"{100 * value:.1f}%"


def _share(value: float) -> str:
    return f"{100 * value:.1f}"


def _points(value: float) -> str:
    return f"{100 * value:+.1f}"


def _signed(value: float) -> str:
    return f"{value:+.3g}"


def _number(value: float) -> str:
    return f"{value:.4g}"
