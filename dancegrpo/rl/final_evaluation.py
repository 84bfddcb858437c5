"""The table at the end of a run: the fixed held-out evaluation of the model it started from and of the one it made."""

from __future__ import annotations

import json

from dancegrpo.config import Config
from dancegrpo.data import PromptSet
from dancegrpo.evaluation.report import evaluate_checkpoints, format_comparison, short_form
from dancegrpo.runtime.runlog import RunFolder


def evaluate_finished(config: Config, run_folder: RunFolder, prompts: PromptSet | None = None) -> str:
    """Evaluates a finished run, writes evaluation.json and adds its short form to summary.json.

    It is what `tools/evaluate.py --checkpoint RUN --compare START` does. Nothing of the run changes before all is
    measured, so it can be stopped and made again.

    Args:
        config: of the run. run_folder: with its last checkpoint and summary.json.
        prompts: see `evaluate_checkpoints`.

    Returns:
        The table, as lines of text.

    Raises:
        ConfigError, ReportedError: prompts, models or rewards that do not work.
    """
    last = run_folder.checkpoint(run_folder.saved_iterations()[-1])
    table = evaluate_checkpoints(
        config,
        run_folder.evaluation_file,
        checkpoint=str(last),
        compare=config.model.checkpoint,
        compare_lora=config.model.lora,
        prompts=prompts,
    )
    summary = json.loads((run_folder.path / "summary.json").read_text(encoding="utf-8"))
    run_folder.write_summary(summary | {"evaluation": short_form(table)})
    return format_comparison(table, "before", "after")
