"""The chain that a config trains: its transition and its schedule."""

from __future__ import annotations

from typing import Any

from dancegrpo.config import ConfigError, SamplerConfig
from dancegrpo.diffusion import TRANSITIONS, Schedule, make_schedule, make_transition
from dancegrpo.diffusion.transitions import Transition

SchedulerSettings = tuple[str, dict[str, Any], dict[str, Any]]


def make_chain(
    sampler: SamplerConfig, process: str = "flow", scheduler: SchedulerSettings | None = None
) -> tuple[Transition, Schedule]:
    """Transition and schedule of a rollout.

    Args:
        sampler: the config's section.
        process: what the model was trained on, see `diffusion.kernel.Transition`.
        scheduler: what `diffusion.read_scheduler` says of the checkpoint; a diffusion process needs it.

    Raises:
        ConfigError: an unknown transition, one of another process than the model's, or one without a density, which
            cannot be trained.
    """
    name, of_schedule, of_transition = scheduler or ("ddim", {}, {})
    settings = TRANSITIONS.accepted(sampler.transition, {"eta": sampler.eta, **of_transition})
    transition = make_transition(sampler.transition, **settings)
    if transition.process != process:
        raise ConfigError(
            f"sampler.transition: {sampler.transition!r} is for models of a {transition.process} process, but this "
            f"model was trained on a {process} process; choose {_alternatives(process)}"
        )
    if not transition.stochastic:
        level = f" at sampler.eta {sampler.eta}" if "eta" in settings else ""
        raise ConfigError(
            f"sampler.transition: {sampler.transition!r} is deterministic{level}, it has no density and there is "
            f"nothing to train; choose a stochastic transition: {_alternatives(process)}"
        )
    if process == "diffusion":
        return transition, make_schedule(name, sampler.num_steps, **of_schedule)
    schedule = make_schedule(
        "flow_match",
        sampler.num_steps,
        shift=sampler.shift,
        truncate_timesteps=sampler.truncate_timesteps,
    )
    return transition, schedule


def _alternatives(process: str) -> str:
    names = [
        name
        for name in TRANSITIONS.names()
        if getattr(TRANSITIONS.find(name), "process", None) == process and TRANSITIONS.find(name).stochastic
    ]
    return " or ".join(map(repr, names))
