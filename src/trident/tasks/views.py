"""The views of an image that a prediction is made from: the image itself, its mirror image and its corners."""

from collections.abc import Iterator

import torch.nn.functional as F
from torch import Tensor

from trident.settings import Views

CORNER = 6 / 7  # of the image's height and width: 72 of 84 pixels


def views_of(images: Tensor, views: Views) -> Iterator[Tensor]:
    """The images (task, image, size, size, channel) in one view after the other.

    Features computed beforehand are of all views, one after another: (task, image, view * feature).
    """
    if images.ndim == 3:
        yield from images.chunk(views.number, 2)
        return
    yield images
    if views.mirrored:
        yield images.flip(3)
    if views.corners:
        size = images.shape[2]
        part = round(CORNER * size)
        far = size - part
        for top, left, flipped in ((0, 0, False), (0, far, True), (far, 0, True), (far, far, False)):
            corner = _enlarged(images[:, :, top : top + part, left : left + part], size)
            yield corner.flip(3) if views.mirrored and flipped else corner


def _enlarged(part: Tensor, size: int) -> Tensor:
    """A part of the images, scaled up to the size of the whole."""
    tasks, n, _, _, channels = part.shape
    flat = part.flatten(0, 1).movedim(3, 1)  # (task * image, channel, height, width)
    exact = flat if flat.is_floating_point() else flat.float()
    larger = F.interpolate(exact, (size, size), mode="bilinear").movedim(1, 3)
    return (larger if part.is_floating_point() else larger.round().to(part.dtype)).view(tasks, n, size, size, channels)
