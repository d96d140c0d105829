"""3x3 convolution, padding 1, with a weight of its own for each task, as one matrix product per task.

A convolution is linear in its input and in its weight, so the derivatives of these two functions are made of the same
two functions again: gradients of any order run as matrix products, without a scatter anywhere.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def convolve(images: Tensor, weight: Tensor) -> Tensor:
    """(task, image, h, w, inputs) * (task, 3, 3, inputs, outputs) -> (task, image, h, w, outputs)."""
    output: Tensor = _Convolve.apply(images, weight)
    return output


def _patches(images: Tensor) -> Tensor:
    """The 3x3 neighbourhood of every pixel: (task, image, h, w, c) -> (task, image * h * w, 9 * c)."""
    tasks, n, height, width, channels = images.shape
    padded = F.pad(images, (0, 0, 1, 1, 1, 1))
    task, image, row, column, channel = padded.stride()
    # Three neighbours in a row lie side by side in memory, so a row of a patch is one run of 3 * c numbers.
    windows = padded.as_strided(
        (tasks, n, height, width, 3, 3 * channels), (task, image, row, column, row, channel)
    )
    return windows.reshape(tasks, n * height * width, 9 * channels)


def _turned(weight: Tensor) -> Tensor:
    """The weight that carries gradients back from outputs to inputs."""
    return weight.flip(1, 2).transpose(3, 4)


class _Convolve(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, images: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(images, weight)
        tasks, n, height, width, channels = images.shape
        flat = weight.reshape(tasks, 9 * channels, -1)
        return torch.bmm(_patches(images), flat).view(tasks, n, height, width, -1)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None]:
        images, weight = ctx.saved_tensors
        for_images = _Convolve.apply(gradient, _turned(weight)) if ctx.needs_input_grad[0] else None
        for_weight = _Correlate.apply(images, gradient) if ctx.needs_input_grad[1] else None
        return for_images, for_weight


class _Correlate(torch.autograd.Function):
    """The weight gradient: how each neighbour of the input goes together with each output."""

    @staticmethod
    def forward(ctx: Any, images: Tensor, gradient: Tensor) -> Tensor:
        ctx.save_for_backward(images, gradient)
        tasks, _, _, _, channels = images.shape
        outputs = gradient.shape[-1]
        patches = _patches(images).transpose(1, 2)  # (task, 9 * c, pixel)
        return torch.bmm(patches, gradient.reshape(tasks, -1, outputs)).view(tasks, 3, 3, channels, outputs)

    @staticmethod
    def backward(ctx: Any, direction: Tensor) -> tuple[Tensor | None, Tensor | None]:
        images, gradient = ctx.saved_tensors
        for_images = _Convolve.apply(gradient, _turned(direction)) if ctx.needs_input_grad[0] else None
        for_gradient = _Convolve.apply(images, direction) if ctx.needs_input_grad[1] else None
        return for_images, for_gradient
