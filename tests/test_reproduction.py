"""`trident reproduce`: the list of panels, running them, and what is written from the results."""

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from ablation_grids import Answer
from conftest import assert_one_line_error, run_trident
from trident.reproduction.document import page, whole_document
from trident.reproduction.panels import Model, Reproduction, load_panels
from trident.reproduction.results import BothOrders, Calibrated, Kept, Measured, keep, read
from trident.reproduction.running import missing, state
from trident.reproduction.sections import correlations, section

Reproduce = Callable[..., Answer]

SMALL = """
[tasks]
glyphs = 10

[models.small]
recipe = "glyphs"
settings = ["training.tasks_per_step=2", "training.validation_tasks=4", "protocol.query_order=class_sorted"]
steps = 8
data = ["glyphs"]

[[panels]]
name = "accuracy"
place = "Table 1"
title = "Accuracy"
kind = "accuracy"
paper = "accuracy"
models = ["small"]

[[panels]]
name = "reconstructions"
place = "Beside"
title = "Decoded"
kind = "reconstructions"
models = ["small"]
dataset = "glyphs"
"""


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a short list of panels, one of which was run."""
    folder = tmp_path_factory.mktemp("reproduction")
    (folder / "panels.toml").write_text(SMALL)
    result = run_trident(folder, "reproduce", "accuracy", *places(folder))
    assert result.returncode == 0, result.stderr
    return folder


@pytest.fixture
def reproduce(trident_here: Callable[..., Answer]) -> Reproduce:
    """`trident reproduce` with the list and the results of a folder."""
    return lambda folder, *arguments: trident_here("reproduce", *arguments, *places(folder))


def places(folder: Path) -> list[str]:
    return ["--file", f"{folder}/panels.toml", "--results", f"{folder}/results", "--out", f"{folder}/runs"]


def measured(sorted_accuracy: float, shuffled_accuracy: float) -> BothOrders:
    def one(accuracy: float) -> Measured:
        values = {key: Calibrated(0.1, 0.2, 0.3, 1.5) for key in ("none", "validation", "paper")}
        return Measured(accuracy, 1.0, 600, "a protocol", values)

    orders = {"class_sorted": one(sorted_accuracy), "shuffled": one(shuffled_accuracy)}
    return BothOrders(orders, sorted_accuracy - shuffled_accuracy, 0.5, 3.0, "a GPU", "abc")


def kept(steps: int = 4000, error: str | None = None) -> Kept:
    return Kept("recipe", 1, "class_sorted", steps, steps, 82_000, 410_760, 170.0, "a GPU", error)


def test_every_table_and_figure_has_a_panel() -> None:
    from trident.report.paper_results import paper_tables

    reproduction = load_panels()
    shown = {panel.paper for panel in reproduction.panels}
    # The table of other Conv4 methods is not the paper's.
    assert {table.name for table in paper_tables()} - {"conv4"} <= shown
    assert all(panel.note for panel in reproduction.panels if panel.kind == "drawing")
    for panel in reproduction.panels:
        for model in reproduction.models_of(panel):
            assert all(dataset in reproduction.tasks for dataset in model.data)


def test_ablations_share_their_models() -> None:
    reproduction = load_panels()
    panels = [panel for panel in reproduction.panels if panel.kind == "ablation"]
    models = [model for panel in panels for model in reproduction.models_of(panel)]
    assert (len(models), len({model.name for model in models})) == (28, 25)
    named: dict[str, Model] = {}
    for model in models:
        assert named.setdefault(model.name, model) == model
        recipe = model.trained_recipe()
        assert recipe.training.steps == 4000 and recipe.protocol.query_order == "class_sorted"
    assert len({repr(model.trained_recipe()) for model in named.values()}) == 25
    assert named["mini-5w1s"].trained_recipe(0.5).training.steps == 2000


def test_what_is_run_is_not_run_again(small: Path, reproduce: Reproduce) -> None:
    found = read("small", small / "results")
    assert found is not None
    both = found.measured["glyphs"]
    sorted_one, shuffled = both.orders["class_sorted"], both.orders["shuffled"]
    assert both.difference == pytest.approx(sorted_one.accuracy - shuffled.accuracy)
    assert "class-sorted queries" in sorted_one.protocol and "shuffled queries" in shuffled.protocol
    assert (found.steps, found.n_shot, found.trained_order) == (8, 1, "class_sorted")
    again = reproduce(small, "accuracy")
    assert (again.returncode, again.stderr.strip()) == (0, "accuracy: nothing is missing")
    states = {one["name"]: one["state"] for one in json.loads(reproduce(small, "--json").stdout)}
    assert states == {"accuracy": "run", "reconstructions": "not run"}


def test_a_panel_that_shares_the_model_trains_nothing(small: Path, reproduce: Reproduce) -> None:
    result = reproduce(small, "reconstructions", "--document", f"{small}/d.md", "--page", f"{small}/p.html")
    assert result.returncode == 0 and "finished before" in result.stderr
    found = read("small", small / "results")
    assert found is not None and found.measured and found.reconstructions["glyphs"].tasks == 10
    first = (small / "d.md").read_bytes(), (small / "p.html").read_bytes()
    assert b"### Table 1: Accuracy" in first[0] and b"data:image/jpeg;base64" in first[1]
    reproduce(small, "--document", f"{small}/d.md", "--page", f"{small}/p.html")
    assert ((small / "d.md").read_bytes(), (small / "p.html").read_bytes()) == first


def test_a_larger_budget_needs_another_training(tmp_path: Path) -> None:
    reproduction = load_panels()
    panel = reproduction.panel("ablation-training")
    models = reproduction.models_of(panel)
    assert state(reproduction, panel, tmp_path) == "not run"
    keep(models[0].name, replace(kept(2000), measured={"mini-imagenet": measured(40, 30)}), tmp_path)
    keep(models[1].name, kept(error="step 5: the loss is not finite"), tmp_path)
    assert state(reproduction, panel, tmp_path) == "1 of 6 run"
    assert [model for model, _ in missing(reproduction, panel, tmp_path, 0.5)] == models[2:]
    rows = section(reproduction, panel, tmp_path).rows
    assert "2,000 of 82,000" in rows[0] and "step 5: the loss is not finite" in rows[1] and "not run" in rows[2]


@pytest.mark.parametrize("sign", [1, -1])
def test_correlations_follow_the_published_order(sign: int, tmp_path: Path) -> None:
    reproduction = load_panels()
    panel = reproduction.panel("ablation-latents")
    assert correlations(reproduction, panel, tmp_path) == []
    for row in reproduction.ablation(panel):
        assert row.paper is not None
        both = measured(50 + sign * row.paper.value / 10, 40 - sign * row.paper.value / 10)
        keep(row.model.name, replace(kept(), measured={"mini-imagenet": both}), tmp_path)
    found = correlations(reproduction, panel, tmp_path)
    assert [(one.order, round(one.rho, 6), one.rows) for one in found] == [
        ("class_sorted", sign, 9),
        ("shuffled", -sign, 9),
    ]
    assert f"sorted by class: {sign:+.2f} (9 rows" in whole_document("# Title", reproduction, tmp_path)
    assert "Spearman" in page(reproduction, tmp_path)


def test_errors_are_one_line(small: Path, reproduce: Reproduce, trident_here: Callable[..., Answer]) -> None:
    real = ["--results", f"{small}/other"]
    assert_one_line_error(trident_here("reproduce", "calibration", *real), "needs the store of mini-imagenet")
    assert_one_line_error(trident_here("reproduce", "calibratoin", *real), "did you mean")
    assert_one_line_error(trident_here("reproduce", "accuracy", "--cub", "glyphs", *real), "holds glyphs, not cub")
    assert_one_line_error(reproduce(small, "accuracy", "--budget", "2"), "holds another run: training.steps is 8")
    (small / "results" / "damaged.json").write_text("{")
    listed = (small / "panels.toml").read_text().replace("small", "damaged")
    (small / "damaged.toml").write_text(listed)
    result = trident_here("reproduce", "--file", f"{small}/damaged.toml", "--results", f"{small}/results")
    assert_one_line_error(result, "damaged.json is damaged")


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ('kind = "accuracy"', 'kind = "acuracy"'),
        ("steps = 8", "steps = 0"),
        ('models = ["small"]', 'models = ["other"]'),
        ('data = ["glyphs"]', "data = []"),
        ("[tasks]", "[task]"),
    ],
)
def test_a_wrong_list_of_panels_is_told(text: str, problem: str, tmp_path: Path, reproduce: Reproduce) -> None:
    (tmp_path / "panels.toml").write_text(SMALL.replace(text, problem))
    assert_one_line_error(reproduce(tmp_path, "accuracy"), "")


@pytest.mark.slow
def test_a_killed_run_goes_on(tmp_path: Path, reproduce: Reproduce) -> None:
    (tmp_path / "panels.toml").write_text(SMALL.replace("steps = 8", "steps = 16").replace("_step=2", "_step=8"))
    command = [sys.executable, "-m", "trident", "reproduce", "accuracy", *places(tmp_path)]
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    saved, deadline = tmp_path / "runs" / "small" / "best.safetensors", time.monotonic() + 60
    while not saved.is_file() and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert saved.is_file() and read("small", tmp_path / "results") is None
    result = reproduce(tmp_path, "accuracy")
    assert result.returncode == 0, result.stderr
    found = read("small", tmp_path / "results")
    assert found is not None and found.steps == 16 and found.measured


def test_the_document_is_made_from_the_results() -> None:
    reproduction: Reproduction = load_panels()
    root = Path(__file__).parents[1] / "docs"
    text = (root / "reproduction.md").read_text("utf-8")
    assert whole_document(text.partition("\n## Each table")[0], reproduction) == text
