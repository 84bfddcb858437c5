"""The training loop of a stage: resumable, with a progress bar and a record of what happened."""

import json
from abc import ABC, abstractmethod
from pathlib import Path

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn
from safetensors.numpy import load_file, save
from tqdm import tqdm

from dancegrpo.pretraining.recipe import StageRecipe
from dancegrpo.pretraining.train_step import TrainStep, ema_rate, learning_rate
from dancegrpo.runtime.files import write_atomic


class Stage(ABC):
    """One model's training: where its batches come from, what it minimises, how it is written."""

    name: str
    recipe: StageRecipe
    loss: nn.Cell

    def prepare(self, folder: Path) -> None:
        """What must be there before the first step; `folder` is the stage's own work folder.

        Called on resume, too. Most stages need nothing.
        """
        return

    @abstractmethod
    def batch(self, step: int) -> tuple[np.ndarray, ...]:
        """Inputs of the loss at a step, a pure function of the step."""

    @abstractmethod
    def export(self, folder: Path) -> dict:
        """Write the trained model as components of a pipeline folder; return figures for the record."""


def run_stage(stage: Stage, work: Path) -> None:
    """Train a stage to its last step, from where `work/<stage>` left off.

    Leaves the averaged weights in the stage's model. Writes `state.safetensors` and `losses.jsonl` (one line
    every ten steps) into `work/<stage>`; the state is replaced atomically.
    """
    folder = work / stage.name
    folder.mkdir(parents=True, exist_ok=True)
    recipe = stage.recipe
    stage.prepare(folder)
    step_graph = TrainStep(stage.loss, recipe)
    state_file, loss_file = folder / "state.safetensors", folder / "losses.jsonl"
    start = 0
    if state_file.is_file():
        arrays = load_file(state_file)
        start = int(arrays.pop("step"))
        step_graph.load_state(arrays)
    lines = loss_file.read_text(encoding="utf-8").splitlines() if loss_file.is_file() else []
    lines = [line for line in lines if json.loads(line)["step"] < start]
    progress = tqdm(
        range(start, recipe.steps),
        initial=start,
        total=recipe.steps,
        desc=stage.name,
        unit="step",
        mininterval=2.0,
    )
    for step in progress:
        inputs = [Tensor(array) for array in stage.batch(step)]
        loss, norm = step_graph(
            Tensor(learning_rate(recipe, step), ms.float32),
            Tensor(ema_rate(recipe, step), ms.float32),
            *inputs,
        )
        if step % 10 == 0 or step + 1 == recipe.steps:
            value = float(loss.asnumpy())
            if not np.isfinite(value):
                raise RuntimeError(
                    f"stage {stage.name}: the loss is {value} at step {step}; lower its learning_rate"
                )
            lines.append(json.dumps({"step": step, "loss": value, "grad_norm": float(norm.asnumpy())}))
            progress.set_postfix(loss=f"{value:.4f}", refresh=False)
        if (step + 1) % recipe.checkpoint_every == 0 or step + 1 == recipe.steps:
            write_atomic(state_file, save(step_graph.state() | {"step": np.array(step + 1)}))
            write_atomic(loss_file, "\n".join(lines) + "\n")
    for parameter, average in zip(step_graph.parameters_, step_graph.averages, strict=True):
        parameter.set_data(Tensor(average.asnumpy()))


def plot_losses(work: Path, names: list[str], path: Path) -> None:
    """One panel a stage, loss over steps on a logarithmic scale, as PNG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, len(names), figsize=(4.5 * len(names), 3.2), squeeze=False)
    for name, axis in zip(names, axes[0], strict=True):
        records = [json.loads(line) for line in (work / name / "losses.jsonl").read_text().splitlines()]
        axis.plot([r["step"] for r in records], [r["loss"] for r in records], linewidth=0.8)
        axis.set(title=name, xlabel="step", ylabel="loss", yscale="log")
        axis.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
