"""A run that is killed or interrupted loses nothing."""

import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from stores import write_store
from tiny import tiny_store
from trident.files import atomic_file
from trident.learning.checkpoint import LAST, load_checkpoint

RECIPE = """
summary = "for tests"
dataset = "noise"
[episode]
n_way = 3
n_shot = 2
n_query = 2
[backbone]
image_size = 16
image_channels = 1
channels = 4
[method]
label_latents = 5
semantic_latents = 6
inner_steps = 1
[training]
steps = 1000000
tasks_per_step = 2
validate_every = 7
validation_tasks = 2
save_every = 1
log_every = 1
"""


@pytest.fixture
def command_line_run(tmp_path: Path) -> list[str]:
    store = tiny_store()
    write_store(tmp_path / "noise.store", "noise", store.classes, iter(store.images))
    (tmp_path / "recipe.toml").write_text(RECIPE)
    run = ["train", str(tmp_path / "recipe.toml"), "--out", str(tmp_path / "run")]
    return [sys.executable, "-m", "trident", *run, "--data", str(tmp_path / "noise.store")]


def wait_for(path: Path, process: subprocess.Popen[str]) -> None:
    for _ in range(600):
        if path.exists():
            return
        assert process.poll() is None, process.communicate()
        time.sleep(0.05)
    raise AssertionError(f"{path} never came")


WRITER = """
import sys
from pathlib import Path
from trident.files import atomic_file

assert "torch" not in sys.modules
path = Path(sys.argv[1])
number = int(path.read_bytes()[:8]) if path.exists() else 0
while True:
    number += 1
    with atomic_file(path) as file:
        for _ in range(20_000):
            file.write(b"%08d" % number)
    print(number, flush=True)
"""


def test_thirty_kills_while_a_file_is_written(tmp_path: Path) -> None:
    """kill -9 at random moments: the file is always whole, and what was once written is never lost."""
    generator, path, reached = random.Random(0), tmp_path / "file", 0
    for _ in range(30):
        process = subprocess.Popen([sys.executable, "-c", WRITER, path], stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        assert int(process.stdout.readline()) == reached + 1
        time.sleep(generator.uniform(0, 0.05))
        process.kill()
        told = [reached + 1, *map(int, process.stdout.read().split("\n")[:-1])]
        process.wait()
        process.stdout.close()
        content = path.read_bytes()
        reached = int(content[:8])
        assert content == b"%08d" % reached * 20_000
        assert reached - told[-1] in (0, 1)  # it may have been killed before it could tell
    with atomic_file(path) as file:
        file.write(b"the end")
    assert [found.name for found in tmp_path.iterdir()] == ["file"]  # half files of killed processes are gone


def test_ctrl_c_saves_and_exits_cleanly(tmp_path: Path, command_line_run: list[str]) -> None:
    process = subprocess.Popen(command_line_run, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    wait_for(tmp_path / "run" / "log.jsonl", process)
    time.sleep(0.5)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "Traceback" not in err
    step = load_checkpoint(tmp_path / "run" / LAST).step
    assert f"stopped after step {step}; go on with: trident train --resume" in err
    assert out == ""
