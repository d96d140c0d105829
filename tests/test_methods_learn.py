"""The methods learn: each of the glyphs' recipes, cut short, gets well above chance on scripts it has never seen."""

from dataclasses import replace
from pathlib import Path

import pytest

from conftest import Silent
from trident.data.glyphs import open_glyphs
from trident.learning.checkpoint import load_checkpoint
from trident.learning.run_start import start_run
from trident.learning.training import train
from trident.measuring.evaluate import evaluate
from trident.measuring.validation import validate
from trident.recipes.loading import load_recipe

SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    ("name", "steps", "least"),
    [
        ("glyphs-matching", 60, 80.0),
        ("glyphs-simpleshot", 150, 53.0),
        ("glyphs-epnet", 25, 70.0),
        ("glyphs-tpn", 25, 60.0),
        ("glyphs-anil", 25, 55.0),
        ("glyphs-boil", 25, 40.0),
        ("glyphs-bmaml", 25, 65.0),
        pytest.param("glyphs-maml", 40, 72.0, marks=pytest.mark.slow),
        pytest.param("glyphs-abml", 20, 64.0, marks=pytest.mark.slow),
        pytest.param("glyphs-vampire", 20, 64.0, marks=pytest.mark.slow),
        pytest.param("glyphs-platipus", 20, 62.0, marks=pytest.mark.slow),
        ("glyphs-relation-network", 40, 45.0),
        ("glyphs-feat", 20, 64.0),
        ("glyphs-frn", 20, 62.0),
        pytest.param("glyphs-baseline", 100, 48.0, marks=pytest.mark.slow),
        pytest.param("glyphs-baseline-plus-plus", 100, 50.0, marks=pytest.mark.slow),
        pytest.param("glyphs-s2m2", 150, 50.0, marks=pytest.mark.slow),
        pytest.param("glyphs-assoc-align", 100, 48.0, marks=pytest.mark.slow),
        ("glyphs-dkt", 25, 65.0),
        pytest.param("glyphs-versa", 60, 60.0, marks=SLOW),
        pytest.param("glyphs-ove-polya-gamma", 25, 65.0, marks=SLOW),
        pytest.param("glyphs-logistic-softmax-gp", 60, 60.0, marks=SLOW),
        pytest.param("glyphs-sib", 25, 62.0, marks=SLOW),
        pytest.param("glyphs-metaqda", 25, 60.0, marks=SLOW),
        pytest.param("glyphs-abpml", 40, 57.0, marks=SLOW),
        pytest.param("glyphs-ssr", 25, 65.0, marks=SLOW),
    ],
)
def test_it_learns_letters(name: str, steps: int, least: float, tmp_path: Path) -> None:
    """5-way 1-shot on the test scripts, 5 queries per class, shuffled, 60 tasks.

    Chance is 20 %; after one step Matching Networks get 50 %, SimpleShot 41 %, EPNet 50 %, TPN 48 %.
    Chance is 20 %; after one step Matching Networks get 50 %, SimpleShot and ANIL 41 %, BOIL 24 %, Bayesian MAML 49 %,
    VAMPIRE 57 %, MAML 63 %.
    Chance is 20 %; after one step Matching Networks get 50 %, SimpleShot 41 %. With random weights the others get 38 to
    41 %, and Relation Networks 20 %.
    Chance is 20 %; after one step Matching Networks get 50 %, SimpleShot 41 %, VERSA 23 % and the others 34 to 50 %.
    """
    recipe, store = load_recipe(name), open_glyphs()
    short = replace(recipe.training, steps=steps, validate_every=steps, validation_tasks=20, save_every=steps)
    recipe = replace(recipe, training=short)
    train(
        start_run(recipe, store, "glyphs", tmp_path / "run", "cpu"), store, tmp_path / "run", "cpu", Silent(), validate
    )
    result = evaluate(load_checkpoint(tmp_path / "run"), store, split="test", tasks=60, seed=0)
    print(f"{name}: {result.accuracy:.2f} ± {result.ci95:.2f} % ({result.describe_protocol()})")
    assert result.accuracy > least
