"""The evaluation's own judge of shapes-world pictures: sub-pixel contours and their geometry.

It answers the same question as the reward verifier by another method and shares no code with it, so that a
policy that learns to please the reward's template matching is not believed here. What differs from the
ground is outlined with marching squares (scikit-image `find_contours`), each outline is drawn again at half
of its own contrast, and described by its radius as a function of direction, its solidity (area over convex
hull) and its circularity (4 pi area / perimeter^2); the nearest ideal outline names the shape. Colours are
compared in the HSV cone. Outlines that resemble no shape, or two shapes alike, are never right.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
from scipy.ndimage import gaussian_filter
from scipy.spatial import ConvexHull, QhullError
from skimage.draw import polygon2mask
from skimage.measure import find_contours

from ..data.shapes_world.render import outline
from ..data.shapes_world.world import CELL, COLOR_NAMES, COLORS, IMAGE_SIZE, RADIUS, SHAPES, Object, Scene

_SEEN = 0.14  # RGB distance from the ground (sides of the cube are 1) at which an outline is looked for
_SPECK_AREA = 5.0  # px^2; smaller outlines are noise
_MIN_CONTRAST = 0.3
_ANGLES = np.linspace(-np.pi, np.pi, 72, endpoint=False)
_MAX_DEVIATION = 0.105  # root mean square difference from the nearest ideal outline
_MAX_AMBIGUITY = 0.39  # share of the way from the nearest shape to another one
_SIZE_WEIGHT = 0.06  # weight of the logarithm of the size (area over ideal area) in the deviation
_SIZE_RANGE = (0.62, 1.55)
_MAX_COLOR = 0.3  # distance in the HSV cone
_MAX_UNEVEN = 0.16  # RGB distance of a thing's pixels from a blend of ground and its colour, 85th percentile
_MAX_GROUND = 0.09  # mean RGB distance of the ground's pixels from the ground colour


@dataclass(frozen=True)
class Thing:
    """One outline: what it is (None where no shape, or no colour, is near) and where (x, y in pixels)."""

    shape: str | None
    color: str | None
    center: tuple[float, float]
    deviation: float = float("inf")
    ambiguity: float = 0.5

    def __str__(self) -> str:
        return f"{self.color or 'unknown'} {self.shape or 'blob'}"


@dataclass(frozen=True)
class Verdict:
    """`correct`, the things `found`, and the `reason` for a refusal ("" when correct)."""

    correct: bool
    found: tuple[Thing, ...]
    reason: str


def _signed_area(points: np.ndarray) -> float:
    """Shoelace area of a closed outline (n, 2) of (row, column): negative for holes of bright regions."""
    rows, columns = points[:-1].T
    next_rows, next_columns = points[1:].T
    return float((rows * next_columns - next_rows * columns).sum() / 2)


def _centroid(points: np.ndarray, area: float) -> np.ndarray:
    a, b = points[:-1], points[1:]
    cross = a[:, 0] * b[:, 1] - b[:, 0] * a[:, 1]
    return ((a + b) * cross[:, None]).sum(0) / (6 * area)


def _describe(points: np.ndarray) -> np.ndarray:
    """Size-free description of a closed outline: radii in 72 directions, solidity, circularity; (74,)."""
    area = _signed_area(points)
    offsets = points - _centroid(points, area)
    radius = np.hypot(offsets[:, 0], offsets[:, 1]) / np.sqrt(abs(area) / np.pi)
    angle = np.arctan2(offsets[:, 0], offsets[:, 1])
    radii = np.interp(_ANGLES, *(part[np.argsort(angle)] for part in (angle, radius)), period=2 * np.pi)
    perimeter = np.hypot(*np.diff(points, axis=0).T).sum()
    try:
        hull = ConvexHull(points).volume
    except QhullError:
        hull = np.inf
    circularity = 4 * np.pi * abs(area) / perimeter**2
    # Weights that let the two ratios count about as much as the outline itself.
    return np.concatenate([radii / np.sqrt(len(radii)), [0.5 * abs(area) / hull, 0.25 * circularity]])


def _outlines(field: np.ndarray, level: float, smallest: float) -> list[tuple[np.ndarray, float]]:
    """Closed outlines of `field` at `level` with their signed areas (positive: encloses higher values)."""
    lines = find_contours(field, level, positive_orientation="high")
    return [(points, area) for points in lines if abs(area := _signed_area(points)) >= smallest]


@cache
def _ideals() -> tuple[np.ndarray, np.ndarray]:
    """Descriptions (6, variants, 74) of ideal outlines, sharp to blurred; areas in px^2 (6, variants)."""
    fine, half = 6, 14
    descriptions, areas = [], []
    for shape in SHAPES:
        corners = (np.array(outline(shape))[:, ::-1] * RADIUS + half) * fine - 0.5
        sharp = polygon2mask((2 * half * fine, 2 * half * fine), corners).astype(float)
        for blur in (0.5, 0.8, 1.1, 1.5):
            field = gaussian_filter(sharp, blur * fine)
            points, area = max(_outlines(field, 0.5 * field.max(), 1.0), key=lambda one: one[1])
            descriptions.append(_describe(points))
            areas.append(area / fine**2)
    count = len(SHAPES)
    return np.array(descriptions).reshape(count, -1, 74), np.array(areas).reshape(count, -1)


def _cone(color: np.ndarray) -> np.ndarray:
    """RGB (..., 3) in [0, 1] to the HSV cone: chroma times (cos, sin) of the hue, and value."""
    high, low = color.max(-1), color.min(-1)
    x = color[..., 0] - 0.5 * (color[..., 1] + color[..., 2])
    y = np.sqrt(0.75) * (color[..., 1] - color[..., 2])
    length = np.maximum(np.hypot(x, y), 1e-9)
    return np.stack([(high - low) * x / length, (high - low) * y / length, 0.7 * high], -1)


_PALETTE = _cone(np.array(list(COLORS.values())) / 255.0)


def _ground(pixels: np.ndarray) -> np.ndarray:
    """The commonest colour: in each channel the mean of the values near the histogram's peak."""
    color = []
    for channel in pixels.reshape(-1, 3).T:
        histogram, edges = np.histogram(channel, 64, (0, 1))
        peak = edges[int(np.convolve(histogram, [1, 2, 3, 2, 1], "same").argmax())] + 1 / 128
        color.append(channel[np.abs(channel - peak) < 0.05].mean())
    return np.array(color)


def _name_shape(points: np.ndarray, area: float) -> tuple[str | None, float, float]:
    """Shape (None: none, or two alike), deviation from the nearest ideal, and ambiguity.

    Ambiguity is how far the outline has gone from its shape towards another one: 0 at the shape, 0.5 half
    way, the largest over the other shapes. It is the foot of the perpendicular on the line between the two
    ideals, so that a deviation that leads to no other shape does not count.
    """
    ideals, areas = _ideals()
    description = _describe(points)
    sizes = area / areas
    deviations = np.hypot(np.linalg.norm(ideals - description, axis=2), _SIZE_WEIGHT * np.log(sizes))
    variants = deviations.argmin(1)
    nearest = deviations.min(1)
    best = int(nearest.argmin())
    own, own_area = ideals[best, variants[best]], areas[best, variants[best]]
    ambiguity = 0.0
    for other in range(len(SHAPES)):
        if other != best:
            there, there_area = ideals[other, variants[other]], areas[other, variants[other]]
            apart = ((there - own) ** 2).sum() + (_SIZE_WEIGHT * np.log(there_area / own_area)) ** 2
            ambiguity = max(ambiguity, 0.5 * (1 - (nearest[other] ** 2 - nearest[best] ** 2) / apart))
    sound = nearest[best] <= _MAX_DEVIATION and ambiguity <= _MAX_AMBIGUITY
    sound = sound and _SIZE_RANGE[0] <= sizes[best, variants[best]] <= _SIZE_RANGE[1]
    return (SHAPES[best] if sound else None), float(nearest[best]), float(ambiguity)


def _name_color(pixels: np.ndarray, core: np.ndarray, ground: np.ndarray) -> tuple[str | None, bool]:
    """Palette colour of a thing, None if none is near, and whether all of it is of that one colour.

    `core` (m, 3) are its strongest pixels, `pixels` (n, 3) all of them with the faded ones at its edge.
    """
    color = np.median(core, axis=0)
    gaps = np.linalg.norm(_PALETTE - _cone(color), axis=1)
    offsets, axis = pixels - ground, color - ground
    share = np.clip(offsets @ axis / (axis @ axis), 0, 1)
    even = np.percentile(np.linalg.norm(offsets - share[:, None] * axis, axis=1), 85) <= _MAX_UNEVEN
    return (COLOR_NAMES[int(gaps.argmin())] if gaps.min() <= _MAX_COLOR else None), bool(even)


def _examine(points: np.ndarray, image: np.ndarray, ground: np.ndarray, distance: np.ndarray) -> Thing:
    """Name what is inside the faint outline `points` (row, column) of `distance` from the ground."""
    middle = (points.min(0) + points.max(0)) / 2
    blob = Thing(None, None, (float(middle[1]), float(middle[0])))
    low = np.maximum(np.floor(points.min(0)).astype(int) - 2, 0)
    high = np.ceil(points.max(0)).astype(int) + 3
    window = (slice(low[0], high[0]), slice(low[1], high[1]))
    inside = polygon2mask(distance[window].shape, points - low)
    field = np.where(inside | (distance[window] <= _SEEN), distance[window], 0.0)  # without neighbours
    contrast = float(np.percentile(distance[window][inside], 85)) if inside.sum() >= _SPECK_AREA else 0.0
    if contrast < _MIN_CONTRAST:
        return blob
    outlines = _outlines(np.pad(field, 1), 0.5 * contrast, 3.0)
    if len(outlines) != 1 or outlines[0][1] <= 0:  # in pieces, or with a hole
        return blob
    edge, area = outlines[0]
    edge = edge - 1
    shape, deviation, ambiguity = _name_shape(edge, area)
    core = inside & (distance[window] > 0.75 * contrast)
    color, even = _name_color(image[window][inside], image[window][core], ground)
    solid = core.sum() >= 0.5 * area * (1 - 1.2 / np.sqrt(area))
    y, x = _centroid(edge, area) + low
    return Thing(shape if even and solid else None, color, (float(x), float(y)), deviation, ambiguity)


def things_in(image: np.ndarray) -> tuple[Thing, ...] | None:
    """Everything drawn in a picture uint8 (64, 64, 3); None when there is no even ground."""
    pixels = gaussian_filter(image / 255.0, (0.45, 0.45, 0))
    ground = _ground(pixels)
    pad = 3
    distance = np.pad(np.linalg.norm(pixels - ground, axis=2), pad)
    pixels = np.pad(pixels, ((pad, pad), (pad, pad), (0, 0)), "edge")
    inner = distance[pad:-pad, pad:-pad]
    still = inner[inner <= _SEEN]
    if still.size < 0.6 * inner.size or still.mean() > _MAX_GROUND:
        return None
    faint = [points for points, area in _outlines(distance, _SEEN, _SPECK_AREA) if area > 0]
    things = (_examine(points, pixels, ground, distance) for points in faint)
    return tuple(
        Thing(t.shape, t.color, (t.center[0] - pad + 0.5, t.center[1] - pad + 0.5), t.deviation, t.ambiguity)
        for t in things
    )


def _stands(relation: str, first: Thing, second: Thing) -> bool:
    right, down = np.subtract(first.center, second.center)
    if relation in ("left", "right"):
        along, across = (right if relation == "right" else -right), abs(down)
    else:
        along, across = (down if relation == "below" else -down), abs(right)
    return bool(along > max(across, CELL / 2))


def _refusal(things: tuple[Thing, ...] | None, scene: Scene) -> str:
    """Why the picture does not show the scene; empty when it does."""
    if things is None:
        return "no even ground"
    if any(thing.shape is None for thing in things):
        return "something that is no shape of this world"
    if len(things) != scene.total:
        return f"{len(things)} things instead of {scene.total}"

    def fits(thing: Thing, wanted: Object) -> bool:
        return thing.shape == wanted.shape and wanted.color in (None, thing.color)

    groups = [[thing for thing in things if fits(thing, wanted)] for wanted in scene.objects]
    for group, wanted in zip(groups, scene.objects, strict=True):
        if len(group) != wanted.count:
            return f"{len(group)} of {wanted.count} {wanted.color or ''} {wanted.shape}".replace("  ", " ")
    if scene.relation is not None and not _stands(scene.relation, groups[0][0], groups[1][0]):
        return f"first thing not {scene.relation} of the second"
    return ""


def verify_batch(images: np.ndarray, scenes: Sequence[Scene]) -> list[Verdict]:
    """Judge pictures uint8 (N, 64, 64, 3) against N scenes. Raises ValueError for other shapes or dtypes."""
    images = np.asarray(images)
    if images.ndim != 4 or images.shape[1:] != (IMAGE_SIZE, IMAGE_SIZE, 3) or images.dtype != np.uint8:
        raise ValueError(
            f"images must be uint8 (N, {IMAGE_SIZE}, {IMAGE_SIZE}, 3), got {images.dtype} {images.shape}"
        )
    if len(images) != len(scenes):
        raise ValueError(f"{len(images)} images but {len(scenes)} scenes")
    verdicts = []
    for image, scene in zip(images, scenes, strict=True):
        things = things_in(image)
        reason = _refusal(things, scene)
        verdicts.append(Verdict(not reason, things or (), reason))
    return verdicts
