"""Fits the temperatures for labelling on validation tasks: for many pictures together, a few, and single ones."""

from collections.abc import Callable
from dataclasses import replace
from typing import Unpack

from trident.data.store import ImageStore
from trident.labelling.labeller import recipe_for
from trident.learning.checkpoint import Checkpoint, Temperatures
from trident.measuring.calibration import fit_temperature
from trident.measuring.evaluate import Sample, evaluate
from trident.recipes.recipe import Recipe

FEW_QUERIES = 2  # for each class: too few to learn from, see `recipe_for`


def fit_temperatures(
    checkpoint: Checkpoint,
    store: ImageStore,
    progress: Callable[[int, int, str], None] | None = None,
    **sample: Unpack[Sample],
) -> Temperatures:
    recipe = checkpoint.recipe

    def fitted(recipe: Recipe, what: str) -> float:
        def report(done: int, total: int) -> None:
            if progress:
                progress(done, total, f"validation tasks, {what}")

        result = evaluate(replace(checkpoint, recipe=recipe), store, progress=report, **sample)
        return round(fit_temperature(result.predictions), 3)

    recipe = replace(recipe, episode=replace(recipe.episode, n_unlabelled=0, distractors=0))
    many = fitted(recipe, "many queries together")
    if recipe.method.positional or recipe.method.inner_steps:
        # Positional weights cannot label pictures. With inner steps, single queries would take too long.
        return Temperatures(many, many, many)
    n_way = recipe.episode.n_way
    few = recipe_for(recipe, FEW_QUERIES * n_way, n_way)
    few = replace(few, episode=replace(few.episode, n_query=FEW_QUERIES))
    one = recipe_for(recipe, 1, n_way)
    one = replace(one, protocol=replace(one.protocol, queries_at_once="one"))
    return Temperatures(many, fitted(few, "few queries together"), fitted(one, "queries alone"))
