"""One optimisation step as one static graph."""

import math

import mindspore as ms
import numpy as np
from mindspore import Parameter, ParameterTuple, Tensor, nn, ops

from dancegrpo.pretraining.recipe import StageRecipe

_add_squares = ops.MultitypeFuncGraph("add_squares")


@_add_squares.register("Tensor")
def _sum_of_squares(gradient):
    return 2.0 * ops.L2Loss()(
        gradient
    )  # L2Loss is half the sum of squares, and twice as fast as writing it out


_scale = ops.MultitypeFuncGraph("scale")


@_scale.register("Tensor", "Tensor")
def _scaled(factor, gradient):
    return gradient * factor


_average = ops.MultitypeFuncGraph("average")


@_average.register("Tensor", "Tensor", "Tensor")
def _averaged(rate, average, parameter):
    return ops.assign_add(average, (parameter - average) * rate)


class TrainStep(nn.Cell):
    """Loss, gradient, global-norm clip, AdamW and averaged weights.

    Call with (learning_rate, ema_rate, *inputs of the loss cell); returns loss and gradient norm.
    """

    def __init__(self, loss: nn.Cell, recipe: StageRecipe):
        super().__init__()
        from mindformers.core.optim import AdamW

        self.loss = loss
        self.parameters_ = ParameterTuple([p for p in loss.trainable_params()])
        self.optimizer = AdamW(
            self.parameters_,
            learning_rate=recipe.learning_rate,
            betas=(0.9, 0.999),
            eps=1e-8,
            weight_decay=recipe.weight_decay,
        )
        self.averages = ParameterTuple(
            [
                Parameter(Tensor(p.asnumpy()), name="ema." + p.name, requires_grad=False)
                for p in self.parameters_
            ]
        )
        self.gradient = ops.value_and_grad(loss, None, weights=self.parameters_)
        self.max_norm = recipe.max_grad_norm
        self.map = ops.HyperMap()

    def construct(self, learning_rate: Tensor, ema_rate: Tensor, *inputs):
        loss, gradients = self.gradient(*inputs)
        norm = ops.sqrt(ops.addn(self.map(_add_squares, gradients)))
        factor = ops.minimum(self.max_norm / (norm + 1e-6), Tensor(1.0, ms.float32))
        ops.assign(self.optimizer.learning_rate, learning_rate)
        gradients = self.map(ops.partial(_scale, factor), gradients)
        # MindSpore may read the parameters for the average before or after this step's assignment, always the same
        # way in one graph; for an average over hundreds of steps either is as good.
        self.optimizer(gradients)
        self.map(ops.partial(_average, ema_rate), self.averages, self.parameters_)
        return loss, norm

    def state(self) -> dict[str, np.ndarray]:
        """Everything that the next step depends on, by name."""
        cells = list(self.parameters_) + list(self.averages) + list(self.optimizer.get_parameters())
        return {p.name: p.asnumpy() for p in {id(p): p for p in cells}.values()}

    def load_state(self, arrays: dict[str, np.ndarray]) -> None:
        """Set what `state` gave."""
        cells = list(self.parameters_) + list(self.averages) + list(self.optimizer.get_parameters())
        for p in cells:
            p.set_data(Tensor(arrays[p.name].reshape(p.shape), p.dtype))


def learning_rate(recipe: StageRecipe, step: int) -> float:
    """Linear warm-up to the peak, then half a cosine to zero; `step` counts from 0."""
    if step < recipe.warmup_steps:
        return recipe.learning_rate * (step + 1) / recipe.warmup_steps
    done = (step - recipe.warmup_steps) / max(recipe.steps - recipe.warmup_steps, 1)
    return recipe.learning_rate * 0.5 * (1.0 + math.cos(math.pi * min(done, 1.0)))


def ema_rate(recipe: StageRecipe, step: int) -> float:
    """1 - decay, with the decay growing as (1 + i) / (10 + i) so that the start does not weigh on the average."""
    return 1.0 - min((1.0 + step) / (10.0 + step), recipe.ema_decay)
