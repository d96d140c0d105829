"""Recipes: the paper's values, overrides, and mistakes told in words."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from trident.errors import TridentError
from trident.methods.ensemble import Ensemble
from trident.methods.metric.protonet import ProtoNet
from trident.methods.trident.network import Trident
from trident.recipes.files import FOLDER, facts, read_recipe, read_toml, recipe_names
from trident.recipes.loading import (
    RETIRED,
    full_key,
    load_recipe,
    recipe_from,
    recipe_values,
    setting_help,
    setting_of,
    setting_types,
)
from trident.recipes.recipe import Recipe
from trident.settings import setting


def test_the_papers_hyperparameter_table() -> None:
    table = {
        "mini-5w1s": (1, 100, 1e-3, 1e-4, 82_000),
        "mini-5w5s": (5, 100, 1e-3, 1e-4, 22_500),
        "tiered-5w1s": (1, 150, 1.5e-3, 1.5e-4, 67_500),
        "tiered-5w5s": (5, 150, 1.7e-3, 1.7e-4, 48_000),
    }
    summaries = {name: load_recipe(name).summary for name in recipe_names()}
    assert {name for name, summary in summaries.items() if summary.endswith("as in the paper")} == set(table)
    ours = {f"mini-5w{n_shot}s-{kind}" for n_shot in (1, 5) for kind in ("set", "protonet")}
    assert {*ours, "glyphs"} <= set(recipe_names())
    for name, (n_shot, alpha_2, alpha, beta, steps) in table.items():
        recipe = load_recipe(name)
        assert isinstance(recipe.method, Trident)
        assert (recipe.episode.n_way, recipe.episode.n_shot, recipe.episode.n_query) == (5, n_shot, 10)
        assert (recipe.method.reconstruction_weight, recipe.method.classification_weight) == (0.01, alpha_2)
        assert (recipe.method.inner_rate, recipe.training.rate, recipe.training.steps) == (alpha, beta, steps)
        assert (recipe.training.tasks_per_step, recipe.method.inner_steps) == (20, 5)
        assert recipe.method.attention_activation == (n_shot == 5)
        assert recipe.method.decoder_batch_norm == (name in ("mini-5w5s", "tiered-5w1s"))
        assert setting_of(recipe, "backbone.activation") == ("relu" if name == "tiered-5w1s" else "leaky_relu")


@pytest.mark.parametrize("name", recipe_names())
def test_shuffled_queries_are_the_default(name: str) -> None:
    assert load_recipe(name).protocol.query_order == "shuffled"


@pytest.mark.parametrize("name", recipe_names())
def test_every_recipe_survives_a_round_trip_and_builds(name: str) -> None:
    recipe = load_recipe(name)
    assert recipe_from(recipe_values(recipe), "again") == recipe
    # The ensemble's classifiers of the training classes are not used after training.
    unused = "classes." if isinstance(recipe.method, Ensemble) else "none"
    n_parameters = sum(value.numel() for key, value in recipe.initial(0).items() if not key.startswith(unused))
    assert n_parameters <= 500_000
    assert (n_parameters == 0) == (recipe.method.about.trained_on == "nothing")


@pytest.mark.parametrize("name", recipe_names())
def test_every_setting_has_a_meaning(name: str) -> None:
    recipe = load_recipe(name)
    assert setting_help(recipe).keys() == setting_types(recipe).keys()
    assert all(setting_help(recipe).values())


@pytest.mark.parametrize(
    ("override", "section", "key", "value"),
    [
        ("training.steps=7", "training", "steps", 7),
        ("tasks_per_step=3", "training", "tasks_per_step", 3),
        ("--method.decoder-batch-norm=true", "method", "decoder_batch_norm", True),
        ("method.initial_log_var=-4", "method", "initial_log_var", -4.0),
        ("clip_norm=none", "training", "clip_norm", None),
        ("method.inner_rate=2e-3", "method", "inner_rate", 2e-3),
        ("channels=8", "backbone", "channels", 8),
        ("views.mirrored=yes", "views", "mirrored", True),
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
        ("training.steps=many", "training.steps is 'many': it must be a whole number"),
        ("training.steps=0", "training.steps is 0: 1 or more is needed"),
        ("decoder_batch_norm=maybe", "method.decoder_batch_norm is 'maybe': it must be true or false"),
        ("query_order=sorted", "protocol.query_order is 'sorted': it must be one of shuffled, class_sorted"),
        ("method.inner_rate=nan", "method.inner_rate is nan: it must be finite"),
        ("training.steps", "'training.steps' is not a setting: write KEY=VALUE"),
    ],
)
def test_wrong_overrides(override: str, message: str) -> None:
    with pytest.raises(TridentError) as caught:
        load_recipe("mini-5w1s", [override])
    assert message in str(caught.value)


@pytest.mark.parametrize(("method", "name"), [(method, name) for method, gone in RETIRED.items() for name in gone])
def test_old_files_may_give_the_only_value_of_a_setting_that_is_gone(method: str, name: str) -> None:
    values = recipe_values(load_recipe("glyphs")) | {"method": {"name": method}}
    old = values | {"method": {"name": method, name: RETIRED[method][name]}}
    assert recipe_from(old, "old.toml") == recipe_from(values, "new.toml")
    old["method"][name] = "another"
    with pytest.raises(TridentError, match=name):
        recipe_from(old, "old.toml")


@dataclass(frozen=True)
class TwoRates(ProtoNet):
    """A method with a setting that training has too."""

    rate: float = setting(1.0, "of anything")


def test_a_setting_of_two_sections_needs_its_section() -> None:
    recipe = Recipe("two rates", "", "", method=TwoRates())
    assert full_key(recipe, "method.rate") == "method.rate"
    with pytest.raises(TridentError, match=r"setting 'rate' is ambiguous: write method.rate or training.rate"):
        full_key(recipe, "rate")


@pytest.mark.parametrize("override", ["inner_steps=1", "method.refinements=2"])
def test_another_method_s_settings_are_unknown(override: str) -> None:
    with pytest.raises(TridentError, match=f"unknown setting '{override.split('=')[0]}'"):
        load_recipe("mini-5w1s-protonet", [override])


def test_a_recipe_of_ones_own(tmp_path: Path) -> None:
    mine = tmp_path / "mine.toml"
    mine.write_text('summary = "mine"\ndataset = "folder"\n[episode]\nn_shot = 3\n')
    recipe = load_recipe(str(mine))
    assert isinstance(recipe.method, Trident)  # the default
    assert (recipe.name, recipe.episode.n_shot, recipe.method.inner_steps) == ("mine", 3, 5)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("summary = ", "is not valid TOML"),
        ('dataset = "x"', "'summary' is missing"),
        ('summary = "s"\ndataset = "x"\n[metod]\n', "unknown setting 'metod': did you mean 'method'?"),
        (
            'summary = "s"\ndataset = "x"\n[backbone]\nchanels = 3',
            "unknown setting 'backbone.chanels': did you mean 'channels'?",
        ),
        ('summary = "s"\ndataset = "x"\nmethod = 3', "'method' must be a table of settings, not 3"),
        ('summary = "s"\ndataset = "x"\n[method]\nname = "protonett"', "no method is called 'protonett'"),
        ('summary = "s"\ndataset = "x"\n[method]\nname = "protonet"\ninner_rate = 1.0', "'method.inner_rate'"),
        ('summary = "s"\ndataset = "x"\n[backbone]\nname = "conv5"', "backbone.name is 'conv5'"),
        ('summary = "s"\ndataset = "x"\n[training]\nrate = "fast"', "training.rate is 'fast': it must be a number"),
    ],
)
def test_wrong_recipe_files(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "wrong.toml").write_text(text)
    with pytest.raises(TridentError) as caught:
        load_recipe(str(tmp_path / "wrong.toml"))
    assert message in str(caught.value)
    assert "wrong.toml" in str(caught.value)


def test_a_recipe_can_be_based_on_another(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text('base = "glyphs-matching"\nsummary = "five shots"\n[episode]\nn_shot = 5\n', "utf-8")
    found, before = load_recipe(str(path)), load_recipe("glyphs-matching")
    assert found.episode == replace(before.episode, n_shot=5)
    assert (found.method, found.training, found.name) == (before.method, before.training, "mine")


def test_another_method_inherits_no_settings_from_the_base(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text('base = "glyphs-simpleshot"\nsummary = "x"\n[method]\nname = "protonet"\n', "utf-8")
    assert load_recipe(str(path)).method == ProtoNet()
    assert load_recipe(str(path)).backbone == load_recipe("glyphs-simpleshot").backbone


def test_a_base_must_be_an_included_recipe(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text('base = "../secret"\n', "utf-8")
    with pytest.raises(TridentError, match=r"base is '../secret': it must be one of features-"):
        load_recipe(str(path))


def test_recipes_for_several_shots_and_variants_come_from_one_file() -> None:
    names = {name for name in recipe_names() if name.startswith("mini-5w") and "-feat" in name}
    assert names == {f"mini-5w{shots}s-feat{end}" for shots in (1, 5) for end in ("", "-transductive")}
    values = {name: recipe_values(load_recipe(name)) for name in names}
    steps = {name: (part["training"]["steps"], part["episode"]["n_shot"]) for name, part in values.items()}
    assert steps["mini-5w1s-feat"] == (16_000, 1)
    assert steps["mini-5w5s-feat"] == (14_000, 5)
    assert steps["mini-5w5s-feat-transductive"] == (12_000, 5)
    assert values["mini-5w5s-feat-transductive"]["summary"] == "miniImageNet, 5-way 5-shot, FEAT, transductive"
    assert values["mini-5w5s-feat-transductive"]["training"]["validate_every"] == 3_000
    assert load_recipe("mini-5w5s-maml").training.start_from == "mini-5w5s-protonet"


def test_facts_are_those_of_the_recipes() -> None:
    assert list(facts()) == recipe_names()
    for name in ("features-tim", "glyphs-set", "mini-5w5s-feat-transductive"):
        recipe = load_recipe(name)
        method = recipe_values(recipe)["method"]["name"]
        assert facts()[name] == {"summary": recipe.summary, "dataset": recipe.dataset, "method": method}


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.toml")), ids=lambda path: path.stem)
def test_nothing_is_said_twice(path: Path) -> None:
    """Nor is what a file's base says, or what the file says for all its variants and numbers of shots."""
    own = read_toml(path)
    base: dict[str, Any] = {}
    if "base" in own:
        name = own["base"].format(shots=1)
        base = read_recipe(name)[0] if name in recipe_names() else read_toml(FOLDER / f"{name}.toml")
    parts = [own.get("shots", {}).get("5", {}), *own.get("variants", {}).values()]
    for before, values in [(base, own), *((own, part) for part in parts)]:
        for table in before.keys() & values.keys() & {"episode", "protocol", "views", "backbone", "method", "training"}:
            names = [part.get("name") for part in (before[table], values[table])]
            if names[1] in (None, names[0]):  # another method inherits nothing
                repeated = [key for key, value in values[table].items() if before[table].get(key) == value]
                assert set(repeated) <= {"name", "validate_every"}, f"[{table}] {', '.join(repeated)}"
