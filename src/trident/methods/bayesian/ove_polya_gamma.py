"""One-vs-each Polya-Gamma Gaussian processes (Snell & Zemel 2021)."""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from trident.methods.base import About, Parameters, Task
from trident.methods.bayesian.polya_gamma import (
    MeanFieldKernelHead,
    Posterior,
    mean_log_sigmoid,
    polya_gamma_mean,
    posterior,
    tilt_of,
)
from trident.nn.classes import members_of


@dataclass(frozen=True)
class OveGaussianProcess(MeanFieldKernelHead):
    """One Gaussian process per class, and a likelihood that compares the image's class with each other class.

    Learned: the backbone and the kernel's scale v (`kernel_head.py`). f_c ~ GP(0, k) for each class, and

        p(y | f)  ~  product over c != y of  sigmoid(f_y - f_c)

    Polya-Gamma variables w make each sigmoid a Gaussian factor of d = f_y - f_c. Given the support set, the posterior
    is found by mean-field updates, a few rounds of

        q(f)  =  prior * product of exp(d / 2 - E[w] d^2 / 2),      E[w] = tanh(c / 2) / (2 c),   c^2 = E[d^2]

    and a query gets  p(y = c)  ~  exp(sum over c' != c of E[log sigmoid(f_c - f_c')]),  each term by quadrature.
    Training maximises, for `objective`

        marginal     the evidence of all labels of a task, those of the queries too, per image (published as ML)
        predictive   the probabilities of the queries' classes given the support set (published as PL)

    The published method samples w and f with Gibbs chains. Here the mean-field posterior takes their place: it is
    deterministic, and 'marginal' maximises a lower bound of the evidence (the c are held fixed in its gradient; at
    their optimum they have none). The cost grows with the third power of labelled images times classes.
    """

    about = About(
        "One-vs-Each Polya-Gamma GP",
        "Snell & Zemel 2021",
        "Bayesian Few-Shot Classification with One-vs-Each Polya-Gamma Augmented Gaussian Processes",
    )

    def head(self, parameters: Parameters, features: Tensor, task: Task) -> Tensor:
        kernel = self.kernel(parameters, features)
        n, n_way = task.n_support, task.n_way
        differences = _differences(members_of(task.support_labels, n_way, kernel).mT)  # (task, n * n_way, n_way)
        fitted = self.infer(_covariances(kernel[:, :n, :n], differences))
        # Covariances of a query's f_c with the differences d of the support set.
        across = kernel[:, n:, None, :n].repeat_interleave(n_way, 3) * differences.mT[:, None]
        means = across @ fitted.weights[:, None, :, None]  # (task, query, n_way, 1)
        reduction = fitted.reduction(across.flatten(1, 2)).mT.reshape(across.shape)
        alone = kernel.diagonal(dim1=1, dim2=2)[:, n:, None, None]
        identity = torch.eye(n_way, dtype=kernel.dtype, device=kernel.device)
        joint = alone * identity - reduction @ reduction.mT  # (task, query, n_way, n_way)
        own = joint.diagonal(dim1=2, dim2=3)
        variances = own[..., None] + own[..., None, :] - 2 * joint  # of f_c - f_c'
        each = mean_log_sigmoid(means - means.mT, variances)
        return (each * (1 - identity)).sum(3)

    def infer(self, covariances: Tensor) -> Posterior:
        """The posterior of the differences, which have these prior covariances (task, n, n)."""
        tilt = covariances.new_zeros(covariances.shape[:2]) + 1e-3
        for _ in range(self.rounds):
            tilt = tilt_of(*self.update(covariances, tilt)[:2])
        return self.update(covariances, tilt)

    def update(self, covariances: Tensor, tilt: Tensor) -> Posterior:
        return posterior(covariances, polya_gamma_mean(tilt), torch.full_like(tilt, 0.5))

    def evidence(self, kernel: Tensor, truth: Tensor) -> Tensor:
        covariances = _covariances(kernel, _differences(truth.mT))
        with torch.no_grad():
            fitted = self.infer(covariances)
            tilt = tilt_of(fitted.mean, fitted.variance)
        bound = F.logsigmoid(tilt) - tilt / 2 + polya_gamma_mean(tilt) * tilt.square() / 2
        # The differences of a class with itself are always 0; each adds log sigmoid(0) = -log 2, which is taken back.
        constant = truth.shape[2] * math.log(2)
        return self.update(covariances, tilt).log_evidence + bound.sum(1) + constant


def _differences(truth: Tensor) -> Tensor:
    """One-hot labels (task, image, n_way) -> rows e_y - e_c for each image and class: (task, image * n_way, n_way)."""
    identity = torch.eye(truth.shape[2], dtype=truth.dtype, device=truth.device)
    return (truth[:, :, None] - identity).flatten(1, 2)


def _covariances(kernel: Tensor, differences: Tensor) -> Tensor:
    """Prior covariances of all differences with each other."""
    n_way = differences.shape[2]
    return kernel.repeat_interleave(n_way, 1).repeat_interleave(n_way, 2) * (differences @ differences.mT)
