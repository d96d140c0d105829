"""Training a grid: work is neither lost, done twice nor mixed with other work."""

import io
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path

import pytest

from ablation_grids import (
    CELLS,
    GLYPHS,
    Ablate_command,
    assert_same_weights,
    grid_file,
    modified,
    result_of,
    tiny_grid,
    trained_steps,
)
from commands import assert_one_line_error
from stores import write_store
from studies.ablation import measure_unlabelled
from tiny import tiny_store
from trident.cli import main
from trident.cli.console import TrainingProgress
from trident.errors import TridentError
from trident.learning.checkpoint import LAST, load_checkpoint
from trident.measuring.record import read_lines, unpacked


def start(folder: Path, *arguments: object) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "trident", "ablate", *map(str, arguments)]
    return subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def wait_until(process: subprocess.Popen[str], reached: Callable[[], bool]) -> None:
    while not reached():
        assert process.poll() is None, process.communicate()
        time.sleep(0.01)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A grid of four cells on the glyphs, trained without interruption."""
    folder = tmp_path_factory.mktemp("whole")
    grid = grid_file(folder, GLYPHS)
    printed = io.StringIO()
    with pytest.MonkeyPatch.context() as patched, redirect_stdout(printed), pytest.raises(SystemExit) as caught:
        patched.setattr(sys, "argv", ["trident", "ablate", str(grid), "--out", str(folder / "d")])
        main()
    assert caught.value.code == 0
    assert "4 of 4 cells are finished" in printed.getvalue()
    return folder / "d"


@pytest.fixture
def trained(whole: Path, tmp_path: Path) -> list[object]:
    """The arguments for a copy of that grid."""
    shutil.copytree(whole, tmp_path / "d")
    return [grid_file(tmp_path, GLYPHS), "--out", "d"]


def test_results_say_what_was_trained_and_how_it_was_measured(whole: Path) -> None:
    result = result_of(whole / CELLS[3])
    assert result["settings"] == {"method.label_latents": 5, "method.attfex": "off"}
    assert result["recipe"]["training"]["steps"] == result["steps"] == 4
    checkpoint = load_checkpoint(whole / CELLS[3])
    assert result["parameters"] == sum(value.numel() for value in checkpoint.parameters.values())
    assert result["best_step"] == checkpoint.step
    protocol = result["evaluation"]["protocol"]
    assert (protocol["dataset"], protocol["split"], protocol["tasks"], protocol["seed"]) == ("glyphs", "val", 3, 0)
    assert result["error"] is None
    hits = unpacked(result["evaluation"]["hits"])
    assert len(hits) == 3 and 100 * hits.mean() / 6 == pytest.approx(result["evaluation"]["accuracy"])
    assert not list(whole.rglob("*lock"))


def test_the_table_and_the_plot(whole: Path) -> None:
    result = result_of(whole / CELLS[3])
    accuracy = result["evaluation"]
    lines = (whole / "table.md").read_text().splitlines()
    assert "| cell | latents | attfex | accuracy | parameters | meta-updates |" in lines
    entry = f"{accuracy['accuracy']:.2f} ± {accuracy['ci95']:.2f}"
    assert f"| {CELLS[3]} | 5 | off | {entry} | {result['parameters']:,} | 4 |" in lines
    assert sum("glyphs val, 3-way 1-shot" in line and "3 tasks" in line for line in lines) == 1
    plot = (whole / "plot.svg").read_text()
    assert plot.rstrip().endswith("</svg>")
    for words in ("letters, for tests", "latents 3", "latents 5", "positional", "accuracy, %", "shuffled queries"):
        assert words in plot, words


@pytest.mark.soak
def test_killed_half_way_it_goes_on_as_if_it_had_never_stopped(
    ablate: Ablate_command, tmp_path: Path, whole: Path
) -> None:
    grid_file(tmp_path, GLYPHS)
    out = tmp_path / "d"
    process = start(tmp_path, "grid.toml", "--out", "d")
    log = out / CELLS[1] / "log.jsonl"
    wait_until(process, lambda: log.exists() and log.read_text().count('"train"') >= 2)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert (out / CELLS[0] / "result.json").exists()
    assert not (out / CELLS[1] / "result.json").exists()
    assert 1 <= load_checkpoint(out / CELLS[1] / LAST).step < 4
    finished = modified(out / CELLS[0])
    again = ablate("grid.toml", "--out", "d")
    assert again.returncode == 0, again.stderr
    assert f"cell 1/4 {CELLS[0]}: finished before" in again.stderr
    assert f"cell 2/4 {CELLS[1]}: resuming after step" in again.stderr
    assert "4 of 4 cells are finished" in again.stdout
    assert modified(out / CELLS[0]) == finished
    assert trained_steps(out / CELLS[1]) == [1, 2, 3, 4]
    assert_same_weights(whole, out)
    assert (out / "table.md").read_text() == (whole / "table.md").read_text()


@pytest.mark.slow
def test_two_processes_share_the_cells(ablate: Ablate_command, tmp_path: Path) -> None:
    rates = (0.001, 0.002, 0.003)
    grid = tiny_grid(tmp_path, *rates)
    first = start(tmp_path, *grid)
    wait_until(first, (tmp_path / "d" / "alpha-0.001" / LAST).exists)
    first.send_signal(signal.SIGSTOP)  # in its first cell
    try:
        assert not (tmp_path / "d" / "alpha-0.001" / "result.json").exists()
        second = ablate(*grid)
    finally:
        first.send_signal(signal.SIGCONT)
    assert second.returncode == 0, second.stderr
    assert "cell 1/3 alpha-0.001: skipped, another process" in second.stderr
    assert "2 of 3 cells are finished" in second.stdout
    out, err = first.communicate(timeout=120)
    assert first.returncode == 0, err
    assert err.count("finished before") == 2
    assert "3 of 3 cells are finished" in out
    assert all(trained_steps(tmp_path / "d" / f"alpha-{rate}") == [1, 2, 3, 4] for rate in rates)
    assert "3 of 3 cells are finished" in (tmp_path / "d" / "table.md").read_text()
    assert not list((tmp_path / "d").rglob("*lock"))


def test_only_what_is_missing_is_trained(ablate: Ablate_command, tmp_path: Path, trained: list[object]) -> None:
    shutil.rmtree(tmp_path / "d" / CELLS[1])
    (tmp_path / "d" / "table.md").unlink()
    before = modified(tmp_path / "d" / CELLS[0])
    answer = json.loads(ablate(*trained, "--show", "--json").stdout)
    assert [cell["state"] for cell in answer["cells"]] == ["finished", "unfinished", "finished", "finished"]
    assert f"| {CELLS[1]} | 3 | off | - | - | - |" in (tmp_path / "d" / "table.md").read_text()
    again = ablate(*trained)
    assert again.returncode == 0, again.stderr
    assert again.stderr.count("finished before") == 3
    assert f"{CELLS[1]}: training" in again.stderr
    assert "| - |" not in (tmp_path / "d" / "table.md").read_text()
    assert modified(tmp_path / "d" / CELLS[0]) == before


def test_a_cell_that_fails_does_not_stop_the_others(ablate: Ablate_command, tmp_path: Path) -> None:
    grid = tiny_grid(tmp_path, 1e9, 0.001)
    answer = ablate(*grid)
    assert answer.returncode == 1
    assert "1 of 2 cells failed: alpha-1000000000.0" in answer.stderr.splitlines()[-1]
    failed, fine = result_of(tmp_path / "d" / "alpha-1000000000.0"), result_of(tmp_path / "d" / "alpha-0.001")
    assert failed["error"].endswith("is not finite") and "2 of 2 cells are finished, 1 of them failed" in answer.stdout
    assert (failed["evaluation"], fine["error"]) == (None, None)
    assert "alpha-1000000000.0  1000000000.0  failed" in answer.stdout
    before = modified(tmp_path / "d" / "alpha-1000000000.0")
    assert ablate(*grid).returncode == 1
    assert modified(tmp_path / "d" / "alpha-1000000000.0") == before


def test_a_full_disk_is_no_result(ablate: Ablate_command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise TridentError("cannot write: No space left on device")

    monkeypatch.setattr(TrainingProgress, "on_step", full)
    answer = ablate(*tiny_grid(tmp_path, 0.001, 0.002))
    assert answer.returncode == 2
    assert "No space left" in answer.stderr
    assert not list(tmp_path.glob("d/*/result.json"))


def test_ctrl_c_stops_the_whole_grid(ablate: Ablate_command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    grid = tiny_grid(tmp_path, 0.001, 0.002)
    with monkeypatch.context() as patched:
        patched.setattr(TrainingProgress, "on_step", lambda *_: os.kill(os.getpid(), signal.SIGINT))
        stopped = ablate(*grid)
    assert stopped.returncode == 130
    assert "stopped in cell alpha-0.001 after step 1; run the same command again to resume" in stopped.stderr
    assert not (tmp_path / "d" / "alpha-0.002").exists()
    again = ablate(*grid)
    assert again.returncode == 0, again.stderr
    assert "alpha-0.001: resuming after step 1" in again.stderr


def test_interrupted_in_its_last_step_it_owes_a_validation(
    ablate: Ablate_command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def on_step(_: object, step: int, values: object) -> None:
        if step == 4:
            os.kill(os.getpid(), signal.SIGINT)

    grid = tiny_grid(tmp_path, 0.001)
    with monkeypatch.context() as patched:
        patched.setattr(TrainingProgress, "on_step", on_step)
        assert ablate(*grid).returncode == 130
    assert not (tmp_path / "d" / "alpha-0.001" / "result.json").exists()
    assert ablate(*grid).returncode == 0
    assert load_checkpoint(tmp_path / "d" / "alpha-0.001" / LAST).validated_step == 4


def test_a_folder_keeps_to_its_settings(ablate: Ablate_command, tmp_path: Path, trained: list[object]) -> None:
    shutil.rmtree(tmp_path / "d" / CELLS[3])  # there would be something to train
    other = tiny_store(images_per_class=9, size=28)
    write_store(tmp_path / "other.store", "noise", other.classes, iter(other.images))
    before = modified(tmp_path / "d")
    refused = {
        "training.steps is 4 there, not 5": ablate(*trained, "training.steps=5"),
        "measured with tasks=3, not 4": ablate(*trained, "--tasks", "4"),
        "measured with split=val, not test": ablate(*trained, "--split", "test"),
        "trained on other data": ablate(*trained, "--data", "other.store"),
        "backbone.channels is 4 there, not 3": ablate(*trained, "--show", "backbone.channels=3"),
        "measured with seed=0, not 1": ablate(
            grid_file(tmp_path, GLYPHS.replace("tasks = 3", "seed = 1\ntasks = 3")), "--out", "d", "--show"
        ),
    }
    for words, answer in refused.items():
        assert_one_line_error(answer, f"d/{CELLS[0]}", words)
    assert modified(tmp_path / "d") == before
    # How it is computed may change, for instance on a machine with less memory.
    grid_file(tmp_path, GLYPHS)
    assert ablate(*trained, "training.tasks_per_chunk=1").returncode == 0


def test_the_papers_figures_stand_beside_ours(ablate: Ablate_command, tmp_path: Path, trained: list[object]) -> None:
    paper = '[paper]\ntable = "table 9"\nnote = "obtained otherwise"\naccuracy.glyphs.{} = [61.5, 0.7]\n'
    grid_file(tmp_path, GLYPHS + paper.format(CELLS[0]))
    rows = ablate(*trained, "--show").stdout.splitlines()
    accuracy = result_of(tmp_path / "d" / CELLS[0])["evaluation"]
    assert rows[2].split()[-4:] == ["accuracy", "paper", "parameters", "meta-updates"]
    ours = f"{accuracy['accuracy']:.2f} ± {accuracy['ci95']:.2f}"
    assert " ".join(rows[3].split()).startswith(f"{CELLS[0]} 3 positional {ours} 61.50 ± 0.70 ")
    assert rows[4].split()[6] == "-"
    assert "the paper's figures: table 9, obtained otherwise" in rows
    shown = json.loads(ablate(*trained, "--show", "--json").stdout)
    assert shown["cells"][0]["paper"] == {"accuracy": 61.5, "interval": 0.7}
    assert shown["cells"][0]["evaluation"]["protocol"]["query_order"] == "shuffled"
    assert "latents 3, paper" in (tmp_path / "d" / "plot.svg").read_text()


def test_without_matplotlib_there_is_a_table_and_a_hint(
    ablate: Ablate_command, tmp_path: Path, trained: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("table.md", "plot.svg"):
        (tmp_path / "d" / name).unlink()
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    answer = ablate(*trained, "--show")
    assert answer.returncode == 0
    assert "pip install 'trident-fewshot[analysis]'" in answer.stderr
    assert (tmp_path / "d" / "table.md").exists()
    assert not (tmp_path / "d" / "plot.svg").exists()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("nothing", "is missing"),
        ("text", "Expecting value"),
        ("list", "a table"),
        ("evaluation", "'evaluation.accuracy' is missing"),
        ("recipe", "'backbone' must be a table"),
    ],
)
def test_a_damaged_result_is_told(
    ablate: Ablate_command, tmp_path: Path, trained: list[object], change: str, words: str
) -> None:
    path = tmp_path / "d" / CELLS[0] / "result.json"
    result = result_of(path.parent)
    result["recipe"]["backbone"] = 3 if change == "recipe" else result["recipe"]["backbone"]
    result["evaluation"] = {} if change == "evaluation" else result["evaluation"]
    path.write_text({"nothing": "{}", "text": "not JSON", "list": "[]"}.get(change, json.dumps(result)))
    assert_one_line_error(ablate(*trained, "--show"), str(Path("d") / CELLS[0] / "result.json"), words)


def test_ways_to_use_unlabelled_images_are_compared_on_validation_classes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    few = ["--images", "1", "--queries", "1", "--tasks", "2", "--ways", "refinement"]
    words = [
        "measure_unlabelled",
        str(tmp_path / "found.jsonl"),
        "glyphs",
        "--weights",
        "glyphs-protonet",
        "--shots",
        "1",
    ]
    monkeypatch.setattr(sys, "argv", [*words, *few])
    measure_unlabelled.main()
    found = read_lines(tmp_path / "found.jsonl")
    assert len(found) == 3 and all(one["record"]["described"].startswith("glyphs val, ") for one in found.values())
    monkeypatch.setattr(sys, "argv", words[:2])
    measure_unlabelled.main()
    printed = capsys.readouterr().out
    assert "| 1-shot: unlabelled images of each class | refinement |" in printed and "| 1, and of 5 other" in printed
