"""Nothing that is not finite reaches the weights, and a clip range below the numerical noise is refused."""

from __future__ import annotations

import math
import sys

from tqdm import tqdm

from dancegrpo.config import ConfigError, ReportedError
from dancegrpo.rl.clipping import ClipRange


class NotFinite(ReportedError):
    """Too many updates in a row were skipped; the message names the first tensor that was not finite."""


class FiniteGuard:
    """Counts skipped updates and stops a run that only skips.

    Args:
        max_skipped: updates in a row that are skipped before the run stops (`train.max_skipped`).

    Attributes:
        in_row: updates skipped since the last one that was applied.
    """

    def __init__(self, max_skipped: int) -> None:
        self.max_skipped, self.in_row = max_skipped, 0

    def applied(self) -> None:
        """Tells that an update was applied."""
        self.in_row = 0

    def skipped(self, bad: str, iteration: int, last_good: str) -> None:
        """Tells that an update was skipped.

        Args:
            bad: what was not finite. iteration: where. last_good: the last good checkpoint, for the message.

        Raises:
            NotFinite: it was one too many.
        """
        self.in_row += 1
        tqdm.write(
            f"iteration {iteration}: {bad} is not finite, the update is skipped ({self.in_row} in a row)",
            file=sys.stderr,
        )
        if self.in_row >= self.max_skipped:
            raise NotFinite(
                f"stopped at iteration {iteration}: {self.in_row} updates in a row were not finite "
                f"(train.max_skipped); the first bad tensor is {bad}; the last good checkpoint is {last_good}"
            )


class RatioCheck:
    """Looks at the probability ratio before any update of a rollout, where it should be exactly 1.

    Args:
        clip_range: the range that ratios are clipped to.
    """

    def __init__(self, clip_range: ClipRange) -> None:
        self.clip_range = clip_range
        self._seen = self._compared = self._warned = False

    def look(self, deviation: float) -> None:
        """Prints the first deviation that it is given, and compares each with the clip range, if there is one yet.

        A range that does not lie above the deviation clips rounding errors. The first comparison refuses it; where a
        later one fails, of a run that has trained for a while, a warning is given once.

        Args:
            deviation: max |ratio - 1| in the first update of a rollout.

        Raises:
            ConfigError: see above.
        """
        clip_range = self.clip_range
        if not self._seen:
            self._seen = True
            text = f"ratio new/old before the first update: at most {deviation:.3g} away from 1"
            tqdm.write(f"{text} (clip range {clip_range})", file=sys.stdout)
        if math.isinf(clip_range.value):
            return
        first, self._compared = not self._compared, True
        if deviation < clip_range.value:
            return
        text = (
            f"train.clip_range = {clip_range} lies below the numerical noise of the probability "
            f"ratio: before any update, where it should be 1, it deviates by {deviation:.3g} on this "
            "device at this precision; use a larger train.clip_range or precision.compute=float32"
        )
        if first:
            raise ConfigError(text)
        if not self._warned:
            self._warned = True
            tqdm.write(f"warning: {text}", file=sys.stderr)
