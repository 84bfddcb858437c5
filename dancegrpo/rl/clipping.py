"""How far the probability ratio may move: the clip range, a plain number or so many spreads of the ratio."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from dancegrpo.config import TrainConfig

_MEMORY = 0.7  # of the running mean: the spread falls while AdamW finds its pace, and must not lag behind
_BOUND_EVERYWHERE = 0.9


class ClipRange:
    """`train.clip_range`, in the unit of `train.clip_unit`.

    "absolute": the range is the number itself. "spread": so many times the spread, the standard deviation of the
    ratio in the second update of a rollout, after exactly one step of the optimizer. The spread is the running mean
    of all rollouts before this one (recent ones count more), so the range is fixed within a rollout, and the first
    rollout, before which nothing was measured, is not clipped.

    Args:
        setting: `train.clip_range`. unit: `train.clip_unit`.

    Attributes:
        spread: the running mean; None while nothing was measured. rollouts: measurements in it.
    """

    def __init__(self, setting: float, unit: str = "absolute") -> None:
        self.setting, self.unit = setting, unit
        self.spread: float | None = None
        self.rollouts = 0

    @property
    def value(self) -> float:
        """The range of this rollout in units of the ratio; infinite: nothing is clipped yet."""
        if self.unit == "absolute":
            return self.setting
        return math.inf if self.spread is None else self.setting * self.spread

    def bounds(self) -> tuple[float, float]:
        """The lowest and the highest ratio within the range."""
        return 1.0 - self.value, 1.0 + self.value

    def observe(self, spread: float) -> None:
        """Takes in the spread that a rollout showed; not-a-number and 0 (the weights stood still) tell nothing."""
        if not spread > 0:
            return
        self.rollouts += 1
        keep = min(1.0 - 1.0 / self.rollouts, _MEMORY)  # a plain mean at first
        self.spread = keep * (self.spread or 0.0) + (1.0 - keep) * spread

    def state(self) -> dict[str, Any]:
        """What `restore` needs."""
        return {"clip_spread": self.spread, "clip_rollouts": self.rollouts}

    def restore(self, counters: Mapping[str, Any]) -> None:
        """The inverse of `state`; a checkpoint from before there were spreads has measured none."""
        self.spread, self.rollouts = counters.get("clip_spread"), counters.get("clip_rollouts", 0)

    def __str__(self) -> str:
        return range_text(self.setting, self.unit, self.value)


def range_text(setting: float, unit: str, value: float) -> str:
    """A clip range in words: "0.01", or "2 spreads = 0.00042"."""
    if unit == "absolute":
        return f"{setting:g}"
    return f"{setting:g} spreads{f' = {value:.2g}' if math.isfinite(value) else ', not measured yet'}"


def clip_verdict(rows: Sequence[Mapping[str, Any]], train: TrainConfig) -> str | None:
    """One sentence about a clip range that did nothing or stopped everything; None if it did its work.

    Args:
        rows: of metrics.jsonl.
        train: the run's settings.
    """
    if train.updates_per_rollout == 1:
        return (
            "the clip range was never used: with train.updates_per_rollout = 1 every ratio is taken before the "
            "weights change, and is 1"
        )
    clipped = [row for row in rows if row.get("ratio/spread") and row.get("ratio/clip_range")]
    if not clipped:
        return None
    outside = float(np.mean([_fraction_after_the_first(row, train.updates_per_rollout) for row in clipped]))
    text = range_text(train.clip_range, train.clip_unit, clipped[-1]["ratio/clip_range"])
    spread = float(np.mean([row["ratio/spread"] for row in clipped]))
    advice = f"2 to 3 spreads ({2 * spread:.1e} to {3 * spread:.1e}"
    advice += ", or train.clip_unit=spread)" if train.clip_unit == "absolute" else ")"
    measured = f"the ratio's spread after one update is {spread:.1e}"
    if outside == 0:
        count = f"{len(clipped)} iteration{'s' if len(clipped) > 1 else ''}"
        return f"the clip range ({text}) never bound in {count}: {measured}; {advice} would bind"
    if outside > _BOUND_EVERYWHERE:
        return (
            f"the clip range ({text}) bound nearly everywhere: {outside:.0%} of the transitions after the first "
            f"update of a rollout lay outside it, so later updates did little; {measured}; {advice} would let "
            "them act"
        )
    return None


def _fraction_after_the_first(row: Mapping[str, Any], updates: int) -> float:
    """`ratio/clip_fraction` is the mean over all applied updates, of which the first is always at 0."""
    applied = updates - row["skipped"]
    return row["ratio/clip_fraction"] * applied / (applied - 1)
