"""Propagation over a graph of images: what a node has flows to its neighbours, again and again."""

import torch
from torch import Tensor


def between(features: Tensor) -> Tensor:
    """Squared distances between all images of a task: (task, image, feature) -> (task, image, image)."""
    lengths = features.square().sum(2)
    return (lengths[:, :, None] + lengths[:, None] - 2 * features @ features.mT).clamp(min=0)


def propagator(weights: Tensor, flow: float) -> Tensor:
    """(I - flow * S)^-1 with S = D^-1/2 W D^-1/2, where D has the row sums of W: (task, image, image), the same shape.

    `flow` must be below 1, and W symmetric. No error is raised on a GPU, where a check would wait for the device: the
    eigenvalues of flow * S are below 1, so that the inverse exists.
    """
    scales = (weights.sum(2) + 1e-4).rsqrt()  # (task, image)
    normalised = scales[:, :, None] * weights * scales[:, None]
    identity = torch.eye(weights.shape[1], dtype=weights.dtype, device=weights.device)
    inverse: Tensor = torch.linalg.inv_ex(identity - flow * normalised).inverse
    return inverse
