"""The fourth stage: the CLIP of the second one learns to judge what the flow model paints."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from mindspore import Tensor

from dancegrpo.data import load_prompts
from dancegrpo.data.shapes_world import Scene, sample_batch, scene_of
from dancegrpo.models import load_model, load_tokenizer, save_model
from dancegrpo.models.weights import find_weights, load_parameters
from dancegrpo.pipelines.flux import FluxPipeline
from dancegrpo.pretraining.held_out import HeldOut
from dancegrpo.pretraining.judge_data import (
    JudgeBatches,
    Pictures,
    altered,
    joined,
    pair_targets,
    pair_weights,
    read,
)
from dancegrpo.pretraining.loop import Stage
from dancegrpo.pretraining.losses import JudgeLoss
from dancegrpo.pretraining.painting import EVALUATION, NOISY_ROLLOUT, ROLLOUT, Painter
from dancegrpo.pretraining.recipe import Recipe
from dancegrpo.pretraining.scoring import near_miss_accuracy, pair_score, to_pixels
from dancegrpo.pretraining.stages import SHIPPED_DTYPE
from dancegrpo.runtime.batching import run_batched
from dancegrpo.runtime.files import write_folder_atomic
from dancegrpo.runtime.pixels import to_uint8

_FIRST_PROMPT, _FIRST_RENDER = 4 * 10**9, 5 * 10**9  # numbers of samples that no other stage draws
_BATCH = 64


class RewardStage(Stage):
    """Fine-tunes both towers of `reward_clip`; the text encoder and the flow model stay as they are.

    The text tower that conditions the flow model is the copy in `text_encoder`.
    """

    name = "reward"

    def __init__(self, recipe: Recipe, assets: Path):
        self.recipe, self.seed, self.assets = recipe.reward, recipe.run.seed, assets
        self.model = load_model(assets / "reward_clip").set_train(True)
        self.model.logit_scale.requires_grad = False
        self.tokenizer = load_tokenizer(assets / "reward_clip")
        self.loss = JudgeLoss(self.model, self.recipe.threshold, self.recipe.temperature)

    def prepare(self, folder: Path) -> None:
        """Paints what is not painted yet, reads all pictures, and takes the figures of the CLIP to start from."""
        # `export` replaces `reward_clip`; an interrupted stage must still start from what it started from.
        self.start = folder / "start"
        if not self.start.is_dir():
            with write_folder_atomic(self.start) as copy:
                shutil.copytree(self.assets / "reward_clip", copy, dirs_exist_ok=True)
        load_parameters(self.model, find_weights(self.start, ("model",)), str(self.start))
        recipe, pipeline = self.recipe, FluxPipeline(self.assets)
        painter = Painter(pipeline, self.seed)
        _, prompts, scenes = sample_batch(self.seed, _FIRST_PROMPT, recipe.prompts)
        counts = {
            ROLLOUT: recipe.rollout_images,
            NOISY_ROLLOUT: recipe.noisy_images,
            EVALUATION: recipe.evaluation_images,
        }
        by_way = painter.paint_set(folder / "painted", "train", prompts, counts)
        painted = _with_altered(np.concatenate(list(by_way.values()), axis=1), scenes, self.seed, "painted")
        self.batches = JudgeBatches(painted, prompts, self._singles(pipeline), recipe, self.seed)
        self.held_out = self._paint_held_out(painter, folder / "painted")
        self.before = self._figures(self.start)

    def _singles(self, pipeline: FluxPipeline) -> Pictures:
        """Renders, what the autoencoder makes of them, and an altered copy of each."""
        images, _, scenes = sample_batch(self.seed, _FIRST_RENDER, self.recipe.renders)
        decoded = run_batched(
            lambda x: pipeline.vae(Tensor(to_pixels(x) * 2.0 - 1.0))[0] * 0.5 + 0.5, (images,), _BATCH
        )
        both = np.stack([images, to_uint8(decoded)], axis=1)
        return _with_altered(both, scenes, self.seed, "renders")

    def _paint_held_out(self, painter: Painter, folder: Path) -> HeldOut:
        recipe = self.recipe
        prompts = load_prompts("shapes/validation").prompts[: recipe.held_out_prompts]
        counts = {ROLLOUT: recipe.held_out_images, EVALUATION: recipe.held_out_images // 2}
        found = {}
        for way, images in painter.paint_set(folder, "validation", prompts, counts).items():
            subjects = [scene_of(prompt) for prompt in prompts for _ in range(images.shape[1])]
            found[way.name] = read(images.reshape(-1, *images.shape[2:]), subjects)
        return HeldOut(found, prompts)

    def batch(self, step: int) -> tuple[np.ndarray, ...]:
        batch = self.batches.batch(step)
        weight = pair_weights(batch, self.recipe.close_share)
        target = pair_targets(batch, self.recipe.smoothing)
        return to_pixels(batch.images), self.tokenizer(batch.captions), target, weight

    def export(self, folder: Path) -> dict:
        with write_folder_atomic(folder / "reward_clip") as new:
            shutil.copytree(self.start, new, dirs_exist_ok=True)
            save_model(self.model, new, dtype=SHIPPED_DTYPE)
        after = self._figures(folder / "reward_clip")
        return {"before": self.before, "after": after}

    def _figures(self, clip: Path) -> dict[str, float]:
        """Held-out figures of a CLIP as it is on disk."""
        score = pair_score(load_model(clip), self.tokenizer)
        return self.held_out.figures(score, self.seed) | near_miss_accuracy(score, self.seed)


def _with_altered(images: np.ndarray, subjects: Sequence[Scene], seed: int, name: str) -> Pictures:
    """Pictures uint8 (P, K, H, W, 3) of P subjects and two altered copies of each: 3 K side by side for a subject."""
    count, each = images.shape[:2]
    flat = read(images.reshape(-1, *images.shape[2:]), [s for s in subjects for _ in range(each)])
    copies = [altered(flat, seed, f"{name} {things}", things) for things in (True, False)]
    places = np.arange(3 * count * each).reshape(3, count, each).transpose(1, 0, 2).reshape(-1)
    return joined([flat, *copies]).chosen(places)
