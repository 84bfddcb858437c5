"""How different the images are that a model makes of one prompt."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from dancegrpo.evaluation.statistics import paired_mean_difference

DIVERSITY_IMAGES = 10


@dataclass(frozen=True)
class Diversity:
    """CLIP distance (1 - cosine) between images of one prompt, mean over pairs, then over prompts.

    A model that draws one right picture again and again has a high accuracy and a distance near 0.

    Attributes:
        by_prompt: (P,) float64, over all images of each prompt.
        accepted_by_prompt: (P,) over the images that the verifier accepts, NaN for a prompt with fewer than two of
            them; None without a verifier.
        images_per_prompt: what was sampled.
    """

    by_prompt: np.ndarray
    accepted_by_prompt: np.ndarray | None
    images_per_prompt: int

    @property
    def all(self) -> float:
        """Mean over the prompts, all images."""
        return float(self.by_prompt.mean())

    @property
    def accepted_prompts(self) -> int:
        """Prompts with two or more accepted images."""
        return 0 if self.accepted_by_prompt is None else int(np.isfinite(self.accepted_by_prompt).sum())

    @property
    def accepted(self) -> float | None:
        """Mean over the prompts with two or more accepted images; None if there is none."""
        if not self.accepted_prompts:
            return None
        return float(self.accepted_by_prompt[np.isfinite(self.accepted_by_prompt)].mean())

    def difference(self, other: Diversity) -> dict[str, dict[str, Any] | None]:
        """This minus the other, paired by prompt: `all`, and `accepted` over the prompts that have it in both.

        Each is an interval with the means of both sides over those prompts, `mean` and `compare_mean`; None with
        fewer than two prompts.
        """
        table = {"all": _paired(self.by_prompt, other.by_prompt)}
        if self.accepted_by_prompt is not None and other.accepted_by_prompt is not None:
            table["accepted"] = _paired(self.accepted_by_prompt, other.accepted_by_prompt)
        return table

    def to_dict(self) -> dict[str, Any]:
        """As it stands in the results, under `clip_distance`."""
        return {
            "clip_distance": {
                "accepted": self.accepted,
                "accepted_prompts": self.accepted_prompts,
                "all": self.all,
            },
            "prompts": len(self.by_prompt),
            "images_per_prompt": self.images_per_prompt,
        }


def _paired(first: np.ndarray, second: np.ndarray) -> dict[str, Any] | None:
    both = np.isfinite(first) & np.isfinite(second)
    interval = paired_mean_difference(first[both], second[both])
    if interval is None:
        return None
    return {
        "mean": float(first[both].mean()),
        "compare_mean": float(second[both].mean()),
        **interval.to_dict(),
    }


def diversity_of(features: np.ndarray, accepted: np.ndarray | None = None) -> Diversity:
    """Mean pairwise distances.

    Args:
        features: (P, K, D) of unit length, K images of each of P prompts.
        accepted: (P, K) bool; None without a verifier.
    """
    right = None
    if accepted is not None:
        right = [
            _mean_distance(group[mask]) if mask.sum() > 1 else np.nan
            for group, mask in zip(features, accepted, strict=True)
        ]
        right = np.array(right, np.float64)
    everything = np.array([_mean_distance(group) for group in features], np.float64)
    return Diversity(everything, right, features.shape[1])


def _mean_distance(features: np.ndarray) -> float:
    count = len(features)
    pairs = np.triu_indices(count, 1)
    return float((1.0 - features.astype(np.float64) @ features.T.astype(np.float64))[pairs].mean())
