"""Means of predictions."""

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor


def log_mean(logs: Sequence[Tensor]) -> Tensor:
    """The logarithm of the mean of probabilities, given their logarithms."""
    return logs[0] if len(logs) == 1 else torch.logsumexp(torch.stack(list(logs)), 0) - math.log(len(logs))


def mean_prediction(draws: Iterable[Tensor]) -> Tensor:
    """Logits (..., n_way) of each draw of noise -> the logarithm of the mean probabilities."""
    return log_mean([torch.log_softmax(logits, -1) for logits in draws])
