"""The chain that a config trains: its transition and its schedule."""

from __future__ import annotations

from dancegrpo.config import ConfigError, SamplerConfig
from dancegrpo.diffusion import TRANSITIONS, Schedule, make_schedule, make_transition
from dancegrpo.diffusion.transitions import Transition


def make_chain(sampler: SamplerConfig) -> tuple[Transition, Schedule]:
    """Transition and schedule of a rollout.

    Raises:
        ConfigError: an unknown transition, or one without a density, which cannot be trained.
    """
    settings = TRANSITIONS.accepted(sampler.transition, {"eta": sampler.eta})
    transition = make_transition(sampler.transition, **settings)
    if not transition.stochastic:
        raise ConfigError(
            f"sampler.transition: {sampler.transition!r} is deterministic, there is nothing to "
            "train; choose a stochastic transition such as 'dance_sde'"
        )
    schedule = make_schedule(
        "flow_match",
        sampler.num_steps,
        shift=sampler.shift,
        truncate_timesteps=sampler.truncate_timesteps,
    )
    return transition, schedule
