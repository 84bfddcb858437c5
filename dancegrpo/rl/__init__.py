"""The GRPO loop and its mathematics. Names resolve when they are first used, so that nothing loads MindSpore
before `runtime.setup_runtime` has prepared it."""

from importlib import import_module

_HOMES = {
    "Trainer": "trainer",
    "build_trainer": "launch",
    "clipped_surrogate": "objectives",
    "group_advantages": "advantages",
    "open_run": "launch",
}

__all__ = sorted(_HOMES)


def __getattr__(name: str):
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
