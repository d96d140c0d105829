"""The data types of each precision, and the tasks' images as the kernels read them."""

import torch

from trident.backbones.conv4 import Conv4Backbone
from trident.engines.kernels.first_layer import Pictures
from trident.errors import TridentError
from trident.nn.activation import LEAKY_SLOPE
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
