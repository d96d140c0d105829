"""The squared error of the decoded images, and the backward pass of upsampling."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from trident.engines.kernels.coefficients import Lines
from trident.engines.kernels.first_layer import UNIT, Pictures


@triton.jit
def _squared_error_gradient(y, y1, forward, tangent, images, delta, partial, N, SIZE: tl.constexpr, FIRST,
             TOTAL, CI: tl.constexpr, UNIT: tl.constexpr, TANGENT: tl.constexpr,
             BP: tl.constexpr):  # fmt: skip
    """Squared error of sigmoid(z) and its derivative with respect to z, or the derivative's tangent."""
    pixels = N * SIZE * SIZE
    blocks = (pixels + BP - 1) // BP
    task = tl.program_id(0) // blocks
    q = (tl.program_id(0) % blocks) * BP + tl.arange(0, BP)
    c = tl.arange(0, 4)[None, :]
    keep = (q < pixels)[:, None]
    at = (task * pixels + q)[:, None] * 4 + c
    f = forward + task * 16 + c
    s, t = tl.load(f + 8), tl.load(f + 12)
    value = tl.load(y + at, mask=keep, other=0.0).to(tl.float32)
    sigmoid = tl.sigmoid(s * value + t)
    image = q // (SIZE * SIZE)
    row = (q % (SIZE * SIZE)) // SIZE
    column = q % SIZE
    place = ((task * TOTAL + FIRST + image) * (SIZE + 2) + row + 1) * (SIZE + 2) + column + 1
    truth = tl.load(images + place[:, None] * 4 + c, mask=keep, other=0.0).to(tl.float32) * UNIT
    used = keep & (c < CI)
    error = tl.where(used, sigmoid - truth, 0.0)
    slope = sigmoid * (1 - sigmoid)
    result = 2 * error * slope
    if TANGENT:
        g = tangent + task * 16 + c
        z1 = s * tl.load(y1 + at, mask=keep, other=0.0).to(tl.float32) + tl.load(g + 8) * value + tl.load(g + 12)
        result = tl.where(used, 2 * (slope * slope + error * slope * (1 - 2 * sigmoid)) * z1, 0.0)
    else:
        tl.store(partial + tl.program_id(0), tl.sum(tl.sum(error * error, axis=1), axis=0))
    tl.store(delta + at, result.to(delta.dtype.element_ty), mask=keep)


@triton.jit
def _upsample_backward(x, y, N, H: tl.constexpr, SIZE: tl.constexpr, C: tl.constexpr, BP: tl.constexpr):
    """The transpose of upsampling: every pixel is the sum of its copies."""
    pixels = N * H * H
    blocks = (pixels + BP - 1) // BP
    task = tl.program_id(0) // blocks
    q = (tl.program_id(0) % blocks) * BP + tl.arange(0, BP)
    c = tl.arange(0, C)[None, :]
    keep = q < pixels
    image = q // (H * H)
    row = (q % (H * H)) // H
    column = q % H
    odd: tl.constexpr = SIZE - 2 * H
    total = tl.zeros((BP, C), tl.float32)
    for i in tl.static_range(2 + odd):  # if SIZE is odd, only the first row and column have a third copy
        for j in tl.static_range(2 + odd):
            if odd == 1:
                there = ((i > 0) | (row == 0)) & ((j > 0) | (column == 0))
            else:
                there = keep
            at = ((task * N + image) * SIZE + 2 * row + i) * SIZE + 2 * column + j
            total += tl.load(x + at[:, None] * C + c, mask=(keep & there)[:, None], other=0.0).to(tl.float32)
    tl.store(y + (task * pixels + q)[:, None] * C + c, total.to(y.dtype.element_ty), mask=keep[:, None])


def squared_error_gradient(
    y: Tensor,  # (task, image, size, size, 4)
    lines: Lines,
    pictures: Pictures,
    first: int,
    tangent: tuple[Tensor, Tensor] | None = None,  # y' and its table
) -> tuple[Tensor, Tensor | None]:
    """The gradient of each task's summed squared error, and the sum; or the gradient's tangent."""
    tasks, n, size = y.shape[:3]
    delta = torch.empty_like(y)
    block = 256
    blocks = triton.cdiv(n * size * size, block)
    partial = None if tangent is not None else torch.empty(tasks, blocks, device=y.device)
    y1, table = tangent if tangent is not None else (y, lines.forward)
    _squared_error_gradient[(tasks * blocks,)](
        y, y1, lines.forward, table, pictures.padded, delta, delta if partial is None else partial, N=n, SIZE=size,
        FIRST=first, TOTAL=pictures.padded.shape[1], CI=pictures.channels, UNIT=UNIT,
        TANGENT=tangent is not None, BP=block, num_warps=4,
    )  # fmt: skip
    return delta, None if partial is None else partial.sum(1)


def upsample_backward(x: Tensor, height: int) -> Tensor:
    """(task, image, size, size, channel) -> (task, image, height, height, channel)."""
    tasks, n, size, _, channels = x.shape
    y = x.new_empty(tasks, n, height, height, channels)
    block = 64
    _upsample_backward[(tasks * triton.cdiv(n * height * height, block),)](
        x, y, N=n, H=height, SIZE=size, C=channels, BP=block, num_warps=4
    )
    return y
