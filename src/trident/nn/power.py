"""The power transform, which makes the skewed features of a ReLU more like a Gaussian."""

import torch
from torch import Tensor


def power(features: Tensor, exponent: float) -> Tensor:
    """(f + 1e-6) ** exponent for features of 0 or more. Negative ones, which few backbones have, keep their sign."""
    return torch.where(features < 0, -1.0, 1.0).to(features) * (features.abs() + 1e-6) ** exponent
