"""3x3 convolution with a weight per task, and its weight gradient. All their derivatives are made of these two.

Both can add two pairs at once, because the derivative of a product is a sum of two products.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from trident.engines.kernels.launching import launch, rounded
from trident.engines.kernels.sums import add_up


@triton.jit
def _source(place, UP: tl.constexpr):
    """The source of an upsampled row or column. UP 1 doubles; UP 2 doubles and repeats the first once more."""
    if UP == 1:
        return place // 2
    elif UP == 2:
        return tl.maximum(place - 1, 0) // 2
    else:
        return place


@triton.jit
def _weights(w, tap, CI: tl.constexpr, CIP: tl.constexpr, CO: tl.constexpr, TRANSPOSED: tl.constexpr,
             PRECISION: tl.constexpr):  # fmt: skip
    """The weights of one column of the window, (input, (row, output)), where the fourth row is empty."""
    ci = tl.arange(0, CIP)[:, None]
    k = tl.arange(0, 4 * CO)[None, :]
    row = k // CO
    co = k % CO
    if TRANSPOSED:  # for gradients: flipped, inputs and outputs swapped
        at = (((2 - row) * 3 + (2 - tap)) * CO + co) * CI + ci
    else:
        at = ((row * 3 + tap) * CI + ci) * CO + co
    return rounded(tl.load(w + at, mask=(row < 3) & (ci < CI), other=0.0), PRECISION)


@triton.jit
def _row_of(P, ROW: tl.constexpr, BM: tl.constexpr, CO: tl.constexpr):
    """(pixel, (row, output)) -> (pixel, output): the part of one row of the window."""
    rows = tl.arange(0, 4)[None, :, None]
    return tl.sum(tl.where(rows == ROW, tl.reshape(P, (BM, 4, CO)), 0.0), axis=1)


@triton.jit
def _products(P, x, at, keep, hi, w0, w1, w2, W: tl.constexpr, column, CI: tl.constexpr, CIP: tl.constexpr,
              SW: tl.constexpr, UP: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    """Add one input row's contribution: three neighbours in the row times the weights of their column."""
    ci = tl.arange(0, CIP)[None, :]
    line = x + at + _source(hi, UP) * (SW * CI)
    for tap in tl.static_range(3):
        col = column + (tap - 1)
        inside = keep & (col >= 0) & (col < W)
        place = line + _source(tl.maximum(col, 0), UP) * CI
        pixels = tl.load(place[:, None] + ci, mask=inside[:, None] & (ci < CI), other=0.0)
        w = w0 if tap == 0 else (w1 if tap == 1 else w2)
        P = tl.dot(pixels, w.to(pixels.dtype), P, input_precision=PRECISION)
    return P


@triton.jit
def _convolve(
    x, w, w_stride, x2, w2, w2_stride, factor2, y, other, partial,
    N, H: tl.constexpr, W: tl.constexpr, SH: tl.constexpr, SW: tl.constexpr,
    CI: tl.constexpr, CIP: tl.constexpr, CO: tl.constexpr, UP: tl.constexpr, TRANSPOSED: tl.constexpr,
    PAIRS: tl.constexpr, FACTOR: tl.constexpr, SUMS: tl.constexpr, PRECISION: tl.constexpr, BM: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    """A program computes some rows of `BM` columns, counted through all images of a task.

    Each input row is read once. Its products with the three rows of the window go to three output rows. The two that
    are not complete stay in registers.
    """
    tiles = (N * W + BM - 1) // BM
    chunks: tl.constexpr = (H + ROWS - 1) // ROWS
    program = tl.program_id(0)
    task = program // (tiles * chunks)
    part = program % (tiles * chunks)
    first = (part // tiles) * ROWS
    m = (part % tiles) * BM + tl.arange(0, BM)
    image = m // W
    column = m % W
    valid = m < N * W
    at = (task * N + image) * (SH * SW * CI)
    co = tl.arange(0, CO)[None, :]
    w += task.to(tl.int64) * w_stride
    a0 = _weights(w, 0, CI, CIP, CO, TRANSPOSED, PRECISION)
    a1 = _weights(w, 1, CI, CIP, CO, TRANSPOSED, PRECISION)
    a2 = _weights(w, 2, CI, CIP, CO, TRANSPOSED, PRECISION)
    if PAIRS == 2:
        w2 += task.to(tl.int64) * w2_stride
        b0 = _weights(w2, 0, CI, CIP, CO, TRANSPOSED, PRECISION)
        b1 = _weights(w2, 1, CI, CIP, CO, TRANSPOSED, PRECISION)
        b2 = _weights(w2, 2, CI, CIP, CO, TRANSPOSED, PRECISION)
        if FACTOR:
            factor = tl.load(factor2 + task)
            b0, b1, b2 = b0 * factor, b1 * factor, b2 * factor
    out = ((task * N + image) * (H * W) + column)[:, None] * CO + co
    done = tl.zeros((BM, CO), tl.float32)
    begun = tl.zeros((BM, CO), tl.float32)
    sum1 = tl.zeros((BM, CO), tl.float32)
    sum2 = tl.zeros((BM, CO), tl.float32)
    for r in range(ROWS + 2):
        hi = first - 1 + r
        keep = valid & (hi >= 0) & (hi < H)
        row = tl.maximum(hi, 0)
        P = tl.zeros((BM, 4 * CO), tl.float32)
        P = _products(P, x, at, keep, row, a0, a1, a2, W, column, CI, CIP, SW, UP, PRECISION)
        if PAIRS == 2:
            P = _products(P, x2, at, keep, row, b0, b1, b2, W, column, CI, CIP, SW, UP, PRECISION)
        done += _row_of(P, 2, BM, CO)
        ho = hi - 1
        write = (valid & (r >= 2) & (ho < H))[:, None]
        tl.store(y + out + ho * (W * CO), done.to(y.dtype.element_ty), mask=write)
        if SUMS > 0:
            value = tl.where(write, done, 0.0)
            sum1 += value
            if SUMS == 1:
                sum2 += value * value
            else:
                sum2 += value * tl.load(other + out + ho * (W * CO), mask=write, other=0.0).to(tl.float32)
        done = begun + _row_of(P, 1, BM, CO)
        begun = _row_of(P, 0, BM, CO)
    if SUMS > 0:
        to = partial + (task * (tiles * chunks) + part) * (2 * CO) + tl.arange(0, CO)
        tl.store(to, tl.sum(sum1, axis=0))
        tl.store(to + CO, tl.sum(sum2, axis=0))


@triton.jit
def add_products(total, a, b, PRECISION: tl.constexpr):
    """total + a' b, where the sum runs over pixels.

    Tensor cores can transpose 16-bit operands but not 32-bit ones. So a TF32 number is split into two bf16 numbers that
    add up to it exactly. The product of both low parts is below rounding and omitted.
    """
    if PRECISION == "tf32" and a.dtype == tl.float32:
        a_high = a.to(tl.bfloat16)
        b_high = b.to(tl.bfloat16)
        a_low = (a - a_high.to(tl.float32)).to(tl.bfloat16)
        b_low = (b - b_high.to(tl.float32)).to(tl.bfloat16)
        total = tl.dot(tl.trans(a_low), b_high, total)
        total = tl.dot(tl.trans(a_high), b_low, total)
        return tl.dot(tl.trans(a_high), b_high, total)
    else:
        return tl.dot(tl.trans(a), b, total, input_precision=PRECISION)


@triton.jit
def _correlate(
    x, dy, x2, dy2, factor2, partial,
    N, H: tl.constexpr, W: tl.constexpr, SH: tl.constexpr, SW: tl.constexpr,
    CI: tl.constexpr, CIP: tl.constexpr, CO: tl.constexpr, COP: tl.constexpr, UP: tl.constexpr,
    PAIRS: tl.constexpr, PRECISION: tl.constexpr, BM: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """The weight gradient. A program sums over some rows of `BM` columns."""
    tiles = (N * W + BM - 1) // BM
    chunks: tl.constexpr = (H + ROWS - 1) // ROWS
    program = tl.program_id(0)
    task = program // (tiles * chunks)
    part = program % (tiles * chunks)
    first = (part // tiles) * ROWS
    m = (part % tiles) * BM + tl.arange(0, BM)
    image = m // W
    column = m % W
    valid = m < N * W
    j = tl.arange(0, 4 * CIP)
    tap = j // CIP
    ci = j % CIP
    co = tl.arange(0, COP)
    col = column[:, None] + tap[None, :] - 1
    inside = valid[:, None] & ((tap < 3) & (ci < CI))[None, :] & (col >= 0) & (col < W)
    near = ((task * N + image) * (SH * SW * CI))[:, None] + _source(tl.maximum(col, 0), UP) * CI + ci[None, :]
    far = (((task * N + image) * (H * W) + column) * CO)[:, None] + co[None, :]
    good = valid[:, None] & (co < CO)[None, :]
    sum0 = tl.zeros((4 * CIP, COP), tl.float32)
    sum1 = tl.zeros((4 * CIP, COP), tl.float32)
    sum2 = tl.zeros((4 * CIP, COP), tl.float32)
    if PAIRS == 2:
        factor = tl.load(factor2 + task)
    for r in range(ROWS):
        hi = first + r
        row = _source(hi, UP) * (SW * CI)
        pixels = tl.load(x + near + row, mask=inside & (hi < H), other=0.0)
        below = tl.load(dy + far + (hi + 1) * (W * CO), mask=good & (hi + 1 < H), other=0.0)
        level = tl.load(dy + far + hi * (W * CO), mask=good & (hi < H), other=0.0)
        above = tl.load(dy + far + (hi - 1) * (W * CO), mask=good & (hi > 0) & (hi - 1 < H), other=0.0)
        sum0 = add_products(sum0, pixels, below, PRECISION)
        sum1 = add_products(sum1, pixels, level, PRECISION)
        sum2 = add_products(sum2, pixels, above, PRECISION)
        if PAIRS == 2:
            pixels = tl.load(x2 + near + row, mask=inside & (hi < H), other=0.0)
            pixels = (pixels.to(tl.float32) * factor).to(pixels.dtype)
            below = tl.load(dy2 + far + (hi + 1) * (W * CO), mask=good & (hi + 1 < H), other=0.0)
            level = tl.load(dy2 + far + hi * (W * CO), mask=good & (hi < H), other=0.0)
            above = tl.load(dy2 + far + (hi - 1) * (W * CO), mask=good & (hi > 0) & (hi - 1 < H), other=0.0)
            sum0 = add_products(sum0, pixels, below, PRECISION)
            sum1 = add_products(sum1, pixels, level, PRECISION)
            sum2 = add_products(sum2, pixels, above, PRECISION)
    to = partial + (task * (tiles * chunks) + part) * (9 * CI * CO) + ((tap * CI + ci) * CO)[:, None] + co[None, :]
    keep = ((tap < 3) & (ci < CI))[:, None] & (co < CO)[None, :]
    tl.store(to, sum0, mask=keep)
    tl.store(to + 3 * CI * CO, sum1, mask=keep)
    tl.store(to + 6 * CI * CO, sum2, mask=keep)


class Tiling(NamedTuple):
    """How the work is divided. Tuned on an H200; any choice gives the same results up to rounding."""

    block: int  # columns, or pooling cells, at a time
    rows: int  # rows, or blocks, per program
    warps: int
    stages: int


# By the number of bytes per value and the number of pairs.
CONVOLVE = {
    (2, 1): Tiling(64, 42, 4, 3),
    (2, 2): Tiling(128, 42, 8, 3),
    (4, 1): Tiling(128, 42, 8, 3),
    (4, 2): Tiling(64, 42, 4, 2),
}
CORRELATE = {
    (2, 1): Tiling(64, 42, 4, 3),
    (2, 2): Tiling(32, 42, 4, 3),
    (4, 1): Tiling(32, 42, 4, 1),
    (4, 2): Tiling(32, 42, 4, 1),
}


def _up(source: int, size: int) -> int:
    return {source: 0, 2 * source: 1, 2 * source + 1: 2}[size]


def convolve(
    x: Tensor,  # (task, image, h, w, inputs)
    weight: Tensor,  # (task, 3, 3, inputs, outputs) float32, any task stride
    precision: str,
    second: tuple[Tensor, Tensor, Tensor | None] | None = None,  # add another input and weight, times (task,)
    transposed: bool = False,  # flip the weight and swap inputs and outputs, for gradients
    size: int | None = None,  # upsample the input to this height and width first
    sums_with: Tensor | None = None,  # also return sums over a task: of the result and its product with this
    sums: bool = False,  # also return sums over a task: of the result and its square
) -> tuple[Tensor, Tensor | None]:
    tasks, n, height, width, inputs = x.shape
    size_out = (size, size) if size is not None else (height, width)
    outputs = weight.shape[3 if transposed else 4]
    y = x.new_empty(tasks, n, *size_out, outputs)
    pairs = 1 if second is None else 2
    tiling = CONVOLVE[x.element_size(), pairs]
    rows = min(size_out[0], tiling.rows)
    parts = triton.cdiv(n * size_out[1], tiling.block) * triton.cdiv(size_out[0], rows)
    partial = None
    if sums or sums_with is not None:
        partial = torch.empty(tasks, parts, 2, outputs, device=x.device)
    x2, w2, factor2 = second if second is not None else (x, weight, None)
    other = y if sums_with is None else sums_with
    launch(
        _convolve, tasks * parts, x, weight, weight.stride(0), x2, w2, w2.stride(0), factor2, y, other, partial,
        N=n, H=size_out[0], W=size_out[1], SH=height, SW=width, CI=inputs, CIP=max(16, inputs), CO=outputs,
        UP=_up(height, size_out[0]), TRANSPOSED=transposed, PAIRS=pairs, FACTOR=factor2 is not None,
        SUMS=2 if sums_with is not None else int(sums), PRECISION=precision, BM=tiling.block, ROWS=rows,
        num_warps=tiling.warps, num_stages=tiling.stages,
    )  # fmt: skip
    return y, partial


def correlate(
    x: Tensor,  # (task, image, h, w, inputs)
    gradient: Tensor,  # (task, image, size, size, outputs)
    precision: str,
    factor: Tensor,  # (task,): the result is multiplied by it
    out: Tensor,  # (task, 3, 3, inputs, outputs) float32, any task stride
    second: tuple[Tensor, Tensor, Tensor] | None = None,  # another pair, and the factor of its input
) -> None:
    """The weight gradient."""
    tasks, n, height, width, inputs = x.shape
    size, outputs = gradient.shape[2], gradient.shape[4]
    pairs = 1 if second is None else 2
    tiling = CORRELATE[x.element_size(), pairs]
    rows = min(size, tiling.rows)
    parts = triton.cdiv(n * size, tiling.block) * triton.cdiv(size, rows)
    partial = torch.empty(tasks, parts, 9 * inputs * outputs, device=x.device)
    x2, gradient2, factor2 = second if second is not None else (x, gradient, factor)
    launch(
        _correlate, tasks * parts, x, gradient, x2, gradient2, factor2, partial,
        N=n, H=size, W=size, SH=height, SW=width, CI=inputs, CIP=max(16, inputs), CO=outputs, COP=max(16, outputs),
        UP=_up(height, size), PAIRS=pairs, PRECISION=precision, BM=tiling.block, ROWS=rows, num_warps=tiling.warps,
        num_stages=tiling.stages,
    )  # fmt: skip
    add_up(partial, out, factor)
