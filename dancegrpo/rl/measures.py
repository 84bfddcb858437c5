"""The numbers that an iteration leaves in metrics.jsonl."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from dancegrpo.rl.advantages import dead_groups
from dancegrpo.rl.update import UpdateStats


def group_metrics(rewards: np.ndarray, group_size: int) -> dict[str, float]:
    """`groups/dead`: the share of groups in which all candidates have the same total reward (N,)."""
    return {"groups/dead": float(dead_groups(rewards, group_size).mean())}


def reward_metrics(scores: Mapping[str, np.ndarray], group_size: int) -> dict[str, float]:
    """Per label: the mean of all scores, and the mean over groups of the sample standard deviation in them.

    Args:
        scores: label -> (N,). group_size: candidates per prompt, side by side.
    """
    metrics = {}
    for label, values in scores.items():
        groups = np.asarray(values, np.float64).reshape(-1, group_size)
        metrics[f"reward/{label}/mean"] = float(groups.mean())
        with np.errstate(invalid="ignore"):  # infinite scores have no spread, and are reported as such
            metrics[f"reward/{label}/group_std"] = float(groups.std(axis=1, ddof=1).mean())
    return metrics


def update_metrics(
    measured: Sequence[UpdateStats], clip_range: float, learning_rate: float, skipped: int
) -> dict[str, float]:
    """Means over the updates of an iteration that were applied; not-a-number where there was none.

    The spread is that of the second applied update: its transitions are the first that are scored by weights which
    exactly one step of the optimizer has moved.
    """
    applied = [stats for stats in measured if stats.finite]

    def mean(name: str) -> float:
        return float(np.mean([getattr(stats, name) for stats in applied])) if applied else float("nan")

    return {
        "ratio/first_max_deviation": measured[0].ratio_deviation if measured else float("nan"),
        "ratio/mean": mean("ratio_mean"),
        "ratio/spread": applied[1].ratio_spread if len(applied) > 1 else float("nan"),
        "ratio/clip_range": clip_range,
        "ratio/clip_fraction": mean("clip_fraction"),
        "loss/policy": mean("policy_loss"),
        "loss/kl": mean("kl_loss"),
        "grad/norm": mean("grad_norm"),
        "lr": learning_rate,
        "skipped": skipped,
    }
