"""From a config and an output folder to a trainer, cheap checks first."""

from __future__ import annotations

import contextlib
import shutil
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from dancegrpo.config import Config
from dancegrpo.data import load_prompts
from dancegrpo.rl.run_state import find_resume_point
from dancegrpo.runtime.runlog import RunFolder
from dancegrpo.runtime.setup import setup_runtime

if TYPE_CHECKING:
    from dancegrpo.pipelines import Pipeline
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
        ConfigError: see `RunFolder` and `run_state.find_resume_point`.
    """
    path = Path(output)
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


def build_trainer(config: Config, run_folder: RunFolder) -> Trainer:
    """A trainer on the config's model, rewards and prompts.

    Raises:
        ConfigError: prompts, rewards or model cannot be had as the config says.
    """
    prompts = load_prompts(config.data.prompts, config.data.prompt_column)
    tree = config.to_dict()
    setup_runtime(
        config.precision.compute,
        compile_cache=config.output.compile_cache,
        cache_key=repr([tree[section] for section in ("model", "sampler", "precision", "parallel")]),
    )
    from dancegrpo.pipelines import load_pipeline
    from dancegrpo.rewards import build_reward_set
    from dancegrpo.rl.trainer import Trainer

    rewards = build_reward_set(
        config.reward, group_size=config.train.candidates, batch=config.train.micro_batch
    )
    rewards.check(prompts.prompts)
    pipeline = load_pipeline(config.model.checkpoint, config.precision.compute, config.sampler.guidance_scale)
    _warn_of_words(pipeline, prompts.prompts)
    return Trainer(config, pipeline, rewards, prompts, run_folder)


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
