"""What a checkpoint's `scheduler_config.json` means: a schedule, and the settings of DDIM that belong to the model."""

from __future__ import annotations

import inspect
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dancegrpo.config import ConfigError
from dancegrpo.diffusion.ddim import DDIM
from dancegrpo.diffusion.schedules import SCHEDULES

_FLOW = "FlowMatchEulerDiscreteScheduler"
_DIFFUSION = {"DDIMScheduler": "ddim", "DDPMScheduler": "ddpm", "PNDMScheduler": "ddim"}

# diffusers' defaults of what a config may leave out, where they are not those of our builders.
_DIFFUSION_DEFAULTS = {
    "beta_schedule": "linear",
    "beta_start": 0.0001,
    "beta_end": 0.02,
    "set_alpha_to_one": True,
    "clip_sample": True,
    "timestep_spacing": "leading",
}
_PNDM_DEFAULTS = {"set_alpha_to_one": False, "clip_sample": False}

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
    "use_karras_sigmas": (False, None),
}
# Read by none of our chains: noise comes from sampler.eta, and these only matter to what they stand beside.
_WITHOUT_EFFECT = {
    "clip_sample_range",
    "dynamic_thresholding_ratio",
    "sample_max_value",
    "skip_prk_steps",
    "variance_type",
}


def read_scheduler(folder: str | Path) -> tuple[str, dict[str, Any], dict[str, Any]]:
    """`scheduler_settings` of `folder/scheduler_config.json`."""
    file = Path(folder) / "scheduler_config.json"
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file} cannot be read: {error}") from error
    if not isinstance(config, dict):
        raise ConfigError(f"{file} must hold an object with the scheduler's options")
    return scheduler_settings(config, str(file))


def scheduler_settings(config: Mapping[str, Any], source: str) -> tuple[str, dict[str, Any], dict[str, Any]]:
    """From diffusers' scheduler options to ours.

    Args:
        config: the parsed `scheduler_config.json`. source: names it in messages.

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
        options = _DIFFUSION_DEFAULTS | (_PNDM_DEFAULTS if kind == "PNDMScheduler" else {}) | options
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
