"""The parameters of many tasks as one flat matrix."""

import torch
from torch import Tensor

from trident.nn.parameters import Parameters


class Layout:
    """Where each parameter lies in a flat matrix (task, parameter)."""

    def __init__(self, parameters: Parameters):
        """`parameters` carry a task axis."""
        self.shapes = {key: value.shape[1:] for key, value in parameters.items()}
        self.sizes = [shape.numel() for shape in self.shapes.values()]

    def split(self, flat: Tensor) -> Parameters:
        pieces = torch.split_with_sizes(flat, self.sizes, 1)
        return {
            key: piece.view(len(piece), *shape) for (key, shape), piece in zip(self.shapes.items(), pieces, strict=True)
        }

    def part(self, flat: Tensor, prefix: str) -> tuple[Tensor, "Layout"]:
        """The columns of the parameters whose names start with `prefix`; they are adjacent."""
        found = [i for i, key in enumerate(self.shapes) if key.startswith(prefix)]
        first, last = found[0], found[-1] + 1
        start, size = sum(self.sizes[:first]), sum(self.sizes[first:last])
        part = Layout({})
        part.shapes = dict(list(self.shapes.items())[first:last])
        part.sizes = self.sizes[first:last]
        return flat[:, start : start + size], part

    def join(self, parameters: Parameters) -> Tensor:
        return torch.cat([parameters[key].flatten(1) if shape else parameters[key][:, None]
                          for key, shape in self.shapes.items()], 1)  # fmt: skip

    def zeros(self, tasks: int, device: torch.device) -> Tensor:
        return torch.zeros(tasks, sum(self.sizes), device=device)
