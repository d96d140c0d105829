"""Lengths of vectors."""

import torch
from torch import Tensor


def length_of(vectors: Tensor, least: float = 1e-6) -> Tensor:
    """(..., size) -> (..., 1), never 0, so that one can divide by it."""
    found: Tensor = torch.linalg.vector_norm(vectors, dim=-1, keepdim=True)
    return found.clamp(min=least)
