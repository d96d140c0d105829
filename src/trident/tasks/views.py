"""The views of an image that a prediction is made from: the image itself, mirrored, shifted, and its corners."""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from trident.settings import Views

CORNER = 6 / 7  # of the image's height and width: 72 of 84 pixels
SHIFT = 1 / 42  # of the image's height and width: 2 of 84 pixels


def views_of(images: Tensor, views: Views) -> Iterator[Tensor]:
    """Images (task, image, size, size, channel), or features of all views side by side, in one view after another."""
    if images.ndim == 3:
        yield from images.chunk(views.number, 2)
        return
    size = images.shape[2]
    shift = max(1, round(SHIFT * size))
    for by in (0, shift, -shift) if views.shifted else (0,):
        view = _shifted(images, by) if by else images
        yield view
        if views.mirrored:
            yield view.flip(3)
    if views.corners:
        part = round(CORNER * size)
        far = size - part
        for top, left, flipped in ((0, 0, False), (0, far, True), (far, 0, True), (far, far, False)):
            corner = _enlarged(images[:, :, top : top + part, left : left + part], size)
            yield corner.flip(3) if views.mirrored and flipped else corner


def _shifted(images: Tensor, by: int) -> Tensor:
    """The images moved up and to the left by so many pixels; edges are reflected."""
    last = images.shape[2] - 1
    seen = torch.arange(last + 1, device=images.device) + by
    inside = last - (last - seen.abs()).abs()
    return images[:, :, inside][:, :, :, inside]


def _enlarged(part: Tensor, size: int) -> Tensor:
    """A part of the images, scaled up to the size of the whole."""
    tasks, n, _, _, channels = part.shape
    flat = part.flatten(0, 1).movedim(3, 1)  # (task * image, channel, height, width)
    exact = flat if flat.is_floating_point() else flat.float()
    larger = F.interpolate(exact, (size, size), mode="bilinear").movedim(1, 3)
    return (larger if part.is_floating_point() else larger.round().to(part.dtype)).view(tasks, n, size, size, channels)
