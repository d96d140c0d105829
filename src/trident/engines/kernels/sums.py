"""Add the partial sums of the programs, always in the same order."""

import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _add_up(partial, factor, total, stride, PARTS: tl.constexpr, SIZE: tl.constexpr, FACTOR: tl.constexpr,
            BLOCK: tl.constexpr):  # fmt: skip
    task = tl.program_id(0)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    keep = at < SIZE
    result = tl.zeros((BLOCK,), tl.float32)
    for part in range(PARTS):
        result += tl.load(partial + (task * PARTS + part).to(tl.int64) * SIZE + at, mask=keep, other=0.0)
    if FACTOR:
        result *= tl.load(factor + task)
    tl.store(total + task.to(tl.int64) * stride + at, result, mask=keep)


def add_up(partial: Tensor, out: Tensor, factor: Tensor | None = None) -> None:
    """(task, part, size) -> (task, ...), multiplied by the task's factor. `out` may have any task stride."""
    tasks, parts, size = partial.shape
    _add_up[(tasks, triton.cdiv(size, 256))](
        partial, factor, out, out.stride(0), PARTS=parts, SIZE=size, FACTOR=factor is not None, BLOCK=256, num_warps=4
    )
