"""Who belongs to which class."""

import torch
from torch import Tensor


def members_of(labels: Tensor, n_way: int, like: Tensor) -> Tensor:
    """1 where an image is of a class: (task, image) -> (task, n_way, image), in the precision of `like`."""
    return (labels[:, None, :] == torch.arange(n_way, device=labels.device)[:, None]).to(like)


def class_means(members: Tensor, features: Tensor) -> Tensor:
    """(task, n_way, image), whole members or in part, and (task, image, feature) -> (task, n_way, feature)."""
    return torch.bmm(members / members.sum(2, keepdim=True), features)
