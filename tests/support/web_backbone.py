"""A small stand-in for a pretrained backbone: it sees red, green and blue, and everything else is alike to it."""

import threading

import numpy as np
import torch
from torch import Tensor, nn

from trident.backbones.pretrained import Pretrained

NAME = "python:web_backbone:colours"


class Colours(nn.Module):
    image_size, mean, std, trained_on = 32, (0, 0, 0), (255, 255, 255), "nothing"

    def forward(self, pictures: Tensor) -> Tensor:
        colour = pictures.mean((2, 3))
        pure = (2 * colour - colour.sum(1, keepdim=True)).relu()
        return torch.cat([pure, torch.full_like(pure[:, :1], 0.05), 0.02 * colour], 1)


def colours() -> nn.Module:
    return Colours()


class Counting:
    """In place of a backbone's network: counts the pictures, and waits if it is told to."""

    def __init__(self, backbone: Pretrained) -> None:
        self.computed, self.let_go = 0, threading.Event()
        self._compute = backbone.compute
        self.let_go.set()

    def __call__(self, pixels: np.ndarray) -> np.ndarray:
        self.computed += int(pixels.any((1, 2, 3)).sum())  # what fills up a batch is black
        self.let_go.wait(10)
        return self._compute(pixels)
