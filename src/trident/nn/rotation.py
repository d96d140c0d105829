"""Fewer dimensions for heads that depend on distances and angles alone."""

import torch
from torch import Tensor


def rotated(features: Tensor) -> Tensor:
    """Features (task, image, feature) in the coordinates of the space that they span: no more of them than images.

    All inner products, and so all distances, stay as they are. Only rounding depends on the order of the images.
    """
    if features.shape[1] >= features.shape[2]:
        return features
    coordinates: Tensor = torch.linalg.qr(features.mT, mode="r").R  # (task, coordinate, image)
    return coordinates.mT
