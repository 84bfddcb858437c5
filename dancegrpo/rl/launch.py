"""From a config and an output folder to a trainer, cheap checks first."""

from __future__ import annotations

import contextlib
import gc
import shutil
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from dancegrpo.config import Config, ConfigError
from dancegrpo.data import PromptSet, load_prompts
from dancegrpo.rl.run_state import find_resume_point
from dancegrpo.runtime.runlog import RunFolder
from dancegrpo.runtime.setup import setup_runtime
from dancegrpo.runtime.signals import Terminated

if TYPE_CHECKING:
    from dancegrpo.pipelines import Pipeline
    from dancegrpo.rewards import RewardSet
    from dancegrpo.rl.trainer import Trainer

_WORDS_SHOWN = 10


@contextlib.contextmanager
def open_run(
    output: str | Path, config: Config, *, resume: bool | int = False, overwrite: bool = False
) -> Iterator[RunFolder]:
    """The run folder, closed at the end; a new one is removed if the block fails before it trained.

    Args:
        output: the folder.
        config: the resolved config.
        resume: True continues after the last checkpoint that is whole, a number after that one.
        overwrite: replaces the run that is there.

    Raises:
        ConfigError: see `RunFolder` and `run_state.find_resume_point`; or the model to start from lies in the run
            that would be replaced.
    """
    path = Path(output)
    for key in ("checkpoint", "lora"):
        start = getattr(config.model, key)
        model = Path(start or "").resolve()
        if overwrite and start and path.resolve() in (model, *model.parents):
            raise ConfigError(
                f"{path}: --overwrite would replace the run that holds the model to start from (model.{key} = "
                f"{start}); choose another --output"
            )
    existed = path.is_dir()
    fresh = not path.exists() or (existed and not any(path.iterdir()))
    if resume is not False and fresh:
        print(f"{path}: no run to resume, starting a new one", flush=True)
    if resume is not False and not fresh:
        resume, problems = find_resume_point(path, None if resume is True else resume)
        for problem in problems:
            print(f"{problem}; the one before it is used", flush=True)
    folder = RunFolder(path, config, resume=resume, overwrite=overwrite)
    try:
        yield folder
    except BaseException:
        folder.undo_overwrite()
        folder.close()
        if fresh and not (path / "metrics.jsonl").exists():  # a mistyped key must not block the next try
            shutil.rmtree(path)
            if existed:
                path.mkdir()
        raise
    folder.close()


@dataclass(frozen=True)
class RunInputs:
    """What a run needs beside its model; `evaluation_prompts` is None if the run ends without an evaluation."""

    prompts: PromptSet
    rewards: RewardSet
    evaluation_prompts: PromptSet | None


def load_inputs(config: Config) -> RunInputs:
    """Prompts and rewards of a run, and every check that is cheap, before a model is loaded.

    Raises:
        ConfigError: prompts, rewards, model, transition or number format cannot be had as the config says.
    """
    prompts = load_prompts(config.data.prompts, config.data.prompt_column)
    _setup(config)
    from dancegrpo.evaluation.evaluate import check_rewards, evaluation_prompts
    from dancegrpo.models.lora_files import find_lora
    from dancegrpo.pipelines import read_process, resolve_checkpoint
    from dancegrpo.rewards import build_reward_set
    from dancegrpo.rl import trainer  # noqa: F401 (see `optim`: not where a model is at hand)
    from dancegrpo.rl.chain import trained_transition

    trained_transition(config.sampler, *read_process(config.model.checkpoint))
    if config.model.lora is not None:
        find_lora(config.model.lora, resolve_checkpoint(config.model.checkpoint))
    held_out = evaluation_prompts(config) if config.evaluation.after_training else None
    rewards = build_reward_set(
        config.reward, group_size=config.train.candidates, batch=config.train.micro_batch
    )
    rewards.check(prompts.prompts)
    if held_out is not None:
        check_rewards(rewards, held_out)
    return RunInputs(prompts, rewards, held_out)


def build_trainer(config: Config, run_folder: RunFolder, inputs: RunInputs | None = None) -> Trainer:
    """A trainer on the config's model, rewards and prompts.

    Args:
        config: the resolved config. run_folder: see `Trainer`.
        inputs: from `load_inputs`; None loads them.

    Raises:
        ConfigError: see `load_inputs`, or the model cannot be loaded.
    """
    inputs = inputs or load_inputs(config)
    from dancegrpo.evaluation.evaluate import check_drawable
    from dancegrpo.models.lora import describe_lora
    from dancegrpo.ops import describe_operators
    from dancegrpo.pipelines import PipelineOptions, load_pipeline
    from dancegrpo.rl.trainer import Trainer

    options = PipelineOptions.of(config, frozen=config.lora.rank > 0)
    pipeline = load_pipeline(config.model.checkpoint, options)
    pipeline.check_prompts(inputs.prompts.prompts)
    if inputs.evaluation_prompts is not None:
        check_drawable(pipeline, inputs.evaluation_prompts)
    _warn_of_words(pipeline, inputs.prompts.prompts)
    print(f"computing with {describe_operators()}", flush=True)
    trainer = Trainer(config, pipeline, inputs.rewards, inputs.prompts, run_folder)
    if describe_lora(pipeline.backbone):
        print(f"training {describe_lora(pipeline.backbone)}", flush=True)
    return trainer


def needs_evaluation(config: Config, run_folder: RunFolder) -> bool:
    """Whether a run that is finished still lacks the evaluation that its config asks for."""
    return config.evaluation.after_training and not run_folder.evaluation_file.exists()


def evaluate_run(config: Config, run_folder: RunFolder, inputs: RunInputs | None = None) -> str:
    """The table of a finished run's evaluation; see `final_evaluation.evaluate_finished`."""
    _setup(config)
    from dancegrpo.rl.final_evaluation import evaluate_finished

    gc.collect()  # the trainer is in cycles, and its graphs hold as much memory as the evaluation needs

    last = run_folder.saved_iterations()[-1]
    print(
        f"\nevaluating {config.model.checkpoint} and iteration {last} on {config.evaluation.prompts}, "
        f"{config.evaluation.images} images each (the run is saved; Ctrl-C skips this)",
        flush=True,
    )
    try:
        return evaluate_finished(config, run_folder, inputs.evaluation_prompts if inputs else None)
    except (KeyboardInterrupt, Terminated):
        print("the run is complete and saved; --resume makes its evaluation", file=sys.stderr)
        raise


def _setup(config: Config) -> None:
    tree = config.to_dict()
    setup_runtime(
        config.precision.compute,
        compile_cache=config.output.compile_cache,
        cache_key=repr([tree[section] for section in ("model", "lora", "sampler", "precision", "parallel")]),
    )


def _warn_of_words(pipeline: Pipeline, prompts: Sequence[str]) -> None:
    """Says which words the model cannot know; the run goes on."""
    unknown = sorted({word for prompt in dict.fromkeys(prompts) for word in pipeline.unknown_words(prompt)})
    if unknown:
        shown = ", ".join(map(repr, unknown[:_WORDS_SHOWN]))
        more = f" and {len(unknown) - _WORDS_SHOWN} more" if len(unknown) > _WORDS_SHOWN else ""
        print(f"warning: the model does not know these words of the prompts: {shown}{more}", file=sys.stderr)
    truncated = sum(pipeline.is_truncated(prompt) for prompt in prompts)
    if truncated:
        print(f"warning: {truncated} prompts are longer than the text encoder reads", file=sys.stderr)
