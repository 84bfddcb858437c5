"""Pictures: PNG files and captioned grids."""

from __future__ import annotations

import io
import textwrap
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from dancegrpo.runtime.files import write_atomic

_GAP = 4
_BACKGROUND = (255, 255, 255)
_FONT_SIZE = 11


def save_png(path: str | Path, image: np.ndarray | Image.Image) -> None:
    """Writes a PNG: uint8 (H, W, 3) or a PIL image; the same pixels give the same bytes."""
    picture = image if isinstance(image, Image.Image) else Image.fromarray(_checked(image, 3))
    buffer = io.BytesIO()
    picture.save(buffer, format="PNG")
    write_atomic(path, buffer.getvalue())


def make_grid(
    images: np.ndarray, columns: int, captions: Sequence[str] | None = None, scale: int = 2
) -> Image.Image:
    """Images side by side, row by row, each with its caption below.

    Args:
        images: uint8 (N, H, W, 3).
        columns: images in a row.
        captions: N texts, wrapped to the width of an image; None leaves no space for them.
        scale: whole factor by which pixels are repeated.
    """
    count, height, width, _ = _checked(images, 4).shape
    if captions is not None and len(captions) != count:
        raise ValueError(f"{len(captions)} captions for {count} images")
    font = ImageFont.load_default(size=_FONT_SIZE)
    lines = [_wrap(text, font, width * scale) for text in captions or ()]
    line_height = _FONT_SIZE + 3
    text_height = max((len(text) for text in lines), default=0) * line_height
    cell_width, cell_height = width * scale + _GAP, height * scale + text_height + _GAP
    rows = -(-count // columns)
    grid = Image.new("RGB", (columns * cell_width + _GAP, rows * cell_height + _GAP), _BACKGROUND)
    draw = ImageDraw.Draw(grid)
    for index in range(count):
        row, column = divmod(index, columns)
        left, top = column * cell_width + _GAP, row * cell_height + _GAP
        big = images[index].repeat(scale, axis=0).repeat(scale, axis=1)
        grid.paste(Image.fromarray(big), (left, top))
        for number, line in enumerate(lines[index] if lines else ()):
            draw.text(
                (left, top + height * scale + 1 + number * line_height), line, fill=(40, 40, 40), font=font
            )
    return grid


def _wrap(text: str, font: ImageFont.FreeTypeFont, width: int) -> list[str]:
    characters = max(4, int(width / font.getlength("n")))
    return textwrap.wrap(text, characters) or [""]


def _checked(images: np.ndarray, rank: int) -> np.ndarray:
    if images.dtype != np.uint8 or images.ndim != rank or images.shape[-1] != 3:
        raise ValueError(
            f"expected uint8 images of {rank} dimensions with 3 channels last, "
            f"got {images.dtype} {images.shape}"
        )
    return images
