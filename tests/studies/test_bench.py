"""Measuring speed: what it prints, how the numbers hang together, and that it times what it says."""

import functools
import json
import statistics
from collections.abc import Callable

import pytest

from ablation_grids import Answer
from commands import assert_one_line_error
from studies.speed import benchmarks
from studies.speed.__main__ import study
from studies.speed.made_up import made_up_store
from studies.speed.timing import measure
from trident.engines.execution import Execution
from trident.recipes.loading import load_recipe

Bench_command = Callable[..., Answer]
TINY = ["--recipe", "glyphs", "--tasks", "2", "--repeats", "1", "backbone.channels=4", "n_query=2", "image_size=16"]
KEYS = {
    *("benchmark", "recipe", "n_shot", "tasks", "steps", "device", "engine", "precision", "torch", "date", "repeats"),
    *("seconds", "tasks_per_second", "peak_memory_gib", "warm_up_seconds", "plain_seconds", "ratio", "difference"),
}


@pytest.fixture
def trident_here(trident_here: Bench_command) -> Bench_command:
    return functools.partial(trident_here, command=study)


@pytest.mark.parametrize(("name", "largest_difference"), [("train", 1e-3), ("evaluate", 1e-4)])
def test_numbers_as_json(trident_here: Bench_command, name: str, largest_difference: float) -> None:
    more = ("--repeats", "3", "--n-shot", "2", "method.inner_steps=2", "--device", "cpu", "--json")
    result = trident_here(name, *TINY, *more)
    assert result.returncode == 0, result.stderr
    found = json.loads(result.stdout)
    assert found.keys() >= KEYS
    assert [found[key] for key in ("benchmark", "recipe", "n_shot", "tasks", "steps", "repeats")] == [
        *(name, "glyphs", 2, 2, 2, 3)
    ]
    assert (found["engine"], found["precision"], found["data"]) == ("plain", "fp32", "made-up images")
    assert "thread" in found["device"]
    assert found["seconds"] == statistics.median(found["seconds_of_each_round"]) > 0
    assert found["tasks_per_second"] == pytest.approx(2 / found["seconds"])
    assert found["ratio"] == pytest.approx(found["plain_seconds"] / found["seconds"])
    assert found["plain_tasks"] == 2
    assert 0 <= found["difference"] < largest_difference
    assert found["warm_up_seconds"] > 0 and found["peak_memory_gib"] > 0.01


@pytest.mark.parametrize("name", ["train", "evaluate"])
def test_a_table_that_carries_its_setting(trident_here: Bench_command, name: str) -> None:
    result = trident_here(name, *TINY, "--data", "glyphs", "image_size=28", "--device", "cpu")
    assert result.returncode == 0, result.stderr
    for words in (
        f"{name}: glyphs, 5-way 1-shot, 10 queries, 28x28, 2 tasks, 1 inner step",
        "plain engine, fp32",
    ):
        assert words in result.stdout
    lines = result.stdout.splitlines()
    header, ours, plain = lines[3:6]
    assert ours.startswith("trident ") and plain.startswith("plain loop ")
    assert len(ours.split()) == len(header.replace("peak GiB", "peak").replace("warm-up s", "warm-up").split()) + 1
    assert lines[6].startswith("ratio ") and "difference" in lines[6]
    assert "torch" in lines[1] and "; glyphs; median of 1" in lines[1]


def test_without_the_yardstick(trident_here: Bench_command) -> None:
    adam = "method.inner_optimizer=adam"  # which the plain loop does not know
    assert_one_line_error(trident_here("train", *TINY, adam), "method.inner_optimizer", "'adam'", "--no-yardstick")
    found = json.loads(trident_here("train", *TINY, adam, "--no-yardstick", "--json").stdout)
    assert found["seconds"] > 0
    assert all(found[key] is None for key in ("plain_seconds", "ratio", "difference"))
    assert "ratio" not in trident_here("train", *TINY, "--no-yardstick").stdout


@pytest.mark.parametrize(
    ("name", "recipe", "how"),
    [
        ("train", "glyphs-matching", ""),
        ("evaluate", "glyphs-matching", ""),
        ("evaluate", "glyphs-simpleshot", ", CL2N features"),
    ],
)
def test_other_methods_are_timed_too(trident_here: Bench_command, name: str, recipe: str, how: str) -> None:
    small = ["--recipe", recipe, "--tasks", "2", "--repeats", "1", "channels=4", "n_query=2", "image_size=16"]
    assert_one_line_error(trident_here(name, *small, "--device", "cpu"), "TRIDENT only", "--no-yardstick")
    result = trident_here(name, *small, "--device", "cpu", "--no-yardstick")
    assert result.returncode == 0, result.stderr
    expected = f"{name}: {recipe}, 5-way 1-shot, 10 queries, 16x16, 2 tasks{how}"
    assert result.stdout.splitlines()[0] == expected


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["train", "--engine", "steam"], ["'steam'", "'fused'"]),
        (["evaluate", "--precision", "fp64"], ["'fp64'", "'fp32'"]),
        (["train", "--engine", "plain", "--precision", "fp16"], ["fp16 needs the fused engine"]),
        (["evaluate", "--precision", "bf16", "--engine", "plain"], ["bf16 needs the fused engine"]),
        (["train", "--n-shot", "3"], ["--n-shot is 3", "--recipe"]),
        (["train", "--recipe", "glyph"], ["'glyph'", "'glyphs'"]),
        (["train", "method.inner_stesp=1"], ["'method.inner_stesp'", "'method.inner_steps'"]),
        (["train", "--data", "nowhere.store"], ["no store at"]),
        (["evaluate", "--data", "glyphs"], ["28x28", "84x84"]),
        (["evaluate", "--device", "cuda:99"], ["there is no cuda:99"]),
        (["evaluate", "--tasks", "0"], ["--tasks"]),
        (["evaluate", "protocol.queries_at_once=one"], ["queries_at_once"]),
    ],
)
def test_mistakes(trident_here: Bench_command, arguments: list[str], words: list[str]) -> None:
    assert_one_line_error(trident_here(*arguments), *words)


def test_n_shot_chooses_the_recipe(trident_here: Bench_command) -> None:
    small = ["image_size=16", "channels=4", "n_query=2", "inner_steps=1", "--tasks", "1", "--repeats", "1"]
    for given, name in (([], "mini-5w1s"), (["--n-shot", "5"], "mini-5w5s")):
        result = trident_here("evaluate", *given, *small, "--no-yardstick", "--device", "cpu", "--json")
        assert json.loads(result.stdout)["recipe"] == name, result.stderr


def test_a_long_plain_evaluation_is_scaled(monkeypatch: pytest.MonkeyPatch, trident_here: Bench_command) -> None:
    monkeypatch.setattr(benchmarks, "LONGEST_ROUND", 0.0)
    arguments = ["evaluate", *TINY, "--tasks", "4", "--device", "cpu"]
    found = json.loads(trident_here(*arguments, "--json").stdout)
    assert (found["tasks"], found["plain_tasks"]) == (4, 1)
    assert found["plain_seconds"] == pytest.approx(4 * statistics.median(found["plain_seconds_of_each_round"]))
    assert found["difference"] < 1e-4
    assert "timed on 1 of the 4 tasks, and scaled" in trident_here(*arguments).stdout


def test_chunks_give_the_same_gradient() -> None:
    recipe = load_recipe("glyphs", ["channels=4", "n_query=2", "image_size=16", "training.tasks_per_chunk=2"])
    result = benchmarks.bench_train(
        recipe,
        Execution(),
        made_up_store(recipe),
        tasks=3,
        repeats=1,
        yardstick=True,
        progress=lambda who, done, total: None,
    )
    assert result.plain is not None and result.plain.difference < 1e-3


def test_warming_up_is_not_timed() -> None:
    calls: list[str] = []

    def prepare() -> Callable[[], int]:
        calls.append("prepare")

        def work() -> int:
            calls.append("work")
            return len(calls)

        return work

    seen: list[tuple[int, int]] = []
    found = measure(prepare, "cpu", 3, lambda done, total: seen.append((done, total)))
    assert calls == ["prepare", "work", "work", "work", "work"]
    assert len(found.rounds) == 3 and found.result == 5
    assert seen == [(1, 3), (2, 3), (3, 3)]


@pytest.mark.soak
def test_labelling_a_pile_is_timed_from_command_to_table(trident_here: Bench_command) -> None:
    call = ("predict", "--n-way", "2", "--n-shot", "1", "--pictures", "3", "--device", "cpu", "--repeats", "1")
    found = json.loads(trident_here(*call, "--json").stdout)
    assert [found[key] for key in ("benchmark", "n_way", "n_shot", "pictures")] == ["predict", 2, 1, 3]
    assert found["seconds"] == statistics.median(found["seconds_of_each_round"]) > 0.5, "loading torch is part of it"
    assert 0.1 < found["peak_memory_gib"] < 2
    shown = trident_here(*call[:-2], "--repeats", "1", "--size", "30").stdout
    assert "a pile of 3, 30x30 JPEG" in shown and "s from command to CSV" in shown and "GiB" in shown
    assert_one_line_error(trident_here(*call, "--weights", "nothing"), "'trident predict' failed", "nothing")
