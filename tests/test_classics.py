"""The older trained methods, each against its docstring: as loops, or with what torch and scikit-learn have."""

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

from conftest import TINY_BACKBONE, TINY_EPISODE, check_gradient, doubles, initial, tiny_store, tiny_tasks
from head_examples import CLASSES, CLASSICS
from trident.backbones.frozen import FrozenBackbone
from trident.data.glyphs import open_glyphs
from trident.errors import TridentError
from trident.importing import imported
from trident.learning.checkpoint import Checkpoint
from trident.learning.heads import HeadLearner
from trident.learning.mixed import MixedLearner
from trident.measuring.evaluate import evaluate
from trident.methods.assoc_align import SUMS, AssociativeAlignment
from trident.methods.base import HeadOnFeatures
from trident.methods.baseline import Baseline
from trident.methods.baseline_plus_plus import BaselinePlusPlus
from trident.methods.feat import Feat
from trident.methods.frn import FeatureReconstruction
from trident.methods.relation_network import RelationNetwork
from trident.methods.s2m2 import MIXING, S2M2
from trident.nn.activation import activate
from trident.nn.batch_norm import BatchNormStatistics
from trident.nn.parameters import Parameters, for_each_task
from trident.recipes.loading import load_recipe
from trident.tasks.source import ClassSource
from trident.tasks.task import Batch, Labels, Task

Array = np.ndarray
N_WAY = 3
LABELS = torch.tensor([[0, 2, 1, 1, 2, 0, 2], [1, 0, 0, 2, 0, 1, 0]])  # unequal shots, in no order
N, N_QUERIES = LABELS.shape[1], 5
heads = pytest.mark.parametrize("name", list(CLASSICS))


def some_task(cells: int = 1, channels: int = 12, seed: int = 7) -> tuple[Tensor, Task]:
    """Random features (task, image, cell, channel) in float64 and their task, without pictures."""
    generator = torch.Generator().manual_seed(seed)
    features = torch.randn(2, N + N_QUERIES, cells, channels, generator=generator, dtype=torch.float64)
    return features, Task(torch.zeros(2, N + N_QUERIES, 1, 1, 1), LABELS, N_WAY)


def random_parameters(method: HeadOnFeatures, n_features: int) -> Parameters:
    """Not the usual start, at which some of them are 0 or 1."""
    generator = torch.Generator().manual_seed(3)
    start = method.initial(n_features, generator)
    return {key: value + 0.3 * torch.randn(value.shape, generator=generator) for key, value in doubles(start).items()}


# Baseline and Baseline++, with torch's SGD


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
        features = learner.features(parameters, batch.task)[0]
    for task in range(2):
        for c in range(CLASSES):
            mine = features[task][batch.labels.queries[task] == c]
            torch.testing.assert_close(found.statistics[SUMS][task, c], mine.sum(0) / features.shape[1])


# Relation Networks


def normalised(x: Array, gain: Array, shift: Array) -> Array:
    """One pair's maps (channel, h, w)."""
    return np.asarray(gain[:, None, None] * (x - x.mean()) / np.sqrt(x.var() + 1e-5) + shift[:, None, None])


def convolved(x: Array, weight: Array, bias: Array) -> Array:
    """3x3, the edges filled with zeros."""
    padded = np.pad(x, ((0, 0), (1, 1), (1, 1)))
    found = np.zeros((len(weight), *x.shape[1:]))
    for place in np.ndindex(*found.shape):
        c, i, j = place
        found[place] = np.sum(weight[c] * padded[:, i : i + 3, j : j + 3]) + bias[c]
    return found


def pooled(x: Array) -> Array:
    half = x.shape[1] // 2
    if not half:
        return x
    return np.array(
        [[[m[2 * i : 2 * i + 2, 2 * j : 2 * j + 2].max() for j in range(half)] for i in range(half)] for m in x]
    )


@pytest.mark.parametrize("side", [1, 2, 5])
def test_relation_network_is_what_it_says(side: int) -> None:
    features, task = some_task(side**2, 3)
    method = RelationNetwork(width=4, hidden=3)
    parameters = random_parameters(method, 3)
    own = {key.removeprefix("relation."): value.numpy() for key, value in parameters.items()}
    found = method.head(parameters, features, task)
    maps = features.numpy().reshape(2, -1, side, side, 3).transpose(0, 1, 4, 2, 3)
    for query, c in [(0, 0), (1, 2), (4, 1)]:
        class_map = np.mean([maps[1, i] for i in range(N) if LABELS[1, i] == c], 0)
        x = np.concatenate([class_map, maps[1, N + query]])
        for block in "01":
            x = convolved(x, own[f"{block}.weight"], own[f"{block}.bias"])
            x = pooled(np.maximum(normalised(x, own[f"{block}.gain"], own[f"{block}.shift"]), 0))
        hidden = np.maximum(own["hidden.weight"] @ x.mean((1, 2)) + own["hidden.bias"], 0)
        assert float(found[1, query, c]) == pytest.approx(float((own["score.weight"] @ hidden + own["score.bias"])[0]))


def test_relation_network_s_losses() -> None:
    logits = torch.tensor([[[1.0, -2.0], [0.5, 3.0]]])
    labels = Labels(torch.tensor([[0, 1]]))

    def sigmoid(x: float) -> float:
        return 1 / (1 + math.exp(-x))

    squares = [(sigmoid(1) - 1) ** 2, sigmoid(-2) ** 2, sigmoid(0.5) ** 2, (sigmoid(3) - 1) ** 2]
    assert float(RelationNetwork().losses(logits, labels)["total"]) == pytest.approx(sum(squares) / 4)
    entropy = [math.log(1 + math.exp(-3)), math.log(1 + math.exp(-2.5))]
    assert float(RelationNetwork(loss="cross_entropy").losses(logits, labels)["total"]) == pytest.approx(
        sum(entropy) / 2
    )


# FEAT


def block(own: dict[str, Array], asking: list[Array], answering: list[Array]) -> list[Array]:
    results = []
    for a in asking:
        query = own["asks.weight"] @ a
        scores = np.array([query @ (own["answers.weight"] @ b) / math.sqrt(len(a)) for b in answering])
        weights = np.exp(scores) / np.exp(scores).sum()
        heard = sum(w * (own["values.weight"] @ b) for w, b in zip(weights, answering, strict=True))
        x = a + own["out.weight"] @ heard + own["out.bias"]
        results.append(own["gain"] * (x - x.mean()) / np.sqrt(x.var() + 1e-5) + own["shift"])
    return results


def soft(scores: list[float]) -> Array:
    return np.asarray(np.exp(scores) / np.exp(scores).sum())


def feat_by_loops(method: Feat, own: dict[str, Array], f: Array, labels: Array) -> tuple[Array, list[Array]]:
    """Logits (query, class), and the features that the second loss sees."""
    support, queries = list(f[:N]), list(f[N:])
    if method.transductive:
        support = block(own, support, support + queries)
    groups = [[row for row, label in zip(support, labels, strict=True) if label == c] for c in range(N_WAY)]
    means = [np.mean(group, 0) for group in groups]
    if method.transductive:
        belongs = [soft([-np.sum((q - m) ** 2) / method.temperature for m in means]) for q in queries]
        prototypes = [
            (sum(group) + sum(p[c] * q for p, q in zip(belongs, queries, strict=True)))
            / (len(group) + sum(p[c] for p in belongs))
            for c, group in enumerate(groups)
        ]
    else:
        prototypes = block(own, means, means)
    logits = [[-np.sum((q - p) ** 2) / method.temperature for p in prototypes] for q in queries]
    return np.array(logits), support + queries


@pytest.mark.parametrize("transductive", [False, True])
def test_feat_is_what_it_says(transductive: bool) -> None:
    features, task = some_task(4, 6)
    method = Feat(temperature=5.0, auxiliary_temperature=3.0, balance=0.4, transductive=transductive)
    parameters = random_parameters(method, 6)
    own = {key.removeprefix("attention."): value.numpy() for key, value in parameters.items()}
    truth = torch.tensor([[0, 1, 2, 2, 1], [2, 2, 0, 1, 1]])
    logits, losses = method.training(parameters, features, task, Labels(truth))
    torch.testing.assert_close(method.head(parameters, features, task), logits)
    for i in range(2):
        expected, seen = feat_by_loops(method, own, features[i].amax(1).numpy(), LABELS[i].numpy())
        np.testing.assert_allclose(logits[i], expected, rtol=1e-9)
        known = [*LABELS[i].tolist(), *truth[i].tolist()]
        groups = [[row for row, label in zip(seen, known, strict=True) if label == c] for c in range(N_WAY)]
        centres = [np.mean(block(own, group, group), 0) for group in groups]
        second = 0.0
        for row, label in zip(seen, known, strict=True):
            second -= math.log(soft([-np.sum((row - centre) ** 2) / 3 for centre in centres])[label]) / len(seen)
        fit = -np.mean([math.log(soft(list(row))[label]) for row, label in zip(expected, truth[i], strict=True)])
        assert float(losses["auxiliary"][i]) == pytest.approx(second)
        assert float(losses["total"][i]) == pytest.approx(fit + 0.4 * second)


def test_feat_says_whether_it_is_transductive() -> None:
    assert [Feat(transductive=t).about.transductive for t in (False, True)] == [False, True]
    assert not Feat.about.transductive
    assert Feat() == Feat() != Feat(transductive=True)
    assert Feat(transductive=True).for_few_queries() == Feat()


# FRN, with scikit-learn's ridge regression


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


def training_batch(method: HeadOnFeatures) -> Batch:
    """What the method is trained on, in float64."""
    if method.about.trained_on == "episodes":
        return tiny_tasks()
    task, labels = ClassSource(tiny_store(), 12, 0, noise_shapes=method.batch_noise(12)).batch([0, 1])
    return Batch(task.with_images(task.images.double() / 255), labels)


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

    found = MixedLearner(model).gradient(parameters, Batch(task, labels))
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


# All of them


@heads
def test_gradients(name: str) -> None:
    method = CLASSICS[name]
    model = method.model(TINY_BACKBONE, TINY_EPISODE)
    check_gradient(imported(method.learners["plain"])(model), doubles(initial(model, 1)), training_batch(method))


@heads
@pytest.mark.parametrize("scale", [0.0, 1e-6, 1e4])
def test_small_and_huge_features_give_finite_logits_and_gradients(name: str, scale: float) -> None:
    method = CLASSICS[name]
    features, task = some_task(4 if method.takes_cells else 1)
    features = (scale * features if method.takes_cells else scale * features[:, :, 0]).float().requires_grad_()
    statistics = method.initial_statistics(12)
    start = method.initial(12, torch.Generator().manual_seed(0)) | {k: v + 1 for k, v in statistics.items()}
    assert method.head(start, features, task).isfinite().all()
    truth = Labels(torch.arange(task.n_queries).expand(2, -1) % N_WAY)
    if method.about.trained_on == "classes":
        task, truth = Task(features, LABELS[:, :0], CLASSES), Labels(torch.arange(12).expand(2, -1) % CLASSES)
    _, losses = method.training(start, features, task, truth)
    (slopes,) = torch.autograd.grad(losses["total"].sum(), features)
    assert slopes.isfinite().all()


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Baseline(rate=0), "method.rate is 0"),
        (lambda: Baseline(1), "method.training_classes is 1"),
        (lambda: BaselinePlusPlus(steps=-1), "method.steps is -1"),
        (lambda: RelationNetwork(width=0), "method.width is 0"),
        (lambda: Feat(temperature=0), "method.temperature is 0"),
        (lambda: FeatureReconstruction(apart=-1), "method.apart is -1"),
        (lambda: S2M2(blocks=5), "method.blocks is 5: it must be from 1 to 4"),
        (lambda: AssociativeAlignment(margin=2), "method.margin is 2"),
    ],
)
def test_settings_that_make_no_sense(make: Any, words: str) -> None:
    with pytest.raises(TridentError, match=words):
        make()


GOLDEN = {  # with random weights
    "baseline": 21.6,
    "baseline-plus-plus": 40.4,
    "relation-network": 20.2,
    "feat": 39.0,
    "frn": 38.0,
    "s2m2": 40.4,
    "assoc-align": 39.6,
}


@pytest.mark.parametrize("name", list(GOLDEN))
def test_golden_accuracies_on_letters(name: str) -> None:
    recipe = load_recipe(f"glyphs-{name}")
    start = Checkpoint(recipe, recipe.initial(0), recipe.model.initial_running(), 0)
    found = evaluate(start, open_glyphs(), split="test", tasks=20, seed=0).accuracy
    assert found == pytest.approx(GOLDEN[name], abs=0.5)
