"""Calls of one fixed shape over data of any length, so that no graph is compiled twice."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np


def run_batched(
    fn: Callable, arrays: Sequence[np.ndarray], batch: int
) -> np.ndarray | tuple[np.ndarray, ...]:
    """``fn`` over slices of exactly ``batch`` rows.

    Args:
        fn: takes one array per entry of ``arrays``, (batch, ...), and returns one array or Tensor, or a tuple
            of them, with ``batch`` rows each.
        arrays: arrays of the same length N >= 1.
        batch: rows per call; the last call is padded by repeating its last row, and the padding is cut off.

    Returns:
        What ``fn`` returns, as ndarrays with N rows.
    """
    count = len(arrays[0])
    if count == 0 or any(len(array) != count for array in arrays):
        raise ValueError(f"arrays must have one common length of at least 1, got {[len(a) for a in arrays]}")
    results = []
    for start in range(0, count, batch):
        # Indices beyond the end repeat the last row: same shape, no new graph.
        rows = np.minimum(np.arange(start, start + batch), count - 1)
        outputs = fn(*(array[rows] for array in arrays))
        single = not isinstance(outputs, tuple)
        keep = min(batch, count - start)
        results.append([_to_numpy(output)[:keep] for output in ((outputs,) if single else outputs)])
    columns = tuple(np.concatenate(column) for column in zip(*results, strict=True))
    return columns[0] if single else columns


def _to_numpy(value: object) -> np.ndarray:
    return value.asnumpy() if hasattr(value, "asnumpy") else np.asarray(value)
