"""Which implementation of an operator a device gets."""

from collections.abc import Mapping
from typing import TypeVar

import mindspore as ms

T = TypeVar("T")


def device_kind() -> str:
    """The device graphs are compiled for: `"CPU"` or `"Ascend"` (MindSpore's device target)."""
    return ms.get_context("device_target")


def select(implementations: Mapping[str, T], device: str | None = None) -> T:
    """Pick an operator's implementation for a device.

    Args:
        implementations: by device target; every mapping has `"CPU"` (a composition of basic operators, which
            also runs on any other device).
        device: a device target; the current one when None. Tests name one to compare a pair.
    """
    return implementations.get(device or device_kind(), implementations["CPU"])
