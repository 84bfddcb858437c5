"""Of held-out `position` prompts: are the two things there, and do they stand as asked?

    python examples/position_errors.py small-flux runs/first runs/long

For each model: pictures (the evaluation's 170, with its noise), those that hold both things whatever stands where,
those of them that stand as asked, and how many of them would if the prompt's relation were dealt out anew at random.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from dancegrpo.config import load_config
from dancegrpo.data.shapes_world.captions import scene_of
from dancegrpo.data.shapes_world.world import RELATIONS
from dancegrpo.runtime.cli import common_options, run_cli


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, parents=[common_options()]
    )
    parser.add_argument("checkpoints", nargs="+", metavar="CHECKPOINT")
    args = parser.parse_args(arguments)
    config = load_config(args.config, args.set)
    from dancegrpo.runtime.setup import setup_runtime

    setup_runtime(config.precision.compute, compile_cache=config.output.compile_cache)
    from dancegrpo.evaluation.evaluate import evaluation_prompts
    from dancegrpo.evaluation.verifier import verify_batch
    from dancegrpo.pipelines import PipelineOptions, load_pipeline
    from dancegrpo.pipelines.generate import ImageGenerator, ImageRequest

    def right(images, scenes) -> int:
        return sum(verdict.correct for verdict in verify_batch(images, scenes))

    prompts = evaluation_prompts(config).prompts
    wanted = [i for i, prompt in enumerate(prompts) if scene_of(prompt).category == "position"]
    per_prompt = config.evaluation.images // len(prompts)
    requests = [ImageRequest(prompts[i], i, candidate) for i in wanted for candidate in range(per_prompt)]
    scenes = [scene_of(request.prompt) for request in requests]
    print("checkpoint                        pictures   both there   as asked   by chance")
    for checkpoint in args.checkpoints:
        pipeline = load_pipeline(checkpoint, PipelineOptions.of(config, frozen=True))
        generator = ImageGenerator(
            pipeline, num_steps=config.evaluation.num_steps, batch=config.evaluation.batch
        )
        images = generator.images(requests, config.evaluation.seed, checkpoint)
        there = right(images, [dataclasses.replace(scene, relation=None) for scene in scenes])
        counts = [right(images, [dataclasses.replace(s, relation=r) for s in scenes]) for r in RELATIONS]
        chance = sum(counts) / len(counts)
        print(f"{checkpoint:<32}{len(images):>10}{there:>13}{right(images, scenes):>11}{chance:>12.1f}")


if __name__ == "__main__":
    run_cli(main)
