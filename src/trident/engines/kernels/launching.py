"""Helpers for the kernels and their launches."""

from typing import Any

import triton
import triton.language as tl
from triton.runtime.errors import OutOfResources


@triton.jit
def at_least(x, least):
    """The maximum. NaN propagates."""
    return tl.maximum(x, least, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def rounded(x, PRECISION: tl.constexpr):
    """Round to the ten mantissa bits of TF32. The tensor cores would truncate."""
    if PRECISION == "tf32":
        if x.dtype == tl.float32:
            cut = ((x.to(tl.int32, bitcast=True) + 0x1000) & -0x2000).to(tl.float32, bitcast=True)
            return tl.where(x == x, cut, x)  # NaN stays NaN
        else:
            return x
    else:
        return x


def launch(kernel: Any, programs: int, *arguments: Any, num_stages: int, **settings: Any) -> None:
    """Run a kernel with `num_stages` pipeline stages, or with fewer if shared memory is too small."""
    for stages in range(num_stages, 0, -1):
        try:
            kernel[(programs,)](*arguments, **settings, num_stages=stages)
            return
        except OutOfResources:
            if stages == 1:
                raise
