"""Sorting files into class folders: nothing is lost or overwritten, and one failure does not stop the others."""

import errno
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from trident import files
from trident.errors import TridentError
from trident.files import temporary_path
from trident.labelling import sorting
from trident.labelling.sorting import carry_out, copies_elsewhere, plan

MOVER = """
import sys, time
from pathlib import Path
from trident.labelling.sorting import carry_out, plan

assert "torch" not in sys.modules
pile, target, labels = Path(sys.argv[1]), Path(sys.argv[2]), ("cat", "dog", sys.argv[3])
names = {path: labels[len(path.name) % 3] for path in sorted(pile.rglob("*.jpg"))}
steps = plan(names, target, moving=True)
print("begins", flush=True)
print(carry_out(steps, target, moving=True)[0], flush=True)
"""


def leftover(folder: Path, content: bytes, machine: str | None = None) -> Path:
    """A temporary file as a killed process leaves it."""
    path = folder / (files.temporary_path(folder).name if machine is None else f".trident-{machine}-{'0' * 16}.part")
    path.write_bytes(content)
    return path


@pytest.mark.parametrize("moving", [True, False])
@pytest.mark.parametrize("length", [249, 255])
def test_names_may_be_as_long_as_the_file_system_allows(tmp_path: Path, length: int, moving: bool) -> None:
    name = "é" * ((length - 4) // 2) + "x" * ((length - 4) % 2) + ".jpg"
    for folder, content in (("one", b"1"), ("two", b"2")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / name).write_bytes(content)
    steps = plan({tmp_path / folder / name: "cat" for folder in ("one", "two")}, tmp_path / "sorted", moving)
    assert carry_out(steps, tmp_path / "sorted", moving) == (2, [])
    found = sorted((tmp_path / "sorted" / "cat").iterdir())
    assert sorted(path.read_bytes() for path in found) == [b"1", b"2"]
    assert all(path.suffix == ".jpg" for path in found)


def test_a_failure_is_named_and_the_others_are_done(tmp_path: Path) -> None:
    labels = {}
    for name in ("a", "b", "c"):
        (tmp_path / f"{name}.png").write_bytes(name.encode())
        labels[tmp_path / f"{name}.png"] = "cat"
    steps = plan(labels, tmp_path / "sorted", moving=True)
    (tmp_path / "b.png").unlink()
    done, failures = carry_out(steps, tmp_path / "sorted", moving=True)
    assert done == 2
    assert len(failures) == 1 and str(tmp_path / "b.png") in failures[0]
    assert sorted(path.name for path in (tmp_path / "sorted" / "cat").iterdir()) == ["a.png", "c.png"]


@pytest.mark.parametrize("locks", [True, False])
@pytest.mark.parametrize("old", [True, False])
def test_leftovers_of_killed_processes_are_removed_and_other_files_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, locks: bool, old: bool
) -> None:
    def refused(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    folder = tmp_path / "sorted" / "cat"
    folder.mkdir(parents=True)
    ours, of_others = leftover(folder, b"half"), leftover(folder, b"half", "00000000")
    kept = [folder / ".a.png.123.part", folder / "notes.part"]
    for path in kept:
        path.write_bytes(b"mine")
    (tmp_path / "a.png").write_bytes(b"x")
    if old:
        monkeypatch.setattr(files, "_DAY", -1)
    if not locks:
        monkeypatch.setattr("fcntl.flock", refused)
    steps = plan({tmp_path / "a.png": "dog"}, tmp_path / "sorted", moving=False)
    assert ours.exists()  # announcing changes nothing
    with files.temporary_file(folder) as (at_work, _):
        assert carry_out(steps, tmp_path / "sorted", moving=False) == (1, [])
        with files.atomic_file(folder / "table.csv") as file:  # it follows the same rule
            file.write(b"path,label")
        assert at_work.exists() == (locks or not old)
    assert ours.exists() == (not locks and not old)
    assert of_others.exists() == (not old)
    assert all(path.exists() for path in kept)


def test_copying_again_copies_nothing_even_if_names_are_taken(tmp_path: Path) -> None:
    for folder, content in (("a", b"one"), ("b", b"two"), ("c", b"two")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "x.jpg").write_bytes(content)
    labels = {tmp_path / folder / "x.jpg": "cat" for folder in "abc"}
    for expected in (3, 0, 0):
        assert carry_out(plan(labels, tmp_path / "out", False), tmp_path / "out", False)[0] == expected
    assert sorted(path.name for path in (tmp_path / "out" / "cat").iterdir()) == ["x-2.jpg", "x-3.jpg", "x.jpg"]


def test_a_file_that_may_not_be_deleted_stays_where_it_was_and_nowhere_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "x.jpg").write_bytes(b"one")
    monkeypatch.setattr("os.access", lambda *_: False)
    done, (why,) = carry_out(plan({tmp_path / "x.jpg": "cat"}, tmp_path / "out", True), tmp_path / "out", True)
    assert done == 0 and "could not be deleted" in why
    assert (tmp_path / "x.jpg").is_file() and not list((tmp_path / "out" / "cat").iterdir())


@pytest.mark.parametrize("links", [True, False])
def test_a_new_name_stays_whatever_happens_to_the_old_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, links: bool
) -> None:
    source, delete, deleted = tmp_path / "x.jpg", Path.unlink, sorting._delete_moved
    changes: dict[str, Callable[[], object]] = {
        "has moved it": lambda: delete(source),
        "changed meanwhile": lambda: source.write_bytes(b"another"),
    }

    def move() -> str:
        source.write_bytes(b"one")
        done, (why,) = carry_out(plan({source: "cat"}, tmp_path / "out", True), tmp_path / "out", True)
        assert done == 0
        return why

    def refused(path: Path, missing_ok: bool = False) -> None:
        if path == source:
            raise PermissionError(13, "Permission denied")
        delete(path, missing_ok)

    if not links:
        monkeypatch.setattr("trident.labelling.sorting._linked", lambda source, place: False)
    for said, change in changes.items():
        with monkeypatch.context() as patch:
            patch.setattr(sorting, "_delete_moved", lambda *these, change=change: (change(), deleted(*these)))
            assert said in move()
    monkeypatch.setattr(Path, "unlink", refused)
    assert "Permission denied" in move() and source.is_file()
    names = ["x-2.jpg", "x.jpg"] if links else ["x-2.jpg", "x-3.jpg", "x.jpg"]  # a move by links goes on
    assert sorted(path.name for path in (tmp_path / "out" / "cat").glob("x*")) == names


def half_moved(source: Path, place: Path) -> Path:
    """As a move by links leaves it that is killed before it deletes the old name. Returns the temporary name."""
    source.parent.mkdir(exist_ok=True)
    place.parent.mkdir(parents=True, exist_ok=True)
    source.write_bytes(b"one")
    mark = temporary_path(place.parent, "link")
    for name in (mark, place):
        name.hardlink_to(source)
    return mark


def test_other_commands_leave_a_half_done_move_to_its_own(tmp_path: Path) -> None:
    out, source, other = tmp_path / "out", tmp_path / "pile" / "a.jpg", tmp_path / "pile 2" / "a.jpg"
    mark = half_moved(source, out / "cat" / "a.jpg")
    other.parent.mkdir()
    other.write_bytes(b"one")  # the same name and content, and another picture all the same
    assert carry_out(plan({other: "dog"}, out, True), out, True)[0] == 1
    assert (out / "dog" / "a.jpg").is_file() and mark.is_file() and source.is_file()
    assert carry_out(plan({source: "dog"}, out, True), out, True)[0] == 1  # with another label than before
    assert sorted(path.relative_to(tmp_path) for path in tmp_path.rglob("*.*")) == [
        Path("out/cat/a.jpg"),
        Path("out/dog/a.jpg"),
    ]


def test_a_half_done_move_without_its_temporary_name_is_finished(tmp_path: Path) -> None:
    out, source = tmp_path / "out", tmp_path / "pile" / "a.jpg"
    half_moved(source, out / "cat" / "a.jpg").unlink()
    assert carry_out(plan({source: "cat"}, out, True), out, True)[0] == 1
    assert not source.exists() and [path.name for path in (out / "cat").iterdir()] == ["a.jpg"]


def test_a_newer_file_of_the_same_size_and_time_is_not_deleted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, newer, delete = tmp_path / "a.jpg", tmp_path / "newer.jpg", sorting._delete_moved
    source.write_bytes(b"old")
    newer.write_bytes(b"new")
    shutil.copystat(source, newer)
    monkeypatch.setattr(sorting, "_delete_moved", lambda *these: (newer.replace(source), delete(*these)))
    assert "changed meanwhile" in carry_out(plan({source: "cat"}, tmp_path / "out", True), tmp_path / "out", True)[1][0]
    assert source.read_bytes() == b"new" and (tmp_path / "out" / "cat" / "a.jpg").read_bytes() == b"old"


def test_two_names_of_one_picture_are_two_pictures(tmp_path: Path) -> None:
    first, second = tmp_path / "a.jpg", tmp_path / "b.jpg"
    first.write_bytes(b"one")
    second.hardlink_to(first)
    for labels in ({first: "bus"}, {second: "dog"}):
        assert carry_out(plan(labels, tmp_path / "out", True), tmp_path / "out", True)[0] == 1
    assert (tmp_path / "out" / "bus" / "a.jpg").is_file() and (tmp_path / "out" / "dog" / "b.jpg").is_file()


@pytest.mark.parametrize("label", ["cat", "dog"])
def test_a_move_that_was_killed_half_way_is_finished_whatever_the_label_is_now(tmp_path: Path, label: str) -> None:
    folder = tmp_path / "sorted" / "cat"
    folder.mkdir(parents=True)
    for name in ("linked.png", "copied.png", "twin.png"):
        (tmp_path / name).write_bytes(name.encode())
    for name, machine in (("linked.png", None), ("copied.png", "00000000")):  # killed before the old name was deleted
        (folder / name).hardlink_to(leftover(folder, name.encode(), machine))
    (folder / "twin.png").write_bytes(b"twin.png")  # no half move: another file with the same content
    sources = [tmp_path / name for name in ("linked.png", "copied.png", "twin.png")]
    steps = plan(dict.fromkeys(sources, label), tmp_path / "sorted", moving=True)
    assert carry_out(steps, tmp_path / "sorted", moving=True) == (3, [])
    found = sorted(path.name for path in (tmp_path / "sorted").rglob("*.png"))
    assert found == sorted(["linked.png", "copied.png", "twin.png", "twin-2.png" if label == "cat" else "twin.png"])
    assert not any(source.exists() for source in sources)


def test_a_move_that_ctrl_c_stopped_half_way_is_finished(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stopped(*_: object) -> None:
        raise KeyboardInterrupt

    source, target = tmp_path / "a.png", tmp_path / "sorted"
    source.write_bytes(b"x")
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(sorting, "_delete_moved", stopped)
        carry_out(plan({source: "cat"}, target, moving=True), target, moving=True)
    assert carry_out(plan({source: "dog"}, target, moving=True), target, moving=True) == (1, [])
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == ["a.png"]
    assert not source.exists()


def test_a_picture_that_is_seen_on_two_ways_is_not_deleted(tmp_path: Path) -> None:
    (tmp_path / "pile").mkdir()
    (tmp_path / "sorted").mkdir()
    (tmp_path / "sorted" / "cat").symlink_to(tmp_path / "pile")
    source = tmp_path / "pile" / "a.png"
    source.write_bytes(b"x")
    (tmp_path / "elsewhere.png").hardlink_to(source)
    assert plan({source: "cat"}, tmp_path / "sorted", moving=True) == []
    carry_out(plan({source: "dog"}, tmp_path / "sorted", moving=True), tmp_path / "sorted", moving=True)
    assert (tmp_path / "sorted" / "dog" / "a.png").read_bytes() == b"x"


@pytest.mark.parametrize("label", ["../outside", "..", ".", "", "a/b", "/tmp/x"])
def test_classes_that_lead_out_of_the_folder_are_refused(tmp_path: Path, label: str) -> None:
    (tmp_path / "a.png").write_bytes(b"x")
    with pytest.raises(TridentError, match="cannot be the name of a folder"):
        plan({tmp_path / "a.png": label}, tmp_path / "sorted", moving=True)


def test_where_files_have_one_name_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(self: Path, target: Path) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(Path, "hardlink_to", refused)
    (tmp_path / "a.png").write_bytes(b"x")
    steps = plan({tmp_path / "a.png": "cat"}, tmp_path / "sorted", moving=True)
    assert carry_out(steps, tmp_path / "sorted", moving=True) == (1, [])
    assert [path.read_bytes() for path in (tmp_path / "sorted" / "cat").iterdir()] == [b"x"]
    assert not (tmp_path / "a.png").exists()


def killed_moves(folder: Path, target: Path, kills: int, n_pictures: int) -> None:
    """kill -9 at random moments of a move, with other labels at each start: every picture is there exactly once."""
    generator, pile = random.Random(1), folder / "pile"
    pile.mkdir()
    contents = [generator.randbytes(generator.choice([10] * 9 + [50_000])) for _ in range(n_pictures)]
    for number, content in enumerate(contents):
        (pile / ("x" * (number % 5) + f"{number}.jpg")).write_bytes(content)

    def call(label: str) -> list[str]:
        return [sys.executable, "-c", MOVER, str(pile), str(target), label]

    killed = 0
    for kill in range(kills):
        with subprocess.Popen(call(f"class {kill % 2}"), stdout=subprocess.PIPE) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == b"begins\n"
            time.sleep(generator.uniform(0, 0.01))
            killed += process.poll() is None
            process.kill()
        seen = {path.read_bytes() for path in [*pile.rglob("*.jpg"), *target.rglob("*.jpg")]}
        assert seen == set(contents)  # nothing is lost, and no file is incomplete
    assert killed > kills / 2
    last = subprocess.run(call("the end"), capture_output=True, text=True, check=True)
    assert last.stderr == ""
    assert not list(pile.rglob("*.jpg"))
    files = [path for path in target.rglob("*") if path.is_file()]
    assert sorted(path.read_bytes() for path in files) == sorted(contents)  # and no temporary file is left


def other_file_system(folder: Path) -> Path:
    """An empty folder on another file system, if the machine has one."""
    place = Path("/dev/shm")
    if not os.access(place, os.W_OK) or place.stat().st_dev == folder.stat().st_dev:
        pytest.skip("there is no second file system here")
    return Path(tempfile.mkdtemp(dir=place))


@pytest.mark.soak
@pytest.mark.parametrize("elsewhere", [False, True])
def test_thirty_kills_while_files_are_moved(tmp_path: Path, elsewhere: bool) -> None:
    target = other_file_system(tmp_path) if elsewhere else tmp_path / "sorted"
    try:
        killed_moves(tmp_path, target, kills=30, n_pictures=5000)
    finally:
        if elsewhere:
            shutil.rmtree(target)


def test_what_has_been_copied_is_not_copied_again(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(b"x")
    steps = plan({tmp_path / "a.png": "cat"}, tmp_path / "sorted", moving=False)
    carry_out(steps, tmp_path / "sorted", moving=False)
    assert plan({tmp_path / "a.png": "cat"}, tmp_path / "sorted", moving=False) == []
    (tmp_path / "a.png").write_bytes(b"y")
    assert plan({tmp_path / "a.png": "cat"}, tmp_path / "sorted", moving=False)[0][1].name == "a-2.png"


def test_copies_from_before_a_correction_are_found(tmp_path: Path) -> None:
    pile, target = tmp_path / "pile", tmp_path / "sorted"
    pile.mkdir()
    for name in ("a.png", "b.png", "c.png"):
        (pile / name).write_bytes(name.encode())
    before = {pile / "a.png": "red", pile / "b.png": "red", pile / "c.png": "blue"}
    carry_out(plan(before, target, moving=False), target, moving=False)
    (target / "blue" / "b.png").write_bytes(b"another picture of this name")
    (target / "red" / "a.png").rename(target / "red" / "a-2.png")  # as if another a.png had come first
    (target / "red" / "a.png").write_bytes(b"the first one")
    now = {pile / "a.png": "blue", pile / "b.png": "red", pile / "c.png": ""}
    assert copies_elsewhere(now, target) == [target / "red" / "a-2.png", target / "blue" / "c.png"]
    assert copies_elsewhere(before, target) == copies_elsewhere(now, tmp_path / "new") == []


def test_a_file_in_its_place_stays_there(tmp_path: Path) -> None:
    source = tmp_path / "cat" / "a.png"
    source.parent.mkdir()
    source.write_bytes(b"x")
    assert plan({source: "cat"}, tmp_path, moving=True) == []
    assert plan({source: "dog"}, tmp_path, moving=True) == [(source, tmp_path / "dog" / "a.png")]


def test_a_copy_that_fails_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.png").write_bytes(b"whole")

    def full(source: Path, place: Path) -> None:
        Path(place).write_bytes(b"wh")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("shutil.copyfile", full)
    monkeypatch.setattr("trident.labelling.sorting._linked", lambda source, place: False)
    steps = plan({tmp_path / "a.png": "cat"}, tmp_path / "sorted", moving=True)
    done, (why,) = carry_out(steps, tmp_path / "sorted", moving=True)
    assert done == 0 and str(tmp_path / "a.png") in why and "No space left on device" in why
    assert list((tmp_path / "sorted" / "cat").iterdir()) == []
    assert (tmp_path / "a.png").read_bytes() == b"whole"


def test_a_file_that_came_in_between_is_not_written_over(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(b"new")
    steps = plan({tmp_path / "a.png": "cat"}, tmp_path / "sorted", moving=True)
    (tmp_path / "sorted" / "cat").mkdir(parents=True)
    (tmp_path / "sorted" / "cat" / "a.png").write_bytes(b"old")
    done, (why,) = carry_out(steps, tmp_path / "sorted", moving=True)
    assert done == 0 and "it already exists" in why
    assert (tmp_path / "sorted" / "cat" / "a.png").read_bytes() == b"old"
    assert (tmp_path / "a.png").read_bytes() == b"new"
