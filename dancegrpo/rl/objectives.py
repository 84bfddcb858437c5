"""Loss terms of a batch of transitions, on tensors; static-graph Python, usable inside `construct`."""

from __future__ import annotations

from typing import Any

from mindspore import Tensor, nn, ops

from dancegrpo.diffusion.registry import Registry

OBJECTIVES = Registry("objective")


def make_objective(name: str, **settings: Any) -> nn.Cell:
    """The policy objective of that name ("clipped_surrogate"), a Cell called as
    ``(log_prob_new, log_prob_old, advantages, lowest, highest)``: three float32 (B,), and the ends of the clip
    range as () float32 (inputs of the graph, so that they can change without a compilation). It returns
    ``loss, ratio, clipped``, each float32 (B,): the loss of each transition, its probability ratio new/old, and
    1 where the ratio lies outside the clip range.

    Raises:
        ConfigError: unknown name or setting.
    """
    return OBJECTIVES.build(name, **settings)


def probability_ratio(log_prob_new: Tensor, log_prob_old: Tensor) -> Tensor:
    """exp(new - old): exactly 1 where both are the same number.

    By expm1, because MindSpore's exp on CPU is an approximation (4e-6), as coarse as small clip ranges.
    """
    return 1.0 + ops.expm1(log_prob_new - log_prob_old)


def clipped_surrogate(
    log_prob_new: Tensor,
    log_prob_old: Tensor,
    advantages: Tensor,
    clip_low: float,
    clip_high: float | None = None,
) -> Tensor:
    """The clipped surrogate of PPO (Schulman et al. 2017, eq. 7), as a loss per transition.

    max(-A r, -A clip(r, 1 - |clip_low|, 1 + |clip_high|)) with r = exp(new - old). Its gradient with respect
    to ``log_prob_new`` is exactly 0 where the clipped branch is the larger one.

    Args:
        log_prob_new, log_prob_old, advantages: (B,) float32.
        clip_low: how far the ratio may fall below 1; the sign does not matter.
        clip_high: how far it may rise above 1; None: the same distance.

    Returns:
        (B,) float32; not averaged.
    """
    if clip_high is None:
        clip_high = clip_low
    ratio = probability_ratio(log_prob_new, log_prob_old)
    return surrogate_of_ratio(ratio, advantages, 1.0 - abs(clip_low), 1.0 + abs(clip_high))


def surrogate_of_ratio(ratio: Tensor, advantages: Tensor, lowest, highest) -> Tensor:
    """max(-A r, -A clip(r, lowest, highest)), (B,); the ends are numbers or () tensors."""
    return ops.maximum(-advantages * ratio, -advantages * ops.clamp(ratio, lowest, highest))


@OBJECTIVES.register("clipped_surrogate")
class ClippedSurrogate(nn.Cell):
    """`clipped_surrogate` as an objective."""

    def construct(self, log_prob_new, log_prob_old, advantages, lowest, highest):
        ratio = probability_ratio(log_prob_new, log_prob_old)
        loss = surrogate_of_ratio(ratio, advantages, lowest, highest)
        outside = ops.logical_or(ratio < lowest, ratio > highest)
        return loss, ratio, outside.astype(loss.dtype)


def kl_on_means(mean: Tensor, mean_reference: Tensor, std: Tensor) -> Tensor:
    """KL divergence of Gaussians that share a std, averaged over the latents: <(m - m_ref)^2> / (2 std^2).

    The trainer gives the std without its time-step factor (std / sqrt(-dt)), as Flow-GRPO does (Liu et al.
    2025, arXiv 2505.05470, section 4.1), so that a weight means the same at any number of steps.

    Args:
        mean, mean_reference: (B, ...) float32.
        std: () or (B, 1, ...).

    Returns:
        (B,) float32, at least 0.
    """
    squares = ops.square(mean - mean_reference).reshape((mean.shape[0], -1)).mean(axis=-1)
    std = std.reshape(-1)
    return squares / (2.0 * std * std)


def half_squared_log_ratio(log_prob_new: Tensor, log_prob_old: Tensor) -> Tensor:
    """(new - old)^2 / 2 per transition: a penalty on leaving the old policy without a reference (MixGRPO)."""
    return 0.5 * ops.square(log_prob_new - log_prob_old)
