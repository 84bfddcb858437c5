"""Draws scenes: flat shapes on a pale ground, one to a grid cell, never in neighbouring cells.

Masks are drawn once at eight times the size and box-averaged for every sub-pixel shift (1/8 px) and radius
that occurs, then kept; drawing a picture is a few small blends (some 50 microseconds).
"""

from __future__ import annotations

from functools import cache
from itertools import combinations, permutations
from math import cos, pi, sin

import numpy as np
from PIL import Image, ImageDraw

from .world import (
    BACKGROUND_HIGH,
    BACKGROUND_LOW,
    CELL,
    COLOR_NAMES,
    COLORS,
    GRID,
    IMAGE_SIZE,
    RADIUS,
    Scene,
)

_FINE = 8  # supersampling, and sub-pixel positions per pixel
_PATCH = 20
_JITTER = 6  # in 1/8 px: at most 0.75 px from the cell's centre; the widest tip leaves its cell by 0.4 px
_SCALES = (0.95, 0.975, 1.0, 1.025, 1.05)


def outline(shape: str) -> list[tuple[float, float]]:
    """Corners (x right, y down) of a shape around its centre, in units of RADIUS; areas are similar."""
    if shape == "circle":
        return [(cos(2 * pi * k / 64), sin(2 * pi * k / 64)) for k in range(64)]
    if shape == "square":
        return [(-0.88, -0.88), (0.88, -0.88), (0.88, 0.88), (-0.88, 0.88)]
    if shape == "diamond":
        return [(0.0, -1.1), (0.92, 0.0), (0.0, 1.1), (-0.92, 0.0)]
    if shape == "triangle":
        return [(0.0, -1.0), (1.08, 0.88), (-1.08, 0.88)]
    if shape == "cross":
        a, b = 0.36, 1.06
        return [(-a, -b), (a, -b), (a, -a), (b, -a), (b, a), (a, a),
                (a, b), (-a, b), (-a, a), (-b, a), (-b, -a), (-a, -a)]  # fmt: skip
    if shape == "star":
        points = []
        for k in range(10):
            r = 1.14 if k % 2 == 0 else 0.5
            points.append((r * sin(pi * k / 5), 0.06 - r * cos(pi * k / 5)))
        return points
    raise ValueError(f"unknown shape {shape!r}")


@cache
def shape_mask(shape: str, shift_x: int, shift_y: int, scale: float = 1.0) -> np.ndarray:
    """Coverage in [0, 1], float32 (20, 20); the centre is at (10, 10) px plus the shift in 1/8 px."""
    canvas = Image.new("L", (_PATCH * _FINE, _PATCH * _FINE), 0)
    center = _PATCH * _FINE / 2
    size = RADIUS * scale * _FINE
    points = [
        (center + shift_x + x * size - 0.5, center + shift_y + y * size - 0.5) for x, y in outline(shape)
    ]
    ImageDraw.Draw(canvas).polygon(points, fill=255)
    fine = np.asarray(canvas, np.float32).reshape(_PATCH, _FINE, _PATCH, _FINE)
    mask = fine.mean((1, 3)) / 255.0
    mask.setflags(write=False)
    return mask


def _apart(a: int, b: int) -> bool:
    return max(abs(a // GRID - b // GRID), abs(a % GRID - b % GRID)) > 1


def _holds(relation: str | None, a: int, b: int) -> bool:
    dy, dx = a // GRID - b // GRID, a % GRID - b % GRID
    along, across = {
        None: (1, 0),
        "left": (-dx, dy),
        "right": (dx, dy),
        "above": (-dy, dx),
        "below": (dy, dx),
    }[relation]
    return along > abs(across)


@cache
def placements(count: int, relation: str | None = None) -> tuple[tuple[int, ...], ...]:
    """Ordered choices of `count` cells (row-major numbers), no two of them neighbours, diagonals included."""
    cells = range(GRID * GRID)
    free = [
        chosen
        for chosen in combinations(cells, count)
        if all(_apart(a, b) for a, b in combinations(chosen, 2))
    ]
    return tuple(
        order
        for chosen in free
        for order in permutations(chosen)
        if relation is None or _holds(relation, order[0], order[1])
    )


def background(rng: np.random.Generator) -> np.ndarray:
    """A pale colour: float32 (3,), a grey level with a slight tint."""
    level = rng.uniform(BACKGROUND_LOW + 8, BACKGROUND_HIGH - 8)
    return np.rint(level + rng.uniform(-8, 8, 3)).astype(np.float32)


def render(scene: Scene, rng: np.random.Generator) -> np.ndarray:
    """Picture of a scene, uint8 (64, 64, 3).

    Colours that the scene leaves open are drawn at random, no two alike; things that are counted share one.
    """
    cells = placements(scene.total, scene.relation)
    chosen = iter(cells[int(rng.integers(len(cells)))])
    taken = {thing.color for thing in scene.objects}
    spare = [name for name in COLOR_NAMES if name not in taken]
    # Larger than the picture: the patches of border cells reach outside.
    canvas = np.empty((IMAGE_SIZE + 8, IMAGE_SIZE + 8, 3), np.float32)
    canvas[:] = background(rng)
    for thing in scene.objects:
        name = thing.color or spare.pop(int(rng.integers(len(spare))))
        color = np.array(COLORS[name], np.float32)
        for _ in range(thing.count):
            row, column = divmod(next(chosen), GRID)
            shift_x, shift_y = (int(v) for v in rng.integers(-_JITTER, _JITTER + 1, 2))
            scale = _SCALES[int(rng.integers(len(_SCALES)))]
            mask = shape_mask(thing.shape, shift_x, shift_y, scale)[..., None]
            top, left = (4 + CELL * place + CELL // 2 - _PATCH // 2 for place in (row, column))
            patch = canvas[top : top + _PATCH, left : left + _PATCH]
            patch += mask * (color - patch)
    return np.rint(canvas[4:-4, 4:-4]).astype(np.uint8)
