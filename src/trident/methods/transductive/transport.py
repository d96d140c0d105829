"""Queries dealt out to classes of given sizes by optimal transport, for PT-MAP and PEMnE-BMS."""

import torch
from torch import Tensor


def power(features: Tensor, exponent: float) -> Tensor:
    """Signed (|f| + 1e-6) ** exponent, which makes the skewed features of a ReLU more like a Gaussian."""
    return torch.where(features < 0, -1.0, 1.0).to(features) * (features.abs() + 1e-6) ** exponent


def sinkhorn(logits: Tensor, sizes: Tensor, iterations: int, at_least: bool = False) -> Tensor:
    """Sinkhorn's iteration: change probabilities as little as possible until all classes have given sizes.

    Logits (task, query, n_way) -> logarithms of soft labels, whose sums over queries are `sizes` (task, n_way).
    Rows are scaled to sum 1, then columns to these sums, and so on. With `at_least`, only columns with smaller sums are
    scaled. Logarithms can neither overflow nor become 0.
    """
    wanted = sizes.clamp(min=1e-12).log()[..., None]  # (task, n_way, 1)
    logits = logits.mT.contiguous()  # (task, n_way, query): sums over long rows are faster
    for _ in range(iterations):
        logits = torch.log_softmax(logits, 1)
        of_sum_one = torch.log_softmax(logits, 2)
        logits = torch.maximum(logits, wanted + of_sum_one) if at_least else wanted + of_sum_one
    return logits.mT
