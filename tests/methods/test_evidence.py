"""Evidence: heads weighed by labelled images that are left out. Order, hard inputs, and its parts by other ways."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from trident.methods.evidence import heads
from trident.methods.evidence.method import _with_shares, judge

GENERATOR = torch.Generator().manual_seed(0)
MEANS = torch.randn(4, 24, generator=GENERATOR)


def images(labels: Tensor, noise: float = 1.5) -> Tensor:
    return F.normalize(MEANS[labels] + noise * torch.randn(len(labels), 24, generator=GENERATOR), dim=1)


LABELS = torch.tensor([0] * 6 + [1] * 3 + [2] * 2 + [3])  # a class with one label beside classes with several
SUPPORT, TRUTH = images(LABELS), torch.arange(40) % 4
PILE = images(TRUTH)


@pytest.mark.parametrize("together", [True, False])
def test_nothing_depends_on_order(together: bool) -> None:
    found = judge([SUPPORT], LABELS, 4, [PILE], together)
    assert (found.log_probabilities.argmax(1) == TRUTH).double().mean() > 0.7
    of_support, of_pile = torch.randperm(len(LABELS)), torch.randperm(len(PILE))
    other = judge([SUPPORT[of_support]], LABELS[of_support], 4, [PILE[of_pile]], together)
    torch.testing.assert_close(other.log_probabilities, found.log_probabilities[of_pile], rtol=0, atol=1e-4)
    assert sorted(of_support[other.left_out].tolist()) == sorted(found.left_out.tolist()) == list(range(11))


def test_better_heads_get_more_weight() -> None:
    """Features of a second kind that say nothing count next to nothing."""
    noise = [F.normalize(torch.randn(n, 24, generator=GENERATOR), dim=1) for n in (60, 40)]
    labels = torch.arange(60) % 4
    weights = judge([images(labels, 0.8), noise[0]], labels, 4, [PILE, noise[1]]).weights
    assert sum(weight for name, weight in weights.items() if name.endswith(" 2")) < 0.01


@pytest.mark.parametrize(
    ("support", "pile"),
    [
        (torch.ones(12, 24) / 24**0.5, PILE),  # the same picture in all classes
        (SUPPORT, torch.ones(40, 24) / 24**0.5),
        (torch.zeros(12, 24), torch.zeros(5, 24)),
        (SUPPORT, PILE[:1]),
        (SUPPORT.repeat_interleave(2, 0)[:12], PILE),  # identical pictures in two classes
    ],
)
@pytest.mark.parametrize("together", [True, False])
def test_hard_inputs_have_sound_answers(support: Tensor, pile: Tensor, together: bool) -> None:
    found = judge([support], LABELS, 4, [pile], together)
    probabilities = found.log_probabilities.exp()
    assert probabilities.isfinite().all() and np.allclose(probabilities.sum(1), 1)
    assert found.belief.isfinite().all() and found.importance.isfinite().all()


def test_with_one_label_each_soft_kmeans_counts_alone() -> None:
    weights = judge([SUPPORT[[0, 6, 9, 11]]], torch.arange(4), 4, [PILE]).weights
    assert weights["soft-kmeans-8"] == sum(weights.values()) == 1


def test_ridge_is_that_of_scikit_learn() -> None:
    """With fewer images than features and with more, and with a kernel; classes of equal size, so weights of 1."""
    kernel_ridge = pytest.importorskip("sklearn.kernel_ridge")
    for n in (12, 60):
        labels = torch.arange(n) % 4
        support = images(labels).double()
        targets = F.one_hot(labels, 4).double().numpy() - 0.25
        centred, queries = support - support.mean(0), PILE.double() - support.mean(0)
        expected = kernel_ridge.KernelRidge(alpha=0.3).fit(centred, targets).predict(queries)
        np.testing.assert_allclose(heads._ridge(support, labels, 4, PILE), expected, atol=1e-6)
        kernel = torch.exp(support @ support.T - 1).numpy()
        centre = np.eye(n) - 1 / n
        alpha = 0.1 * np.trace(centre @ kernel @ centre) / n
        fitted = kernel_ridge.KernelRidge(alpha=alpha, kernel="precomputed").fit(centre @ kernel @ centre, targets)
        between = torch.exp(PILE.double() @ support.T - 1).numpy()
        between = (between - kernel.mean(0)) @ centre
        np.testing.assert_allclose(
            heads._kernel_ridge(support, labels, 4, PILE, 1.0), fitted.predict(between), atol=1e-6
        )


def test_class_shares_are_found_where_probabilities_are_right() -> None:
    """Gaussian classes on a line, whose exact probabilities are known."""
    random = np.random.default_rng(0)
    for shares in ([0.9, 0.1], [0.5, 0.5]):
        x = random.normal(np.repeat([0.0, 2.0], [int(1000 * share) for share in shares]))
        exact = torch.from_numpy(np.stack([-(x**2), -((x - 2) ** 2)], 1) / 2).log_softmax(1)
        found = _with_shares(exact, exact, 1.0)[1]
        np.testing.assert_allclose(found, shares, atol=0.04)
        torch.testing.assert_close(_with_shares(exact, exact, 0.0)[0], exact)
