"""Any folder of class folders."""

from pathlib import Path

from data_pictures import picture, refusal, save, save_class_folders, save_split, table
from trident.data.prepare import prepare
from trident.data.readers import hashed_split
from trident.data.store import SPLITS


def test_folder_with_a_split_file(tmp_path: Path) -> None:
    root = save_class_folders(tmp_path / "pets", {"cat": 2, "dog": 1, "eel": 1})
    (root / "dog" / "notes.txt").write_text("not an image")
    (root / "dog" / "._000.png").write_bytes(b"what a Mac leaves behind")
    (root / ".cache").mkdir()
    split = save_split(tmp_path / "split.json", train=["dog", "cat"], test=["eel"])
    store = prepare("folder", root, tmp_path / "a.st", split_file=split)
    assert store.dataset == "pets"
    assert table(store) == {"cat": ("train", 2), "dog": ("train", 1), "eel": ("test", 1)}
    save_split(split, train=["dog", "cat"])
    assert "no split for class 'eel'" in refusal("folder", root, split)


def test_folder_with_split_folders(tmp_path: Path) -> None:
    root = save_class_folders(tmp_path / "pets", {"train/cat": 2, "train/dog": 1, "test/eel": 1})
    assert table(prepare("folder", root, tmp_path / "a.st")) == {
        "cat": ("train", 2),
        "dog": ("train", 1),
        "eel": ("test", 1),
    }
    save_class_folders(root, {"test/cat": 1})
    assert "class 'cat' is in both train and test" in refusal("folder", root)
    split = save_split(tmp_path / "split.json", train=["cat"], val=["dog"], test=["eel"])
    joined = prepare("folder", root, tmp_path / "b.st", split_file=split)
    assert table(joined) == {"cat": ("train", 3), "dog": ("val", 1), "eel": ("test", 1)}
    save_class_folders(root, {"fox": 1})
    assert "fox lies beside train/" in refusal("folder", root)


def test_folder_without_a_split(tmp_path: Path) -> None:
    names = [f"class {number}" for number in range(25)]
    store = prepare("folder", save_class_folders(tmp_path / "pets", dict.fromkeys(names, 1)), tmp_path / "a.st")
    assert {name: split for name, (split, _) in table(store).items()} == hashed_split(names)
    assert [sum(entry.split == split for entry in store.classes) for split in SPLITS] == [16, 4, 5]
    assert hashed_split(reversed(names)) == hashed_split(names)
    for count in range(3, 12):
        assert set(hashed_split(names[:count]).values()) == set(SPLITS)


def test_mistakes_in_folders(tmp_path: Path) -> None:
    assert "has no class folders" in refusal("folder", save(tmp_path / "flat" / "a.png", picture(0)).parent)
    root = save_class_folders(tmp_path / "pets", {"cat": 1, "dog": 1})
    assert "at least 3 are needed" in refusal("folder", root)
    (root / "eel").mkdir()
    message = refusal("folder", root)
    assert "class 'eel'" in message
    assert "has no images" in message
