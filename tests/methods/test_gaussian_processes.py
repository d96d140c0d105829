"""Heads that are Gaussian processes, against other libraries and against their equations, written as loops."""

import math
from typing import Any

import numpy as np
import pytest
import scipy.integrate
import scipy.special
import scipy.stats
import torch
import torch.nn.functional as F
from sklearn.gaussian_process import GaussianProcessRegressor
from sklearn.gaussian_process.kernels import ConstantKernel, DotProduct
from torch import Tensor

from bayesian_heads import HEADS, N_WAY, Array, Case, case_of, logits_of, unit
from trident.methods.base import MEAN
from trident.methods.bayesian.dkt import DeepKernelTransfer
from trident.methods.bayesian.logistic_softmax_gp import LogisticSoftmaxProcess
from trident.methods.bayesian.ove_polya_gamma import OveGaussianProcess


def kernel_of(case: Case, rows: Array, normalisation: str = "L2N") -> Array:
    if normalisation == "CL2N":
        rows = rows - case.parameters[MEAN].numpy()
    rows = np.array([row if normalisation == "UN" else unit(row) for row in rows])
    return np.asarray(math.exp(float(case.parameters["log_scale"])) * rows @ rows.T)


@pytest.mark.parametrize("normalisation", ["UN", "L2N", "CL2N"])
def test_deep_kernel_transfer_is_scikit_learn_s_regression(normalisation: Any) -> None:
    head = DeepKernelTransfer(normalisation=normalisation, noise=0.2, scale=1.5)
    case = case_of(head)
    logits, losses = head.training(case.parameters, case.features, case.task, case.labels)
    torch.testing.assert_close(logits_of(head, case), logits)
    v = math.exp(float(case.parameters["log_scale"]))
    for index in range(2):
        support, labels, queries, truth = case.of_task(index)
        rows = np.concatenate([support, queries])
        if normalisation == "CL2N":
            rows = rows - case.parameters[MEAN].numpy()
        rows = rows if normalisation == "UN" else np.array([unit(row) for row in rows])
        kernel = ConstantKernel(v, "fixed") * DotProduct(0, "fixed")
        evidence, n = 0.0, len(labels)
        for c in range(N_WAY):
            few = GaussianProcessRegressor(kernel, alpha=0.2, optimizer=None)
            few.fit(rows[:n], np.where(labels == c, 1.0, -1.0))
            expected = np.log(scipy.special.expit(1.5 * few.predict(rows[n:])))
            np.testing.assert_allclose(logits[index, :, c], expected, atol=1e-8)
            every = GaussianProcessRegressor(kernel, alpha=0.2, optimizer=None)
            every.fit(rows, np.where(np.concatenate([labels, truth]) == c, 1.0, -1.0))
            evidence += every.log_marginal_likelihood_value_
        assert float(losses["total"][index]) == pytest.approx(-evidence / N_WAY / len(rows))


def test_deep_kernel_transfer_is_gpytorch_s_regression() -> None:
    """Only where gpytorch is installed: the product does not need it."""
    gpytorch = pytest.importorskip("gpytorch")
    head = DeepKernelTransfer()
    case = case_of(head)

    class Process(gpytorch.models.ExactGP):  # type: ignore[misc, name-defined]
        def __init__(self, rows: Tensor, targets: Tensor, likelihood: Any) -> None:
            super().__init__(rows, targets, likelihood)
            self.kernel = gpytorch.kernels.ScaleKernel(gpytorch.kernels.LinearKernel())
            self.kernel.outputscale = case.parameters["log_scale"].exp()
            self.kernel.base_kernel.variance = 1.0

        def forward(self, rows: Tensor) -> Any:
            return gpytorch.distributions.MultivariateNormal(torch.zeros(len(rows)).to(rows), self.kernel(rows))

    logits, losses = head.training(case.parameters, case.features, case.task, case.labels)
    n, rows = case.task.n_support, F.normalize(case.features[0], dim=1)
    truth = torch.cat([case.task.support_labels[0], case.labels.queries[0]])
    total = 0.0
    for c in range(N_WAY):
        targets = 2.0 * (truth == c).double() - 1
        likelihood = gpytorch.likelihoods.GaussianLikelihood().double()
        likelihood.noise = 0.1
        few = Process(rows[:n], targets[:n], likelihood).double().eval()
        torch.testing.assert_close(logits[0, :, c], F.logsigmoid(few(rows[n:]).mean.detach()), rtol=1e-4, atol=1e-5)
        every = Process(rows, targets, likelihood).double().train()
        evidence = gpytorch.mlls.ExactMarginalLogLikelihood(likelihood, every)
        total += float(evidence(every(rows), targets).detach())
    assert float(losses["total"][0]) == pytest.approx(-total / N_WAY, rel=1e-5)


def mean_log_sigmoid(mean: float, variance: float) -> float:
    """By adaptive quadrature."""
    s = math.sqrt(variance)

    def integrand(x: float) -> float:
        return -math.log1p(math.exp(-(mean + s * x))) * math.exp(-x * x / 2) / math.sqrt(2 * math.pi)

    return float(scipy.integrate.quad(integrand, -12, 12, epsabs=1e-12)[0])


def comparisons(labels: Array) -> Array:
    """Rows f_y - f_c for all images and all other classes, with f ordered by class, then image."""
    rows = []
    for i, label in enumerate(labels):
        for c in range(N_WAY):
            if c != label:
                row = np.zeros(N_WAY * len(labels))
                row[label * len(labels) + i] += 1
                row[c * len(labels) + i] -= 1
                rows.append(row)
    return np.array(rows)


def ove_by_loops(kernel: Array, labels: Array, rounds: int) -> tuple[Array, Array, float]:
    """Mean and covariance of f at the labelled images, and the lower bound of the evidence, by plain inverses."""
    a, prior = comparisons(labels), np.kron(np.eye(N_WAY), kernel)
    c = np.full(len(a), 1e-3)
    for _ in range(rounds + 1):
        omega = np.array([math.tanh(x / 2) / (2 * x) for x in c])
        covariance = np.linalg.inv(np.linalg.inv(prior) + a.T @ np.diag(omega) @ a)
        mean = covariance @ (0.5 * a.sum(0))
        c = np.sqrt((a @ mean) ** 2 + np.diag(a @ covariance @ a.T))
    omega = np.array([math.tanh(x / 2) / (2 * x) for x in c])
    bound = sum(-math.log1p(math.exp(-x)) - x / 2 + w * x * x / 2 for x, w in zip(c, omega, strict=True))
    bound += sum(0.125 / w + 0.5 * math.log(2 * math.pi / w) for w in omega)
    pseudo = scipy.stats.multivariate_normal(np.zeros(len(a)), a @ prior @ a.T + np.diag(1 / omega))
    return mean, covariance, bound + float(pseudo.logpdf(0.5 / omega))


def test_one_vs_each_processes_are_what_they_say() -> None:
    head = OveGaussianProcess(rounds=5, initial_scale=3.0)
    case = case_of(head, size=40)  # more features than images: the kernel has an inverse
    logits, losses = head.training(case.parameters, case.features, case.task, case.labels)
    torch.testing.assert_close(logits_of(head, case), logits)
    for index in range(2):
        support, labels, queries, truth = case.of_task(index)
        n = len(labels)
        kernel = kernel_of(case, np.concatenate([support, queries]))
        mean, covariance, _ = ove_by_loops(kernel[:n, :n], labels, 5)
        inverse = np.linalg.inv(kernel[:n, :n])
        for i in range(len(queries)):
            across = np.kron(np.eye(N_WAY), kernel[n + i, :n] @ inverse)  # f at the query, given f at the images
            m = across @ mean
            rest = kernel[n + i, n + i] - kernel[n + i, :n] @ inverse @ kernel[:n, n + i]
            joint = rest * np.eye(N_WAY) + across @ covariance @ across.T
            expected = np.zeros(N_WAY)
            for c in range(N_WAY):
                for d in range(N_WAY):
                    if d != c:
                        spread = joint[c, c] + joint[d, d] - 2 * joint[c, d]
                        expected[c] += mean_log_sigmoid(m[c] - m[d], spread)
            np.testing.assert_allclose(logits[index, i], expected, atol=1e-4)
        _, _, evidence = ove_by_loops(kernel, np.concatenate([labels, truth]), 5)
        assert float(losses["total"][index]) == pytest.approx(-evidence / len(kernel), rel=1e-5)


def logistic_softmax_by_loops(kernel: Array, labels: Array, rounds: int) -> tuple[Array, list[Array], float]:
    """Means (class, image) and covariances of f, and the lower bound of the evidence term by term."""
    n = len(labels)
    prior = kernel
    y = np.array([[float(label == c) for label in labels] for c in range(N_WAY)])
    c, g, a = np.full((N_WAY, n), 1e-3), np.full((N_WAY, n), 0.5 / N_WAY), np.full(n, 1.5)
    for step in range(rounds + 1):
        omega = (y + g) * np.tanh(c / 2) / (2 * c)
        covariance = [np.linalg.inv(np.linalg.inv(prior) + np.diag(omega[k])) for k in range(N_WAY)]
        mean = np.array([covariance[k] @ ((y[k] - g[k]) / 2) for k in range(N_WAY)])
        if step < rounds:
            c = np.sqrt(mean**2 + np.array([np.diag(each) for each in covariance]))
            rate = np.exp(scipy.special.digamma(a) - math.log(N_WAY))
            g = rate * np.exp(-mean / 2) / (2 * np.cosh(c / 2))
            a = 1 + g.sum(0)
    total = 0.0
    log_l = scipy.special.digamma(a) - math.log(N_WAY)
    for k in range(N_WAY):
        second = mean[k] ** 2 + np.diag(covariance[k])
        both = y[k] + g[k]
        total += np.sum(-both * math.log(2) + (y[k] - g[k]) / 2 * mean[k] - omega[k] * second / 2)
        total += np.sum(omega[k] * c[k] ** 2 / 2 - both * np.log(np.cosh(c[k] / 2)))
        total += np.sum(g[k] * log_l - g[k] * np.log(g[k]) + g[k])
        q = torch.distributions.MultivariateNormal(torch.tensor(mean[k]), torch.tensor(covariance[k]))
        p = torch.distributions.MultivariateNormal(torch.zeros(n, dtype=torch.float64), torch.tensor(prior))
        total -= float(torch.distributions.kl_divergence(q, p))
    total += sum(scipy.stats.gamma(x, scale=1 / N_WAY).entropy() - x for x in a)
    return mean, covariance, float(total)


def test_logistic_softmax_processes_are_what_they_say() -> None:
    head = LogisticSoftmaxProcess(rounds=5, initial_scale=3.0)
    case = case_of(head, size=40)  # more features than images: the kernel has an inverse
    logits, losses = head.training(case.parameters, case.features, case.task, case.labels)
    torch.testing.assert_close(logits_of(head, case), logits)
    for index in range(2):
        support, labels, queries, truth = case.of_task(index)
        n = len(labels)
        kernel = kernel_of(case, np.concatenate([support, queries]))
        mean, covariance, _ = logistic_softmax_by_loops(kernel[:n, :n], labels, 5)
        inverse = np.linalg.inv(kernel[:n, :n])
        for i in range(len(queries)):
            across = kernel[n + i, :n] @ inverse
            rest = kernel[n + i, n + i] - across @ kernel[:n, n + i]
            for c in range(N_WAY):
                expected = mean_log_sigmoid(across @ mean[c], rest + across @ covariance[c] @ across)
                assert float(logits[index, i, c]) == pytest.approx(expected, abs=1e-4)
        _, _, evidence = logistic_softmax_by_loops(kernel, np.concatenate([labels, truth]), 5)
        assert float(losses["total"][index]) == pytest.approx(-evidence / len(kernel), rel=1e-4)


@pytest.mark.parametrize(("name", "gap"), [("ove, marginal", 1.0), ("logistic-softmax, marginal", 4.0)])
def test_the_evidence_is_bounded_from_below(name: str, gap: float) -> None:
    """Against the mean likelihood of many draws of the prior, for six images.

    The bound of the logistic-softmax likelihood is loose: with f = 0 and three classes it is -1.40 for an image instead
    of log 1/3 = -1.10.
    """
    generator = torch.Generator().manual_seed(0)
    rows = F.normalize(torch.randn(6, 4, generator=generator, dtype=torch.float64), dim=1)
    kernel = 2 * rows @ rows.T
    draws = torch.linalg.cholesky(kernel + 1e-9 * torch.eye(6)) @ torch.randn(
        100_000, N_WAY, 6, 1, generator=generator, dtype=torch.float64
    )
    f = draws[..., 0].mT  # (draw, image, class)
    for labels in ([0, 1, 2, 0, 1, 2], [0, 0, 0, 1, 1, 2]):
        y = torch.tensor([labels])
        own = f.gather(2, y[..., None].expand(len(f), -1, -1))
        head = HEADS[name]
        truth = F.one_hot(y, N_WAY).double()
        if isinstance(head, OveGaussianProcess):
            exact = F.logsigmoid(own - f).sum((1, 2)) + 6 * math.log(2)
        else:
            assert isinstance(head, LogisticSoftmaxProcess)
            exact = (F.logsigmoid(own)[..., 0] - F.logsigmoid(f).logsumexp(2)).sum(1)
        found = float(head.evidence(kernel[None], truth.mT))
        evidence = float(torch.logsumexp(exact, 0) - math.log(len(f)))
        assert evidence - gap < found < evidence + 0.02
