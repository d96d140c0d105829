"""The heads that `Evidence` chooses from. Each gives logits of queries from features of unit length."""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from trident.methods.transductive.soft_kmeans import SoftKMeans
from trident.tasks.task import Task

MOST_FOR_KERNEL = 1000  # labelled images; with more, the linear ridge regression takes over
_AT_ONCE = 8192  # queries compared with the labelled images at once


# The best log-temperature of each head's logits, before any labelled image has been left out: it was much the same on
# all data sets that were tried.
LOG_TEMPERATURES = {
    "kernel-ridge": -2.4,
    "wide-kernel-ridge": -2.8,
    "ridge": -2.5,
    "nearest-mean": -0.2,
    "soft-kmeans-2": 0.25,
    "soft-kmeans-8": 0.35,
}
# With one labelled image for each class, when nothing can be left out; "2" are those of TRIDENT's label latents.
OF_ONE_LABEL = {"soft-kmeans-8": 0.75, "soft-kmeans-8 2": 0.2, "nearest-mean": 0.1, "nearest-mean 2": -0.4}


def logits_of_heads(support: Tensor, labels: Tensor, n_way: int, queries: Tensor, together: bool) -> dict[str, Tensor]:
    """Logits (query, class) float64 of every head, by name, from features (image, feature) of unit length."""
    logits = {}
    if len(support) <= MOST_FOR_KERNEL:
        for name, width in (("kernel-ridge", 1.0), ("wide-kernel-ridge", 3.0)):
            logits[name] = _kernel_ridge(support, labels, n_way, queries, width)
    logits["ridge"] = _ridge(support, labels, n_way, queries)
    if not together:
        # 64 bits and small parts, so that a query's rounding does not depend on the others either.
        parts = [
            next(_soft_kmeans(support.double(), labels, n_way, part.double(), 0))
            for part in torch.split(queries, _AT_ONCE)
        ]
        return logits | {"nearest-mean": torch.cat(parts)}
    for step, one in enumerate(_soft_kmeans(support, labels, n_way, queries, rounds=8)):
        name = "nearest-mean" if step == 0 else f"soft-kmeans-{step}"
        if name in LOG_TEMPERATURES:
            logits[name] = one
    return logits


def _targets(labels: Tensor, n_way: int) -> tuple[Tensor, Tensor]:
    """Centred one-hot labels (image, class), and weights (image, 1) that sum to the same in every class."""
    one_hot = F.one_hot(labels, n_way).double()
    weights = (one_hot / one_hot.sum(0)).sum(1, keepdim=True)
    return one_hot - 1 / n_way, weights * (len(labels) / n_way)


def _ridge(support: Tensor, labels: Tensor, n_way: int, queries: Tensor, penalty: float = 0.3) -> Tensor:
    """Linear ridge regression on one-hot labels, all classes weighing the same."""
    targets, weights = _targets(labels, n_way)
    rows = support.double()
    mean = (weights * rows).mean(0)
    rows, targets = weights.sqrt() * (rows - mean), weights.sqrt() * targets
    if len(rows) <= rows.shape[1]:
        inverse = rows @ rows.T + penalty * torch.eye(len(rows), dtype=rows.dtype)
        directions = rows.T @ torch.linalg.solve(inverse, targets)  # (feature, class)
    else:
        inverse = rows.T @ rows + penalty * torch.eye(rows.shape[1], dtype=rows.dtype)
        directions = torch.linalg.solve(inverse, rows.T @ targets)
    offset = mean @ directions
    return torch.cat([part.double() @ directions - offset for part in torch.split(queries, _AT_ONCE)])


def _kernel_ridge(
    support: Tensor, labels: Tensor, n_way: int, queries: Tensor, width: float, penalty: float = 0.1
) -> Tensor:
    """Ridge regression with the kernel exp(width (cosine - 1)), centred on the labelled images."""
    targets, weights = _targets(labels, n_way)
    rows = support.double()
    kernel = torch.exp(width * (rows @ rows.T - 1))
    share = weights / weights.sum()
    of_mean = kernel @ share  # (image, 1): the kernel between each image and the mean of the labelled ones
    size_of_mean = (share * of_mean).sum()
    centred = kernel - of_mean - of_mean.T + size_of_mean
    penalty = penalty * max(float(centred.diagonal().mean()), 1e-6)  # not 0 if all labelled images are equal
    coefficients = torch.linalg.solve(centred + penalty * torch.diag(1 / weights[:, 0]), targets)  # (image, class)
    parts = []
    for part in torch.split(queries, _AT_ONCE):
        similar = torch.exp(width * (part.double() @ rows.T - 1))  # (query, image)
        parts.append((similar - similar @ share - of_mean.T + size_of_mean) @ coefficients)
    return torch.cat(parts)


def _soft_kmeans(support: Tensor, labels: Tensor, n_way: int, queries: Tensor, rounds: int) -> Iterator[Tensor]:
    """The logits after each round of soft k-means, nearest mean first."""
    task = Task(torch.cat([support, queries])[None], labels[None], n_way)
    for logits in SoftKMeans(rounds=rounds).rounds_of(task.images, task):
        yield logits[0].double()
