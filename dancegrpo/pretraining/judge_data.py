"""What the reward CLIP learns from: pictures of which it is known what they show, and captions to judge them by."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np

from dancegrpo.data.shapes_world import Scene, hard_negative, pick_caption, scene_of, split_of
from dancegrpo.pretraining.alterations import alter
from dancegrpo.pretraining.recipe import RewardRecipe
from dancegrpo.rewards.shapes_verifier import Blob, find_blobs, judge, scenes_shown
from dancegrpo.runtime import noise


@dataclass(frozen=True)
class Pictures:
    """N pictures with the scenes that each shows, and the scene that it was asked to show.

    Attributes:
        images: uint8 (N, 64, 64, 3).
        blobs: what the reward's verifier sees in a picture, None where it sees no even ground.
        shown: all scenes that are therefore true of a picture; empty if it shows none.
        subjects: the scene of a picture's prompt or render.
    """

    images: np.ndarray
    blobs: tuple[list[Blob] | None, ...]
    shown: tuple[frozenset[Scene], ...]
    subjects: tuple[Scene, ...]

    def right(self) -> np.ndarray:
        """Which pictures show what they should, bool (N,)."""
        pairs = zip(self.subjects, self.shown, strict=True)
        return np.array([subject in shown for subject, shown in pairs])

    def chosen(self, rows: np.ndarray) -> Pictures:
        """The pictures of these rows."""
        columns = (self.blobs, self.shown, self.subjects)
        return Pictures(self.images[rows], *(tuple(column[row] for row in rows) for column in columns))


def read(images: np.ndarray, subjects: Sequence[Scene]) -> Pictures:
    """Pictures as the reward's verifier reads them, uint8 (N, 64, 64, 3)."""
    blobs = tuple(find_blobs(images))
    return Pictures(images, blobs, tuple(frozenset(scenes_shown(b)) for b in blobs), tuple(subjects))


def joined(parts: Sequence[Pictures]) -> Pictures:
    """The pictures of all parts, one after the other."""
    columns = zip(*((part.blobs, part.shown, part.subjects) for part in parts), strict=True)
    images = np.concatenate([part.images for part in parts])
    return Pictures(images, *(sum(column, ()) for column in columns))


def altered(pictures: Pictures, seed: int, name: str, things: bool) -> Pictures:
    """An altered copy of each picture, read anew; `name` names the stream of edits, `things` see `alter`."""
    copies = [
        alter(image, blobs, noise.generator("alter", name, seed, i), things)
        for i, (image, blobs) in enumerate(zip(pictures.images, pictures.blobs, strict=True))
    ]
    return read(np.stack(copies), pictures.subjects)


@dataclass(frozen=True)
class JudgeBatch:
    """N pictures and M captions.

    Attributes:
        truth: bool (N, M), whether the caption is true of the picture.
        close: bool (N, M), pairs that are hard to tell: the caption is the picture's prompt, or was made of what
            this picture, or another one of its prompt, shows.
        own: bool (N, M), the caption is the picture's prompt.
        credit: float32 (N, M) in [0, 1], 1 where true; of close pairs that are not, half of the verifier's partial
            credit (what the rule reward calls mixed).
    """

    images: np.ndarray
    captions: list[str]
    truth: np.ndarray
    close: np.ndarray
    own: np.ndarray
    credit: np.ndarray


class JudgeBatches:
    """Batches of painted pictures, several of each prompt, and of single ones.

    Args:
        painted: pictures in equal groups, one prompt each.
        prompts: the groups' prompts.
        single: other pictures (renders and what became of them).
    """

    def __init__(
        self, painted: Pictures, prompts: Sequence[str], single: Pictures, recipe: RewardRecipe, seed: int
    ):
        self.painted, self.prompts, self.single = painted, tuple(prompts), single
        self.recipe, self.seed = recipe, seed
        self._right = painted.right().reshape(len(prompts), -1)

    def batch(self, step: int) -> JudgeBatch:
        """The batch of a step, a pure function of seed and step."""
        recipe, rng = self.recipe, noise.generator("reward", self.seed, step)
        groups = rng.choice(len(self.prompts), recipe.groups, replace=False)
        rows = np.concatenate([self._members(int(group), rng) for group in groups])
        alone = recipe.batch_size - len(rows)
        others = rng.choice(len(self.single.images), alone, replace=False)
        painted, single = self.painted.chosen(rows), self.single.chosen(others)
        captions = [self.prompts[group] for group in groups]
        block = list(range(recipe.groups))  # captions and pictures of one block are close
        for i, (shown, subject) in enumerate(zip(painted.shown, painted.subjects, strict=True)):
            kind = _true_caption if rng.random() < 0.5 else _near_miss
            captions.append(kind(shown, subject, rng))
            block.append(i // recipe.group_size)
        for i, (shown, subject) in enumerate(zip(single.shown, single.subjects, strict=True)):
            captions += [_true_caption(shown, subject, rng), _near_miss(shown, subject, rng)]
            block += [recipe.groups + i] * 2
        places = np.r_[
            np.repeat(np.arange(recipe.groups), recipe.group_size), recipe.groups + np.arange(alone)
        ]
        close = places[:, None] == np.array(block)[None]
        own = close.copy()
        own[:, recipe.groups :] = False
        stated = [scene_of(caption) for caption in captions]
        shown, blobs = painted.shown + single.shown, painted.blobs + single.blobs
        truth = np.array([[scene in true for scene in stated] for true in shown])
        credit = truth.astype(np.float32)
        for i, j in zip(*np.nonzero(close & ~truth), strict=True):
            credit[i, j] = 0.5 * judge(blobs[i], stated[j]).score
        return JudgeBatch(
            np.concatenate([painted.images, single.images]), captions, truth, close, own, credit
        )

    def _members(self, group: int, rng: np.random.Generator) -> np.ndarray:
        """Pictures of a group, as many right as wrong ones as far as there are."""
        right, size = self._right[group], self.recipe.group_size
        order = rng.permutation(len(right))
        sides = (order[right[order]], order[~right[order]])
        turns = (side[k : k + 1] for k in range(size) for side in sides)
        chosen = np.concatenate(list(islice((turn for turn in turns if len(turn)), size)))
        return group * len(right) + chosen


def _train(shown: frozenset[Scene]) -> list[Scene]:
    """Scenes that training may name, in an order of their own (a set has none that is the same in every process)."""
    return sorted((scene for scene in shown if split_of(scene) in (None, "train")), key=repr)


def _true_caption(shown: frozenset[Scene], subject: Scene, rng: np.random.Generator) -> str:
    """A caption of what is there; of a picture that shows nothing, what should have been there (and is not)."""
    known = _train(shown) or [subject]
    return pick_caption(known[int(rng.integers(len(known)))], rng)


def _near_miss(shown: frozenset[Scene], subject: Scene, rng: np.random.Generator) -> str:
    known = _train(shown) or [subject]
    return hard_negative(known[int(rng.integers(len(known)))], rng, objects=True)


def pair_weights(batch: JudgeBatch, close_share: float) -> np.ndarray:
    """Weights (N, M) with sum 1: `close_share` for close pairs, a picture and its own prompt counting four times
    among them, the rest for all others; true and false pairs have half of each.
    """
    weight = np.where(batch.own, 4.0, 1.0)
    for mask, share in ((batch.close, close_share), (~batch.close, 1.0 - close_share)):
        for part in (mask & batch.truth, mask & ~batch.truth):
            weight[part] *= 0.5 * share / max(weight[part].sum(), 1.0)
    return (weight / weight.sum()).astype(np.float32)


def pair_targets(batch: JudgeBatch, smoothing: float) -> np.ndarray:
    """Targets (N, M): the credit, of close pairs kept `smoothing` away from 0 and 1.

    So the loss has its minimum at a finite cosine, the same for all pictures that are equally right: what else they
    look like, which a group-relative advantage would make much of, is pressed out of the score. Pairs that have
    nothing to do with each other are only pushed apart.
    """
    kept = smoothing + (1.0 - 2.0 * smoothing) * batch.credit
    return np.where(batch.close | batch.truth, kept, batch.credit).astype(np.float32)
