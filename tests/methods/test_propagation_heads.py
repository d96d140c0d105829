"""EPNet and TPN against their equations, written as loops."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from scipy.special import logsumexp

from heads_by_loops import CLASSES
from made_up_features import N_WAY, Array, length, logits_of, some_features
from tiny import doubles
from trident.errors import TridentError
from trident.methods.base import HeadOnFeatures
from trident.methods.transductive.bd_cspn import BdCspn
from trident.methods.transductive.bms import Bms
from trident.methods.transductive.entropy_min import EntropyMin
from trident.methods.transductive.epnet import EpNet
from trident.methods.transductive.k_reciprocal import KReciprocal
from trident.methods.transductive.laplacian_shot import LaplacianShot
from trident.methods.transductive.propagation import pairwise_squared_distances, propagator
from trident.methods.transductive.pt_map import PtMap
from trident.methods.transductive.tim import Tim
from trident.methods.transductive.tpn import Tpn
from trident.methods.transductive.transductive_cnaps import TransductiveCnaps
from trident.nn.parameters import Parameters
from trident.tasks.task import Labels, Task


@pytest.mark.parametrize(("n_tasks", "n_images"), [(1, 2), (20, 7), (2, 130)])
def test_the_propagator_is_an_inverse_for_any_number_of_tasks_and_images(n_tasks: int, n_images: int) -> None:
    features = torch.randn(n_tasks, n_images, 5, generator=torch.Generator().manual_seed(0)).double()
    weights = torch.exp(-pairwise_squared_distances(features))
    torch.testing.assert_close(
        pairwise_squared_distances(features), torch.cdist(features, features) ** 2, atol=1e-9, rtol=1e-9
    )
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
