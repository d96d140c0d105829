"""The methods that are heads on features, each against its equations; and what the registry promises of all methods."""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tiny import TINY_BACKBONE, TINY_EPISODE, TINY_RECIPE, check_gradient, doubles, initial, tiny_store, tiny_tasks
from trident.engines.learner import Learner
from trident.engines.learners import learners_of
from trident.engines.plain.heads import HeadLearner
from trident.errors import TridentError
from trident.importing import imported
from trident.learning.checkpoint import Checkpoint, load_checkpoint
from trident.learning.run_state import make_optimizer, update
from trident.methods.base import MEAN, HeadOnFeatures, Method
from trident.methods.metric.matching import MatchingNetwork
from trident.methods.metric.protonet import ProtoNet
from trident.methods.metric.simpleshot import SimpleShot
from trident.methods.registry import method_class, method_name, method_paths
from trident.methods.transductive.epnet import EpNet
from trident.methods.transductive.tpn import Tpn
from trident.nn.parameters import Parameters
from trident.recipes.files import recipe_names
from trident.recipes.loading import load_recipe
from trident.tasks.source import ClassSource
from trident.tasks.task import Batch, Task
from trident.weights import weight_names

Array = np.ndarray
Equations = Callable[[Parameters, Array, Array, Array, int], Array]


# The methods' equations for one task, one query and one class at a time: support features (image, feature), their
# labels, and query features -> scores (query, class).


def protonet(parameters: Parameters, support: Array, labels: Array, queries: Array, n_way: int) -> Array:
    """-s ||f(x) - prototype_c||^2"""
    scale, scores = float(parameters["scale"]), np.zeros((len(queries), n_way))
    for i, query in enumerate(queries):
        for c in range(n_way):
            mine = [feature for feature, label in zip(support, labels, strict=True) if label == c]
            prototype = sum(mine) / len(mine)
            scores[i, c] = -scale * np.sum((query - prototype) ** 2)
    return scores


def matching(parameters: Parameters, support: Array, labels: Array, queries: Array, n_way: int) -> Array:
    """ln of the attention that goes to the support images of a class; attention is a softmax of s cos(f(x), f(x_i))."""
    scale, scores = float(parameters["scale"]), np.zeros((len(queries), n_way))
    for i, query in enumerate(queries):
        cosines = [query @ other / np.sqrt((query @ query) * (other @ other)) for other in support]
        weights = np.exp(scale * np.array(cosines))
        for c in range(n_way):
            scores[i, c] = np.log(weights[labels == c].sum() / weights.sum())
    return scores


def simpleshot(normalisation: str) -> Equations:
    def equations(parameters: Parameters, support: Array, labels: Array, queries: Array, n_way: int) -> Array:
        """-10 ||g(x) - mean of g over class c||^2 with g = f, f / ||f||, or (f - m) / ||f - m||"""

        def normalised(feature: Array) -> Array:
            if normalisation == "CL2N":
                feature = feature - parameters[MEAN].numpy()
            return feature if normalisation == "UN" else feature / np.sqrt(np.sum(feature**2))

        scores = np.zeros((len(queries), n_way))
        for i, query in enumerate(queries):
            for c in range(n_way):
                mean = np.mean([normalised(feature) for feature in support[labels == c]], axis=0)
                scores[i, c] = -10 * np.sum((normalised(query) - mean) ** 2)
        return scores

    return equations


NORMALISATIONS: tuple[Literal["UN", "L2N", "CL2N"], ...] = ("UN", "L2N", "CL2N")
HEADS: dict[str, HeadOnFeatures] = {
    "protonet": ProtoNet(),
    "matching": MatchingNetwork(),
    **{f"simpleshot-{n}": SimpleShot(training_classes=5, normalisation=n) for n in NORMALISATIONS},
    "epnet": EpNet(),  # the equations of this one and the next are in test_transductive_heads.py
    "tpn": Tpn(neighbours=4),
}
EQUATIONS: dict[str, Equations] = {
    "protonet": protonet,
    "matching": matching,
    **{f"simpleshot-{n}": simpleshot(n) for n in NORMALISATIONS},
}
heads = pytest.mark.parametrize("name", list(HEADS))
heads_with_equations = pytest.mark.parametrize("name", list(EQUATIONS))
inductive_heads = pytest.mark.parametrize("name", [name for name in HEADS if not HEADS[name].classifies_together])


def learner_of(name: str, batch_norm: str = "transductive") -> tuple[HeadLearner, Parameters]:
    """With random weights and random statistics of training, in float64."""
    model = HEADS[name].model(TINY_BACKBONE, TINY_EPISODE)
    generator = torch.Generator().manual_seed(4)
    shapes = {key: value.shape for key, value in model.initial_running().items()}
    running = {key: 0.05 + torch.rand(s, generator=generator, dtype=torch.float64) for key, s in shapes.items()}
    return HeadLearner(model, batch_norm, running), doubles(initial(model, 1))


def expected_logits(name: str, parameters: Parameters, features: Tensor, task: Task) -> Array:
    n, found = task.n_support, features.numpy()
    labels = task.support_labels.numpy()
    return np.stack(
        [
            EQUATIONS[name](parameters, found[index, :n], labels[index], found[index, n:], task.n_way)
            for index in range(task.n_tasks)
        ]
    )


@heads_with_equations
def test_logits_are_the_equations(name: str) -> None:
    """On random features, with classes of different sizes whose images come in any order."""
    generator = torch.Generator().manual_seed(7)
    features = torch.randn(2, 7 + 5, 24, generator=generator, dtype=torch.float64)
    labels = torch.tensor([[0, 2, 1, 1, 2, 0, 2], [1, 0, 0, 2, 0, 1, 0]])
    task = Task(torch.zeros(2, 12, 1, 1, 1), labels, 3)
    parameters = doubles(HEADS[name].initial(24, generator))
    parameters |= {MEAN: torch.randn(24, generator=generator, dtype=torch.float64)}
    actual = HEADS[name].head(parameters, features, task)
    np.testing.assert_allclose(actual, expected_logits(name, parameters, features, task), rtol=1e-9, atol=1e-6)


@heads_with_equations
@pytest.mark.parametrize("batch_norm", ["transductive", "support", "running"])
def test_predictions_are_made_from_the_backbones_features(name: str, batch_norm: str) -> None:
    learner, parameters = learner_of(name, batch_norm)
    task = tiny_tasks().task
    with torch.no_grad():
        maps = learner.features(parameters, task)
    assert learner.running is not None
    known = parameters | {key: value for key, value in learner.running.items() if key == MEAN}
    expected = torch.from_numpy(expected_logits(name, known, maps, task))
    actual = learner.log_probabilities(parameters, task)
    torch.testing.assert_close(actual, torch.log_softmax(expected, 2), rtol=1e-6, atol=1e-6)


@heads
@settings(max_examples=6)
@given(seed=st.integers(0, 2**31), batch_norm=st.sampled_from(["transductive", "running"]))
def test_no_order_matters(name: str, seed: int, batch_norm: str) -> None:
    """Queries in another order give the predictions in that order; the order of support images changes nothing."""
    learner, parameters = learner_of(name, batch_norm)
    task = tiny_tasks(seed=seed).task
    generator = torch.Generator().manual_seed(seed)
    support = torch.randperm(task.n_support, generator=generator)
    query = torch.randperm(task.n_queries, generator=generator)
    order = torch.cat([support, task.n_support + query])
    other = Task(task.images[:, order], task.support_labels[:, support], task.n_way)
    expected = learner.log_probabilities(parameters, task)[:, query]
    torch.testing.assert_close(learner.log_probabilities(parameters, other), expected, rtol=1e-9, atol=1e-9)


@inductive_heads
def test_with_running_statistics_each_query_is_classified_for_itself(name: str) -> None:
    task = tiny_tasks().task
    images = task.images.clone()
    images[:, task.n_support + 1 :] = 1 - images[:, task.n_support + 1 :]
    others, alone = task.with_images(images), task.with_images(images[:, : task.n_support + 1])
    for batch_norm in ("running", "transductive"):
        learner, parameters = learner_of(name, batch_norm)
        first = learner.log_probabilities(parameters, task)[:, :1]
        same = [
            torch.allclose(learner.log_probabilities(parameters, changed)[:, :1], first, rtol=0, atol=1e-9)
            for changed in (others, alone)
        ]
        assert same == [batch_norm == "running"] * 2


def training_batch(method: HeadOnFeatures) -> Batch:
    """What the method is trained on, in float64."""
    if method.about.trained_on == "episodes":
        return tiny_tasks()
    task, labels = ClassSource(tiny_store(), 12, seed=0).batch([0, 1])
    return Batch(task.with_images(task.images.double() / 255), labels)


@heads
def test_the_gradient_against_finite_differences(name: str) -> None:
    learner, parameters = learner_of(name)
    batch = training_batch(learner.model.method)
    check_gradient(learner, parameters, batch)


def test_simpleshots_mean_feature_is_that_of_the_training_images() -> None:
    learner, parameters = learner_of("simpleshot-CL2N")
    batch = training_batch(learner.model.method)
    found = learner.gradient(parameters, batch)
    with torch.no_grad():
        features = learner.features(parameters, batch.task)
    torch.testing.assert_close(found.statistics[MEAN], features.mean(1))
    assert found.statistics.keys() == learner.model.initial_running().keys()


# All methods.

names = pytest.mark.parametrize("name", list(method_paths()))


def test_the_methods_that_come_along() -> None:
    assert list(method_paths())[:4] == ["trident", "protonet", "matching", "simpleshot"]
    with pytest.raises(TridentError, match="no method is called 'protonets': did you mean 'protonet'"):
        method_class("protonets")


@names
def test_every_name_in_the_registry_is_a_methods(name: str) -> None:
    method = method_class(name)()
    assert isinstance(method, Method)
    assert method_name(method) == name
    assert method.about.title and method.about.paper
    assert type(method).__doc__ != Method.__doc__ and len(str(type(method).__doc__)) > 100
    plain = imported(learners_of(type(method))["plain"])(method.model(TINY_BACKBONE, TINY_EPISODE))
    for member in ("log_probabilities", "gradient"):
        assert callable(getattr(plain, member)) and hasattr(Learner, member)


@names
def test_every_setting_of_a_method_has_a_help_text(name: str) -> None:
    entries = dataclasses.fields(method_class(name))
    assert entries
    for entry in entries:
        assert len(entry.metadata["help"]) > 10, entry.name
        assert isinstance(entry.metadata["after_training"], bool), entry.name
        assert entry.default is not dataclasses.MISSING, entry.name


def kinds(parameters: Parameters) -> list[tuple[str, Any, Any]]:
    """Names in their order, shapes and types."""
    return [(key, value.shape, value.dtype) for key, value in parameters.items()]


@pytest.mark.parametrize("name", recipe_names())
def test_shapes_are_those_of_random_weights(name: str) -> None:
    recipe = load_recipe(name)
    assert kinds(recipe.shapes()) == kinds(recipe.initial(0))
    assert kinds(recipe.running_shapes()) == kinds(recipe.model.initial_running())
    assert all(value.is_meta for value in (recipe.shapes() | recipe.running_shapes()).values())


def test_loading_weights_draws_no_random_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: Any, **options: Any) -> Tensor:
        raise AssertionError("a random number was drawn")

    before = torch.get_rng_state()
    for draw in ("uniform_", "normal_", "random_"):
        monkeypatch.setattr(Tensor, draw, refuse)
    for draw in ("rand", "randn", "randint", "randperm"):
        monkeypatch.setattr(torch, draw, refuse)
    for name in weight_names():
        checkpoint = load_checkpoint(name)
        assert kinds(checkpoint.recipe.shapes()) == kinds(checkpoint.parameters)
    assert torch.equal(torch.get_rng_state(), before)
    with pytest.raises(AssertionError, match="random number"):
        load_recipe("glyphs").initial(0)


def test_another_episode_changes_nothing_about_a_head() -> None:
    """Heads know nothing of the shape of a task."""
    for method in HEADS.values():
        assert method.any_way and not method.positional
        other = method.model(TINY_BACKBONE, replace(TINY_EPISODE, n_way=4, n_query=9))
        assert kinds(initial(other)) == kinds(initial(method.model(TINY_BACKBONE, TINY_EPISODE)))


@dataclass(frozen=True)
class CentredProtoNet(ProtoNet):
    """Prototypes of features that are centred on the training features, trained on tasks."""

    def initial_statistics(self, n_features: int) -> Parameters:
        return {"centre": torch.zeros(n_features)}

    def statistics(self, features: Tensor) -> Parameters:
        return {"centre": features.mean(1)}

    def head(self, parameters: Parameters, features: Tensor, task: Task) -> Tensor:
        return super().head(parameters, F.normalize(features - parameters["centre"], dim=2), task)


def test_a_head_trained_on_tasks_may_use_statistics_of_training() -> None:
    model = CentredProtoNet().model(TINY_BACKBONE, TINY_EPISODE)
    found = HeadLearner(model).gradient(doubles(initial(model)), tiny_tasks())
    assert all(bool(value.isfinite().all()) for value in found.gradient.values())
    assert found.statistics["centre"].shape == (2, TINY_BACKBONE.n_features)


def test_the_backbone_can_learn_more_slowly_or_not_at_all() -> None:
    own, of_backbone = "scale", next(iter(TINY_BACKBONE.names))
    for share in (0.0, 0.25):
        training = replace(TINY_RECIPE.training, backbone_rate=share, clip_norm=None)
        parameters = {key: torch.ones(3, requires_grad=True) for key in (own, of_backbone)}
        optimizer = make_optimizer(parameters, Checkpoint(replace(TINY_RECIPE, training=training), {}, {}, 0))
        update(parameters, optimizer, {key: torch.ones(3) for key in parameters}, 1.0, 1, 0.1, training)
        torch.testing.assert_close(parameters[own].detach(), torch.full((3,), 0.9))
        torch.testing.assert_close(parameters[of_backbone].detach(), torch.full((3,), 1 - 0.1 * share))


def test_weight_decay_shrinks_weights_that_have_no_gradient() -> None:
    training = replace(TINY_RECIPE.training, weight_decay=0.5, clip_norm=None)
    start = Checkpoint(replace(TINY_RECIPE, training=training), {}, {}, 0)
    parameters = {"x": torch.ones(3, requires_grad=True)}
    optimizer = make_optimizer(parameters, start)
    update(parameters, optimizer, {"x": torch.zeros(3)}, 0.0, 2, 0.1, training)
    torch.testing.assert_close(parameters["x"].detach(), torch.full((3,), 0.95))
