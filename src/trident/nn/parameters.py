"""Parameters are a flat dictionary of tensors, so that the inner loop is a function from dictionary to dictionary."""

import math

import torch
from torch import Tensor

Parameters = dict[str, Tensor]


def count_by_part(parameters: Parameters) -> dict[str, int]:
    """How many numbers each part of a network has; a part is the first word of a parameter's name."""
    counts: dict[str, int] = {}
    for key, value in parameters.items():
        part = key.split(".")[0]
        counts[part] = counts.get(part, 0) + value.numel()
    return counts


def on_device(parameters: Parameters, device: torch.device | str) -> Parameters:
    return {key: value.to(device) for key, value in parameters.items()}


def uniform(shape: tuple[int, ...], fan_in: int, generator: torch.Generator) -> Tensor:
    """Random values as torch starts linear and convolutional layers with, weights and biases alike."""
    start = torch.empty(shape)
    if start.is_meta:  # shapes are all that is wanted
        return start
    bound = 1 / math.sqrt(fan_in)
    return start.uniform_(-bound, bound, generator=generator)
