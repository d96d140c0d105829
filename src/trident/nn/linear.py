"""A linear layer with separate weights for each task, and the two activations of the paper."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from trident.nn.parameters import Parameters, uniform


@dataclass(frozen=True)
class Linear:
    name: str
    inputs: int
    outputs: int
    bias: bool = True

    def initial(self, generator: torch.Generator) -> Parameters:
        start = {f"{self.name}.weight": uniform((self.outputs, self.inputs), self.inputs, generator)}
        if self.bias:
            start[f"{self.name}.bias"] = uniform((self.outputs,), self.inputs, generator)
        return start

    def __call__(self, parameters: Parameters, rows: Tensor) -> Tensor:
        weight = parameters[f"{self.name}.weight"].transpose(1, 2)  # (task, inputs, outputs)
        if not self.bias:
            return torch.bmm(rows, weight)  # (task, row, outputs)
        return torch.baddbmm(parameters[f"{self.name}.bias"].unsqueeze(1), rows, weight)  # (task, row, outputs)


def linear(parameters: Parameters, name: str, rows: Tensor) -> Tensor:
    """A layer whose weights all tasks share: its parameters have no task axis."""
    return F.linear(rows, parameters[f"{name}.weight"], parameters.get(f"{name}.bias"))


LEAKY_SLOPE = 0.2


def activate(x: Tensor, activation: str) -> Tensor:
    return F.relu(x) if activation == "relu" else F.leaky_relu(x, LEAKY_SLOPE)
