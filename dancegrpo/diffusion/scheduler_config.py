"""What a checkpoint's `scheduler_config.json` means: a schedule, and the settings of DDIM that belong to the model.

Of a diffusion process only the noise levels and the timesteps are taken: whichever solver the file names (Euler, DPM,
PNDM), the chain is that of DDIM, as with diffusers' `DDIMScheduler.from_config`.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from dancegrpo.config import ConfigError
from dancegrpo.diffusion.ddim import DDIM
from dancegrpo.diffusion.kernel import Transition
from dancegrpo.diffusion.schedules import SCHEDULES, Schedule, make_schedule
from dancegrpo.diffusion.transitions import EulerODE
from dancegrpo.runtime.files import read_json

_FLOW = "FlowMatchEulerDiscreteScheduler"
_DIFFUSION = {
    "DDIMScheduler": "ddim",
    "DDPMScheduler": "ddpm",
    "DPMSolverMultistepScheduler": "ddim",
    "EulerDiscreteScheduler": "ddim",
    "PNDMScheduler": "ddim",
}

# diffusers' defaults of what a config may leave out, where they are not those of our builders.
_DIFFUSION_DEFAULTS = {
    "beta_schedule": "linear",
    "beta_start": 0.0001,
    "beta_end": 0.02,
    "set_alpha_to_one": True,
    "clip_sample": True,
    "timestep_spacing": "leading",
}
_DEFAULTS_OF = {
    "DPMSolverMultistepScheduler": {"clip_sample": False, "timestep_spacing": "linspace"},
    "EulerDiscreteScheduler": {"clip_sample": False, "timestep_spacing": "linspace"},
    "PNDMScheduler": {"set_alpha_to_one": False, "clip_sample": False},
}

# Option -> values under which the reference does what we do; others change the chain and are refused.
_NEUTRAL = {
    "clip_sample": (False,),
    "invert_sigmas": (False,),
    "shift_terminal": (None,),
    "stochastic_sampling": (False,),
    "thresholding": (False,),
    "trained_betas": (None,),
    "use_beta_sigmas": (False, None),
    "use_exponential_sigmas": (False, None),
    "use_flow_sigmas": (False, None),
    "use_karras_sigmas": (False, None),
}
# Read by none of our chains: noise comes from sampler.eta, and these only matter to what they stand beside or to
# another solver.
_WITHOUT_EFFECT = {
    "algorithm_type",
    "clip_sample_range",
    "dynamic_thresholding_ratio",
    "euler_at_final",
    "final_sigmas_type",
    "flow_shift",
    "interpolation_type",
    "lambda_min_clipped",
    "lower_order_final",
    "sample_max_value",
    "sigma_max",
    "sigma_min",
    "skip_prk_steps",
    "solver_order",
    "solver_type",
    "timestep_type",
    "use_lu_lambdas",
    "variance_type",
}

SchedulerSettings = tuple[str, dict[str, Any], dict[str, Any]]
"""Name and settings of a schedule, and the settings of the transition "ddim"."""


def read_scheduler(folder: str | Path, changes: Mapping[str, Any] | None = None) -> SchedulerSettings:
    """`scheduler_settings` of `folder/scheduler_config.json`, with `changes` to it."""
    file = Path(folder) / "scheduler_config.json"
    return scheduler_settings(read_json(file), str(file), changes)


def scheduler_settings(
    config: Mapping[str, Any], source: str, changes: Mapping[str, Any] | None = None
) -> SchedulerSettings:
    """From diffusers' scheduler options to ours.

    Args:
        config: the parsed `scheduler_config.json`. source: names it in messages.
        changes: options of a diffusion process that count in place of the file's.

    Returns:
        The name of the schedule and its settings (for `make_schedule`), and the settings of the transition "ddim";
        a flow has none.

    Raises:
        ConfigError: an unknown scheduler, or an option that is not supported, with its value and the valid ones.
    """
    kind = config.get("_class_name")
    if kind != _FLOW and kind not in _DIFFUSION:
        raise ConfigError(
            f"{source}: scheduler {kind!r} is not supported; valid: {', '.join(sorted([_FLOW, *_DIFFUSION]))}"
        )
    options = {key: value for key, value in config.items() if not key.startswith("_")}
    if kind in _DIFFUSION:
        options = _DIFFUSION_DEFAULTS | _DEFAULTS_OF.get(kind, {}) | options | dict(changes or {})
    name = _DIFFUSION.get(kind, "flow_match_euler")
    of_schedule = set(inspect.signature(SCHEDULES.find(name)).parameters)
    of_transition = set(inspect.signature(DDIM).parameters) if kind in _DIFFUSION else set()
    for key, value in options.items():
        if key in _NEUTRAL and value not in _NEUTRAL[key]:
            valid = " or ".join(map(repr, _NEUTRAL[key]))
            raise ConfigError(f"{source}: {key} is {value!r}; supported: {valid}")
        if key not in of_schedule | of_transition | set(_NEUTRAL) | _WITHOUT_EFFECT:
            raise ConfigError(f"{source}: option {key} (value {value!r}) is not supported")
    schedule = {key: value for key, value in options.items() if key in of_schedule}
    transition = {key: value for key, value in options.items() if key in of_transition}
    return name, schedule, transition


def process_of(scheduler: SchedulerSettings) -> str:
    """What the model was trained on: "flow" or "diffusion", see `kernel.Transition`."""
    return "diffusion" if scheduler[0] in _DIFFUSION.values() else "flow"


def chain_schedule(
    num_steps: int,
    scheduler: SchedulerSettings | None = None,
    shift: float | None = None,
    truncate_timesteps: bool = False,
) -> Schedule:
    """The steps of a chain of a model.

    Args:
        num_steps: T.
        scheduler: of its checkpoint; None: a flow with a linear schedule.
        shift: static timestep shift in place of the checkpoint's own, for flows only.
        truncate_timesteps: give a flow model the integer part of its timesteps.

    Raises:
        ConfigError: `shift` for a diffusion process, or a value out of range.
    """
    name, settings, _ = scheduler or ("flow_match", {}, {})
    if shift is not None:
        if scheduler is not None and process_of(scheduler) == "diffusion":
            raise ConfigError(
                f"sampler.shift is {shift:g}, but the model was trained on a diffusion process, whose timesteps are "
                "not shifted; set it to null"
            )
        settings = settings | {"shift": shift}
        if name == "flow_match_euler":
            settings["use_dynamic_shifting"] = False
    schedule = make_schedule(name, num_steps, **settings)
    if truncate_timesteps and name.startswith("flow"):
        return replace(schedule, timesteps=np.trunc(schedule.timesteps))
    return schedule


def deterministic_transition(scheduler: SchedulerSettings | None = None) -> Transition:
    """The noise-free kernel of a model: Euler's ODE of a flow, DDIM without noise of a diffusion process."""
    if scheduler is None or process_of(scheduler) == "flow":
        return EulerODE()
    return DDIM(eta=0.0, **scheduler[2])
