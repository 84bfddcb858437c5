"""The optimizer: flat parameters, AdamW and learning-rate schedules of mindformers, clipping, loss scale.

All trained weights live in one flat float32 vector, and so do their gradients and moments. A hundred and more
parameter tensors would make thousands of tiny kernels and seconds of compilation; one vector makes a dozen,
and it can later be cut evenly over ranks. The vector is also the float32 master copy of models in other
formats.

MindFormers keeps the frame that imports it alive for ever, and with it the local variables of all callers. So it is
imported here, with the module, and not by a function that a trainer stands in.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import mindspore as ms
import numpy as np
from mindformers.core.lr import ConstantWarmUpLR, CosineWithWarmUpLR, LinearWithWarmUpLR
from mindformers.core.optim import AdamW
from mindspore import Parameter, Tensor, nn, ops

from dancegrpo.config import ConfigError, TrainConfig
from dancegrpo.rl.ema import ema_update

NORM_EPSILON = 1e-6
"""Added to the norm before dividing by it, as PyTorch's `clip_grad_norm_` does."""


class FlatParameters:
    """The layout of parameters in a flat vector, and the vector itself.

    Args:
        parameters: the trained parameters, in a fixed order.

    Attributes:
        parameters: as given. names, shapes: theirs. size: number of weights.
        weights: Parameter, float32 (size,): the master copy.
    """

    def __init__(self, parameters: Sequence[Parameter]) -> None:
        if not parameters:
            raise ValueError("there are no trainable parameters")
        self.parameters = ms.ParameterTuple(parameters)
        self.names = [parameter.name for parameter in parameters]
        self.shapes = [tuple(parameter.shape) for parameter in parameters]
        ends = np.cumsum([int(np.prod(shape, dtype=np.int64)) for shape in self.shapes]).tolist()
        self.ranges = list(zip([0, *ends[:-1]], ends, strict=True))
        self.size = ends[-1]
        self.weights = Parameter(Tensor(self._read()), name="flat.weights")

    def _read(self) -> np.ndarray:
        return np.concatenate([p.asnumpy().astype(np.float32).reshape(-1) for p in self.parameters])

    def show(self, flat: np.ndarray) -> None:
        """Puts a float32 (size,) vector into the model's own parameters; the master copy stays as it is."""
        for parameter, (start, end), shape in zip(self.parameters, self.ranges, self.shapes, strict=True):
            parameter.set_data(Tensor(flat[start:end].reshape(shape), parameter.dtype))

    def load(self, flat: np.ndarray) -> None:
        """Puts a float32 (size,) vector into the master copy and the model."""
        self.weights.set_data(Tensor(flat))
        self.show(flat)

    def split(self, flat: np.ndarray) -> dict[str, np.ndarray]:
        """name -> array of the parameter's shape."""
        return {
            name: flat[start:end].reshape(shape)
            for name, (start, end), shape in zip(self.names, self.ranges, self.shapes, strict=True)
        }

    def join(self, arrays: Mapping[str, np.ndarray]) -> np.ndarray:
        """The inverse of `split`.

        Raises:
            ConfigError: names or shapes are not this model's.
        """
        missing = [name for name in self.names if name not in arrays]
        extra = [name for name in arrays if name not in set(self.names)]
        if missing or extra:
            raise ConfigError(
                f"saved weights are of another model: {len(missing)} parameters are missing "
                f"{missing[:1]}, {len(extra)} are unknown {extra[:1]}"
            )
        for name, shape in zip(self.names, self.shapes, strict=True):
            if tuple(arrays[name].shape) != shape:
                raise ConfigError(
                    f"saved weights are of another model: {name} has shape {arrays[name].shape}, "
                    f"the model's is {shape}"
                )
        return np.concatenate([np.asarray(arrays[name], np.float32).reshape(-1) for name in self.names])

    def first_bad(self, flat: np.ndarray) -> str | None:
        """Name of the first parameter whose part of ``flat`` holds a value that is not finite."""
        bad = np.flatnonzero(~np.isfinite(flat))
        if not bad.size:
            return None
        ends = [end for _, end in self.ranges]
        return self.names[int(np.searchsorted(ends, bad[0], side="right"))]


def make_learning_rate(
    name: str, learning_rate: float, *, total_steps: int, warmup_steps: int = 0
) -> nn.Cell:
    """A mindformers schedule: linear warm-up, then constant, half a cosine to 0, or a line to 0.

    Args:
        name: "constant", "cosine" or "linear".
        learning_rate: its peak.
        total_steps: optimizer steps of the run; warmup_steps: those of the warm-up, whose first step already
            has learning_rate / warmup_steps (a step of size 0 would be a rollout for nothing).
    """
    schedules = {"constant": ConstantWarmUpLR, "cosine": CosineWithWarmUpLR, "linear": LinearWithWarmUpLR}
    if name not in schedules:
        raise ConfigError(f"train.lr_schedule: unknown schedule {name!r} (valid: {', '.join(schedules)})")
    start = learning_rate / warmup_steps if warmup_steps else 0.0
    return schedules[name](
        learning_rate=float(learning_rate),
        total_steps=int(total_steps),
        warmup_steps=int(warmup_steps),
        warmup_lr_init=float(start),
    )


def make_adamw(flat: FlatParameters, train: TrainConfig, total_steps: int, warmup_steps: int) -> nn.Cell:
    """mindformers' AdamW (decoupled decay, bias correction; equals PyTorch's) on the flat weights."""
    schedule = make_learning_rate(
        train.lr_schedule, train.learning_rate, total_steps=total_steps, warmup_steps=warmup_steps
    )
    return AdamW(
        [flat.weights],
        learning_rate=schedule,
        betas=(train.beta1, train.beta2),
        eps=train.adam_epsilon,
        weight_decay=float(train.weight_decay),
    )


def clip_factor(norm: Tensor, max_norm: float) -> Tensor:
    """min(1, max_norm / (norm + 1e-6))."""
    return ops.minimum(max_norm / (norm + NORM_EPSILON), ops.ones_like(norm))


class ApplyGradients(nn.Cell):
    """One optimizer step in one graph: clip by global norm, AdamW, write back to the model, EMA.

    Args:
        flat: the weights. optimizer: AdamW on ``flat.weights``. gradients: Parameter float32 (size,).
        max_norm: bound of the global norm.
        average: Parameter float32 (size,), the moving average, or None.
    """

    def __init__(
        self,
        flat: FlatParameters,
        optimizer: nn.Cell,
        gradients: Parameter,
        max_norm: float,
        average: Parameter | None = None,
    ) -> None:
        super().__init__(auto_prefix=False)  # parameters keep their names: they belong to others
        self.parameters = flat.parameters
        self.places = tuple(
            (start, end, shape) for (start, end), shape in zip(flat.ranges, flat.shapes, strict=True)
        )
        self.gradients, self.average = gradients, average
        self.optimizer, self.max_norm = optimizer, float(max_norm)

    def construct(self, norm, loss_scale, ema_decay):
        """norm: of the gradients without loss scale; all arguments and the learning rate returned are ()."""
        rate = self.optimizer.get_lr()
        gradients = self.gradients * (clip_factor(norm, self.max_norm) / loss_scale)
        # The step's result is taken as a value: a read of the parameter itself can be moved before the step.
        weights = self.optimizer((gradients,))[0]
        for index in range(len(self.places)):
            start, end, shape = self.places[index]
            parameter = self.parameters[index]
            ops.assign(parameter, ops.cast(weights[start:end].reshape(shape), parameter.dtype))
        if self.average is not None:
            ops.assign(self.average, ema_update(self.average, weights, ema_decay))
        return rate


@dataclass
class LossScale:
    """Dynamic loss scale for float16 gradients: halved after an overflow, doubled after a run of good steps.

    Scales are powers of two, so that scaling and unscaling are exact.

    Attributes:
        value: the current factor; good_steps: steps since it last changed.
        enabled: False keeps it at 1.
    """

    enabled: bool = False
    value: float = 1.0
    good_steps: int = 0
    growth_interval: int = 200

    @classmethod
    def of(cls, compute: str) -> LossScale:
        """2^16 to start with for float16, which cannot hold gradients below 6e-8; off for other formats."""
        return cls(True, 65536.0) if compute == "float16" else cls()

    def step(self, finite: bool) -> None:
        """Tells the outcome of an update."""
        if not self.enabled:
            return
        self.good_steps = self.good_steps + 1 if finite else 0
        if not finite:
            self.value = max(self.value / 2.0, 1.0)
        elif self.good_steps >= self.growth_interval:
            self.value, self.good_steps = min(self.value * 2.0, 2.0**24), 0
