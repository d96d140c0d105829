"""Lengths of vectors, and fewer dimensions for heads that depend on distances and angles alone."""

import torch
from torch import Tensor


def span_coordinates(features: Tensor) -> Tensor:
    """Features (task, image, feature) as coordinates in the space that they span: at most as many as there are images.

    All inner products, and so all distances, stay as they are. Only rounding depends on the order of the images.
    """
    if features.shape[1] >= features.shape[2]:
        return features
    coordinates: Tensor = torch.linalg.qr(features.mT, mode="r").R  # (task, coordinate, image)
    return coordinates.mT


def length_of(vectors: Tensor, least: float = 1e-6) -> Tensor:
    """(..., size) -> (..., 1), never 0, so that one can divide by it."""
    lengths: Tensor = torch.linalg.vector_norm(vectors, dim=-1, keepdim=True)
    return lengths.clamp(min=least)
