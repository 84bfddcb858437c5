"""Two-dimensional convolution on (B, C, H, W)."""

import numpy as np
from mindspore import Tensor, nn, ops

from dancegrpo.ops.device import select

Padding = tuple[int, int, int, int]


_MAX_COLUMNS = 2**26
"""Most numbers of gathered windows at a time (256 MB): images of 512 pixels would otherwise take gigabytes."""


@ops.constexpr
def _taps(size: tuple[int, int], kernel: int, stride: int, padding: Padding, start: int, stop: int) -> Tensor:
    """For output pixels `start` to `stop` and each tap the number of the input pixel; H * W for the padding."""
    return Tensor(_tap_table(size, kernel, stride, padding)[start:stop].reshape(-1).astype(np.int32))


@ops.constexpr
def _taps_back(
    size: tuple[int, int], kernel: int, stride: int, padding: Padding, start: int, stop: int
) -> Tensor:
    """For input pixels `start` to `stop` and each tap the output pixel reached through it; their count for none."""
    table = _tap_table(size, kernel, stride, padding)
    inverse = np.full((size[0] * size[1] + 1, kernel * kernel), table.shape[0])
    for tap in range(kernel * kernel):
        inverse[table[:, tap], tap] = np.arange(table.shape[0])
    return Tensor(inverse[:-1][start:stop].reshape(-1).astype(np.int32))


def _tap_table(size: tuple[int, int], kernel: int, stride: int, padding: Padding) -> np.ndarray:
    height, width = size
    top, bottom, left, right = padding
    numbers = np.arange(height * width).reshape(height, width)
    numbers = np.pad(numbers, ((top, bottom), (left, right)), constant_values=height * width)
    windows = np.lib.stride_tricks.sliding_window_view(numbers, (kernel, kernel))[::stride, ::stride]
    return windows.reshape(-1, kernel * kernel)


def _tokens(x: Tensor) -> Tensor:  # (B, C, H, W) -> (B, H * W, C)
    return ops.transpose(x.reshape((x.shape[0], x.shape[1], -1)), (0, 2, 1))


def _gather(tokens: Tensor, taps: Tensor) -> Tensor:  # (B, N, C), (M,) -> (B, M, C); number N is a zero
    batch, _, channels = tokens.shape
    padded = ops.concat((tokens, ops.zeros((batch, 1, channels), tokens.dtype)), 1)
    return ops.gather(padded, taps, 1)


class _ConvolutionAsProduct(nn.Cell):
    """Windows gathered by their pixels' numbers, times the weight as a matrix.

    On CPU a product is near the machine's peak, which MindSpore's convolution is far from, its gradient above all. For
    the gradient of x each input pixel gathers the output pixels that it reached, for that of the weight the windows are
    gathered again: nothing is scattered, and no windows are kept from the forward pass.
    """

    def __init__(self, in_channels: int, out_channels: int, kernel_size: int, stride: int, padding: Padding):
        super().__init__()
        self.in_channels, self.out_channels, self.taps = in_channels, out_channels, kernel_size**2
        self.kernel_size, self.stride, self.padding = kernel_size, stride, padding
        self.product = ops.MatMul()
        self.product_transposed = ops.MatMul(transpose_b=True)
        self.product_over_rows = ops.MatMul(transpose_a=True)

    def _output_size(self, x: Tensor) -> tuple[int, int]:
        top, bottom, left, right = self.padding
        height = (x.shape[2] + top + bottom - self.kernel_size) // self.stride + 1
        return height, (x.shape[3] + left + right - self.kernel_size) // self.stride + 1

    def _windows(self, x: Tensor, start: int, stop: int) -> Tensor:  # (B, C, H, W) -> (B * pixels, taps * C)
        taps = _taps(x.shape[2:], self.kernel_size, self.stride, self.padding, start, stop)
        return _gather(_tokens(x), taps).reshape((-1, self.taps * self.in_channels))

    def construct(self, x: Tensor, weight: Tensor) -> Tensor:
        height, width = self._output_size(x)
        batch, pixels = x.shape[0], height * width
        by_tap = weight.reshape((self.out_channels, self.in_channels, self.taps))
        matrix = ops.transpose(by_tap, (0, 2, 1)).reshape((self.out_channels, self.taps * self.in_channels))
        pieces = ()
        for start, stop in _slices(pixels, batch * self.taps * self.in_channels):
            windows = self._windows(x, start, stop)
            y = self.product_transposed(windows, matrix)
            pieces = pieces + (y.reshape((batch, -1, self.out_channels)),)
        return ops.transpose(_joined(pieces), (0, 2, 1)).reshape((batch, self.out_channels, height, width))

    def bprop(self, x, weight, out, dout):
        return self._of_input(x, weight, dout), self._of_weight(x, weight, dout)

    def _of_input(self, x: Tensor, weight: Tensor, dout: Tensor) -> Tensor:
        batch, pixels = x.shape[0], x.shape[2] * x.shape[3]
        by_tap = weight.reshape((self.out_channels, self.in_channels, self.taps))
        matrix = ops.transpose(by_tap, (2, 0, 1)).reshape((self.taps * self.out_channels, self.in_channels))
        tokens = _tokens(dout)
        pieces = ()
        for start, stop in _slices(pixels, batch * self.taps * self.out_channels):
            taps = _taps_back(x.shape[2:], self.kernel_size, self.stride, self.padding, start, stop)
            reached = _gather(tokens, taps).reshape((-1, self.taps * self.out_channels))
            pieces = pieces + (self.product(reached, matrix).reshape((batch, -1, self.in_channels)),)
        return ops.transpose(_joined(pieces), (0, 2, 1)).reshape(x.shape)

    def _of_weight(self, x: Tensor, weight: Tensor, dout: Tensor) -> Tensor:
        tokens = _tokens(dout)
        batch, pixels = tokens.shape[0], tokens.shape[1]
        pieces = ()
        for start, stop in _slices(pixels, batch * self.taps * self.in_channels):
            rows = (tokens[:, start:stop] if stop - start < pixels else tokens).reshape(
                (-1, self.out_channels)
            )
            pieces = pieces + (self.product_over_rows(rows, self._windows(x, start, stop)),)
        dw = pieces[0] if len(pieces) == 1 else ops.addn(pieces)
        dw = ops.transpose(dw.reshape((self.out_channels, self.taps, self.in_channels)), (0, 2, 1))
        return dw.reshape(weight.shape)


@ops.constexpr
def _slices(pixels: int, numbers: int) -> tuple[tuple[int, int], ...]:
    """(start, stop) of the pixels to work on at a time, with so many numbers for each."""
    parts = min(-(-pixels * numbers // _MAX_COLUMNS), pixels)
    return tuple((i * pixels // parts, (i + 1) * pixels // parts) for i in range(parts))


def _joined(pieces: tuple[Tensor, ...]) -> Tensor:
    return pieces[0] if len(pieces) == 1 else ops.concat(pieces, 1)


class _ConvolutionKernel(nn.Cell):
    """`mindspore.ops.Conv2D` with its own gradient (CANN's kernels on Ascend)."""

    def __init__(self, in_channels: int, out_channels: int, kernel_size: int, stride: int, padding: Padding):
        super().__init__()
        self.kernel = _kernel(out_channels, kernel_size, stride, padding)

    def construct(self, x: Tensor, weight: Tensor) -> Tensor:
        return self.kernel(x, weight)


def _kernel(out_channels: int, kernel_size: int, stride: int, padding: Padding) -> ops.Conv2D:
    return ops.Conv2D(out_channels, kernel_size, pad_mode="pad", pad=padding, stride=stride)


def Convolution(
    in_channels: int,
    out_channels: int,
    kernel_size: int,
    stride: int = 1,
    padding: int | Padding = 0,
    device: str | None = None,
) -> nn.Cell:
    """Convolution with zero padding, called as (x, weight): (B, C, H, W) and (C', C, K, K) to (B, C', H', W').

    Both have one dtype, which the result has, too.

    Args:
        in_channels: C.
        out_channels: C'.
        kernel_size: K.
        stride: step between windows in both directions.
        padding: rows or columns of zeros, the same on all sides or (top, bottom, left, right).
        device: as in `select`.
    """
    sides = (padding,) * 4 if isinstance(padding, int) else tuple(padding)
    implementation = select({"CPU": _ConvolutionAsProduct, "Ascend": _ConvolutionKernel}, device)
    return implementation(in_channels, out_channels, kernel_size, stride, sides)
