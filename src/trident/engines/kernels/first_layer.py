"""The encoders' first layer: convolution of the images, batch norm, activation, pooling, in one pass.

Its output before pooling is by far the largest tensor of the network, and is never stored. Two facts make that cheap.

A 4x4 patch of the image contains all inputs of the four pixels of a pooling cell: one matrix product of patches gives
all four. And a task's images stay the same during adaptation: the mean m and covariance V of the patches, computed
once, give the batch norm statistics for any weight (mean m w, variance w V w), and their part of the weight's gradient.
Only the winners, the largest pixel of each pooling cell, need a pass over pixels.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from trident.engines.kernels.convolution import Tiling, add_products
from trident.engines.kernels.launching import launch, rounded
from trident.engines.kernels.sums import add_up

PIXEL = 1 / 256  # images are stored as integers / 256, exact in 16 bits
UNIT = 256 / 255  # converts them to the network's units, where white is 1


@triton.jit
def _patches(images, task, q, valid, FIRST, TOTAL, HP: tl.constexpr):
    """The 4x4 patches of some pooling cells: (cell, 64), from (task, image, 2 HP + 2, 2 HP + 2, 4)."""
    line: tl.constexpr = (2 * HP + 2) * 4
    image = q // (HP * HP)
    row = (q % (HP * HP)) // HP
    column = q % HP
    at = (task * TOTAL + FIRST + image) * ((2 * HP + 2) * line) + row * (2 * line) + column * 8
    j = tl.arange(0, 64)
    return tl.load(images + at[:, None] + ((j // 16) * line + j % 16)[None, :], mask=valid[:, None], other=0.0)


@triton.jit
def _weights(w, CI: tl.constexpr, C: tl.constexpr, UNIT: tl.constexpr, PRECISION: tl.constexpr):
    """(patch pixel, (pixel of the cell, output)) from (3, 3, CI, C)."""
    j = tl.arange(0, 64)[:, None]
    k = tl.arange(0, 4 * C)[None, :]
    row = j // 16 - k // (2 * C)
    column = (j // 4) % 4 - (k // C) % 2
    ci = j % 4
    keep = (row >= 0) & (row < 3) & (column >= 0) & (column < 3) & (ci < CI)
    weights = tl.load(w + ((row * 3 + column) * CI + ci) * C + k % C, mask=keep, other=0.0)
    return rounded(weights * UNIT, PRECISION)


@triton.jit
def _forward(images, w, w_stride, table, winners, which, p, N, FIRST, TOTAL,
             HP: tl.constexpr, CI: tl.constexpr, C: tl.constexpr, SLOPE: tl.constexpr, UNIT: tl.constexpr,
             PRECISION: tl.constexpr, BM: tl.constexpr, TILES: tl.constexpr):  # fmt: skip
    cells = N * HP * HP
    parts = (cells + BM * TILES - 1) // (BM * TILES)
    task = tl.program_id(0) // parts
    c = tl.arange(0, C)[None, :]
    k = tl.arange(0, 4)[None, :, None]
    weights = _weights(w + task.to(tl.int64) * w_stride, CI, C, UNIT, PRECISION).to(images.dtype.element_ty)
    f = table + task * (4 * C) + c
    s, t = tl.load(f + 2 * C), tl.load(f + 3 * C)
    sign = tl.where(s < 0, -1.0, 1.0)
    for tile in range(TILES):
        q = ((tl.program_id(0) % parts) * TILES + tile) * BM + tl.arange(0, BM)
        valid = q < cells
        patches = _patches(images, task, q, valid, FIRST, TOTAL, HP)
        y = tl.dot(patches, weights, input_precision=PRECISION)
        y = tl.reshape(y, (BM, 4, C)) * sign[:, None, :]
        best = tl.max(y, axis=1)
        number = tl.min(tl.where(y == best[:, None, :], k, 4), axis=1)
        best = best * sign
        z = s * best + t
        at = (task * cells + q)[:, None] * C + c
        tl.store(winners + at, best.to(winners.dtype.element_ty), mask=valid[:, None])
        tl.store(which + at, (number + tl.where(z > 0, 4, 0)).to(tl.uint8), mask=valid[:, None])
        z = rounded(tl.where(z > 0, z, SLOPE * z), PRECISION)
        tl.store(p + at, z.to(p.dtype.element_ty), mask=valid[:, None])


@triton.jit
def _tangent(images, w1, w1_stride, forward, tangent, winners, which, p1,
             N, FIRST, TOTAL, HP: tl.constexpr, CI: tl.constexpr, C: tl.constexpr, SLOPE: tl.constexpr,
             UNIT: tl.constexpr, PRECISION: tl.constexpr, BM: tl.constexpr, TILES: tl.constexpr):  # fmt: skip
    cells = N * HP * HP
    parts = (cells + BM * TILES - 1) // (BM * TILES)
    task = tl.program_id(0) // parts
    c = tl.arange(0, C)[None, :]
    k = tl.arange(0, 4)[None, :, None]
    weights = _weights(w1 + task.to(tl.int64) * w1_stride, CI, C, UNIT, PRECISION).to(images.dtype.element_ty)
    s = tl.load(forward + task * (4 * C) + 2 * C + c)
    g = tangent + task * (4 * C) + c
    s1, t1 = tl.load(g + 2 * C), tl.load(g + 3 * C)
    for tile in range(TILES):
        q = ((tl.program_id(0) % parts) * TILES + tile) * BM + tl.arange(0, BM)
        valid = q < cells
        patches = _patches(images, task, q, valid, FIRST, TOTAL, HP)
        y1 = tl.reshape(tl.dot(patches, weights, input_precision=PRECISION), (BM, 4, C))
        at = (task * cells + q)[:, None] * C + c
        code = tl.load(which + at, mask=valid[:, None], other=0).to(tl.int32)
        best1 = tl.sum(tl.where(k == (code & 3)[:, None, :], y1, 0.0), axis=1)
        best = tl.load(winners + at, mask=valid[:, None], other=0.0).to(tl.float32)
        slope = tl.where(code >= 4, 1.0, SLOPE)
        moved = rounded(slope * (s * best1 + s1 * best + t1), PRECISION)
        tl.store(p1 + at, moved.to(p1.dtype.element_ty), mask=valid[:, None])


@triton.jit
def _backward(images, which, dp, partial, N, FIRST, TOTAL, HP: tl.constexpr, C: tl.constexpr, SLOPE: tl.constexpr,
              PRECISION: tl.constexpr, BM: tl.constexpr, TILES: tl.constexpr):  # fmt: skip
    """Sums over the winners of patch times delta. A 1 in an unused entry of the patch gives the sum of delta."""
    cells = N * HP * HP
    parts = (cells + BM * TILES - 1) // (BM * TILES)
    task = tl.program_id(0) // parts
    part = tl.program_id(0) % parts
    j = tl.arange(0, 64)
    k = tl.arange(0, 4 * C)[None, :]
    total = tl.zeros((64, 4 * C), tl.float32)
    for tile in range(TILES):
        q = (part * TILES + tile) * BM + tl.arange(0, BM)
        valid = q < cells
        patches = _with_one(_patches(images, task, q, valid, FIRST, TOTAL, HP), BM)
        # Every pixel of a cell reads the cell's gradient; all but the winner set it to 0.
        at = (task * cells + q)[:, None] * C + k % C
        code = tl.load(which + at, mask=valid[:, None], other=0).to(tl.int32)
        delta = tl.load(dp + at, mask=valid[:, None], other=0.0).to(tl.float32) * tl.where(code >= 4, 1.0, SLOPE)
        delta = rounded(tl.where((code & 3) == k // C, delta, 0.0), PRECISION).to(patches.dtype)
        total = add_products(total, patches, delta, PRECISION)
    tl.store(partial + (task * parts + part) * (256 * C) + j[:, None] * (4 * C) + k, total)


@triton.jit
def _with_one(patches, BM: tl.constexpr):
    """Put a 1 into the fourth channel of the first pixel, which no image uses."""
    first = (tl.arange(0, 64) == 3)[None, :]
    return tl.where(first, tl.full((BM, 64), 1.0, tl.float32).to(patches.dtype), patches)


@triton.jit
def _moments(images, partial, N, FIRST, TOTAL, HP: tl.constexpr,
             PRECISION: tl.constexpr, BM: tl.constexpr, TILES: tl.constexpr):  # fmt: skip
    """Sums of the products of every two pixels of a patch. The 1 in the patch gives the plain sums."""
    cells = N * HP * HP
    parts = (cells + BM * TILES - 1) // (BM * TILES)
    task = tl.program_id(0) // parts
    part = tl.program_id(0) % parts
    j = tl.arange(0, 64)
    total = tl.zeros((64, 64), tl.float32)
    for tile in range(TILES):
        q = (part * TILES + tile) * BM + tl.arange(0, BM)
        valid = q < cells
        patches = _with_one(_patches(images, task, q, valid, FIRST, TOTAL, HP), BM)
        total = tl.dot(tl.trans(patches), patches, total, input_precision=PRECISION)
    at = (task * parts + part) * 4096 + j[:, None] * 64 + j[None, :]
    tl.store(partial + at, total)


# By the number of bytes per value.
FORWARD = {2: Tiling(64, 16, 4, 3), 4: Tiling(64, 16, 4, 3)}
TANGENT = {2: Tiling(128, 8, 4, 3), 4: Tiling(128, 16, 4, 2)}
BACKWARD = {2: Tiling(128, 24, 8, 1), 4: Tiling(64, 24, 4, 1)}


class Pictures:
    """The images of some tasks as the first layer reads them, each with a border of zeros.

    `pixels` is (task, image, size, size, channel), uint8, or floating point in 0 .. 1; the size must be even.
    """

    def __init__(self, pixels: Tensor, dtype: torch.dtype, precision: str):
        tasks, n, size, _, channels = pixels.shape
        self.precision = precision
        self.channels = channels
        self.half = size // 2
        self.padded = torch.zeros(tasks, n, size + 2, size + 2, 4, dtype=dtype, device=pixels.device)
        scale = PIXEL if pixels.dtype == torch.uint8 else 1 / UNIT
        self.padded[:, :, 1:-1, 1:-1, :channels] = pixels * scale

    def rows(self, first: int, count: int) -> "PictureRows":
        return PictureRows(self, first, count, *self._moments(first, count))

    def _moments(self, first: int, count: int) -> tuple[Tensor, Tensor]:
        """The mean of all 3x3 patches, (task, 9 * channels), and their covariance, in the network's units."""
        tasks, total = self.padded.shape[:2]
        cells = count * self.half**2
        block, tiles = 64, 16
        parts = triton.cdiv(cells, block * tiles)
        partial = torch.empty(tasks, parts, 64, 64, device=self.padded.device)
        _moments[(tasks * parts,)](
            self.padded, partial, N=count, FIRST=first, TOTAL=total, HP=self.half,
            PRECISION="tf32", BM=block, TILES=tiles, num_warps=4,
        )  # fmt: skip
        sums = partial.sum(1, dtype=torch.float64).view(tasks, 4, 4, 4, 4, 4, 4)
        plain = sums[:, 0, 0, 3]  # (task, 4, 4, 4): products with the 1
        c = self.channels
        mean = torch.zeros(tasks, 9 * c, dtype=torch.float64, device=sums.device)
        products = torch.zeros(tasks, 9 * c, 9 * c, dtype=torch.float64, device=sums.device)
        for i, j in ((0, 0), (0, 1), (1, 0), (1, 1)):
            rows, columns = slice(i, i + 3), slice(j, j + 3)
            mean += plain[:, rows, columns, :c].reshape(tasks, -1)
            products += sums[:, rows, columns, :c, rows, columns, :c].reshape(tasks, 9 * c, 9 * c)
        mean *= UNIT / (4 * cells)
        products *= UNIT**2 / (4 * cells)
        return mean.float(), (products - mean[:, :, None] * mean[:, None, :]).float()


class PictureRows:
    """Some images of each task, and the moments of their patches."""

    def __init__(self, pictures: Pictures, first: int, count: int, mean: Tensor, covariance: Tensor):
        self.pictures, self.first, self.count = pictures, first, count
        self.mean, self.covariance = mean, covariance
        self.cells = count * pictures.half**2
        self.tasks = len(mean)

    def _settings(self, slope: float, tilings: dict[int, Tiling]) -> tuple[int, dict[str, Any]]:
        """The number of programs per task, and the kernels' settings."""
        p, tiling = self.pictures, tilings[self.pictures.padded.element_size()]
        return triton.cdiv(self.cells, tiling.block * tiling.rows), {
            "N": self.count, "FIRST": self.first, "TOTAL": p.padded.shape[1], "HP": p.half, "SLOPE": slope,
            "PRECISION": p.precision, "BM": tiling.block, "TILES": tiling.rows, "num_warps": tiling.warps,
            "num_stages": tiling.stages,
        }  # fmt: skip

    def _maps(self, channels: int, dtype: torch.dtype) -> Tensor:
        padded, half = self.pictures.padded, self.pictures.half
        return torch.empty(self.tasks, self.count, half, half, channels, dtype=dtype, device=padded.device)

    def forward(self, weight: Tensor, table: Tensor, slope: float) -> tuple[Tensor, Tensor, Tensor]:
        """The winners before batch norm, their index in the cell (plus 4 if positive after it), and the output."""
        channels, dtype = weight.shape[4], self.pictures.padded.dtype
        winners, p = self._maps(channels, dtype), self._maps(channels, dtype)
        which = self._maps(channels, torch.uint8)
        parts, settings = self._settings(slope, FORWARD)
        launch(
            _forward, self.tasks * parts, self.pictures.padded, weight, weight.stride(0), table, winners, which, p,
            CI=self.pictures.channels, C=channels, UNIT=UNIT, **settings,
        )  # fmt: skip
        return winners, which, p

    def tangent(
        self, weight1: Tensor, forward: Tensor, tangent: Tensor, winners: Tensor, which: Tensor, slope: float
    ) -> Tensor:
        """The output's tangent."""
        p1 = torch.empty_like(winners)
        parts, settings = self._settings(slope, TANGENT)
        launch(
            _tangent, self.tasks * parts, self.pictures.padded, weight1, weight1.stride(0), forward, tangent, winners,
            which, p1, CI=self.pictures.channels, C=weight1.shape[4], UNIT=UNIT, **settings,
        )  # fmt: skip
        return p1

    def backward(self, which: Tensor, dp: Tensor, slope: float) -> Tensor:
        """Sums over the winners of 4x4 patch times delta: (task, 64, 4 * output), for `first_coefficients`."""
        channels = dp.shape[4]
        parts, settings = self._settings(slope, BACKWARD)
        partial = torch.empty(self.tasks, parts, 256 * channels, device=dp.device)
        launch(_backward, self.tasks * parts, self.pictures.padded, which, dp, partial, C=channels, **settings)
        total = torch.empty(self.tasks, 64, 4 * channels, device=dp.device)
        add_up(partial, total)
        return total
