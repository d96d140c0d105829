"""What the kernels and their launches share."""

from typing import Any

import triton
import triton.language as tl
from triton.runtime.errors import OutOfResources


@triton.jit
def at_least(x, least):
    """The larger one; what is not a number stays none."""
    return tl.maximum(x, least, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def rounded(x, PRECISION: tl.constexpr):
    """To TF32's ten bits of mantissa, the nearest: the tensor cores would cut the others off."""
    if PRECISION == "tf32":
        if x.dtype == tl.float32:
            cut = ((x.to(tl.int32, bitcast=True) + 0x1000) & -0x2000).to(tl.float32, bitcast=True)
            return tl.where(x == x, cut, x)  # what is not a number must not become one
        else:
            return x
    else:
        return x


def launch(kernel: Any, programs: int, *arguments: Any, num_stages: int, **settings: Any) -> None:
    """Run a kernel with as many stages of loads in flight as are wanted, or as the GPU's shared memory has room for."""
    for stages in range(num_stages, 0, -1):
        try:
            kernel[(programs,)](*arguments, **settings, num_stages=stages)
            return
        except OutOfResources:
            if stages == 1:
                raise
