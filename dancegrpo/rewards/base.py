"""Host rewards: a function of finished images, in plain Python and NumPy."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from dancegrpo.config import ReportedError

Metadata = Sequence[Mapping[str, Any]]


class RewardError(ReportedError):
    """A reward could not score its images; the message names the reward's label."""


class RewardFunction:
    """A reward that runs on the host.

    Set `group_wise = True` on a class whose scores compare candidates with each other: it is then called once
    per group, with all candidates of one prompt and no image of any other. Every other reward is called with
    any number of images, and the score of an image must not depend on the images beside it.
    """

    group_wise: bool = False

    def check(self, prompts: Sequence[str]) -> None:
        """Called once with all prompts of a run before anything expensive.

        Raises:
            ConfigError: a prompt cannot be scored by this reward. The default accepts every prompt.
        """

    def __call__(
        self, images: np.ndarray, prompts: Sequence[str], metadata: Metadata | None = None
    ) -> np.ndarray:
        """Scores of images.

        Args:
            images: (N, H, W, 3) uint8, 0 to 255; read-only, because other rewards see them too.
            prompts: N prompts, one for each image.
            metadata: N records of the prompt set (for example `{"category": "counting"}`), or None.

        Returns:
            (N,) float; higher is better. A NaN says that an image has no score: the trainer skips that update
            and counts it.
        """
        raise NotImplementedError(f"{type(self).__name__} must define __call__(images, prompts, metadata)")


class FunctionReward(RewardFunction):
    """A plain function `fn(images, prompts, metadata, **settings) -> scores` as a reward."""

    def __init__(self, function: Callable[..., Any], **settings: Any):
        self.function = function
        self.settings = settings
        self.group_wise = bool(getattr(function, "group_wise", False))

    def __call__(
        self, images: np.ndarray, prompts: Sequence[str], metadata: Metadata | None = None
    ) -> np.ndarray:
        return self.function(images, prompts, metadata, **self.settings)


def class_name(reward: Any) -> str:
    """The name that labels a reward by default: that of its class, or of its function."""
    if isinstance(reward, FunctionReward):
        return getattr(reward.function, "__name__", type(reward.function).__name__)
    return type(reward).__name__
