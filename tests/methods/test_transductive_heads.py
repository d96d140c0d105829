"""Heads with moving means, neighbours or Gaussians against their equations, written as loops."""

import math

import numpy as np
import pytest
import torch
from sklearn.neighbors import NearestNeighbors

from heads_by_loops import CLASSES, mean_of, own_means, softmax, unit
from made_up_features import N_WAY, Array, length, logits_of, probabilities, some_features
from trident.methods.base import MEAN
from trident.methods.transductive.bd_cspn import BdCspn
from trident.methods.transductive.k_reciprocal import KReciprocal
from trident.methods.transductive.laplacian_shot import LaplacianShot
from trident.methods.transductive.transductive_cnaps import TransductiveCnaps


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


@pytest.mark.parametrize("rounds", [0, 1, 20])
def test_laplacian_shot_is_what_it_says(rounds: int) -> None:
    method = LaplacianShot(smoothness=0.9, neighbours=3, rounds=rounds)
    features, labels = some_features()
    found = probabilities(logits_of(method, features, labels))
    n = labels.shape[1]
    for task in range(2):
        f = [unit(row) for row in features[task]]
        w = rectified_by_loops(f, labels[task])
        near = NearestNeighbors(n_neighbors=4).fit(f[n:]).kneighbors(f[n:], return_distance=False)[:, 1:]
        shift = np.mean(f[:n], 0) - np.mean(f[n:], 0)
        own = [[-(length(row + shift - w[c]) ** 2) for c in CLASSES] for row in f[n:]]
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
