"""The methods learn: each of the glyphs' recipes, cut short, gets well above chance on scripts it has never seen."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tiny import Silent
from trident.data.glyphs import open_glyphs
from trident.learning.checkpoint import load_checkpoint
from trident.learning.run_start import start_run
from trident.learning.training import train
from trident.measuring.evaluate import evaluate, validate
from trident.recipes.files import recipe_names
from trident.recipes.loading import load_recipe

LEARNS = {  # after so many steps more than this
    "glyphs-matching": (60, 80.0),
    "glyphs-feat": (20, 64.0),
    "glyphs-abml": (20, 64.0),
    "glyphs-abpml": (40, 57.0),
    "glyphs-anil": (25, 55.0),
    "glyphs-assoc-align": (100, 48.0),
    "glyphs-baseline": (100, 48.0),
    "glyphs-baseline-plus-plus": (100, 50.0),
    "glyphs-bmaml": (25, 65.0),
    "glyphs-bmaml-chaser": (25, 60.0),
    "glyphs-boil": (25, 40.0),
    "glyphs-dkt": (25, 65.0),
    "glyphs-ensemble": (60, 52.0),
    "glyphs-epnet": (25, 70.0),
    "glyphs-feat-transductive": (20, 60.0),
    "glyphs-frn": (20, 62.0),
    "glyphs-logistic-softmax-gp": (25, 30.0),
    "glyphs-logistic-softmax-predictive": (60, 60.0),
    "glyphs-maml": (40, 72.0),
    "glyphs-maml-first-order": (40, 60.0),
    "glyphs-metaqda": (25, 60.0),
    "glyphs-ove-polya-gamma": (25, 65.0),
    "glyphs-ove-predictive": (25, 60.0),
    "glyphs-platipus": (20, 62.0),
    "glyphs-protonet": (40, 70.0),
    "glyphs-relation-network": (40, 45.0),
    "glyphs-s2m2": (150, 50.0),
    "glyphs-set": (30, 80.0),
    "glyphs-sib": (25, 62.0),
    "glyphs-simpleshot": (150, 53.0),
    "glyphs-ssr": (25, 65.0),
    "glyphs-tpn": (25, 60.0),
    "glyphs-vampire": (20, 64.0),
    "glyphs-versa": (60, 60.0),
}
QUICK = ("glyphs-feat",)


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.soak) for name in LEARNS]
)
def test_it_learns_letters(name: str, tmp_path: Path) -> None:
    """5-way 1-shot on the test scripts, 5 queries per class, shuffled, 60 tasks. Chance is 20 %.

    With random weights, or after one step, most get 35 to 50 %, VAMPIRE 57 % and MAML 63 %.
    """
    steps, least = LEARNS[name]
    recipe, store = load_recipe(name), open_glyphs()
    short = replace(recipe.training, steps=steps, validate_every=steps, validation_tasks=20, save_every=steps)
    recipe = replace(recipe, training=short)
    train(
        start_run(recipe, store, "glyphs", tmp_path / "run", "cpu"), store, tmp_path / "run", "cpu", Silent(), validate
    )
    result = evaluate(load_checkpoint(tmp_path / "run"), store, split="test", tasks=60, seed=0)
    print(f"{name}: {result.accuracy:.2f} ± {result.ci95:.2f} % ({result.describe_protocol()})")
    assert result.accuracy > least


def test_every_recipe_of_the_glyphs_is_tried() -> None:
    assert set(LEARNS) | {"glyphs"} == {name for name in recipe_names() if name.startswith("glyphs")}


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in LEARNS if name not in QUICK])
def test_it_takes_two_steps(name: str, tmp_path: Path) -> None:
    """Those that are only seen to learn in the longest tests are trained a little here."""
    recipe, store = load_recipe(name), open_glyphs()
    short = replace(
        recipe.training, steps=2, validate_every=2, validation_tasks=2, images_per_step=64, tasks_per_step=2
    )
    start = start_run(replace(recipe, training=short), store, "glyphs", tmp_path / "run", "cpu")
    end = train(start, store, tmp_path / "run", "cpu", Silent(), validate)
    before = recipe.initial(recipe.training.seed)
    assert end.step == 2 and any(not torch.equal(value.detach(), before[key]) for key, value in end.parameters.items())
    assert all(bool(value.isfinite().all()) for value in end.parameters.values())
