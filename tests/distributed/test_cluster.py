"""Piles and grids on a Ray cluster of two local nodes, one of which is killed half-way: the same answers."""

import dataclasses
import os
import pickle
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from ablation_grids import CELLS, GLYPHS, Answer, assert_same_weights, grid_file, trained_steps
from commands import assert_one_line_error
from stand_in_backbone import NAME, PATH, PAUSE, SEEN, SLOW, save_pictures
from trident import ray_cluster
from trident.backbones.pretrained import BATCH, find_backbone
from trident.data.images import ImageFile
from trident.errors import TridentError
from trident.labelling import cluster_features

Here = Callable[..., Answer]
COLOURS = ("red", "green", "blue")
N_PICTURES = 600
# A lost node is noticed after two seconds; by default it takes longer.
HEALTH = {"health_check_initial_delay_ms": 0, "health_check_period_ms": 500, "health_check_failure_threshold": 4}


@pytest.fixture
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for colour in COLOURS:
        save_pictures(tmp_path / "support" / colour, {colour: 2}, first=900)
    save_pictures(tmp_path / "pile", {"red": 1, "green": 1})
    monkeypatch.chdir(tmp_path)
    return tmp_path


def call(backbone: str, query: str, *more: str) -> list[str]:
    return ["predict", "--backbone", backbone, "--support", "support", "--query", query, *more]


# Without a cluster


@pytest.mark.parametrize("command", ["predict", "ablate"])
def test_without_ray_there_is_one_line(
    trident_here: Here, folders: Path, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    arguments = call(NAME, "pile") if command == "predict" else ["ablate", "glyphs-2x2", "--out", "d"]
    assert_one_line_error(trident_here(*arguments, "--cluster", "auto"), "needs Ray", "trident-fewshot[cluster]")
    assert not (folders / "d").exists()


def test_conv4_has_no_features_to_spread(trident_here: Here, folders: Path) -> None:
    assert_one_line_error(trident_here(*call("conv4", "pile", "--cluster", "auto")), "--cluster computes features")


def test_nodes_must_see_the_same_files(folders: Path) -> None:
    sources = [ImageFile(path) for path in sorted((folders / "pile").iterdir())]
    pile = cluster_features._Pile(sys, find_backbone(NAME), sources, None, lambda done, total: None)
    keys = [source.key() for source in sources]

    def found(*what: bytes | str) -> dict[int, bytes]:
        return pile._keys([0, 1], {"keys": pickle.dumps(what)})

    assert found(*keys) == {0: keys[0], 1: keys[1]}
    with pytest.raises(TridentError, match=r"a node of the cluster cannot read x.png: no; this machine can"):
        found(keys[0], "x.png: no")
    with pytest.raises(TridentError, match=r"is another file on a node"):
        found(keys[1], keys[1])
    sources[1].file.unlink()
    assert found(keys[0], "x.png: no") == {0: keys[0]}  # here neither


@pytest.mark.cluster
@pytest.mark.parametrize(
    ("address", "words"),
    [
        ("127.0.0.1:9", "no Ray cluster answers at 127.0.0.1:9"),
        ("LISTENER", "is not a Ray cluster"),
        ("ray://head:10001", "HOST:PORT of the cluster's head node"),
        ("head", "HOST:PORT of the cluster's head node"),
    ],
)
def test_no_cluster_there(
    trident_here: Here, folders: Path, monkeypatch: pytest.MonkeyPatch, address: str, words: str
) -> None:
    pytest.importorskip("ray.data")
    monkeypatch.setattr(ray_cluster, "_ANSWER_SECONDS", 3)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = address.replace("LISTENER", f"127.0.0.1:{listener.getsockname()[1]}")
        start = time.monotonic()
        assert_one_line_error(trident_here(*call(NAME, "pile", "--cluster", address)), words)
        assert time.monotonic() - start < 10


# With one


@dataclasses.dataclass
class LocalCluster:
    """Ray on this machine, as if it were several."""

    cluster: Any
    seen: Path  # a line for every picture whose features were computed
    environment: dict[str, str]

    def start(self, folder: Path, *arguments: object) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "trident", *map(str, arguments), "--cluster", self.cluster.address]
        environment = os.environ | self.environment
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        return subprocess.Popen(command, cwd=folder, env=environment, text=True, **pipes)  # type: ignore[call-overload,no-any-return]

    def add_node(self) -> Any:
        return self.cluster.add_node(num_cpus=1, object_store_memory=80 * 2**20)

    def kill(self, node: Any) -> None:
        self.cluster.remove_node(node, allow_graceful=False)

    def n_seen(self) -> int:
        return len(self.seen.read_text().splitlines())


@pytest.fixture(scope="module")
def local_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    pytest.importorskip("ray.data")
    from ray.cluster_utils import Cluster

    seen = tmp_path_factory.mktemp("seen") / "seen"
    seen.touch()
    path = f"{PATH['PYTHONPATH']}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    environment = {"PYTHONPATH": path, PAUSE: "0.1", SEEN: str(seen), "OMP_NUM_THREADS": "1"}
    with pytest.MonkeyPatch.context() as patch:
        for key, value in {**environment, "RAY_USAGE_STATS_ENABLED": "0"}.items():
            patch.setenv(key, value)  # for the nodes
        head = {"num_cpus": 1, "object_store_memory": 80 * 2**20, "include_dashboard": False, "_system_config": HEALTH}
        cluster = Cluster(initialize_head=True, head_node_args=head)
        try:
            yield LocalCluster(cluster, seen, environment)
        finally:
            cluster.shutdown()


def wait_until(process: subprocess.Popen[str], reached: Callable[[], bool]) -> None:
    while not reached():
        assert process.poll() is None, process.communicate()
        time.sleep(0.02)


@pytest.mark.cluster
def test_a_node_is_killed_half_way_and_the_labels_are_those_of_one_machine(
    trident_here: Here, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, local_cluster: LocalCluster
) -> None:
    for colour in COLOURS:
        save_pictures(tmp_path / "support" / colour, {colour: 2}, first=900)
    save_pictures(tmp_path / "pile", dict.fromkeys(COLOURS, N_PICTURES // 3))
    (tmp_path / "pile" / "broken.png").write_bytes(b"no picture")
    paths = sorted(str(path.relative_to(tmp_path)) for path in (tmp_path / "pile").iterdir())
    (tmp_path / "list.txt").write_text("\n".join([*paths, "pile/gone.png"]))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(PAUSE, "0")  # here, not on the nodes
    alone = trident_here(*call(SLOW, "list.txt", "--json", "--all", "--no-cache"))
    assert alone.returncode == 2 and "gone.png: No such file" in alone.stderr and "broken.png" in alone.stderr

    local_cluster.seen.write_text("")
    node = local_cluster.add_node()
    monkeypatch.setenv("TRIDENT_CACHE", str(tmp_path / "cache"))
    arguments = call(SLOW, "list.txt", "--json", "--all")
    process = local_cluster.start(tmp_path, *arguments)
    wait_until(process, lambda: local_cluster.n_seen() >= N_PICTURES // 2)
    local_cluster.kill(node)
    out, err = process.communicate(timeout=120)
    assert (process.returncode, out) == (2, alone.stdout), err
    described, *skipped = alone.stderr.splitlines()
    lost = "cluster: 1 of 2 nodes were lost on the way; others did their work"
    said = [line for line in err.splitlines() if not line.startswith("labelling pictures: ")]  # progress
    assert said == [described, lost, *skipped]  # and nothing of Ray's own
    # All pictures once, those that the node had in hand twice, and batches to load the backbones.
    assert N_PICTURES <= local_cluster.n_seen() <= N_PICTURES + 6 * cluster_features._LEAST

    # A second time, nothing is computed: only the keys are asked for.
    before = local_cluster.n_seen()
    again = trident_here(*arguments, "--cluster", local_cluster.cluster.address)
    assert (again.returncode, again.stdout) == (2, alone.stdout), again.stderr
    assert (
        local_cluster.n_seen() <= before + 4 * BATCH
    )  # to load and probe the backbone, here and for the damaged picture
    assert again.stderr == alone.stderr


@pytest.mark.cluster
def test_a_node_is_killed_and_its_cells_go_on_elsewhere(
    trident_here: Here, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, local_cluster: LocalCluster
) -> None:
    # Long enough for Ray to notice that a node is lost before the cell's second try ends.
    grid_file(tmp_path, GLYPHS.replace("steps = 4", "steps = 16").replace("values = [3, 5]", "values = [3]"))
    monkeypatch.chdir(tmp_path)
    assert trident_here("ablate", "grid.toml", "--out", "alone").returncode == 0
    node = local_cluster.add_node()
    process = local_cluster.start(tmp_path, "ablate", "grid.toml", "--out", "spread")

    def two_are_at_work() -> bool:
        logs = [path for path in (tmp_path / "spread").glob("*/log.jsonl") if path.read_text().count('"train"') >= 2]
        return len(logs) >= 2

    wait_until(process, two_are_at_work)
    local_cluster.kill(node)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    assert "2 of 2 cells are finished" in out
    assert "resuming after step" in err and "1 of 2 nodes were lost" in err
    assert_same_weights(tmp_path / "alone", tmp_path / "spread", CELLS[:2])
    assert all(trained_steps(folder) == [*range(1, 17)] for folder in (tmp_path / "spread").glob("latents*"))
    assert (tmp_path / "alone" / "table.md").read_text() == (tmp_path / "spread" / "table.md").read_text()


def workers() -> list[int]:
    """The processes of the cluster that work."""
    parents: dict[int, list[tuple[int, str]]] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            name, rest = (folder / "stat").read_text().split("(", 1)[1].rsplit(")", 1)
            parents.setdefault(int(rest.split()[1]), []).append((int(folder.name), name))
    nodes = [number for number, name in parents.get(os.getpid(), []) if name == "raylet"]
    agents = ("ray::Dashboard", "ray::RuntimeEnv")  # a node ends with these, and the command's connection with its node
    found = [one for node in nodes for one in parents.get(node, [])]
    return [number for number, name in found if name.startswith("ray::") and not name.startswith(agents)]


@pytest.mark.cluster
@pytest.mark.soak
def test_workers_and_the_command_are_killed_at_random(
    trident_here: Here, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, local_cluster: LocalCluster
) -> None:
    """kill -9 of whatever process works: the same table, or one line, and then the same table."""
    for colour in COLOURS:
        save_pictures(tmp_path / "support" / colour, {colour: 2}, first=900)
    save_pictures(tmp_path / "pile", dict.fromkeys(COLOURS, 100))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(PAUSE, "0")  # here, not on the nodes
    alone = trident_here(*call(SLOW, "pile", "--json", "--all", "--no-cache"))
    generator, kills, said = random.Random(3), 0, []
    for number in range(6):
        monkeypatch.setenv("TRIDENT_CACHE", str(tmp_path / f"cache-{number}"))
        arguments = call(SLOW, "pile", "--json", "--all")
        local_cluster.seen.write_text("")
        process = local_cluster.start(tmp_path, *arguments)
        for _ in range(2):
            reached = local_cluster.n_seen() + generator.randrange(1, 100)
            while process.poll() is None and (local_cluster.n_seen() < reached or not workers()):
                time.sleep(0.05)
            if process.poll() is None:
                victims = workers() if number % 3 < 2 else []
                os.kill(generator.choice(victims or [process.pid]), signal.SIGKILL)
                kills += 1
        out, err = process.communicate(timeout=120)
        said.append(err)
        if process.returncode == 0:
            assert out == alone.stdout, err
        else:
            assert out == "" and "Traceback" not in err, err
            assert process.returncode == -signal.SIGKILL or err.splitlines()[-1].startswith("trident: error: "), err
        again = trident_here(*arguments)  # without the cluster, but with what it has stored
        assert (again.returncode, again.stdout) == (0, alone.stdout), again.stderr
    assert kills, said
