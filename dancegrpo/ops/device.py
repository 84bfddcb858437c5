"""Which implementation of an operator a device gets."""

from collections.abc import Mapping
from typing import TypeVar

import mindspore as ms

from dancegrpo.ops.cpu.library import library

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


def select_fused(fused: T, composed: T, device: str | None = None) -> T:
    """Pick between a fused kernel of `ops.cpu` and a composition: the kernel on a CPU where it could be built.

    Args:
        device: as in `select`; `"composed"` gives the composition on a CPU as well.
    """
    return fused if (device or device_kind()) == "CPU" and library().path else composed


def describe_operators() -> str:
    """In words, which kind of operators this process computes with."""
    return library().text if device_kind() == "CPU" else f"MindSpore's kernels for {device_kind()}"
