"""Captions of scenes in several wordings, the way back by look-up, and captions that nearly fit.

Every caption is lower case and has at most ten words. There is no parser: the table of all captions is the
only grammar, so `scene_of` knows exactly the sentences that `captions_of` writes.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache, lru_cache

import numpy as np

from .world import COLOR_NAMES, COUNTS, RELATIONS, SHAPES, Object, Scene, all_scenes, split_of

MAX_WORDS = 10
_NUMBERS = {2: "two", 3: "three", 4: "four"}
_PLURALS = {shape: shape + ("es" if shape.endswith("s") else "s") for shape in SHAPES}
_RELATION_WORDS = {
    "left": ("to the left of", "left of", "on the left of"),
    "right": ("to the right of", "right of", "on the right of"),
    "above": ("above", "over"),
    "below": ("below", "under", "beneath"),
}


def _noun(thing: Object) -> str:
    shape = thing.shape if thing.count == 1 else _PLURALS[thing.shape]
    return shape if thing.color is None else f"{thing.color} {shape}"


def _with_article(noun: str) -> str:
    return ("an " if noun[0] in "aeiou" else "a ") + noun


def _one_kind(thing: Object) -> tuple[str, ...]:
    noun = _noun(thing)
    if thing.count > 1:
        number = _NUMBERS[thing.count]
        return (
            f"{number} {noun}",
            f"exactly {number} {noun}",
            f"a picture of {number} {noun}",
            f"an image with {number} {noun}",
        )
    words = (
        _with_article(noun),
        f"one {noun}",
        f"a single {noun}",
        f"a picture of {_with_article(noun)}",
        f"an image of {_with_article(noun)}",
    )
    if thing.color is None:
        return words
    return (*words, f"a {thing.shape} in {thing.color}", f"a {thing.shape} that is {thing.color}")


@cache
def captions_of(scene: Scene) -> tuple[str, ...]:
    """All wordings of a scene, the plainest first; lower case, at most ten words each."""
    if len(scene.objects) == 1:
        return _one_kind(scene.objects[0])
    nouns = [_noun(thing) for thing in scene.objects]
    first, second = (_with_article(noun) for noun in nouns)
    if scene.relation is None:
        return (
            f"{first} and {second}",
            f"{first} with {second}",
            f"one {nouns[0]} and one {nouns[1]}",
            f"a picture of {first} and {second}",
        )
    phrases = _RELATION_WORDS[scene.relation]
    captions = [f"{first} {phrase} {second}" for phrase in phrases]
    captions.append(f"one {nouns[0]} {phrases[-1]} one {nouns[1]}")
    if scene.relation in ("above", "below"):
        captions.append(f"a picture of {first} {phrases[0]} {second}")
    return tuple(captions)


@lru_cache(maxsize=1)
def _table() -> dict[str, Scene]:
    return {
        caption: scene
        for members in all_scenes().values()
        for scene in members
        for caption in captions_of(scene)
    }


def scene_of(caption: str) -> Scene | None:
    """The scene that a caption states, or None when it is no caption of this world.

    Case, surrounding and repeated spaces and one full stop at the end do not matter.
    """
    return _table().get(" ".join(caption.lower().split()).removesuffix(".").rstrip())


@lru_cache(maxsize=1)
def vocabulary() -> tuple[str, ...]:
    """Every word of every caption, sorted."""
    return tuple(sorted({word for caption in _table() for word in caption.split()}))


def pick_caption(scene: Scene, rng: np.random.Generator) -> str:
    """A random wording; half of the time the plainest one."""
    captions = captions_of(scene)
    return captions[0] if rng.random() < 0.5 else captions[int(rng.integers(len(captions)))]


def _category(objects: tuple[Object, ...], relation: str | None) -> str:
    if len(objects) == 2:
        if relation is not None:
            return "position"
        return "two_objects" if objects[0].color is None else "color_attribution"
    if objects[0].count > 1:
        return "counting"
    return "single_object" if objects[0].color is None else "colors"


def _with(scene: Scene, place: int, **changes) -> Scene:
    objects = list(scene.objects)
    objects[place] = replace(objects[place], **changes)
    return Scene(_category(tuple(objects), scene.relation), tuple(objects), scene.relation)


@cache
def near_misses(scene: Scene) -> dict[str, tuple[Scene, ...]]:
    """Scenes that differ from `scene` in one fact, by kind of fact; none is ever true of a picture of it.

    Kinds: shape, color, count, relation, swap (the objects' colours, or their places). A training scene's
    near misses are never held-out scenes, so a model that learns from them meets no held-out caption.
    """
    kinds: dict[str, list[Scene]] = {"shape": [], "color": [], "count": [], "relation": [], "swap": []}
    used_shapes = {thing.shape for thing in scene.objects}
    used_colors = {thing.color for thing in scene.objects}
    for place, thing in enumerate(scene.objects):
        kinds["shape"] += [_with(scene, place, shape=s) for s in SHAPES if s not in used_shapes]
        if thing.color is not None:
            kinds["color"] += [_with(scene, place, color=c) for c in COLOR_NAMES if c not in used_colors]
    if len(scene.objects) == 1:
        count = scene.objects[0].count
        kinds["count"] += [_with(scene, 0, count=n) for n in (1, *COUNTS) if n != count]
    if scene.relation is not None:
        kinds["relation"] += [replace(scene, relation=r) for r in RELATIONS if r != scene.relation]
        kinds["swap"].append(replace(scene, objects=scene.objects[::-1]))
    if len(scene.objects) == 2 and scene.objects[0].color is not None:
        a, b = scene.objects
        kinds["swap"].append(replace(scene, objects=(replace(a, color=b.color), replace(b, color=a.color))))
    if split_of(scene) in (None, "train"):
        kinds = {kind: [s for s in found if split_of(s) in (None, "train")] for kind, found in kinds.items()}
    return {kind: tuple(found) for kind, found in kinds.items() if found}


@cache
def object_misses(scene: Scene) -> tuple[Scene, ...]:
    """Scenes with one more or one fewer kind of thing than `scene`; none is ever true of a picture of it.

    One thing alone gains another, named alike (with a colour or without); of two either one stays. Things that are
    counted have their near misses in `near_misses`. The same splits hold as there.
    """
    if scene.total > 1 and len(scene.objects) == 1:
        return ()
    if len(scene.objects) == 2:
        found = [Scene(_category((thing,), None), (thing,)) for thing in scene.objects]
    else:
        (thing,) = scene.objects
        colors = [None] if thing.color is None else [c for c in COLOR_NAMES if c != thing.color]
        others = [Object(s, c) for s in SHAPES if s != thing.shape for c in colors]
        pairs = [pair for other in others for pair in ((thing, other), (other, thing))]
        found = [Scene(_category(pair, None), pair) for pair in pairs]
    if split_of(scene) in (None, "train"):
        found = [s for s in found if split_of(s) in (None, "train")]
    return tuple(found)


def hard_negative(scene: Scene, rng: np.random.Generator, objects: bool = False) -> str:
    """Caption of a random near miss: first the kind of fact is drawn, then the scene, then the wording.

    Swaps and relations, which a bag of words cannot tell apart, are drawn twice as often as other kinds.

    Args:
        objects: a thing too many or too few counts as a kind, too (`object_misses`).
    """
    kinds = near_misses(scene)
    if objects and object_misses(scene):
        kinds = kinds | {"objects": object_misses(scene)}
    names = list(kinds)
    weights = np.array([2.0 if name in ("swap", "relation") else 1.0 for name in names])
    kind = kinds[names[int(rng.choice(len(names), p=weights / weights.sum()))]]
    return pick_caption(kind[int(rng.integers(len(kind)))], rng)
