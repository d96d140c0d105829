"""Baseline, Baseline++ and associative alignment against plain code with torch optimisers."""

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from classic_tasks import LABELS, N_WAY, N, random_parameters, some_task, training_batch
from head_examples import CLASSES
from tiny import TINY_BACKBONE, TINY_EPISODE, doubles, initial
from trident.engines.plain.heads import HeadLearner
from trident.methods.metric.assoc_align import SUMS, AssociativeAlignment
from trident.methods.metric.baseline import Baseline
from trident.methods.metric.baseline_plus_plus import BaselinePlusPlus
from trident.tasks.task import Labels, Task


def class_weights(labels: Tensor) -> Tensor:
    return torch.tensor([1 / float((labels == c).sum()) for c in range(N_WAY)], dtype=torch.float64)


def descend(parameters: list[Tensor], loss: Any, steps: int, rate: float, weight_decay: float = 0.0) -> None:
    optimizer = torch.optim.SGD(parameters, rate, momentum=0.9, dampening=0.9, weight_decay=weight_decay)
    for _ in range(steps):
        optimizer.zero_grad()
        loss().backward()
        optimizer.step()


def test_baseline_is_a_linear_layer_fitted_by_sgd() -> None:
    features, task = some_task()
    method = Baseline(steps=30, rate=0.1, weight_decay=0.02)
    found = method.head({}, features[:, :, 0], task)
    for f, labels, logits in zip(features[:, :, 0], LABELS, found, strict=True):
        layer = torch.nn.Linear(12, N_WAY).double()
        torch.nn.init.zeros_(layer.weight)
        torch.nn.init.zeros_(layer.bias)

        def loss(layer: Any = layer, f: Tensor = f, labels: Tensor = labels) -> Tensor:
            return F.cross_entropy(layer(f[:N]), labels, class_weights(labels))

        descend(list(layer.parameters()), loss, 30, 0.1, 0.02)
        torch.testing.assert_close(logits, layer(f[N:]).detach())


def cosine_classifier(f: Tensor, labels: Tensor, method: BaselinePlusPlus) -> Tensor:
    """Weights (class, feature), fitted by SGD."""
    unit = f / f.norm(dim=1, keepdim=True)
    means = torch.stack([unit[labels == c].mean(0) for c in range(N_WAY)])
    weights = (means / means.norm(dim=1, keepdim=True)).requires_grad_()

    def loss() -> Tensor:
        logits = method.scale * F.cosine_similarity(unit[:, None], weights[None], dim=2)
        return F.cross_entropy(logits, labels, class_weights(labels))

    descend([weights], loss, method.steps, method.rate)
    found: Tensor = weights.detach()
    return found


def test_baseline_plus_plus_is_a_cosine_classifier_fitted_by_sgd() -> None:
    features, task = some_task()
    method = BaselinePlusPlus(steps=30, rate=0.1, scale=7.0)
    found = method.head({}, features[:, :, 0], task)
    for f, labels, logits in zip(features[:, :, 0], LABELS, found, strict=True):
        weights = cosine_classifier(f[:N], labels, method)
        torch.testing.assert_close(logits, 7 * F.cosine_similarity(f[N:, None], weights[None], dim=2))


# Associative alignment


def test_associative_alignment_is_what_it_says() -> None:
    features, task = some_task()
    method = AssociativeAlignment(9, steps=20, rate=0.1, scale=4.0, related=2, alignment=0.7)
    sums = torch.randn(9, 12, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    sums[4] = 0  # a class that training has not seen
    found = method.head({SUMS: sums}, features[:, :, 0], task)
    plain = BaselinePlusPlus(steps=20, rate=0.1, scale=4.0)
    for f, labels, logits in zip(features[:, :, 0], LABELS, found, strict=True):
        weights = cosine_classifier(f[:N], labels, plain).requires_grad_()
        means = sums[[0, 1, 2, 3, 5, 6, 7, 8]]
        means = means / means.norm(dim=1, keepdim=True)
        p = torch.softmax(4 * F.cosine_similarity(means[:, None], weights.detach()[None], dim=2), 1)
        chosen = []
        for c in range(N_WAY):
            mine = [(float(p[i, c]), i) for i in range(len(means)) if p[i].argmax() == c]
            chosen += [(i, c) for _, i in sorted(mine, reverse=True)[:2]]
        assert len(chosen) >= 3
        z, of_z = means[[i for i, _ in chosen]], torch.tensor([c for _, c in chosen])

        def loss(
            f: Tensor = f, labels: Tensor = labels, w: Tensor = weights, z: Tensor = z, to: Tensor = of_z
        ) -> Tensor:
            logits = 4 * F.cosine_similarity(f[:N, None], w[None], dim=2)
            distances = (z[:, None] - F.normalize(w, dim=1)[None]).square().sum(2)
            return F.cross_entropy(logits, labels, class_weights(labels)) + 0.7 * F.cross_entropy(-distances, to)

        descend([weights], loss, 20, 0.1)
        torch.testing.assert_close(logits, 4 * F.cosine_similarity(f[N:, None], weights.detach()[None], dim=2))


def test_associative_alignment_s_margin_is_an_angle() -> None:
    method = AssociativeAlignment(CLASSES, margin=0.3)
    features = some_task()[0][:1, :, 0]
    labels = torch.arange(features.shape[1])[None] % CLASSES
    parameters = random_parameters(method, 12)
    _, losses = method.training(parameters, features, Task(features, LABELS[:1, :0], CLASSES), Labels(labels))
    scale, weights, total = 20 * math.exp(parameters["log_scale"]), parameters["classes.weight"], 0.0
    for f, label in zip(features[0], labels[0].tolist(), strict=True):
        angles = [math.acos(float(f @ w / f.norm() / w.norm())) for w in weights]
        if angles[label] < math.pi / 2:
            angles[label] += 0.3
        raised = [math.exp(scale * math.cos(angle)) for angle in angles]
        total -= math.log(raised[label] / sum(raised))
    assert float(losses["total"]) == pytest.approx(total / features.shape[1])


def test_associative_alignment_keeps_the_mean_feature_of_every_training_class() -> None:
    method = AssociativeAlignment(CLASSES)
    model = method.model(TINY_BACKBONE, TINY_EPISODE)
    learner, parameters = HeadLearner(model), doubles(initial(model))
    batch = training_batch(method)
    found = learner.gradient(parameters, batch)
    assert found.statistics.keys() == model.initial_running().keys()
    with torch.no_grad():
        features = learner.features(parameters, batch.task)
    for task in range(2):
        for c in range(CLASSES):
            mine = features[task][batch.labels.queries[task] == c]
            torch.testing.assert_close(found.statistics[SUMS][task, c], mine.sum(0) / features.shape[1])
