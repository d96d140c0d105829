"""For tests that need an NVIDIA GPU."""

import pytest
import torch
from torch import Tensor

gpu = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="there is no CUDA GPU here, which the fused engine is written for"
)


def gpu_nan() -> Tensor:
    """As NVIDIA's GPUs write what is not a number: all bits but the sign."""
    return torch.tensor(0x7FFFFFFF, dtype=torch.int32, device="cuda").view(torch.float32)
