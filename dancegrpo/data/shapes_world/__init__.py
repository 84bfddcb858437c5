"""The shapes world: procedural pictures with captions in the six GenEval categories."""

from .captions import (
    captions_of,
    hard_negative,
    near_misses,
    object_misses,
    pick_caption,
    scene_of,
    vocabulary,
)
from .render import placements, render, shape_mask
from .sampling import CATEGORY_WEIGHTS, pick_scene, sample, sample_batch
from .world import (
    CATEGORIES,
    COLOR_NAMES,
    COLORS,
    IMAGE_SIZE,
    RELATIONS,
    SHAPES,
    SPLITS,
    Object,
    Scene,
    all_scenes,
    scenes,
    split_of,
)

__all__ = [
    "CATEGORIES",
    "CATEGORY_WEIGHTS",
    "COLORS",
    "COLOR_NAMES",
    "IMAGE_SIZE",
    "RELATIONS",
    "SHAPES",
    "SPLITS",
    "Object",
    "Scene",
    "all_scenes",
    "captions_of",
    "hard_negative",
    "near_misses",
    "object_misses",
    "pick_caption",
    "pick_scene",
    "placements",
    "render",
    "sample",
    "sample_batch",
    "scene_of",
    "scenes",
    "shape_mask",
    "split_of",
    "vocabulary",
]
