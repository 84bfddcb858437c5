"""The shapes world: captions, splits, placement and determinism that training and evaluation rely on."""

import json
from collections import Counter
from itertools import combinations

import numpy as np
import pytest

from dancegrpo.data.shapes_world import (
    CATEGORIES,
    SPLITS,
    all_scenes,
    captions_of,
    hard_negative,
    pick_scene,
    placements,
    sample,
    sample_batch,
    scene_of,
    scenes,
    vocabulary,
)
from dancegrpo.data.shapes_world.lists import ASSETS, LINES_PER_CATEGORY, write_lists


def test_every_caption_leads_back_to_its_scene():
    words = set(vocabulary())
    for members in all_scenes().values():
        for scene in members:
            for caption in captions_of(scene):
                assert scene_of(caption) == scene
                assert caption == caption.lower() and len(caption.split()) <= 10
                assert words.issuperset(caption.split())


def test_caption_lookup_forgives_case_space_and_full_stop_only():
    scene = scene_of("a red circle to the left of a blue square")
    assert scene.relation == "left" and [thing.color for thing in scene.objects] == ["red", "blue"]
    assert scene_of("  A red circle  to the LEFT of a blue square. ") == scene
    assert scene_of("a red circle to the left of a square and a star") is None


def _meaning(scene):
    """What a picture of the scene looks like, however it is said (order, mirrored relations)."""
    things, relation = scene.objects, scene.relation
    if relation in ("right", "below"):
        things, relation = things[::-1], {"right": "left", "below": "above"}[relation]
    if relation is None:
        things = tuple(sorted(things, key=str))
    return things, relation


def test_splits_share_no_meaning_where_there_are_enough():
    for first, second in combinations(SPLITS, 2):
        for category in ("two_objects", "position", "color_attribution", "counting"):
            sides = [
                {
                    _meaning(scene)
                    for scene in scenes(split)[category]
                    if category != "counting" or scene.objects[0].color is not None
                }
                for split in (first, second)
            ]
            assert all(sides) and not sides[0] & sides[1], (first, second, category)


def test_shipped_lists_are_what_the_code_writes_and_balanced(tmp_path):
    for path, split in zip(write_lists(tmp_path), SPLITS, strict=True):
        shipped = (ASSETS / path.name).read_bytes()
        assert path.read_bytes() == shipped
        rows = [json.loads(line) for line in shipped.decode().splitlines()]
        count = LINES_PER_CATEGORY[split]
        assert Counter(row["category"] for row in rows) == dict.fromkeys(CATEGORIES, count)
        allowed = {category: set(members) for category, members in scenes(split).items()}
        assert all(scene_of(row["prompt"]) in allowed[row["category"]] for row in rows)


def test_objects_are_never_in_neighbouring_cells_and_relations_dominate():
    for count in (2, 3, 4):
        for cells in placements(count):
            assert all(max(abs(a // 4 - b // 4), abs(a % 4 - b % 4)) > 1 for a, b in combinations(cells, 2))
    assert all(a % 4 < b % 4 and b % 4 - a % 4 > abs(a // 4 - b // 4) for a, b in placements(2, "left"))
    assert {(b, a) for a, b in placements(2, "above")} == set(placements(2, "below"))


def test_samples_depend_on_seed_and_index_only():
    images, captions, found = sample_batch(3, 10, 6)
    assert images.shape == (6, 64, 64, 3) and images.dtype == np.uint8
    for offset in (0, 5):
        image, caption, scene = sample(3, 10 + offset)
        assert np.array_equal(image, images[offset])
        assert (caption, scene) == (captions[offset], found[offset])
        assert scene_of(caption) == scene
    assert not np.array_equal(sample_batch(4, 10, 6)[0], images)


@pytest.mark.parametrize("objects", [False, True])
@pytest.mark.parametrize("category", CATEGORIES)
def test_hard_negatives_are_other_scenes_and_never_held_out_ones(category, objects):
    rng = np.random.default_rng(0)
    train = {scene for members in scenes("train").values() for scene in members}
    things = set()
    for _ in range(200):
        scene = pick_scene(category, "train", rng)
        other = scene_of(hard_negative(scene, rng, objects))
        assert other in train and _meaning(other) != _meaning(scene)
        things.add(len(other.objects) - len(scene.objects))
    assert things == (
        {0} if not objects or category == "counting" else {0, 1} if scene.total == 1 else {0, -1}
    )
