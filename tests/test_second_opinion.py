"""The library against an independent implementation with torch's own layers, for every recipe and some variants."""

from dataclasses import replace

import pytest
import torch

from conftest import doubles
from trident.bench.made_up import made_up_tasks
from trident.bench.plain_loop import PlainLoop
from trident.engines.execution import Execution, make_learner
from trident.errors import TridentError
from trident.learning.inner_loop import TaskBatch
from trident.measuring.prediction import predict
from trident.methods.trident.network import TaskImages
from trident.recipes import load_recipe, recipe_names
from trident.settings import Recipe

COVERED = [name for name in recipe_names() if not name.endswith(("-set", "-protonet"))]  # by the plain loop
VARIANTS = (["model.attfex=off"], ["model.attention_scale=outside"], ["adaptation.order=first"])


def small(name: str, *settings: str) -> Recipe:
    """At a quarter of the size and with two inner steps; the architecture is otherwise the recipe's."""
    size = ["adaptation.steps=2", "model.image_size=21", "model.channels=8", "episode.n_query=3"]
    recipe = load_recipe(name, [*size, *settings])
    return replace(recipe, model=replace(recipe.model, attfex_width_m=12, label_latents=9, semantic_latents=7))


def in_doubles(tasks: TaskBatch) -> TaskBatch:
    images = TaskImages(tasks.images.stored.double() / 255, tasks.support_labels)
    support = tuple(type(noise)(*(part.double() for part in noise)) for noise in tasks.support_noise)
    query = tuple(type(noise)(*(part.double() for part in noise)) for noise in tasks.query_noise)
    return tasks._replace(images=images, support_noise=support, query_noise=query)


@pytest.mark.parametrize(
    ("name", "settings"), [*((name, []) for name in COVERED), *(("mini-5w1s", variant) for variant in VARIANTS)]
)
def test_losses_meta_gradients_and_predictions_agree(name: str, settings: list[str]) -> None:
    recipe = small(name, *settings)
    learner = make_learner(recipe, Execution())
    parameters, tasks = doubles(learner.model.initial(0)), in_doubles(made_up_tasks(recipe, 2))

    actual = learner.meta_gradient(parameters, tasks)
    gradient, losses = PlainLoop(recipe).meta_gradient(parameters, tasks)
    torch.testing.assert_close(actual.loss.total, losses)
    assert gradient.keys() == parameters.keys()
    for key, value in gradient.items():
        torch.testing.assert_close(actual.gradient[key], value, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(predict(learner, parameters, tasks), PlainLoop(recipe).predict(parameters, tasks))


def test_the_memory_layout_changes_nothing_but_speed() -> None:
    recipe = small("mini-5w5s")
    parameters = doubles(make_learner(recipe, Execution()).model.initial(0))
    tasks = in_doubles(made_up_tasks(recipe, 1))
    one, other = PlainLoop(recipe), PlainLoop(recipe, torch.channels_last)
    torch.testing.assert_close(one.predict(parameters, tasks), other.predict(parameters, tasks))
    torch.testing.assert_close(one.meta_gradient(parameters, tasks), other.meta_gradient(parameters, tasks))


@pytest.mark.parametrize(
    "setting", ["adaptation.optimizer=adam", "protocol.batch_norm=support", "protocol.latents=average"]
)
def test_what_the_plain_loop_does_not_cover_is_told(setting: str) -> None:
    with pytest.raises(TridentError, match=f"{setting.split('=')[0]}.*--no-yardstick"):
        PlainLoop(load_recipe("mini-5w1s", [setting]))


def test_predictions_on_large_images_agree() -> None:
    """In float32 and full size, where the fastest kernels take over; the truth is the plain loop in float64."""
    recipe = load_recipe("mini-5w1s", ["adaptation.steps=2"])
    learner = make_learner(recipe, Execution())
    parameters, tasks = learner.model.initial(0), made_up_tasks(recipe, 1)
    expected = PlainLoop(recipe).predict(doubles(parameters), in_doubles(tasks)).exp()
    actual = predict(learner, parameters, tasks).exp().double()
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-3)
