"""Heads on features: those that learn nothing beforehand against their docstrings, written as loops in float64.

What holds for all heads is checked here for the others too, with random parameters.
"""The heads on features that learn nothing beforehand, each against its docstring, written as loops in float64.

And what holds for all heads on features, with random weights for those that are trained.
"""

import math
from typing import Any, Literal

import numpy as np
import pytest
import torch
from sklearn.linear_model import LogisticRegression
from sklearn.neighbors import KNeighborsClassifier

from made_up_features import N_WAY, Array, length, logits_of, probabilities, some_features
from classic_heads import CLASSICS, CLASSICS_GOLDEN
from trident.backbones.frozen import FrozenBackbone
from trident.data.store import ImageStore, class_table
from trident.errors import TridentError
from trident.learning.checkpoint import Checkpoint, load_checkpoint, untrained
from trident.measuring.evaluate import evaluate
from trident.methods.abpml import BayesianPrototypes
from trident.methods.alpha_tim import AlphaTim
from trident.methods.base import HeadOnFeatures
from trident.methods.bd_cspn import BdCspn
from trident.methods.bms import Bms
from trident.methods.entropy_min import EntropyMin
from trident.methods.k_reciprocal import KReciprocal
from trident.methods.laplacian_shot import LaplacianShot
from trident.methods.dkt import DeepKernelTransfer
from trident.methods.logistic_softmax_gp import LogisticSoftmaxProcess
from trident.methods.metaqda import MetaQda
from trident.methods.nearest_mean import NearestMean
from trident.methods.ove_polya_gamma import OveGaussianProcess
from trident.methods.paddle import Paddle
from trident.methods.pt_map import PtMap
from trident.methods.scikit_learn import LogisticRegressionHead, NearestNeighbours
from trident.methods.sib import SyntheticInformationBottleneck
from trident.methods.soft_kmeans import SoftKMeans
from trident.methods.tim import Tim
from trident.methods.transductive_cnaps import TransductiveCnaps
from trident.methods.ssr import SelfSupervisedReranking
from trident.methods.versa import Versa
from trident.nn.class_sizes import expected_shares
from trident.nn.parameters import Parameters
from trident.recipes.loading import load_recipe
from trident.recipes.recipe import Recipe
from trident.settings import EpisodeSpec, Protocol

Array = np.ndarray
N_WAY, N_FEATURES, N_QUERIES = 4, 10, 16
SUPPORT_LABELS = [0, 1, 1, 2, 3, 3, 3, 0, 1]  # unequal shots, in no order
HEADS: dict[str, HeadOnFeatures] = {
    "nearest mean": NearestMean(),
    "soft k-means": SoftKMeans(),
    "PADDLE": Paddle(rounds=30, penalty=5.0),  # for 10 and 40 features; the default is for hundreds
    "alpha-TIM": AlphaTim(steps=40, rate=0.01),
    "logistic regression": LogisticRegressionHead(),
    "nearest neighbours": NearestNeighbours(neighbours=3),
    "TIM-GD": Tim(steps=40, rate=0.01),
    "TIM-ADM": Tim("alternating", steps=40),
    "LaplacianShot": LaplacianShot(),
    "PT-MAP": PtMap(),
    "BMS": Bms(),
    "BMS*": Bms("equal"),
    "entropy minimisation": EntropyMin(steps=10, rate=0.01),
    "k-reciprocal": KReciprocal(),
    "BD-CSPN": BdCspn(),
    "Transductive CNAPS": TransductiveCnaps(),
    **CLASSICS,
    "VERSA": Versa(width=6, samples=2),
    "DKT": DeepKernelTransfer(),
    "OVE": OveGaussianProcess(),
    "logistic-softmax": LogisticSoftmaxProcess(),
    "SIB": SyntheticInformationBottleneck(),
    "MetaQDA": MetaQda(dimensions=6),
    "MetaQDA, bayesian": MetaQda(dimensions=6, rule="bayesian"),
    "ABPML": BayesianPrototypes(),
    "SSR": SelfSupervisedReranking(width=6),
}
CLASS_SLOTS = {"SIB"}  # weights that belong to the place of a class
heads = pytest.mark.parametrize("name", list(HEADS))


def some_features(n_tasks: int = 2, n_queries: int = N_QUERIES, seed: int = 0) -> tuple[Array, Array]:
    """Noisy clusters (task, image, feature), the support set first, and the labels of the support sets."""
    generator = np.random.default_rng(seed)
    labels = np.stack([generator.permutation(SUPPORT_LABELS) for _ in range(n_tasks)])
    of_queries = generator.integers(0, N_WAY - 1, (n_tasks, n_queries))  # the last class is absent
    centres = generator.normal(1, 1, (n_tasks, N_WAY, N_FEATURES))
    of_all = np.concatenate([labels, of_queries], 1)
    features = np.take_along_axis(centres, of_all[..., None], 1) + generator.normal(0, 0.8, (*of_all.shape, N_FEATURES))
    return features, labels


def logits_of(head: HeadOnFeatures, features: Array, labels: Array, n_way: int = N_WAY) -> Array:
    images = torch.from_numpy(features)
    task = Task(images, torch.from_numpy(labels), n_way)
    return head.head(some_parameters(head, images), images[:, :, None] if head.takes_cells else images, task).numpy()


def some_parameters(head: HeadOnFeatures, like: torch.Tensor) -> Parameters:
    """Random parameters and statistics for features of this size; none for heads that have none."""
    generator = torch.Generator().manual_seed(5)
    statistics = head.initial_statistics(like.shape[2])
    seen = {key: torch.randn(value.shape, generator=generator) for key, value in statistics.items()}
    return {key: value.to(like) for key, value in (head.initial(like.shape[2], generator) | seen).items()}
    parameters = {key: value.to(images) for key, value in weights_of(head, task).items()}
    return head.head(parameters, images[:, :, None] if head.takes_cells else images, task).numpy()


def weights_of(head: HeadOnFeatures, task: Task) -> Parameters:
    """Random ones, if the head is trained: for tasks with as many queries as `some_features` has."""
    if head.about.trained_on == "nothing":
        return {}
    model = head.model(FrozenBackbone(size=task.images.shape[2]), EpisodeSpec(task.n_way, 1, N_QUERIES // task.n_way))
    return model.initial(torch.Generator().manual_seed(0))


def probabilities(logits: Array) -> Array:
    raised = np.exp(logits - logits.max(-1, keepdims=True))
    return np.asarray(raised / raised.sum(-1, keepdims=True))


def length(vector: Array) -> float:
    return math.sqrt(sum(float(number) ** 2 for number in vector))


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
    p: dict[int, Array] | None = None  # by query; none before the first round
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
            counts = sum(p.values())
            shares = expected_shares(torch.from_numpy(np.array(counts))[None])[0].numpy()  # checked above
        p = {}
        for i in queries:
            raised = np.array([shares[c] * math.exp(method.scale * float(g[i] @ w[c])) for c in range(n_way)])
            p[i] = raised / raised.sum()
    assert p is not None
    return np.stack([p[i] for i in queries])


@pytest.mark.parametrize("class_sizes", ["learned", "equal"])
@pytest.mark.parametrize("centre", ["classes", "task", "support"])
@pytest.mark.parametrize("rounds", [0, 1, 8])
def test_soft_k_means_is_what_it_says(
    class_sizes: Literal["learned", "equal"], centre: Literal["classes", "task", "support"], rounds: int
) -> None:
    method = SoftKMeans(rounds, 7.0, 1.3, centre, class_sizes)
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
    low, high = features.min(0), features.max(0)
    f = [(row - low) / (high - low) for row in features]
    support, queries = f[: len(labels)], f[len(labels) :]
    w = [np.mean([row for row, label in zip(support, labels, strict=True) if label == c], 0) for c in range(n_way)]
    shares = [1 / n_way] * n_way
    for _ in range(method.rounds):
        u = []
        for row in queries:
            scores = [
                -0.5 * length(row - w[c]) ** 2 + method.penalty / len(queries) * (math.log(shares[c]) + 1)
                for c in range(n_way)
            ]
            u.append(probabilities(np.array(scores)))
        shares = [max(sum(one[c] for one in u) / len(u), 1e-12) for c in range(n_way)]
        for c in range(n_way):
            mine = [row for row, label in zip(support, labels, strict=True) if label == c]
            total = sum(mine) + sum(one[c] * row for one, row in zip(u, queries, strict=True))
            w[c] = total / (len(mine) + sum(one[c] for one in u))
    return np.stack(u)


@pytest.mark.parametrize("penalty", [0.0, 10.0, 75.0])
def test_paddle_is_what_it_says(penalty: float) -> None:
    features, labels = some_features(seed=1)
    method = Paddle(rounds=5, penalty=penalty)
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


# What holds for all of them


@heads
def test_the_order_of_the_queries_does_not_matter(name: str) -> None:
    features, labels = some_features()
    n = labels.shape[1]
    order = np.random.default_rng(1).permutation(features.shape[1] - n)
    one = probabilities(logits_of(HEADS[name], features, labels))
    other = probabilities(
        logits_of(HEADS[name], np.concatenate([features[:, :n], features[:, n:][:, order]], 1), labels)
    )
    np.testing.assert_allclose(other, one[:, order], atol=1e-6)


@heads
def test_the_order_of_the_classes_and_of_the_support_images_does_not_matter(name: str) -> None:
    features, labels = some_features()
    n = labels.shape[1]
    generator = np.random.default_rng(2)
    renamed, order = generator.permutation(N_WAY), generator.permutation(n)
    one = probabilities(logits_of(HEADS[name], features, labels))
    other = probabilities(
        logits_of(
            HEADS[name], np.concatenate([features[:, :n][:, order], features[:, n:]], 1), renamed[labels][:, order]
        )
    )
    # scikit-learn stops at a tolerance of its own, and where votes are equal the order decides.
    tolerance = 1e-3 if name == "logistic regression" else 1e-6
    assert np.allclose(other[:, :, renamed], one, rtol=0, atol=tolerance) != (name in CLASS_SLOTS)


@heads
def test_tasks_do_not_see_each_other(name: str) -> None:
    features, labels = some_features(3)
    one = probabilities(logits_of(HEADS[name], features, labels))
    alone = probabilities(logits_of(HEADS[name], features[1:2], labels[1:2]))
    np.testing.assert_allclose(one[1:2], alone, atol=1e-6)


@heads
def test_queries_are_seen_alone_unless_the_method_says_otherwise(name: str) -> None:
    features, labels = some_features(1)
    n, head = labels.shape[1], HEADS[name]
    together = probabilities(logits_of(head, features, labels))
    assert not head.for_few_queries().about.transductive
    if name == "SSR":
        with pytest.raises(TridentError, match="as many queries at once as in training"):
            logits_of(head, features[:, : n + 1], labels)
        return
    alone = probabilities(logits_of(head, features[:, : n + 1], labels))
    assert np.allclose(together[:, :1], alone, atol=1e-6) != head.about.transductive
    assert not head.for_few_queries().about.transductive
    assert (head.about.trained_on == "nothing") == (name not in CLASSICS)


@heads
def test_extreme_features_give_finite_logits(name: str) -> None:
    features, labels = some_features(1)
    features[0, 0] = 0  # a labelled picture without any feature
    features[0, -1] = 0
    features[0, -2] = 1e15 * features[0, -3]
    features[0, -4] = features[0, 3]  # the same as a labelled one
    assert np.isfinite(logits_of(HEADS[name], features, labels)).all()
    assert np.isfinite(logits_of(HEADS[name], features.astype(np.float32), labels)).all()
    same = np.broadcast_to(features[:, 1:2], features.shape).copy()  # all pictures are the same
    assert np.isfinite(logits_of(HEADS[name], same.astype(np.float32), labels)).all()


# On a store of features


def made_up_store(n_features: int = 40) -> ImageStore:
    """Twelve classes of 30 images each, at unequal distances from each other."""
    generator = np.random.default_rng(12)
    centres = generator.normal(0.6, 1, (12, n_features))
    features = np.repeat(centres, 30, 0) + generator.normal(0, 1.6, (360, n_features))
    table = class_table([(f"class {c}", "test", 30) for c in range(12)])
    return ImageStore("made up", features.astype(np.float32), table, "0" * 64, "efficientnet-lite0")


Balance = Literal["dirichlet", "balanced", "one_absent"]
BALANCES: tuple[Balance, ...] = ("dirichlet", "balanced", "one_absent")


def accuracy_of(head: HeadOnFeatures, balance: Balance) -> float:
    store = made_up_store()
    protocol = Protocol(balance=balance, dirichlet_alpha=1.0)
    backbone = FrozenBackbone(size=store.images.shape[1])
    recipe = Recipe("made up", "", "", EpisodeSpec(5, 2, 10), protocol=protocol, backbone=backbone, method=head)
    with_random_weights = Checkpoint(recipe, recipe.initial(0), recipe.model.initial_running(), 0)
    checkpoint = untrained(recipe) if head.about.trained_on == "nothing" else with_random_weights
    return evaluate(checkpoint, store, split="test", tasks=40, seed=0).accuracy
    if head.about.trained_on == "nothing":
        return evaluate(untrained(recipe), store, split="test", tasks=40, seed=0).accuracy
    start = Checkpoint(recipe, recipe.initial(0), recipe.model.initial_running(), 0)
    return evaluate(start, store, split="test", tasks=40, seed=0).accuracy


GOLDEN = {
    "nearest mean": (82.65, 83.35),
    "soft k-means": (96.0, 92.95),
    "PADDLE": (82.8, 76.1),
    "alpha-TIM": (87.9, 84.85),
    "logistic regression": (82.85, 82.7),
    "nearest neighbours": (72.2, 73.0),
    "TIM-GD": (92.35, 62.15),
    "TIM-ADM": (91.4, 64.8),
    "LaplacianShot": (92.7, 90.35),
    "PT-MAP": (95.25, 63.1),
    "BMS": (95.1, 66.2),
    "BMS*": (95.1, 61.2),
    "entropy minimisation": (85.1, 87.75),
    "k-reciprocal": (92.65, 92.05),
    "BD-CSPN": (91.5, 87.95),
    "Transductive CNAPS": (93.25, 79.0),
    **CLASSICS_GOLDEN,
    # With random weights:
    "VERSA": (29.6, 32.95),
    "DKT": (81.3, 81.05),
    "OVE": (82.75, 83.15),
    "logistic-softmax": (82.8, 83.6),
    "MetaQDA": (39.75, 39.6),
    "MetaQDA, bayesian": (39.6, 39.85),
    "ABPML": (66.55, 64.25),
    "SIB": (78.8, 77.45),
    "SSR": (80.0, 79.55),
}


@pytest.mark.parametrize("name", list(GOLDEN))
def test_golden_accuracies(name: str) -> None:
    """Balanced, and with unknown class sizes. They change only if a head, or the drawing of tasks, does."""
    found = (accuracy_of(HEADS[name], "balanced"), accuracy_of(HEADS[name], "dirichlet"))
    assert found == pytest.approx(GOLDEN[name], abs=0.3)


def test_learned_class_sizes_are_better_where_sizes_are_unequal_and_no_worse_where_they_are_not() -> None:
    gains = [
        accuracy_of(SoftKMeans(), balance) - accuracy_of(SoftKMeans(class_sizes="equal"), balance)
        for balance in BALANCES
    ]
    assert gains[0] > 1
    assert min(gains[1:]) > -0.5


def test_a_recipe_that_needs_no_training_is_a_checkpoint() -> None:
    checkpoint = load_checkpoint("features-soft-kmeans")
    assert checkpoint.parameters == {}
    assert checkpoint.described() == "recipe features-soft-kmeans, not trained"
    with pytest.raises(TridentError, match="glyphs must be trained first: trident train glyphs"):
        untrained(load_recipe("glyphs"))
