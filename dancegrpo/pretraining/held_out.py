"""Held-out pictures of the flow model, and how well a CLIP tells right from wrong ones of the same prompt."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from dancegrpo.data.shapes_world import CATEGORIES
from dancegrpo.pretraining.alterations import WHITE, extra_thing, with_ground
from dancegrpo.pretraining.judge_data import Pictures, read
from dancegrpo.pretraining.scoring import PairScore, within_prompt_auc
from dancegrpo.runtime import noise


@dataclass(frozen=True)
class HeldOut:
    """Pictures of P validation prompts by the way they were painted, and the captions of each.

    Attributes:
        pictures: way name -> P times K pictures, those of a prompt side by side.
        prompts: the P prompts.
    """

    pictures: Mapping[str, Pictures]
    prompts: tuple[str, ...]

    def figures(self, score: PairScore, seed: int) -> dict[str, float | int]:
        """What the record says of a CLIP.

        `auc/<way>/<category>`: see `within_prompt_auc`, mean over the prompts that have right and wrong pictures.
        `gap/<way>`: mean score of right minus wrong pictures of a prompt. Of right pictures: `extra_thing/<way>`,
        the share that outscores its copy with one more thing in it, and `white_ground/<way>`, what a white ground
        adds to the score.
        """
        found = {}
        for way, pictures in self.pictures.items():
            captions = np.repeat(self.prompts, len(pictures.images) // len(self.prompts))
            scores, right = score(pictures.images, captions), pictures.right()
            found |= {
                f"{name}/{way}": value for name, value in _edited(score, pictures, captions, seed).items()
            }
            scores, right = (values.reshape(len(self.prompts), -1) for values in (scores, right))
            auc, categories = within_prompt_auc(scores, right), self._categories(pictures)
            mixed = ~np.isnan(auc)
            found[f"gap/{way}"] = np.mean(
                [s[r].mean() - s[~r].mean() for s, r in zip(scores[mixed], right[mixed], strict=True)]
            )
            for category in ("overall", *CATEGORIES):
                rows = mixed & (True if category == "overall" else categories == category)
                if rows.any():
                    found[f"auc/{way}/{category}"] = auc[rows].mean()
        return {name: round(float(value), 4) for name, value in found.items()}

    def _categories(self, pictures: Pictures) -> np.ndarray:
        each = len(pictures.subjects) // len(self.prompts)
        return np.array([subject.category for subject in pictures.subjects[::each]])


def _edited(score: PairScore, pictures: Pictures, captions: np.ndarray, seed: int) -> dict[str, float]:
    rows = np.flatnonzero(pictures.right())
    if not len(rows):
        return {}
    kept, asked = pictures.chosen(rows), list(captions[rows])
    plain = score(kept.images, asked)
    white, fuller = [], []
    for i, (image, blobs) in enumerate(zip(kept.images, kept.blobs, strict=True)):
        rng, source = noise.generator("held-out", seed, i), image.astype(np.float32)
        more = extra_thing(source, blobs, rng)
        white.append(with_ground(source, WHITE))
        fuller.append(source if more is None else more)
    white, fuller = (np.rint(np.clip(np.stack(edit), 0, 255)).astype(np.uint8) for edit in (white, fuller))
    still = read(fuller, kept.subjects).right()  # where there was no room, or the thing is not seen
    result = {"white_ground": float((score(white, asked) - plain).mean())}
    if not still.all():
        result["extra_thing"] = float((plain > score(fuller, asked))[~still].mean())
    return result
