"""The heads on features that learn nothing beforehand, each against its docstring, written as loops in float64."""

import math
from typing import Any, Literal

import numpy as np
import pytest
import torch
from sklearn.linear_model import LogisticRegression
from sklearn.neighbors import KNeighborsClassifier

from made_up_features import N_WAY, Array, length, logits_of, probabilities, some_features
from trident.errors import TridentError
from trident.methods.base import HeadOnFeatures
from trident.methods.metric.nearest_mean import NearestMean
from trident.methods.metric.scikit_learn import LogisticRegressionHead, NearestNeighbours
from trident.methods.transductive.alpha_tim import AlphaTim
from trident.methods.transductive.paddle import Paddle
from trident.methods.transductive.soft_kmeans import SoftKMeans, expected_shares
from trident.tasks.task import Task

# Class sizes


def shares_by_integration(counts: Array, n_points: int = 4000) -> Array:
    """The mean share under a Dirichlet prior whose concentration a has the density a^0.5 in log a, 10^-1.5 to 10^3."""
    n, total = len(counts), float(sum(counts))
    shares, weight = np.zeros(n), 0.0
    logs = []
    grid = [math.exp(x) for x in np.linspace(math.log(10**-1.5), math.log(1e3), n_points)]
    for a in grid:  # the log of the chance of these counts if the concentration is a
        evidence = math.lgamma(n * a) - math.lgamma(total + n * a)
        evidence += sum(math.lgamma(count + a) - math.lgamma(a) for count in counts)
        logs.append(evidence + 0.5 * math.log(a))
    for a, log in zip(grid, logs, strict=True):
        p = math.exp(log - max(logs))
        weight += p
        shares += p * np.array([(count + a) / (total + n * a) for count in counts])
    return shares / weight


@pytest.mark.parametrize("counts", [[10, 10, 10], [30, 1, 0], [25.5, 3.2, 0.1, 11.0], [50, 0], [0.2, 0.1, 0.4]])
def test_expected_shares_are_a_mean_over_concentrations(counts: list[float]) -> None:
    found = expected_shares(torch.tensor([counts], dtype=torch.float64))[0].numpy()
    np.testing.assert_allclose(found, shares_by_integration(np.array(counts)), atol=2e-3)  # a grid of 40 points
    assert found.sum() == pytest.approx(1)


def test_equal_counts_give_equal_shares_and_lopsided_counts_are_taken_as_they_are() -> None:
    for count in (0.0, 1.0, 10.0, 1e4):
        np.testing.assert_allclose(expected_shares(torch.full((1, 5), count)), 0.2, atol=1e-5)
    nearly = expected_shares(torch.tensor([[11.0, 9.0, 10.0, 10.0, 10.0]]))[0]
    assert (nearly - 0.2).abs().max() < 0.008  # the counts themselves differ by 0.02
    lopsided = torch.tensor([[970.0, 20.0, 10.0, 0.0, 0.0]])
    np.testing.assert_allclose(expected_shares(lopsided), lopsided / 1000, atol=2e-3)


def test_shares_of_huge_piles_and_many_classes_are_finite_and_exact_enough() -> None:
    generator = torch.Generator().manual_seed(0)
    counts = torch.rand((2, 500), generator=generator) ** 3 * 2000
    found, exact = expected_shares(counts), expected_shares(counts.double())
    assert found.dtype == counts.dtype
    np.testing.assert_allclose(found, exact, rtol=1e-3)
    np.testing.assert_allclose(found.sum(1), 1, atol=1e-4)


# Soft k-means


def soft_kmeans_by_loops(method: SoftKMeans, features: Array, labels: Array, n_way: int) -> Array:
    """As its docstring says, picture by picture: probabilities (query, class)."""
    n_support = len(labels)
    f = [row / length(row) for row in features]
    supports = range(n_support)
    queries = range(n_support, len(f))
    p: dict[int, Array] | None = None  # by query, what moves the classes; none before the first round
    found: dict[int, Array] = {}
    for _ in range(method.rounds + 1):
        if method.centre == "task":
            m = sum(f) / len(f)
        else:
            moving = p if method.centre == "classes" else None
            of_classes = []
            for c in range(n_way):
                total, weight = np.zeros(len(f[0])), 0.0
                for i in supports:
                    if labels[i] == c:
                        total, weight = total + method.support_weight * f[i], weight + method.support_weight
                for i in queries if moving else []:
                    total, weight = total + moving[i][c] * f[i], weight + moving[i][c]  # type: ignore[index]
                of_classes.append(total / weight)
            m = sum(of_classes) / n_way
        g = [(row - m) / length(row - m) for row in f]
        w = []
        for c in range(n_way):
            total = sum((method.support_weight * g[i] for i in supports if labels[i] == c), np.zeros(len(m)))
            if p:
                total = total + sum(p[i][c] * g[i] for i in queries)
            w.append(total / length(total))
        shares = np.full(n_way, 1 / n_way)
        if p and method.class_sizes == "learned":
            counts = sum(found.values())
            shares = expected_shares(torch.from_numpy(np.array(counts))[None])[0].numpy()  # checked above
        found = {}
        for i in queries:
            raised = np.array([shares[c] * math.exp(method.scale * float(g[i] @ w[c])) for c in range(n_way)])
            found[i] = raised / raised.sum()
        p = {i: one.copy() for i, one in found.items()}
        for c in range(n_way):
            similar = sorted(queries, key=lambda i: -float(g[i] @ w[c]))
            at_most = len(queries) if method.typical is None else round(method.typical * len(queries) / n_way)
            for i in similar[max(1, at_most) :]:
                p[i][c] = 0
    return np.stack([found[i] for i in queries])


@pytest.mark.parametrize("class_sizes", ["learned", "equal"])
@pytest.mark.parametrize("centre", ["classes", "task", "support"])
@pytest.mark.parametrize(("rounds", "typical"), [(0, None), (1, None), (8, None), (3, 0.5), (3, 0.01), (3, 99)])
def test_soft_k_means_is_what_it_says(
    class_sizes: Literal["learned", "equal"],
    centre: Literal["classes", "task", "support"],
    rounds: int,
    typical: float | None,
) -> None:
    method = SoftKMeans(rounds, 7.0, 1.3, centre, class_sizes, typical)
    features, labels = some_features()
    found = probabilities(logits_of(method, features, labels))
    for task in range(len(features)):
        expected = soft_kmeans_by_loops(method, features[task], labels[task], N_WAY)
        np.testing.assert_allclose(found[task], expected, atol=1e-9)


def test_soft_k_means_with_the_default_settings_in_32_bits() -> None:
    features, labels = some_features(seed=5)
    found = probabilities(logits_of(SoftKMeans(), features.astype(np.float32), labels))
    expected = [soft_kmeans_by_loops(SoftKMeans(), *each, N_WAY) for each in zip(features, labels, strict=True)]
    np.testing.assert_allclose(found, expected, atol=1e-4)


# PADDLE and alpha-TIM


def paddle_by_loops(method: Paddle, features: Array, labels: Array, n_way: int) -> Array:
    over = features if method.range_over == "all" else features[len(labels) :]
    ranges = [max(column) - min(column) or 1.0 for column in over.T.tolist()]
    f = [row / ranges for row in features]  # differences are all that counts, so no minimum is taken off
    support, queries = f[: len(labels)], f[len(labels) :]
    w = [np.mean([row for row, label in zip(support, labels, strict=True) if label == c], 0) for c in range(n_way)]
    shares = [1 / n_way] * n_way
    for _ in range(method.rounds):
        u = []
        for row in queries:
            scores = [
                -0.5 * length(row - w[c]) ** 2 + method.penalty / len(queries) * math.log(shares[c])
                for c in range(n_way)
            ]
            u.append(probabilities(np.array(scores)))
        shares = [sum(one[c] for one in u) / len(u) + 1e-6 for c in range(n_way)]
        for c in range(n_way):
            mine = [row for row, label in zip(support, labels, strict=True) if label == c]
            total = sum(mine) + sum(one[c] * row for one, row in zip(u, queries, strict=True))
            w[c] = total / (len(mine) + sum(one[c] for one in u))
    return np.stack(u)


@pytest.mark.parametrize("range_over", ["queries", "all"])
@pytest.mark.parametrize("penalty", [0.0, 10.0, 75.0])
def test_paddle_is_what_it_says(penalty: float, range_over: Any) -> None:
    features, labels = some_features(seed=1)
    features[:, labels.shape[1] :, 0] = 0.5  # a feature in which only the support images differ
    method = Paddle(rounds=5, penalty=penalty, range_over=range_over)
    found = probabilities(logits_of(method, features, labels))
    for task in range(len(features)):
        np.testing.assert_allclose(found[task], paddle_by_loops(method, features[task], labels[task], N_WAY), atol=1e-9)


def alpha_tim_loss(method: AlphaTim, f: list[Array], labels: Array, w: Array) -> float:
    def p_of(row: Array) -> Array:
        return probabilities(np.array([-method.scale / 2 * length(row - one) ** 2 for one in w]))

    def entropy(p: Array) -> float:
        if method.alpha == 1:
            return -sum(float(x) * math.log(x) for x in p)
        return (1 - sum(math.pow(x, method.alpha) for x in p)) / (method.alpha - 1)

    n = len(labels)
    fit = -sum(math.log(float(p_of(row)[label])) for row, label in zip(f[:n], labels, strict=True)) / n
    of_queries = [p_of(row) for row in f[n:]]
    return fit + float(np.mean([entropy(p) for p in of_queries])) - entropy(np.mean(of_queries, 0))


def alpha_tim_by_loops(method: AlphaTim, features: Array, labels: Array, n_way: int) -> Array:
    """Gradients by finite differences, and Adam written out."""
    f = [row / length(row) for row in features]
    n = len(labels)
    w = np.stack([np.mean([f[i] for i in range(n) if labels[i] == c], 0) for c in range(n_way)])
    first, second = np.zeros_like(w), np.zeros_like(w)
    for step in range(1, method.steps + 1):
        gradient = np.zeros_like(w)
        for place in np.ndindex(*w.shape):
            change = np.zeros_like(w)
            change[place] = 1e-5
            up, down = (alpha_tim_loss(method, f, labels, w + sign * change) for sign in (1, -1))
            gradient[place] = (up - down) / 2e-5
        first, second = 0.9 * first + 0.1 * gradient, 0.999 * second + 0.001 * gradient**2
        w = w - method.rate * (first / (1 - 0.9**step)) / (np.sqrt(second / (1 - 0.999**step)) + 1e-8)
    scores = [[-method.scale / 2 * length(row - one) ** 2 for one in w] for row in f[n:]]
    return probabilities(np.array(scores))


@pytest.mark.parametrize("alpha", [1.0, 2.0, 5.0])
def test_alpha_tim_is_what_it_says(alpha: float) -> None:
    features, labels = some_features(1, n_queries=6, seed=3)
    method = AlphaTim(alpha, steps=3, rate=0.01)
    found = probabilities(logits_of(method, features, labels))[0]
    np.testing.assert_allclose(found, alpha_tim_by_loops(method, features[0], labels[0], N_WAY), atol=1e-5)


def test_alpha_tim_leaves_no_gradients_behind_and_works_where_there_are_none() -> None:
    features, labels = some_features()
    with torch.no_grad():
        without = logits_of(AlphaTim(steps=2), features, labels)
    np.testing.assert_array_equal(logits_of(AlphaTim(steps=2), features, labels), without)


# The simple ones


def test_nearest_mean_is_what_it_says() -> None:
    features, labels = some_features()
    found = logits_of(NearestMean(scale=3.0), features, labels)
    n = labels.shape[1]
    for task in range(len(features)):
        f = [row / length(row) for row in features[task]]
        for c in range(N_WAY):
            mean = np.mean([f[i] for i in range(n) if labels[task][i] == c], 0)
            for i, row in enumerate(f[n:]):
                assert found[task, i, c] == pytest.approx(3.0 * float(row @ mean) / length(mean), abs=1e-12)


def test_a_class_with_many_support_images_is_not_preferred() -> None:
    """A query in the middle between two classes, one of which has nine times as many support images."""
    features = np.array([[[1.0, 0.0]] + [[0.0, 1.0]] * 9 + [[1.0, 1.0]]])
    found = probabilities(logits_of(LogisticRegressionHead(), features, np.array([[0] + [1] * 9]), 2))
    np.testing.assert_allclose(found, 0.5, atol=1e-3)


def test_scikit_learn_s_classifiers_are_scikit_learn_s() -> None:
    features, labels = some_features()
    n = labels.shape[1]
    pairs: list[tuple[HeadOnFeatures, Any]] = [
        (LogisticRegressionHead(2.0), LogisticRegression(C=2.0, class_weight="balanced", max_iter=1000)),
        (NearestNeighbours(1), KNeighborsClassifier(1)),
        (NearestNeighbours(5), KNeighborsClassifier(5)),
    ]
    for head, theirs in pairs:
        found = probabilities(logits_of(head, features, labels))
        for task in range(len(features)):
            rows = features[task] / np.linalg.norm(features[task], axis=1, keepdims=True)
            expected = theirs.fit(rows[:n], labels[task]).predict_proba(rows[n:])
            np.testing.assert_allclose(found[task], expected, atol=1e-9)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: NearestMean(scale=0), "method.scale is 0"),
        (lambda: SoftKMeans(rounds=-1), "method.rounds is -1"),
        (lambda: SoftKMeans(support_weight=math.nan), "method.support_weight is nan"),
        (lambda: SoftKMeans(typical=0), "method.typical is 0"),
        (lambda: Paddle(rounds=0), "method.rounds is 0"),
        (lambda: Paddle(penalty=-1), "method.penalty is -1"),
        (lambda: AlphaTim(alpha=0), "method.alpha is 0"),
        (lambda: AlphaTim(steps=-1), "method.steps is -1"),
        (lambda: LogisticRegressionHead(0), "method.inverse_penalty is 0"),
        (lambda: NearestNeighbours(0), "method.neighbours is 0"),
    ],
)
def test_settings_that_make_no_sense(make: Any, words: str) -> None:
    with pytest.raises(TridentError, match=words):
        make()


def test_no_more_neighbours_vote_than_there_are() -> None:
    features = torch.eye(4)[None]  # (task, image, feature)
    found = NearestNeighbours(neighbours=10).head({}, features, Task(features, torch.tensor([[0, 1]]), 2))
    assert found.exp().numpy() == pytest.approx(0.5)  # both support images vote
