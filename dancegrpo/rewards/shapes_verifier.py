"""Tells whether a picture shows what a shapes-world scene states: connected components and templates.

No learned part. The ground colour is the median pixel; what differs from it is cut into connected
components; each component's colour is its nearest palette colour in CIELAB, and its shape the template with
the highest correlation among templates of several sizes, blurs and sub-pixel positions. A component that no
template explains (half-formed, merged, too faint, of two colours) is an unknown blob, and a picture with an
unknown blob is never right.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import permutations

import numpy as np
from PIL import Image, ImageDraw
from scipy import ndimage

from ..data.shapes_world.render import outline
from ..data.shapes_world.world import (
    CELL,
    COLOR_NAMES,
    COLORS,
    COUNTS,
    IMAGE_SIZE,
    RADIUS,
    RELATIONS,
    SHAPES,
    Object,
    Scene,
)

_PATCH = 24
_MARGIN = _PATCH // 2
_CHUNK = 32  # pictures handled together
_SEEN = 16.0  # CIELAB distance from the ground at which a pixel counts as drawn
_SPECK = 6  # drawn components of fewer pixels are noise
_FAINT = 30.0  # a component that nowhere differs more than this from the ground is a ghost
_MIN_MATCH = 0.97  # correlation with the best template
_MIN_LEAD = 0.25  # how far the best other shape must be behind (1: as far as in a perfect picture)
_MAX_COLOR = 32.0  # CIELAB distance from the palette colour
_MAX_SPREAD = 24.0  # RGB distance (root mean square) of pixels from a blend of ground and own colour
_MAX_ROUGH = 9.0  # CIELAB distance of ground pixels from the ground colour, mean
_ALMOST = 0.5  # share of a shape's credit for a blob that only resembles it


@dataclass(frozen=True)
class Blob:
    """One drawn component: its most likely shape, and whether it surely is one.

    `match` is the correlation with the best template, `lead` how far the best other shape is behind (1: as
    far as in a perfect picture), `color` None when no palette colour is near.
    """

    shape: str
    accepted: bool
    color: str | None
    center: tuple[float, float]  # x, y in pixels
    match: float
    lead: float


@dataclass(frozen=True)
class Verdict:
    """`correct`, partial credit `score` in [0, 1] (1.0 exactly when correct), and `detail` for a reader."""

    correct: bool
    score: float
    detail: str


def _linear_table() -> np.ndarray:
    value = np.arange(256) / 255.0
    return np.where(value <= 0.04045, value / 12.92, ((value + 0.055) / 1.055) ** 2.4).astype(np.float32)


_LINEAR = _linear_table()
# sRGB to XYZ (IEC 61966-2-1) with the D65 white divided out.
_XYZ = np.array(
    [
        [0.4124564, 0.3575761, 0.1804375],
        [0.2126729, 0.7151522, 0.0721750],
        [0.0193339, 0.1191920, 0.9503041],
    ]
) / np.array([[0.95047], [1.0], [1.08883]])
_XYZ = _XYZ.astype(np.float32).T.copy()
_LAB = np.array([[0, 500, 0], [116, -500, 200], [0, 0, -200]], np.float32)


def to_lab(pixels: np.ndarray) -> np.ndarray:
    """CIELAB (CIE 1976, D65) of sRGB pixels in [0, 255], float32, same shape (..., 3)."""
    xyz = _LINEAR[np.clip(np.rint(pixels), 0, 255).astype(np.uint8)] @ _XYZ
    root = np.where(xyz > 216 / 24389, np.cbrt(xyz), (24389 / 27 * xyz + 16) / 116)
    lab = root @ _LAB
    lab[..., 0] -= 16
    return lab


_PALETTE = to_lab(np.array(list(COLORS.values()), np.float32))


def _draw(shape: str, dx: float, dy: float, scale: float, blur: float) -> np.ndarray:
    """A blurred shape, float64 (24, 24), whose centre of mass is (dx, dy) px from the patch's centre."""
    fine = 6
    points = np.array(outline(shape)) * RADIUS * scale
    x, y = points.T
    twist = x * np.roll(y, -1) - np.roll(x, -1) * y
    mass_x = ((x + np.roll(x, -1)) * twist).sum() / (3 * twist.sum())
    mass_y = ((y + np.roll(y, -1)) * twist).sum() / (3 * twist.sum())
    points = (points + np.array([dx - mass_x, dy - mass_y]) + _MARGIN) * fine - 0.5
    canvas = Image.new("L", (_PATCH * fine, _PATCH * fine), 0)
    ImageDraw.Draw(canvas).polygon([tuple(point) for point in points], fill=255)
    coarse = np.asarray(canvas, np.float64).reshape(_PATCH, fine, _PATCH, fine).mean((1, 3)) / 255
    return ndimage.gaussian_filter(coarse, blur) if blur else coarse


@cache
def _templates() -> tuple[np.ndarray, np.ndarray]:
    """Unit-norm, zero-mean templates (576, 6 * variants) ordered by shape; their leads (6, variants).

    A template's lead is 1 minus its highest correlation with a template of another shape: blurred shapes
    resemble each other more, so less lead can be asked of them.
    """
    offsets = (-1 / 3, 0.0, 1 / 3)
    variants = [
        (dx, dy, scale, blur)
        for dx in offsets
        for dy in offsets
        for scale in (0.9, 1.0, 1.1)
        for blur in (0.5, 0.9, 1.4, 2.0)
    ]
    bank = np.stack([_draw(shape, *variant).ravel() for shape in SHAPES for variant in variants])
    bank -= bank.mean(1, keepdims=True)
    bank /= np.linalg.norm(bank, axis=1, keepdims=True)
    alike = (bank @ bank.T).reshape(len(SHAPES), len(variants), len(SHAPES), len(variants)).max(3)
    alike[np.arange(len(SHAPES)), :, np.arange(len(SHAPES))] = -1.0
    return np.ascontiguousarray(bank.T, np.float32), 1.0 - alike.max(2)


@dataclass
class _Component:
    """A connected component before its shape and colour have names."""

    picture: int
    patch: np.ndarray  # coverage in [0, 1], float32 (24, 24)
    center: tuple[float, float]
    color: np.ndarray  # RGB, float32 (3,)
    sound: bool  # of one colour, strong enough, fits the patch


def _smooth(images: np.ndarray) -> np.ndarray:
    """[1 4 1] / 6 along both axes of (N, H, W, 3), edges repeated: takes single-pixel noise away."""
    tall = 4 * images
    tall[:, 1:] += images[:, :-1]
    tall[:, :-1] += images[:, 1:]
    tall[:, 0] += images[:, 0]
    tall[:, -1] += images[:, -1]
    both = 4 * tall
    both[:, :, 1:] += tall[:, :, :-1]
    both[:, :, :-1] += tall[:, :, 1:]
    both[:, :, 0] += tall[:, :, 0]
    both[:, :, -1] += tall[:, :, -1]
    both /= 36
    return both


def _component(picture: int, number: int, box: tuple[slice, slice], image: np.ndarray, ground: np.ndarray,
               distance: np.ndarray, labels: np.ndarray) -> _Component:  # fmt: skip
    """Colour, coverage, soundness of component `number`; arrays (88, 88[, 3]), padded by half a patch."""
    inside = labels[box] == number
    rows, columns = np.nonzero(inside)
    weight = distance[box][inside]
    peak, total = float(weight.max()), float(weight.sum())
    color = np.median(image[box][inside][weight > 0.75 * peak], axis=0)
    axis = color - ground
    y = box[0].start + float(rows @ weight) / total + 0.5
    x = box[1].start + float(columns @ weight) / total + 0.5
    top, left = (min(max(round(v) - _MARGIN, 0), labels.shape[0] - _PATCH) for v in (y, x))
    window = (slice(top, top + _PATCH), slice(left, left + _PATCH))
    owner = labels[window]
    mine = owner == number
    offset = image[window] - ground
    coverage = np.clip(offset @ (axis / max(float(axis @ axis), 1.0)), 0.0, 1.0)
    rest = offset[mine] - coverage[mine][:, None] * axis
    coverage[~mine & (owner != 0)] = 0.0
    fits = len(rest) >= 0.97 * len(weight)
    sound = fits and peak > _FAINT and float((rest * rest).sum()) < _MAX_SPREAD**2 * len(rest)
    return _Component(picture, coverage, (x - _MARGIN, y - _MARGIN), color, sound)


def _components(images: np.ndarray) -> tuple[np.ndarray, list[_Component]]:
    """Which pictures have an even ground to see things on, bool (N,), and the components of those."""
    smooth = _smooth(images.astype(np.float32))
    ground = np.median(smooth[:, ::2, ::2].reshape(len(images), -1, 3), axis=1)
    distance = to_lab(smooth) - to_lab(ground)[:, None, None]
    distance = np.sqrt(np.einsum("nhwc,nhwc->nhw", distance, distance))
    drawn = distance > _SEEN
    still = (distance * ~drawn).sum((1, 2)) / np.maximum((~drawn).sum((1, 2)), 1)
    even = (drawn.mean((1, 2)) <= 0.4) & (still <= _MAX_ROUGH)
    border = ((0, 0), (_MARGIN, _MARGIN), (_MARGIN, _MARGIN))
    connected = np.zeros((3, 3, 3), np.int8)
    connected[1] = 1  # diagonal neighbours too, but never from picture to picture
    labels, _ = ndimage.label(np.pad(drawn & even[:, None, None], border), structure=connected)
    sizes = np.bincount(labels.ravel())
    distance = np.pad(distance, border)
    padded = np.empty((*labels.shape, 3), np.float32)
    padded[:] = ground[:, None, None]
    padded[:, _MARGIN:-_MARGIN, _MARGIN:-_MARGIN] = smooth
    found = []
    for number, (picture, *box) in enumerate(ndimage.find_objects(labels), start=1):
        if sizes[number] >= _SPECK:
            n = picture.start
            found.append(_component(n, number, tuple(box), padded[n], ground[n], distance[n], labels[n]))
    return even, found


def _name(found: list[_Component]) -> list[Blob]:
    """Shapes and colours of components."""
    if not found:
        return []
    bank, leads = _templates()
    stack = np.stack([one.patch.ravel() for one in found])
    stack -= stack.mean(1, keepdims=True)
    stack /= np.maximum(np.linalg.norm(stack, axis=1, keepdims=True), 1e-6)
    matches = (stack @ bank).reshape(len(stack), *leads.shape)
    gaps = np.linalg.norm(to_lab(np.stack([one.color for one in found]))[:, None] - _PALETTE, axis=2)
    blobs = []
    for one, match, gap in zip(found, matches, gaps, strict=True):
        per_shape = match.max(1)
        second, winner = (int(k) for k in np.argsort(per_shape)[-2:])
        best = float(per_shape[winner])
        lead = (best - float(per_shape[second])) / float(leads[winner, match[winner].argmax()])
        accepted = one.sound and best >= _MIN_MATCH and lead >= _MIN_LEAD
        color = COLOR_NAMES[int(gap.argmin())] if gap.min() < _MAX_COLOR else None
        blobs.append(Blob(SHAPES[winner], accepted, color, one.center, best, lead))
    return blobs


def find_blobs(images: np.ndarray) -> list[list[Blob] | None]:
    """Drawn components of pictures uint8 (N, 64, 64, 3); None for a picture without an even ground."""
    images = np.asarray(images)
    if images.ndim != 4 or images.shape[1:] != (IMAGE_SIZE, IMAGE_SIZE, 3) or images.dtype != np.uint8:
        raise ValueError(
            f"images must be uint8 (N, {IMAGE_SIZE}, {IMAGE_SIZE}, 3), got {images.dtype} {images.shape}"
        )
    result: list[list[Blob] | None] = []
    for start in range(0, len(images), _CHUNK):
        even, found = _components(images[start : start + _CHUNK])
        pictures: list[list[Blob] | None] = [[] if good else None for good in even]
        for one, blob in zip(found, _name(found), strict=True):
            pictures[one.picture].append(blob)
        result += pictures
    return result


def relation_holds(relation: str, first: tuple[float, float], second: tuple[float, float]) -> bool:
    """Whether centre `first` (x, y) is left, right, above, below of `second`.

    They must be more than half a cell apart along that axis, and further than along the other one.
    """
    dx, dy = first[0] - second[0], first[1] - second[1]
    along, across = {"left": (-dx, dy), "right": (dx, dy), "above": (-dy, dx), "below": (dy, dx)}[relation]
    return along > CELL / 2 and along > abs(across)


def scenes_shown(blobs: list[Blob] | None) -> tuple[Scene, ...]:
    """All scenes of the world that a picture with these blobs shows: those for which its verdict is correct.

    The quick way when one picture meets many captions. Empty for a picture that no caption fits.
    """
    if not blobs or not all(blob.accepted for blob in blobs):
        return ()
    colors = [blob.color for blob in blobs]
    if len({blob.shape for blob in blobs}) == 1:
        shape, count = blobs[0].shape, len(blobs)
        if count > max(COUNTS):
            return ()
        named = {None, colors[0]} if len(set(colors)) == 1 else {None}
        plain, colored = ("single_object", "colors") if count == 1 else ("counting", "counting")
        return tuple(
            Scene(colored if c else plain, (Object(shape, c, count),)) for c in sorted(named, key=str)
        )
    if len(blobs) != 2:
        return ()
    found = []
    for a, b in (blobs, blobs[::-1]):
        relations = [None, *(r for r in RELATIONS if relation_holds(r, a.center, b.center))]
        pairs = [(Object(a.shape), Object(b.shape))]
        if None not in colors and a.color != b.color:
            pairs.append((Object(a.shape, a.color), Object(b.shape, b.color)))
        for pair in pairs:
            without = "two_objects" if pair[0].color is None else "color_attribution"
            found += [Scene("position" if r else without, pair, r) for r in relations]
    return tuple(found)


def judge(blobs: list[Blob] | None, scene: Scene) -> Verdict:
    """The verdict on a picture with these blobs (`find_blobs`).

    Facts that the scene requires, each with its credit; the best assignment of blobs to things counts.

    For each thing: its shape (half for a blob that only resembles it) and, where named, its colour; for a
    relation two facts' worth, for a thing left out or too much a share of one fact.
    """
    if blobs is None:
        return Verdict(False, 0.0, "no even ground")
    wanted = [thing for thing in scene.objects for _ in range(thing.count)]
    facts = 1 + sum(1 + (thing.color is not None) for thing in wanted) + 2 * (scene.relation is not None)

    def credit(thing, blob: Blob | None) -> float:
        if blob is None or blob.shape != thing.shape:
            return 0.0 if blob is None or thing.color is None else float(blob.color == thing.color)
        shape = 1.0 if blob.accepted else _ALMOST
        return shape + (thing.color is not None and blob.color == thing.color)

    def total(chosen: tuple[Blob | None, ...]) -> float:
        pairs = list(zip(wanted, chosen, strict=True))
        held = sum(credit(thing, blob) for thing, blob in pairs)
        if scene.relation is None or any(b is None or b.shape != thing.shape for thing, b in pairs):
            return held
        if relation_holds(scene.relation, chosen[0].center, chosen[1].center):
            # Half of it for the relation as such, the rest as far as the two are what they should be.
            held += 1.0 + min(credit(thing, b) / (1 + (thing.color is not None)) for thing, b in pairs)
        return held

    # More than six blobs never make a right picture: the first six are enough for partial credit.
    pool: list[Blob | None] = list(blobs[:6]) + [None] * max(0, len(wanted) - len(blobs))
    if len(scene.objects) == 1:  # equal things: the best blobs, no need to try orders
        chosen = tuple(sorted(pool, key=lambda blob: credit(wanted[0], blob))[-len(wanted) :])
        best = total(chosen)
    else:
        best = max(total(chosen) for chosen in permutations(pool, len(wanted)))
    best += max(0.0, 1.0 - abs(len(blobs) - len(wanted)) / len(wanted))
    names = ", ".join(
        f"{blob.color or '?'} {blob.shape}{'' if blob.accepted else ' (unclear)'}" for blob in blobs
    )
    score = best / facts
    return Verdict(score >= 1.0 - 1e-9, min(score, 1.0), names or "nothing")


def verify_batch(images: np.ndarray, scenes: Sequence[Scene]) -> list[Verdict]:
    """Judge pictures uint8 (N, 64, 64, 3) against N scenes. Raises ValueError for other shapes or dtypes."""
    if len(images) != len(scenes):
        raise ValueError(f"{len(images)} images but {len(scenes)} scenes")
    if not len(scenes):
        return []
    return [judge(blobs, scene) for blobs, scene in zip(find_blobs(images), scenes, strict=True)]


def verify(image: np.ndarray, scene: Scene) -> Verdict:
    """Judge one picture uint8 (64, 64, 3); see `verify_batch`."""
    return verify_batch(np.asarray(image)[None], [scene])[0]
