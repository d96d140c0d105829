"""Predictions by short cuts against the plain way: an image is encoded no more often than it must be."""

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

import trident.nn.conv4 as conv4
from tiny import TINY_METHOD, TINY_RECIPE, tiny_store
from trident.engines.execution import Execution
from trident.engines.learner import Encodes, Learner
from trident.engines.plain.inner_loop import InnerLoopLearner
from trident.measuring.prediction import encode_support, predict, predict_one_by_one
from trident.measuring.subject import TrainedModel, default_chunk
from trident.methods.base import Method
from trident.methods.inner_loop.base import Inputs
from trident.methods.metric.matching import MatchingNetwork
from trident.methods.metric.protonet import ProtoNet
from trident.methods.metric.simpleshot import SimpleShot
from trident.methods.trident.network import Trident
from trident.nn.parameters import Parameters
from trident.recipes.loading import load_recipe
from trident.settings import Protocol, Views
from trident.tasks.source import TaskSource
from trident.tasks.task import queries_alone

ALL = Views(mirrored=True, corners=True)

TRIDENT: dict[str, dict[str, Any]] = {
    "set": {"attfex": "set"},
    "set-whole-task": {"attfex": "set", "semantic_batch_norm": "task"},
    "off-unit": {"attfex": "off", "classifier_features": "unit"},
    "off-learned": {"attfex": "off", "classifier_start": "learned"},
    "positional": {"attfex": "positional"},
}
HEADS: dict[str, Method] = {
    "protonet": ProtoNet(),
    "matching": MatchingNetwork(),
    "simpleshot": SimpleShot(training_classes=5),
}
ways = pytest.mark.parametrize("way", [*TRIDENT, *HEADS])
in_trident = pytest.mark.parametrize("way", list(TRIDENT))


def method_of(way: str, **settings: Any) -> Method:
    """Settings are TRIDENT's; other methods have none of them."""
    if way in HEADS:
        return HEADS[way]
    usual: dict[str, Any] = {"classifier_start": "prototypes", "log_var_bound": 1.0, "inner_steps": 0}
    chosen = usual | settings | TRIDENT[way]
    if chosen["classifier_start"] == "learned":
        chosen["refinements"] = 0  # it has no prototypes to refine
    return replace(TINY_METHOD, **chosen)


@dataclass(frozen=True)
class Given:
    learner: Learner
    parameters: Parameters
    source: TaskSource


def given(way: str, batch_norm: str, latents: str = "average", **settings: Any) -> Given:
    """Untrained weights with random statistics, and tasks with several draws of noise."""
    protocol = Protocol(batch_norm=batch_norm, latents=latents, latent_samples=3)  # type: ignore[arg-type]
    recipe = replace(TINY_RECIPE, method=method_of(way, **settings), protocol=protocol)
    generator = torch.Generator().manual_seed(4)
    shapes = {key: value.shape for key, value in recipe.model.initial_running().items()}
    running = {key: 0.02 + 0.1 * torch.rand(shape, generator=generator) for key, shape in shapes.items()}
    model = TrainedModel(recipe, recipe.initial(3), running)
    source = model.source(tiny_store(), "test", 1, "cpu")
    return Given(model.learner(Execution()), model.parameters, source)


@pytest.mark.parametrize(
    ("way", "refinements"), [*((way, 2) for way in TRIDENT), *((way, 0) for way in ("set", *HEADS))]
)
@pytest.mark.parametrize("batch_norm", ["running", "transductive"])
def test_queries_one_by_one_are_tasks_of_one_query(way: str, batch_norm: str, refinements: int) -> None:
    of = given(way, batch_norm, refinements=refinements)
    task = of.source.batch(range(2)).task
    found = predict_one_by_one(of.learner, of.parameters, task, at_once=4, views=ALL)
    chosen = [(0, 0), (0, 4), (1, task.n_queries - 1)]  # of a full batch and of the last one
    near = 0.01 * float(found.std(1).mean())  # little, against how far untrained weights tell queries apart
    assert near > 3e-6
    fill = of.learner.model.method.positional
    for index, query in chosen:
        alone = queries_alone(task, index, [query], fill)
        expected = predict(of.learner, of.parameters, alone, views=ALL)[0, 0]
        torch.testing.assert_close(found[index, query], expected, rtol=0, atol=near)


@ways
@pytest.mark.parametrize("batch_norm", ["running", "transductive"])
def test_a_support_set_encoded_before_changes_nothing(way: str, batch_norm: str) -> None:
    of = given(way, batch_norm, refinements=1)
    task = of.source.batch([3]).task
    support = encode_support(of.learner, of.parameters, task, ALL)
    method = of.learner.model.method
    by_itself = batch_norm == "running" and not method.positional
    assert isinstance(of.learner, Encodes)
    assert (support is not None) == of.learner.encodes_alone == by_itself
    if support is None:
        return
    expected = predict_one_by_one(of.learner, of.parameters, task, 4, ALL)
    queries = task.with_images(task.images[:, task.queries])
    torch.testing.assert_close(predict_one_by_one(of.learner, of.parameters, queries, 4, ALL, support), expected)
    if not isinstance(method, Trident) or method.classifier_start == "prototypes":
        # It is what is gone by.
        other = [{name: x.flip(1) for name, x in encodings.items()} for encodings in support]
        changed = predict_one_by_one(of.learner, of.parameters, queries, 4, ALL, other)
        assert not torch.allclose(changed, expected, atol=1e-4)


@pytest.mark.parametrize("steps", [0, 2])
@pytest.mark.parametrize("batch_norm", ["running", "transductive", "support"])
@in_trident
def test_predictions_are_what_the_adapted_network_says(way: str, batch_norm: str, steps: int) -> None:
    of = given(way, batch_norm, inner_steps=steps, refinements=1)
    learner = of.learner
    assert isinstance(learner, InnerLoopLearner)
    batch = of.source.batch(range(2))
    task, statistics = batch.task, learner.statistics(batch.task)
    adapted, _ = learner.adapt(of.parameters, task)[-1]
    with torch.no_grad():
        inputs = [Inputs(task, statistics, labels=batch.labels, draw=draw) for draw in range(3)]
        draws = [learner.model.loss(adapted, each).logits for each in inputs]
    mean = torch.stack([torch.softmax(logits, -1) for logits in draws]).mean(0)
    near = 0.01 * float(mean.std(1).mean())
    torch.testing.assert_close(predict(learner, of.parameters, task).exp(), mean, rtol=0, atol=near)


def images_encoded(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    counts = {"backbone": 0, "semantic_encoder": 0}
    encode = conv4.Conv4.__call__

    def counted(encoder: conv4.Conv4, parameters: Any, images: torch.Tensor, statistics: Any) -> Any:
        counts[encoder.name] += images.shape[0] * images.shape[1]
        return encode(encoder, parameters, images, statistics)

    monkeypatch.setattr(conv4.Conv4, "__call__", counted)
    return counts


@pytest.mark.parametrize("way", ["set", "set-whole-task", "matching"])
def test_each_image_is_encoded_once(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    n_images = TINY_RECIPE.episode.n_images
    once = {"backbone": n_images, "semantic_encoder": 0 if way == "matching" else n_images}
    of = given(way, "running")
    task = of.source.batch(range(1)).task
    counts = images_encoded(monkeypatch)
    predict_one_by_one(of.learner, of.parameters, task, at_once=2)
    assert counts == once
    of = given(way, "transductive", latents="mean")
    counts = images_encoded(monkeypatch)
    predict(of.learner, of.parameters, of.source.batch(range(1)).task)
    assert counts == once


@pytest.mark.parametrize(("unlabelled", "chunk"), [(0, 16), (11, 16), (12, 15), (100, 3), (400, 1)])
def test_large_tasks_are_computed_in_smaller_chunks_on_a_gpu(unlabelled: int, chunk: int) -> None:
    recipe = load_recipe("mini-5w1s", [f"episode.n_unlabelled={unlabelled}"])
    assert default_chunk(recipe, "cuda") == chunk
    assert default_chunk(load_recipe("features-trident", ["episode.n_unlabelled=100"]), "cuda") == 128
