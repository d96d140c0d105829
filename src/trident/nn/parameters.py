"""Parameters are a flat dictionary of tensors, so that the inner loop is a function from dictionary to dictionary."""

import math

import torch
from torch import Tensor

Parameters = dict[str, Tensor]


def uniform(shape: tuple[int, ...], fan_in: int, generator: torch.Generator) -> Tensor:
    """torch's default start for linear and convolutional layers, weights and biases alike."""
    bound = 1 / math.sqrt(fan_in)
    return torch.empty(shape).uniform_(-bound, bound, generator=generator)
