"""Classifiers that are fitted to the support set by gradient descent, for all tasks at once.

The weights of a class stay a linear combination of the support features, so only its coefficients are fitted: (task,
n_way, image), as in a dual problem. A step then costs no more for long features than for short ones. In terms of the
weights these are exactly the steps of SGD with momentum 0.9 and dampening 0.9, with all images in every step.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from trident.nn.classes import members_of

MOMENTUM = 0.9
SHORTEST = 0.1  # weights of a cosine classifier start with length 1 and only grow, unless all features are 0


def balanced_targets(labels: Tensor, n_way: int, like: Tensor) -> Tensor:
    """(task, image) -> (task, image, n_way): one-hot labels, weighted so that all classes count as much."""
    members = members_of(labels, n_way, like)
    return (members / members.sum(2, keepdim=True) / n_way).mT


def fit_linear(features: Tensor, targets: Tensor, steps: int, rate: float, weight_decay: float) -> Tensor:
    """Coefficients (task, n_way, image) of a linear layer's weights, with weight decay; its biases are their sums."""
    products = features @ features.mT + 1  # the bias is the weight of a feature that is always 1

    def gradient(coefficients: Tensor) -> Tensor:
        return _slopes(products @ coefficients.mT, targets).mT + weight_decay * coefficients

    return _descend(torch.zeros_like(targets.mT), gradient, steps, rate)


def fit_cosine(
    features: Tensor, targets: Tensor, scale: Tensor | float, start: Tensor, steps: int, rate: float
) -> Tensor:
    """The coefficients (task, n_way, image) of the weights w of a cosine classifier, from a start of this shape.

    Minimises the cross-entropy of softmax(scale cos(w, f)) with weighted targets. Features must have unit length. The
    scale may differ between images: (task, image, 1).
    """
    products = features @ features.mT  # (task, image, image)

    def gradient(coefficients: Tensor) -> Tensor:
        inner = products @ coefficients.mT  # (task, image, n_way): w . f
        squares = (coefficients.mT * inner).sum(1, keepdim=True)  # (task, 1, n_way): ||w||^2
        lengths = squares.clamp(min=SHORTEST**2).sqrt()
        cosines = inner / lengths
        slopes = scale * _slopes(scale * cosines, targets)
        along = (slopes * cosines).sum(1, keepdim=True)  # (task, 1, n_way): the part that would only change ||w||
        return ((slopes - along / lengths * coefficients.mT) / lengths).mT

    return _descend(start, gradient, steps, rate)


def _slopes(logits: Tensor, targets: Tensor) -> Tensor:
    """The gradient of the cross-entropy with respect to the logits: (task, image, n_way)."""
    return targets.sum(2, keepdim=True) * torch.softmax(logits, 2) - targets


def _descend(start: Tensor, gradient: Callable[[Tensor], Tensor], steps: int, rate: float) -> Tensor:
    coefficients = start
    velocity = torch.zeros_like(start)
    for step in range(steps):
        now = gradient(coefficients)
        velocity = torch.lerp(now, velocity, MOMENTUM) if step else now
        coefficients = coefficients - rate * velocity
    return coefficients
