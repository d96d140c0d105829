"""Class means."""

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
