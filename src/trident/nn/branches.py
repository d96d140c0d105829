"""What an ensemble computes with the features of several networks side by side.

One is a Gaussian of low rank that says how images of one class differ; another is self-attention between the cells of
a feature map.

A network that was trained as a classifier varies most along directions that tell its training classes apart. Distances
between images of new classes are dominated by them, so it helps to make features shorter along them.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from trident.nn.parameters import Parameters, normal, uniform

RANK = 4  # of a direction, as a matrix of cells and channels: it has few parameters then
LENGTH = 0.5  # of the vectors that make up a direction, at the start
LOG_NOISE = -8.0  # at the start
TINY = 1e-12


def initial_variation(
    branches: int, directions: int, cells: int, channels: int, generator: torch.Generator
) -> Parameters:
    return {
        "variation.cells": normal((branches, directions, RANK, cells), LENGTH / cells**0.5, generator),
        "variation.channels": normal((branches, directions, RANK, channels), LENGTH / channels**0.5, generator),
        "variation.log_noise": torch.full((branches,), LOG_NOISE),
    }


def directions_of(parameters: Parameters) -> Tensor:
    """Not of unit length: their squared lengths are variances. (branch, direction, cell * channel)."""
    cells, channels = parameters["variation.cells"], parameters["variation.channels"]
    return torch.einsum("bdrc,bdrk->bdck", cells, channels).flatten(2)


def negative_log_likelihood(parameters: Parameters, unit: Tensor, classes: Tensor, n_classes: int) -> Tensor:
    """How badly the Gaussian fits a batch: a loss per feature, without constants.

    It takes the difference of each image from the mean of its class in the batch, and the covariance

        sum over directions d of d d^T  +  noise I.

    Features (task, image, branch, feature), classes (task, image) -> (task,). A class with n images in the batch has
    n - 1 degrees of freedom; a class with one image does not count.
    """
    one_hot = F.one_hot(classes, n_classes).to(unit)  # (task, image, class)
    counts = one_hot.sum(1)  # (task, class)
    means = torch.einsum("tic,tibf->tcbf", one_hot / counts.clamp(min=1)[:, None], unit)
    residuals = unit - torch.einsum("tic,tcbf->tibf", one_hot, means)
    freedom = (counts - 1).clamp(min=0).sum(1)  # (task,)

    directions, log_noise = directions_of(parameters), parameters["variation.log_noise"]  # (branch, ...) each
    noise = log_noise.exp()
    n_directions, n_features = directions.shape[1:]
    identity = torch.eye(n_directions, dtype=unit.dtype, device=unit.device)
    # By Woodbury's identity, only a matrix of the directions' products has to be factorised.
    factor: Tensor = torch.linalg.cholesky_ex(directions @ directions.mT + noise[:, None, None] * identity).L
    products = torch.einsum("bdf,tibf->tbdi", directions, residuals)
    explained = torch.linalg.solve_triangular(factor, products, upper=False).square().sum((2, 3))  # (task, branch)
    squares = (residuals.square().sum((1, 3)) - explained) / noise  # (task, branch)
    log_determinant = (n_features - n_directions) * log_noise + 2 * factor.diagonal(dim1=1, dim2=2).log().sum(1)
    each = squares / freedom.clamp(min=1)[:, None] + log_determinant * (freedom > 0)[:, None]
    mean: Tensor = each.mean(1) / (2 * n_features)
    return mean


def shortened(parameters: Parameters, features: Tensor, damping: float) -> Tensor:
    """Features (..., branch, feature), divided by sqrt(1 + damping * variance / largest variance) along each
    principal direction of the variation."""
    directions = directions_of(parameters)  # D: (branch, direction, feature)
    variances, vectors = torch.linalg.eigh(directions @ directions.mT)  # the variances are those of D^T D, too
    slopes = damping / variances.amax(1, keepdim=True).clamp(min=TINY)
    roots = (1 + slopes * variances.clamp(min=0)).sqrt()  # (branch, direction)
    # f - D^T K D f, where K has the eigenvalues (1 - 1 / root) / variance, written without dividing by the variance.
    kernel = (vectors * (slopes / (roots * (roots + 1)))[:, None]) @ vectors.mT
    along = torch.einsum("...bf,bdf->...bd", features, directions)
    return features - torch.einsum("...bd,bde,bef->...bf", along, kernel, directions)


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
