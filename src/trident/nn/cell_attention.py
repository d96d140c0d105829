"""Self-attention between the cells of a feature map, for several networks side by side."""

import torch
import torch.nn.functional as F
from torch import Tensor

from trident.nn.parameters import Parameters, normal, uniform

HEADS = 4
POSITIONS = 0.02  # standard deviation of the position vectors at the start


def initial_attention(branches: int, cells: int, channels: int, generator: torch.Generator) -> Parameters:
    """Random weights for each branch. `output` is zero, so that at the start the features stay as they are."""
    return {
        "attention.positions": normal((branches, cells, channels), POSITIONS, generator),
        "attention.qkv": uniform((branches, channels, 3 * channels), channels, generator),
        "attention.output": torch.zeros(branches, channels, channels),
    }


def attend(parameters: Parameters, features: Tensor) -> Tensor:
    """Maps (task, image, branch, cell * channel) -> the same, with what each cell found in the others added to it.

    Within a branch, with x_i the features of cell i and all heads side by side:

        y_i = layer norm of (x_i + position_i),   (q_i, k_i, v_i) = qkv y_i
        x_i + output sum_j softmax_j(q_i . k_j / sqrt(size of a head)) v_j
    """
    positions = parameters["attention.positions"]  # (branch, cell, channel)
    branches, n_cells, channels = positions.shape
    n_images = features.shape[0] * features.shape[1]
    cells = features.reshape(n_images, branches, n_cells, channels).transpose(0, 1)  # (branch, image, cell, channel)
    seen = F.layer_norm(cells + positions[:, None], (channels,)).flatten(1, 2)  # (branch, image * cell, channel)
    mixed = torch.bmm(seen, parameters["attention.qkv"]).reshape(
        branches * n_images, n_cells, 3, HEADS, channels // HEADS
    )
    queries, keys, values = mixed.permute(2, 0, 3, 1, 4)  # (branch * image, head, cell, size of a head) each
    attended = F.scaled_dot_product_attention(queries, keys, values).transpose(
        1, 2
    )  # (branch * image, cell, head, size)
    added = torch.bmm(attended.reshape(branches, -1, channels), parameters["attention.output"])
    return (cells + added.view_as(cells)).transpose(0, 1).reshape(features.shape)
