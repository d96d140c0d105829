"""Training images in other guises: mirrored, shifted. Whatever is measured is never touched."""

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

SHIFT = 10  # up to one part in so many of the size


class Guises(NamedTuple):
    """How each image of a task is changed."""

    mirrored: np.ndarray  # (image,) bool
    shifts: np.ndarray  # (image, 2) int64: rows down, columns to the right


def draw_guises(augmentation: str, n_images: int, size: int, generator: np.random.Generator) -> Guises:
    mirrored = generator.random(n_images) < 0.5
    most = size // SHIFT if augmentation == "flip_shift" else 0
    return Guises(mirrored, generator.integers(-most, most + 1, (n_images, 2)))


def disguise(images: Tensor, guises: list[Guises]) -> Tensor:
    """(task, image, size, size, channel), changed as the guises of its tasks say; edges are reflected."""
    tasks, n, size = images.shape[:3]
    mirrored = torch.from_numpy(np.stack([g.mirrored for g in guises])).to(images.device)
    shifts = torch.from_numpy(np.stack([g.shifts for g in guises])).to(images.device)
    places = torch.arange(size, device=images.device)
    rows = _reflected(places - shifts[:, :, :1], size)  # (task, image, size)
    columns = _reflected(places - shifts[:, :, 1:], size)
    columns = torch.where(mirrored[:, :, None], size - 1 - columns, columns)
    task = torch.arange(tasks, device=images.device)[:, None, None, None]
    image = torch.arange(n, device=images.device)[None, :, None, None]
    return images[task, image, rows[:, :, :, None], columns[:, :, None, :]]


def _reflected(places: Tensor, size: int) -> Tensor:
    places = places.abs()
    return torch.where(places >= size, 2 * (size - 1) - places, places)
