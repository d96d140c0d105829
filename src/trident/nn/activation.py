"""The two activations of the paper."""

import torch.nn.functional as F
from torch import Tensor

LEAKY_SLOPE = 0.2


def activate(x: Tensor, activation: str) -> Tensor:
    return F.relu(x) if activation == "relu" else F.leaky_relu(x, LEAKY_SLOPE)
