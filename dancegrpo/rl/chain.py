"""The chain that a config trains: its transition and its schedule."""

from __future__ import annotations

from dancegrpo.config import ConfigError, SamplerConfig
from dancegrpo.diffusion import TRANSITIONS, Schedule, chain_schedule, make_transition
from dancegrpo.diffusion.scheduler_config import SchedulerSettings
from dancegrpo.diffusion.transitions import Transition


def make_chain(
    sampler: SamplerConfig, process: str = "flow", scheduler: SchedulerSettings | None = None
) -> tuple[Transition, Schedule]:
    """Transition and schedule of a rollout.

    Args:
        sampler: the config's section.
        process: what the model was trained on, see `diffusion.kernel.Transition`.
        scheduler: what `diffusion.read_scheduler` says of the checkpoint; None: the defaults of "ddim" for a
            diffusion process, a linear schedule for a flow.

    Raises:
        ConfigError: see `trained_transition` and `diffusion.chain_schedule`.
    """
    transition = trained_transition(sampler, process, scheduler)
    if scheduler is None and process == "diffusion":
        scheduler = ("ddim", {}, {})
    schedule = chain_schedule(sampler.num_steps, scheduler, sampler.shift, sampler.truncate_timesteps)
    return transition, schedule


def trained_transition(
    sampler: SamplerConfig, process: str = "flow", scheduler: SchedulerSettings | None = None
) -> Transition:
    """The transition of a rollout; arguments as of `make_chain`.

    Raises:
        ConfigError: an unknown transition, one of another process than the model's, or one without a density, which
            cannot be trained.
    """
    of_transition = scheduler[2] if scheduler else {}
    settings = TRANSITIONS.accepted(sampler.transition, {"eta": sampler.eta, **of_transition})
    transition = make_transition(sampler.transition, **settings)
    if transition.process != process:
        raise ConfigError(
            f"sampler.transition: {sampler.transition!r} is for models of a {transition.process} process, but this "
            f"model was trained on a {process} process; choose {_alternatives(process)}"
        )
    if not transition.stochastic:
        level = f" at sampler.eta {sampler.eta}" if "eta" in settings else ""
        advice = f"choose a stochastic transition: {_alternatives(process)}"
        if TRANSITIONS.find(sampler.transition).stochastic:  # with noise, that is
            advice = "set sampler.eta above 0"
        raise ConfigError(
            f"sampler.transition: {sampler.transition!r} is deterministic{level}, it has no density and there is "
            f"nothing to train; {advice}"
        )
    return transition


def _alternatives(process: str) -> str:
    names = [
        name
        for name in TRANSITIONS.names()
        if getattr(TRANSITIONS.find(name), "process", None) == process and TRANSITIONS.find(name).stochastic
    ]
    return " or ".join(map(repr, names))
