"""Estimates the sizes of the classes of a pile from soft counts."""

import torch
from torch import Tensor

_CONCENTRATIONS = torch.logspace(-1.5, 3, 40)  # from "one class has nearly everything" to "all classes are equal"
_TOWARDS_EQUAL = 0.5  # the prior of a concentration a is a ** 0.5 on a logarithmic scale


def expected_shares(counts: Tensor) -> Tensor:
    """The expected share of each class, from soft counts of pictures: both (task, class).

    Shares have a symmetric Dirichlet prior whose concentration is unknown. Each concentration is weighted by how well
    it explains the counts. Nearly equal counts therefore give equal shares, and lopsided counts are taken as they are.
    """
    n_classes = counts.shape[1]
    a = _CONCENTRATIONS.to(counts)  # (concentration,)
    total = counts.sum(1, keepdim=True)  # (task, 1)
    each = torch.lgamma(counts[:, :, None] + a) - torch.lgamma(a)  # (task, class, concentration)
    evidence = torch.lgamma(n_classes * a) - torch.lgamma(total + n_classes * a) + each.sum(1)
    weights = torch.softmax(evidence + _TOWARDS_EQUAL * a.log(), 1)  # (task, concentration)
    shares = (counts[:, :, None] + a) / (total + n_classes * a)[:, None]  # (task, class, concentration)
    return (shares * weights[:, None]).sum(2)
