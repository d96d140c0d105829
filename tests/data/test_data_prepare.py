"""Preparing a store as a whole: progress, sizes, damaged images, a full disk, and what is told about a store."""

import ast
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from data_pictures import picture, save, save_class_folders
from trident.data import READERS
from trident.data.prepare import prepare
from trident.data.store import describe, open_store, verify_fingerprint
from trident.errors import TridentError

CLASSES = {"train/ant": 3, "train/bee": 2, "val/cow": 2, "test/dog": 1}


@pytest.fixture
def pets(tmp_path: Path) -> Path:
    return save_class_folders(tmp_path / "pets", CLASSES)


def test_prepare_describes_and_verifies(tmp_path: Path, pets: Path) -> None:
    calls: list[tuple[int, int]] = []
    store = prepare("folder", pets, tmp_path / "pets.st", progress=lambda done, total: calls.append((done, total)))
    assert calls == [(done, 8) for done in range(1, 9)]
    assert np.array_equal(store.images[3], picture(100))
    assert describe(store) == {
        "dataset": "pets",
        "image_size": 84,
        "channels": 3,
        "images": 8,
        "splits": {
            "train": {"classes": 2, "images": 5, "fewest_images_in_a_class": 2, "most_images_in_a_class": 3},
            "val": {"classes": 1, "images": 2, "fewest_images_in_a_class": 2, "most_images_in_a_class": 2},
            "test": {"classes": 1, "images": 1, "fewest_images_in_a_class": 1, "most_images_in_a_class": 1},
        },
        "fingerprint": store.fingerprint,
        "checksums": 1,
    }
    assert verify_fingerprint(store)
    content = bytearray((tmp_path / "pets.st").read_bytes())
    content[-1] ^= 1
    (tmp_path / "damaged.st").write_bytes(content)
    assert not verify_fingerprint(open_store(tmp_path / "damaged.st"))


def test_image_size_can_be_chosen(tmp_path: Path, pets: Path) -> None:
    assert prepare("folder", pets, tmp_path / "a.st", image_size=32).images.shape == (8, 32, 32, 3)
    for size in (0, 15, 5000):
        with pytest.raises(TridentError, match="is not between 16 and 1024"):
            prepare("folder", pets, tmp_path / "b.st", image_size=size)


def test_all_unreadable_images_are_counted(tmp_path: Path, pets: Path) -> None:
    jpeg = save(pets / "train" / "bee" / "photo.jpg", picture(1, 200))
    jpeg.write_bytes(jpeg.read_bytes()[:-300])
    (pets / "val" / "cow" / "000.png").write_bytes(b"")
    (pets / "test" / "dog" / "page.png").write_text("<html>")
    with pytest.raises(TridentError) as raised:
        prepare("folder", pets, tmp_path / "a.st")
    message = str(raised.value)
    assert message.startswith(f"3 images cannot be read, the first is {jpeg}: ")
    assert "truncated" in message
    assert "\n" not in message
    assert list(tmp_path.iterdir()) == [pets]


def test_no_store_is_replaced(tmp_path: Path, pets: Path) -> None:
    (tmp_path / "a.st").write_bytes(b"another dataset")
    with pytest.raises(TridentError, match=r"a.st exists already: choose another name, or delete it first"):
        prepare("folder", pets, tmp_path / "a.st")
    assert (tmp_path / "a.st").read_bytes() == b"another dataset"


def test_a_full_disk_leaves_nothing_behind(tmp_path: Path, pets: Path) -> None:
    program = (
        "import resource, sys; from pathlib import Path; resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))\n"
        "from trident.data.prepare import prepare; from trident.errors import TridentError\n"
        "try: prepare('folder', Path(sys.argv[1]), Path(sys.argv[2]))\n"
        "except TridentError as error: print(error)"
    )
    command = [sys.executable, "-c", program, str(pets), str(tmp_path / "a.st")]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    assert result.stdout == f"cannot write {tmp_path / 'a.st'}: File too large\n"
    assert list(tmp_path.iterdir()) == [pets]


def test_mistakes_in_the_command(tmp_path: Path, pets: Path) -> None:
    with pytest.raises(TridentError, match="no dataset 'mini_imagnet': did you mean 'mini-imagenet'"):
        prepare("mini_imagnet", pets, tmp_path / "a.st")
    with pytest.raises(TridentError, match="no dataset 'xyzzy': it can be mini-imagenet, tiered"):
        prepare("xyzzy", pets, tmp_path / "a.st")
    with pytest.raises(TridentError, match="it exists and is not an ordinary file"):
        prepare("folder", pets, tmp_path)
    with pytest.raises(TridentError, match="does not exist"):
        prepare("folder", pets, tmp_path / "missing" / "a.st")
    for name in READERS:
        with pytest.raises(TridentError, match="missing does not exist: expected the folder"):
            prepare(name, tmp_path / "missing", tmp_path / "a.st")
        with pytest.raises(TridentError, match="is not a"):
            prepare(name, pets / "train" / "ant" / "000.png", tmp_path / "a.st")
    for name in ("tiered-imagenet", "cub", "omniglot", "cifar-fs"):
        with pytest.raises(TridentError, match="takes no split file"):
            prepare(name, pets, tmp_path / "a.st", split_file=tmp_path / "split.json")


def test_reading_data_needs_no_torch() -> None:
    for path in (Path(__file__).parents[2] / "src" / "trident" / "data").glob("*.py"):
        for statement in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in statement.names] if isinstance(statement, ast.Import) else []
            names += [statement.module or ""] if isinstance(statement, ast.ImportFrom) else []
            assert not [name for name in names if name.startswith(("torch", "trident.nn"))], path
