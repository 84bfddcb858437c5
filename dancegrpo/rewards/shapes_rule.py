"""The rule reward of the shapes world: does the image show what its prompt says?"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dancegrpo.config import ConfigError, choices_text
from dancegrpo.data.shapes_world import scene_of
from dancegrpo.rewards.base import Metadata, RewardFunction
from dancegrpo.rewards.shapes_verifier import verify_batch

MODES = ("score", "correct", "mixed")


class ShapesRuleReward(RewardFunction):
    """Reads the picture's objects from its pixels and compares them with the scene that the prompt names.

    Modes: `score` gives partial credit in [0, 1], so that a group in which no image is right can still be
    ranked; `correct` is 1 for a right image and 0 for every other; `mixed` is the mean of both.
    """

    def __init__(self, mode: str = "score"):
        if mode not in MODES:
            raise ConfigError(
                f"reward.terms: shapes_rule: unknown mode {mode!r}; {choices_text(str(mode), MODES)}"
            )
        self.mode = mode

    def check(self, prompts: Sequence[str]) -> None:
        """Refuses prompts that are no captions of the shapes world."""
        strange = [prompt for prompt in dict.fromkeys(prompts) if scene_of(prompt) is None]
        if strange:
            others = f" (and {len(strange) - 1} more)" if len(strange) > 1 else ""
            raise ConfigError(
                "reward.terms: shapes_rule scores shapes-world captions only, such as 'a red circle to "
                f"the left of a blue square', not {strange[0]!r}{others}; choose another reward"
            )

    def __call__(
        self, images: np.ndarray, prompts: Sequence[str], metadata: Metadata | None = None
    ) -> np.ndarray:
        """(N, 64, 64, 3) uint8 and N captions to (N,) float32 in [0, 1]."""
        verdicts = verify_batch(images, [_scene(prompt) for prompt in prompts])
        score = np.array([verdict.score for verdict in verdicts], np.float32)
        correct = np.array([verdict.correct for verdict in verdicts], np.float32)
        return {"score": score, "correct": correct, "mixed": (score + correct) / 2}[self.mode]


def _scene(prompt: str):
    scene = scene_of(prompt)
    if scene is None:
        raise ConfigError(
            f"reward.terms: shapes_rule cannot score {prompt!r}: it is no caption of the shapes world."
        )
    return scene
