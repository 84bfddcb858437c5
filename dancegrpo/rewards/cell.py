"""Device rewards: a static graph, compiled once at the fixed batch of a run."""

from __future__ import annotations

from collections.abc import Sequence

from mindspore import Tensor, nn


class RewardCell(nn.Cell):
    """A reward that is a graph: `construct(images, *encoded) -> scores`.

    images: (N, 3, H, W) float in [0, 1]; encoded: what `encode` returned for the N prompts, each (N, ...);
    scores: (N,) float, higher is better. N is the same in every call of a run, so the graph compiles once.
    """

    def __init__(self, auto_prefix: bool = True):
        super().__init__(auto_prefix=auto_prefix)
        self.set_train(False)

    def check(self, prompts: Sequence[str]) -> None:
        """As `RewardFunction.check`: refuses prompts before anything expensive. The default accepts all."""

    def encode(self, prompts: Sequence[str]) -> tuple[Tensor, ...]:
        """What the graph needs to know of prompts: a tuple of tensors, each (len(prompts), ...).

        Called on the host with distinct prompts that were not encoded before; the rows are cached and
        gathered for each batch. The default is for rewards that do not look at the prompt: no tensors.
        """
        return ()
