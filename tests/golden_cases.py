"""Golden cases of schedules, transitions and chains, and the toy model that the chains were made with."""

from pathlib import Path

import numpy as np
from mindspore import Tensor, nn, ops

_GOLDEN = Path(__file__).parent / "golden"


def golden(name: str) -> dict[str, np.ndarray]:
    """The arrays of one case."""
    return dict(np.load(_GOLDEN / f"{name}.npz"))


def assert_near(actual, expected, tolerance):
    """The golden set's measure: the largest deviation over the largest expected value."""
    actual = actual.asnumpy() if isinstance(actual, Tensor) else np.asarray(actual)
    assert actual.shape == expected.shape
    assert np.abs(actual - expected).max() <= tolerance * np.abs(expected).max()


class WeightedLogProb(nn.Cell):
    """Sum of weights times log-probabilities of given next latents, and the log-probabilities."""

    def __init__(self, transition):
        super().__init__()
        self.transition = transition

    def construct(self, output, sample, sigma, sigma_next, following, weight):
        log_prob = self.transition(output, sample, sigma, sigma_next, None, following)[4]
        return (log_prob * weight).sum(), log_prob


class ToyDenoiser(nn.Cell):
    """v(x, t) = tanh(a x) + b sin(t / 1000); tanh by sigmoid, because MindSpore's tanh on CPU is an approximation."""

    def __init__(self, a: float, b: float):
        super().__init__()
        self.a, self.b = float(a), float(b)

    def construct(self, latents, timestep):
        time = ops.sin(timestep / 1000.0).reshape((-1,) + (1,) * (latents.ndim - 1))
        return 2.0 * ops.sigmoid(2.0 * self.a * latents) - 1.0 + self.b * time
