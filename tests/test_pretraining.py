"""Pre-training goes on where it was stopped, and knows which captions a picture also fits."""

import dataclasses
import json

import numpy as np
import pytest

from dancegrpo.config import ConfigError
from dancegrpo.data.shapes_world import scene_of
from dancegrpo.models.saving import parameter_arrays
from dancegrpo.pretraining.assemble import pretrain
from dancegrpo.pretraining.loop import run_stage
from dancegrpo.pretraining.recipe import Recipe, RunRecipe, VaeRecipe
from dancegrpo.pretraining.stages import AutoencoderStage, _also_true

TINY = Recipe(
    vae=VaeRecipe(
        steps=4,
        batch_size=2,
        checkpoint_every=2,
        warmup_steps=1,
        encoder_width=16,
        decoder_width=16,
        decoder_bottleneck=4,
        decoder_blocks=1,
    )
)


class _Killed(AutoencoderStage):
    def batch(self, step):
        if step == 3:
            raise KeyboardInterrupt
        return super().batch(step)


def test_a_stopped_stage_ends_with_the_same_weights(tmp_path):
    whole, stopped = AutoencoderStage(TINY, tmp_path), _Killed(TINY, tmp_path)
    run_stage(whole, tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        run_stage(stopped, tmp_path / "stopped")
    again = AutoencoderStage(TINY, tmp_path)
    run_stage(again, tmp_path / "stopped")
    expected = parameter_arrays(whole.model)
    assert all(np.array_equal(array, expected[name]) for name, array in parameter_arrays(again.model).items())
    lines = [
        json.loads(line)["step"] for line in (tmp_path / "stopped/vae/losses.jsonl").read_text().splitlines()
    ]
    assert lines == [0, 3]  # each logged step once
    assert not np.array_equal(
        expected["encoder.0.weight"],
        parameter_arrays(AutoencoderStage(TINY, tmp_path).model)["encoder.0.weight"],
    )


def test_a_folder_of_another_recipe_is_refused(tmp_path):
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "recipe.json").write_text(json.dumps(dataclasses.asdict(TINY)))
    with pytest.raises(ConfigError, match="another recipe"):
        pretrain(Recipe(run=RunRecipe(seed=1)), tmp_path)


def test_captions_that_also_fit_are_no_negatives():
    captions = [
        "a red circle",
        "a circle",
        "a blue circle",
        "a circle above a square",
        "a square below a circle",
        "a circle to the left of a square",
    ]
    fits = _also_true([scene_of(caption) for caption in captions], len(captions))[:, : len(captions)]
    pairs = {(captions[i], captions[j]) for i, j in zip(*np.nonzero(fits), strict=True)}
    assert ("a red circle", "a circle") in pairs
    assert ("a red circle", "a blue circle") not in pairs
    assert ("a circle above a square", "a square below a circle") in pairs
    assert ("a circle above a square", "a circle to the left of a square") not in pairs
