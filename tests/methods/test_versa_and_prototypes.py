"""VERSA and amortised Bayesian prototypes against their equations, written as loops."""

import math

import numpy as np
import pytest
import scipy.integrate
import scipy.special
import scipy.stats
import torch

from bayesian_heads import N_WAY, Array, Case, assert_same_probabilities, case_of, logits_of
from trident.methods.bayesian.abpml import BayesianPrototypes
from trident.methods.bayesian.versa import Versa
from trident.nn.gaussian import Gaussian


def elu(x: Array) -> Array:
    return np.array([value if value > 0 else math.exp(value) - 1 for value in x])


def noise_of_class(case: Case, index: int, c: int) -> list[Array]:
    """One array for each draw: the sum over the class's support images, divided by the root of their number."""
    labels = case.task.support_labels[index]
    mine = [i for i, label in enumerate(labels) if label == c]
    return [np.sum([noise[index, i] for i in mine], 0) / math.sqrt(len(mine)) for noise in case.task.noise.values()]


@pytest.mark.parametrize("draws", [1, 2, 0])
def test_versa_is_what_it_says(draws: int) -> None:
    head = Versa(width=4, samples=3)
    case = case_of(head, draws=draws)
    p = {key: value.numpy() for key, value in case.parameters.items()}

    def layer(name: str, x: Array) -> Array:
        return np.asarray(p[f"{name}.weight"] @ x + p[f"{name}.bias"])

    found = logits_of(head, case)
    for index in range(2):
        support, labels, queries, _ = case.of_task(index)
        classifiers: list[list[Array]] = []  # by class: one vector for each sample
        for c in range(N_WAY):
            codes = [layer("features", row) for row, label in zip(support, labels, strict=True) if label == c]
            hidden = elu(layer("network.1", elu(layer("network.0", np.mean(codes, 0)))))
            mean = layer("classifier.loc", hidden)
            deviation = np.exp(0.5 * 8 * np.tanh(layer("classifier.log_var", hidden) / 8))
            noise = [part for draw in noise_of_class(case, index, c) for part in draw.reshape(3, 5)]
            classifiers.append([mean + deviation * each for each in noise] or [mean])
        expected = np.zeros((len(queries), N_WAY))
        for i, query in enumerate(queries):
            code = layer("features", query)
            p_of_samples = []
            for sample in zip(*classifiers, strict=True):
                scores = np.array([float(w[:4] @ code + w[4]) for w in sample])
                p_of_samples.append(np.exp(scores) / np.exp(scores).sum())
            expected[i] = np.log(np.mean(p_of_samples, 0))
        assert_same_probabilities(found[index], expected)
        np.testing.assert_allclose(found[index].exp().sum(1), 1)


@pytest.mark.parametrize("draws", [1, 2, 0])
def test_bayesian_prototypes_are_what_they_say(draws: int) -> None:
    head = BayesianPrototypes(initial_log_var=-1.0, kl_weight=0.3)
    case = case_of(head, draws=draws)
    shift, scale = float(case.parameters["log_var_shift"]), float(case.parameters["scale"])
    logits, losses = head.training(case.parameters, case.features[:, :, None], case.task, case.labels)

    def gaussian(rows: list[Array]) -> tuple[Array, Array]:
        mean = np.mean([row[:4] for row in rows], 0)
        return mean, np.mean([8 * np.tanh((row[4:] + shift) / 8) for row in rows], 0)

    for index in range(2):
        support, labels, queries, truth = case.of_task(index)
        samples: list[list[Array]] = []
        divergence = 0.0
        for c in range(N_WAY):
            mine = [row for row, label in zip(support, labels, strict=True) if label == c]
            others = [row for row, label in zip(queries, truth, strict=True) if label == c]
            (m, v), (prior_m, prior_v) = gaussian(mine), gaussian(mine + others)
            samples.append([m + np.exp(v / 2) * noise for noise in noise_of_class(case, index, c)] or [m])
            apart = (np.exp(v) + (m - prior_m) ** 2) / np.exp(prior_v)
            divergence += sum(0.5 * float(x) for x in apart - 1 + prior_v - v)
        expected = np.zeros((len(queries), N_WAY))
        for i, query in enumerate(queries):
            each = [[-scale / 4 * np.sum((query[:4] - z) ** 2) for z in one] for one in zip(*samples, strict=True)]
            expected[i] = np.log(np.mean([scipy.special.softmax(scores) for scores in each], 0))
        assert_same_probabilities(logits[index], expected)
        fit = -np.mean([expected[i, c] for i, c in enumerate(truth)])
        assert float(losses["classification"][index]) == pytest.approx(fit)
        assert float(losses["total"][index]) == pytest.approx(fit + 0.3 * divergence / len(queries))


def test_the_divergence_of_two_gaussians_is_torch_s() -> None:
    generator = torch.Generator().manual_seed(0)
    one, other = (Gaussian(*torch.randn(2, 2, 3, 4, generator=generator).double()) for _ in range(2))
    p, q = (torch.distributions.Normal(each.loc, (each.log_var / 2).exp()) for each in (one, other))
    torch.testing.assert_close(one.kl_to(other), torch.distributions.kl_divergence(p, q).sum(-1))
