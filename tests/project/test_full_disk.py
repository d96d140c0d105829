"""A full disk, on a file system of a few hundred kilobytes: one line each, and nothing is lost."""

import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from ablation_grids import Answer
from commands import assert_one_line_error
from tiny_run import make_tiny_run
from trident.labelling.feature_cache import FeatureCache
from trident.learning.checkpoint import BEST, LAST, load_checkpoint

Here = Callable[..., Answer]
SIZE = 512 * 1024


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    """A folder on a small file system of its own."""
    place = tmp_path / "small"
    place.mkdir()
    if shutil.which("mount") is None:
        pytest.skip("there is no mount command here")
    mount = ["mount", "-t", "tmpfs", "-o", f"size={SIZE}", "tmpfs", str(place)]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("this user may not mount a file system")
    yield place
    subprocess.run(["umount", "--lazy", str(place)], check=True)


def fill(folder: Path, leave: int = 0) -> None:
    """Fill the disk up to some bytes."""
    usage = shutil.disk_usage(folder)
    (folder / "filler").write_bytes(bytes(usage.free - leave))


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a store, a recipe and a run."""
    return make_tiny_run(tmp_path_factory.mktemp("made"))


def last_line(text: str) -> str:
    assert "Traceback" not in text
    return text.strip().splitlines()[-1]


def test_training(made: Path, small: Path, trident_here: Here, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(small.parent)
    shutil.copytree(made / "run", small / "run")
    before = {name: (small / "run" / name).read_bytes() for name in (LAST, BEST)}
    fill(small)
    call = ("train", "--resume", "small/run", "training.steps=8", "--data", made / "noise.store")
    found = trident_here(*call)
    assert found.returncode == 2
    assert last_line(found.stderr).startswith("trident: error: cannot write small/run/"), found.stderr
    assert "No space left on device" in last_line(found.stderr)
    assert {name: (small / "run" / name).read_bytes() for name in (LAST, BEST)} == before
    (small / "filler").unlink()
    assert not [path.name for path in (small / "run").iterdir() if path.suffix == ".part"]
    resumed = trident_here(*call)
    assert resumed.returncode == 0, resumed.stderr
    assert load_checkpoint(small / "run" / LAST).step == 8


def test_a_run_that_fills_the_disk(
    made: Path, small: Path, trident_here: Here, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(small.parent)
    fill(small, leave=100_000)
    call = ("--out", "small/run", "--data", made / "noise.store", "training.steps=100000", "training.save_every=1")
    found = trident_here("train", made / "tiny.toml", *call, "training.log_every=1")
    assert found.returncode == 2
    assert "No space left on device" in last_line(found.stderr), found.stderr
    if (small / "run" / LAST).exists():
        load_checkpoint(small / "run" / LAST)  # it is whole


def test_pictures_that_are_moved(
    small: Path, tmp_path: Path, trident_here: Here, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    generator = np.random.default_rng(0)
    for name, shade in (("support/a", 0), ("support/b", 150), ("pile", 60)):
        (tmp_path / name).mkdir(parents=True)
        for number in range(20 if name == "pile" else 1):
            pixels = generator.integers(shade, shade + 100, (130, 130, 3), np.uint8)
            Image.fromarray(pixels).save(tmp_path / name / f"{number}.png")
    contents = {path.read_bytes() for path in (tmp_path / "pile").iterdir()}
    call = ("predict", "--backbone", "conv4", "--support", "support", "--query", "pile", "--out", "labels.csv")
    assert trident_here(*call).returncode == 0
    found = trident_here("sort", "labels.csv", "--to", "small/sorted", "--move", "--yes")
    assert found.returncode == 2
    moved = list((small / "sorted").rglob("*.png"))
    kept = list((tmp_path / "pile").iterdir())
    assert moved and kept
    lines = found.stderr.splitlines()
    assert f"moved {len(moved)} of 20 pictures into small/sorted" in lines
    named = [line for line in lines if line.startswith("trident: cannot write pile/") and "No space left" in line]
    assert len(named) == len(kept)
    assert len(moved) + len(kept) == 20 and {path.read_bytes() for path in [*moved, *kept]} == contents
    assert not list(small.rglob("*.part")) and not list(small.rglob(".*.part"))


def test_stores_and_weights_files(made: Path, small: Path, trident_here: Here, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(small.parent)
    for number in range(40):
        for split, name in (("train", "a"), ("train", "b"), ("val", "c"), ("test", "d")):
            folder = small.parent / "pictures" / split / name
            folder.mkdir(parents=True, exist_ok=True)
            Image.new("RGB", (30, 30), (number, 0, 0)).save(folder / f"{number}.png")
    prepare = (
        "data",
        "prepare",
        "folder",
        "--from",
        "pictures",
        "--to",
        "small/p.store",
        "--image-size",
        84,
        "--workers",
        1,
    )
    assert_one_line_error(trident_here(*prepare), "small/p.store", "it needs 3.4 MB")
    monkeypatch.setattr("trident.data.resuming.check_space", lambda *_: None)  # as if it were filled meanwhile
    assert_one_line_error(trident_here(*prepare), "small/p.store", "No space left on device")
    assert list(small.iterdir()) == []
    fill(small)
    exported = trident_here("export", made / "run", "--to", "small/weights.safetensors")
    assert_one_line_error(exported, "small/weights.safetensors", "No space left on device")
    assert [path.name for path in small.iterdir()] == ["filler"]


@pytest.mark.soak
def test_the_report(made: Path, small: Path, trident_here: Here, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(small.parent)
    fill(small)
    call = ("--tasks", 4, "--data", made / "noise.store", "--out", "small/report")
    found = trident_here("report", made / "run", *call)
    assert found.returncode == 2
    assert "No space left on device" in last_line(found.stderr), found.stderr
    assert not list(small.rglob("*.part"))


def test_the_feature_cache(small: Path) -> None:
    cache = FeatureCache(small / "cache")
    cache.put("network", {b"first": np.arange(100, dtype=np.float32)})
    fill(small)
    for number in range(20):
        cache.put("network", {b"%d" % number: np.ones(10_000, np.float32)})
    assert cache.problem is not None and "full" in cache.problem and "\n" not in cache.problem
    again = FeatureCache(small / "cache")
    assert np.array_equal(again.get("network", [b"first"], 100)[b"first"], np.arange(100, dtype=np.float32))
