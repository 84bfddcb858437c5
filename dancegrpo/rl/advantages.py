"""From rewards to advantages. Host mathematics: a few hundred numbers per iteration."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from dancegrpo.diffusion.registry import Registry

ADVANTAGES = Registry("advantage rule")


def make_advantage_rule(name: str) -> Callable[..., np.ndarray]:
    """The rule of that name, ``rule(rewards, group_size, eps, clip) -> advantages``.

    Raises:
        ConfigError: unknown name.
    """
    return ADVANTAGES.find(name)


@ADVANTAGES.register("group_sample_std")
def group_advantages(
    rewards: np.ndarray, group_size: int, eps: float = 1e-8, clip: float = 5.0
) -> np.ndarray:
    """Group-relative advantages of GRPO: (r - group mean) / (group sample std + eps), clipped to +-clip.

    Source: DanceGRPO's trainer. A group whose rewards are all equal is dead: its advantages are exactly 0. It
    is told by max and min, before a mean is taken: the rounding error of a float32 mean is as large as the
    std of such a group, and their quotient can be 0.7.

    Args:
        rewards: (N,) finite numbers; the candidates of a prompt stand beside each other.
        group_size: candidates per prompt, at least 2.
        eps: added to the standard deviation.
        clip: bound of the result's magnitude.

    Returns:
        float32 (N,).

    Raises:
        ValueError: N does not divide into groups, or a reward is not finite.
    """
    rewards = np.asarray(rewards, np.float32)
    if rewards.ndim != 1 or group_size < 2 or rewards.size % group_size:
        raise ValueError(
            f"rewards of shape {rewards.shape} do not divide into groups of {group_size} (at least 2)"
        )
    if not np.isfinite(rewards).all():
        raise ValueError(
            f"rewards hold a value that is not finite, at index {np.flatnonzero(~np.isfinite(rewards))[0]}"
        )
    # float64 inside, so that the mean's rounding does not show in groups that differ by little
    groups = rewards.astype(np.float64).reshape(-1, group_size)
    spread = groups.std(axis=1, ddof=1, keepdims=True) + eps
    advantages = (groups - groups.mean(axis=1, keepdims=True)) / spread
    advantages[dead_groups(rewards, group_size)] = 0.0
    return np.clip(advantages, -clip, clip).astype(np.float32).reshape(-1)


def dead_groups(rewards: np.ndarray, group_size: int) -> np.ndarray:
    """bool (groups,): which groups have one reward for all candidates and so nothing to learn from."""
    groups = np.asarray(rewards).reshape(-1, group_size)
    return groups.max(axis=1) == groups.min(axis=1)


def most_informative_groups(rewards: np.ndarray, group_size: int, count: int) -> np.ndarray:
    """int (count,), ascending: the groups whose rewards differ most (by standard deviation; of equals the first).

    A group that is all right or all wrong costs as much to train on as any other and says nothing: to sample more
    groups than are trained is DAPO's dynamic sampling (Yu et al., 2025, section 3.2) with fixed shapes.
    """
    spread = np.asarray(rewards, np.float64).reshape(-1, group_size).std(axis=1)
    return np.sort(np.argsort(-spread, kind="stable")[:count])


def shuffle_in_groups(values: np.ndarray, group_size: int, generator: np.random.Generator) -> np.ndarray:
    """``values`` (N,) permuted within each group: the control that keeps statistics, not signal."""
    return generator.permuted(np.asarray(values).reshape(-1, group_size), axis=1).reshape(-1)
