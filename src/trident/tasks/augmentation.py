"""Random augmentation of training images, each separately. The fixed views for predictions are in `views.py`."""

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

SHIFT = 10  # shifts are up to 1/SHIFT of the size
LEAST_AREA = 0.4  # of a crop, as a share of the image's
MOST_STRETCH = 4 / 3  # of a crop's height over its width, or the other way round
COLOUR = 0.4  # brightness, contrast and saturation change by up to this share
GREY = (0.299, 0.587, 0.114)  # how bright red, green and blue look


class Augmentations(NamedTuple):
    """How each image of a task is augmented: its crop, whether it is mirrored, and its colours."""

    mirrored: np.ndarray  # (image,) bool
    starts: np.ndarray  # (image, 2): first row and column of the crop, in pixels
    sizes: np.ndarray  # (image, 2): rows and columns of the crop, in pixels; it is scaled to the whole image
    colours: np.ndarray | None  # (image, 3): factors of brightness, contrast and saturation


def draw_augmentations(augmentation: str, n_images: int, size: int, generator: np.random.Generator) -> Augmentations:
    mirrored = generator.random(n_images) < 0.5
    if augmentation == "crop_colour":
        side = np.sqrt(generator.uniform(LEAST_AREA, 1, n_images))
        stretch = MOST_STRETCH ** generator.uniform(-0.5, 0.5, n_images)
        sizes = size * np.minimum(side[:, None] * np.stack([stretch, 1 / stretch], 1), 1)
        starts = generator.random((n_images, 2)) * (size - sizes)
        return Augmentations(mirrored, starts, sizes, generator.uniform(1 - COLOUR, 1 + COLOUR, (n_images, 3)))
    most = size // SHIFT if augmentation == "flip_shift" else 0
    shifts = generator.integers(-most, most + 1, (n_images, 2))  # down and to the right
    return Augmentations(mirrored, -shifts, np.full((n_images, 2), size), None)


def augment(images: Tensor, augmentations: list[Augmentations]) -> Tensor:
    """Augment uint8 images (task, image, size, size, channel); edges are reflected."""
    size, device = images.shape[2], images.device

    def stacked(parts: list[np.ndarray]) -> Tensor:
        return torch.from_numpy(np.stack(parts)).to(device)

    mirrored = stacked([g.mirrored for g in augmentations])
    starts = stacked([g.starts for g in augmentations])[..., None]
    sizes = stacked([g.sizes for g in augmentations])[..., None]
    colours = [g.colours for g in augmentations if g.colours is not None]
    places = torch.arange(size, device=device)
    if not colours:  # whole pixels
        rows, columns = (starts + places).unbind(2)  # (task, image, size) each
        return _pixels(images, rows, _mirrored(columns, mirrored, size))
    seen = (starts + (places + 0.5) * (sizes / size) - 0.5).float()
    rows, columns = seen[:, :, 0], _mirrored(seen[:, :, 1], mirrored, size)
    return _recoloured(_between_pixels(images, rows, columns), stacked(colours).float()).round().to(torch.uint8)


def _mirrored(columns: Tensor, mirrored: Tensor, size: int) -> Tensor:
    return torch.where(mirrored[:, :, None], size - 1 - columns, columns)


def _pixels(images: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """The images at whole rows and columns, (task, image, size) each."""
    tasks, n, size = images.shape[:3]
    task = torch.arange(tasks, device=images.device)[:, None, None, None]
    image = torch.arange(n, device=images.device)[None, :, None, None]
    return images[task, image, _reflected(rows, size)[:, :, :, None], _reflected(columns, size)[:, :, None, :]]


def _between_pixels(images: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """The images at any rows and columns, by linear interpolation."""
    top, left = rows.floor(), columns.floor()
    down, right = (rows - top)[:, :, :, None, None], (columns - left)[:, :, None, :, None]
    top, left = top.long(), left.long()
    above = torch.lerp(_pixels(images, top, left).float(), _pixels(images, top, left + 1).float(), right)
    below = torch.lerp(_pixels(images, top + 1, left).float(), _pixels(images, top + 1, left + 1).float(), right)
    return torch.lerp(above, below, down)


def _recoloured(images: Tensor, colours: Tensor) -> Tensor:
    """Brightness, contrast and saturation changed, in this order; values stay in 0 .. 255."""
    brightness, contrast, saturation = colours[..., None, None, None].unbind(2)
    images = (images * brightness).clamp(0, 255)
    grey = _grey(images).mean((2, 3), keepdim=True)
    images = torch.lerp(grey, images, contrast).clamp(0, 255)
    return torch.lerp(_grey(images), images, saturation).clamp(0, 255)


def _grey(images: Tensor) -> Tensor:
    """(..., 1)"""
    if images.shape[-1] == 1:
        return images
    return (images * images.new_tensor(GREY)).sum(-1, keepdim=True)


def _reflected(places: Tensor, size: int) -> Tensor:
    places = places.abs()
    return torch.where(places >= size, 2 * (size - 1) - places, places)
