"""CIFAR-FS from folders and pickles."""

import pickle
from pathlib import Path

import numpy as np
import pytest

from data_pictures import picture, python2_pickle, refusal, save_class_folders, table
from trident.data.prepare import prepare
from trident.data.store import SPLITS


def save_cifar(root: Path) -> Path:
    save_class_folders(root / "data", {"apple": 2, "bear": 2, "clock": 2, "dolphin": 2}, size=32)
    lists = root / "splits" / "bertinetto"
    lists.mkdir(parents=True)
    for split, names in {"train": "dolphin\napple\n", "val": "clock\n", "test": "bear\n"}.items():
        (lists / f"{split}.txt").write_text(names)
    return root


def test_cifar_fs(tmp_path: Path) -> None:
    save_cifar(tmp_path / "cifar100")
    store = prepare("cifar-fs", tmp_path, tmp_path / "a.st")
    assert store.images.shape == (8, 32, 32, 3)
    assert table(store) == {"apple": ("train", 2), "dolphin": ("train", 2), "clock": ("val", 2), "bear": ("test", 2)}
    assert prepare("cifar-fs", tmp_path / "cifar100", tmp_path / "b.st").fingerprint == store.fingerprint


def test_mistakes_in_cifar_fs(tmp_path: Path) -> None:
    root = save_cifar(tmp_path / "cifar100")
    lists = root / "splits" / "bertinetto"
    (lists / "val.txt").write_text("clock\napple\n")
    assert "class 'apple' is in both train and val" in refusal("cifar-fs", root)
    (lists / "val.txt").write_text("clock\nlion\n")
    assert "1 class has no folder" in refusal("cifar-fs", root)
    (lists / "val.txt").write_text("")
    assert "no split for class 'clock'" in refusal("cifar-fs", root)
    (lists / "val.txt").unlink()
    assert "has no val.txt" in refusal("cifar-fs", root)
    (root / "data").rename(root / "date")
    assert "has no folder data/" in refusal("cifar-fs", root)
    assert "is not CIFAR-FS" in refusal("cifar-fs", root / "date")


@pytest.mark.parametrize("python2", [False, True])
def test_cifar_fs_pickles(tmp_path: Path, python2: bool) -> None:
    root = tmp_path / "pickles"
    root.mkdir()

    def save_part(split: str, labels: list[int]) -> None:
        content = {"data": np.stack([picture(label, 32) for label in range(4)]), "labels": labels}
        (root / f"CIFAR_FS_{split}.pickle").write_bytes(python2_pickle(content) if python2 else pickle.dumps(content))

    for split in SPLITS:
        save_part(split, [7, 5, 7, 7])
    store = prepare("cifar-fs", root, tmp_path / "a.st")
    assert table(store) == {f"{split}-{label}": (split, n) for split in SPLITS for label, n in (("005", 1), ("007", 3))}
    assert np.array_equal(store.images[0], picture(1, 32))
    save_part("val", [1, 2, 3])
    assert "3 labels for 4 images" in refusal("cifar-fs", root)
    (root / "CIFAR_FS_val.pickle").unlink()
    assert "has no CIFAR_FS_val.pickle" in refusal("cifar-fs", root)
