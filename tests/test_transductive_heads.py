"""Transductive heads on features, each against its docstring, written as loops or with another library in float64."""

import math
from typing import Any, Literal

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from scipy.special import logsumexp
from sklearn.neighbors import NearestNeighbors
from torch import Tensor

from conftest import doubles
from made_up_features import N_WAY, Array, length, logits_of, probabilities, some_features
from trident.errors import TridentError
from trident.methods.alpha_tim import AlphaTim
from trident.methods.base import HeadOnFeatures
from trident.methods.bd_cspn import BdCspn
from trident.methods.bms import Bms
from trident.methods.entropy_min import EntropyMin
from trident.methods.epnet import EpNet
from trident.methods.k_reciprocal import KReciprocal
from trident.methods.laplacian_shot import LaplacianShot
from trident.methods.normalised import MEAN
from trident.methods.pt_map import PtMap
from trident.methods.tim import Tim
from trident.methods.tpn import Tpn
from trident.methods.transductive_cnaps import TransductiveCnaps
from trident.nn.information import InformationLoss
from trident.nn.parameters import Parameters
from trident.nn.propagation import between, propagator
from trident.nn.sinkhorn import sinkhorn
from trident.tasks.task import Labels, Task

CLASSES = range(N_WAY)


def unit(vector: Array) -> Array:
    return vector / length(vector)


def mean_of(rows: list[Array], weights: list[float]) -> Array:
    total: Array = sum((w * row for w, row in zip(weights, rows, strict=True)), np.zeros_like(rows[0]))
    return total / sum(weights)


def own_means(f: list[Array], labels: Array) -> list[Array]:
    return [np.mean([f[i] for i in range(len(labels)) if labels[i] == c], 0) for c in CLASSES]


def softmax(scores: list[float]) -> Array:
    return probabilities(np.array(scores))


# TIM, alpha-TIM and entropy minimisation: one loss, whose gradient is written by hand


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
    return loss.fit * fit + loss.sure * entropy(p).mean() - loss.spread * entropy(p.mean(0))


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


# Optimal transport: PT-MAP and BMS


def sinkhorn_by_loops(p: Array, sizes: list[float], at_least: bool, iterations: int) -> Array:
    p = p.copy()
    for _ in range(iterations):
        for i in range(len(p)):
            p[i] /= p[i].sum()
        for c in CLASSES:
            if not at_least or p[:, c].sum() < sizes[c]:
                p[:, c] *= sizes[c] / p[:, c].sum()
    return p


@pytest.mark.parametrize("at_least", [False, True])
def test_sinkhorns_iteration(at_least: bool) -> None:
    logits = np.random.default_rng(0).normal(0, 3, (3, 20, N_WAY))
    sizes = [8.0, 6.0, 4.0, 2.0] if not at_least else [3.0, 3.0, 6.0, 1.0]
    found = sinkhorn(torch.from_numpy(logits), torch.tensor([sizes] * 3).double(), 200, at_least).exp().numpy()
    for task in range(3):
        expected = sinkhorn_by_loops(np.exp(logits[task]), sizes, at_least, 200)
        np.testing.assert_allclose(found[task], expected, rtol=1e-9)
    sums = found.sum(1)
    assert (sums >= np.array(sizes) - 1e-6).all()
    np.testing.assert_allclose(found.sum(2), 1, atol=1e-4)
    if not at_least:
        np.testing.assert_allclose(sums, [sizes] * 3)


def test_sinkhorn_survives_a_class_that_no_query_wants() -> None:
    logits = torch.zeros(1, 12, 3)
    logits[..., 2] = -1e4
    found = sinkhorn(logits, torch.full((1, 3), 4.0), 100).exp()
    np.testing.assert_allclose(found, 1 / 3, atol=1e-3)


def powered(features: Array) -> list[Array]:
    return [unit(np.array([math.copysign(math.sqrt(abs(x) + 1e-6), x) for x in row])) for row in features]


def pt_map_by_loops(method: PtMap, features: Array, labels: Array) -> Array:
    f, n = powered(features), len(labels)
    g = [unit(row - np.mean(f[:n], 0)) for row in f[:n]] + [unit(row - np.mean(f[n:], 0)) for row in f[n:]]
    w, n_queries = own_means(g, labels), len(f) - n

    def transported() -> Array:
        raised = np.array([[math.exp(-method.scale * length(row - w[c]) ** 2) for c in CLASSES] for row in g[n:]])
        return sinkhorn_by_loops(raised, [n_queries / N_WAY] * N_WAY, False, method.iterations)

    for _ in range(method.rounds):
        p = transported()
        for c in CLASSES:
            weights = [float(label == c) for label in labels] + [float(x) for x in p[:, c]]
            w[c] = w[c] + method.step * (mean_of(g, weights) - w[c])
    p = transported()
    return np.asarray(p / p.sum(1, keepdims=True))


def test_pt_map_is_what_it_says() -> None:
    method = PtMap(rounds=4)
    features, labels = some_features(seed=2)
    found = probabilities(logits_of(method, features, labels))
    for task in range(2):
        np.testing.assert_allclose(found[task], pt_map_by_loops(method, features[task], labels[task]), atol=1e-7)


def test_pt_map_deals_out_equal_numbers() -> None:
    features, labels = some_features(seed=2, n_queries=20)
    found = probabilities(logits_of(PtMap(), features, labels))
    np.testing.assert_allclose(found.sum(1), 5, atol=0.1)  # although one class has no queries at all


def bms_by_loops(method: Bms, features: Array, labels: Array) -> Array:
    f, n = powered(features), len(labels)
    g = [unit(row - np.mean(f, 0)) for row in f]
    w = [unit(mean) for mean in own_means(g, labels)]
    smallest = float(min(sum(label == c for label in labels) for c in CLASSES))
    for _ in range(method.rounds):
        raised = np.array([[math.exp(method.scale * float(row @ w[c])) for c in CLASSES] for row in g[n:]])
        known = method.class_sizes == "equal"
        sizes = [(len(f) - n) / N_WAY if known else smallest] * N_WAY
        p = sinkhorn_by_loops(raised, sizes, not known, method.iterations)
        belongs = np.concatenate([np.eye(N_WAY)[labels], p])
        w = [unit(mean_of(g, list(belongs[:, c]))) for c in CLASSES]
        smallest = float(min(sum(np.argmax(row) == c for row in belongs) for c in CLASSES))
    return np.asarray(p / p.sum(1, keepdims=True))


@pytest.mark.parametrize("class_sizes", ["lower_bound", "equal"])
@pytest.mark.parametrize("rounds", [1, 5])
def test_bms_is_what_it_says(class_sizes: Literal["lower_bound", "equal"], rounds: int) -> None:
    method = Bms(class_sizes, rounds=rounds)
    features, labels = some_features(seed=1)
    found = probabilities(logits_of(method, features, labels))
    for task in range(2):
        np.testing.assert_allclose(found[task], bms_by_loops(method, features[task], labels[task]), atol=1e-9)


# Rectified means, neighbours


def rectified_by_loops(f: list[Array], labels: Array) -> list[Array]:
    n, w = len(labels), own_means(f, labels)
    shift = np.mean(f[:n], 0) - np.mean(f[n:], 0)
    moved = f[:n] + [row + shift for row in f[n:]]
    cosines = [[float(unit(row) @ unit(w[c])) for c in CLASSES] for row in moved]
    rectified = []
    for c in CLASSES:
        mine = [i for i in range(len(f)) if np.argmax(cosines[i]) == c]
        new = [softmax([10 * x for x in cosines[i]])[c] * moved[i] for i in mine]
        rectified.append(np.mean(new, 0) if new else w[c])
    return rectified


def centred(features: Array, mean: Array) -> list[Array]:
    return [unit(row - mean) for row in features]


def test_bd_cspn_is_what_it_says() -> None:
    features, labels = some_features()
    mean = np.full(features.shape[2], 0.3)
    found = logits_of(BdCspn(scale=3.0), features, labels, parameters={MEAN: torch.from_numpy(mean)})
    for task in range(2):
        f, n = centred(features[task], mean), labels.shape[1]
        w = rectified_by_loops(f, labels[task])
        expected = [[-3.0 * length(row - w[c]) ** 2 for c in CLASSES] for row in f[n:]]
        np.testing.assert_allclose(found[task], expected, atol=1e-9)


def test_a_class_that_no_image_is_nearest_to_keeps_its_mean() -> None:
    """Class 1 has one picture between those of class 0, whose mean has the same direction."""
    features = np.array([[[1.0, 0.2], [1.0, -0.2], [1.0, 0.0], [0.0, 1.0], [1.0, 0.1]]])
    labels = np.array([[0, 0, 1, 2]])
    found = logits_of(BdCspn(normalisation="UN"), features, labels, 3)
    assert np.isfinite(found).all()
    assert found[0, 0, 1] == pytest.approx(-10 * 0.1**2)


@pytest.mark.parametrize("rectify", [False, True])
@pytest.mark.parametrize("rounds", [0, 1, 20])
def test_laplacian_shot_is_what_it_says(rectify: bool, rounds: int) -> None:
    method = LaplacianShot(smoothness=0.9, neighbours=3, rounds=rounds, rectify=rectify)
    features, labels = some_features()
    found = probabilities(logits_of(method, features, labels))
    n = labels.shape[1]
    for task in range(2):
        f = [unit(row) for row in features[task]]
        w = rectified_by_loops(f, labels[task]) if rectify else own_means(f, labels[task])
        near = NearestNeighbors(n_neighbors=4).fit(f[n:]).kneighbors(f[n:], return_distance=False)[:, 1:]
        own = [[-(length(row - w[c]) ** 2) for c in CLASSES] for row in f[n:]]
        q = [softmax(row) for row in own]
        for _ in range(rounds):
            q = [
                softmax([own[i][c] + 0.9 * sum(float(q[j][c]) for j in near[i]) for c in CLASSES])
                for i in range(len(own))
            ]
        np.testing.assert_allclose(found[task], q, atol=1e-9)


def k_reciprocal_by_loops(method: KReciprocal, features: Array, labels: Array) -> Array:
    f, n = [unit(row) for row in features], len(labels)
    nodes = [unit(mean) for mean in own_means(f, labels)] + f[n:]
    d = np.array([[1 - float(one @ other) for other in nodes] for one in nodes])
    d = np.stack([row / row.max() for row in d])
    order = [[i, *(j for j in np.argsort(d[i]) if j != i)] for i in range(len(nodes))]

    def reciprocal(i: int, k: int) -> set[int]:
        return {j for j in order[i][: k + 1] if i in order[j][: k + 1]}

    v = np.zeros_like(d)
    for i in range(len(nodes)):
        own = reciprocal(i, method.neighbours)
        extended = set(own)
        for j in own:
            others = reciprocal(j, round(method.neighbours / 2))
            if len(others & own) > 2 / 3 * len(others):
                extended |= others
        for j in extended:
            v[i, j] = math.exp(-d[i, j])
        v[i] /= v[i].sum()
    v = np.stack([np.mean([v[j] for j in order[i][: method.averaged]], 0) for i in range(len(nodes))])
    scores = []
    for i in range(N_WAY, len(nodes)):
        jaccard = [1 - np.minimum(v[i], v[c]).sum() / np.maximum(v[i], v[c]).sum() for c in CLASSES]
        scores.append([-method.scale * ((1 - method.blend) * jaccard[c] + method.blend * d[i, c]) for c in CLASSES])
    return np.array(scores)


@pytest.mark.parametrize(("neighbours", "averaged"), [(5, 3), (6, 1), (20, 6)])
def test_k_reciprocal_is_what_it_says(neighbours: int, averaged: int) -> None:
    method = KReciprocal(neighbours=neighbours, averaged=averaged)
    features, labels = some_features(n_queries=24)
    found = logits_of(method, features, labels)
    for task in range(2):
        np.testing.assert_allclose(found[task], k_reciprocal_by_loops(method, features[task], labels[task]), atol=1e-9)


# Gaussians


def cnaps_by_loops(method: TransductiveCnaps, features: Array, labels: Array) -> Array:
    f, n = np.stack([method.length * unit(row) for row in features]), len(labels)
    one_hot, scores = np.eye(N_WAY)[labels], np.zeros((len(f) - n, N_WAY))
    for step in range(method.rounds + 1):
        y, known = (np.concatenate([one_hot, probabilities(scores)]), f) if step else (one_hot, f[:n])
        for c in CLASSES:
            count = y[:, c].sum()
            mean = mean_of(list(known), list(y[:, c]))
            own = sum(y[i, c] * np.outer(known[i] - mean, known[i] - mean) for i in range(len(known))) / count
            a = count / (count + 1)
            inverse = np.linalg.inv(np.eye(f.shape[1]) + a * own + (1 - a) * np.cov(known.T))
            scores[:, c] = [-(row - mean) @ inverse @ (row - mean) for row in f[n:]]
    return scores


@pytest.mark.parametrize("n_features", [10, 60])  # fewer and more than images
@pytest.mark.parametrize("rounds", [0, 1, 3])
def test_transductive_cnaps_is_what_it_says(n_features: int, rounds: int) -> None:
    method = TransductiveCnaps(rounds, 4.0)
    features, labels = some_features(n_features=n_features)
    found = logits_of(method, features, labels)
    for task in range(2):
        expected = cnaps_by_loops(method, features[task], labels[task])
        np.testing.assert_allclose(found[task], expected, rtol=1e-9, atol=1e-9)


def test_simple_cnaps_sees_each_query_alone() -> None:
    features, labels = some_features()
    together = logits_of(TransductiveCnaps(0), features, labels)
    alone = logits_of(TransductiveCnaps(0), features[:, : labels.shape[1] + 1], labels)
    np.testing.assert_allclose(together[:, :1], alone, atol=1e-9)


# Propagation: the methods that are trained. Their gradients are tested with those of the other trained methods.


@pytest.mark.parametrize(("n_tasks", "n_images"), [(1, 2), (20, 7), (2, 130)])
def test_the_propagator_is_an_inverse_for_any_number_of_tasks_and_images(n_tasks: int, n_images: int) -> None:
    features = torch.randn(n_tasks, n_images, 5, generator=torch.Generator().manual_seed(0)).double()
    weights = torch.exp(-between(features))
    torch.testing.assert_close(between(features), torch.cdist(features, features) ** 2, atol=1e-9, rtol=1e-9)
    degrees = weights.sum(2) + 1e-4
    normalised = weights / (degrees[:, :, None] * degrees[:, None]).sqrt()
    identity = torch.eye(n_images).double().expand(n_tasks, -1, -1)
    torch.testing.assert_close(propagator(weights, 0.99) @ (identity - 0.99 * normalised), identity)


def epnet_by_loops(method: EpNet, features: Array, labels: Array) -> Array:
    def propagator(f: Array, flow: float) -> Array:
        d = np.array([[length(one - other) ** 2 for other in f] for one in f])
        d = d / np.std([d[i, j] for i in range(len(f)) for j in range(len(f)) if i != j], ddof=1)
        w = np.exp(-method.scale * d) * (1 - np.eye(len(f)))
        root = np.diag((w.sum(1) + 1e-4) ** -0.5)
        return np.linalg.inv(np.eye(len(f)) - flow * root @ w @ root)

    n = len(labels)
    spread = propagator(propagator(features, method.feature_flow) @ features, method.label_flow)
    spread = np.stack([row / row.sum() for row in spread])
    return np.array(
        [
            [math.log(1e-6 + np.mean([row[j] for j in range(n) if labels[j] == c])) for c in CLASSES]
            for row in spread[n:]
        ]
    )


def test_epnet_is_what_it_says() -> None:
    method = EpNet(0.6, 0.3, 1.5)
    features, labels = some_features()
    found = logits_of(method, features, labels)
    for task in range(2):
        np.testing.assert_allclose(found[task], epnet_by_loops(method, features[task], labels[task]), atol=1e-9)


def tpn_by_loops(method: Tpn, parameters: Parameters, cells: Array, labels: Array) -> Array:
    """Scores of all images (image, class)."""
    p = {key: value.numpy() for key, value in parameters.items()}
    scaled = []
    for image in cells:  # (cell, channel)
        hidden = np.mean([np.maximum(p["lengths.0.weight"] @ one + p["lengths.0.bias"], 0) for one in image], 0)
        g = float(p["lengths.1.weight"][0] @ hidden + p["lengths.1.bias"][0])
        scaled.append(image.flatten() / math.exp(3 * math.tanh(g / 3)))
    n = len(scaled)
    w = np.array([[math.exp(-np.mean((one - other) ** 2) / 2) for other in scaled] for one in scaled])
    near = [set(np.argsort(-row)[: method.neighbours]) for row in w]
    w = np.array([[w[i, j] * (j in near[i] or i in near[j]) for j in range(n)] for i in range(n)])
    root = np.diag((w.sum(1) + 1e-4) ** -0.5)
    y = np.zeros((n, N_WAY))
    y[range(len(labels)), labels] = 1
    return np.linalg.solve(np.eye(n) - method.flow * root @ w @ root, y)


def tpn_and_cells() -> tuple[Tpn, Parameters, Array, Array]:
    features, labels = some_features(n_features=24)
    method = Tpn(neighbours=6)
    return method, doubles(method.initial(6, torch.Generator().manual_seed(0))), features.reshape(2, -1, 4, 6), labels


def test_tpn_is_what_it_says() -> None:
    method, parameters, cells, labels = tpn_and_cells()
    found = logits_of(method, cells, labels, parameters=parameters)
    for task in range(2):
        expected = tpn_by_loops(method, parameters, cells[task], labels[task])
        np.testing.assert_allclose(found[task], expected[labels.shape[1] :], atol=1e-9)


def test_tpns_loss_is_that_of_support_images_and_queries() -> None:
    method, parameters, cells, labels = tpn_and_cells()
    images = torch.from_numpy(cells)
    truth = torch.from_numpy(np.random.default_rng(0).integers(0, N_WAY, (2, cells.shape[1] - labels.shape[1])))
    task = Task(images, torch.from_numpy(labels), N_WAY)
    logits, losses = method.training(parameters, images, task, Labels(truth))
    torch.testing.assert_close(logits, method.head(parameters, images, task))
    for index in range(2):
        scores = tpn_by_loops(method, parameters, cells[index], labels[index])
        of_all = np.concatenate([labels[index], truth[index]])
        expected = np.mean([logsumexp(row) - row[label] for row, label in zip(scores, of_all, strict=True)])
        assert float(losses["total"][index]) == pytest.approx(expected)


@pytest.mark.parametrize("name", ["epnet", "tpn"])
def test_propagation_is_safe_with_extreme_features_and_indifferent_to_the_order_of_classes(name: str) -> None:
    tpn, parameters, cells, labels = tpn_and_cells()
    method: HeadOnFeatures = tpn if name == "tpn" else EpNet()
    features = cells if name == "tpn" else cells.reshape(2, -1, 24)
    one = logits_of(method, features, labels, parameters=parameters)
    renamed = np.array([2, 0, 3, 1])
    other = logits_of(method, features, renamed[labels], parameters=parameters)
    np.testing.assert_allclose(other[:, :, renamed], one, atol=1e-9)
    single_query = logits_of(method, features[:, : labels.shape[1] + 1], labels, parameters=parameters)
    assert single_query.shape == (2, 1, N_WAY) and np.isfinite(single_query).all()
    singles = {key: value.float() for key, value in parameters.items()}
    strange = features.astype(np.float32)
    strange[0, 0] = 0
    strange[0, -1] = 1e15 * strange[0, -2]
    strange[1] = strange[1, :1]  # all pictures are the same
    assert np.isfinite(logits_of(method, strange, labels, parameters=singles)).all()
    images = torch.from_numpy(strange).requires_grad_()
    task = Task(images.detach(), torch.from_numpy(labels), N_WAY)
    logits, _ = method.training(singles, images, task, Labels(torch.zeros(2, task.n_queries, dtype=torch.int64)))
    logits.sum().backward()  # type: ignore[no-untyped-call]
    assert images.grad is not None and images.grad.isfinite().all()


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Tim(steps=-1), "method.steps is -1"),
        (lambda: Tim(sure=-0.1), "method.sure is -0.1"),
        (lambda: EntropyMin(rate=0), "method.rate is 0"),
        (lambda: LaplacianShot(neighbours=0), "method.neighbours is 0"),
        (lambda: PtMap(step=0), "method.step is 0"),
        (lambda: PtMap(iterations=0), "method.iterations is 0"),
        (lambda: Bms(rounds=0), "method.rounds is 0"),
        (lambda: KReciprocal(blend=1.1), "method.blend is 1.1: it must be from 0 to 1"),
        (lambda: BdCspn(scale=0), "method.scale is 0"),
        (lambda: EpNet(label_flow=1.0), "method.label_flow is 1.0: it must be 0 or more, and below 1"),
        (lambda: Tpn(flow=1.0), "method.flow is 1.0"),
        (lambda: Tpn(neighbours=1), "method.neighbours is 1"),
        (lambda: TransductiveCnaps(length=0), "method.length is 0"),
    ],
)
def test_settings_that_make_no_sense(make: Any, words: str) -> None:
    with pytest.raises(TridentError, match=words):
        make()
