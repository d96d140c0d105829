"""AttFEX without places: no order of a task's images matters, and tasks of any size go in."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from finite_differences import assert_exact
from tiny import TINY_EPISODE, doubles, initial, tiny_learner, tiny_tasks
from trident.engines.plain.inner_loop import InnerLoopLearner
from trident.measuring.prediction import predict
from trident.methods.trident.network import Network
from trident.nn.attfex import TaskFeatures
from trident.nn.parameters import Parameters, for_each_task
from trident.settings import EpisodeSpec
from trident.tasks.task import Task


def set_learner(inner_rate: float = 1e-2, **method: Any) -> InnerLoopLearner:
    return tiny_learner(attfex="set", inner_rate=inner_rate, **method)


def for_tasks_of(learner: InnerLoopLearner, episode: EpisodeSpec) -> InnerLoopLearner:
    """The same method for tasks of another shape."""
    assert isinstance(learner.model, Network)
    return replace(learner, model=replace(learner.model, episode=episode))


def reordered(task: Task, support: Tensor, query: Tensor) -> Task:
    """The same tasks with their images, labels and noise in another order."""
    orders = {"support": support, "query": query}
    return Task(
        task.images[:, torch.cat([support, task.n_support + query])],
        task.support_labels[:, support],
        task.n_way,
        {name: values[:, orders[name.split("/")[0]]] for name, values in task.noise.items()},
    )


def predictions(learner: InnerLoopLearner, parameters: Parameters, task: Task) -> Tensor:
    return predict(learner, parameters, task).exp()


@pytest.mark.parametrize("classifier_start", ["learned", "prototypes"])
@settings(max_examples=12)
@given(
    seed=st.integers(0, 2**31),
    residual=st.booleans(),
    refinements=st.integers(0, 2),
    unit=st.booleans(),
    whole_task=st.booleans(),
)
def test_no_order_matters(
    classifier_start: str, seed: int, residual: bool, refinements: int, unit: bool, whole_task: bool
) -> None:
    """Queries in another order give the predictions in that order; support images in another order, within and across
    classes, change nothing. In float64, and in float32 to 1e-4."""
    unit = unit and classifier_start == "prototypes"
    learner = set_learner(
        attfex_residual=residual,
        classifier_start=classifier_start,
        refinements=refinements if classifier_start == "prototypes" else 0,
        classifier_features="unit" if unit else "plain",
        semantic_batch_norm="task" if whole_task else "set",
        inner_rate=1e-4,  # large steps blow rounding up, and it is not they that are tried here
    )
    task = tiny_tasks(seed=seed).task
    generator = torch.Generator().manual_seed(seed)
    query = torch.randperm(TINY_EPISODE.n_queries, generator=generator)
    support = torch.randperm(TINY_EPISODE.n_support, generator=generator)
    parameters = initial(learner.model, seed % 1000)
    plain = predictions(learner, doubles(parameters), task)
    other = predictions(learner, doubles(parameters), reordered(task, support, query))
    torch.testing.assert_close(other, plain[:, query], rtol=1e-9, atol=1e-9)
    noise = {name: values.float() for name, values in task.noise.items()}
    single = Task(task.images.float(), task.support_labels, task.n_way, noise)
    plain = predictions(learner, parameters, single)
    other = predictions(learner, parameters, reordered(single, support, query))
    torch.testing.assert_close(other, plain[:, query], rtol=0, atol=1e-4)


def test_the_queries_do_matter() -> None:
    """It is transductive: another query changes what is said of the rest, by AttFEX and not by batch norm alone."""
    model, task = set_learner().model, tiny_tasks().task
    assert isinstance(model, Network) and model.attfex is not None
    features = torch.rand(2, TINY_EPISODE.n_images, 4, 4, model.backbone.channels, dtype=torch.float64)
    changed = features.clone()
    changed[:, -1] *= 2
    own = for_each_task(doubles(initial(model)), 2)
    one, other = (
        model.attfex(own, TaskFeatures(x, task.support_labels, TINY_EPISODE.n_way)) for x in (features, changed)
    )
    assert not torch.allclose(one, other)


@pytest.mark.parametrize("n_query", [1, 2, 37, 100])
def test_one_set_of_weights_takes_any_number_of_queries(n_query: int) -> None:
    learner = set_learner()
    parameters = doubles(initial(learner.model))
    episode = replace(TINY_EPISODE, n_query=n_query)
    other = for_tasks_of(learner, episode)
    assert {key: value.shape for key, value in initial(other.model).items()} == {
        key: value.shape for key, value in parameters.items()
    }
    found = predictions(other, parameters, tiny_tasks(1, episode=episode).task)
    assert found.shape == (1, episode.n_queries, episode.n_way)
    assert bool(found.isfinite().all())


def test_with_prototypes_any_number_of_classes_and_shots() -> None:
    learner = set_learner(classifier_start="prototypes")
    parameters = doubles(initial(learner.model))
    for episode in (EpisodeSpec(2, 1, 1), EpisodeSpec(7, 3, 2)):
        found = predictions(for_tasks_of(learner, episode), parameters, tiny_tasks(1, episode=episode).task)
        assert found.shape[2] == episode.n_way


@pytest.mark.parametrize("refinements", [0, 2])
def test_meta_gradient_against_finite_differences(refinements: int) -> None:
    start: dict[str, Any] = {"classifier_start": "prototypes", "refinements": refinements} if refinements else {}
    learner = set_learner(**start)
    assert_exact(learner, doubles(initial(learner.model, 1)), tiny_tasks())
