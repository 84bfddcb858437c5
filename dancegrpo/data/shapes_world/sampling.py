"""Endless training pictures: sample number i is a pure function of seed and i."""

from __future__ import annotations

from functools import cache

import numpy as np

from .captions import pick_caption
from .render import render
from .world import Scene, scenes

# The categories that need most practice are drawn most.
CATEGORY_WEIGHTS = {
    "position": 0.25,
    "color_attribution": 0.25,
    "counting": 0.17,
    "two_objects": 0.15,
    "colors": 0.10,
    "single_object": 0.08,
}
_EDGES = np.cumsum(list(CATEGORY_WEIGHTS.values()))[:-1]
# Where a category has captions with and without colours, this share has none.
PLAIN_SHARE = 0.4


@cache
def _pools(split: str) -> dict[str, tuple[tuple[Scene, ...], tuple[Scene, ...]]]:
    """Scenes of each category, those without and those with colours."""
    return {
        category: (
            tuple(s for s in members if s.objects[0].color is None),
            tuple(s for s in members if s.objects[0].color is not None),
        )
        for category, members in scenes(split).items()
    }


def pick_scene(category: str, split: str, rng: np.random.Generator) -> Scene:
    """A random scene of a category; 40% without colours where both kinds exist."""
    plain, colored = _pools(split)[category]
    pool = plain if plain and (not colored or rng.random() < PLAIN_SHARE) else colored
    return pool[int(rng.integers(len(pool)))]


def sample(seed: int, index: int, split: str = "train") -> tuple[np.ndarray, str, Scene]:
    """Sample `index` of the endless set `seed`: picture uint8 (64, 64, 3), caption, scene."""
    rng = np.random.Generator(np.random.Philox(key=np.array([seed, index], np.uint64)))
    place = int(np.searchsorted(_EDGES, rng.random(), side="right"))
    category = list(CATEGORY_WEIGHTS)[place]
    scene = pick_scene(category, split, rng)
    caption = pick_caption(scene, rng)
    return render(scene, rng), caption, scene


def sample_batch(
    seed: int, start: int, count: int, split: str = "train"
) -> tuple[np.ndarray, list[str], list[Scene]]:
    """Samples start ... start + count - 1: pictures uint8 (count, 64, 64, 3), captions, scenes."""
    parts = [sample(seed, start + i, split) for i in range(count)]
    images = np.stack([image for image, _, _ in parts]) if parts else np.empty((0, 64, 64, 3), np.uint8)
    return images, [caption for _, caption, _ in parts], [scene for _, _, scene in parts]
