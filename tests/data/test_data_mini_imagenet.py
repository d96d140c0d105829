"""miniImageNet in its three forms."""

import pickle
from pathlib import Path
from typing import Any

import numpy as np

from data_pictures import picture, python2_pickle, refusal, save, save_split, table
from trident.data.prepare import prepare

CLASSES = {"train": ["n02", "n01", "n05"], "val": ["n03"], "test": ["n09", "n04"]}
N_IMAGES = 3
EXPECTED = {name: (split, N_IMAGES) for split, names in CLASSES.items() for name in sorted(names)}


def pictures(name: str) -> list[np.ndarray]:
    return [picture(10 * int(name[1:]) + number) for number in range(N_IMAGES)]


def save_lists(root: Path) -> Path:
    for split, names in CLASSES.items():
        rows = ["filename,label"]
        for name in names:
            for number, pixels in reversed(list(enumerate(pictures(name)))):
                save(root / "images" / f"{name}{number:08d}.png", pixels)
                rows.append(f"{name}{number:08d}.png,{name}")
        (root / f"{split}.csv").write_text("\n".join(rows) + "\n")
    return root


def caches() -> dict[str, dict[str, Any]]:
    found = {}
    for split, names in CLASSES.items():
        numbers = {name: list(range(N_IMAGES * place, N_IMAGES * (place + 1))) for place, name in enumerate(names)}
        images = np.stack([pixels for name in names for pixels in pictures(name)])
        found[split] = {"image_data": images, "class_dict": numbers}
    return found


def save_caches(root: Path, found: dict[str, dict[str, Any]], python2: bool = False) -> Path:
    root.mkdir(exist_ok=True)
    for split, cache in found.items():
        content = python2_pickle(cache) if python2 else pickle.dumps(cache)
        (root / f"mini-imagenet-cache-{split}.pkl").write_bytes(content)
    return root


def save_folders(root: Path) -> Path:
    for names in CLASSES.values():
        for name in names:
            for number, pixels in enumerate(pictures(name)):
                part = "val" if number == 1 else "train"
                save(root / part / name / f"{number:08d}.png", pixels)
    save_split(root / "split.json", **CLASSES)
    return root


def test_all_forms_make_the_same_store(tmp_path: Path) -> None:
    sources = {
        "lists": save_lists(tmp_path / "lists"),
        "caches": save_caches(tmp_path / "caches", caches()),
        "python2": save_caches(tmp_path / "python2", caches(), python2=True),
        "folders": save_folders(tmp_path / "folders"),
    }
    stores = [prepare("mini-imagenet", source, tmp_path / f"{name}.st") for name, source in sources.items()]
    assert table(stores[0]) == EXPECTED
    assert np.array_equal(stores[0].images[:N_IMAGES], np.stack(pictures("n01")))
    assert len({store.fingerprint for store in stores}) == 1
    assert len({(tmp_path / f"{name}.st").read_bytes() for name in sources}) == 1


def test_folders_outside_the_split_are_left_out(tmp_path: Path) -> None:
    root = save_folders(tmp_path / "folders")
    (root / "split.json").unlink()
    split = save_split(tmp_path / "mine.json", train=["n01"], test=["n09"])
    store = prepare("mini-imagenet", root, tmp_path / "a.st", split_file=split)
    assert table(store) == {"n01": ("train", N_IMAGES), "n09": ("test", N_IMAGES)}


def test_mistakes_in_lists(tmp_path: Path) -> None:
    root = save_lists(tmp_path / "lists")

    def with_row(row: str) -> str:
        path = root / "val.csv"
        whole = path.read_text()
        path.write_text(whole + row + "\n")
        message = refusal("mini-imagenet", root)
        path.write_text(whole)
        assert str(path) in message or "in both" in message
        return message

    assert "listed in" in with_row("n0300000099.png,n03")
    assert "of class 'n03' too" in with_row("n0300000000.png,n99")
    assert "listed twice" in with_row("n0300000000.png,n03")
    assert "expected a file name and a label" in with_row("n0300000000.png")
    assert "outside the folder" in with_row("../lists/images/n0300000000.png,n03")
    save(root / "images" / "more.png", picture(0))
    assert "class 'n01' is in both train and val" in with_row("more.png,n01")
    (root / "images" / "n0100000001.png").unlink()
    (root / "images" / "n0100000002.png").unlink()
    assert "2 images listed in" in refusal("mini-imagenet", root)
    (root / "train.csv").write_text("n01,1\n")
    assert "filename,label" in refusal("mini-imagenet", root)
    (root / "test.csv").unlink()
    assert "has no test.csv" in refusal("mini-imagenet", root)
    (root / "images").rename(root / "pictures")
    assert "no folder images/" in refusal("mini-imagenet", root)


def test_mistakes_in_caches(tmp_path: Path) -> None:
    def with_class(name: str, numbers: Any) -> str:
        found = caches()
        found["val"]["class_dict"][name] = numbers
        return refusal("mini-imagenet", save_caches(tmp_path / "caches", found))

    assert "has image 3, but there are 3 images" in with_class("n03", [0, 3])
    assert "has image -1" in with_class("n03", [-1])
    assert "in class 'n03' too" in with_class("n08", [1])
    assert "not a list of image numbers" in with_class("n03", ["a"])
    assert "not a list of image numbers" in with_class("n03", None)
    assert "has no images" in with_class("n08", [])
    found = caches()
    found["val"]["class_dict"] = {"n01": [0, 1, 2]}
    assert "in both train and val" in refusal("mini-imagenet", save_caches(tmp_path / "caches", found))
    found["val"] = {"image_data": np.zeros((3, 84, 84)), "class_dict": {}}
    assert "expected one uint8 array" in refusal("mini-imagenet", save_caches(tmp_path / "caches", found))
    found["val"] = {"images": 1}
    assert "has no 'image_data'" in refusal("mini-imagenet", save_caches(tmp_path / "caches", found))
    (tmp_path / "caches" / "mini-imagenet-cache-val.pkl").unlink()
    assert "has no mini-imagenet-cache-val.pkl" in refusal("mini-imagenet", tmp_path / "caches")


def test_mistakes_in_folders(tmp_path: Path) -> None:
    root = save_folders(tmp_path / "folders")
    split = tmp_path / "split.json"
    save_split(split, train=["n01", "n77"], test=["n78"])
    assert "2 classes have no folder" in refusal("mini-imagenet", root, split)
    save_split(split, train=["n01"], test=["n01"])
    assert "in both train and test" in refusal("mini-imagenet", root, split)
    save_split(split, base=["n01"])
    assert "not of the form" in refusal("mini-imagenet", root, split)
    split.write_text("{")
    assert "not JSON" in refusal("mini-imagenet", root, split)
    assert "cannot read the split file" in refusal("mini-imagenet", root, tmp_path / "missing.json")
    (root / "split.json").unlink()
    assert "none of the forms" in refusal("mini-imagenet", root)
