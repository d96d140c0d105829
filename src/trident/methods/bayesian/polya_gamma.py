"""Gaussian processes whose likelihood Polya-Gamma variables make Gaussian: posterior and training objective."""

import math
from abc import abstractmethod
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from numpy.polynomial.hermite import hermgauss
from torch import Tensor

from trident.methods.base import Losses, Parameters, cross_entropy, setting, tunable
from trident.methods.bayesian.kernel_head import KernelHead, solve
from trident.nn.classes import members_of
from trident.tasks.task import Labels, Task, all_labels

# Plain numbers, not a tensor: a recording of GPU kernels may not copy anything from the CPU.
QUADRATURE = [(float(x), float(w)) for x, w in zip(*hermgauss(20), strict=True)]
LEAST_TILT = 1e-4  # of a Polya-Gamma variable; its mean is 1/4 to seven digits below it


class Posterior(NamedTuple):
    """The posterior of values f ~ N(0, prior) with the likelihood exp(shift . f - 1/2 sum_i precision_i f_i^2).

    Nothing is divided by the precisions, and the only matrix that is factorised has no eigenvalue below 1, so any
    prior will do, also a singular one.
    """

    mean: Tensor  # (..., n)
    variance: Tensor  # (..., n)
    log_evidence: Tensor  # (...): the logarithm of the mean likelihood under the prior
    weights: Tensor  # (..., n): the mean of a value at another place is its covariances with f times these
    root: Tensor  # (..., n): square roots of the precisions
    factor: Tensor  # (..., n, n): Cholesky factor of I + root prior root

    def reduction(self, covariances: Tensor) -> Tensor:
        """Covariances of some other values with f, (..., m, n) -> (..., n, m).

        The products of this matrix's columns are what the prior covariances of those values shrink by.
        """
        weighted = self.root[..., None] * covariances.mT
        solution: Tensor = torch.linalg.solve_triangular(self.factor, weighted, upper=False)
        return solution


def posterior(prior: Tensor, precision: Tensor, shift: Tensor) -> Posterior:
    """The posterior for a prior (..., n, n), and the precision and shift of the likelihood, (..., n) each."""
    root = precision.sqrt()
    identity = torch.eye(prior.shape[-1], dtype=prior.dtype, device=prior.device)
    inner = identity + root[..., None] * prior * root[..., None, :]
    factor = torch.linalg.cholesky_ex(inner).L  # unlike cholesky, it does not wait for the GPU to check for errors
    before = (prior @ shift[..., None])[..., 0]
    weights = shift - root * solve(factor, (root * before)[..., None])[..., 0]
    mean = (prior @ weights[..., None])[..., 0]
    reduced = torch.linalg.solve_triangular(factor, root[..., None] * prior, upper=False)
    variance = (prior.diagonal(dim1=-2, dim2=-1) - reduced.square().sum(-2)).clamp(min=0)
    evidence = 0.5 * (shift * mean).sum(-1) - factor.diagonal(dim1=-2, dim2=-1).log().sum(-1)
    return Posterior(mean, variance, evidence, weights, root, factor)


def tilt_of(mean: Tensor, variance: Tensor) -> Tensor:
    """The c of the best Polya-Gamma distribution PG(b, c) for a value of this mean and variance."""
    return (mean.square() + variance).clamp(min=LEAST_TILT**2).sqrt()


def polya_gamma_mean(tilt: Tensor) -> Tensor:
    """The mean of PG(1, c): tanh(c / 2) / (2 c). The mean of PG(b, c) is b times as large."""
    return torch.tanh(tilt / 2) / (2 * tilt)


def mean_log_sigmoid(mean: Tensor, variance: Tensor) -> Tensor:
    """The mean of log sigmoid(f) for Gaussian f, by Gauss-Hermite quadrature with 20 nodes."""
    deviation = (2 * variance.clamp(min=1e-12)).sqrt()
    total = torch.zeros_like(mean)
    for x, weight in QUADRATURE:
        total = total + weight * F.logsigmoid(mean + deviation * x)
    return total / math.sqrt(math.pi)


@dataclass(frozen=True)
class MeanFieldKernelHead(KernelHead):
    """Base of those whose posterior is found by mean-field updates, with a choice of what training maximises."""

    objective: Literal["marginal", "predictive"] = setting(
        "marginal", "what training maximises: the evidence of a task's labels, or the queries' probabilities"
    )
    rounds: int = tunable(8, "mean-field updates of the posterior", most=1000, least=1)

    @abstractmethod
    def evidence(self, kernel: Tensor, truth: Tensor) -> Tensor:
        """A lower bound of the log marginal likelihood (task,), with one-hot labels (task, n_way, image)."""

    def training(self, parameters: Parameters, features: Tensor, task: Task, labels: Labels) -> tuple[Tensor, Losses]:
        if self.objective == "predictive":
            logits = self.head(parameters, features, task)
            return logits, {"total": cross_entropy(logits, labels.queries)}
        with torch.no_grad():  # only to count how many are right
            logits = self.head(parameters, features, task)
        truth = members_of(all_labels(task, labels), task.n_way, features)
        evidence = self.evidence(self.kernel(parameters, features), truth)
        return logits, {"total": -evidence / truth.shape[2]}
