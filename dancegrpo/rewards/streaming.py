"""Scores of images that arrive part by part: host rewards work on one part while the next one is sampled."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import numpy as np

from dancegrpo.rewards.base import Metadata

if TYPE_CHECKING:
    from dancegrpo.rewards.composition import HostImages, RewardSet


class ScoreStream:
    """The scores of one rollout, see `RewardSet.stream`.

    ``add`` starts the host rewards on a part in a thread of their own, one part after the other, and returns at once;
    ``finish`` waits for them. Reward cells, which share the device with the sampling, run in ``finish``.
    """

    def __init__(self, rewards: RewardSet, worker: ThreadPoolExecutor):
        self._rewards, self._worker = rewards, worker
        self._waiting: list[tuple[HostImages, Sequence[str], Metadata | None]] = []
        self._futures: list[Future] = []

    def add(self, images: Any, prompts: Sequence[str], metadata: Metadata | None = None) -> None:
        """Start on the next images, (B, 3, H, W) float in [0, 1]; a group may be split over two parts."""
        if not self._rewards.needs_host_images:
            return
        self._waiting.append((self._rewards.to_host(images), prompts, metadata))
        count = sum(len(part[1]) for part in self._waiting)
        if count % self._rewards.host_group_size == 0:
            parts, self._waiting = self._waiting, []
            self._futures.append(self._worker.submit(self._score, parts))

    def finish(
        self, images: Any, prompts: Sequence[str], metadata: Metadata | None = None
    ) -> dict[str, np.ndarray]:
        """The scores of all images that were added, given once more as a whole; see `RewardSet.score`.

        Raises:
            RewardError: a reward failed in any of the parts.
        """
        parts = [future.result() for future in self._futures]
        host = {label: np.concatenate([part[label] for part in parts]) for label in parts[0]} if parts else {}
        return self._rewards.score(images, prompts, metadata, host)

    def _score(self, parts: list) -> dict[str, np.ndarray]:
        hosts, prompts, metadata = zip(*parts, strict=True)
        records = None if metadata[0] is None else [record for part in metadata for record in part]
        return self._rewards.score_on_host(
            type(hosts[0]).join(hosts), [prompt for part in prompts for prompt in part], records
        )
