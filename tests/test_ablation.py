"""Grids of runs: what a grid file means, and that work is neither lost, done twice nor mixed with other work."""

import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from conftest import assert_one_line_error, tiny_store
from trident.ablations import Grid, grid_from, grid_names, grid_values, load_grid
from trident.checkpoint import BEST, LAST, load_checkpoint
from trident.cli import main
from trident.console import TrainingProgress
from trident.data.store import write_store
from trident.errors import TridentError

GLYPHS = """
summary = "letters, for tests"
recipe = "glyphs"
[settings]
episode.n_way = 3
episode.n_query = 2
model.channels = 4
model.semantic_latents = 4
[settings.training]
steps = 4
tasks_per_step = 1
validate_every = 2
validation_tasks = 2
save_every = 1
log_every = 1
[evaluation]
tasks = 3
[[axes]]
setting = "model.label_latents"
label = "latents"
values = [3, 5]
[[axes]]
setting = "model.attfex"
values = ["positional", "off"]
"""
CELLS = ["latents-3-attfex-positional", "latents-3-attfex-off", "latents-5-attfex-positional", "latents-5-attfex-off"]

TINY_RECIPE = """
summary = "noise, for tests"
dataset = "noise"
[episode]
n_way = 3
n_query = 2
[model]
image_size = 16
image_channels = 1
channels = 4
label_latents = 3
semantic_latents = 3
[adaptation]
steps = 1
[training]
steps = 4
tasks_per_step = 1
validate_every = 2
validation_tasks = 2
save_every = 1
log_every = 1
"""
TINY_GRID = 'summary = "noise"\nrecipe = "tiny.toml"\n[evaluation]\ntasks = 2\n'
RATES = '[[axes]]\nsetting = "adaptation.rate"\nlabel = "alpha"\nvalues = [{}]\n'


class Answer(subprocess.CompletedProcess[str]):
    """What the command did."""


Command = Callable[..., Answer]


@pytest.fixture
def trident(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    """The command in this very process, without the seconds that torch takes to load, in a folder with a tiny grid."""
    store = tiny_store()
    write_store(tmp_path / "noise.store", "noise", store.classes, iter(store.images))
    (tmp_path / "tiny.toml").write_text(TINY_RECIPE)
    monkeypatch.chdir(tmp_path)

    def run(*arguments: object) -> Answer:
        monkeypatch.setattr(sys, "argv", ["trident", "ablate", *map(str, arguments)])
        with pytest.raises(SystemExit) as caught:
            main()
        said = capsys.readouterr()
        return Answer([], int(caught.value.code or 0), said.out, said.err)

    return run


def grid_file(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "grid.toml"
    path.write_text(text)
    return path


def tiny_grid(tmp_path: Path, *rates: float) -> list[object]:
    """The arguments for a grid over inner rates, which is trained within a second."""
    return [
        grid_file(tmp_path, TINY_GRID + RATES.format(", ".join(map(str, rates)))),
        *("--out", "d", "--data", "noise.store"),
    ]


def result_of(folder: Path) -> dict[str, Any]:
    result: dict[str, Any] = json.loads((folder / "result.json").read_text())
    return result


def trained_steps(folder: Path) -> list[int]:
    lines = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    return [line["step"] for line in lines if line["kind"] == "train"]


def modified(folder: Path) -> dict[str, int]:
    return {str(path): path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file()}


# What a grid file means.


def settings_of(grid: Grid) -> list[tuple[Any, ...]]:
    return [tuple(cell.settings.values()) for cell in grid.cells]


def test_the_papers_grids() -> None:
    assert set(grid_names()) == {"batch-and-steps", "latents", "attfex-widths", "attfex", "glyphs-2x2"}
    batch = load_grid("batch-and-steps")
    assert list(batch.labels) == ["training.tasks_per_step", "adaptation.steps"]
    assert settings_of(batch) == [(5, 3), (5, 5), (10, 3), (10, 5), (20, 3), (20, 5)]
    assert [(cell.recipe.training.tasks_per_step, cell.recipe.adaptation.steps) for cell in batch.cells] == settings_of(
        batch
    )
    widths = (32, 64, 128)
    squares = {
        "latents": ["model.label_latents", "model.semantic_latents"],
        "attfex-widths": ["model.attfex_width_m", "model.attfex_width_n"],
    }
    for name, keys in squares.items():
        grid = load_grid(name)
        assert list(grid.labels) == keys
        assert settings_of(grid) == [(m, n) for m in widths for n in widths]
    assert settings_of(load_grid("attfex")) == [("positional",), ("off",)]
    for name in ("batch-and-steps", "latents", "attfex-widths", "attfex"):
        grid = load_grid(name)
        assert {cell.recipe.name for cell in grid.cells} == {"mini-5w1s"}
        assert all(cell.recipe.protocol.query_order == "shuffled" for cell in grid.cells)
        assert grid.paper is not None
        # Each holds the paper's own configuration, with the paper's own number.
        assert (86.11, 0.59) in grid.paper.accuracy.values()
        assert "class-sorted" in grid.paper.note
        assert "test classes" in grid.paper.note
    assert batch.paper is not None
    assert batch.paper.accuracy == {
        "B-5-n-5": (67.43, 0.75),
        "B-10-n-3": (69.21, 0.66),
        "B-10-n-5": (74.6, 0.84),
        "B-20-n-3": (80.82, 0.68),
        "B-20-n-5": (86.11, 0.59),
    }
    assert len(load_grid("glyphs-2x2").cells) == 4


@pytest.mark.parametrize("name", grid_names())
def test_grids_are_measured_on_validation_classes_and_survive_a_round_trip(name: str) -> None:
    grid = load_grid(name)
    assert grid.evaluation.split == "val"
    assert grid_from(json.loads(json.dumps(grid_values(grid))), "again") == grid


@pytest.mark.parametrize(("recipe", "on", "off"), [("mini-5w5s", 95.95, 78.53), ("tiered-5w1s", 86.97, 69.32)])
def test_another_recipe_has_its_own_figures_in_the_paper(recipe: str, on: float, off: float) -> None:
    grid = load_grid("attfex", recipe=recipe)
    assert {cell.recipe.name for cell in grid.cells} == {recipe}
    assert grid.paper is not None
    assert [figures[0] for figures in grid.paper.accuracy.values()] == [on, off]
    assert load_grid("latents", recipe=recipe).paper is None


def test_settings_that_vary_together_crossed_with_one_more(tmp_path: Path) -> None:
    pairs = '[[axes]]\nsettings = ["training.tasks_per_step", "adaptation.steps"]\nvalues = [[4, 3], [8, 1]]\n'
    single = '[[axes]]\nsetting = "training.clip_norm"\nvalues = [1, "none"]\n'
    head = 'summary = "s"\nrecipe = "glyphs"\n[settings]\ntraining.steps = 7\n'
    grid = load_grid(str(grid_file(tmp_path, head + pairs + single)), ["model.channels=3"], split="test", tasks=5)
    assert settings_of(grid) == [(4, 3, 1.0), (4, 3, None), (8, 1, 1.0), (8, 1, None)]
    assert grid.cells[1].name == "tasks_per_step-4-steps-3-clip_norm-none"
    assert {(cell.recipe.training.steps, cell.recipe.model.channels) for cell in grid.cells} == {(7, 3)}
    assert (grid.evaluation.split, grid.evaluation.tasks) == ("test", 5)


def test_cells_one_by_one(tmp_path: Path) -> None:
    (tmp_path / "tiny.toml").write_text(TINY_RECIPE)
    cells = '[[cells]]\nname = "as-it-is"\n[[cells]]\nname = "large"\nmodel.channels = 8\nadaptation.steps = 2\n'
    grid = load_grid(str(grid_file(tmp_path, TINY_GRID + cells)))
    assert [cell.name for cell in grid.cells] == ["as-it-is", "large"]
    assert [(cell.recipe.model.channels, cell.recipe.adaptation.steps) for cell in grid.cells] == [(4, 1), (8, 2)]


AXIS = '[[axes]]\nsetting = "model.channels"\nvalues = [4, 8]\n'
HEAD = 'summary = "s"\nrecipe = "glyphs"\n'
CELL = '[[cells]]\nname = "{}"\nmodel.channels = {}\n'
BAD_GRIDS = [
    ("summary = ", ["not valid TOML"]),
    ('recipe = "glyphs"\n' + AXIS, ["'summary' is missing"]),
    ('summary = "s"\nrecipe = "glyph"\n' + AXIS, ["grid.toml", "'glyph'", "'glyphs'"]),
    ('summary = "s"\nrecipe = "mine.toml"\n' + AXIS, ["no recipe file at", "mine.toml"]),
    (HEAD, ["either [[axes]] or [[cells]]"]),
    (HEAD + AXIS + CELL.format("a", 3), ["not both"]),
    (HEAD + "axes = []", ["the grid is empty"]),
    (HEAD + AXIS.replace("[4, 8]", "[]"), ["the grid is empty"]),
    (HEAD + "[evalation]\n" + AXIS, ["'evalation'", "'evaluation'"]),
    (HEAD + '[evaluation]\nsplit = "tset"\n' + AXIS, ["evaluation.split is 'tset'", "val"]),
    (HEAD + "[evaluation]\ntasks = 1\n" + AXIS, ["evaluation.tasks is 1", "2 or more"]),
    (HEAD + AXIS.replace("channels", "chanels"), ["'model.chanels'", "'model.channels'"]),
    (HEAD + AXIS.replace("model.channels", "channels"), ["write model.channels"]),
    (HEAD + "[settings]\nmodel.depth = 3\n" + AXIS, ["unknown setting 'model.depth'"]),
    (HEAD + "[settings]\nmodel.channels = 3\n" + AXIS, ["model.channels", "varies too"]),
    (HEAD + AXIS.replace("4, 8", '4, "many"'), ["cell channels-many", "a whole number"]),
    (HEAD + AXIS.replace("4, 8", "4, 0"), ["cell channels-0", "at least 1"]),
    (HEAD + AXIS.replace("4, 8", "4, 4"), ["two cells are called 'channels-4'"]),
    (HEAD + AXIS + AXIS, ["varied twice"]),
    (HEAD + AXIS.replace('setting = "model.channels"', 'settings = ["model.channels", "training.rate"]'), ["a list"]),
    (HEAD + AXIS.replace("[4, 8]", "4"), ["must be a list"]),
    (HEAD + CELL.format("a", 3) + CELL.format("A", 4), ["two cells are called 'A'"]),
    (HEAD + CELL.format("a", 3) + CELL.format("b", 3), ["a and b have the same settings"]),
    (HEAD + CELL.format("../a", 3), ["'../a' cannot be a cell's name"]),
    (HEAD + "[[cells]]\nmodel.channels = 3\n", ["cells[0] needs a name"]),
    (
        HEAD + AXIS + '[paper]\ntable = "t"\nnote = "n"\naccuracy.glyphs.channels-5 = [1, 2]',
        ["channels-5'", "'channels-8'"],
    ),
    (HEAD + AXIS + '[paper]\ntable = "t"\nnote = "n"\naccuracy.glyphs.channels-4 = [1]', ["[accuracy, interval]"]),
]


@pytest.mark.parametrize(("text", "words"), BAD_GRIDS)
def test_wrong_grid_files(trident: Command, tmp_path: Path, text: str, words: list[str]) -> None:
    grid = grid_file(tmp_path, text)
    before = modified(tmp_path)
    assert_one_line_error(trident(grid, "--out", "d"), *words)
    assert modified(tmp_path) == before
    assert not (tmp_path / "d").exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["latent", "--out", "d"], ["'latent'", "'latents'"]),
        (["mine.toml", "--out", "d"], ["no grid file at mine.toml"]),
        (["latents", "--out", "d"], ["--data STORE"]),
        (["latents", "--out", "d", "label_latents=3"], ["what this grid varies"]),
        (["latents", "--out", "d", "training.stesp=3"], ["'training.stesp'", "'training.steps'"]),
        (["latents", "--out", "d", "--recipe", "mini"], ["'mini'"]),
        (["training.steps=3", "--out", "d"], ["which grid?"]),
        (["--out", "d"], ["no grid in d"]),
        (["latents", "--out", "d", "--show"], ["no grid in d"]),
        (["latents", "--show"], ["--out DIR"]),
        (["glyphs-2x2", "--out", "d", "--only", "3/2"], ["'3/2'", "K/N"]),
        (["glyphs-2x2", "--out", "d", "--only", "1,2"], ["'1,2'", "K/N"]),
        (["glyphs-2x2", "--out", "tiny.toml"], ["tiny.toml is a file"]),
        (["glyphs-2x2", "--out", "d", "--data", "noise.store"], ["cell z_label-8-attfex-positional", "16x16"]),
        # Every cell is looked at first, the last as well.
        (["queries.toml", "--out", "d"], ["cell n_query-30", "too few", "31 are needed"]),
    ],
)
def test_mistakes_are_found_before_anything_is_written(
    trident: Command, tmp_path: Path, arguments: list[str], words: list[str]
) -> None:
    (tmp_path / "queries.toml").write_text(HEAD + '[[axes]]\nsetting = "episode.n_query"\nvalues = [2, 30]\n')
    before = modified(tmp_path)
    assert_one_line_error(trident(*arguments), *words)
    assert modified(tmp_path) == before
    assert not (tmp_path / "d").exists()


def test_grids_and_cells_are_listed(trident: Command) -> None:
    listed = trident().stdout.splitlines()
    assert len(listed) == len(grid_names())
    assert any(line.startswith("latents") and "9 cells" in line for line in listed)
    shown = trident("batch-and-steps").stdout
    assert "6 B-20-n-5" in shown
    assert "training.tasks_per_step=20 adaptation.steps=5" in shown
    assert "600 tasks of the val classes" in shown


# Training, measuring, and going on.


def start(folder: Path, *arguments: object) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "trident", "ablate", *map(str, arguments)]
    return subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A grid of four cells on the glyphs, trained by the command without interruption."""
    folder = tmp_path_factory.mktemp("whole")
    grid_file(folder, GLYPHS)
    process = start(folder, "grid.toml", "--out", "d")
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    assert "4 of 4 cells are finished" in out
    return folder / "d"


def assert_same_weights(one: Path, other: Path) -> None:
    for cell in CELLS:
        for name in (LAST, BEST):
            mine, theirs = load_checkpoint(one / cell / name), load_checkpoint(other / cell / name)
            assert mine.step == theirs.step
            for group in ("parameters", "running", "optimizer"):
                a, b = getattr(mine, group), getattr(theirs, group)
                assert a.keys() == b.keys()
                assert all(torch.equal(a[key], b[key]) for key in a), (cell, name, group)
        a, b = result_of(one / cell), result_of(other / cell)
        assert (a["evaluation"], a["settings"], a["best_step"]) == (b["evaluation"], b["settings"], b["best_step"])


def test_results_say_what_was_trained_and_how_it_was_measured(whole: Path) -> None:
    result = result_of(whole / CELLS[3])
    assert result["settings"] == {"model.label_latents": 5, "model.attfex": "off"}
    assert result["recipe"]["training"]["steps"] == result["steps"] == 4
    checkpoint = load_checkpoint(whole / CELLS[3])
    assert result["parameters"] == sum(value.numel() for value in checkpoint.parameters.values())
    assert result["best_step"] == checkpoint.step
    assert 0 < result["seconds"]["training"] < 60
    protocol = result["evaluation"]["protocol"]
    assert (protocol["dataset"], protocol["split"], protocol["tasks"], protocol["seed"]) == ("glyphs", "val", 3, 0)
    assert result["error"] is None
    assert not list(whole.rglob("*lock"))


def test_the_table_and_the_plot(whole: Path) -> None:
    accuracy = result_of(whole / CELLS[3])["evaluation"]
    entry = f"{accuracy['accuracy']:.2f} ± {accuracy['ci95']:.2f}"
    lines = (whole / "table.md").read_text().splitlines()
    assert "| latents \\\\ attfex | positional | off |" in lines
    (last,) = [line for line in lines if line.startswith("| 5 |")]
    assert last.endswith(f"| {entry} |")
    assert sum("glyphs val, 3-way 1-shot" in line and "3 tasks" in line for line in lines) == 1
    plot = (whole / "plot.svg").read_text()
    assert plot.rstrip().endswith("</svg>")
    for words in ("letters, for tests", "latents 3", "latents 5", "positional", "accuracy, %", "shuffled queries"):
        assert words in plot, words


def test_killed_half_way_it_goes_on_as_if_it_had_never_stopped(tmp_path: Path, whole: Path) -> None:
    grid_file(tmp_path, GLYPHS)
    out = tmp_path / "d"
    process = start(tmp_path, "grid.toml", "--out", "d")
    log = out / CELLS[1] / "log.jsonl"
    while process.poll() is None and not (log.exists() and log.read_text().count('"train"') >= 2):
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert (out / CELLS[0] / "result.json").exists()
    assert not (out / CELLS[1] / "result.json").exists()
    assert 1 <= load_checkpoint(out / CELLS[1] / LAST).step < 4
    finished = modified(out / CELLS[0])
    process = start(tmp_path, "grid.toml", "--out", "d")
    printed, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    assert f"cell 1/4 {CELLS[0]}: finished before" in err
    assert f"cell 2/4 {CELLS[1]}: resuming after step" in err
    assert "4 of 4 cells are finished" in printed
    assert modified(out / CELLS[0]) == finished
    assert trained_steps(out / CELLS[1]) == [1, 2, 3, 4]
    assert_same_weights(whole, out)
    assert (out / "table.md").read_text() == (whole / "table.md").read_text()


def has_open(process: subprocess.Popen[str], path: Path) -> bool:
    with suppress(FileNotFoundError):  # of a file closed a moment ago
        return any(link.readlink() == path for link in Path(f"/proc/{process.pid}/fd").iterdir())
    return False


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="needs to see the open files of a process")
def test_two_processes_share_the_cells(trident: Command, tmp_path: Path) -> None:
    rates = (0.001, 0.002, 0.003, 0.004)
    grid = tiny_grid(tmp_path, *rates)
    (tmp_path / "d").mkdir()
    with (tmp_path / "d" / "grid.lock").open("a") as lock:  # until both are ready
        fcntl.flock(lock, fcntl.LOCK_EX)
        processes = [start(tmp_path, *grid) for _ in range(2)]
        while not all(has_open(process, tmp_path / "d" / "grid.lock") for process in processes):
            assert [process.poll() for process in processes] == [None, None]
            time.sleep(0.05)
    ends = [process.communicate(timeout=120) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], ends
    done = [[f"alpha-{rate}" for rate in rates if f"alpha-{rate}: training" in err] for _, err in ends]
    assert sorted(done[0] + done[1]) == [f"alpha-{rate}" for rate in rates], "each cell is trained once"
    assert all(done), "both have worked"
    assert "another process is working on it" in ends[0][1] + ends[1][1]
    assert all(trained_steps(tmp_path / "d" / f"alpha-{rate}") == [1, 2, 3, 4] for rate in rates)
    assert "4 of 4 cells are finished" in (tmp_path / "d" / "table.md").read_text()
    assert not list((tmp_path / "d").rglob("*lock"))


def test_a_cell_in_other_hands_is_left_alone(trident: Command, tmp_path: Path) -> None:
    grid = tiny_grid(tmp_path, 0.001, 0.002, 0.003)
    assert trident(*grid, "--only", "1/3").returncode == 0
    held = tmp_path / "d" / "alpha-0.002"
    held.mkdir()
    with (held / "lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        second = trident(*grid)
        assert second.returncode == 0, second.stderr
        assert "cell 2/3 alpha-0.002: another process is working on it" in second.stderr
        assert "left to other processes: alpha-0.002" in second.stderr
        assert [path.name for path in held.iterdir()] == ["lock"]
        assert (tmp_path / "d" / "alpha-0.003" / "result.json").exists()
    assert "3 of 3 cells are finished" in trident("--out", "d").stdout  # the folder knows its grid and its data


def test_shares_of_the_cells(trident: Command, tmp_path: Path) -> None:
    grid = tiny_grid(tmp_path, 0.001, 0.002, 0.003)
    first = trident(*grid, "--only", "1/2")
    assert first.returncode == 0, first.stderr
    assert {path.parent.name for path in tmp_path.glob("d/*/result.json")} == {"alpha-0.001", "alpha-0.003"}
    assert "alpha-0.002  0.002  -" in first.stdout
    assert not (tmp_path / "d" / "table.md").exists()
    answer = json.loads(trident("--out", "d", "--show", "--json").stdout)
    assert [cell["state"] for cell in answer["cells"]] == ["finished", "unfinished", "finished"]
    assert "| alpha-0.002 | 0.002 | - |" in (tmp_path / "d" / "table.md").read_text()
    assert "3 of 3 cells are finished" in trident(*grid, "--only", "2/2").stdout
    assert "| - |" not in (tmp_path / "d" / "table.md").read_text()


def test_a_cell_that_fails_does_not_stop_the_others(trident: Command, tmp_path: Path) -> None:
    grid = tiny_grid(tmp_path, 1e20, 0.001)
    answer = trident(*grid)
    assert answer.returncode == 1
    assert "1 of 2 cells failed: alpha-1e-20" in answer.stderr.splitlines()[-1]
    failed, fine = result_of(tmp_path / "d" / "alpha-1e-20"), result_of(tmp_path / "d" / "alpha-0.001")
    assert "is not finite" in failed["error"]
    assert (failed["evaluation"], fine["error"]) == (None, None)
    assert "alpha-1e-20  1e+20  failed" in answer.stdout
    before = modified(tmp_path / "d" / "alpha-1e-20")
    assert trident(*grid).returncode == 1
    assert modified(tmp_path / "d" / "alpha-1e-20") == before


def test_a_full_disk_is_no_result(trident: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise TridentError("cannot write: No space left on device")

    monkeypatch.setattr(TrainingProgress, "on_step", full)
    answer = trident(*tiny_grid(tmp_path, 0.001, 0.002))
    assert answer.returncode == 2
    assert "No space left" in answer.stderr
    assert not list(tmp_path.glob("d/*/result.json"))


def test_ctrl_c_stops_the_whole_grid(trident: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    grid = tiny_grid(tmp_path, 0.001, 0.002)
    with monkeypatch.context() as patched:
        patched.setattr(TrainingProgress, "on_step", lambda *_: os.kill(os.getpid(), signal.SIGINT))
        stopped = trident(*grid)
    assert stopped.returncode == 130
    assert "stopped in cell alpha-0.001 after step 1; go on with: trident ablate --out d" in stopped.stderr
    assert not (tmp_path / "d" / "alpha-0.002").exists()
    assert "alpha-0.001  0.001  -" in trident("--out", "d", "--show").stdout
    again = trident("--out", "d")
    assert again.returncode == 0, again.stderr
    assert "alpha-0.001: resuming after step 1" in again.stderr


def test_interrupted_in_its_last_step_it_owes_a_validation(
    trident: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def on_step(_: object, step: int, values: object) -> None:
        if step == 4:
            os.kill(os.getpid(), signal.SIGINT)

    with monkeypatch.context() as patched:
        patched.setattr(TrainingProgress, "on_step", on_step)
        assert trident(*tiny_grid(tmp_path, 0.001, 0.002)).returncode == 130
    assert not (tmp_path / "d" / "alpha-0.001" / "result.json").exists()
    assert trident("--out", "d").returncode == 0
    assert load_checkpoint(tmp_path / "d" / "alpha-0.001" / LAST).validated_step == 4


def test_a_folder_takes_one_grid_only(trident: Command, tmp_path: Path) -> None:
    grid = tiny_grid(tmp_path, 0.001, 0.002)
    assert trident(*grid, "--only", "1/2").returncode == 0
    before = modified(tmp_path / "d")
    other = tiny_store(images_per_class=9)
    write_store(tmp_path / "other.store", "noise", other.classes, iter(other.images))
    refused = {
        "training.steps is 4 there, not 5": trident(*grid, "training.steps=5"),
        "evaluation.tasks is 2 there, not 3": trident(*grid, "--tasks", "3"),
        "evaluation.split is val there, not test": trident(*grid, "--split", "test"),
        "alpha-0.002 is a cell of only one": trident(*tiny_grid(tmp_path, 0.001, 0.003)),
        "alpha-0.001 is a cell of only one": trident("glyphs-2x2", "--out", "d"),
        "other data": trident(*tiny_grid(tmp_path, 0.001, 0.002)[:3], "--data", "other.store"),
        "which grid?": trident("--out", "d", "--split", "test"),
    }
    for words, answer in refused.items():
        assert_one_line_error(answer, words)
    assert modified(tmp_path / "d") == before
    # How it is computed may change, for instance on a machine with less memory.
    assert trident(*grid, "training.tasks_per_chunk=1").returncode == 0


def test_folders_of_other_work_are_left_alone(trident: Command, tmp_path: Path) -> None:
    (tmp_path / "d" / "alpha-0.002").mkdir(parents=True)
    assert_one_line_error(trident(*tiny_grid(tmp_path, 0.001, 0.002)), "alpha-0.002 is there", "holds no grid")
    assert [path.name for path in (tmp_path / "d").iterdir()] == ["alpha-0.002"]


def test_the_papers_figures_stand_beside_ours(trident: Command, tmp_path: Path) -> None:
    paper = '[paper]\ntable = "table 9"\nnote = "obtained otherwise"\naccuracy.tiny.a-3-b-3 = [61.5, 0.7]\n'
    axes = [
        f'[[axes]]\nsetting = "model.{key}_latents"\nlabel = "{label}"\nvalues = [3, 4]\n'
        for key, label in (("label", "a"), ("semantic", "b"))
    ]
    grid = grid_file(tmp_path, TINY_GRID + "".join(axes) + paper)
    answer = trident(grid, "--out", "d", "--data", "noise.store", "--only", "1/4")
    accuracy = result_of(tmp_path / "d" / "a-3-b-3")["evaluation"]
    rows = answer.stdout.splitlines()
    assert rows[2].split() == ["a", "\\", "b", "3", "4"]
    assert f"{accuracy['accuracy']:.2f} ± {accuracy['ci95']:.2f} (61.50 ± 0.70)" in rows[3]
    assert rows[4].split() == ["4", "-", "(-)", "-", "(-)"]
    assert "in brackets the paper's figures (table 9), obtained otherwise" in rows
    shown = json.loads(trident(grid, "--out", "d", "--show", "--json").stdout)
    assert shown["cells"][0]["paper"] == {"accuracy": 61.5, "interval": 0.7}
    assert shown["cells"][0]["evaluation"]["protocol"]["query_order"] == "shuffled"
    assert "a 3, paper" in (tmp_path / "d" / "plot.svg").read_text()


def test_without_matplotlib_there_is_a_table_and_a_hint(
    trident: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    answer = trident(*tiny_grid(tmp_path, 0.001))
    assert answer.returncode == 0
    assert "pip install 'trident[analysis]'" in answer.stderr
    assert (tmp_path / "d" / "table.md").exists()
    assert not (tmp_path / "d" / "plot.svg").exists()


def test_a_damaged_result_is_told(trident: Command, tmp_path: Path) -> None:
    assert trident(*tiny_grid(tmp_path, 0.001)).returncode == 0
    (tmp_path / "d" / "alpha-0.001" / "result.json").write_text("{}")
    assert_one_line_error(trident("--out", "d", "--show"), "result.json is damaged")
