"""The library against an independent implementation with torch's own layers, for every recipe and some variants."""

from dataclasses import replace

import pytest
import torch

from studies.speed.made_up import made_up_tasks
from studies.speed.plain_loop import PlainLoop
from tiny import doubles
from trident.engines.execution import Execution, make_learner
from trident.errors import TridentError
from trident.measuring.prediction import predict
from trident.methods.trident.network import Trident
from trident.recipes.files import recipe_names
from trident.recipes.loading import load_recipe
from trident.recipes.recipe import Recipe
from trident.tasks.task import Batch

TRIDENT = [name for name in recipe_names() if isinstance(load_recipe(name).method, Trident)]
COVERED = [name for name in TRIDENT if "-set" not in name]  # by the plain loop
VARIANTS = (["method.attfex=off"], ["method.attention_scale=outside"], ["method.inner_order=first"])


def test_the_recipes_of_the_paper_are_covered() -> None:
    assert set(COVERED) == {"mini-5w1s", "mini-5w5s", "tiered-5w1s", "tiered-5w5s", "glyphs"}


def small(name: str, *settings: str) -> Recipe:
    """At a quarter of the size and with two inner steps; the architecture is otherwise the recipe's."""
    size = ["method.inner_steps=2", "backbone.image_size=21", "backbone.channels=8", "episode.n_query=3"]
    latents = ["method.attfex_width_m=12", "method.label_latents=9", "method.semantic_latents=7"]
    return load_recipe(name, [*size, *latents, *settings])


def in_doubles(batch: Batch) -> Batch:
    noise = {name: values.double() for name, values in batch.task.noise.items()}
    return batch._replace(task=replace(batch.task, images=batch.task.images.double() / 255, noise=noise))


@pytest.mark.parametrize(
    ("name", "settings"), [*((name, []) for name in COVERED), *(("mini-5w1s", variant) for variant in VARIANTS)]
)
def test_losses_meta_gradients_and_predictions_agree(name: str, settings: list[str]) -> None:
    recipe = small(name, *settings)
    learner = make_learner(recipe, Execution())
    parameters, batch = doubles(recipe.initial(0)), in_doubles(made_up_tasks(recipe, 2))

    actual = learner.gradient(parameters, batch)
    gradient, losses = PlainLoop(recipe).meta_gradient(parameters, batch)
    torch.testing.assert_close(actual.losses["total"], losses)
    assert gradient.keys() == parameters.keys()
    for key, value in gradient.items():
        torch.testing.assert_close(actual.gradient[key], value, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(predict(learner, parameters, batch.task), PlainLoop(recipe).predict(parameters, batch))


def test_the_memory_layout_changes_nothing_but_speed() -> None:
    recipe = small("mini-5w5s")
    parameters, batch = doubles(recipe.initial(0)), in_doubles(made_up_tasks(recipe, 1))
    one, other = PlainLoop(recipe), PlainLoop(recipe, torch.channels_last)
    torch.testing.assert_close(one.predict(parameters, batch), other.predict(parameters, batch))
    torch.testing.assert_close(one.meta_gradient(parameters, batch), other.meta_gradient(parameters, batch))


@pytest.mark.parametrize(
    "setting",
    [
        "method.inner_optimizer=adam",
        "protocol.batch_norm=support",
        "protocol.latents=average",
        "method.semantic_batch_norm=task",
        "method.attfex=set",
        "views.mirrored=true",
        "views.shifted=true",
        "method.label_reads_semantic=false",
        "method.label_learns_to_reconstruct=false",
        "method.decorrelation_weight=1",
        "method.unlabelled_weight=1",
    ],
)
def test_what_the_plain_loop_does_not_cover_is_told(setting: str) -> None:
    with pytest.raises(TridentError, match=f"{setting.split('=')[0]}.*--no-yardstick"):
        PlainLoop(load_recipe("mini-5w1s", [setting]))


def test_the_plain_loop_knows_no_other_method() -> None:
    with pytest.raises(TridentError, match=r"TRIDENT only, not Matching Networks.*--no-yardstick"):
        PlainLoop(load_recipe("glyphs-matching"))


@pytest.mark.soak
def test_predictions_on_large_images_agree() -> None:
    """In float32 and full size, where the fastest kernels take over; the truth is the plain loop in float64."""
    recipe = load_recipe("mini-5w1s", ["method.inner_steps=2"])
    learner = make_learner(recipe, Execution())
    parameters, batch = recipe.initial(0), made_up_tasks(recipe, 1)
    expected = PlainLoop(recipe).predict(doubles(parameters), in_doubles(batch)).exp()
    actual = predict(learner, parameters, batch.task).exp().double()
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-3)
