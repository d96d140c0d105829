"""Feature map Reconstruction Networks (Wertheimer et al. 2021)."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from trident.methods.base import About, HeadOnFeatures, Labels, Losses, Parameters, Task, setting
from trident.nn.classes import members_of


@dataclass(frozen=True)
class FeatureReconstruction(HeadOnFeatures):
    """A query belongs to the class from whose feature maps its own map can be put together best.

    Learned: the backbone, and three numbers a, b and g. At test nothing is adapted. S_c holds the cells of all support
    maps of class c as rows, k_c r of them with d channels; Q holds the cells of a query's map:

        Q_c          = e^b Q (S_c^T S_c + l I)^-1 S_c^T S_c,      l = e^a k_c r / d     (ridge regression)
        p(y = c | x) ~ exp(-e^g * mean over cells of ||Q - Q_c||^2)

    In training, the squared inner products between the cells of different classes' support maps, all divided by the
    norm of the whole support set, are added to the cross-entropy with weight `apart`.

    The published g is not an exponent but the factor itself. The published pretraining, in which a learned matrix for
    each training class takes the place of S_c, is left out: recipes start from an ordinary classifier instead.
    """

    takes_cells: ClassVar[bool] = True
    about = About(
        "Feature Map Reconstruction Networks",
        "Wertheimer et al. 2021",
        "Few-Shot Classification with Feature Map Reconstruction Networks",
    )
    apart: float = setting(0.03, "weight of the loss that keeps the support maps of different classes apart", least=0)

    def initial(self, n_features: int, generator: torch.Generator) -> Parameters:
        return {name: torch.zeros(()) for name in ("log_penalty", "log_length", "log_scale")}  # a, b, g

    def head(self, parameters: Parameters, features: Tensor, task: Task) -> Tensor:
        queries = features[:, task.queries].flatten(1, 2)[:, None]  # (task, 1, query * cell, channel)
        cells, channels = features.shape[2:]
        counts = members_of(task.support_labels, task.n_way, features).sum(2)  # (task, n_way)
        penalties = counts * cells / channels * parameters["log_penalty"].exp() + 1e-6
        rows = self._rows(features, task)
        reconstructed = parameters["log_length"].exp() * ridge_reconstructions(rows, queries, penalties)
        errors = (queries - reconstructed).square().sum(3)  # (task, n_way, query * cell)
        errors = errors.view(*errors.shape[:2], task.n_queries, cells).mean(3)
        return -parameters["log_scale"].exp() * errors.mT

    def training(self, parameters: Parameters, features: Tensor, task: Task, labels: Labels) -> tuple[Tensor, Losses]:
        logits, losses = super().training(parameters, features, task, labels)
        rows = self._rows(features, task)
        rows = rows / torch.linalg.vector_norm(rows, dim=(1, 2, 3), keepdim=True).clamp(min=1e-12)
        squares = (rows.mT @ rows).flatten(2)  # (task, n_way, channel * channel)
        inner = squares @ squares.mT  # (task, n_way, n_way): the summed squares of inner products of two classes' cells
        alike = (inner.sum((1, 2)) - inner.diagonal(dim1=1, dim2=2).sum(1)) / 2
        fit = losses["total"]
        return logits, {"total": fit + self.apart * alike, "classification": fit, "alike": alike}

    def _rows(self, features: Tensor, task: Task) -> Tensor:
        """The cells of each class's support maps, (task, n_way, n_support * cell, channel); zeros for other classes."""
        members = members_of(task.support_labels, task.n_way, features)
        return (members[..., None, None] * features[:, None, task.support]).flatten(2, 3)


ROUNDING = 100  # smallest penalty, in units of the rounding error: eps times the sum of squares


def ridge_reconstructions(rows: Tensor, queries: Tensor, penalties: Tensor) -> Tensor:
    """The queries Q, reconstructed from the rows S by ridge regression: Q (S^T S + penalty I)^-1 S^T S.

    Rows (task, class, row, channel), queries (task, 1, query, channel), penalties (task, class) ->
    (task, class, query, channel). Rows of zeros change nothing. Penalties below the rounding error are raised.
    The matrix that is factorised has the size of the rows or of the channels, whichever is smaller.
    """
    squares = rows.square().sum((2, 3))  # (task, class)
    penalties = torch.maximum(penalties, ROUNDING * torch.finfo(rows.dtype).eps * squares)[..., None, None]
    few_rows = rows.shape[2] < rows.shape[3]
    products = rows @ rows.mT if few_rows else rows.mT @ rows
    size = products.shape[2]
    identity = torch.eye(size, dtype=rows.dtype, device=rows.device)
    # Cholesky's factors and triangular solutions never wait for a GPU, unlike torch.linalg.solve.
    factor: Tensor = torch.linalg.cholesky_ex(products + penalties * identity)[0]
    if few_rows:  # Q S^T (S S^T + penalty I)^-1 S is the same
        half: Tensor = torch.linalg.solve_triangular(factor, rows, upper=False)  # (task, class, row, channel)
        return (queries @ half.mT) @ half
    inverse: Tensor = torch.linalg.solve_triangular(factor, identity.expand_as(factor), upper=False)
    return queries - penalties * ((queries @ inverse.mT) @ inverse)
