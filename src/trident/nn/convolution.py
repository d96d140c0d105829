"""3x3 convolution, padding 1, with separate weights for each task; max pooling and upsampling.

A convolution is linear in its input and in its weight. So the derivatives of `convolve` and of its weight gradient are
the same two functions again, and gradients of any order are convolutions and matrix products, without a scatter. On a
GPU the convolution is one batched matrix product of patches; for many pixels on a CPU, in float32, it is torch's
channels-last convolution, one task at a time.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

LARGE = 1000  # pixels per task from which torch's convolution is faster, one call per task


def convolve(images: Tensor, weight: Tensor) -> Tensor:
    """(task, image, h, w, inputs) * (task, 3, 3, inputs, outputs) -> (task, image, h, w, outputs)."""
    output: Tensor = _Convolve.apply(images, weight)  # type: ignore[no-untyped-call]
    return output


def _correlate(images: Tensor, gradient: Tensor) -> Tensor:
    """The weight gradient."""
    weight: Tensor = _Correlate.apply(images, gradient)  # type: ignore[no-untyped-call]
    return weight


def convolve_patches(patches: Tensor, weight: Tensor) -> Tensor:
    """`convolve`, given the patches of the images: (task, image, h, w, 9 * inputs) -> (task, image, h, w, outputs)."""
    weight = weight.reshape(len(weight), patches.shape[4], -1)
    return torch.bmm(_rows(patches), weight).view(*patches.shape[:4], -1)


def _convolve_each_task(images: Tensor, weight: Tensor) -> Tensor:
    """`convolve` with torch's convolution, on NCHW views of our channels-last tensors."""
    tasks, n, height, width, _ = images.shape

    def one(images: Tensor, weight: Tensor) -> Tensor:
        kernel = weight.permute(3, 0, 1, 2).contiguous().permute(0, 3, 1, 2)  # (outputs, inputs, 3, 3), channels last
        return F.conv2d(images.permute(0, 3, 1, 2), kernel, padding=1).permute(0, 2, 3, 1)

    if weight.stride(0) == 0:  # one weight for all tasks, as before the first inner step
        return one(images.flatten(0, 1), weight[0]).reshape(tasks, n, height, width, -1)
    return torch.stack([one(images[task], weight[task]) for task in range(tasks)])


def _large_on_cpu(images: Tensor) -> bool:
    return images.device.type == "cpu" and images.dtype == torch.float32 and images[0, ..., 0].numel() >= LARGE


def _convolve_few_outputs(images: Tensor, weight: Tensor) -> Tensor:
    """`convolve` by one product per tap of the window, shifted and added: faster and smaller for few outputs."""
    tasks, n, height, width, inputs = images.shape
    outputs = weight.shape[4]
    flat = weight.permute(0, 3, 1, 2, 4).reshape(tasks, inputs, 9 * outputs)
    taps = torch.bmm(images.reshape(tasks, -1, inputs), flat).view(tasks, n, height, width, 9 * outputs)
    padded = F.pad(taps, (0, 0, 1, 1, 1, 1)).view(tasks, n, height + 2, width + 2, 9, outputs)
    total = padded[:, :, 1 : 1 + height, 1 : 1 + width, 4].contiguous()
    for tap in (0, 1, 2, 3, 5, 6, 7, 8):
        row, column = divmod(tap, 3)
        total += padded[:, :, row : row + height, column : column + width, tap]
    return total


def patches_of(images: Tensor) -> Tensor:
    """The 3x3 neighbourhood of every pixel: (task, image, h, w, c) -> (task, image, h, w, 9 * c)."""
    tasks, n, height, width, channels = images.shape
    padded = F.pad(images.contiguous(), (0, 0, 1, 1, 1, 1))
    if channels == 1:  # nine shifted planes: ten times as fast as copying three numbers at a time
        planes = images.new_empty(tasks, 9, n, height, width)
        for place in range(9):
            row, column = divmod(place, 3)
            planes[:, place] = padded[:, :, row : row + height, column : column + width, 0]
        return planes.permute(0, 2, 3, 4, 1)
    task, image, row, column, channel = padded.stride()
    # Three neighbours in a row are contiguous in memory, so a row of a patch is 3 * c consecutive numbers.
    windows = padded.as_strided((tasks, n, height, width, 3, 3 * channels), (task, image, row, column, row, channel))
    return windows.reshape(tasks, n, height, width, 9 * channels)


def _flipped(weight: Tensor) -> Tensor:
    """The weight of the backward pass, from outputs to inputs."""
    return weight.flip(1, 2).transpose(3, 4)


def _correlate_patches(patches: Tensor, gradient: Tensor) -> Tensor:
    """(task, image, h, w, size) with (task, image, h, w, outputs) -> (task, size, outputs)."""
    return torch.bmm(_rows(patches).transpose(1, 2), _rows(gradient))


def _correlate_images(images: Tensor, gradient: Tensor) -> Tensor:
    """The weight gradient as a matrix product of patches."""
    tasks, inputs, outputs = len(images), images.shape[4], gradient.shape[4]
    if outputs < inputs:  # take patches of the side with fewer channels
        taps = _correlate_patches(images, patches_of(gradient))
        return taps.view(tasks, inputs, 3, 3, outputs).flip(2, 3).permute(0, 2, 3, 1, 4)
    return _correlate_patches(patches_of(images), gradient).view(tasks, 3, 3, inputs, outputs)


def _rows(images: Tensor) -> Tensor:
    return images.reshape(len(images), -1, images.shape[4])  # (task, pixel, c)


class _Convolve(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, images: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(images, weight)
        if weight.shape[4] < weight.shape[3]:
            return _convolve_few_outputs(images, weight)
        if _large_on_cpu(images):
            return _convolve_each_task(images, weight)
        return convolve_patches(patches_of(images), weight)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None]:
        images, weight = ctx.saved_tensors
        for_images = convolve(gradient, _flipped(weight)) if ctx.needs_input_grad[0] else None
        for_weight = _correlate(images, gradient) if ctx.needs_input_grad[1] else None
        return for_images, for_weight


class _Correlate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, images: Tensor, gradient: Tensor) -> Tensor:
        ctx.save_for_backward(images, gradient)
        return _correlate_images(images, gradient)

    @staticmethod
    def backward(ctx: Any, direction: Tensor) -> tuple[Tensor | None, Tensor | None]:
        images, gradient = ctx.saved_tensors
        for_images = convolve(gradient, _flipped(direction)) if ctx.needs_input_grad[0] else None
        for_gradient = convolve(images, direction) if ctx.needs_input_grad[1] else None
        return for_images, for_gradient


def max_pool(features: Tensor) -> Tensor:
    """2x2. An odd last row or column is dropped: (task, image, h, w, c) -> (task, image, h // 2, w // 2, c)."""
    tasks, n, height, width, channels = features.shape
    if not features.requires_grad:  # three times as fast on a CPU if no gradient is needed
        even = features[:, :, : height // 2 * 2, : width // 2 * 2]
        rows = torch.maximum(even[:, :, 0::2], even[:, :, 1::2])
        return torch.maximum(rows[:, :, :, 0::2], rows[:, :, :, 1::2])
    flat = features.reshape(tasks * n, height, width, channels).permute(0, 3, 1, 2)  # channels last in memory
    pooled = F.max_pool2d(flat, 2).permute(0, 2, 3, 1)
    return pooled.reshape(tasks, n, height // 2, width // 2, channels)


def upsample(x: Tensor, size: int) -> Tensor:
    """Nearest neighbour to twice the height and width, or one more: (task, image, h, w, c) -> (..., size, size, c)."""
    doubled: Tensor = _Double.apply(x)  # type: ignore[no-untyped-call]
    if size == 2 * x.shape[2] + 1:
        # The first row and column appear three times, as in torch's nearest-neighbour interpolation.
        doubled = torch.cat([doubled[:, :, :1], doubled], 2)
        doubled = torch.cat([doubled[:, :, :, :1], doubled], 3)
    return doubled


class _Double(torch.autograd.Function):
    """Repeat every pixel four times. The backward pass adds slices: 20 times as fast as autograd's sum."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        tasks, n, height, width, channels = x.shape
        copies = x[:, :, :, None, :, None, :].expand(tasks, n, height, 2, width, 2, channels)
        return copies.reshape(tasks, n, 2 * height, 2 * width, channels)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        added: Tensor = _SumBlocks.apply(gradient)  # type: ignore[no-untyped-call]
        return added


class _SumBlocks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gradient: Tensor) -> Tensor:
        rows = gradient[:, :, 0::2] + gradient[:, :, 1::2]
        return rows[:, :, :, 0::2] + rows[:, :, :, 1::2]

    @staticmethod
    def backward(ctx: Any, direction: Tensor) -> Tensor:
        doubled: Tensor = _Double.apply(direction)  # type: ignore[no-untyped-call]
        return doubled
