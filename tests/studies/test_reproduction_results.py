"""The kept results of the paper run again: what they count for, and the tables and correlations made of them."""

import threading
from collections.abc import Callable
from dataclasses import replace
from inspect import Parameter, signature
from pathlib import Path

import pytest

from studies.reproduction.correlation import correlations
from studies.reproduction.document import page, whole_document
from studies.reproduction.panels import Model, load_panels
from studies.reproduction.results import (
    FOLDER,
    ORDERS,
    BothOrders,
    ModelResults,
    Source,
    read,
    update_results,
)
from studies.reproduction.running import _newer
from studies.reproduction.sections import section
from studies.reproduction.states import is_complete, state
from trident.errors import TridentError
from trident.leaderboard.results import add
from trident.measuring.record import CalibrationFigures, Record

SOURCE = Source(600, "abc", "a GPU", "fused", "fp16", 3.0)


def measured(sorted_accuracy: float, shuffled_accuracy: float) -> BothOrders:
    def one(accuracy: float) -> Record:
        values = {key: CalibrationFigures(0.1, 1.5, 0.2, 0.3) for key in ("none", "validation", "paper")}
        return Record(accuracy, 1.0, "a protocol", 600, "abc", calibration=values)

    orders = {"class_sorted": one(sorted_accuracy), "shuffled": one(shuffled_accuracy)}
    return BothOrders(orders, {}, sorted_accuracy - shuffled_accuracy, 0.5, SOURCE)


def kept(model: Model, steps: int = 4000, asked: int = 4000, error: str | None = None) -> ModelResults:
    """With an error: of a training that failed before its first validation."""
    digest, best = ("0123", steps) if error is None else ("", None)
    return ModelResults(
        model.made_from, digest, 1, "class_sorted", asked, steps, best, 82_000, 410_760, 170.0, "a GPU", error
    )


def put(model: Model, found: ModelResults, folder: Path) -> None:
    update_results(model.name, lambda _: found, folder)


@pytest.mark.parametrize("write", [add, update_results])
def test_who_writes_results_says_where(write: Callable[..., None]) -> None:
    assert signature(write).parameters["folder"].default is Parameter.empty


def test_results_count_only_for_what_they_were_made_from(tmp_path: Path) -> None:
    reproduction = load_panels()
    panel = reproduction.panel("ablation-training")
    models = reproduction.models_of(panel)

    def complete(found: ModelResults, budget: float = 1.0, tasks: int = 600, fingerprint: str | None = "abc") -> bool:
        return is_complete(found, panel, models[0], "mini-imagenet", tasks, budget, fingerprint)

    good = replace(kept(models[0]), measured={"mini-imagenet": measured(40, 30)})
    assert complete(good) and complete(good, 0.5) and complete(good, fingerprint=None)
    assert not complete(good, budget=2) and not complete(good, tasks=700) and not complete(good, fingerprint="other")
    assert not complete(replace(good, made_from="recipe glyphs"))
    assert not complete(kept(models[0]))
    assert complete(kept(models[0], steps=3, error="step 4: the loss is not finite"))
    assert not complete(kept(models[0], steps=3, asked=40, error="step 4: the loss is not finite"))
    weights = reproduction.panel("accuracy")
    shipped = reproduction.models_of(weights)[0]
    other = replace(kept(shipped, asked=0), measured={"mini-imagenet": measured(40, 30)})
    assert not is_complete(other, weights, shipped, "mini-imagenet", 600, 1.0, None)  # the digest is another


def test_states_and_rows_say_what_was_run(tmp_path: Path) -> None:
    reproduction = load_panels()
    panel = reproduction.panel("ablation-training")
    models = reproduction.models_of(panel)
    assert state(reproduction, panel, tmp_path) == "not run"
    half = replace(kept(models[0], 2000, 2000), measured={"mini-imagenet": measured(40, 30)})
    put(models[0], half, tmp_path)
    put(models[1], kept(models[1], 4, error="step 5: the loss is not finite"), tmp_path)
    bad = BothOrders({}, dict.fromkeys(ORDERS, "task 3 is not finite"), None, None, SOURCE)
    put(models[2], replace(kept(models[2]), measured={"mini-imagenet": bad}), tmp_path)
    assert state(reproduction, panel, tmp_path) == "2 of 5 done, 1 of 5 with fewer steps"
    rows = section(reproduction, panel, tmp_path).rows
    assert "2,000 of 82,000" in rows[0] and "step 5: the loss is not finite" in rows[1]
    assert "no result: task 3 is not finite" in rows[2] and "not run" in rows[3]
    changed = [row for row in section(reproduction, reproduction.panel("accuracy"), FOLDER).rows if "bounded" in row[3]]
    assert [row[2] for row in changed] == ["mini-imagenet", "cub"] and "20,132 of 22,500" in changed[0][3]


def test_fewer_steps_do_not_replace_those_of_a_training_that_failed_later() -> None:
    model = load_panels().models_of(load_panels().panel("ablation-training"))[0]
    found = replace(kept(model, 3000), error="the loss is not finite", measured={"mini-imagenet": measured(40, 30)})
    fewer = replace(kept(model, 2000, 2000), digest="4567")
    with pytest.raises(TridentError, match="results of 3,000 steps are kept"):
        _newer(found, fewer)
    assert _newer(kept(model, 3000, error="the loss is not finite"), fewer) == fewer


def test_two_processes_do_not_lose_each_others_results(tmp_path: Path) -> None:
    panel = load_panels().panel("ablation-training")
    model = load_panels().models_of(panel)[0]

    def add(name: str) -> None:
        for place in range(20):
            key = f"{name}{place}"
            update_results(
                model.name,
                lambda old: replace(old or kept(model), measured=(old.measured if old else {}) | {key: measured(4, 3)}),  # noqa: B023
                tmp_path,
            )

    threads = [threading.Thread(target=add, args=(name,)) for name in "ab"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found = read(model.name, tmp_path)
    assert found is not None and len(found.measured) == 40


@pytest.mark.parametrize("sign", [1, -1])
def test_correlations_follow_the_published_order(sign: int, tmp_path: Path) -> None:
    reproduction = load_panels()
    panel = reproduction.panel("ablation-latents")
    assert correlations(reproduction, [panel], tmp_path) == []
    for row in reproduction.ablation(panel):
        published = row.paper.value if row.paper else 0.0  # rows without a published value must not count
        both = measured(50 + sign * published / 10, 40 - sign * published / 10)
        put(row.model, replace(kept(row.model), measured={"mini-imagenet": both}), tmp_path)
    found = correlations(reproduction, [panel], tmp_path)
    assert [(one.order, round(one.rho, 6), one.rows) for one in found] == [
        ("class_sorted", sign, 9),
        ("shuffled", -sign, 9),
    ]
    assert f"sorted by class: {sign:+.2f} (9 rows" in whole_document("# Title", reproduction, tmp_path)
    assert "Spearman" in page(reproduction, tmp_path)
