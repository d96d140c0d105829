"""Gaussian processes with the logistic-softmax likelihood (Galy-Fajou et al. 2020)."""

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from trident.methods.base import About, Parameters, Task, tunable
from trident.methods.bayesian.polya_gamma import (
    MeanFieldKernelHead,
    Posterior,
    mean_log_sigmoid,
    polya_gamma_mean,
    posterior,
    tilt_of,
)
from trident.nn.classes import members_of


class Local(NamedTuple):
    """The mean-field distributions of the variables that were added for each image."""

    tilt: Tensor  # (task, n_way, image): c of the Polya-Gamma variables w
    counts: Tensor  # (task, n_way, image): means g of the Poisson variables
    shape: Tensor  # (task, image): a of the Gamma variables, Gamma(a, number of classes)


@dataclass(frozen=True)
class LogisticSoftmaxProcess(MeanFieldKernelHead):
    """One Gaussian process per class, and probabilities that are normalised sigmoids.

    Learned: the backbone and the kernel's scale v (`kernel_head.py`). f_c ~ GP(0, k) for each class, and

        p(y | f)  =  sigmoid(f_y) / sum over c of sigmoid(f_c)

    With a Gamma, a Poisson and a Polya-Gamma variable added for each image, all conditionals are known distributions.
    Given the support set, the posterior is found by mean-field updates, a few rounds of

        g_ic  = exp(E[log l_i] - E[f_ic] / 2) / (2 cosh(c_ic / 2)),    c_ic^2 = E[f_ic^2],    l_i ~ Gamma(a_i, n_way)
        a_i   = 1 + sum over c of g_ic
        q(f)  = prior * product of exp((y_ic - g_ic) f_ic / 2 - E[w_ic] f_ic^2 / 2),
                E[w_ic] = (y_ic + g_ic) tanh(c_ic / 2) / (2 c_ic)

    and a query gets  p(y = c)  ~  exp(E[log sigmoid(f_c)]),  by quadrature. Training maximises, for `objective`

        marginal     the evidence of all labels of a task, those of the queries too, per image (ML in Snell & Zemel)
        predictive   the probabilities of the queries' classes given the support set (PL in Snell & Zemel)

    The few-shot version that was published samples the added variables; these are the updates of the original paper,
    which are deterministic. 'marginal' maximises their lower bound of the evidence (with the added variables held
    fixed in its gradient; at their optimum they have none).
    """

    about = About(
        "Logistic-softmax GP",
        "Galy-Fajou et al. 2020",
        "Multi-Class Gaussian Process Classification Made Conjugate: Efficient Inference via Data Augmentation",
    )
    rounds: int = tunable(10, "mean-field updates of the posterior", most=1000)

    def head(self, parameters: Parameters, features: Tensor, task: Task) -> Tensor:
        kernel = self.kernel(parameters, features)
        truth = members_of(task.support_labels, task.n_way, kernel)  # (task, n_way, n_support)
        known = kernel[:, task.support, task.support]
        fitted = self.update(known, truth, self.infer(known, truth))
        across = kernel[:, None, task.queries, task.support].expand(-1, task.n_way, -1, -1)
        means = (across @ fitted.weights[..., None])[..., 0]  # (task, n_way, query)
        alone = kernel.diagonal(dim1=1, dim2=2)[:, None, task.queries]
        variances = (alone - fitted.reduction(across).square().sum(2)).clamp(min=0)
        return mean_log_sigmoid(means, variances).mT

    def infer(self, kernel: Tensor, truth: Tensor) -> Local:
        """The mean-field distributions, from a kernel (task, image, image) and labels (task, n_way, image)."""
        local = Local(truth * 0 + 1e-3, truth * 0 + 0.5 / truth.shape[1], truth[:, 0] * 0 + 1.5)
        for _ in range(self.rounds):
            fitted = self.update(kernel, truth, local)
            tilt = tilt_of(fitted.mean, fitted.variance)
            log_rate = torch.digamma(local.shape) - math.log(truth.shape[1])
            counts = (log_rate[:, None] - fitted.mean / 2 - _log_two_cosh(tilt)).exp()
            local = Local(tilt, counts, 1 + counts.sum(1))
        return local

    def update(self, kernel: Tensor, truth: Tensor, local: Local) -> Posterior:
        precision = (truth + local.counts) * polya_gamma_mean(local.tilt)
        return posterior(kernel[:, None], precision, (truth - local.counts) / 2)

    def evidence(self, kernel: Tensor, truth: Tensor) -> Tensor:
        with torch.no_grad():
            local = self.infer(kernel, truth)
        tilt, counts, shape = local
        log_rate = (torch.digamma(shape) - math.log(truth.shape[1]))[:, None]
        both = truth + counts
        of_classes = both * (polya_gamma_mean(tilt) * tilt.square() / 2 - _log_two_cosh(tilt))
        of_classes = of_classes + counts * log_rate - torch.xlogy(counts, counts) + counts
        of_images = torch.lgamma(shape) + (1 - shape) * torch.digamma(shape) - math.log(truth.shape[1])
        return self.update(kernel, truth, local).log_evidence.sum(1) + of_classes.sum((1, 2)) + of_images.sum(1)


def _log_two_cosh(tilt: Tensor) -> Tensor:
    """log(2 cosh(c / 2)) without overflow."""
    return tilt / 2 + torch.log1p(torch.exp(-tilt))
