"""TRIDENT on features: it starts as nearest mean, its gradient is right, no order matters, and training helps."""

from dataclasses import replace
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
import torch
from torch import Tensor

from tiny import Silent, doubles
from trident.backbones.frozen import FrozenBackbone
from trident.data.store import ImageStore, class_table, store_in_memory
from trident.engines.plain.heads import HeadLearner
from trident.errors import TridentError
from trident.learning.checkpoint import Checkpoint, load_checkpoint
from trident.learning.run_start import start_run
from trident.learning.training import train
from trident.measuring.evaluate import evaluate, validate
from trident.methods.metric.nearest_mean import NearestMean
from trident.methods.metric.scikit_learn import LogisticRegressionHead
from trident.methods.transductive.soft_kmeans import SoftKMeans
from trident.methods.trident import features as trident_features
from trident.methods.trident.features import TERMS, TRAINING_MEAN, TridentOnFeatures
from trident.nn.parameters import Parameters
from trident.recipes.recipe import Recipe
from trident.settings import EpisodeSpec, TrainingSettings
from trident.tasks.task import Batch, Labels, Task

SIZE = 12
METHOD = TridentOnFeatures(
    semantic_latents=3, label_width=5, decoder_width=4, attfex_width_m=6, attfex_width_n=4, classifier="nearest-mean"
)
REFINED = replace(METHOD, classifier="soft-kmeans")
BACKBONE = FrozenBackbone(size=SIZE)
EPISODE = EpisodeSpec(n_way=3, n_shot=2, n_query=4)
episodes = pytest.mark.parametrize("episode", [EPISODE, EpisodeSpec(2, 1, 1), EpisodeSpec(5, 3, 2)])


def batch_of(episode: EpisodeSpec = EPISODE, n_tasks: int = 2, draws: int = 1, seed: int = 0) -> Batch:
    """Random tasks of positive features in float64, with noise."""
    generator = torch.Generator().manual_seed(seed)
    features = torch.rand(n_tasks, episode.n_images, SIZE, generator=generator, dtype=torch.float64)
    noise = {
        name: torch.randn((n_tasks, *shape), generator=generator, dtype=torch.float64)
        for name, shape in METHOD.model(BACKBONE, episode).noise_shapes(episode, draws).items()
    }
    support = torch.arange(episode.n_way).repeat(episode.n_shot).expand(n_tasks, -1)
    queries = torch.randint(episode.n_way, (n_tasks, episode.n_queries), generator=generator)
    return Batch(Task(features, support, episode.n_way, noise), Labels(queries))


def untrained(seed: int = 0) -> Parameters:
    start = METHOD.initial(SIZE, torch.Generator().manual_seed(seed)) | METHOD.initial_statistics(SIZE)
    return doubles(start)


def trained(seed: int = 0) -> Parameters:
    """Random weights everywhere, and a mean feature that is like those of the tasks."""
    generator = torch.Generator().manual_seed(seed)
    start = untrained(seed)
    for key, value in start.items():
        start[key] = value + 0.3 * torch.randn(value.shape, generator=generator, dtype=value.dtype)
    return start | {TRAINING_MEAN: torch.full((SIZE,), SIZE**-0.5, dtype=torch.float64)}


def without_noise(task: Task) -> Task:
    return replace(task, noise={})


@episodes
def test_before_training_it_is_nearest_mean_or_soft_k_means(episode: EpisodeSpec) -> None:
    task = without_noise(batch_of(episode).task)
    regression = replace(METHOD, classifier="logistic-regression")
    for method, plain in ((METHOD, NearestMean()), (REFINED, SoftKMeans()), (regression, LogisticRegressionHead())):
        for parameters in (untrained(), untrained() | {TRAINING_MEAN: trained()[TRAINING_MEAN]}):
            found = method.head(parameters, task.images, task)
            torch.testing.assert_close(found, plain.head({}, task.images, task), rtol=1e-9, atol=1e-9)
        singles = {key: value.float() for key, value in untrained().items()}
        found = method.head(singles, task.images.float(), task)
        torch.testing.assert_close(found, plain.head({}, task.images.float(), task), rtol=1e-4, atol=1e-4)


def test_after_training_it_is_not() -> None:
    task = without_noise(batch_of().task)
    difference = METHOD.head(trained(), task.images, task) - NearestMean().head({}, task.images, task)
    assert difference.abs().max() > 0.1


@pytest.mark.parametrize("seed", range(3))
def test_the_gradient_against_finite_differences(seed: int) -> None:
    learner = HeadLearner(METHOD.model(BACKBONE, EPISODE))
    parameters = {key: value for key, value in trained(seed).items() if key != TRAINING_MEAN}
    batch = batch_of(seed=seed)
    found = learner.gradient(parameters, batch)
    assert found.gradient.keys() == parameters.keys()
    assert all(bool(value.abs().max() > 0) for value in found.gradient.values())
    generator = torch.Generator().manual_seed(seed)
    along = {key: torch.randn(x.shape, generator=generator, dtype=x.dtype) for key, x in parameters.items()}

    def loss(distance: float) -> float:
        moved = {key: value + distance * along[key] for key, value in parameters.items()}
        return float(learner.gradient(moved, batch).losses["total"].sum())

    actual = float(sum((found.gradient[key] * along[key]).sum() for key in along))
    errors = [abs(actual * 2 * step / (loss(step) - loss(-step)) - 1) for step in (1e-5, 1e-6)]
    assert min(errors) < 1e-6


def test_all_parts_of_the_head_learn_from_the_start() -> None:
    """Zeros at the start must not keep their own gradients at zero."""
    learner = HeadLearner(METHOD.model(BACKBONE, EPISODE))
    start = {key: value for key, value in untrained().items() if key != TRAINING_MEAN}
    found = learner.gradient(start, batch_of()).gradient
    for key in ("label.loc.weight", "attfex.mask.weight", "decoder.0.weight"):
        assert found[key].abs().max() > 0, key


@pytest.mark.parametrize("method", [METHOD, REFINED])
@episodes
def test_no_order_matters(method: TridentOnFeatures, episode: EpisodeSpec) -> None:
    """Any number of ways and shots. Queries in another order give the predictions in that order."""
    task = without_noise(batch_of(episode).task)
    generator = torch.Generator().manual_seed(3)
    support = torch.randperm(task.n_support, generator=generator)
    query = torch.randperm(task.n_queries, generator=generator)
    images = task.images[:, torch.cat([support, task.n_support + query])]
    other = Task(images, task.support_labels[:, support], task.n_way)
    found = method.head(trained(), task.images, task)
    assert found.shape == (2, episode.n_queries, episode.n_way)
    torch.testing.assert_close(method.head(trained(), images, other), found[:, query], rtol=1e-8, atol=1e-8)


def test_the_parts_of_the_loss() -> None:
    for seed in range(5):
        task, labels = batch_of(seed=seed)
        logits, losses = METHOD.training(trained(seed), task.images, task, labels)
        assert list(losses) == ["total", *TERMS] and logits.shape == (2, task.n_queries, task.n_way)
        for name in TERMS:
            assert losses[name].shape == (2,) and bool((losses[name] >= 0).all()), name
        expected = sum(getattr(METHOD, f"{name}_weight") * losses[name] for name in TERMS)
        torch.testing.assert_close(losses["total"], expected)


def test_the_network_counts_on_pictures_like_those_of_training_only() -> None:
    task = without_noise(batch_of().task)
    like, unlike = trained(), trained()
    unlike[TRAINING_MEAN] = torch.linspace(-1, 1, SIZE, dtype=torch.float64)
    for parameters, expected in ((like, 1.0), (unlike, 0.0)):
        trust = METHOD.trust(parameters, task.images, task)
        torch.testing.assert_close(trust, torch.full((2, 1, 1), expected, dtype=torch.float64))
    found = METHOD.head(unlike, task.images, task)
    torch.testing.assert_close(found, NearestMean().head({}, task.images, task))
    assert (found - METHOD.head(like, task.images, task)).abs().max() > 0.01


@pytest.mark.parametrize("mask_from", ["task", "support"])
def test_images_in_parts_are_the_same(mask_from: Literal["task", "support"], monkeypatch: pytest.MonkeyPatch) -> None:
    task, method = batch_of().task, replace(METHOD, mask_from=mask_from)
    whole = method.label_means(trained(), task.images, task)
    monkeypatch.setattr(trident_features, "IMAGES_AT_ONCE", 4)
    torch.testing.assert_close(method.label_means(trained(), task.images, task), whole)


def test_predictions_are_averaged_over_draws_of_noise() -> None:
    task = batch_of(draws=2).task

    def of_draw(draw: int) -> Tensor:
        noise = {name.replace(f"query/{draw}/", "query/0/"): values for name, values in task.noise.items()
                 if name.startswith(("support/", f"query/{draw}/"))}  # fmt: skip
        return METHOD.head(trained(), task.images, replace(task, noise=noise)).softmax(2)

    found = METHOD.head(trained(), task.images, task).exp()
    torch.testing.assert_close(found, (of_draw(0) + of_draw(1)) / 2)
    assert (of_draw(0) - of_draw(1)).abs().max() > 1e-3


def test_few_queries_are_classified_alone() -> None:
    """Each query gets the same answer with and without the others."""
    alone = REFINED.for_few_queries()
    task = without_noise(batch_of().task)
    together = alone.head(trained(), task.images, task)
    for query in range(task.n_queries):
        images = torch.cat([task.images[:, task.support], task.images[:, task.n_support + query, None]], 1)
        found = alone.head(trained(), images, Task(images, task.support_labels, task.n_way))
        torch.testing.assert_close(found[:, 0], together[:, query])
    assert (together - METHOD.head(trained(), task.images, task)).abs().max() > 1e-3
    assert "soft-kmeans" in REFINED.describe() and "soft-kmeans" not in METHOD.describe()


def test_settings_are_checked() -> None:
    with pytest.raises(TridentError, match=r"method\.trust_from is 0\.9: it must be below method\.trust_to"):
        TridentOnFeatures(trust_from=0.9)
    with pytest.raises(TridentError, match=r"method\.label_kl_weight is -1"):
        TridentOnFeatures(label_kl_weight=-1.0)


# Training.


def store_with_nuisance() -> ImageStore:
    """A class is a direction in 20 of 24 features. The other four are noise, and far larger."""
    generator = np.random.default_rng(5)
    splits, per_class = ["train"] * 30 + ["val"] * 8 + ["test"] * 8, 20
    classes = np.repeat(generator.standard_normal((len(splits), 20)), per_class, 0)
    signal = classes + 0.5 * generator.standard_normal(classes.shape)
    nuisance = 4 * generator.standard_normal((len(classes), 4))
    features = 1 + np.concatenate([signal, nuisance], 1)
    table = class_table((f"class {i}", split, per_class) for i, split in enumerate(splits))
    return replace(store_in_memory("made up", features.astype(np.float32), table), features_of="made-up")


def test_training_finds_the_directions_that_say_nothing(tmp_path: Path) -> None:
    """5-way 1-shot, 5 queries per class, 60 tasks from new classes, each way of predicting."""
    store = store_with_nuisance()
    settings = TrainingSettings(
        steps=40, tasks_per_step=4, rate=1e-2, clip_norm=None, validate_every=40, validation_tasks=2, save_every=40
    )
    backbone = FrozenBackbone(of="made-up", size=24)
    method = TridentOnFeatures(semantic_latents=4, label_width=16, decoder_width=16)
    recipe = Recipe("made up", "", "made up", EpisodeSpec(5, 1, 5), backbone=backbone, method=method, training=settings)
    start = start_run(recipe, store, "made up", tmp_path / "run", "cpu")
    train(start, store, tmp_path / "run", "cpu", Silent(), validate)
    end = load_checkpoint(tmp_path / "run")

    def accuracy(of: Checkpoint, classifier: Literal["nearest-mean", "soft-kmeans"]) -> float:
        recipe = replace(of.recipe, method=replace(method, classifier=classifier))
        return evaluate(replace(of, recipe=recipe), store, split="test", tasks=60, seed=0).accuracy

    found = {way: (accuracy(start, way), accuracy(end, way)) for way in ("nearest-mean", "soft-kmeans")}
    print(found)
    assert found["nearest-mean"][1] > found["nearest-mean"][0] + 6
    assert found["soft-kmeans"][1] > found["soft-kmeans"][0]
