"""Parameters are a flat dictionary of tensors. The inner loop maps a dictionary to a dictionary."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

Parameters = dict[str, Tensor]


def count(parameters: Parameters) -> int:
    """The number of values in all parameters."""
    return sum(value.numel() for value in parameters.values())


def count_by_part(parameters: Parameters) -> dict[str, int]:
    """The number of values in each part of a network. A part is the first word of a parameter's name."""
    counts: dict[str, int] = {}
    for key, value in parameters.items():
        part = key.split(".")[0]
        counts[part] = counts.get(part, 0) + value.numel()
    return counts


def on_device(parameters: Parameters, device: torch.device | str) -> Parameters:
    return {key: value.to(device) for key, value in parameters.items()}


def as_leaves(parameters: Parameters) -> Parameters:
    """Copy the dictionary, with its values as leaves of a new autograd graph, which require gradients."""
    return {key: value.detach().requires_grad_() for key, value in parameters.items()}


def gradients(loss: Tensor, parameters: Parameters, create_graph: bool = False) -> Parameters:
    """Of a sum of losses, with respect to each parameter; zeros where it does not depend on one."""
    values = torch.autograd.grad(loss, list(parameters.values()), create_graph=create_graph, materialize_grads=True)
    return dict(zip(parameters, values, strict=True))


def uniform(shape: tuple[int, ...], fan_in: int, generator: torch.Generator) -> Tensor:
    """Random initial values, as torch draws them for the weights and biases of linear and convolutional layers."""
    start = torch.empty(shape)
    if start.is_meta:  # only shapes are needed
        return start
    bound = 1 / math.sqrt(fan_in)
    return start.uniform_(-bound, bound, generator=generator)


def normal(shape: tuple[int, ...], deviation: float, generator: torch.Generator) -> Tensor:
    """Random initial values with mean 0 and this standard deviation."""
    start = torch.empty(shape)
    return start if start.is_meta else deviation * start.normal_(generator=generator)


def stacked(values: Sequence[Tensor]) -> Tensor:
    """Does what torch.stack does, which on the meta device would first import torch's compiler."""
    whole = torch.empty((len(values), *values[0].shape))
    for place, value in zip(whole.unbind(), values, strict=True):
        place.copy_(value)
    return whole


def joined(parameters: Parameters) -> Tensor:
    """All values of each task in one row: (task, ...) each -> (task, number)."""
    return torch.cat([value.flatten(1) for value in parameters.values()], 1)


def split_as(rows: Tensor, shapes: Parameters) -> Parameters:
    """The reverse of `joined`: (task, number) -> (task, ...) each. `shapes` have no task axis."""
    parts = torch.split(rows, [value.numel() for value in shapes.values()], 1)
    return {
        key: part.reshape(len(part), *value.shape) for (key, value), part in zip(shapes.items(), parts, strict=True)
    }


def for_each_task(parameters: Parameters, n_tasks: int) -> Parameters:
    """Give every task these parameters: (...) -> (task, ...), without a copy."""
    return {key: value.expand(n_tasks, *value.shape) for key, value in parameters.items()}
