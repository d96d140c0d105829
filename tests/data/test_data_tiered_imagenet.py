"""tieredImageNet, and pickles taken one at a time."""

import pickle
from pathlib import Path
from typing import Any
from weakref import ref

import numpy as np

from data_pictures import picture, png, python2_pickle, refusal, table
from trident.data.benchmarks import PickleCache
from trident.data.prepare import prepare
from trident.data.store import SPLITS


def tiered() -> dict[str, Any]:
    labels = {"train": [1, 0, 1, 0], "val": [0, 0], "test": [0, 1, 1]}
    names = {"train": ["wren", "ant"], "val": ["fox"], "test": ["oak", "elm"]}
    found: dict[str, Any] = {}
    for place, split in enumerate(SPLITS):
        found[f"{split}_images_png"] = [png(picture(10 * place + number)) for number in range(len(labels[split]))]
        found[f"{split}_labels"] = {
            "label_specific": np.array(labels[split], np.int32),
            "label_general": np.zeros(len(labels[split]), np.int32),
            "label_specific_str": names[split],
        }
    return found


def save_tiered(root: Path, content: dict[str, Any], python2: bool = False) -> Path:
    root.mkdir(exist_ok=True)
    for name, value in content.items():
        (root / f"{name}.pkl").write_bytes(python2_pickle(value) if python2 else pickle.dumps(value))
    return root


def test_tiered_imagenet(tmp_path: Path) -> None:
    store = prepare("tiered-imagenet", save_tiered(tmp_path / "tiered", tiered()), tmp_path / "a.st")
    expected = {"ant": ("train", 2), "wren": ("train", 2), "fox": ("val", 2), "elm": ("test", 2), "oak": ("test", 1)}
    assert table(store) == expected
    assert list(table(store)) == list(expected)
    for image, seed in zip(store.images, (0, 2, 1, 3, 10, 11, 21, 22, 20), strict=True):
        assert np.array_equal(image, picture(seed))
    python2 = save_tiered(tmp_path / "python2", tiered(), python2=True)
    assert prepare("tiered-imagenet", python2, tmp_path / "b.st").fingerprint == store.fingerprint
    packed = tiered()
    packed["val_images_png"] = np.array([*packed["val_images_png"], None], dtype=object)[:-1]  # an array of arrays
    packed["test_images_png"] = [array.reshape(-1, 1) for array in packed["test_images_png"]]  # as OpenCV encodes
    packed_root = save_tiered(tmp_path / "packed", packed)
    assert prepare("tiered-imagenet", packed_root, tmp_path / "c.st").fingerprint == store.fingerprint


def test_mistakes_in_tiered_imagenet(tmp_path: Path) -> None:
    root = tmp_path / "tiered"
    content = tiered()
    content["val_labels"]["label_specific"][1] = 1
    assert "label_specific has 1, but label_specific_str names 1" in refusal(
        "tiered-imagenet", save_tiered(root, content)
    )
    content = tiered()
    content["val_labels"]["label_specific_str"] = ["ant"]
    assert "class 'ant' is in both train and val" in refusal("tiered-imagenet", save_tiered(root, content))
    content["val_labels"]["label_specific_str"] = ["fox", "cat"]
    assert "class 'cat' of split val has no images" in refusal("tiered-imagenet", save_tiered(root, content))
    content["val_labels"]["label_specific"] = np.zeros(2)
    assert "whole numbers" in refusal("tiered-imagenet", save_tiered(root, content))
    content = tiered()
    content["test_images_png"].pop()
    assert "has 2 images for 3 labels" in refusal("tiered-imagenet", save_tiered(root, content))
    content["test_images_png"] += [np.zeros(50, np.uint8)]
    content["train_images_png"][3] = 17
    message = refusal("tiered-imagenet", save_tiered(root, content))
    assert message.startswith("2 images cannot be read, the first is")
    assert "train_images_png.pkl: image 3: it is a int" in message
    (root / "val_images_png.pkl").unlink()
    assert "has no val_images_png.pkl" in refusal("tiered-imagenet", root)


def test_one_pickle_is_in_memory_at_a_time() -> None:
    class Images(list[int]):
        """A list that can be watched."""

    loaded: list[ref[Images]] = []

    def load(path: Path) -> Images:
        assert all(other() is None for other in loaded)
        images = Images([1, 2])
        loaded.append(ref(images))
        return images

    cache = PickleCache(load)
    for name in ("a", "a", "b", "a"):
        assert cache.images(Path(name))[1] == 2
    assert len(loaded) == 3
