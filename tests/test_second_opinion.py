"""The library against an independent implementation with torch's own layers, for every recipe of the paper."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from conftest import doubles
from trident.adapt import Learner, TaskBatch
from trident.evaluate import predict
from trident.model import Trident
from trident.recipes import load_recipe, recipe_names

sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))
from meta_iteration import random_tasks
from plain_loop import plain_meta_gradient, plain_predict


def in_doubles(tasks: TaskBatch) -> TaskBatch:
    images = tasks.images._replace(pixels=tasks.images.pixels.double(), patches=tasks.images.patches.double())
    support = tuple(type(noise)(*(part.double() for part in noise)) for noise in tasks.support_noise)
    query = tuple(type(noise)(*(part.double() for part in noise)) for noise in tasks.query_noise)
    return tasks._replace(images=images, support_noise=support, query_noise=query)


@pytest.mark.parametrize("name", [name for name in recipe_names() if name != "glyphs"])
def test_losses_and_meta_gradients_agree(name: str) -> None:
    """At a quarter of the size and with two inner steps, in float64; the architecture is otherwise the recipe's."""
    recipe = load_recipe(name, ["adaptation.steps=2", "model.image_size=21", "model.channels=8", "episode.n_query=3"])
    recipe = replace(recipe, model=replace(recipe.model, attfex_width_m=12, label_latents=9, semantic_latents=7))
    learner = Learner(Trident(recipe.model, recipe.episode), recipe.objective, recipe.adaptation)
    parameters = doubles(learner.model.initial(0))
    tasks = in_doubles(random_tasks(recipe, 2))

    actual = learner.meta_gradient(parameters, tasks)
    gradient, losses = plain_meta_gradient(parameters, tasks, recipe)
    torch.testing.assert_close(actual.loss.total, losses)
    for key, value in gradient.items():
        torch.testing.assert_close(actual.gradient[key], value, rtol=1e-6, atol=1e-6)

    probabilities = predict(learner, parameters, tasks).exp()
    torch.testing.assert_close(probabilities, plain_predict(parameters, tasks, recipe).exp(), rtol=0, atol=1e-9)


def test_predictions_on_large_images_agree() -> None:
    """In float32 and full size, where the fastest kernels take over; the truth is the plain loop in float64."""
    recipe = load_recipe("mini-5w1s", ["adaptation.steps=2"])
    learner = Learner(Trident(recipe.model, recipe.episode), recipe.objective, recipe.adaptation)
    parameters, tasks = learner.model.initial(0), random_tasks(recipe, 1)
    expected = plain_predict(doubles(parameters), in_doubles(tasks), recipe).exp()
    actual = predict(learner, parameters, tasks).exp().double()
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-3)
