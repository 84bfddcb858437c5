"""Number formats: which one the model computes in, and what the device can do."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dancegrpo.config import ConfigError, choices_text

if TYPE_CHECKING:
    import mindspore

DTYPES = ("float32", "float16", "bfloat16")


def check_precision(name: str, device: str) -> None:
    """Refuses an unknown format, and bfloat16 on a CPU (MindSpore has no CPU kernels for it).

    Raises:
        ConfigError: with the valid choices.
    """
    if name not in DTYPES:
        raise ConfigError(f"precision.compute is {name!r}; {choices_text(name, DTYPES)}")
    if name == "bfloat16" and device == "CPU":
        raise ConfigError(
            "precision.compute is 'bfloat16', for which MindSpore has no CPU kernels; "
            "on this device use 'float32' (fastest) or 'float16'"
        )


def compute_dtype(name: str) -> mindspore.dtype.TensorType:
    """The MindSpore dtype with this name, checked against the current device."""
    import mindspore as ms

    check_precision(name, ms.get_context("device_target"))
    return getattr(ms, name)
