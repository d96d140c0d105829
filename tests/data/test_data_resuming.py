"""`trident data prepare` in several processes, after kills, Ctrl-C and damage: always the same bytes in the end."""

import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import pytest

from ablation_grids import Answer
from commands import assert_one_line_error
from data_pictures import save_class_folders
from stand_in_backbone import NAME
from trident.backbones.feature_store import prepare_features
from trident.backbones.pretrained import find_backbone
from trident.data import decoding_process, resuming
from trident.data.decoding_process import decoded
from trident.data.images import DatasetImage, ImageFile, Target, UnreadableImageError
from trident.data.prepare import prepare
from trident.errors import TridentError
from trident.files import locked

Here = Callable[..., Answer]
CLASSES = {"train/ant": 60, "train/bee": 50, "val/cow": 40, "test/dog": 50}
TOTAL = sum(CLASSES.values())
# The command, which saves after each image from the 115th on, and sends itself a signal after the 120th.
PROGRAM = """
import os, signal, sys
from trident.cli import console, main
from trident.data import resuming
resuming.SAVE_SECONDS = 1000
count = console.Counter.__call__
def counting(self, done, total):
    count(self, done, total)
    if done == 114:
        resuming.SAVE_SECONDS = 0
    if done == 120:
        os.kill(os.getpid(), signal.{})
console.Counter.__call__ = counting
signal.signal(signal.SIGINT, signal.default_int_handler)  # tests may be a background job, where it is turned off
if __name__ == "__main__":
    main()
"""


@pytest.fixture(scope="module")
def pets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_class_folders(tmp_path_factory.mktemp("data") / "pets", CLASSES, 20)


@pytest.fixture(scope="module")
def expected(pets: Path) -> bytes:
    """The store as one undisturbed process writes it."""
    prepare("folder", pets, pets.parent / "expected.store", image_size=20)
    return (pets.parent / "expected.store").read_bytes()


def call(pets: Path, target: Path, size: int = 20) -> list[str]:
    paths = ["--from", str(pets), "--to", str(target)]
    return ["data", "prepare", "folder", *paths, "--image-size", str(size), "--workers", "2"]


def stopped_by(name: str, pets: Path, target: Path) -> "subprocess.CompletedProcess[str]":
    """The command, stopped by a signal after image 120; all its processes have ended."""
    program = target.with_name("program.py")
    program.write_text(PROGRAM.format(name))
    process = subprocess.Popen(
        [sys.executable, str(program), *call(pets, target)], stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    said = process.communicate(timeout=60)[1]
    program.unlink()
    for _ in range(200):
        try:
            os.killpg(process.pid, 0)
        except ProcessLookupError:
            return subprocess.CompletedProcess([], process.returncode, "", said)
        time.sleep(0.05)
    raise AssertionError("some of its processes live on")


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_store_that_another_process_has_just_written_is_kept(
    tmp_path: Path, pets: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was not there when this process began, but it is when this one gets the lock."""
    target = tmp_path / "pets.store"

    def late(journal: BinaryIO) -> bool | None:
        target.write_bytes(b"of the other process")
        return locked(journal)

    monkeypatch.setattr(resuming, "locked", late)
    with pytest.raises(TridentError, match=r"pets.store exists already"):
        prepare("folder", pets, target, image_size=20)
    assert target.read_bytes() == b"of the other process"
    assert names(tmp_path) == ["pets.store"]


def test_the_journal_of_a_process_that_was_killed_at_its_end_is_deleted(tmp_path: Path, pets: Path) -> None:
    for name in ("pets.store", ".pets.store.journal"):
        (tmp_path / name).write_bytes(b"whole")
    with pytest.raises(TridentError, match=r"pets.store exists already"):
        prepare("folder", pets, tmp_path / "pets.store", image_size=20)
    assert names(tmp_path) == ["pets.store"]


@pytest.mark.slow
def test_killed_and_resumed(tmp_path: Path, pets: Path, expected: bytes, trident_here: Here) -> None:
    target = tmp_path / "pets.store"
    assert stopped_by("SIGKILL", pets, target).returncode == -signal.SIGKILL
    assert names(tmp_path) == [".pets.store.journal", ".pets.store.part"]
    result = trident_here(*call(pets, target))
    assert result.returncode == 0, result.stderr
    first, last = result.stderr.splitlines()
    assert first == f"going on after 120 of {TOTAL}, which an earlier run has done"
    assert last == f"wrote {target}: {TOTAL} images of 4 classes"
    assert names(tmp_path) == ["pets.store"]
    assert target.read_bytes() == expected


def test_ctrl_c_says_how_to_go_on(tmp_path: Path, pets: Path, expected: bytes) -> None:
    target = tmp_path / "pets.store"
    stopped = stopped_by("SIGINT", pets, target)
    assert stopped.returncode == 130, stopped.stderr
    assert stopped.stderr.splitlines()[-1] == "trident: stopped; the same command goes on where it stopped"
    assert "Traceback" not in stopped.stderr
    resumed: list[tuple[int, int]] = []
    prepare("folder", pets, target, image_size=20, on_resume=lambda *counts: resumed.append(counts))
    assert len(resumed) == 1 and 119 <= resumed[0][0] <= 120
    assert target.read_bytes() == expected


def interrupted(pets: Path, target: Path, at: int) -> None:
    def stop(done: int, total: int) -> None:
        if done == at:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prepare("folder", pets, target, image_size=20, progress=stop)


def resumed_after(pets: Path, target: Path, size: int = 20) -> int:
    """How many images a second run did not decode again."""
    counts: list[int] = []
    prepare("folder", pets, target, image_size=size, on_resume=lambda done, total: counts.append(done))
    return sum(counts)


@pytest.mark.parametrize("change", ["size", "time", "file", "journal", "part"])
def test_other_inputs_start_afresh(tmp_path: Path, change: str) -> None:
    pets = save_class_folders(tmp_path / "pets", {"train/a": 3, "val/b": 3, "test/c": 3}, 20)
    target, size = tmp_path / "pets.store", 20
    interrupted(pets, target, 6)
    if change == "size":
        size = 24
    elif change == "time":
        os.utime(pets / "test" / "c" / "000.png", (1, 1))
    elif change == "file":
        (pets / "test" / "c" / "002.png").unlink()
    else:
        (tmp_path / f".pets.store.{change}").unlink()
    assert resumed_after(pets, target, size) == 0
    found = target.read_bytes()
    prepare("folder", pets, tmp_path / "other.store", image_size=size)
    assert found == (tmp_path / "other.store").read_bytes()
    assert names(tmp_path) == ["other.store", "pets", "pets.store"]


@pytest.mark.parametrize(
    ("damage", "kept"), [("flip", 40), ("cut", 40), ("flip early", 0), ("torn journal", 40), ("more", 80)]
)
def test_only_intact_images_are_taken_over(tmp_path: Path, pets: Path, expected: bytes, damage: str, kept: int) -> None:
    """The journal has entries after 40 and after 80 images."""
    target = tmp_path / "pets.store"
    for stop in (40, 80):
        interrupted(pets, target, stop)
    part, journal = tmp_path / ".pets.store.part", tmp_path / ".pets.store.journal"
    entries = [json.loads(line) for line in journal.read_text().splitlines()][1:]
    assert [entry["images"] for entry in entries] == [40, 80]
    content = bytearray(part.read_bytes())
    if damage == "cut":
        part.write_bytes(content[:-1])
    elif damage == "more":
        part.write_bytes(content + b"1" * 1000)
    elif damage == "torn journal":
        journal.write_text(journal.read_text()[:-20])
    else:
        content[-1 if damage == "flip" else -80 * 1200] ^= 1
        part.write_bytes(content)
    assert resumed_after(pets, target) == kept
    assert target.read_bytes() == expected


def test_features_are_resumed_too(tmp_path: Path, pets: Path) -> None:
    backbone = find_backbone(NAME)
    prepare_features("folder", pets, tmp_path / "whole.store", backbone)

    def stop(done: int, total: int) -> None:
        if done >= 64:
            raise KeyboardInterrupt

    counts: list[int] = []
    with pytest.raises(KeyboardInterrupt):
        prepare_features("folder", pets, tmp_path / "a.store", backbone, progress=stop)
    prepare_features("folder", pets, tmp_path / "a.store", backbone, on_resume=lambda done, total: counts.append(done))
    assert counts == [64]
    assert (tmp_path / "a.store").read_bytes() == (tmp_path / "whole.store").read_bytes()


def test_two_commands_do_not_write_one_file(tmp_path: Path, pets: Path, trident_here: Here) -> None:
    target = tmp_path / "pets.store"
    with (tmp_path / ".pets.store.journal").open("w") as journal:
        fcntl.flock(journal, fcntl.LOCK_EX)
        assert_one_line_error(trident_here(*call(pets, target)), "another process is writing", str(target))
    assert trident_here(*call(pets, target)).returncode == 0


# Several processes


def test_unreadable_images_are_counted_by_all_processes(tmp_path: Path) -> None:
    pets = save_class_folders(tmp_path / "pets", CLASSES, 20)
    (pets / "val" / "cow" / "007.png").write_bytes(b"no image")
    (pets / "test" / "dog" / "030.png").unlink()
    (pets / "test" / "dog" / "030.png").symlink_to(pets / "train" / "ant" / "000.png")
    (pets / "test" / "dog" / "031.png").write_bytes(b"")
    said = []
    for workers in (1, 2):
        with pytest.raises(TridentError) as raised:
            prepare("folder", pets, tmp_path / "a.store", image_size=20, workers=workers)
        said.append(str(raised.value))
    assert said[0] == said[1]
    assert said[0].startswith(f"2 images cannot be read, the first is {pets / 'val' / 'cow' / '007.png'}: ")
    assert names(tmp_path) == ["pets"]


@dataclass(frozen=True)
class Counted(DatasetImage):
    """Counts how often images are handed out."""

    path: Path
    handed_out: list[Path]

    name, file = "counted", Path()

    def content(self) -> bytes:
        self.handed_out.append(self.path)
        if len(self.handed_out) == 5:
            raise ValueError("it is lost")
        return ImageFile(self.path).content()


def test_few_images_are_in_memory(pets: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However slow the reader is. An image that cannot be loaded for another process is told in its place."""
    monkeypatch.setattr(decoding_process, "_BATCH_BYTES", 2 * 20 * 20 * 3)
    handed_out: list[Path] = []
    paths = sorted(pets.rglob("*.png"))
    results = decoded([Counted(path, handed_out) for path in paths], Target(20, 3), 2)
    found = [next(results)]
    time.sleep(0.3)
    assert len(handed_out) <= 2 * (2 * 3 + 1)
    found += results
    assert len(found) == len(handed_out) == TOTAL
    assert [isinstance(one, UnreadableImageError) for one in found] == [place == 4 for place in range(TOTAL)]
    assert str(found[4]) == "counted: it is lost"


def test_zips_and_pickles_in_several_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The parent reads them, and the others decode."""
    from test_data_omniglot import save_omniglot, zip_folder
    from test_data_tiered_imagenet import save_tiered, tiered

    monkeypatch.setattr(decoding_process, "_BATCH_BYTES", 1)
    zipped = zip_folder(save_omniglot(tmp_path, "images_background", ["A", "B", "C"]))
    pickled = save_tiered(tmp_path / "tiered", tiered())
    for name, source in (("omniglot", zipped), ("tiered-imagenet", pickled)):
        for workers in (1, 2):
            prepare(name, source, tmp_path / f"{name}-{workers}.store", workers=workers)
        assert (tmp_path / f"{name}-1.store").read_bytes() == (tmp_path / f"{name}-2.store").read_bytes()
