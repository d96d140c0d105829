"""AttFEX without places: no order of a task's images matters, and tasks of any size go in."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from conftest import TINY_EPISODE, doubles, tiny_learner, tiny_tasks
from test_adapt import assert_exact
from trident.learning.inner_loop import Learner, TaskBatch
from trident.measuring.prediction import predict
from trident.methods.trident.network import Noise, TaskImages
from trident.nn.attfex import TaskFeatures
from trident.nn.parameters import Parameters
from trident.settings import AdaptationSettings, EpisodeSpec

POOLINGS = ("seeds", "moments", "classes")
poolings = pytest.mark.parametrize("pooling", POOLINGS)


def set_learner(pooling: str, steps: int = 2, refinements: int = 0, rate: float = 1e-2, **model: Any) -> Learner:
    adaptation = AdaptationSettings("sgd", rate, steps, refinements=refinements)
    return tiny_learner(adaptation, attfex="set", attfex_pooling=pooling, **model)


def reordered(tasks: TaskBatch, support: Tensor, query: Tensor) -> TaskBatch:
    """The same tasks with their images, labels and noise in another order."""
    n = tasks.images.n_support
    order = torch.cat([support, n + query])
    return TaskBatch(
        TaskImages(tasks.images.stored[:, order], tasks.support_labels[:, support]),
        tasks.query_labels[:, query],
        tuple(Noise(*(part[:, support] for part in noise)) for noise in tasks.support_noise),
        tuple(Noise(*(part[:, query] for part in noise)) for noise in tasks.query_noise),
    )


def predictions(learner: Learner, parameters: Parameters, tasks: TaskBatch) -> Tensor:
    return predict(learner, parameters, tasks).exp()


@poolings
@pytest.mark.parametrize("classifier_start", ["learned", "prototypes"])
@settings(max_examples=8, deadline=None)
@given(seed=st.integers(0, 2**31), residual=st.booleans(), refinements=st.integers(0, 2), unit=st.booleans())
def test_no_order_matters(
    pooling: str, classifier_start: str, seed: int, residual: bool, refinements: int, unit: bool
) -> None:
    """Queries in another order give the predictions in that order; support images in another order, within and across
    classes, change nothing. In float64, and in float32 to 1e-4."""
    unit = unit and classifier_start == "prototypes"
    episode = EpisodeSpec(3, 2, 2)
    learner = set_learner(
        pooling,
        attfex_residual=residual,
        classifier_start=classifier_start,
        refinements=refinements if classifier_start == "prototypes" else 0,
        classifier_features="unit" if unit else "plain",
        rate=1e-4,  # large steps blow rounding up, and it is not they that are tried here
    )
    learner = replace(learner, model=replace(learner.model, episode=episode))
    tasks = tiny_tasks(seed=seed, episode=episode)
    generator = torch.Generator().manual_seed(seed)
    query = torch.randperm(episode.n_queries, generator=generator)
    support = torch.randperm(episode.n_support, generator=generator)
    parameters = learner.model.initial(seed % 1000)
    plain = predictions(learner, doubles(parameters), tasks)
    other = predictions(learner, doubles(parameters), reordered(tasks, support, query))
    torch.testing.assert_close(other, plain[:, query], rtol=1e-9, atol=1e-9)
    single = TaskBatch(
        TaskImages(tasks.images.stored.float(), tasks.support_labels),
        tasks.query_labels,
        tuple(Noise(*(part.float() for part in noise)) for noise in tasks.support_noise),
        tuple(Noise(*(part.float() for part in noise)) for noise in tasks.query_noise),
    )
    plain = predictions(learner, parameters, single)
    other = predictions(learner, parameters, reordered(single, support, query))
    torch.testing.assert_close(other, plain[:, query], rtol=0, atol=1e-4)


@poolings
def test_the_queries_do_matter(pooling: str) -> None:
    """It is transductive: another query changes what is said of the rest, by AttFEX and not by batch norm alone."""
    learner, tasks = set_learner(pooling), tiny_tasks()
    parameters = doubles(learner.model.initial(0))
    channels = learner.model.settings.channels
    features = torch.rand(2, TINY_EPISODE.n_images, 4, 4, channels, dtype=torch.float64)
    changed = features.clone()
    changed[:, -1] *= 2
    own = {key: value.expand(2, *value.shape) for key, value in parameters.items()}
    attfex = learner.model.attfex
    assert attfex is not None
    one, other = (attfex(own, TaskFeatures(x, tasks.support_labels, TINY_EPISODE.n_way)) for x in (features, changed))
    assert not torch.allclose(one, other)


@poolings
@pytest.mark.parametrize("n_query", [1, 2, 37, 100])
def test_one_set_of_weights_takes_any_number_of_queries(pooling: str, n_query: int) -> None:
    learner = set_learner(pooling)
    parameters = doubles(learner.model.initial(0))
    episode = replace(TINY_EPISODE, n_query=n_query)
    other = replace(learner, model=replace(learner.model, episode=episode))
    assert {key: value.shape for key, value in other.model.initial(0).items()} == {
        key: value.shape for key, value in parameters.items()
    }
    found = predictions(other, parameters, tiny_tasks(1, episode=episode))
    assert found.shape == (1, episode.n_queries, episode.n_way)
    assert bool(found.isfinite().all())


@poolings
def test_with_prototypes_any_number_of_classes_and_shots(pooling: str) -> None:
    learner = set_learner(pooling, classifier_start="prototypes")
    parameters = doubles(learner.model.initial(0))
    for episode in (EpisodeSpec(2, 1, 1), EpisodeSpec(7, 3, 2)):
        other = replace(learner, model=replace(learner.model, episode=episode))
        assert predictions(other, parameters, tiny_tasks(1, episode=episode)).shape[2] == episode.n_way


@pytest.mark.parametrize(("pooling", "refinements"), [("seeds", 0), ("moments", 0), ("classes", 0), ("seeds", 2)])
def test_meta_gradient_against_finite_differences(pooling: str, refinements: int) -> None:
    start: dict[str, Any] = {"classifier_start": "prototypes", "refinements": refinements} if refinements else {}
    learner, tasks = set_learner(pooling, steps=2, **start), tiny_tasks()
    assert_exact(learner, doubles(learner.model.initial(1)), tasks, directions=4)
