"""One picture that shows a run: the same prompts before and after, and the curves between."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from dancegrpo.runtime.images import make_grid, save_png

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_DPI = 110
_COLUMNS = 4


def write_report(
    path: str | Path,
    metrics: Sequence[Mapping[str, Any]],
    *,
    before: np.ndarray | None = None,
    after: np.ndarray | None = None,
    captions: Sequence[str] | None = None,
    title: str = "",
) -> None:
    """Writes the report as one PNG.

    Args:
        path: the file.
        metrics: the rows of metrics.jsonl, at least one.
        before, after: uint8 (N, H, W, 3) on the same prompts and noise; both or none.
        captions: the N prompts.
        title: a line above it all.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from PIL import Image

    logging.getLogger("matplotlib.font_manager").setLevel(logging.ERROR)  # says that it builds a cache, once
    panels = _panels(metrics)
    with_images = before is not None and after is not None
    curve_height = 2.6 * math.ceil(len(panels) / 2)
    grids = [make_grid(images, _COLUMNS, captions) for images in (before, after)] if with_images else []
    width = max(11.0, sum(grid.width for grid in grids) / _DPI + 0.6)
    image_height = grids[0].height / _DPI + 0.5 if grids else 0.0
    figure = Figure(figsize=(width, image_height + curve_height + 0.5), dpi=_DPI, layout="constrained")
    canvas = FigureCanvasAgg(figure)
    if title:
        figure.suptitle(title)
    parts = figure.subfigures(2, 1, height_ratios=[image_height, curve_height]) if grids else [figure]
    if grids:
        for axes, grid, name in zip(parts[0].subplots(1, 2), grids, ("before", "after"), strict=True):
            axes.imshow(grid, interpolation="antialiased")
            axes.set_title(name)
            axes.axis("off")
    _draw_curves(parts[-1], panels, [row["iteration"] for row in metrics])
    canvas.draw()
    save_png(path, Image.fromarray(np.asarray(canvas.buffer_rgba())[..., :3].copy()))


def _panels(metrics: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, list[float]]]:
    """Panel title to curves; curves that are missing or empty in this run are left out."""
    keys = list(dict.fromkeys(key for row in metrics for key in row))
    wanted = {
        "reward, mean": [k for k in keys if k.startswith("reward/") and k.endswith("/mean")],
        "reward, standard deviation within groups": [
            k for k in keys if k.startswith("reward/") and k.endswith("/group_std")
        ],
        "gradient norm": [k for k in keys if k == "grad/norm"],
        "share of clipped ratios": [k for k in keys if k == "ratio/clip_fraction"],
        "KL divergence to the start": [k for k in keys if k == "loss/kl"],
    }
    panels = {}
    for title, names in wanted.items():
        curves = {name: [_number(row.get(name)) for row in metrics] for name in names}
        curves = {
            name: values
            for name, values in curves.items()
            if any(math.isfinite(v) and v != 0 for v in values)
        }
        if curves:
            panels[title] = curves
    return panels


def _draw_curves(
    part: Figure, panels: Mapping[str, Mapping[str, Sequence[float]]], iterations: Sequence[int]
) -> None:
    if not panels:
        return
    grid = part.subplots(math.ceil(len(panels) / 2), 2, squeeze=False).flat
    # The panels first: zip takes one more of what stands first, and the axes left over are needed below.
    for (title, curves), axes in zip(panels.items(), grid, strict=False):
        for name, values in curves.items():
            label = name.removeprefix("reward/").rsplit("/", 1)[0] if name.startswith("reward/") else name
            (line,) = axes.plot(iterations, values, alpha=0.35, linewidth=1)
            axes.plot(iterations, _smooth(values), color=line.get_color(), label=label)
        axes.set_title(title, fontsize=10)
        axes.set_xlabel("iteration", fontsize=8)
        axes.tick_params(labelsize=8)
        axes.grid(alpha=0.3)
        if len(curves) > 1:
            axes.legend(fontsize=8)
    for axes in list(grid):
        axes.axis("off")


def _number(value: Any) -> float:
    return float(value) if isinstance(value, int | float) else math.nan


def _smooth(values: Sequence[float]) -> np.ndarray:
    """Centred mean over about a tenth of the run, without the missing values."""
    array = np.asarray(values, np.float64)
    half = max(1, len(array) // 20)
    windows = [array[max(0, i - half) : i + half + 1] for i in range(len(array))]
    return np.array([np.nanmean(w) if np.isfinite(w).any() else math.nan for w in windows])
