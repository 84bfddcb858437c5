"""What the shapes world holds: shapes, colours, scenes, and which scenes belong to which split.

A scene is what a caption states and nothing more: colours that a caption does not name are None. The six
categories are those of GenEval (Ghosh et al., 2023). Only numpy and Pillow are needed by this package.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import permutations

IMAGE_SIZE = 64
GRID = 4
CELL = IMAGE_SIZE // GRID
RADIUS = 6.5

SHAPES = ("circle", "square", "triangle", "star", "cross", "diamond")
COLORS: dict[str, tuple[int, int, int]] = {
    "red": (212, 32, 40),
    "green": (36, 152, 60),
    "blue": (36, 84, 214),
    "yellow": (238, 204, 20),
    "orange": (246, 130, 16),
    "purple": (122, 44, 164),
    "black": (28, 28, 32),
    "pink": (244, 112, 190),
}
COLOR_NAMES = tuple(COLORS)
RELATIONS = ("left", "right", "above", "below")
COUNTS = (2, 3, 4)
CATEGORIES = ("single_object", "two_objects", "counting", "colors", "position", "color_attribution")
SPLITS = ("train", "validation", "evaluation")
# Backgrounds are pale: every channel stays in this range, so no palette colour is near one.
BACKGROUND_LOW, BACKGROUND_HIGH = 222, 252


@dataclass(frozen=True)
class Object:
    """`count` equal shapes; `color` is None when the caption names none."""

    shape: str
    color: str | None = None
    count: int = 1


@dataclass(frozen=True)
class Scene:
    """What a caption states. `relation` says where the first object is, seen from the second."""

    category: str
    objects: tuple[Object, ...]
    relation: str | None = None

    @property
    def total(self) -> int:
        """Number of shapes in the picture."""
        return sum(thing.count for thing in self.objects)


def _matchings(size: int) -> dict[frozenset[int], int]:
    """Which perfect matching holds a pair, for the circle decomposition of K_size (size even)."""
    odd = size - 1
    numbers = {}
    for round_ in range(odd):
        numbers[frozenset((odd, round_))] = round_
        for k in range(1, size // 2):
            numbers[frozenset(((round_ + k) % odd, (round_ - k) % odd))] = round_
    return numbers


_SHAPE_MATCHING = _matchings(len(SHAPES))
_COLOR_MATCHING = _matchings(len(COLOR_NAMES))


def split_of(scene: Scene) -> str | None:
    """The split that owns a scene, or None for the scenes that all splits share.

    Held-out scenes differ from training scenes in meaning, not only in word order: what decides is the
    unordered pair of shapes (no colours named), the pair of shapes with the pair of colours (colours named)
    or shape with colour (counting). Perfect matchings make every shape and colour equally frequent in each
    split. single_object, colors and counting without colours are too small to split: they are shared.
    """
    shapes = [SHAPES.index(thing.shape) for thing in scene.objects]
    colors = [None if thing.color is None else COLOR_NAMES.index(thing.color) for thing in scene.objects]
    if len(shapes) == 1:
        if scene.category != "counting" or colors[0] is None:
            return None
        return {0: "evaluation", 4: "validation"}.get((colors[0] - shapes[0]) % len(COLOR_NAMES), "train")
    pair = _SHAPE_MATCHING[frozenset(shapes)]
    if colors[0] is None:
        return {0: "evaluation", 2: "validation"}.get(pair, "train")
    offset = (_COLOR_MATCHING[frozenset(colors)] - pair) % (len(COLOR_NAMES) - 1)
    return {0: "evaluation", 3: "validation"}.get(offset, "train")


@lru_cache(maxsize=1)
def all_scenes() -> dict[str, tuple[Scene, ...]]:
    """Every scene of the world by category, in a fixed order."""
    plain_pairs = [(Object(a), Object(b)) for a, b in permutations(SHAPES, 2)]
    colored_pairs = [
        (Object(a, c), Object(b, d))
        for a, b in permutations(SHAPES, 2)
        for c, d in permutations(COLOR_NAMES, 2)
    ]
    colors_or_none = (None, *COLOR_NAMES)
    return {
        "single_object": tuple(Scene("single_object", (Object(s),)) for s in SHAPES),
        "two_objects": tuple(Scene("two_objects", pair) for pair in plain_pairs),
        "counting": tuple(
            Scene("counting", (Object(s, c, n),)) for c in colors_or_none for s in SHAPES for n in COUNTS
        ),
        "colors": tuple(Scene("colors", (Object(s, c),)) for s in SHAPES for c in COLOR_NAMES),
        "position": tuple(
            Scene("position", pair, relation)
            for pairs in (plain_pairs, colored_pairs)
            for pair in pairs
            for relation in RELATIONS
        ),
        "color_attribution": tuple(Scene("color_attribution", pair) for pair in colored_pairs),
    }


@lru_cache(maxsize=len(SPLITS))
def _scenes(split: str) -> dict[str, tuple[Scene, ...]]:
    return {
        category: tuple(scene for scene in members if split_of(scene) in (None, split))
        for category, members in all_scenes().items()
    }


def scenes(split: str) -> dict[str, list[Scene]]:
    """Scenes of a split by category. Raises ValueError for an unknown split."""
    if split not in SPLITS:
        raise ValueError(f"unknown split {split!r}; valid: {', '.join(SPLITS)}")
    return {category: list(members) for category, members in _scenes(split).items()}
