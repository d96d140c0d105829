"""The paper's figures as data: spot checks from every table, and what must hold for all of them."""

import json
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any, get_args

import pytest

from ablation_grids import Answer
from commands import assert_one_line_error
from studies.reproduction.paper import TableName, study
from studies.reproduction.paper_results import (
    PAPER_PROTOCOL,
    Metric,
    PaperResult,
    find,
    paper_results,
    paper_table,
    paper_tables,
    paper_training,
)
from trident.errors import TridentError
from trident.recipes.loading import load_recipe

FIGURES = {
    "accuracy": 127,
    "calibration": 22,
    "calibration-cross-domain": 39,
    "ablation-training": 5,
    "ablation-latents": 9,
    "ablation-attfex-width": 9,
    "attfex": 8,
    "parameters": 15,
    "conv4": 10,
}
SETTINGS = [  # training dataset, test dataset, shots; the paper's best and second best accuracy
    ("mini-imagenet", "mini-imagenet", 1, 86.11, 83.35),
    ("mini-imagenet", "mini-imagenet", 5, 95.95, 91.50),
    ("tiered-imagenet", "tiered-imagenet", 1, 86.97, 86.07),
    ("tiered-imagenet", "tiered-imagenet", 5, 96.57, 91.09),
    ("mini-imagenet", "cub", 1, 84.61, 63.90),
    ("mini-imagenet", "cub", 5, 80.74, 79.15),
]


def only(**wanted: Any) -> PaperResult:
    (result,) = find(**wanted)
    return result


def test_every_table_is_complete() -> None:
    assert Counter(result.table for result in paper_results()) == FIGURES
    assert len({result.method for result in find(table="accuracy")}) == 26
    approaches = Counter(method.approach for method in {r.method: r for r in find(table="accuracy")}.values())
    assert approaches["Ind."] == 7  # the paper counts 7 inductive and 18 transductive baselines, and itself
    assert approaches.total() == 7 + 18 + 1


@pytest.mark.parametrize(("train_dataset", "test_dataset", "n_shot", "best", "second"), SETTINGS)
def test_best_and_second_best(train_dataset: str, test_dataset: str, n_shot: int, best: float, second: float) -> None:
    found = find(table="accuracy", train_dataset=train_dataset, test_dataset=test_dataset, n_shot=n_shot)
    ranked = sorted(found, key=lambda result: -result.value)
    assert [result.value for result in ranked[:2]] == [best, second]
    assert ranked[0].method == "TRIDENT"
    assert ranked[0].interval is not None


@pytest.mark.parametrize(
    ("wanted", "value", "interval"),
    [
        ({"table": "accuracy", "method": "MAML", "test_dataset": "cub", "n_shot": 5}, 48.83, 0.62),
        ({"table": "accuracy", "method": "BOIL", "test_dataset": "mini-imagenet", "n_shot": 5}, 48.58, 0.27),
        ({"table": "accuracy", "method": "DPGN", "test_dataset": "mini-imagenet", "n_shot": 5}, 84.6, None),
        ({"table": "accuracy", "method": "TIM-GD", "test_dataset": "cub"}, 71, None),
        ({"table": "accuracy", "method": "ReRank", "test_dataset": "tiered-imagenet", "n_shot": 1}, 79.5, 0.6),
        ({"table": "calibration", "method": "TRIDENT", "metric": "ece", "n_shot": 1}, 0.0036, None),
        ({"table": "calibration", "method": "TRIDENT", "metric": "mce", "n_shot": 5}, 0.018, None),
        ({"table": "calibration", "method": "VAMPIRE", "metric": "mce"}, 0.038, None),
        ({"metric": "brier", "method": "TRIDENT"}, 0.276, None),
        ({"metric": "brier", "method": "OVE(PL)"}, 0.556, None),
        ({"table": "calibration-cross-domain", "method": "Proto Nets", "metric": "mce"}, 0.025, None),
        ({"table": "parameters", "method": "WRN"}, 36_482_000, None),
        ({"table": "parameters", "method": "Conv4"}, 190_410, None),
        ({"table": "conv4", "method": "EPNet", "n_shot": 5}, 73.0, None),
        ({"table": "conv4", "method": "SIB", "n_shot": 1}, 58.0, None),
    ],
)
def test_single_figures(wanted: dict[str, Any], value: float, interval: float | None) -> None:
    result = only(**wanted)
    assert (result.value, result.interval) == (value, interval)


@pytest.mark.parametrize(
    ("table", "settings", "value"),
    [
        ("ablation-training", ("training.tasks_per_step=10", "method.inner_steps=5"), 74.6),
        ("ablation-latents", ("method.label_latents=32", "method.semantic_latents=128"), 79.1),
        ("ablation-latents", ("method.label_latents=128", "method.semantic_latents=32"), 81.49),
        ("ablation-attfex-width", ("method.attfex_width_m=128", "method.attfex_width_n=64"), 85.8),
    ],
)
def test_ablations(table: str, settings: tuple[str, ...], value: float) -> None:
    assert [result.value for result in find(table=table) if result.settings == settings] == [value]


def test_attfex_off_costs_what_the_paper_says() -> None:
    off = [result.value for result in find(table="attfex") if result.settings == ("method.attfex=off",)]
    assert off == [67.68, 78.53, 69.32, 79.32]


def test_what_the_paper_leaves_out_is_left_out() -> None:
    assert not find(table="accuracy", method="ABML", test_dataset="tiered-imagenet")
    assert not find(table="calibration", method="PLATIPUS", n_shot=5)
    assert not find(test_dataset="omniglot")


def test_tables_agree_where_they_give_the_same_figure() -> None:
    """The unchanged model stands in every ablation, and its accuracy is that of the main table."""
    for result in paper_results():
        if result.method != "TRIDENT" or result.metric != "accuracy" or result.test_dataset == "cub":
            continue
        name = "mini" if result.train_dataset == "mini-imagenet" else "tiered"
        recipe = load_recipe(f"{name}-5w{result.n_shot}s")
        if load_recipe(recipe.name, result.settings) == recipe:
            main = only(table="accuracy", method="TRIDENT", test_dataset=result.test_dataset, n_shot=result.n_shot)
            assert (result.value, result.interval) == (main.value, main.interval), result


def test_recipes_are_trained_as_the_paper_says() -> None:
    assert [run.recipe for run in paper_training()] == ["mini-5w1s", "mini-5w5s", "tiered-5w1s", "tiered-5w5s"]
    for run in paper_training():
        recipe = load_recipe(run.recipe)
        assert load_recipe(run.recipe, run.settings) == recipe
        assert (recipe.dataset, recipe.episode.n_way, recipe.episode.n_shot) == (
            run.train_dataset,
            run.n_way,
            run.n_shot,
        )


def test_corrected_parts_add_up_to_the_printed_total() -> None:
    counts = {result.part: result for result in find(table="parameters", method="TRIDENT")}
    totals = [counts.pop("total for 5-shot"), counts.pop("total for 1-shot")]
    assert [total.value for total in totals] == [412_238, 410_958]
    assert sum(part.corrected or part.value for part in counts.values()) == 412_238
    assert sum(part.value for part in counts.values()) != 412_238
    assert sorted(part.corrected for part in counts.values() if part.corrected) == [6_944, 55_360, 55_360]


def test_no_figure_stands_twice() -> None:
    places = [
        replace(result, value=0, printed="", interval=None, note="", corrected=None) for result in paper_results()
    ]
    assert len(set(places)) == len(places)


def test_what_holds_for_every_figure() -> None:
    for result in paper_results():
        assert result.metric in get_args(Metric)
        assert result.train_dataset in ("mini-imagenet", "tiered-imagenet", None), result
        assert result.test_dataset in ("mini-imagenet", "tiered-imagenet", "cub", None), result
        assert result.approach in ("Ind.", "TF", "TI", "TF+TI", None), result
        assert (result.unit == "%") == (result.metric == "accuracy")
        if result.metric == "accuracy":
            assert 0 < result.value < 100
            assert result.n_way == 5
            assert result.n_shot in (1, 5)
            assert result.interval is None or 0 < result.interval < 2
        elif result.metric == "parameters":
            assert result.value == int(result.value) > 0
        else:
            assert 0 < result.value < 1
    assert [result.method for result in paper_results() if result.extra_data] == ["Transd-CNAPS+FETI"] * 4


def test_no_figure_of_trident_goes_without_its_protocol() -> None:
    for result in paper_results():
        assert bool(result.protocol) == (result.method == "TRIDENT"), result
        if result.protocol and result.metric != "parameters":
            assert "class-sorted queries" in result.protocol
            assert ("temperature" in result.protocol) == (result.metric != "accuracy")
    assert "2000 tasks" in only(table="accuracy", method="TRIDENT", test_dataset="cub", n_shot=1).protocol
    for words in ("sorted by class", "sampled once", "statistics", "temperature", "600 tasks", "2,000", "10 queries"):
        assert words in PAPER_PROTOCOL


def test_what_is_not_the_papers_says_so() -> None:
    for result in paper_results():
        assert (result.source == "the TRIDENT paper") == (result.table != "conv4")
        if result.table == "conv4":
            assert "not re-measured here" in result.note


def test_an_unknown_table_is_told_with_its_nearest() -> None:
    with pytest.raises(TridentError, match=r"no table 'acuracy': did you mean 'accuracy'\?"):
        paper_table("acuracy")


def test_command_lists_every_figure(trident_here: Callable[..., Answer]) -> None:
    result = trident_here(command=study)
    assert result.returncode == 0, result.stderr
    assert max(map(len, result.stdout.splitlines())) <= 80
    words = " ".join(result.stdout.split())
    assert PAPER_PROTOCOL in words
    for table in paper_tables():
        assert f"{table.name}: {table.title}" in words
    shown = Counter(result.stdout.split())
    expected = Counter(word for figure in paper_results() for word in figure.printed.split())
    assert all(shown[word] >= count for word, count in expected.items())
    notes = {figure.note for figure in paper_results()} | {note for table in paper_tables() for note in table.notes}
    assert all(note in words for note in notes)


def test_command_shows_one_table(trident_here: Callable[..., Answer]) -> None:
    shown = trident_here("--table", "conv4", command=study).stdout
    assert "EPNet" in shown
    assert "TRIDENT" not in shown.split("\n\n")[2]
    assert "82000" in trident_here("--table", "training", command=study).stdout
    assert_one_line_error(trident_here("--table", "nothing", command=study), "nothing", "accuracy")


def test_command_knows_every_table() -> None:
    assert get_args(TableName) == (*(table.name for table in paper_tables()), "training")


def test_command_as_json(trident_here: Callable[..., Answer]) -> None:
    found = json.loads(trident_here("--json", command=study).stdout)
    assert found["protocol"] == PAPER_PROTOCOL
    assert sum(len(table["results"]) for table in found["tables"]) == len(paper_results())
    assert len(found["training"]["runs"]) == 4
    (table,) = json.loads(trident_here("--json", "--table", "accuracy", command=study).stdout)["tables"]
    assert table["results"][-1]["printed"] == "80.74 ± 0.35"
