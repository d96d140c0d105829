"""Runs that are disturbed: two processes, deleted files, flipped bits, a full disk."""

import json
import os
import shutil
import signal
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

import short_runs
from ablation_grids import Answer
from commands import assert_one_line_error
from short_runs import QUICK, with_training
from tiny import Silent
from tiny_run import make_tiny_run
from trident.errors import TridentError
from trident.learning.checkpoint import BEST, LAST, load_checkpoint, save_checkpoint
from trident.learning.run_lock import LOCK, run_lock

Here = Callable[..., Answer]

HOLDER = """
import sys, time
from pathlib import Path
from trident.learning.run_lock import run_lock

with run_lock(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(60)
"""


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a store, a recipe and a finished run, made by the command."""
    return make_tiny_run(tmp_path_factory.mktemp("made"))


@pytest.fixture
def run(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of that run, with its data beside it."""
    shutil.copytree(made, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path / "run"


@pytest.fixture
def holder(run: Path) -> Iterator[subprocess.Popen[str]]:
    """Another process that holds the run."""
    with subprocess.Popen([sys.executable, "-c", HOLDER, run], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        yield process
        process.kill()


def flip(path: Path, place: int) -> None:
    content = bytearray(path.read_bytes())
    content[place] ^= 0x10
    path.write_bytes(content)


def test_a_run_that_another_process_trains_is_left_alone(
    run: Path, holder: subprocess.Popen[str], trident_here: Here
) -> None:
    before = {path.name: path.stat().st_mtime_ns for path in run.iterdir()}
    refused = trident_here("train", "--resume", "run", "training.steps=12", "--data", "noise.store")
    assert_one_line_error(refused, f"process {holder.pid} on ", "is training run")
    assert {path.name: path.stat().st_mtime_ns for path in run.iterdir()} == before
    assert trident_here("evaluate", "run", "--tasks", 2).returncode == 0  # to read it is no harm
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    assert (run / LOCK).exists()
    resumed = trident_here("train", "--resume", "run")
    assert resumed.returncode == 0, resumed.stderr
    assert not (run / LOCK).exists()


def test_a_new_run_does_not_start_where_another_one_begins(tmp_path: Path, run: Path, trident_here: Here) -> None:
    (run / LAST).unlink()
    (run / BEST).unlink()
    with subprocess.Popen([sys.executable, "-c", HOLDER, run], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "held\n"
        refused = trident_here("train", "tiny.toml", "--out", "run", "--data", "noise.store")
        assert_one_line_error(refused, f"process {process.pid} on ", "is training run")
        process.kill()
    assert not (run / LAST).exists()


def test_the_lock_is_released_after_an_error_and_does_not_keep_out_its_own_process(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), run_lock(tmp_path), run_lock(tmp_path / "." / "x" / ".."):
        raise ZeroDivisionError
    assert list(tmp_path.iterdir()) == []
    with run_lock(tmp_path):
        assert f"process {os.getpid()} on " in (tmp_path / LOCK).read_text()


def test_a_child_that_lives_longer_does_not_keep_the_lock(tmp_path: Path) -> None:
    code = (
        "import os, sys, time; from pathlib import Path; from trident.learning.run_lock import run_lock\n"
        "with run_lock(Path(sys.argv[1])):\n"
        "    child = os.fork()\n"
        "    if child == 0: time.sleep(20); os._exit(0)\n"
        "    print(child, flush=True); os.kill(os.getpid(), 9)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", code, tmp_path], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    child = int(process.stdout.readline())
    process.wait()
    os.kill(child, 0)  # it still runs
    with run_lock(tmp_path):
        pass
    os.kill(child, signal.SIGKILL)
    process.stdout.close()


def test_weights_in_use_do_not_change_with_their_file(run: Path) -> None:
    loaded = load_checkpoint(run / BEST)
    before = {key: value.clone() for key, value in loaded.parameters.items()}
    (run / BEST).write_bytes(bytes((run / BEST).stat().st_size))
    assert all(torch.equal(value, before[key]) for key, value in loaded.parameters.items())


def test_lost_best_weights_come_back_and_are_never_replaced_in_silence(run: Path, trident_here: Here) -> None:
    step = load_checkpoint(run / LAST).step
    (run / BEST).unlink()
    assert_one_line_error(trident_here("evaluate", "run", "--tasks", 2), "best.safetensors is missing", "--resume run")
    assert trident_here("evaluate", "run/last.safetensors", "--tasks", 2).returncode == 0
    resumed = trident_here("train", "--resume", "run")
    assert resumed.returncode == 0
    assert "best.safetensors is missing: the weights of step" in resumed.stderr
    assert load_checkpoint(run).path == run / BEST and load_checkpoint(run).step == step
    validations = [line for line in (run / "log.jsonl").read_text().splitlines() if '"validation"' in line]
    assert [json.loads(line)["step"] for line in validations].count(step) == 1


def test_best_weights_that_are_deleted_in_training_come_back_at_the_next_validation(tmp_path: Path) -> None:
    class Deleting(Silent):
        def on_step(self, step: int, values: dict[str, object]) -> None:
            if step == 5:
                (tmp_path / "run" / BEST).unlink()

    end = short_runs.run(tmp_path / "run", with_training(QUICK, steps=6, validate_every=3), observer=Deleting())
    assert end.best is not None and end.best["step"] == 6
    assert load_checkpoint(tmp_path / "run").step == 6


@pytest.mark.parametrize("command", ["evaluate", "resume", "predict"])
def test_a_flipped_bit_in_a_weights_file_is_noticed(run: Path, trident_here: Here, command: str) -> None:
    path = run / (LAST if command == "resume" else BEST)
    flip(path, path.stat().st_size - 100)
    call = {
        "evaluate": ("evaluate", "run", "--tasks", 2),
        "resume": ("train", "--resume", "run"),
        "predict": ("predict", "--support", "support", "--query", "pile", "--weights", "run"),
    }[command]
    if command == "predict":
        from PIL import Image

        for shade, name in enumerate(("support/a/1.png", "support/b/1.png", "pile/1.png")):
            (run.parent / name).parent.mkdir(parents=True, exist_ok=True)
            Image.new("L", (16, 16), shade).save(run.parent / name)
    assert_one_line_error(trident_here(*call), str(path.relative_to(run.parent)), "does not match its checksum")


def test_changed_settings_in_a_weights_file_are_noticed(run: Path) -> None:
    content = (run / BEST).read_bytes()
    (run / BEST).write_bytes(content.replace(b"noise", b"voice", 1))
    assert content != (run / BEST).read_bytes()
    with pytest.raises(TridentError, match="checksum"):
        load_checkpoint(run / BEST)


def test_weights_files_of_older_versions_are_loaded(run: Path, tmp_path: Path) -> None:
    with safe_open(run / BEST, "pt") as file:
        tensors, metadata = {key: file.get_tensor(key) for key in file.keys()}, file.metadata()  # noqa: SIM118
    del metadata["checksum"]
    save_file(tensors, tmp_path / "old.safetensors", metadata)
    old, new = load_checkpoint(tmp_path / "old.safetensors"), load_checkpoint(run / BEST)
    assert all(torch.equal(old.parameters[key], new.parameters[key]) for key in new.parameters)
    save_checkpoint(tmp_path / "new.safetensors", old)
    with safe_open(tmp_path / "new.safetensors", "pt") as file:
        assert len(file.metadata()["checksum"]) == 64


@pytest.mark.parametrize("change", ["one bit", "all pixels"])
def test_pixels_that_changed_under_a_run_are_noticed(run: Path, trident_here: Here, change: str) -> None:
    store = run.parent / "noise.store"
    content = bytearray(store.read_bytes())
    first = 8 + struct.unpack("<Q", content[:8])[0]
    if change == "one bit":
        content[first + 5000] ^= 0x80  # a training image
    else:
        content[first:] = bytes(255 - value for value in content[first:])
    store.write_bytes(content)
    last = (run / LAST).read_bytes()
    resumed = trident_here("train", "--resume", "run", "training.steps=12", "--data", "noise.store")
    assert_one_line_error(resumed, "noise.store is damaged", "images 0 to")
    assert (run / LAST).read_bytes() == last
    assert_one_line_error(trident_here("train", "tiny.toml", "--out", "new", "--data", "noise.store"), "is damaged")
    assert_one_line_error(trident_here("evaluate", "run", "--tasks", 5, "--data", "noise.store"), "is damaged")
