"""Noise schedules, transition kernels and the compiled sampler. Names resolve when they are first used, so
that schedules and registries can be imported without MindSpore."""

from importlib import import_module

_HOMES = {
    "Chain": "sampler",
    "PolicyStep": "sampler",
    "Registry": "registry",
    "SCHEDULES": "schedules",
    "Sampler": "sampler",
    "Schedule": "schedules",
    "TRANSITIONS": "transitions",
    "Transition": "transitions",
    "chain_schedule": "scheduler_config",
    "deterministic_transition": "scheduler_config",
    "make_schedule": "schedules",
    "make_transition": "transitions",
    "process_of": "scheduler_config",
    "read_scheduler": "scheduler_config",
    "scheduler_settings": "scheduler_config",
}

__all__ = sorted(_HOMES)


def __getattr__(name: str):
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
