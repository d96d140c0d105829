"""From autograd's numbers to the stacks' and back.

Powers of two keep gradients within the range of 16 bits. They are exact, and taken back at the end.
"""

import torch
from torch import Tensor

TANGENT_SIZE = 2.0**-4  # largest entry of a scaled direction in parameter space


def power_of_two(largest: Tensor, wanted: float) -> Tensor:
    """(task,) -> the power of two that brings `largest` to between half of `wanted` and `wanted`."""
    exponent = torch.floor(torch.log2(wanted / largest.clamp(1e-30, 1e30)))
    return torch.exp2(exponent.clamp(-60, 60))


def largest_of(*tensors: Tensor) -> Tensor:
    """The largest absolute value of each task, over all tensors: (task,)."""
    found = [torch.linalg.vector_norm(x.flatten(1), torch.inf, 1) for x in tensors]
    return found[0] if len(found) == 1 else torch.stack(found).amax(0)


def stored(x: Tensor, dtype: torch.dtype, precision: str) -> Tensor:
    """As the stacks keep it; for TF32 rounded to its ten bits, which the tensor cores would cut down to."""
    if precision == "tf32" and dtype == torch.float32:
        return ((x.contiguous().view(torch.int32) + 0x1000) & -0x2000).view(torch.float32)
    return x.to(dtype).contiguous()
