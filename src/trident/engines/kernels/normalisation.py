"""Batch norm, activation and 2x2 max pooling in one pass over the convolution's output, and the same for gradients.

Every pass computes the largest pixel of a pooling cell and its sign again: cheaper than storing them.
`coefficients.py` explains the tables.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from trident.engines.kernels.coefficients import Lines
from trident.engines.kernels.launching import rounded


@triton.jit
def _slope(z, SLOPE: tl.constexpr):
    """The activation's derivative. A slope of 1 means no activation."""
    return tl.where(z > 0, 1.0, SLOPE)


@triton.jit
def _place(q, N, H: tl.constexpr, W: tl.constexpr, POOL: tl.constexpr, WHOLE: tl.constexpr):
    """Cell number -> its first pixel, its row and column of cells. WHOLE omits an odd last row and column."""
    if POOL:
        rows: tl.constexpr = H // 2 if WHOLE else (H + 1) // 2
        columns: tl.constexpr = W // 2 if WHOLE else (W + 1) // 2
        image = q // (rows * columns)
        row = (q % (rows * columns)) // columns
        column = q % columns
        return image * (H * W) + row * (2 * W) + column * 2, row, column, image
    else:
        return q, q, q, q


@triton.jit
def _winner(y0, y1, y2, y3, s):
    """The index of the pixel that is largest after batch norm: the smallest input where the scale s is negative."""
    sign = tl.where(s < 0, -1.0, 1.0)
    best = tl.maximum(tl.maximum(y0 * sign, y1 * sign), tl.maximum(y2 * sign, y3 * sign))
    return tl.where(y0 * sign == best, 0, tl.where(y1 * sign == best, 1, tl.where(y2 * sign == best, 2, 3)))


@triton.jit
def _select(which, v0, v1, v2, v3):
    return tl.where(which == 0, v0, tl.where(which == 1, v1, tl.where(which == 2, v2, v3)))


@triton.jit
def _pixel(y, at, keep):
    return tl.load(y + at, mask=keep, other=0.0).to(tl.float32)


@triton.jit
def _cell(y, at, m0, m1, m2, m3, W: tl.constexpr, C: tl.constexpr):
    """The four pixels of a pooling cell; 0 where masked."""
    return _pixel(y, at, m0), _pixel(y, at + C, m1), _pixel(y, at + W * C, m2), _pixel(y, at + (W + 1) * C, m3)


@triton.jit
def _activate(y, y1, forward, tangent, p, N, H: tl.constexpr, W: tl.constexpr, C: tl.constexpr,
              SLOPE: tl.constexpr, POOL: tl.constexpr, TANGENT: tl.constexpr, PRECISION: tl.constexpr,
              BP: tl.constexpr):  # fmt: skip
    cells = N * (H // 2) * (W // 2) if POOL else N * H * W
    blocks = (cells + BP - 1) // BP
    task = tl.program_id(0) // blocks
    q = (tl.program_id(0) % blocks) * BP + tl.arange(0, BP)
    c = tl.arange(0, C)[None, :]
    f = forward + task * (4 * C) + c
    s, t = tl.load(f + 2 * C), tl.load(f + 3 * C)
    keep = (q < cells)[:, None]
    pixel, row, column, image = _place(q, N, H, W, POOL, True)
    at = (task * (N * H * W) + pixel)[:, None] * C + c
    if POOL:
        v0, v1, v2, v3 = _cell(y, at, keep, keep, keep, keep, W, C)
        which = _winner(v0, v1, v2, v3, s)
        value = _select(which, v0, v1, v2, v3)
    else:
        value = _pixel(y, at, keep)
    z = s * value + t
    result = z * _slope(z, SLOPE)
    if TANGENT:
        if POOL:
            d0, d1, d2, d3 = _cell(y1, at, keep, keep, keep, keep, W, C)
            d = _select(which, d0, d1, d2, d3)
        else:
            d = _pixel(y1, at, keep)
        g = tangent + task * (4 * C) + c
        result = _slope(z, SLOPE) * (s * d + tl.load(g + 2 * C) * value + tl.load(g + 3 * C))
    result = rounded(result, PRECISION)
    tl.store(p + (task * cells + q)[:, None] * C + c, result.to(p.dtype.element_ty), mask=keep)


@triton.jit
def _sums(y, y1, dp, dp1, forward, partial, N, H: tl.constexpr, W: tl.constexpr, C: tl.constexpr,
          SLOPE: tl.constexpr, POOL: tl.constexpr, TANGENT: tl.constexpr, BP: tl.constexpr,
          TILES: tl.constexpr):  # fmt: skip
    """Sums over a task of delta and delta y, or for tangents of delta', delta' y and delta y'."""
    cells = N * (H // 2) * (W // 2) if POOL else N * H * W
    parts = (cells + BP * TILES - 1) // (BP * TILES)
    task = tl.program_id(0) // parts
    part = tl.program_id(0) % parts
    c = tl.arange(0, C)[None, :]
    f = forward + task * (4 * C) + c
    s, t = tl.load(f + 2 * C), tl.load(f + 3 * C)
    sum0 = tl.zeros((BP, C), tl.float32)
    sum1 = tl.zeros((BP, C), tl.float32)
    sum2 = tl.zeros((BP, C), tl.float32)
    for tile in range(TILES):
        q = (part * TILES + tile) * BP + tl.arange(0, BP)
        keep = (q < cells)[:, None]
        pixel, row, column, image = _place(q, N, H, W, POOL, True)
        at = (task * (N * H * W) + pixel)[:, None] * C + c
        if POOL:
            v0, v1, v2, v3 = _cell(y, at, keep, keep, keep, keep, W, C)
            which = _winner(v0, v1, v2, v3, s)
            value = _select(which, v0, v1, v2, v3)
        else:
            value = _pixel(y, at, keep)
        slope = _slope(s * value + t, SLOPE)
        to = (task * cells + q)[:, None] * C + c
        delta = _pixel(dp, to, keep) * slope
        if TANGENT:
            if POOL:
                d0, d1, d2, d3 = _cell(y1, at, keep, keep, keep, keep, W, C)
                d = _select(which, d0, d1, d2, d3)
            else:
                d = _pixel(y1, at, keep)
            sum2 += delta * d
            delta = _pixel(dp1, to, keep) * slope
        sum0 += delta
        sum1 += delta * value
    to = partial + (task * parts + part) * (3 * C) + tl.arange(0, C)
    tl.store(to, tl.sum(sum0, axis=0))
    tl.store(to + C, tl.sum(sum1, axis=0))
    tl.store(to + 2 * C, tl.sum(sum2, axis=0))


@triton.jit
def _store_pixel(dy, at, keep, y, y1, delta, k0, k1, ky1, TANGENT: tl.constexpr, PRECISION: tl.constexpr):
    """Store one pixel's gradient: k0 + k1 y, plus delta for the largest pixel of the cell."""
    value = _pixel(y, at, keep)
    result = k0 + k1 * value + delta
    if TANGENT:
        result += ky1 * _pixel(y1, at, keep)
    tl.store(dy + at, rounded(result, PRECISION).to(dy.dtype.element_ty), mask=keep)


@triton.jit
def _input_gradient(y, y1, dp, dp1, forward, gradient, dy, N, H: tl.constexpr, W: tl.constexpr,
            C: tl.constexpr, SLOPE: tl.constexpr, POOL: tl.constexpr, TANGENT: tl.constexpr,
            PRECISION: tl.constexpr, BP: tl.constexpr):  # fmt: skip
    """From the gradient of the pooled output to that of the convolution's output, or the same for tangents."""
    cells = N * ((H + 1) // 2) * ((W + 1) // 2) if POOL else N * H * W
    blocks = (cells + BP - 1) // BP
    task = tl.program_id(0) // blocks
    q = (tl.program_id(0) % blocks) * BP + tl.arange(0, BP)
    c = tl.arange(0, C)[None, :]
    f = forward + task * (4 * C) + c
    s, t = tl.load(f + 2 * C), tl.load(f + 3 * C)
    g = gradient + task * (4 * C) + c
    if TANGENT:
        s1, ky1, k1, k0 = tl.load(g), tl.load(g + C), tl.load(g + 2 * C), tl.load(g + 3 * C)
    else:
        k0, k1 = tl.load(g + 2 * C), tl.load(g + 3 * C)
        s1, ky1 = k0, k0
    inside = q < cells
    pixel, row, column, image = _place(q, N, H, W, POOL, False)
    at = (task * (N * H * W) + pixel)[:, None] * C + c
    m0 = inside[:, None]
    if POOL:
        m1 = (inside & (2 * column + 1 < W))[:, None]
        m2 = (inside & (2 * row + 1 < H))[:, None]
        m3 = m1 & m2
        v0, v1, v2, v3 = _cell(y, at, m0, m1, m2, m3, W, C)
        which = _winner(v0, v1, v2, v3, s)
        to = (((task * N + image) * (H // 2) + row) * (W // 2) + column)[:, None] * C + c
        whole = m3
        slope = _slope(s * _select(which, v0, v1, v2, v3) + t, SLOPE)
    else:
        to = (task * cells + q)[:, None] * C + c
        whole = m0
        slope = _slope(s * _pixel(y, at, m0) + t, SLOPE)
    delta = _pixel(dp, to, whole) * slope
    if TANGENT:
        delta = s1 * delta + s * _pixel(dp1, to, whole) * slope
    else:
        delta = s * delta
    if POOL:
        _store_pixel(dy, at, m0, y, y1, tl.where(which == 0, delta, 0.0), k0, k1, ky1, TANGENT, PRECISION)
        _store_pixel(dy, at + C, m1, y, y1, tl.where(which == 1, delta, 0.0), k0, k1, ky1, TANGENT, PRECISION)
        _store_pixel(dy, at + W * C, m2, y, y1, tl.where(which == 2, delta, 0.0), k0, k1, ky1, TANGENT, PRECISION)
        _store_pixel(dy, at + (W + 1) * C, m3, y, y1, tl.where(which == 3, delta, 0.0), k0, k1, ky1, TANGENT, PRECISION)
    else:
        _store_pixel(dy, at, m0, y, y1, delta, k0, k1, ky1, TANGENT, PRECISION)


def _shape(y: Tensor) -> dict[str, int]:
    _, n, height, width, channels = y.shape
    return {"N": n, "H": height, "W": width, "C": channels}


def activate(y: Tensor, lines: Lines, slope: float, pool: bool, tangent: tuple[Tensor, Tensor] | None = None) -> Tensor:
    """The layer's output; with `tangent` = (y', table), the output's tangent."""
    tasks, n, height, width, channels = y.shape
    size = (height // 2, width // 2) if pool else (height, width)
    p = y.new_empty(tasks, n, *size, channels)
    block = 64
    grid = (tasks * triton.cdiv(n * size[0] * size[1], block),)
    y1, table = tangent if tangent is not None else (y, lines.forward)
    _activate[grid](y, y1, lines.forward, table, p, **_shape(y), SLOPE=slope, POOL=pool, TANGENT=tangent is not None,
                    PRECISION=lines.precision, BP=block, num_warps=4)  # fmt: skip
    return p


def gradient_sums(
    y: Tensor, dp: Tensor, lines: Lines, slope: float, pool: bool, tangent: tuple[Tensor, Tensor] | None = None
) -> Tensor:
    """The sums of `_sums`: (task, part, 3, channel). For tangents, `tangent` = (y', dp')."""
    tasks, n, height, width, channels = y.shape
    cells = dp[0, ..., 0].numel()
    block, tiles = 64, 8 if cells > 4096 else 2
    parts = triton.cdiv(cells, block * tiles)
    partial = torch.empty(tasks, parts, 3, channels, device=y.device)
    y1, dp1 = tangent if tangent is not None else (y, dp)
    _sums[(tasks * parts,)](y, y1, dp, dp1, lines.forward, partial, **_shape(y), SLOPE=slope, POOL=pool,
                            TANGENT=tangent is not None, BP=block, TILES=tiles, num_warps=4)  # fmt: skip
    return partial


def input_gradient(
    y: Tensor,
    dp: Tensor,
    lines: Lines,
    slope: float,
    pool: bool,
    tangent: tuple[Tensor, Tensor, Tensor] | None = None,
) -> Tensor:
    """The gradient of y; with `tangent` = (y', dp', table), its tangent."""
    tasks, n, height, width, _ = y.shape
    dy = torch.empty_like(y)
    cells = n * triton.cdiv(height, 2) * triton.cdiv(width, 2) if pool else n * height * width
    block = 32
    y1, dp1, table = tangent if tangent is not None else (y, dp, lines.gradient)
    _input_gradient[(tasks * triton.cdiv(cells, block),)](
        y, y1, dp, dp1, lines.forward, table, dy, **_shape(y), SLOPE=slope, POOL=pool, TANGENT=tangent is not None,
        PRECISION=lines.precision, BP=block, num_warps=4,
    )  # fmt: skip
    return dy
