"""Graphs of nearest neighbours."""

import torch
from torch import Tensor


def nearest(similarities: Tensor, k: int) -> Tensor:
    """1 where column j is among the k largest entries of row i, otherwise 0: (task, image, image), the same shape."""
    k = min(k, similarities.shape[2])
    return torch.zeros_like(similarities).scatter_(2, similarities.topk(k, 2).indices, 1.0)
