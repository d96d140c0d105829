"""FRN against ridge regression of scikit-learn, and the losses of S2M2."""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from scipy.stats import beta, kstest
from sklearn.linear_model import Ridge
from torch import Tensor

from classic_tasks import LABELS, N_QUERIES, N_WAY, N, random_parameters, some_task, training_batch
from head_examples import CLASSES
from tiny import TINY_BACKBONE, TINY_EPISODE, doubles, initial, tiny_store
from trident.backbones.frozen import FrozenBackbone
from trident.engines.plain.heads import HeadLearner
from trident.errors import TridentError
from trident.methods.metric.frn import FeatureReconstruction
from trident.methods.metric.s2m2 import MIXING, S2M2
from trident.nn.batch_norm import BatchNormStatistics
from trident.nn.linear import activate
from trident.nn.parameters import for_each_task
from trident.tasks.source import ClassSource
from trident.tasks.task import Batch, Labels


@pytest.mark.parametrize(("cells", "channels"), [(9, 4), (1, 20)], ids=["by channels", "by rows"])
def test_frn_is_ridge_regression(cells: int, channels: int) -> None:
    features, task = some_task(cells, channels)
    method = FeatureReconstruction()
    parameters = random_parameters(method, channels)
    penalty, length, scale = (math.exp(parameters[f"log_{name}"]) for name in ("penalty", "length", "scale"))
    found = method.head(parameters, features, task)
    for i in range(2):
        for c in range(N_WAY):
            rows = features[i, :N][LABELS[i] == c].flatten(0, 1).numpy()
            ridge = Ridge(alpha=penalty * len(rows) / channels + 1e-6, fit_intercept=False, solver="svd")
            for query in range(N_QUERIES):
                q = features[i, N + query].numpy()  # (cell, channel)
                again = length * ridge.fit(rows.T, q.T).coef_.reshape(cells, -1) @ rows
                error = np.mean(np.sum((q - again) ** 2, 1))
                assert float(found[i, query, c]) == pytest.approx(-scale * error)


def test_frn_keeps_classes_apart() -> None:
    features, task = some_task(4, 3)
    method = FeatureReconstruction(apart=0.5)
    _, losses = method.training(
        random_parameters(method, 3), features, task, Labels(torch.zeros(2, 5, dtype=torch.int64))
    )
    for i in range(2):
        cells = [(int(LABELS[i, n]), row) for n in range(N) for row in features[i, n].numpy()]
        squares = sum(float(row @ row) for _, row in cells)
        alike = sum(float(a @ b / squares) ** 2 for c, a in cells for d, b in cells if c < d)
        assert float(losses["alike"][i]) == pytest.approx(alike)
        assert float(losses["total"][i] - losses["classification"][i]) == pytest.approx(0.5 * alike)


# S2M2


def test_s2m2_mixes_before_a_random_block_with_a_share_from_a_beta_distribution() -> None:
    noise = torch.randn(20_000, 1, 4, generator=torch.Generator().manual_seed(0))
    share, place = S2M2(blocks=3).mixing(noise)
    assert kstest(share.numpy(), beta(2, 2).cdf).pvalue > 0.01
    counts = torch.bincount(place, minlength=4).tolist()
    assert counts[3] == 0 and min(counts[:3]) > 6400
    assert abs(np.corrcoef(share, place)[0, 1]) < 0.02
    far = S2M2().mixing(torch.full((1, 1, 4), 40.0))
    assert [float(part) for part in far] == [1.0, 3.0]


def test_s2m2_s_losses() -> None:
    """Against the layers one after the other, with pictures and maps mixed by hand."""
    method = S2M2(CLASSES, rotation_weight=0.3)
    model = method.model(TINY_BACKBONE, TINY_EPISODE)
    parameters, (task, labels) = doubles(initial(model)), training_batch(method)
    shares, places = method.mixing(task.noise[MIXING])
    assert len(set(places.tolist())) == 2
    own, statistics = for_each_task(parameters, 1), BatchNormStatistics()

    def features(images: Tensor, mixed: Any = None) -> Tensor:
        x = images[None]
        for place, layer in enumerate(replace(TINY_BACKBONE.network).layers):
            x = mixed(place, x) if mixed else x
            x = activate(layer.pooled(own, x, statistics)[0], TINY_BACKBONE.activation)
        return x[0].flatten(1)

    def entropy(logits: Tensor, known: Tensor) -> float:
        return float(F.cross_entropy(logits, known))

    def classes(f: Tensor) -> Tensor:
        weights = parameters["classes.weight"]
        return 10 * F.cosine_similarity(f[:, None], weights[None], dim=2)

    found = HeadLearner(model).gradient(parameters, Batch(task, labels))
    for i in range(2):
        u, known, images = float(shares[i]), labels.queries[i], task.images[i]

        def mixed(place: int, x: Tensor, u: float = u, chosen: int = int(places[i])) -> Tensor:
            return u * x + (1 - u) * torch.cat([x[:, -1:], x[:, :-1]], 1) if place == chosen else x

        logits = classes(features(images, mixed))
        mix = u * entropy(logits, known) + (1 - u) * entropy(logits, torch.cat([known[-1:], known[:-1]]))
        pictures = [images[:3].numpy()[..., 0]]
        for _ in range(3):
            pictures.append(np.array([np.rot90(picture) for picture in pictures[-1]]))
        turned = features(torch.from_numpy(np.concatenate(pictures))[..., None])
        of_turns = turned @ parameters["rotations.weight"].T + parameters["rotations.bias"]
        expected = entropy(classes(turned), known[:3].repeat(4))
        turns = entropy(of_turns, torch.tensor([0] * 3 + [1] * 3 + [2] * 3 + [3] * 3))
        assert float(found.losses["mixed"][i]) == pytest.approx(mix, rel=1e-6)
        assert float(found.losses["total"][i]) == pytest.approx(mix + 0.3 * (expected + turns), rel=1e-6)


def test_s2m2_needs_a_network_to_mix_in() -> None:
    with pytest.raises(TridentError, match="S2M2 needs pictures and the conv4 backbone, not features of"):
        S2M2().check_training(FrozenBackbone(size=8))


def test_noise_changes_neither_the_images_of_a_batch_nor_itself() -> None:
    store = tiny_store()
    plain = ClassSource(store, 6, 3).batch([4])
    noisy = ClassSource(store, 6, 3, noise_shapes={MIXING: (1, 4)})
    assert torch.equal(noisy.batch([4]).task.images, plain.task.images)
    assert torch.equal(noisy.batch([3, 4]).task.noise[MIXING][1:], noisy.batch([4]).task.noise[MIXING])
