"""The gradient graphs: score a micro-batch of transitions, add up gradients, and step the optimizer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, nn, ops

from dancegrpo.config import Config
from dancegrpo.diffusion.sampler import PolicyStep
from dancegrpo.rl.clipping import ClipRange
from dancegrpo.rl.ema import make_decay
from dancegrpo.rl.objectives import kl_on_means
from dancegrpo.rl.optim import ApplyGradients, FlatParameters, LossScale, make_adamw
from dancegrpo.rl.run_state import RunState


@dataclass(frozen=True)
class TransitionBatch:
    """A micro-batch of B transitions, as host arrays, float32.

    latents, following: (B, ...) latents before and after the step. sigmas, sigmas_next, timesteps: (B,).
    log_probs, advantages: (B,). conditions: what the denoiser takes, each (B, ...).
    reference_means: (B, ...) the frozen reference's means, or None.
    """

    latents: np.ndarray
    following: np.ndarray
    sigmas: np.ndarray
    sigmas_next: np.ndarray
    timesteps: np.ndarray
    log_probs: np.ndarray
    advantages: np.ndarray
    conditions: tuple[np.ndarray, ...]
    reference_means: np.ndarray | None = None


@dataclass(frozen=True)
class UpdateStats:
    """What one update measured before it was applied; sums over its transitions where not said otherwise.

    policy_loss, kl_loss: the two terms, already divided by the count (kl without its weight).
    ratio_deviation: max |ratio - 1|. ratio_mean, clip_fraction: means. ratio_spread: standard deviation.
    grad_norm: global norm before clipping.
    """

    policy_loss: float
    kl_loss: float
    ratio_deviation: float
    ratio_mean: float
    ratio_spread: float
    clip_fraction: float
    grad_norm: float

    @property
    def finite(self) -> bool:
        """Whether the update may be applied."""
        return bool(np.isfinite([self.policy_loss, self.kl_loss, self.grad_norm]).all())


class PolicyLoss(nn.Cell):
    """Loss of a micro-batch: sum of the objective over its transitions, over the count of the whole update.

    Args:
        policy_step: the cell that the rollout used.
        objective: see `rl.objectives.make_objective`.
        count: transitions of the update, over all micro-batches and ranks; dead ones count too.
        kl_weight: weight of the KL divergence to the reference; above 0 needs ``reference_means``.
    """

    def __init__(
        self, policy_step: PolicyStep, objective: nn.Cell, count: int, kl_weight: float = 0.0
    ) -> None:
        super().__init__(auto_prefix=False)  # parameters keep their names: they belong to the model
        self.policy_step, self.objective = policy_step, objective
        self.share, self.kl_weight = 1.0 / count, float(kl_weight)

    def construct(
        self,
        loss_scale,
        lowest,
        highest,
        reference_means,
        latents,
        following,
        sigma,
        sigma_next,
        timestep,
        log_prob_old,
        advantages,
        *conditions,
    ):
        """Returns the scaled loss () and the statistics (7,): policy term, KL, max |r - 1|, and the sums of r,
        clipped, r - 1 and its square."""
        _, mean, std, _, log_prob = self.policy_step(
            latents, sigma, sigma_next, timestep, None, following, *conditions
        )
        policy, ratio, clipped = self.objective(log_prob, log_prob_old, advantages, lowest, highest)
        policy = policy.sum() * self.share
        loss, kl = policy, ops.zeros_like(policy)
        if self.kl_weight > 0.0:
            pace = self.policy_step.transition.step_size(sigma, sigma_next)
            kl = kl_on_means(mean, reference_means, std.reshape(-1) / ops.sqrt(pace)).sum() * self.share
            loss = policy + self.kl_weight * kl
        deviation = ratio - 1.0
        stats = ops.stack(
            (
                policy,
                kl,
                ops.abs(deviation).max(),
                ratio.sum(),
                clipped.sum(),
                deviation.sum(),  # not the sum of r less the count: that would round the small difference away
                (deviation * deviation).sum(),
            )
        )
        return loss * loss_scale, stats


class AccumulateGradients(nn.Cell):
    """Forward and backward of one micro-batch; adds its gradients to the flat buffer.

    Takes ``keep``, () float, 0 for the first micro-batch of an update (what the buffer held is dropped) and 1
    for the others, and then what `PolicyLoss` takes. Returns the statistics and the global norm (without loss
    scale) of all gradients added so far, (8,).
    """

    def __init__(self, loss: PolicyLoss, flat: FlatParameters, gradients: Parameter) -> None:
        super().__init__(auto_prefix=False)  # parameters keep their names: they belong to the model
        self.loss, self.gradients = loss, gradients
        self.gradient_of = ms.value_and_grad(loss, None, flat.parameters, has_aux=True)
        self.half_sum_of_squares = ops.L2Loss()

    def construct(self, keep, loss_scale, *inputs):
        (_, stats), gradients = self.gradient_of(loss_scale, *inputs)
        parts = ()
        for gradient in gradients:
            parts += (ops.cast(gradient, ms.float32).reshape(-1),)
        total = self.gradients * keep + ops.cat(parts)
        norm = ops.sqrt(2.0 * self.half_sum_of_squares(total)) / loss_scale
        ops.assign(self.gradients, total)
        return ops.cat((ops.stop_gradient(stats), norm.reshape((1,))))


class PolicyUpdater:
    """The trained weights and everything that changes them.

    One update is: ``accumulate`` for each micro-batch, ``stats``, and then ``apply`` or ``discard``.

    Args:
        policy_step: the cell that the rollout used.
        parameters: its parameters that are trained.
        objective: see `rl.objectives.make_objective`.
        config: sections ``train`` and ``precision``.
        transitions_per_update: the constant count that the loss is divided by.

    Attributes:
        flat: the trained weights. average: their moving average, or None. steps: updates applied so far.
        clip_range: what ratios are clipped to.
        learning_rate: that of the last applied update.
    """

    def __init__(
        self,
        policy_step: PolicyStep,
        parameters: Sequence[Parameter],
        objective: nn.Cell,
        config: Config,
        transitions_per_update: int,
    ) -> None:
        train = config.train
        self.flat = FlatParameters(parameters)
        self.gradients = Parameter(Tensor(np.zeros(self.flat.size, np.float32)), name="flat.gradients")
        self.average = None
        if train.ema_decay > 0:
            self.average = Parameter(Tensor(self.flat.weights.asnumpy().copy()), name="flat.average")
        updates = train.updates_per_rollout
        self.optimizer = make_adamw(
            self.flat, train, train.iterations * updates, train.warmup_iterations * updates
        )
        self.decay_at = make_decay("power" if train.ema_warmup else "constant", decay=train.ema_decay)
        self.loss_scale = LossScale.of(config.precision.compute)
        self.clip_range = ClipRange(train.clip_range, train.clip_unit)
        self.steps, self.learning_rate = 0, 0.0
        self.count = transitions_per_update
        loss = PolicyLoss(policy_step, objective, transitions_per_update, train.kl_weight)
        self._accumulate = AccumulateGradients(loss, self.flat, self.gradients)
        self._apply = ApplyGradients(
            self.flat, self.optimizer, self.gradients, train.max_grad_norm, self.average
        )
        self._stats: list[Tensor] = []

    def accumulate(self, batch: TransitionBatch) -> None:
        """Adds the gradients of a micro-batch."""
        arrays = (
            batch.latents,
            batch.following,
            batch.sigmas,
            batch.sigmas_next,
            batch.timesteps,
            batch.log_probs,
            batch.advantages,
            *batch.conditions,
        )
        reference = None if batch.reference_means is None else Tensor(batch.reference_means)
        scale = Tensor(self.loss_scale.value, ms.float32)
        keep = Tensor(1.0 if self._stats else 0.0, ms.float32)
        ends = (Tensor(end, ms.float32) for end in self.clip_range.bounds())
        # The statistics stay on the device until the update is complete.
        self._stats.append(
            self._accumulate(keep, scale, *ends, reference, *(Tensor(array) for array in arrays))
        )

    def stats(self) -> UpdateStats:
        """The statistics of the micro-batches since the last ``apply`` or ``discard``."""
        rows = np.stack([stats.asnumpy() for stats in self._stats]).astype(np.float64)
        policy, kl, _, ratio, clipped, deviation, square, _ = rows.sum(axis=0)
        variance = square / self.count - (deviation / self.count) ** 2
        return UpdateStats(
            policy_loss=policy,
            kl_loss=kl,
            ratio_deviation=rows[:, 2].max(),
            ratio_mean=ratio / self.count,
            ratio_spread=float(np.sqrt(max(variance, 0.0))),
            clip_fraction=clipped / self.count,
            grad_norm=rows[-1, 7],
        )

    def apply(self) -> float:
        """Steps the optimizer; returns the learning rate."""
        norm = self._stats[-1][7]
        decay = self.decay_at(self.steps) if self.average is not None else 0.0
        rate = self._apply(norm, Tensor(self.loss_scale.value, ms.float32), Tensor(decay, ms.float32))
        self.learning_rate = float(f"{float(rate.asnumpy()):.7g}")  # float32: no digits that mean nothing
        self.steps += 1
        self.loss_scale.step(finite=True)
        self._stats.clear()
        return self.learning_rate

    def state(self, counters: Mapping[str, Any]) -> RunState:
        """Weights, moments, average and counters, with the trainer's ``counters`` added."""
        split = self.flat.split
        own = {
            "updates": self.steps,
            "optimizer_step": int(self.optimizer.global_step.asnumpy()[0]),
            "learning_rate": self.learning_rate,
            "loss_scale": self.loss_scale.value,
            "loss_scale_good_steps": self.loss_scale.good_steps,
        }
        return RunState(
            policy=split(self.flat.weights.asnumpy()),
            first_moments=split(self.optimizer.exp_avg[0].asnumpy()),
            second_moments=split(self.optimizer.exp_avg_sq[0].asnumpy()),
            average=None if self.average is None else split(self.average.asnumpy()),
            counters={**counters, **own, **self.clip_range.state()},
        )

    def restore(self, state: RunState) -> None:
        """The inverse of `state`.

        Raises:
            ConfigError: the state is of another model.
        """
        join = self.flat.join
        self.flat.load(join(state.policy))
        self.optimizer.exp_avg[0].set_data(Tensor(join(state.first_moments)))
        self.optimizer.exp_avg_sq[0].set_data(Tensor(join(state.second_moments)))
        if self.average is not None:
            self.average.set_data(Tensor(join(state.average)))
        counters = state.counters
        self.optimizer.global_step.set_data(Tensor([counters["optimizer_step"]], ms.int32))
        self.steps, self.learning_rate = counters["updates"], counters["learning_rate"]
        self.loss_scale.value = counters["loss_scale"]
        self.loss_scale.good_steps = counters["loss_scale_good_steps"]
        self.clip_range.restore(counters)

    def discard(self) -> str:
        """Drops the gradients without a step; returns the name of the first tensor that was not finite."""
        name = self.flat.first_bad(self.gradients.asnumpy())
        # Zeros, not only keep = 0 in the next call: 0 times NaN is NaN.
        self.gradients.set_data(Tensor(np.zeros(self.flat.size, np.float32)))
        self.loss_scale.step(finite=False)
        self._stats.clear()
        return f"the gradient of {name}" if name else "the loss"
