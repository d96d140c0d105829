"""The second half of every sum over a task: the programs' parts added up, always in the same order."""

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _add_up(partial, factor, total, PARTS: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    task = tl.program_id(0)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    keep = at < SIZE
    result = tl.zeros((BLOCK,), tl.float32)
    for part in range(PARTS):
        result += tl.load(partial + (task * PARTS + part).to(tl.int64) * SIZE + at, mask=keep, other=0.0)
    tl.store(total + task * SIZE + at, result * tl.load(factor + task), mask=keep)


def add_up(partial: Tensor, factor: Tensor) -> Tensor:
    """(task, part, size) -> (task, size), multiplied by the task's factor."""
    tasks, parts, size = partial.shape
    total = torch.empty(tasks, size, device=partial.device)
    _add_up[(tasks, triton.cdiv(size, 256))](partial, factor, total, PARTS=parts, SIZE=size, BLOCK=256, num_warps=4)
    return total
