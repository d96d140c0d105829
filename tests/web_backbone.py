"""A small stand-in for a pretrained backbone: it sees red, green and blue, and everything else is alike to it."""

import torch
from torch import Tensor, nn

NAME = "python:web_backbone:colours"


class Colours(nn.Module):
    image_size, mean, std, trained_on = 32, (0, 0, 0), (255, 255, 255), "nothing"

    def forward(self, pictures: Tensor) -> Tensor:
        colour = pictures.mean((2, 3))
        pure = (2 * colour - colour.sum(1, keepdim=True)).relu()
        return torch.cat([pure, torch.full_like(pure[:, :1], 0.05), 0.02 * colour], 1)


def colours() -> nn.Module:
    return Colours()
