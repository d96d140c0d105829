"""Stages: a recipe with `training.start_from = "recipe:NAME"` starts from the weights that recipe NAME makes.

The first stage is an ordinary run in the folder `start` of the run, and may have a first stage of its own.
"""

from pathlib import Path

from trident.recipes.loading import load_recipe
from trident.recipes.recipe import Recipe
from trident.settings import require

PREFIX = "recipe:"
FOLDER = "start"
MOST_STAGES = 10


def first_stage(recipe: Recipe) -> Recipe | None:
    """The recipe to be trained first, if there is one."""
    start = recipe.training.start_from
    return load_recipe(start.removeprefix(PREFIX)) if start is not None and start.startswith(PREFIX) else None


def stages_of(recipe: Recipe, out: Path) -> list[tuple[Recipe, Path]]:
    """All stages with their folders, the first one first; the last one is the recipe itself."""
    stages = [(recipe, out)]
    while (before := first_stage(stages[0][0])) is not None:
        require(len(stages) < MOST_STAGES, f"{recipe.name} has more than {MOST_STAGES} stages: one starts from itself")
        stages.insert(0, (before, stages[0][1] / FOLDER))
    return stages
