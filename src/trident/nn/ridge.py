"""Ridge regression of many vectors on the rows of a matrix."""

import torch
from torch import Tensor

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
