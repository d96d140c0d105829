"""Class means, and distances and lengths of features."""

import torch
from torch import Tensor


def members_of(labels: Tensor, n_way: int, like: Tensor) -> Tensor:
    """One-hot labels: (task, image) -> (task, n_way, image), with the data type of `like`."""
    return (labels[:, None, :] == torch.arange(n_way, device=labels.device)[:, None]).to(like)


def weighted_means(members: Tensor, features: Tensor) -> Tensor:
    """Weights (task, n_way, image) and features (task, image, feature) -> (task, n_way, feature)."""
    return torch.bmm(members / members.sum(2, keepdim=True), features)


def squared_distances(queries: Tensor, prototypes: Tensor) -> Tensor:
    """(task, query, feature) and (task, n_way, feature) -> (task, query, n_way)."""
    return (queries[:, :, None] - prototypes[:, None]).square().sum(3)


def class_means(features: Tensor, labels: Tensor, n_way: int) -> Tensor:
    """Mean features of each class: (task, image, feature) and (task, image) -> (task, n_way, feature)."""
    return weighted_means(members_of(labels, n_way, features), features)


def span_coordinates(features: Tensor) -> Tensor:
    """Features (task, image, feature) as coordinates in the space that they span, with the same inner products."""
    if features.shape[1] >= features.shape[2]:
        return features
    coordinates: Tensor = torch.linalg.qr(features.mT, mode="r").R  # (task, coordinate, image)
    return coordinates.mT


def length_of(vectors: Tensor) -> Tensor:
    """(..., size) -> (..., 1), never 0, so that one can divide by it."""
    lengths: Tensor = torch.linalg.vector_norm(vectors, dim=-1, keepdim=True)
    return lengths.clamp(min=1e-6)
