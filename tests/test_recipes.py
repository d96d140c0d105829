"""Recipes: the paper's values, overrides, and mistakes told in words."""

from pathlib import Path

import pytest

from trident.engines.execution import make_model
from trident.errors import TridentError
from trident.recipes import load_recipe, recipe_from, recipe_names, recipe_values, setting_help, setting_types


def test_the_papers_hyperparameter_table() -> None:
    table = {
        "mini-5w1s": (1, 100, 1e-3, 1e-4, 82_000),
        "mini-5w5s": (5, 100, 1e-3, 1e-4, 22_500),
        "tiered-5w1s": (1, 150, 1.5e-3, 1.5e-4, 67_500),
        "tiered-5w5s": (5, 150, 1.7e-3, 1.7e-4, 48_000),
    }
    ours = {f"mini-5w{n_shot}s-{kind}" for n_shot in (1, 5) for kind in ("set", "protonet")}
    assert set(recipe_names()) == {*table, *ours, "glyphs"}
    for name, (n_shot, alpha_2, alpha, beta, steps) in table.items():
        recipe = load_recipe(name)
        assert (recipe.episode.n_way, recipe.episode.n_shot, recipe.episode.n_query) == (5, n_shot, 10)
        assert (recipe.objective.reconstruction_weight, recipe.objective.classification_weight) == (0.01, alpha_2)
        assert (recipe.adaptation.rate, recipe.training.rate, recipe.training.steps) == (alpha, beta, steps)
        assert (recipe.training.tasks_per_step, recipe.adaptation.steps) == (20, 5)
        assert recipe.model.attention_activation == (n_shot == 5)
        assert recipe.model.decoder_batch_norm == (name in ("mini-5w5s", "tiered-5w1s"))
        assert recipe.model.activation == ("relu" if name == "tiered-5w1s" else "leaky_relu")


@pytest.mark.parametrize("name", recipe_names())
def test_shuffled_queries_are_the_default(name: str) -> None:
    assert load_recipe(name).protocol.query_order == "shuffled"


@pytest.mark.parametrize("name", recipe_names())
def test_every_recipe_survives_a_round_trip_and_builds(name: str) -> None:
    recipe = load_recipe(name)
    assert recipe_from(recipe_values(recipe), "again") == recipe
    assert 0 < sum(value.numel() for value in make_model(recipe).initial(0).values()) <= 500_000


def test_every_setting_has_a_meaning() -> None:
    assert set(setting_help()) == {key for key, _ in setting_types()}
    assert all(setting_help().values())


@pytest.mark.parametrize(
    ("override", "section", "key", "value"),
    [
        ("training.steps=7", "training", "steps", 7),
        ("tasks_per_step=3", "training", "tasks_per_step", 3),
        ("--model.decoder-batch-norm=true", "model", "decoder_batch_norm", True),
        ("model.initial_log_var=-4", "model", "initial_log_var", -4.0),
        ("clip_norm=none", "training", "clip_norm", None),
        ("adaptation.rate=2e-3", "adaptation", "rate", 2e-3),
        ("query_order=class_sorted", "protocol", "query_order", "class_sorted"),
    ],
)
def test_overrides(override: str, section: str, key: str, value: object) -> None:
    assert recipe_values(load_recipe("mini-5w1s", [override]))[section][key] == value


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("training.stesp=7", "unknown setting 'training.stesp': did you mean 'training.steps'?"),
        ("n_sho=7", "unknown setting 'n_sho': did you mean 'n_shot'?"),
        ("steps=7", "setting 'steps' is ambiguous: write adaptation.steps or training.steps"),
        ("training.steps=many", "training.steps is 'many': it must be a whole number"),
        ("training.steps=0", "training.steps is 0: at least 1 is needed"),
        ("decoder_batch_norm=maybe", "model.decoder_batch_norm is 'maybe': it must be true or false"),
        ("query_order=sorted", "protocol.query_order is 'sorted': it must be one of shuffled, class_sorted"),
        ("adaptation.rate=nan", "adaptation.rate is nan: 0 or more is needed"),
        ("training.steps", "'training.steps' is not a setting: write KEY=VALUE"),
    ],
)
def test_wrong_overrides(override: str, message: str) -> None:
    with pytest.raises(TridentError) as caught:
        load_recipe("mini-5w1s", [override])
    assert message in str(caught.value)


def test_a_recipe_of_ones_own(tmp_path: Path) -> None:
    mine = tmp_path / "mine.toml"
    mine.write_text('summary = "mine"\ndataset = "folder"\n[episode]\nn_shot = 3\n')
    recipe = load_recipe(str(mine))
    assert (recipe.name, recipe.episode.n_shot, recipe.adaptation.steps) == ("mine", 3, 5)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("summary = ", "is not valid TOML"),
        ('dataset = "x"', "setting 'summary' is missing"),
        ('summary = "s"\ndataset = "x"\n[modle]\n', "unknown setting 'modle': did you mean 'model'?"),
        (
            'summary = "s"\ndataset = "x"\n[model]\nchanels = 3',
            "unknown setting 'model.chanels': did you mean 'channels'?",
        ),
        ('summary = "s"\ndataset = "x"\nmodel = 3', "'model' must be a table of settings, not 3"),
        ('summary = "s"\ndataset = "x"\n[training]\nrate = "fast"', "training.rate is 'fast': it must be a number"),
    ],
)
def test_wrong_recipe_files(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "wrong.toml").write_text(text)
    with pytest.raises(TridentError) as caught:
        load_recipe(str(tmp_path / "wrong.toml"))
    assert message in str(caught.value)
    assert "wrong.toml" in str(caught.value)
