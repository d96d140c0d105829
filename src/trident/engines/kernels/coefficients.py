"""The coefficients of batch norm, which is a straight line for each channel, from a layer's sums over a task.

Per task and channel, with y the convolution's output, z the normalised output, r = 1 / sqrt(variance + epsilon) and
delta the gradient of z:

    forward             z  = s y + t,                                s = gain * r,  t = offset - mean * s
    gradient            dy = s delta + k0 + k1 y,                    k1 = -s r dgain / M,  k0 = -s doffset / M - k1 mean
    tangent             z' = s y' + s' y + t'
    tangent's gradient  dy' = s delta' + s' delta + c y' + d y + e

Without batch norm s is 1, t is the bias, and all other coefficients are 0.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from trident.engines.kernels.launching import at_least
from trident.nn.batch_norm import EPSILON

# Rows of the tables. forward: mean, r, s, t. gradient: dgain, doffset, k0, k1. tangent: mean', mean(yhat y'), s', t'.
# tangent's gradient: s', c, d, e.


@triton.jit
def _total(
    partial, task, ROW: tl.constexpr, ROWS: tl.constexpr, PARTS: tl.constexpr, C: tl.constexpr, BP: tl.constexpr
):
    """The sum over parts of one row of (task, part, ROWS, C)."""
    c = tl.arange(0, C)[None, :]
    result = tl.zeros((BP, C), tl.float32)
    for start in range(0, PARTS, BP):
        part = start + tl.arange(0, BP)[:, None]
        at = ((task * PARTS + part) * ROWS + ROW) * C + c
        result += tl.load(partial + at, mask=part < PARTS, other=0.0)
    return tl.sum(result, axis=0)


@triton.jit
def _forward(
    partial, gain, offset, stride, table, M, PARTS: tl.constexpr, NORM: tl.constexpr, C: tl.constexpr, EPS: tl.constexpr
):
    task = tl.program_id(0)
    c = tl.arange(0, C)
    b = tl.load(offset + task * stride + c)
    to = table + task * (4 * C) + c
    if NORM:
        mean = _total(partial, task, 0, 2, PARTS, C, 16) / M
        variance = at_least(_total(partial, task, 1, 2, PARTS, C, 16) / M - mean * mean, 0.0)
        r = 1 / tl.sqrt(variance + EPS)
        s = tl.load(gain + task * stride + c) * r
        tl.store(to, mean)
        tl.store(to + C, r)
        tl.store(to + 2 * C, s)
        tl.store(to + 3 * C, b - mean * s)
    else:
        tl.store(to, tl.zeros((C,), tl.float32))
        tl.store(to + C, tl.zeros((C,), tl.float32))
        tl.store(to + 2 * C, tl.full((C,), 1.0, tl.float32))
        tl.store(to + 3 * C, b)


@triton.jit
def _store_gradients(dgain, doffset, stride, task, g, b, undo, NORM: tl.constexpr, C: tl.constexpr, OUT: tl.constexpr):
    """Store the parameters' gradients, without scaling and padding."""
    c = tl.arange(0, C)
    u = tl.load(undo + task)
    at = task.to(tl.int64) * stride + c
    tl.store(doffset + at, b * u, mask=c < OUT)
    if NORM:
        tl.store(dgain + at, g * u, mask=c < OUT)


@triton.jit
def _gradient(partial, forward, undo, table, dgain_out, doffset_out, stride, M, PARTS: tl.constexpr,
              NORM: tl.constexpr, C: tl.constexpr, OUT: tl.constexpr):  # fmt: skip
    task = tl.program_id(0)
    c = tl.arange(0, C)
    f = forward + task * (4 * C) + c
    mean, r, s = tl.load(f), tl.load(f + C), tl.load(f + 2 * C)
    doffset = _total(partial, task, 0, 3, PARTS, C, 16)
    dgain = (_total(partial, task, 1, 3, PARTS, C, 16) - mean * doffset) * r
    k1 = -s * r * dgain / M
    k0 = -s * doffset / M - k1 * mean
    if not NORM:
        k0 = tl.zeros((C,), tl.float32)
        k1 = tl.zeros((C,), tl.float32)
    to = table + task * (4 * C) + c
    tl.store(to, dgain)
    tl.store(to + C, doffset)
    tl.store(to + 2 * C, k0)
    tl.store(to + 3 * C, k1)
    _store_gradients(dgain_out, doffset_out, stride, task, dgain, doffset, undo, NORM, C, OUT)


@triton.jit
def _tangent(partial, forward, dgain, doffset, stride, table, M, PARTS: tl.constexpr,
             NORM: tl.constexpr, C: tl.constexpr):  # fmt: skip
    task = tl.program_id(0)
    c = tl.arange(0, C)
    f = forward + task * (4 * C) + c
    mean, r, s = tl.load(f), tl.load(f + C), tl.load(f + 2 * C)
    to = table + task * (4 * C) + c
    b1 = tl.load(doffset + task * stride + c)
    if NORM:
        mean1 = _total(partial, task, 0, 2, PARTS, C, 16) / M
        both = r * (_total(partial, task, 1, 2, PARTS, C, 16) / M - mean * mean1)  # mean of yhat y'
        s1 = tl.load(dgain + task * stride + c) * r - s * r * both
        tl.store(to, mean1)
        tl.store(to + C, both)
        tl.store(to + 2 * C, s1)
        tl.store(to + 3 * C, b1 - mean1 * s - mean * s1)
    else:
        tl.store(to, tl.zeros((C,), tl.float32))
        tl.store(to + C, tl.zeros((C,), tl.float32))
        tl.store(to + 2 * C, tl.zeros((C,), tl.float32))
        tl.store(to + 3 * C, b1)


@triton.jit
def _tangent_gradient(partial, forward, gradient, tangent, factor, undo, table, dgain_out, doffset_out, stride, M,
                      PARTS: tl.constexpr, NORM: tl.constexpr, C: tl.constexpr, OUT: tl.constexpr):  # fmt: skip
    task = tl.program_id(0)
    c = tl.arange(0, C)
    f = forward + task * (4 * C) + c
    mean, r, s = tl.load(f), tl.load(f + C), tl.load(f + 2 * C)
    g = gradient + task * (4 * C) + c
    dgain, doffset = tl.load(g), tl.load(g + C)
    t = tangent + task * (4 * C) + c
    u = tl.load(factor + task)  # the scale of all tangents
    mean1, both, s1 = tl.load(t) * u, tl.load(t + C) * u, tl.load(t + 2 * C) * u
    doffset1 = _total(partial, task, 0, 3, PARTS, C, 16)
    with_y = _total(partial, task, 1, 3, PARTS, C, 16)
    with_y1 = _total(partial, task, 2, 3, PARTS, C, 16) * u
    # sum delta' yhat + sum delta yhat',  yhat' = r (y' - mean') - r both yhat
    dgain1 = r * (with_y - mean * doffset1) + r * (with_y1 - mean1 * doffset) - r * both * dgain
    q = (-s1 * dgain - s * dgain1 + s * r * both * dgain) / M  # on yhat
    d = q * r
    e = (-s1 * doffset - s * doffset1 + s * r * mean1 * dgain) / M - d * mean
    c1 = -s * r * dgain / M * u
    if not NORM:
        zero = tl.zeros((C,), tl.float32)
        s1, c1, d, e = zero, zero, zero, zero
    _store_gradients(dgain_out, doffset_out, stride, task, dgain1, doffset1, undo, NORM, C, OUT)
    to = table + task * (4 * C) + c
    tl.store(to, s1)
    tl.store(to + C, c1)
    tl.store(to + 2 * C, d)
    tl.store(to + 3 * C, e)


class Lines:
    """The tables of one layer. `count` is the number of pixels in a sum."""

    def __init__(self, count: int, norm: bool, precision: str):
        self.count = count
        self.precision = precision  # of the products that read the layer's output
        self.norm = norm
        self.forward: Tensor  # (task, 4, channel)
        self.gradient: Tensor  # (task, 4, channel)

    def set_forward(self, partial: Tensor | None, gain: Tensor, offset: Tensor) -> None:
        """`gain` and `offset` are (task, channel) with one task stride. Without batch norm `offset` is the bias."""
        tasks, channels = offset.shape
        self.forward = torch.empty(tasks, 4, channels, device=offset.device)
        parts = 0 if partial is None else partial.shape[1]
        _forward[(tasks,)](partial, gain, offset, offset.stride(0), self.forward, float(self.count), PARTS=parts,
                           NORM=self.norm, C=channels, EPS=EPSILON, num_warps=1)  # fmt: skip

    def set_gradient(self, partial: Tensor, undo: Tensor, out: tuple[Tensor, Tensor]) -> None:
        """Write the gradients of gain and offset, multiplied by `undo`, to `out`. Both have the same task stride."""
        self.gradient = torch.empty_like(self.forward)
        tasks, _, channels = self.forward.shape
        _gradient[(tasks,)](partial, self.forward, undo, self.gradient, *out, out[1].stride(0), float(self.count),
                            PARTS=partial.shape[1], NORM=self.norm, C=channels, OUT=out[1].shape[1],
                            num_warps=1)  # fmt: skip

    def tangent(self, partial: Tensor | None, dgain: Tensor, doffset: Tensor) -> Tensor:
        table = torch.empty_like(self.forward)
        tasks, _, channels = self.forward.shape
        parts = 0 if partial is None else partial.shape[1]
        _tangent[(tasks,)](partial, self.forward, dgain, doffset, doffset.stride(0), table,
                           float(self.count), PARTS=parts, NORM=self.norm, C=channels, num_warps=1)  # fmt: skip
        return table

    def tangent_gradient(
        self, partial: Tensor, tangent: Tensor, factor: Tensor, undo: Tensor, out: tuple[Tensor, Tensor]
    ) -> Tensor:
        tasks, _, channels = self.forward.shape
        table = torch.empty_like(self.forward)
        _tangent_gradient[(tasks,)](partial, self.forward, self.gradient, tangent, factor, undo, table, *out,
                                    out[1].stride(0), float(self.count), PARTS=partial.shape[1], NORM=self.norm,
                                    C=channels, OUT=out[1].shape[1], num_warps=1)  # fmt: skip
        return table
