"""Class means."""

import torch
from torch import Tensor


def members_of(labels: Tensor, n_way: int, like: Tensor) -> Tensor:
    """1 where an image is of a class: (task, image) -> (task, n_way, image), in the precision of `like`."""
    return (labels[:, None, :] == torch.arange(n_way, device=labels.device)[:, None]).to(like)


def weighted_means(members: Tensor, features: Tensor) -> Tensor:
    """Members (task, n_way, image), whole or in part, and (task, image, feature) -> (task, n_way, feature)."""
    return torch.bmm(members / members.sum(2, keepdim=True), features)


def class_means(features: Tensor, labels: Tensor, n_way: int) -> Tensor:
    """Mean features of each class: (task, image, feature) and (task, image) -> (task, n_way, feature)."""
    return weighted_means(members_of(labels, n_way, features), features)
