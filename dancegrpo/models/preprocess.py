"""Image preprocessing of CLIP encoders inside a static graph: resize, centre crop, normalisation.

The resampling is Pillow's bicubic filter with antialiasing, which the published encoders were trained behind.
For one input size it is linear and separable: two small matrix products, so that gradients pass through it.
"""

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn, ops

# Pixel statistics of OpenAI's training set, used by every public CLIP's image processor.
PIXEL_MEAN = (0.48145466, 0.4578275, 0.40821073)
PIXEL_STD = (0.26862954, 0.26130258, 0.27577711)


def bicubic_matrix(source: int, target: int) -> np.ndarray:
    """Weights (target, source), float64, of Pillow's bicubic resampling of a line of pixels.

    The filter is the cubic with a = -1/2; when the line shrinks it widens by the same factor (antialiasing).
    Weights are multiples of 2^-22, as Pillow has them for 8-bit images.
    """
    if source == target:
        return np.eye(target)
    scale = source / target
    stretch = max(scale, 1.0)
    matrix = np.zeros((target, source))
    for i in range(target):
        centre = (i + 0.5) * scale
        first = max(int(centre - 2.0 * stretch + 0.5), 0)
        last = min(int(centre + 2.0 * stretch + 0.5), source)
        x = np.abs((np.arange(first, last) - centre + 0.5) / stretch)
        near = (1.5 * x - 2.5) * x * x + 1.0
        far = ((-0.5 * x + 2.5) * x - 4.0) * x + 2.0
        weights = np.where(x < 1.0, near, np.where(x < 2.0, far, 0.0))
        matrix[i, first:last] = weights / weights.sum()
    return np.round(matrix * 2.0**22) / 2.0**22


def _cropped_matrix(source: int, target: int, size: int) -> np.ndarray:
    """Weights (size, source), float32: resampling of a line to `target`, of which the middle is kept."""
    start = round((target - size) / 2.0)
    return bicubic_matrix(source, target)[start : start + size].astype(np.float32)


@ms.constexpr
def _square_matrices(height, width, size):
    short = min(height, width)
    return tuple(Tensor(_cropped_matrix(side, int(size * side / short), size)) for side in (height, width))


def to_square(images: Tensor, size: int) -> Tensor:
    """Images (N, C, H, W) in [0, 1] of any size to (N, C, size, size), as CLIP's processor resizes and crops them.

    For use inside a graph. Images that have the size are returned as they are; there is no rounding to 8 bits.
    """
    batch, channels, height, width = images.shape
    if height == size and width == size:
        return images
    rows, columns = _square_matrices(height, width, size)
    x = ops.clamp(ops.matmul(images.reshape((-1, width)), columns.transpose((1, 0))), 0.0, 1.0)
    x = ops.matmul(rows, x.reshape((batch * channels, height, size)))
    return ops.clamp(x, 0.0, 1.0).reshape((batch, channels, size, size))


class _ToPixels(nn.Cell):
    """Into [0, 255] (the cubic overshoots at edges) and, where asked for, onto whole numbers.

    The rounding has the gradient of the identity.
    """

    def __init__(self, rounded: bool):
        super().__init__()
        self.rounded = rounded

    def construct(self, x: Tensor) -> Tensor:
        y = ops.clamp(x, 0.0, 255.0)
        if self.rounded:
            y = y + ops.stop_gradient(ops.floor(y + 0.5) - y)
        return y


class ImagePreprocess(nn.Cell):
    """Images (B, 3, height, width), float32 in [0, 1], to normalised pixel values (B, 3, size, size).

    Args:
        height, width: of the images, fixed.
        size: of the result.
        mean, std: of each channel in [0, 1].
        resize: `"shortest"` scales the shorter side to `size` and crops the centre (CLIP), `"squash"` scales both
            sides to `size` (SigLIP).
        rounded: round to 8 bits where Pillow does, so that scores are those of the image's PNG file (but for ties,
            one step of 255); the gradient is that of the unrounded map.

    Raises:
        ValueError: another value of `resize`.
    """

    def __init__(
        self,
        height: int,
        width: int,
        size: int,
        mean: tuple[float, ...] = PIXEL_MEAN,
        std: tuple[float, ...] = PIXEL_STD,
        resize: str = "shortest",
        rounded: bool = True,
    ):
        super().__init__()
        if resize not in ("shortest", "squash"):
            raise ValueError(f"resize is {resize!r}; valid: shortest, squash")
        short = min(height, width)
        new_height = int(size * height / short) if resize == "shortest" else size
        new_width = int(size * width / short) if resize == "shortest" else size
        self.rows, self.resize_rows = self._matrix(height, new_height, size)
        self.columns, self.resize_columns = self._matrix(width, new_width, size)
        # Pillow, too, begins with the side that leaves fewer pixels; the rounding between the two shows it.
        self.rows_first = new_height * width < height * new_width
        self.mean = Tensor(255.0 * np.float32(mean).reshape(1, -1, 1, 1))
        self.inverse_std = Tensor((1.0 / (255.0 * np.float32(std))).reshape(1, -1, 1, 1))
        self.to_pixels = _ToPixels(rounded)
        self.from_left, self.from_right = ops.BatchMatMul(), ops.MatMul(transpose_b=True)
        self.size = size

    def _matrix(self, source: int, target: int, size: int) -> tuple[Tensor, bool]:
        """The matrix (size, source) of one side, and whether it changes anything."""
        return Tensor(_cropped_matrix(source, target, size)), not source == target == size

    def _over_rows(self, x: Tensor) -> Tensor:  # (N, height, W) -> (N, size, W)
        rows = ops.broadcast_to(self.rows, (x.shape[0], self.size, x.shape[1]))
        return self.to_pixels(self.from_left(rows, x))

    def _over_columns(self, x: Tensor) -> Tensor:  # (N, H, width) -> (N, H, size)
        y = self.from_right(x.reshape((-1, x.shape[2])), self.columns)
        return self.to_pixels(y.reshape((x.shape[0], x.shape[1], self.size)))

    def construct(self, images: Tensor) -> Tensor:
        batch, channels, height, width = images.shape
        x = self.to_pixels(255.0 * images.reshape((batch * channels, height, width)))
        if self.resize_rows and self.rows_first:
            x = self._over_rows(x)
        if self.resize_columns:
            x = self._over_columns(x)
        if self.resize_rows and not self.rows_first:
            x = self._over_rows(x)
        return (x.reshape((batch, channels, self.size, self.size)) - self.mean) * self.inverse_std
