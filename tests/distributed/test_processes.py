"""Training and measuring on several processes: the same weights and figures, whatever happens to the processes."""

import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from stores import write_store
from tiny import tiny_store
from trident.data.store import ImageStore, store_in_memory
from trident.distributed.processes import Processes
from trident.learning.checkpoint import BEST, LAST, Checkpoint, load_checkpoint

RECIPE = """
summary = "noise, for tests"
dataset = "noise"
[episode]
n_way = 3
n_query = 2
[backbone]
image_size = 16
image_channels = 1
channels = 4
[method]
{method}
[training]
rate = 1e-3
steps = 6
tasks_per_step = 5
validate_every = 3
validation_tasks = 5
save_every = 2
log_every = 1
"""
RECIPES = {
    "trident": """label_latents = 5
semantic_latents = 6
classifier_width = 4
attfex_width_m = 6
attfex_width_n = 4
inner_steps = 1
inner_rate = 1e-3""",
    "protonet": 'name = "protonet"',
    "simpleshot": 'name = "simpleshot"\ntraining_classes = 5',
}


class Answer(NamedTuple):
    succeeded: bool
    outputs: list[list[str]]  # of each attempt, of each process
    errors: list[list[str]]

    def error(self) -> str:
        """The line that the first process printed; the others are silent."""
        assert not self.succeeded
        first, *others = self.errors[-1]
        assert not any(others), others
        lines = [line for line in first.splitlines() if not line.startswith(("step ", "validation: "))]
        assert len(lines) == 1 and lines[0].startswith("trident: error: "), first
        return lines[0]


class Launcher:
    """Runs commands in a folder with a store and recipes."""

    def __init__(self, folder: Path, process: "subprocess.Popen[str]"):
        self.folder = folder
        self.process = process
        self.orders = 0

    def run(self, processes: int, *arguments: object, **order: Any) -> Answer:
        """On so many processes of torchrun, or without it for 0. A list of lists has arguments for each process."""
        self.orders += 1
        logs = self.folder / f"logs-{self.orders}"
        of_each = arguments if isinstance(arguments[0], list) else [arguments]
        order |= {"processes": processes, "folder": str(self.folder), "logs": str(logs)}
        order["arguments"] = [list(map(str, own)) for own in of_each]  # type: ignore[call-overload]
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(json.dumps(order) + "\n")
        self.process.stdin.flush()
        succeeded = json.loads(self.process.stdout.readline())
        attempts = sorted({path.parents[1] for path in self.folder.glob(f"{logs.name}*/**/stderr.log")})

        def read(name: str) -> list[list[str]]:
            return [
                [(attempt / str(rank) / name).read_text() for rank in range(max(1, processes))] for attempt in attempts
            ]

        return Answer(succeeded, read("stdout.log"), read("stderr.log"))

    def train(self, processes: int, recipe: str, out: str, *settings: object, **order: Any) -> Answer:
        command = ("train", f"{recipe}.toml", "--data", "noise.store", "--out", out, *settings)
        return self.run(processes, *command, **order)

    def end(self, processes: int, recipe: str, out: str, *settings: object, **order: Any) -> Checkpoint:
        """The last checkpoint of a run that succeeds."""
        answer = self.train(processes, recipe, out, *settings, **order)
        assert answer.succeeded, answer.errors
        return self.last(out, bool(order.get("doubles")))

    def last(self, out: str, doubles: bool = False) -> Checkpoint:
        torch.set_default_dtype(torch.float64 if doubles else torch.float32)
        try:
            return load_checkpoint(self.folder / out / LAST)
        finally:
            torch.set_default_dtype(torch.float32)

    def log(self, out: str, kind: str) -> list[dict[str, Any]]:
        lines = [json.loads(line) for line in (self.folder / out / "log.jsonl").read_text().splitlines()]
        return [line for line in lines if line["kind"] == kind]


def write(store: ImageStore, path: Path) -> None:
    write_store(path, store.dataset, store.classes, iter(store.images))


@pytest.fixture(scope="module")
def launcher(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Launcher]:
    folder = tmp_path_factory.mktemp("processes")
    write(tiny_store(), folder / "noise.store")
    for name, method in RECIPES.items():
        (folder / f"{name}.toml").write_text(RECIPE.format(method=method))
    with launcher_in(folder) as running:
        yield running


@contextmanager
def launcher_in(folder: Path) -> Iterator[Launcher]:
    command = [sys.executable, str(Path(__file__).parents[1] / "support" / "launcher.py")]
    with (
        (folder / "torchrun.log").open("w") as log,
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True) as process,
    ):
        yield Launcher(folder, process)
        assert process.stdin is not None
        process.stdin.close()


@pytest.fixture(scope="module")
def alone(launcher: Launcher) -> Checkpoint:
    """A run of the Prototypical Network in one process, without torchrun."""
    return launcher.end(0, "protonet", "alone")


@pytest.fixture(scope="module")
def undisturbed(launcher: Launcher) -> Checkpoint:
    """The same on two processes."""
    return launcher.end(2, "protonet", "undisturbed")


def difference(one: Checkpoint, other: Checkpoint) -> float:
    """The largest difference between two states, relative to the largest value of the tensor.

    Smaller values than these count as such: a shift that cancels out has rounding errors for a gradient.
    """
    found = []
    for group, least in (("parameters", 1e-3), ("running", 1e-3), ("optimizer", 1e-8)):
        mine, theirs = getattr(one, group), getattr(other, group)
        assert mine.keys() == theirs.keys()
        for key, value in mine.items():
            found.append(float((value - theirs[key]).abs().max() / value.abs().max().clamp(min=least)))
    return max(found)


def test_every_task_has_one_process() -> None:
    for size in (1, 2, 3, 7):
        blocks = []
        for rank in range(size):
            processes = Processes()
            processes.rank, processes.size = rank, size
            blocks.append(processes.block(range(5)))
        assert [index for block in blocks for index in block] == list(range(5))
        assert max(map(len, blocks)) - min(map(len, blocks)) <= 1


@pytest.mark.slow
def test_trident_stopped_and_resumed_on_2_3_and_1_processes_ends_as_on_one(launcher: Launcher) -> None:
    """In float64, in which nothing but the order of sums differs. A signal to one process ends all after that step."""
    whole = launcher.end(0, "trident", "whole", doubles=True)
    first = launcher.train(2, "trident", "parts", doubles=True, kill=[1, 1, signal.SIGTERM])
    assert first.errors[0][0].splitlines()[-1].startswith("stopped after step 2")
    assert first.errors[0][1] == ""
    assert launcher.last("parts", doubles=True).step == 2
    second = launcher.run(3, "train", "--resume", "parts", doubles=True, kill=[0, 3, signal.SIGTERM])
    assert "stopped after step 4" in second.errors[0][0]
    assert launcher.run(0, "train", "--resume", "parts", doubles=True).succeeded
    end = launcher.last("parts", doubles=True)
    assert end.step == whole.step == 6
    assert 0 < difference(whole, end) < 1e-9
    assert end.best == whole.best
    assert [line["step"] for line in launcher.log("parts", "train")] == list(range(1, 7))
    for ours, theirs in zip(launcher.log("parts", "train"), launcher.log("whole", "train"), strict=True):
        assert ours["losses"] == pytest.approx(theirs["losses"], rel=1e-9)
        assert ours["accuracy"] == theirs["accuracy"]


@pytest.mark.slow
def test_one_process_can_stop_the_validation_of_all(launcher: Launcher, undisturbed: Checkpoint) -> None:
    answer = launcher.train(2, "protonet", "unvalidated", stop_in_validation=0)
    assert answer.errors[0][0].splitlines()[-1].startswith("stopped after step 3")
    stopped = launcher.last("unvalidated")
    assert (stopped.step, stopped.validated_step, stopped.best) == (3, 0, None)
    assert launcher.run(2, "train", "--resume", "unvalidated").succeeded
    assert difference(undisturbed, launcher.last("unvalidated")) == 0
    assert launcher.log("unvalidated", "validation") == launcher.log("undisturbed", "validation")


@pytest.mark.slow
@pytest.mark.parametrize(("processes", "tasks"), [(2, 5), (4, 3)])  # 4 processes for 3 tasks: one has none
def test_a_head_on_several_processes_is_that_on_one(launcher: Launcher, processes: int, tasks: int) -> None:
    setting = f"tasks_per_step={tasks}"
    expected = launcher.end(0, "protonet", f"alone-{tasks}", setting, doubles=True)
    found = launcher.end(processes, "protonet", f"protonet-{processes}", setting, doubles=True)
    assert found.provenance["processes"] == processes
    assert difference(expected, found) < 1e-9
    assert found.best == expected.best


def test_batches_of_images_are_computed_by_every_process(launcher: Launcher) -> None:
    """Batch norm needs the whole batch, so the result has the bits of one process."""
    expected = launcher.end(0, "simpleshot", "simpleshot-alone")
    assert difference(expected, launcher.end(2, "simpleshot", "simpleshot-2")) == 0


@pytest.mark.parametrize("command", [["evaluate"], ["evaluate", "--also", "audit"]])
def test_measuring_gives_the_figures_of_one_process(launcher: Launcher, alone: Checkpoint, command: list[str]) -> None:
    arguments = (*command, "alone", "--tasks", 7, "--tasks-per-chunk", 2, "--json")
    one, several = launcher.run(0, *arguments), launcher.run(3, *arguments)
    assert several.succeeded, several.errors
    assert json.loads(several.outputs[0][0]) == json.loads(one.outputs[0][0])
    assert several.outputs[0][1:] == ["", ""]


@pytest.mark.slow
@pytest.mark.parametrize("rank", [1, 0])
def test_a_killed_process_is_restarted_and_changes_nothing(
    launcher: Launcher, undisturbed: Checkpoint, rank: int
) -> None:
    """The first process keeps the last step if another is killed. If it is killed itself, its last save was at 4."""
    out = f"killed-{rank}"
    answer = launcher.train(2, "protonet", out, kill=[rank, 5, signal.SIGKILL], restarts=1)
    assert answer.succeeded
    before, after = (attempt[0] for attempt in answer.errors)
    assert f"restart 1: going on after step {5 if rank else 4}" in after
    if rank == 0:  # otherwise torchrun may end the first process before it has said so
        assert "is kept" not in before
    assert not any(attempt[1] for attempt in answer.errors)
    assert difference(undisturbed, launcher.last(out)) == 0
    assert launcher.log(out, "validation") == launcher.log("undisturbed", "validation")


def test_what_differs_between_processes_is_named(launcher: Launcher) -> None:
    store = tiny_store()
    changed = store.images.copy()
    changed[0, 0, 0, 0] ^= 1
    write(store_in_memory("noise", changed, store.classes), launcher.folder / "changed.store")
    command = ["train", "protonet.toml", "--out", "refused"]
    other_data = [[*command, "--data", "noise.store"], [*command, "--data", "changed.store"]]
    assert "the fingerprint of the data is" in launcher.run(2, *other_data).error()
    no_data = [[*command, "--data", "noise.store"], [*command, "--data", "missing.store"]]
    assert "no store at" in launcher.run(2, *no_data).error()
    settings = [[*command, "--data", "noise.store", rate] for rate in ("rate=0.1", "rate=0.2")]
    assert "training.rate is 0.1 in process 0 and 0.2 in process 1" in launcher.run(2, *settings).error()
    version = launcher.train(2, "protonet", "refused", version_of_process_1="9.9")
    assert "the version of trident is" in version.error() and "9.9 in process 1" in version.error()
    assert not (launcher.folder / "refused").exists()


def test_mistakes_are_one_line_of_one_process(launcher: Launcher, alone: Checkpoint) -> None:
    assert "already holds a run" in launcher.train(2, "protonet", "alone").error()
    assert "works in one process" in launcher.run(2, "methods").error()
    assert "no output folder" in launcher.run(2, "train", "protonet.toml").error()
    diverged = launcher.train(2, "protonet", "diverged", "rate=1e9", "weight_decay=1e9", "clip_norm=none")
    assert "is not finite. The state after step" in diverged.error()
    alone_too = launcher.train(0, "protonet", "diverged-alone", "rate=1e9", "weight_decay=1e9", "clip_norm=none")
    assert diverged.error().replace("diverged", "diverged-alone") == alone_too.error()
    measure = ("evaluate", "diverged", "--tasks", 4, "--tasks-per-chunk", 1)
    assert "val task 0: the prediction is not finite" in launcher.run(2, *measure).error()


@pytest.mark.skipif(sys.platform != "linux", reason="reads the names of threads from /proc")
def test_no_thread_of_a_connection_is_left_at_its_end() -> None:
    """Such a thread can crash a program that ends, after all its work is done."""
    program = """
import pathlib, torch
from trident.distributed.processes import connected
from trident.distributed.torchrun import launched

def threads():
    return [(path / "comm").read_text() for path in pathlib.Path("/proc/self/task").iterdir()]

with connected(launched(), nccl=False) as processes:
    weight = torch.ones(1, requires_grad=True)
    optimizer = torch.optim.AdamW([weight])
    weight.grad = torch.ones(1)
    optimizer.step()
    processes.gather(1)
    assert any("gloo" in name for name in threads())
assert not any("gloo" in name for name in threads()), threads()
"""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    place = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    result = subprocess.run(
        [sys.executable, "-c", program], env=os.environ | place, capture_output=True, text=True, timeout=100
    )
    assert result.returncode == 0, result.stderr


@pytest.mark.slow
def test_the_command_of_the_documentation(launcher: Launcher, alone: Checkpoint) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [*torchrun, "-m", "trident", "train", "protonet.toml", "--data", "noise.store", "--out", "command"]
    result = subprocess.run(command, cwd=launcher.folder, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr
    assert result.stderr.count("trained 6 steps") == 1
    assert difference(alone, launcher.last("command")) < 0.05  # float32
    assert (launcher.folder / "command" / BEST).is_file()


@pytest.mark.soak
@pytest.mark.parametrize(("recipe", "doubles", "most"), [
    ("trident", True, 1e-8), ("trident", False, 0.1), ("protonet", True, 1e-8), ("protonet", False, 1e-2),
])  # fmt: skip
def test_20_steps_on_2_and_4_processes(launcher: Launcher, recipe: str, doubles: bool, most: float) -> None:
    settings = ("steps=20", "inner_steps=2") if recipe == "trident" else ("steps=20",)
    one, two, four = (launcher.end(n, recipe, f"{recipe}-{doubles}-{n}", *settings, doubles=doubles) for n in (0, 2, 4))
    differences = [difference(one, other) for other in (two, four)]
    print(f"{recipe}, {'float64' if doubles else 'float32'}: 2 processes {differences[0]:.1e}, 4: {differences[1]:.1e}")
    assert max(differences) < most


@pytest.mark.soak
def test_kills_at_random_times_lose_no_saved_step(launcher: Launcher) -> None:
    wanted = 20
    generator = random.Random(0)
    settings = ("steps=20", "save_every=3", "validate_every=10")
    undisturbed = launcher.end(2, "protonet", "soak", *settings)
    seconds, kills, again = 5.0, 0, 0
    for number in range(3 * wanted):
        kill, out = ([number % 2], generator.uniform(0, seconds)), f"soak-{number}"
        began = time.perf_counter()
        answer = launcher.train(2, "protonet", out, *settings, kill_later=[kill], restarts=1)
        assert answer.succeeded, answer.errors
        assert difference(undisturbed, launcher.last(out)) == 0
        if len(answer.errors) == 1:  # it was done before the kill
            seconds = min(seconds, time.perf_counter() - began)
            continue
        said = [int(step) for step in re.findall(r"^step (\d+)/20:", answer.errors[0][0], re.MULTILINE)]
        found = re.search(r"going on after step (\d+),|nothing was saved", answer.errors[1][0])
        assert found is not None, answer.errors
        done, saved = max(said, default=0), int(found.group(1) or 0)
        assert saved >= max(0, done - 1) // 3 * 3  # a step is announced before it is saved
        kills, again = kills + 1, again + max(0, done - saved)
        print(f"kill {kills}: process {kill[0][0]} after {kill[1]:.2f} s, step {done}; went on after step {saved}")
        if kills == wanted:
            break
    print(f"{kills} kills, {again} steps computed again")
    assert kills == wanted


@pytest.mark.soak
def test_one_kill_after_another(launcher: Launcher) -> None:
    """Of one process, of some, or of all; up to three times in a run. What is left is one run, with the same bits."""
    generator = random.Random(1)
    settings = ("steps=12", "save_every=3", "validate_every=4")
    undisturbed = launcher.end(3, "protonet", "often", *settings)
    restarts = 0
    for number in range(20):
        which = [sorted(generator.sample(range(3), generator.choice((1, 1, 2, 3)))) for _ in range(3)]
        kills, out = [(ranks, generator.uniform(0, 2.5)) for ranks in which], f"often-{number}"
        answer = launcher.train(3, "protonet", out, *settings, kill_later=kills, restarts=3)
        assert answer.succeeded, (kills, answer.errors)
        assert difference(undisturbed, launcher.last(out)) == 0, kills
        assert launcher.log(out, "validation") == launcher.log("often", "validation"), kills
        assert [line["step"] for line in launcher.log(out, "train")] == [*range(1, 13)], kills
        assert not list((launcher.folder / out).glob(".*")), kills
        restarts += len(answer.errors) - 1
    print(f"{restarts} restarts")
    assert restarts >= 30


@pytest.mark.soak
def test_torchrun_itself_is_killed(launcher: Launcher) -> None:
    """Its processes go on alone, or end. The next start says that somebody trains this run, or goes on with it."""
    generator = random.Random(2)
    settings = ("steps=12", "save_every=3", "validate_every=4")
    undisturbed = launcher.end(2, "protonet", "agent", *settings)
    for number in range(10):
        out = f"agent-{number}"
        order = ("train", "protonet.toml", "--data", "noise.store", "--out", out, *settings)
        with launcher_in(launcher.folder) as first:
            first.orders = 1000 * (number + 1)
            threading.Timer(generator.uniform(2, 6), first.process.kill).start()
            with suppress(ValueError, BrokenPipeError):  # there is no answer
                first.run(2, *order)
            first.process.wait()
        for _ in range(100):
            there = (launcher.folder / out / LAST).exists()
            answer = launcher.run(2, *(("train", "--resume", out) if there else order))
            if answer.succeeded:
                break
            assert "is training" in answer.error() or "already holds a run" in answer.error()
            time.sleep(0.2)
        assert difference(undisturbed, launcher.last(out)) == 0
        assert launcher.log(out, "validation") == launcher.log("agent", "validation")
        assert not list((launcher.folder / out).glob(".*"))
