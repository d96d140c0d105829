"""Optimal transport: PT-MAP and BMS against their equations, written as loops."""

import math
from typing import Literal

import numpy as np
import pytest
import torch

from heads_by_loops import CLASSES, mean_of, own_means, unit
from made_up_features import N_WAY, Array, length, logits_of, probabilities, some_features
from trident.methods.transductive.bms import Bms
from trident.methods.transductive.pt_map import PtMap
from trident.methods.transductive.transport import sinkhorn


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
