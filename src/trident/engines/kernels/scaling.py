"""Convert autograd's tensors for the fused stacks: scale into the range of 16 bits, round, store."""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from trident.engines.kernels.launching import at_least, rounded


@triton.jit
def _scale_into_range(x, stride, largest, base, stored, factor, undo, SIZE, WANTED: tl.constexpr, BASE: tl.constexpr,
           PRECISION: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    task = tl.program_id(0)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    scale = tl.load(base + task) if BASE else 1.0
    # Zero gets the largest power, infinity the smallest. NaN propagates to all values of the task.
    exponent = tl.floor(tl.log2(WANTED / at_least(tl.load(largest + task) * scale, 1e-30)))
    own = tl.exp2(-at_least(-at_least(exponent, -60.0), 0.0 if BASE else -60.0))
    scale = scale * own
    value = tl.load(x + task.to(tl.int64) * stride + at, mask=at < SIZE, other=0.0).to(tl.float32) * scale
    to = stored + task.to(tl.int64) * SIZE + at
    tl.store(to, rounded(value, PRECISION).to(stored.dtype.element_ty), mask=at < SIZE)
    if tl.program_id(1) == 0:
        tl.store(factor + task, own)
        tl.store(undo + task, 1 / scale)


class Scaled(NamedTuple):
    stored: Tensor
    factor: Tensor  # (task,): the power of two chosen here
    undo: Tensor  # (task,): undoes all scaling


def scale_into_range(
    x: Tensor,  # (task, ...), contiguous but for the task stride
    wanted: float,
    dtype: torch.dtype,
    precision: str,
    base: Tensor | None = None,
    among: Tensor | None = None,
) -> Scaled:
    """Multiply each task by the power of two that brings its largest entry between `wanted` / 2 and `wanted`.

    With `base`, x is multiplied by it first, and the power of two is at most 1. The largest entry includes those of
    `among`.
    """
    tasks = len(x)
    largest = torch.linalg.vector_norm(x.flatten(1), torch.inf, 1)
    if among is not None:
        largest = torch.maximum(largest, torch.linalg.vector_norm(among.flatten(1), torch.inf, 1))
    stored = torch.empty(x.shape, dtype=dtype, device=x.device)
    factor, undo = torch.empty_like(largest), torch.empty_like(largest)
    size = x[0].numel()
    _scale_into_range[(tasks, triton.cdiv(size, 1024))](
        x, x.stride(0), largest, base, stored, factor, undo, size, WANTED=wanted, BASE=base is not None,
        PRECISION=precision, BLOCK=1024, num_warps=4,
    )  # fmt: skip
    return Scaled(stored, factor, undo)


def stored(x: Tensor, dtype: torch.dtype, precision: str) -> Tensor:
    """Convert to the stacks' data type. TF32 is rounded to its ten bits, because the tensor cores would truncate."""
    if precision == "tf32" and dtype == torch.float32:
        x = x.contiguous()
        cut = ((x.view(torch.int32) + 0x1000) & -0x2000).view(torch.float32)
        return torch.where(x.isnan(), x, cut)  # NaN stays NaN
    return x.to(dtype).contiguous()
