"""TIM, alpha-TIM and entropy minimisation: one loss, whose gradient is written by hand."""

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from heads_by_loops import CLASSES, own_means, softmax, unit
from made_up_features import N_WAY, Array, length, logits_of, probabilities, some_features
from trident.methods.base import HeadOnFeatures
from trident.methods.transductive.alpha_tim import AlphaTim
from trident.methods.transductive.entropy_min import EntropyMin
from trident.methods.transductive.information import InformationLoss
from trident.methods.transductive.tim import Tim


def loss_of(loss: InformationLoss, features: Tensor, labels: Tensor, weights: Tensor) -> Tensor:
    """Of one task, as its docstring says."""
    n = len(labels)
    logits = -loss.scale / 2 * torch.cdist(features, weights) ** 2
    p = torch.softmax(logits[n:], 1)

    def entropy(p: Tensor) -> Tensor:
        if loss.alpha == 1:
            return -(p * p.log()).sum(-1)
        return (1 - (p**loss.alpha).sum(-1)) / (loss.alpha - 1)

    fit = F.cross_entropy(logits[:n], labels)
    return (
        loss.cross_entropy * fit
        + loss.conditional_entropy * entropy(p).mean()
        - loss.marginal_entropy * entropy(p.mean(0))
    )


@pytest.mark.parametrize("alpha", [0.5, 1.0, 2.0, 7.0])
def test_the_gradient_of_the_information_loss_is_autograds(alpha: float) -> None:
    loss = InformationLoss(0.3, 0.7, 1.3, 4.0, alpha)
    features, labels = (torch.from_numpy(part) for part in some_features(seed=3))
    weights = torch.randn(2, N_WAY, features.shape[2], generator=torch.Generator().manual_seed(1)).double()
    found = loss.gradient(features, F.one_hot(labels, N_WAY).double(), weights)
    for task in range(2):
        leaf = weights[task].clone().requires_grad_()
        (expected,) = torch.autograd.grad(loss_of(loss, features[task], labels[task], leaf), leaf)
        torch.testing.assert_close(found[task], expected, rtol=1e-9, atol=1e-12)


INFORMATION: list[tuple[HeadOnFeatures, InformationLoss]] = [
    (Tim(steps=20, rate=0.01), InformationLoss(0.1, 0.1, 1, 15)),
    (Tim(steps=20, rate=0.01, fit=0.5, sure=0.7, spread=0.2, scale=6.0), InformationLoss(0.5, 0.7, 0.2, 6)),
    (AlphaTim(3.0, steps=20, rate=0.01), InformationLoss(1, 1, 1, 15, 3)),
    (EntropyMin(steps=20, rate=0.01), InformationLoss(1, 1, 0, 15)),
]


@pytest.mark.parametrize(("head", "loss"), INFORMATION, ids=["TIM", "TIM with settings", "alpha-TIM", "entropy"])
def test_weights_are_fitted_by_adam(head: HeadOnFeatures, loss: InformationLoss) -> None:
    features, labels = some_features(seed=3)
    found = probabilities(logits_of(head, features, labels))
    for task in range(2):
        f, truth = F.normalize(torch.from_numpy(features[task]), dim=1), torch.from_numpy(labels[task])
        weights = torch.stack([f[: len(truth)][truth == c].mean(0) for c in CLASSES]).requires_grad_()
        optimizer = torch.optim.Adam([weights], 0.01)
        for _ in range(20):
            optimizer.zero_grad()
            loss_of(loss, f, truth, weights).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        expected = torch.softmax(-loss.scale / 2 * torch.cdist(f[len(truth) :], weights) ** 2, 1)
        np.testing.assert_allclose(found[task], expected.detach(), atol=1e-6)


def tim_adm_by_loops(method: Tim, features: Array, labels: Array) -> Array:
    f = [unit(row) for row in features]
    n, queries = len(labels), range(len(labels), len(f))
    w = own_means(f, labels)

    def p_of(i: int) -> Array:
        return softmax([-method.scale / 2 * length(f[i] - w[c]) ** 2 for c in CLASSES])

    a, b = method.fit / (1 + method.sure), n / len(queries)
    for _ in range(method.steps or 0):
        p = [p_of(i) for i in range(len(f))]
        powers = {i: p[i] ** (1 + method.sure) for i in queries}
        total = sum(powers.values())
        q = {i: powers[i] / total ** (method.spread / (1 + method.spread)) for i in queries}
        q = {i: row / row.sum() for i, row in q.items()}
        new = []
        for c in CLASSES:
            above, below = np.zeros_like(w[c]), 0.0
            for i in range(n):
                y = float(labels[i] == c)
                above, below = above + a * (y * f[i] + p[i][c] * (w[c] - f[i])), below + a * y
            for i in queries:
                above = above + b * (q[i][c] * f[i] + p[i][c] * (w[c] - f[i]))
                below += b * q[i][c]
            new.append(above / below)
        w = new
    return np.stack([p_of(i) for i in queries])


@pytest.mark.parametrize("steps", [0, 1, 6])
def test_tim_adm_is_what_it_says(steps: int) -> None:
    method = Tim("alternating", fit=0.4, sure=0.3, spread=0.8, steps=steps)
    features, labels = some_features()
    found = probabilities(logits_of(method, features, labels))
    for task in range(2):
        np.testing.assert_allclose(found[task], tim_adm_by_loops(method, features[task], labels[task]), atol=1e-9)


def test_tim_takes_as_many_steps_as_published() -> None:
    features, labels = some_features(1)
    for solver, steps in (("gradient", 1000), ("alternating", 150)):
        method: Any = Tim(solver)  # type: ignore[arg-type]
        same = logits_of(Tim(solver, steps=steps), features, labels)  # type: ignore[arg-type]
        np.testing.assert_array_equal(logits_of(method, features, labels), same)


def test_tim_finds_the_minimum_of_its_loss() -> None:
    """After many steps of gradient descent the gradient is gone."""
    features, labels = (torch.from_numpy(part) for part in some_features(seed=4))
    features = F.normalize(features, dim=2)
    loss, one_hot = InformationLoss(0.1, 0.1, 1.0, 15.0), F.one_hot(labels, N_WAY).double()
    before = loss.gradient(features, one_hot, loss.fitted(features, labels, N_WAY, 0, 0.01))
    after = loss.gradient(features, one_hot, loss.fitted(features, labels, N_WAY, 400, 0.01))
    assert float(after.norm()) < 0.02 * float(before.norm())
