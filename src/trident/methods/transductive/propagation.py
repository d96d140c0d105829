"""Graphs of the images of a task, and how labels spread over them, for EPNet, TPN and others."""

import torch
from torch import Tensor


def pairwise_squared_distances(features: Tensor) -> Tensor:
    """Squared distances between all images of a task: (task, image, feature) -> (task, image, image)."""
    lengths = features.square().sum(2)
    return (lengths[:, :, None] + lengths[:, None] - 2 * features @ features.mT).clamp(min=0)


def propagator(weights: Tensor, flow: float) -> Tensor:
    """(I - flow * S)^-1 with S = D^-1/2 W D^-1/2, where D has the row sums of W: (task, image, image), the same shape.

    `flow` must be below 1, and W symmetric and not negative. Then the eigenvalues of flow * S are below 1, and the
    inverse exists. So no error needs to be raised, for which the CPU would have to wait for a GPU.
    """
    scales = (weights.sum(2) + 1e-4).rsqrt()  # (task, image)
    normalised = scales[:, :, None] * weights * scales[:, None]
    n = weights.shape[1]
    system = torch.eye(n, dtype=weights.dtype, device=weights.device) - flow * normalised
    # Beyond these sizes torch hands batches to the library MAGMA, whose calls a CUDA graph cannot record.
    parts = torch.split(system, 16 if n <= 128 else 1)
    return torch.cat([torch.linalg.inv_ex(part).inverse for part in parts])


def nearest(similarities: Tensor, k: int) -> Tensor:
    """1 where column j is among the k largest entries of row i, otherwise 0: (task, image, image), the same shape."""
    k = min(k, similarities.shape[2])
    return torch.zeros_like(similarities).scatter_(2, similarities.topk(k, 2).indices, 1.0)
