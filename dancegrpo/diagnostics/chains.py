"""A whole denoising chain in one graph: the alternatives to the sampler's host loop, for `benchmark.py chain`."""

from __future__ import annotations

from collections.abc import Callable

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn, ops

from dancegrpo.config import Config
from dancegrpo.diffusion import PolicyStep, Sampler
from dancegrpo.pipelines import PipelineOptions, load_pipeline
from dancegrpo.rl.chain import make_chain
from dancegrpo.runtime import noise


class UnrolledChain(nn.Cell):
    """All T steps written out in one graph.

    Called with initial latents (B, ...), sigmas (T+1, B), timesteps (T, B), noise (T, B, ...) and conditions;
    returns the latents that are decoded, (B, ...).
    """

    def __init__(self, policy_step: PolicyStep, num_steps: int) -> None:
        super().__init__(auto_prefix=False)  # the model's parameters keep their names
        self.policy_step, self.num_steps = policy_step, num_steps

    def construct(self, latents, sigmas, timesteps, drawn, *conditions):
        final = latents
        for index in range(self.num_steps):
            latents, _, _, final, _ = self.policy_step(
                latents, sigmas[index], sigmas[index + 1], timesteps[index], drawn[index], None, *conditions
            )
        return final


class LoopChain(nn.Cell):
    """The same as a loop inside the graph: its body is compiled once, whatever T is.

    Takes a first argument more: the index of the first step, a () int32 tensor, because a loop over a number
    that the compiler knows is unrolled.
    """

    def __init__(self, policy_step: PolicyStep, num_steps: int) -> None:
        super().__init__(auto_prefix=False)
        self.policy_step, self.num_steps = policy_step, num_steps

    def construct(self, index, latents, sigmas, timesteps, drawn, *conditions):
        final = latents
        while index < self.num_steps:
            latents, _, _, final, _ = self.policy_step(
                latents,
                ops.gather(sigmas, index, 0),
                ops.gather(sigmas, index + 1, 0),
                ops.gather(timesteps, index, 0),
                ops.gather(drawn, index, 0),
                None,
                *conditions,
            )
            index = index + 1
        return final


def make_chains(config: Config) -> dict[str, Callable[[], np.ndarray]]:
    """`step` (the product's sampler), `unrolled` and `loop`: each runs the same chain of one micro-batch and
    returns its latents, float32 (B, ...). Nothing is compiled yet.

    Raises:
        ConfigError: the model or the transition cannot be had as the config says.
    """
    sampler, size = config.sampler, config.train.micro_batch
    pipeline = load_pipeline(config.model.checkpoint, PipelineOptions.of(config))
    transition, schedule = make_chain(sampler, pipeline.process, pipeline.scheduler)
    policy_step = PolicyStep(pipeline.denoiser, transition)
    host_loop = Sampler(policy_step, schedule, size)
    random = noise.generator("benchmark", "chain", config.train.seed)
    initial = random.standard_normal((size, *pipeline.latent_shape), np.float32)
    drawn = random.standard_normal((schedule.num_steps, *initial.shape), np.float32)
    conditions = pipeline.encode_prompts(["a red circle"] * size)
    sigmas, timesteps = (
        Tensor(np.repeat(values[:, None], size, axis=1)) for values in (schedule.sigmas, schedule.timesteps)
    )
    unrolled, loop = (cell(policy_step, schedule.num_steps) for cell in (UnrolledChain, LoopChain))

    def inputs() -> tuple[Tensor, ...]:
        # From the host in every call, as in the sampler.
        return Tensor(initial), sigmas, timesteps, Tensor(drawn), *map(Tensor, conditions)

    return {
        "step": lambda: host_loop.sample(initial, conditions, drawn).final.asnumpy(),
        "unrolled": lambda: unrolled(*inputs()).asnumpy(),
        "loop": lambda: loop(Tensor(0, ms.int32), *inputs()).asnumpy(),
    }
