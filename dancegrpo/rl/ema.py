"""Exponential moving average of weights: how the decay goes over the run, and the update."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from dancegrpo.diffusion.registry import Registry

DECAYS = Registry("EMA decay schedule")


def make_decay(name: str, **settings: Any) -> Callable[[int], float]:
    """The decay schedule of that name: a function of the update's number, from 0, to the decay in [0, 1).

    Names: constant, power, linear, piecewise_linear, cosine, warmup_cosine (Flow-Factory's `ema_utils`).

    Raises:
        ConfigError: unknown name or setting.
    """
    return DECAYS.build(name, **settings)


def ema_update(average: Any, value: Any, decay: Any) -> Any:
    """average + (1 - decay) (value - average), on arrays or tensors of any shape."""
    return average + (1.0 - decay) * (value - average)


@DECAYS.register("constant")
def constant(decay: float) -> Callable[[int], float]:
    """The same decay at every update."""
    return lambda step: decay


@DECAYS.register("power")
def power(decay: float, warmup_steps: float = 10.0) -> Callable[[int], float]:
    """min(decay, (1 + i) / (w + i)): short averages at first, so that the start does not weigh on them."""
    return lambda step: min(decay, (1.0 + step) / (warmup_steps + step))


@DECAYS.register("linear")
def linear(decay: float, initial_decay: float = 0.0, warmup_steps: float = 100.0) -> Callable[[int], float]:
    """From ``initial_decay`` to ``decay`` in a straight line over ``warmup_steps`` updates, then constant."""
    return lambda step: initial_decay + (decay - initial_decay) * min(step / warmup_steps, 1.0)


@DECAYS.register("piecewise_linear")
def piecewise_linear(
    decay: float, flat_steps: float = 0.0, ramp_rate: float = 1e-3
) -> Callable[[int], float]:
    """0 before ``flat_steps``, then rising by ``ramp_rate`` an update up to ``decay``."""
    return lambda step: min(max(step - flat_steps, 0.0) * ramp_rate, decay)


@DECAYS.register("cosine")
def cosine(decay: float, initial_decay: float = 0.0, total_steps: float = 1000.0) -> Callable[[int], float]:
    """From ``initial_decay`` to ``decay`` along half a cosine over ``total_steps`` updates, then constant."""
    return lambda step: initial_decay + (decay - initial_decay) * _half_cosine(step / total_steps)


@DECAYS.register("warmup_cosine")
def warmup_cosine(
    decay: float, initial_decay: float = 0.0, warmup_steps: float = 100.0, total_steps: float = 1000.0
) -> Callable[[int], float]:
    """``initial_decay`` i / w over ``warmup_steps`` updates, then along half a cosine to ``decay``."""
    rest = max(total_steps - warmup_steps, 1.0)

    def at(step: int) -> float:
        if step < warmup_steps:
            return initial_decay * step / warmup_steps
        return initial_decay + (decay - initial_decay) * _half_cosine((step - warmup_steps) / rest)

    return at


def _half_cosine(progress: float) -> float:
    return (1.0 - math.cos(math.pi * min(progress, 1.0))) / 2.0
