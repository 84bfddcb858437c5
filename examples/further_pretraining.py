"""The shipped model, pre-trained further: what the time of an RL run gives without a reward.

    python examples/further_pretraining.py --steps 1500 --output further
    python tools/evaluate.py --checkpoint further/small-flux --compare small-flux --json further.json

The FLUX stage of `tools/pretrain.py` goes on from the shipped weights with fresh pictures: learning rate half of the
stage's, warmed up and taken to 0 again, the weights a moving average. Interrupted, it goes on where it was.
"""

from __future__ import annotations

import argparse
import dataclasses
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from dancegrpo.pretraining.recipe import Recipe, RunRecipe
from dancegrpo.runtime.cli import run_cli


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--seed", type=int, default=1, help="of the pictures; 0 made the shipped weights")
    parser.add_argument("--output", required=True, metavar="DIR")
    args = parser.parse_args(arguments)
    from dancegrpo.runtime.setup import setup_runtime

    setup_runtime()
    from mindspore import Tensor

    from dancegrpo.models import load_model
    from dancegrpo.pipelines import resolve_checkpoint
    from dancegrpo.pretraining.loop import run_stage
    from dancegrpo.pretraining.stages import FlowStage

    base, output = resolve_checkpoint("small-flux"), Path(args.output)
    flow = dataclasses.replace(Recipe().flow, steps=args.steps, learning_rate=args.learning_rate)
    stage = FlowStage(Recipe(run=RunRecipe(args.seed), flow=flow), base)
    shipped = dict(load_model(base / "transformer").parameters_and_names())
    for name, parameter in stage.model.parameters_and_names():
        parameter.set_data(Tensor(shipped[name].asnumpy()))
    run_stage(stage, output / "work")
    shutil.copytree(base, output / "small-flux", dirs_exist_ok=True)
    stage.export(output / "small-flux")
    print(f"{output / 'small-flux'}: use it with --checkpoint")


if __name__ == "__main__":
    run_cli(main)
