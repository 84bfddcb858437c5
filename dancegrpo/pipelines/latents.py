"""FLUX's latent packing: 2x2 patches of the latent grid become tokens (NumPy, for the host side)."""

import numpy as np


def pack_latents(latents: np.ndarray) -> np.ndarray:
    """(B, C, H, W) to (B, H/2 * W/2, 4 C); channel index (c, dy, dx), c slowest, tokens in row-major order."""
    batch, channels, height, width = latents.shape
    x = latents.reshape(batch, channels, height // 2, 2, width // 2, 2).transpose(0, 2, 4, 1, 3, 5)
    return np.ascontiguousarray(x).reshape(batch, height * width // 4, 4 * channels)


def unpack_latents(packed: np.ndarray, height: int, width: int) -> np.ndarray:
    """(B, H/2 * W/2, 4 C) back to (B, C, H, W)."""
    batch, _, channels = packed.shape
    x = packed.reshape(batch, height // 2, width // 2, channels // 4, 2, 2).transpose(0, 3, 1, 4, 2, 5)
    return np.ascontiguousarray(x).reshape(batch, channels // 4, height, width)


def image_ids(rows: int, columns: int) -> np.ndarray:
    """Positions (rows * columns, 3) float32 of image tokens: 0, row, column."""
    ids = np.zeros((rows, columns, 3), np.float32)
    ids[..., 1] = np.arange(rows)[:, None]
    ids[..., 2] = np.arange(columns)[None, :]
    return ids.reshape(rows * columns, 3)
