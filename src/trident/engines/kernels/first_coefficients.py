"""The coefficients of batch norm in the encoders' first layer, from the patches' mean m and covariance V.

The tables are those of `coefficients.py`. Here statistics need no pass over pixels. With w the weight, (patch, output):

    mean = m w,   variance = w V w,   mean of patch times yhat = r V w,   sum of delta y = w (sum of patch times delta)

`total` is the result of the first layer's backward kernel: sums of 4x4 patches times delta, (task, 64, 4 * output),
with the sum of delta in the row of the 1.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from trident.engines.kernels.first_layer import UNIT, PictureRows
from trident.engines.kernels.launching import at_least
from trident.nn.batch_norm import EPSILON


@triton.jit
def _times_covariance(covariance, w, K: tl.constexpr, KP: tl.constexpr, C: tl.constexpr):
    """V w in full precision, because the terms cancel for smooth images."""
    k = tl.arange(0, KP)[:, None]
    c = tl.arange(0, C)[None, :]
    total = tl.zeros((KP, C), tl.float32)
    for j in range(K):
        total += tl.load(covariance + k * K + j, mask=k < K, other=0.0) * tl.load(w + j * C + c)
    return total


@triton.jit
def _matrix(x, K: tl.constexpr, KP: tl.constexpr, C: tl.constexpr):
    k = tl.arange(0, KP)[:, None]
    return tl.load(x + k * C + tl.arange(0, C)[None, :], mask=k < K, other=0.0)


@triton.jit
def _forward(moments, covariance, w, gain, offset, stride, table, weighted,
             K: tl.constexpr, KP: tl.constexpr, C: tl.constexpr, EPS: tl.constexpr):  # fmt: skip
    task = tl.program_id(0)
    k = tl.arange(0, KP)[:, None]
    c = tl.arange(0, C)
    at = task.to(tl.int64) * stride
    W = _matrix(w + at, K, KP, C)
    m = tl.load(moments + task * K + k, mask=k < K, other=0.0)
    vw = _times_covariance(covariance + task * (K * K), w + at, K, KP, C)
    mean = tl.sum(m * W, axis=0)
    r = 1 / tl.sqrt(at_least(tl.sum(W * vw, axis=0), 0.0) + EPS)
    s = tl.load(gain + at + c) * r
    to = table + task * (4 * C) + c
    tl.store(to, mean)
    tl.store(to + C, r)
    tl.store(to + 2 * C, s)
    tl.store(to + 3 * C, tl.load(offset + at + c) - mean * s)
    tl.store(weighted + task * (K * C) + k * C + c[None, :], vw, mask=k < K)


@triton.jit
def _tangent(moments, covariance, w1, gain1, offset1, stride1, table, weighted, table1, weighted1,
             K: tl.constexpr, KP: tl.constexpr, C: tl.constexpr):  # fmt: skip
    task = tl.program_id(0)
    k = tl.arange(0, KP)[:, None]
    c = tl.arange(0, C)
    at = task.to(tl.int64) * stride1
    f = table + task * (4 * C) + c
    mean, r, s = tl.load(f), tl.load(f + C), tl.load(f + 2 * C)
    W1 = _matrix(w1 + at, K, KP, C)
    m = tl.load(moments + task * K + k, mask=k < K, other=0.0)
    vw = _matrix(weighted + task * (K * C), K, KP, C)
    mean1 = tl.sum(m * W1, axis=0)
    both = r * tl.sum(vw * W1, axis=0)
    s1 = tl.load(gain1 + at + c) * r - s * r * both
    to = table1 + task * (4 * C) + c
    tl.store(to, mean1)
    tl.store(to + C, both)
    tl.store(to + 2 * C, s1)
    tl.store(to + 3 * C, tl.load(offset1 + at + c) - mean1 * s - mean * s1)
    vw1 = _times_covariance(covariance + task * (K * K), w1 + at, K, KP, C)
    tl.store(weighted1 + task * (K * C) + k * C + c[None, :], vw1, mask=k < K)


@triton.jit
def _from_cells(total, K: tl.constexpr, KP: tl.constexpr, CI: tl.constexpr, C: tl.constexpr, UNIT: tl.constexpr):
    """Reduce sums over 4x4 patches of cells to sums over 3x3 patches of pixels. Also the sum of delta."""
    k = tl.arange(0, KP)[:, None]
    c = tl.arange(0, C)
    row = k // (3 * CI)
    column = (k // CI) % 3
    ci = k % CI
    with_patches = tl.zeros((KP, C), tl.float32)
    doffset = tl.zeros((C,), tl.float32)
    for pixel in tl.static_range(4):
        j = ((row + pixel // 2) * 4 + column + pixel % 2) * 4 + ci
        with_patches += tl.load(total + j * (4 * C) + pixel * C + c[None, :], mask=k < K, other=0.0)
        doffset += tl.load(total + 3 * (4 * C) + pixel * C + c)
    return with_patches * UNIT, doffset


@triton.jit
def _gradient(total, moments, w, stride, table, weighted, undo, sums, dw, dgain, doffset, dstride,
              K: tl.constexpr, KP: tl.constexpr, CI: tl.constexpr, C: tl.constexpr, UNIT: tl.constexpr):  # fmt: skip
    """`sums` stores patch times delta, (K, C), then the sums of delta and of delta yhat."""
    task = tl.program_id(0)
    k = tl.arange(0, KP)[:, None]
    c = tl.arange(0, C)
    f = table + task * (4 * C) + c
    mean, r, s = tl.load(f), tl.load(f + C), tl.load(f + 2 * C)
    S, db = _from_cells(total + task * (256 * C), K, KP, CI, C, UNIT)
    W = _matrix(w + task.to(tl.int64) * stride, K, KP, C)
    dg = r * (tl.sum(S * W, axis=0) - mean * db)
    keep = sums + task * ((K + 2) * C)
    tl.store(keep + k * C + c[None, :], S, mask=k < K)
    tl.store(keep + K * C + c, db)
    tl.store(keep + (K + 1) * C + c, dg)
    m = tl.load(moments + task * K + k, mask=k < K, other=0.0)
    vw = _matrix(weighted + task * (K * C), K, KP, C)
    u = tl.load(undo + task)
    at = task.to(tl.int64) * dstride
    result = (S - m * db[None, :] - vw * (dg * r)[None, :]) * (s * u)[None, :]
    tl.store(dw + at + k * C + c[None, :], result, mask=k < K)
    tl.store(dgain + at + c, dg * u)
    tl.store(doffset + at + c, db * u)


@triton.jit
def _tangent_gradient(total1, moments, w, stride, w1, stride1, table, weighted, table1, weighted1, sums, factor, undo,
                      dw, dgain, doffset, dstride, K: tl.constexpr, KP: tl.constexpr, CI: tl.constexpr,
                      C: tl.constexpr, UNIT: tl.constexpr):  # fmt: skip
    task = tl.program_id(0)
    k = tl.arange(0, KP)[:, None]
    c = tl.arange(0, C)
    f = table + task * (4 * C) + c
    mean, r, s = tl.load(f), tl.load(f + C), tl.load(f + 2 * C)
    u = tl.load(factor + task)  # the scale of all tangents
    g = table1 + task * (4 * C) + c
    mean1, both, s1 = tl.load(g) * u, tl.load(g + C) * u, tl.load(g + 2 * C) * u
    kept = sums + task * ((K + 2) * C)
    S = _matrix(kept, K, KP, C)
    db, dg = tl.load(kept + K * C + c), tl.load(kept + (K + 1) * C + c)
    S1, db1 = _from_cells(total1 + task * (256 * C), K, KP, CI, C, UNIT)
    W = _matrix(w + task.to(tl.int64) * stride, K, KP, C)
    W1 = _matrix(w1 + task.to(tl.int64) * stride1, K, KP, C)
    # sum delta' yhat + sum delta yhat',  yhat' = r (y' - mean') - r both yhat
    dg1 = r * (tl.sum(S1 * W, axis=0) - mean * db1)
    dg1 += r * (tl.sum(S * W1, axis=0) * u - mean1 * db) - r * both * dg
    m = tl.load(moments + task * K + k, mask=k < K, other=0.0)
    vw = _matrix(weighted + task * (K * C), K, KP, C)
    vw1 = _matrix(weighted1 + task * (K * C), K, KP, C) * u
    with_yhat1 = r[None, :] * (vw1 - (r * both)[None, :] * vw)  # mean of patch times yhat'
    result = s1[None, :] * (S - m * db[None, :] - vw * (dg * r)[None, :])
    result += s[None, :] * (S1 - m * db1[None, :] - vw * (dg1 * r)[None, :] - dg[None, :] * with_yhat1)
    back = tl.load(undo + task)
    at = task.to(tl.int64) * dstride
    tl.store(dw + at + k * C + c[None, :], result * back, mask=k < K)
    tl.store(dgain + at + c, dg1 * back)
    tl.store(doffset + at + c, db1 * back)


@dataclass(frozen=True)
class FirstLines:
    """The tables of the first layer, for a forward or a tangent pass."""

    rows: PictureRows
    weight: Tensor  # (task, 3, 3, image channel, output), any task stride
    table: Tensor  # (task, 4, output)
    weighted: Tensor  # V w: (task, 9 * image channel, output)

    @property
    def sizes(self) -> dict[str, int]:
        patch, channels = self.weighted.shape[1:]
        return {"K": patch, "KP": triton.next_power_of_2(patch), "C": channels}


def _empty(rows: PictureRows, weight: Tensor) -> FirstLines:
    tasks, patch, channels = len(weight), rows.mean.shape[1], weight.shape[4]
    table = torch.empty(tasks, 4, channels, device=weight.device)
    return FirstLines(rows, weight, table, torch.empty(tasks, patch, channels, device=weight.device))


def forward_lines(rows: PictureRows, weight: Tensor, gain: Tensor, offset: Tensor) -> FirstLines:
    """All three parameters have the same task stride."""
    lines = _empty(rows, weight)
    _forward[(rows.tasks,)](rows.mean, rows.covariance, weight, gain, offset, weight.stride(0), lines.table,
                            lines.weighted, EPS=EPSILON, **lines.sizes, num_warps=4)  # fmt: skip
    return lines


def tangent_lines(lines: FirstLines, weight1: Tensor, gain1: Tensor, offset1: Tensor) -> FirstLines:
    tangent = _empty(lines.rows, weight1)
    _tangent[(lines.rows.tasks,)](lines.rows.mean, lines.rows.covariance, weight1, gain1, offset1, weight1.stride(0),
                                  lines.table, lines.weighted, tangent.table, tangent.weighted, **lines.sizes,
                                  num_warps=4)  # fmt: skip
    return tangent


def gradient(lines: FirstLines, total: Tensor, undo: Tensor, out: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    """Write the gradients of weight, gain and offset, multiplied by `undo`, to `out`, which has one task stride.

    Returns the sums that `tangent_gradient` needs.
    """
    tasks, patch, channels = lines.weighted.shape
    sums = torch.empty(tasks, patch + 2, channels, device=total.device)
    _gradient[(tasks,)](total, lines.rows.mean, lines.weight, lines.weight.stride(0), lines.table, lines.weighted,
                        undo, sums, *out, out[0].stride(0), CI=lines.rows.pictures.channels, UNIT=UNIT, **lines.sizes,
                        num_warps=4)  # fmt: skip
    return sums


def tangent_gradient(
    lines: FirstLines,
    tangent: FirstLines,
    total1: Tensor,
    sums: Tensor,
    factor: Tensor,
    undo: Tensor,
    out: tuple[Tensor, Tensor, Tensor],
) -> None:
    """Write the tangents of the gradients, scaled down by `factor`, to `out`."""
    _tangent_gradient[(lines.rows.tasks,)](
        total1, lines.rows.mean, lines.weight, lines.weight.stride(0), tangent.weight, tangent.weight.stride(0),
        lines.table, lines.weighted, tangent.table, tangent.weighted, sums, factor, undo, *out, out[0].stride(0),
        CI=lines.rows.pictures.channels, UNIT=UNIT, **lines.sizes, num_warps=4,
    )  # fmt: skip
