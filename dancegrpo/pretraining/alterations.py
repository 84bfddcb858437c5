"""Edits of pictures that a judge must see through, or must mind: other grounds, things too many, too few, elsewhere.

Each edit takes a picture float32 (64, 64, 3) in [0, 255], its blobs (`shapes_verifier.find_blobs`, never empty for
the edits of things) and a random generator, and returns the edited picture or None where it cannot be done. What
is true of the result is not decided here: the verifier reads it anew.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from scipy import ndimage

from dancegrpo.data.shapes_world import COLOR_NAMES, COLORS, IMAGE_SIZE, SHAPES, shape_mask
from dancegrpo.rewards.shapes_verifier import Blob

_HALF = 10  # half of a thing's patch, in pixels
_FREE = 17.0  # a thing that is put somewhere keeps this distance from the others along one axis
WHITE = np.full(3, 255, np.float32)
_GROUND = (196.0, 255.0)  # wider than the world's own grounds, up to white
_TINT = 14.0

Edit = Callable[[np.ndarray, Sequence[Blob], np.random.Generator], np.ndarray | None]


def ground_of(picture: np.ndarray) -> np.ndarray:
    """The median colour, float32 (3,)."""
    return np.median(picture[::2, ::2].reshape(-1, 3), axis=0).astype(np.float32)


def _drawn(picture: np.ndarray, ground: np.ndarray) -> np.ndarray:
    """How much a pixel belongs to a thing, (H, W, 1) in [0, 1]."""
    return np.clip((np.linalg.norm(picture - ground, axis=-1, keepdims=True) - 12.0) / 36.0, 0.0, 1.0)


def with_ground(picture: np.ndarray, color: np.ndarray) -> np.ndarray:
    """The picture on a ground of another colour (3,), its things as they are."""
    ground = ground_of(picture)
    return picture + (1.0 - _drawn(picture, ground)) * (color - ground)


class _Sheet:
    """A picture with a margin, so that patches at its border need no care."""

    def __init__(self, picture: np.ndarray):
        self.ground = ground_of(picture)
        self.pixels = np.pad(picture, ((_HALF, _HALF), (_HALF, _HALF), (0, 0)), mode="edge")

    def patch(self, center: tuple[float, float]) -> np.ndarray:
        """The view (20, 20, 3) around a centre (x, y)."""
        x, y = (int(round(min(max(v, 0.0), float(IMAGE_SIZE)))) for v in center)
        return self.pixels[y : y + 2 * _HALF, x : x + 2 * _HALF]

    def lift(self, center: tuple[float, float]) -> tuple[np.ndarray, np.ndarray]:
        """Takes a thing off: its pixels and its coverage; the ground is left."""
        patch = self.patch(center)
        thing, mask = patch.copy(), _drawn(patch, self.ground)
        patch += mask * (self.ground - patch)
        return thing, mask

    def put(self, center: tuple[float, float], thing: np.ndarray, mask: np.ndarray) -> None:
        patch = self.patch(center)
        patch += mask * (thing - patch)

    def picture(self) -> np.ndarray:
        return self.pixels[_HALF:-_HALF, _HALF:-_HALF]


def _one_of(values: Sequence, rng: np.random.Generator):
    return values[int(rng.integers(len(values)))]


def _free_place(blobs: Sequence[Blob], rng: np.random.Generator) -> tuple[float, float] | None:
    cells = [8.0 + 16.0 * k for k in range(IMAGE_SIZE // 16)]
    free = [
        (x, y)
        for x in cells
        for y in cells
        if all(max(abs(x - b.center[0]), abs(y - b.center[1])) > _FREE for b in blobs)
    ]
    if not free:
        return None
    x, y = _one_of(free, rng)
    return x + float(rng.uniform(-1, 1)), y + float(rng.uniform(-1, 1))


def _new_thing(shape: str, color: str, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    mask = shape_mask(shape, int(rng.integers(-4, 5)), int(rng.integers(-4, 5)))[..., None]
    soft = ndimage.gaussian_filter(mask, (*[float(rng.uniform(0.0, 0.8))] * 2, 0))
    return np.array(COLORS[color], np.float32), soft


def other_ground(picture, blobs, rng):
    """Another pale ground, one time in four pure white."""
    if rng.random() < 0.25:
        return with_ground(picture, WHITE)
    color = rng.uniform(*_GROUND) + rng.uniform(-_TINT, _TINT, 3)
    return with_ground(picture, np.clip(color, 180, 255).astype(np.float32))


def extra_thing(picture, blobs, rng):
    """One more thing, half of the time of a shape that is there already."""
    place = _free_place(blobs, rng)
    if place is None:
        return None
    shape = _one_of(blobs, rng).shape if blobs and rng.random() < 0.5 else _one_of(SHAPES, rng)
    sheet = _Sheet(picture)
    sheet.put(place, *_new_thing(shape, _one_of(COLOR_NAMES, rng), rng))
    return sheet.picture()


def missing_thing(picture, blobs, rng):
    """One thing less."""
    sheet = _Sheet(picture)
    sheet.lift(_one_of(blobs, rng).center)
    return sheet.picture()


def other_color(picture, blobs, rng):
    """One thing in another colour of the palette."""
    blob = _one_of(blobs, rng)
    sheet = _Sheet(picture)
    _, mask = sheet.lift(blob.center)
    color = _one_of([name for name in COLOR_NAMES if name != blob.color], rng)
    sheet.put(blob.center, np.array(COLORS[color], np.float32), mask)
    return sheet.picture()


def other_shape(picture, blobs, rng):
    """One thing replaced by another shape of a colour of the palette."""
    blob = _one_of(blobs, rng)
    sheet = _Sheet(picture)
    sheet.lift(blob.center)
    shape = _one_of([name for name in SHAPES if name != blob.shape], rng)
    sheet.put(blob.center, *_new_thing(shape, blob.color or _one_of(COLOR_NAMES, rng), rng))
    return sheet.picture()


def moved_thing(picture, blobs, rng):
    """One thing somewhere else."""
    place = _free_place(blobs, rng)
    if place is None:
        return None
    sheet = _Sheet(picture)
    sheet.put(place, *sheet.lift(_one_of(blobs, rng).center))
    return sheet.picture()


def swapped_things(picture, blobs, rng):
    """Two things in each other's place."""
    if len(blobs) < 2:
        return None
    a, b = (blobs[k].center for k in rng.permutation(len(blobs))[:2])
    sheet = _Sheet(picture)
    first, second = sheet.lift(a), sheet.lift(b)
    sheet.put(b, *first)
    sheet.put(a, *second)
    return sheet.picture()


def mirrored(picture, blobs, rng):
    """Left and right exchanged."""
    return picture[:, ::-1]


def blurred(picture, blobs, rng):
    return ndimage.gaussian_filter(picture, (*[float(rng.uniform(0.5, 2.0))] * 2, 0))


def noisy(picture, blobs, rng):
    """Noise of single pixels or of patches of a few."""
    strength, width = rng.uniform(4.0, 36.0), float(rng.choice([0.0, 0.0, 1.0, 2.0]))
    field = ndimage.gaussian_filter(rng.standard_normal(picture.shape).astype(np.float32), (width, width, 0))
    return picture + (strength / max(float(field.std()), 1e-6)) * field


def faded(picture, blobs, rng):
    """One thing half gone."""
    blob = _one_of(blobs, rng)
    sheet = _Sheet(picture)
    thing, mask = sheet.lift(blob.center)
    sheet.put(blob.center, thing, mask * float(rng.uniform(0.15, 0.7)))
    return sheet.picture()


_OF_THINGS: tuple[Edit, ...] = (
    extra_thing,
    missing_thing,
    other_color,
    other_shape,
    moved_thing,
    swapped_things,
    faded,
)
_OF_LOOKS: tuple[Edit, ...] = (other_ground, other_ground, mirrored, blurred, noisy)


def alter(
    picture: np.ndarray, blobs: Sequence[Blob] | None, rng: np.random.Generator, things: bool
) -> np.ndarray:
    """One random edit.

    Args:
        picture: uint8 (64, 64, 3). blobs: as `find_blobs` gives them.
        things: whether things are edited (every other picture gets another ground as well), or how all of it looks.

    Returns:
        uint8 (64, 64, 3), another picture.
    """
    source, result = picture.astype(np.float32), None
    if things and blobs:
        result = _one_of(_OF_THINGS, rng)(source, blobs, rng)
    if result is None:
        result = _one_of(_OF_LOOKS, rng)(source, blobs or (), rng)
    elif rng.random() < 0.5:
        result = other_ground(result, blobs, rng)
    return np.rint(np.clip(result, 0, 255)).astype(np.uint8)
