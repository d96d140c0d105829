"""The data types of each precision; images and parameters of many tasks as the kernels read them."""

import torch
from torch import Tensor

from trident.backbones.conv4 import Conv4Backbone
from trident.engines.kernels.first_layer import Pictures
from trident.errors import TridentError
from trident.nn.linear import LEAKY_SLOPE
from trident.nn.parameters import Parameters
from trident.tasks.task import Task

STORAGE = {"fp32": torch.float32, "tf32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
PRODUCTS = {"fp32": "tf32x3", "tf32": "tf32", "fp16": "tf32", "bf16": "tf32"}  # of 32-bit numbers, if there are any


def slope_of(backbone: Conv4Backbone) -> float:
    return 0.0 if backbone.activation == "relu" else LEAKY_SLOPE


def pictures_of(task: Task, precision: str, channels: int) -> Pictures:
    """The tasks' images. Too many at once are an error, because the kernels use 32-bit indices."""
    n_tasks, n, size = task.images.shape[:3]
    largest = n_tasks * n * size**2 * channels
    if largest >= 2**31:
        raise TridentError(
            f"{n_tasks} tasks of {n} images of {size}x{size} at once are too many for the fused engine: set "
            f"tasks_per_chunk to {n_tasks * 2**31 // largest} or fewer"
        )
    return Pictures(task.images, STORAGE[precision], PRODUCTS[precision])


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
