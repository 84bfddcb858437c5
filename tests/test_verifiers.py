"""Both judges of shapes-world pictures: right on true captions, not fooled by near misses or junk."""

import numpy as np
import pytest
from scipy.ndimage import gaussian_filter

from dancegrpo.data.shapes_world import CATEGORIES, hard_negative, pick_scene, render, scene_of
from dancegrpo.evaluation import verifier as evaluation_verifier
from dancegrpo.rewards import shapes_verifier as reward_verifier

JUDGES = pytest.mark.parametrize(
    "judge", [reward_verifier, evaluation_verifier], ids=["reward", "evaluation"]
)
PER_CATEGORY = 40


def _degraded(image, rng):
    """What a small autoencoder does to a picture: blur, noise, a slight shift of colour."""
    soft = gaussian_filter(image.astype(np.float32), (*[rng.uniform(0.5, 1.0)] * 2, 0))
    soft += rng.normal(0, rng.uniform(3, 6), soft.shape) + rng.normal(0, 4, 3)
    return np.clip(np.rint(soft), 0, 255).astype(np.uint8)


@pytest.fixture(scope="module")
def pictures():
    """category -> (clean pictures, degraded pictures, their scenes, scenes that nearly fit)."""
    rng = np.random.default_rng(1)
    result = {}
    for category in CATEGORIES:
        found = [pick_scene(category, "evaluation", rng) for _ in range(PER_CATEGORY)]
        clean = np.stack([render(scene, rng) for scene in found])
        near = [scene_of(hard_negative(scene, rng)) for scene in found]
        result[category] = clean, np.stack([_degraded(image, rng) for image in clean]), found, near
    return result


def _share(judge, images, found):
    return float(np.mean([verdict.correct for verdict in judge.verify_batch(images, found)]))


@JUDGES
@pytest.mark.parametrize("category", CATEGORIES)
def test_true_captions_pass_and_near_misses_do_not(judge, category, pictures):
    clean, degraded, found, near = pictures[category]
    for images in (clean, degraded):
        assert _share(judge, images, found) >= 0.97
        assert _share(judge, images, near) <= 0.03


@JUDGES
def test_blank_flat_and_noise_pictures_are_always_refused(judge):
    rng = np.random.default_rng(2)
    junk = [np.full((64, 64, 3), level, np.uint8) for level in (0, 128, 240, 255)]
    junk.append(np.broadcast_to(np.array([212, 32, 40], np.uint8), (64, 64, 3)))
    junk += [rng.integers(0, 256, (64, 64, 3), dtype=np.uint8) for _ in range(4)]
    for width in (1, 2, 4):
        field = gaussian_filter(rng.normal(size=(64, 64, 3)), (width, width, 0))
        junk.append(np.clip(128 + 60 * field / field.std(), 0, 255).astype(np.uint8))
    found = [pick_scene(category, "train", rng) for category in CATEGORIES for _ in range(10)]
    for picture in junk:
        assert _share(judge, np.stack([picture] * len(found)), found) == 0.0


def _canvas(*masks, color=(36, 84, 214)):
    """A pale picture with coverage masks (64, 64) of one colour on it."""
    cover = np.max(masks, axis=0)[..., None]
    return np.rint(236 + cover * (np.array(color) - 236)).astype(np.uint8)


def _disc(x, y, radius=6.5):
    rows, columns = np.mgrid[:64, :64] + 0.5
    return np.clip(radius + 0.5 - np.hypot(rows - y, columns - x), 0, 1)


@JUDGES
def test_half_formed_merged_and_extra_things_are_not_right(judge):
    one, two = scene_of("a blue circle"), scene_of("two blue circles")
    half = _disc(32, 32)
    half[:, 32:] = 0
    ring = np.clip(_disc(32, 32) - _disc(32, 32, 3.0), 0, 1)
    cases = [
        (_canvas(_disc(20, 32)), one, True),
        (_canvas(_disc(20, 32), _disc(44, 32)), two, True),
        (_canvas(half), one, False),
        (_canvas(ring), one, False),
        (_canvas(_disc(26, 32), _disc(37, 32)), two, False),  # touching
        (_canvas(_disc(20, 32), _disc(44, 32)), one, False),  # one too many
        (_canvas(_disc(20, 32), 0.35 * _disc(44, 32)), one, False),  # a ghost beside it
        (_canvas(0.1 * _disc(20, 32)), one, False),  # nothing but a ghost
    ]
    images, found, right = zip(*cases, strict=True)
    verdicts = judge.verify_batch(np.stack(images), found)
    assert tuple(verdict.correct for verdict in verdicts) == right


def test_partial_credit_grows_with_every_fact_and_is_full_only_when_right(pictures):
    square = np.zeros((64, 64))
    square[26:38, 46:58] = 1
    scene = scene_of("a red circle to the left of a blue square")
    blue_square = _canvas(square)

    def picture(x, color):
        cover = _disc(x, 32)[..., None]
        return np.rint(blue_square + cover * (np.array(color) - blue_square)).astype(np.uint8)

    steps = [
        _canvas(np.zeros((64, 64))),  # nothing
        blue_square,  # one thing
        picture(20, (36, 152, 60)),  # both, one colour wrong
        picture(20, (212, 32, 40)),  # all facts
    ]
    scores = [reward_verifier.verify(image, scene).score for image in steps]
    assert scores[0] == 0.0 and scores[-1] == 1.0
    assert all(low < high for low, high in zip(scores, scores[1:], strict=False)), scores
    for _, degraded, found, near in pictures.values():
        for verdict in reward_verifier.verify_batch(np.concatenate([degraded] * 2), found + near):
            assert 0.0 <= verdict.score <= 1.0 and (verdict.score == 1.0) == verdict.correct


@JUDGES
def test_verdicts_do_not_depend_on_the_batch_and_wrong_input_is_named(judge, pictures):
    _, images, found, _ = pictures["position"]
    together = judge.verify_batch(images, found)
    assert [judge.verify_batch(images[i : i + 1], found[i : i + 1])[0] for i in range(5)] == together[:5]
    assert judge.verify_batch(images[:0], []) == []
    with pytest.raises(ValueError, match="uint8"):
        judge.verify_batch(images.astype(np.float32), found)
    with pytest.raises(ValueError, match="scenes"):
        judge.verify_batch(images, found[:-1])


def test_scenes_shown_are_those_with_a_correct_verdict(pictures):
    """The reward CLIP learns from the one, the rule reward gives the other."""
    _, images, found, near = (sum((list(p[k]) for p in pictures.values()), []) for k in range(4))
    asked = list(dict.fromkeys(found + near))
    for blobs in reward_verifier.find_blobs(np.stack(images))[::4]:
        shown = reward_verifier.scenes_shown(blobs)
        right = {scene for scene in (*asked, *shown) if reward_verifier.judge(blobs, scene).correct}
        assert right == set(shown) and len(shown) == len(set(shown))
