"""The paper, run again: the list of panels, running them, and what is written from the results."""

import json
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from ablation_grids import Answer
from commands import assert_one_line_error, run_here
from studies.reproduction.__main__ import study
from studies.reproduction.document import whole_document
from studies.reproduction.measuring import with_query_order
from studies.reproduction.panels import FILE, Model, load_panels
from studies.reproduction.results import (
    ORDERS,
    read,
)
from studies.reproduction.running import _newer
from trident.data.glyphs import open_glyphs
from trident.errors import TridentError
from trident.grids.grid import RESULT
from trident.learning.checkpoint import LAST, load_checkpoint, save_checkpoint
from trident.measuring.calibration import calibrate
from trident.measuring.record import FILE_NAME
from trident.weights import weight_names

Reproduce = Callable[..., Answer]
ROOT = Path(__file__).parents[2]
STUDY = (sys.executable, "-m", "studies.reproduction")

SMALL = """
[tasks]
glyphs = 4

[models.small]
recipe = "glyphs"
settings = ["backbone.channels=8", "tasks_per_step=1", "validation_tasks=2", "protocol.query_order=class_sorted"]
steps = 4
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

[[panels]]
name = "latents"
place = "Figure 5"
title = "Latents"
kind = "latents"
models = ["small"]
dataset = "glyphs"

[[panels]]
name = "calibration"
place = "Table 3"
title = "Calibration"
kind = "calibration"
paper = "calibration"
models = ["small"]
dataset = "glyphs"
"""


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a short list of panels, one of which was run."""
    folder = tmp_path_factory.mktemp("reproduction")
    (folder / "panels.toml").write_text(SMALL)
    result = run_here(ROOT, "accuracy", *places(folder), command=study)
    assert result.returncode == 0, result.stderr
    return folder


@pytest.fixture
def reproduce(trident_here: Callable[..., Answer]) -> Reproduce:
    """The study with the list and the results of a folder."""
    return lambda folder, *arguments: trident_here(*arguments, *places(folder), command=study)


def places(folder: Path) -> list[str]:
    return ["--file", f"{folder}/panels.toml", "--results", f"{folder}/results", "--out", f"{folder}/runs"]


def test_every_table_and_figure_has_a_panel() -> None:
    from studies.reproduction.paper_results import paper_tables

    reproduction = load_panels()
    shown = {panel.paper for panel in reproduction.panels}
    # The table of other Conv4 methods is not the paper's.
    assert {table.name for table in paper_tables()} - {"conv4"} <= shown
    assert all(panel.note for panel in reproduction.panels if panel.kind == "drawing")
    for panel in reproduction.panels:
        for model in reproduction.models_of(panel):
            assert model.name and (model.weights in weight_names() or model.trained_recipe().training.steps > 0)


def test_ablations_share_their_models() -> None:
    reproduction = load_panels()
    panels = [panel for panel in reproduction.panels if panel.kind == "ablation"]
    models = [model for panel in panels for model in reproduction.models_of(panel)]
    assert (len(models), len({model.name for model in models})) == (30, 27)
    named: dict[str, Model] = {}
    for model in models:
        assert named.setdefault(model.name, model) == model
        recipe = model.trained_recipe()
        assert recipe.training.steps == 4000 and recipe.protocol.query_order == "class_sorted"
    assert len({repr(model.trained_recipe()) for model in named.values()}) == 27
    assert named["mini-5w1s"].trained_recipe(0.5).training.steps == 2000


def test_what_is_run_is_not_run_again(small: Path, reproduce: Reproduce) -> None:
    found = read("small", small / "results")
    assert found is not None
    both = found.measured["glyphs"]
    sorted_one, shuffled = both.orders["class_sorted"], both.orders["shuffled"]
    assert both.difference == pytest.approx(sorted_one.accuracy - shuffled.accuracy)
    assert "class-sorted queries" in sorted_one.described and "shuffled queries" in shuffled.described
    assert (found.steps, found.n_shot, found.trained_order) == (4, 1, "class_sorted")
    assert found.training_seconds and found.training_device == both.source.device
    again = reproduce(small, "accuracy")
    assert (again.returncode, again.stderr.strip()) == (0, "")
    assert f"{shuffled.accuracy:.2f} ± {shuffled.ci95:.2f}" in again.stdout
    states = {one["name"]: one["state"] for one in json.loads(reproduce(small, "--json").stdout)}
    assert states == {"accuracy": "done", "reconstructions": "not run", "latents": "not run", "calibration": "done"}


def test_measurements_are_those_of_the_other_commands(small: Path, reproduce: Reproduce) -> None:
    """Temperatures are fitted on validation tasks, or on the very tasks that are scored."""
    checkpoint, store = load_checkpoint(small / "runs" / "small"), open_glyphs()
    found = read("small", small / "results")
    assert found is not None
    for order in ("class_sorted", "shuffled"):
        one = found.measured["glyphs"].orders[order]
        model = with_query_order(checkpoint, order)
        for fitted in ("validation", "paper"):
            expected = calibrate(model, store, fitted, store, 4, split="test", tasks=4, seed=0)
            assert expected.scaled is not None
            assert one.accuracy == pytest.approx(expected.evaluation.accuracy)
            ours = one.calibration[fitted]
            theirs = expected.scaled
            assert (ours.ece, ours.mce, ours.brier, ours.temperature) == pytest.approx(
                (theirs.ece, theirs.mce, theirs.brier, theirs.temperature), rel=1e-5
            )


def test_panels_that_share_a_model_train_nothing(small: Path, reproduce: Reproduce) -> None:
    made = ["--document", f"{small}/d.md", "--page", f"{small}/p.html", "--figures", str(small)]
    result = reproduce(small, "reconstructions", "latents", *made)
    assert result.returncode == 0 and "step " not in result.stderr, result.stderr
    found = read("small", small / "results")
    assert found is not None and found.measured
    assert set(found.reconstructions["glyphs"].orders) == set(found.latents["glyphs"].scores) == set(ORDERS)
    for order in ORDERS:
        assert [len(one["places"]) for one in found.latents["glyphs"].points[order]] == [25] * 4
    first = {path.name: path.read_bytes() for path in small.glob("*.*")}
    assert b"### Table 1: Accuracy" in first["d.md"] and b"data:image/jpeg;base64" in first["p.html"]
    assert {"reproduction-order.svg", "reproduction-latents-small-class-sorted.svg"} <= first.keys()
    assert reproduce(small, *made).returncode == 0
    assert {path.name: path.read_bytes() for path in small.glob("*.*")} == first


def test_a_training_that_failed_is_measured_with_its_best_weights(
    small: Path, tmp_path: Path, reproduce: Reproduce
) -> None:
    shutil.copytree(small / "runs", tmp_path / "runs")
    shutil.copy(small / "panels.toml", tmp_path)
    run = tmp_path / "runs" / "small"
    save_checkpoint(run / LAST, replace(load_checkpoint(run / LAST), step=3))
    result = json.loads((run / RESULT).read_text())
    result["error"] = "step 4: the loss is not finite. The state after step 3 is kept in a file"
    (run / RESULT).write_text(json.dumps(result))
    answer = reproduce(tmp_path, "accuracy")
    assert answer.returncode == 0, answer.stderr
    assert "(the loss is not finite)" in answer.stdout
    found = read("small", tmp_path / "results")
    assert found is not None and found.error == "the loss is not finite"
    assert found.measured["glyphs"].orders.keys() == set(ORDERS)
    assert "done" in reproduce(tmp_path).stdout.splitlines()[0].split()


@pytest.mark.soak
def test_budgets_have_folders_of_their_own_and_fewer_steps_replace_nothing(small: Path, reproduce: Reproduce) -> None:
    before = (small / "results" / FILE_NAME).read_bytes()
    more = reproduce(small, "accuracy", "--budget", "3")
    assert more.returncode == 0, more.stderr
    found = read("small", small / "results")
    assert found is not None and found.steps == 12 and (small / "runs" / "small-12-steps").is_dir()
    assert "nothing is left to run" in reproduce(small, "accuracy", "--budget", "0.5").stderr
    (small / "results" / FILE_NAME).unlink()
    assert reproduce(small, "accuracy", "--budget", "0.5").returncode == 0
    fewer = read("small", small / "results")
    (small / "results" / FILE_NAME).write_bytes(before)  # other tests need it
    assert fewer is not None and fewer.steps == 2
    with pytest.raises(TridentError, match="results of 12 steps are kept"):
        _newer(found, fewer)


def test_what_is_run_is_shown_without_stores_and_writes_nothing(
    trident_here: Callable[..., Answer], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert "fitted on validation tasks" in trident_here("calibration", command=study).stdout
    found = json.loads(trident_here("parameters", "calibration", "--json", command=study).stdout)
    assert [(one["name"], one["state"]) for one in found] == [("parameters", "nothing to run"), ("calibration", "done")]
    assert found[1]["rows"][0]["ECE"] == "0.0036"
    assert "drawings of the method" in trident_here("process", command=study).stdout
    assert list(tmp_path.iterdir()) == []
    another = 'paper = "attfex"\nmore = [["training.seed=99"]]'
    (tmp_path / "panels.toml").write_text(FILE.read_text().replace('paper = "attfex"', another))
    partly = trident_here("attfex", "--file", "panels.toml", command=study)
    assert partly.returncode == 0 and "48.87 ± 0.71" in partly.stdout and "not run" in partly.stdout
    assert partly.stderr.strip().endswith("for it, give the stores of mini-imagenet with --data STORE")
    assert list(tmp_path.iterdir()) == [tmp_path / "panels.toml"]
    assert trident_here("--figures", "new", command=study).returncode == 0
    assert (tmp_path / "new" / "reproduction-order.svg").is_file()


def test_own_results_are_listed_and_a_fresh_start_has_none(
    small: Path, trident_here: Callable[..., Answer], tmp_path: Path
) -> None:
    own = ("--file", str(small / "panels.toml"), "--out", str(small / "runs"))
    (small / "runs" / "results").symlink_to(small / "results")  # where they are unless --results says otherwise
    listed = trident_here(*own, command=study)
    assert re.search(r"^accuracy +done ", listed.stdout, re.M) and f"{small / 'runs' / 'results'}" in listed.stderr
    (tmp_path / "empty" / "results").mkdir(parents=True)  # as a run leaves it that was stopped early
    included = trident_here("--out", "empty", command=study)
    assert re.search(r"^accuracy +done ", included.stdout, re.M) and not included.stderr
    calibration = ("calibration", "--fresh", "--out", str(tmp_path / "again"))
    assert_one_line_error(trident_here(*calibration, command=study), "needs the store of mini-imagenet")
    assert not (tmp_path / "again").exists()


def test_errors_are_one_line(small: Path, reproduce: Reproduce, trident_here: Callable[..., Answer]) -> None:
    def told(*arguments: str, words: str) -> None:
        assert_one_line_error(trident_here(*arguments, "--out", f"{small}/other", command=study), words)

    told("attfex", "--fresh", words="needs the store of mini-imagenet: give it with --data STORE")
    told("attfex", "--fresh", "--data", "glyphs", words="needs the store of mini-imagenet")
    told("ablation", words="did you mean 'ablation-training' or 'ablation-latents' or 'ablation-attfex-width'?")
    told("--budget", "0.5", words="run what? Name a table or figure")
    told("--results", "nowhere", words="there is no folder of results at nowhere")
    told("calibratoin", words="did you mean")
    told("accuracy", "--cub", "glyphs", words="holds glyphs, not cub")
    told("--document", "/nowhere/d.md", words="the folder /nowhere does not exist")
    told("--document", f"{small}/panels.toml", words="is another document")
    told("accuracy", "--file", f"{small}/panels.toml", "--results", f"{small}/panels.toml", words="is a file")
    (small / "binary.md").write_bytes(b"\xff\xfe")
    told("--document", f"{small}/binary.md", words="is another document")
    assert not (small / "other").exists()
    (small / "results" / "damaged.json").write_text("{")
    listed = (small / "panels.toml").read_text().replace("small", "damaged")
    (small / "damaged.toml").write_text(listed)
    told("--file", f"{small}/damaged.toml", "--results", f"{small}/results", words="damaged.json is damaged")


@pytest.mark.parametrize(
    ("text", "wrong", "words"),
    [
        ('kind = "accuracy"', 'kind = "acuracy"', "did you mean 'accuracy'"),
        ("steps = 4", "steps = 0", "a model with a recipe needs 'steps'"),
        ('models = ["small"]', 'models = ["other"]', "names the unknown models other"),
        ('data = ["glyphs"]', "data = []", "needs 'data'"),
        ("[tasks]", "[task]", "unknown key 'task'"),
        ("glyphs = 4", "glyphs = 1", "an interval needs at least 2 tasks"),
        ("glyphs = 4", "omniglot = 4", "needs a number of tasks: tasks.glyphs"),
        ('dataset = "glyphs"', "", "needs 'dataset'"),
        ('name = "latents"', 'name = "accuracy"', "two panels are called accuracy"),
        ('recipe = "glyphs"', 'weights = "glyphs-protonet"', "either 'weights' or 'recipe'|has none"),
    ],
)
def test_a_wrong_list_of_panels_is_told(text: str, wrong: str, words: str, tmp_path: Path) -> None:
    (tmp_path / "panels.toml").write_text(SMALL.replace(text, wrong))
    with pytest.raises(TridentError, match=words):
        load_panels(tmp_path / "panels.toml")


@pytest.mark.slow
def test_a_killed_run_goes_on(tmp_path: Path, reproduce: Reproduce) -> None:
    (tmp_path / "panels.toml").write_text(SMALL.replace("steps = 4", "steps = 12").replace("_step=1", "_step=4"))
    process = subprocess.Popen([*STUDY, "accuracy", *places(tmp_path)], cwd=ROOT, stderr=subprocess.DEVNULL)
    saved, deadline = tmp_path / "runs" / "small" / "best.safetensors", time.monotonic() + 60
    while not saved.is_file() and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert saved.is_file() and read("small", tmp_path / "results") is None
    result = reproduce(tmp_path, "accuracy")
    assert result.returncode == 0, result.stderr
    found = read("small", tmp_path / "results")
    assert found is not None and found.steps == 12 and found.measured


def test_the_document_is_made_from_the_results() -> None:
    reproduction = load_panels()
    text = (ROOT / "docs" / "reproduction.md").read_text("utf-8")
    assert whole_document(text.partition("\n## Each table")[0], reproduction) == text
