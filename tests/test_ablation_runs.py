"""Training a grid: work is neither lost, done twice nor mixed with other work."""

import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from ablation_grids import (
    CELLS,
    GLYPHS,
    TINY_GRID,
    Ablate_command,
    grid_file,
    modified,
    result_of,
    tiny_grid,
    trained_steps,
)
from conftest import assert_one_line_error, tiny_store
from trident.cli.console import TrainingProgress
from trident.data.store import write_store
from trident.errors import TridentError
from trident.learning.checkpoint import BEST, LAST, load_checkpoint


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
def test_two_processes_share_the_cells(ablate: Ablate_command, tmp_path: Path) -> None:
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


def test_a_cell_in_other_hands_is_left_alone(ablate: Ablate_command, tmp_path: Path) -> None:
    grid = tiny_grid(tmp_path, 0.001, 0.002, 0.003)
    assert ablate(*grid, "--only", "1/3").returncode == 0
    held = tmp_path / "d" / "alpha-0.002"
    held.mkdir()
    with (held / "lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        second = ablate(*grid)
        assert second.returncode == 0, second.stderr
        assert "cell 2/3 alpha-0.002: another process is working on it" in second.stderr
        assert "left to other processes: alpha-0.002" in second.stderr
        assert [path.name for path in held.iterdir()] == ["lock"]
        assert (tmp_path / "d" / "alpha-0.003" / "result.json").exists()
    assert "3 of 3 cells are finished" in ablate("--out", "d").stdout  # the folder knows its grid and its data


def test_shares_of_the_cells(ablate: Ablate_command, tmp_path: Path) -> None:
    grid = tiny_grid(tmp_path, 0.001, 0.002, 0.003)
    first = ablate(*grid, "--only", "1/2")
    assert first.returncode == 0, first.stderr
    assert {path.parent.name for path in tmp_path.glob("d/*/result.json")} == {"alpha-0.001", "alpha-0.003"}
    assert "alpha-0.002  0.002  -" in first.stdout
    assert not (tmp_path / "d" / "table.md").exists()
    answer = json.loads(ablate("--out", "d", "--show", "--json").stdout)
    assert [cell["state"] for cell in answer["cells"]] == ["finished", "unfinished", "finished"]
    assert "| alpha-0.002 | 0.002 | - |" in (tmp_path / "d" / "table.md").read_text()
    assert "3 of 3 cells are finished" in ablate(*grid, "--only", "2/2").stdout
    assert "| - |" not in (tmp_path / "d" / "table.md").read_text()


def test_a_cell_that_fails_does_not_stop_the_others(ablate: Ablate_command, tmp_path: Path) -> None:
    grid = tiny_grid(tmp_path, 1e20, 0.001)
    answer = ablate(*grid)
    assert answer.returncode == 1
    assert "1 of 2 cells failed: alpha-1e-20" in answer.stderr.splitlines()[-1]
    failed, fine = result_of(tmp_path / "d" / "alpha-1e-20"), result_of(tmp_path / "d" / "alpha-0.001")
    assert "is not finite" in failed["error"]
    assert (failed["evaluation"], fine["error"]) == (None, None)
    assert "alpha-1e-20  1e+20  failed" in answer.stdout
    before = modified(tmp_path / "d" / "alpha-1e-20")
    assert ablate(*grid).returncode == 1
    assert modified(tmp_path / "d" / "alpha-1e-20") == before


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
    assert "stopped in cell alpha-0.001 after step 1; go on with: trident ablate --out d" in stopped.stderr
    assert not (tmp_path / "d" / "alpha-0.002").exists()
    assert "alpha-0.001  0.001  -" in ablate("--out", "d", "--show").stdout
    again = ablate("--out", "d")
    assert again.returncode == 0, again.stderr
    assert "alpha-0.001: resuming after step 1" in again.stderr


def test_interrupted_in_its_last_step_it_owes_a_validation(
    ablate: Ablate_command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def on_step(_: object, step: int, values: object) -> None:
        if step == 4:
            os.kill(os.getpid(), signal.SIGINT)

    with monkeypatch.context() as patched:
        patched.setattr(TrainingProgress, "on_step", on_step)
        assert ablate(*tiny_grid(tmp_path, 0.001, 0.002)).returncode == 130
    assert not (tmp_path / "d" / "alpha-0.001" / "result.json").exists()
    assert ablate("--out", "d").returncode == 0
    assert load_checkpoint(tmp_path / "d" / "alpha-0.001" / LAST).validated_step == 4


def test_a_folder_takes_one_grid_only(ablate: Ablate_command, tmp_path: Path) -> None:
    grid = tiny_grid(tmp_path, 0.001, 0.002)
    assert ablate(*grid, "--only", "1/2").returncode == 0
    before = modified(tmp_path / "d")
    other = tiny_store(images_per_class=9)
    write_store(tmp_path / "other.store", "noise", other.classes, iter(other.images))
    refused = {
        "training.steps is 4 there, not 5": ablate(*grid, "training.steps=5"),
        "evaluation.tasks is 2 there, not 3": ablate(*grid, "--tasks", "3"),
        "evaluation.split is val there, not test": ablate(*grid, "--split", "test"),
        "alpha-0.002 is a cell of only one": ablate(*tiny_grid(tmp_path, 0.001, 0.003)),
        "alpha-0.001 is a cell of only one": ablate("glyphs-2x2", "--out", "d"),
        "other data": ablate(*tiny_grid(tmp_path, 0.001, 0.002)[:3], "--data", "other.store"),
        "which grid?": ablate("--out", "d", "--split", "test"),
    }
    for words, answer in refused.items():
        assert_one_line_error(answer, words)
    assert modified(tmp_path / "d") == before
    # How it is computed may change, for instance on a machine with less memory.
    assert ablate(*grid, "training.tasks_per_chunk=1").returncode == 0


def test_folders_of_other_work_are_left_alone(ablate: Ablate_command, tmp_path: Path) -> None:
    (tmp_path / "d" / "alpha-0.002").mkdir(parents=True)
    assert_one_line_error(ablate(*tiny_grid(tmp_path, 0.001, 0.002)), "alpha-0.002 is there", "holds no grid")
    assert [path.name for path in (tmp_path / "d").iterdir()] == ["alpha-0.002"]


def test_the_papers_figures_stand_beside_ours(ablate: Ablate_command, tmp_path: Path) -> None:
    paper = '[paper]\ntable = "table 9"\nnote = "obtained otherwise"\naccuracy.tiny.a-3-b-3 = [61.5, 0.7]\n'
    axes = [
        f'[[axes]]\nsetting = "model.{key}_latents"\nlabel = "{label}"\nvalues = [3, 4]\n'
        for key, label in (("label", "a"), ("semantic", "b"))
    ]
    grid = grid_file(tmp_path, TINY_GRID + "".join(axes) + paper)
    answer = ablate(grid, "--out", "d", "--data", "noise.store", "--only", "1/4")
    accuracy = result_of(tmp_path / "d" / "a-3-b-3")["evaluation"]
    rows = answer.stdout.splitlines()
    assert rows[2].split() == ["a", "\\", "b", "3", "4"]
    assert f"{accuracy['accuracy']:.2f} ± {accuracy['ci95']:.2f} (61.50 ± 0.70)" in rows[3]
    assert rows[4].split() == ["4", "-", "(-)", "-", "(-)"]
    assert "in brackets the paper's figures (table 9), obtained otherwise" in rows
    shown = json.loads(ablate(grid, "--out", "d", "--show", "--json").stdout)
    assert shown["cells"][0]["paper"] == {"accuracy": 61.5, "interval": 0.7}
    assert shown["cells"][0]["evaluation"]["protocol"]["query_order"] == "shuffled"
    assert "a 3, paper" in (tmp_path / "d" / "plot.svg").read_text()


def test_without_matplotlib_there_is_a_table_and_a_hint(
    ablate: Ablate_command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    answer = ablate(*tiny_grid(tmp_path, 0.001))
    assert answer.returncode == 0
    assert "pip install 'trident[analysis]'" in answer.stderr
    assert (tmp_path / "d" / "table.md").exists()
    assert not (tmp_path / "d" / "plot.svg").exists()


def test_a_damaged_result_is_told(ablate: Ablate_command, tmp_path: Path) -> None:
    assert ablate(*tiny_grid(tmp_path, 0.001)).returncode == 0
    (tmp_path / "d" / "alpha-0.001" / "result.json").write_text("{}")
    assert_one_line_error(ablate("--out", "d", "--show"), "result.json is damaged")
