"""The one conversion from what a decoder gives to what files and host rewards take."""

from __future__ import annotations

import numpy as np


def to_uint8(images: np.ndarray) -> np.ndarray:
    """Images (N, 3, H, W) float in [0, 1] to (N, H, W, 3) uint8: clipped, rounded to the nearest level.

    NaN becomes 0; whoever scores pixels must look for values that are not finite before.
    """
    levels = np.rint(
        np.clip(np.nan_to_num(images.astype(np.float32, copy=False)), 0.0, 1.0) * np.float32(255)
    )
    return np.ascontiguousarray(levels.astype(np.uint8).transpose(0, 2, 3, 1))
